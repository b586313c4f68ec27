import pytest
import torch

from headmix_vision.ops import TokenBlocks

PARTITIONS = [
    ((16, 16), (4, 4), 0),
    ((14, 14), (4, 4), 0),
    ((14, 14), (4, 4), 1),
    ((7, 5), (2, 3), 2),
    ((3, 5, 4), (2, 2, 3), 1),
    ((1, 1), (1, 1), 0),
    ((15,), (4,), 0),
    ((2, 2), (2, 2), 7),
]


@pytest.mark.parametrize(("grid", "block_grid", "prefix"), PARTITIONS)
def test_tables_are_a_partition_in_raster_order(grid, block_grid, prefix):
    blocks = TokenBlocks.from_grid(grid, block_grid, prefix)
    tables = blocks.tables(torch.empty(0))
    members = [row[row >= 0] for row in tables.tokens]

    assert torch.equal(torch.cat(members).sort().values, torch.arange(blocks.num_tokens))
    assert tables.tokens.shape == (blocks.num_blocks, blocks.max_block_size)
    assert blocks.max_block_size == max(len(m) for m in members)
    assert torch.equal(tables.tokens.flatten()[tables.slot_of_token], torch.arange(blocks.num_tokens))
    for block, tokens in enumerate(members):
        assert torch.equal(tokens, tokens.sort().values)
        assert (tables.block_of_token[tokens] == block).all()
    assert blocks.is_even == (len({len(m) for m in members}) == 1)


@pytest.mark.parametrize(("grid", "block_grid", "prefix"), PARTITIONS)
def test_blocks_are_boxes_of_balanced_size(grid, block_grid, prefix):
    blocks = TokenBlocks.from_grid(grid, block_grid, prefix)
    index = blocks.tables(torch.empty(0)).tokens[blocks.num_prefix_blocks :]
    for row in index:
        coordinates = torch.stack(torch.unravel_index(row[row >= 0] - prefix, grid))
        extent = coordinates.amax(1) - coordinates.amin(1) + 1
        assert extent.prod() == (row >= 0).sum()
        for size, count, length in zip(grid, block_grid, extent.tolist(), strict=True):
            assert length in (size // count, -(-size // count))


def test_prefix_tokens_are_the_first_block():
    index = TokenBlocks.from_grid((4, 4), (2, 2), 2).tables(torch.empty(0)).tokens
    assert index[0].tolist() == [0, 1, -1, -1]
    assert index[1].tolist() == [2, 3, 6, 7]


def test_block_centers():
    centers = TokenBlocks.from_grid((4, 3), (2, 2), 1).block_centers()
    assert centers.tolist() == [[0.5, 0.5], [0.5, 2.0], [2.5, 0.5], [2.5, 2.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4, 4), (5, 4)), "larger than the token grid"),
        (((4, 4), (4,)), "same number of axes"),
        (((2, 2, 2, 2), (1, 1, 1, 1)), "one to three"),
        (((0, 4), (1, 1)), "positive"),
        (((4, 4), (2, 2), -1), "negative"),
    ],
)
def test_wrong_partitions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenBlocks.from_grid(*arguments)


def test_tables_do_not_leak_between_fake_and_real_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    blocks = TokenBlocks.from_grid((3, 7), (2, 3))
    with FakeTensorMode():
        fake = blocks.tables(torch.empty(2)).tokens
    real = blocks.tables(torch.empty(2)).tokens
    with FakeTensorMode():
        assert type(blocks.tables(torch.empty(2)).tokens) is type(fake)
    assert type(real) is torch.Tensor


def test_blocks_compare_by_value():
    assert TokenBlocks.from_grid([4, 4], [2, 2]) == TokenBlocks.from_grid((4, 4), (2, 2))
    assert len({TokenBlocks.from_grid((4, 4), (2, 2)), TokenBlocks.from_grid((4, 4), (2, 2), 1)}) == 2
