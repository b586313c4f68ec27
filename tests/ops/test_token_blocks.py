import pytest
import torch

from headmix_vision.errors import InputError
from headmix_vision.ops import (
    TokenBlocks,
    TokenGrid,
    TokenRanks,
    TokenScan,
    head_in_head,
    mhla,
    token_blocks,
    token_scan,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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


def test_tables_are_made_on_the_device_that_is_asked_for():
    grid, whole = TokenGrid((7, 6), 2, repeats=3), TokenBlocks(TokenGrid((7, 6), 2), (3, 2))
    held = [whole.of_rank(TokenRanks("", rank, 2)) for rank in range(2)]
    builds = [(token_blocks._build_tables, blocks) for blocks in (TokenBlocks(grid, (3, 2)), *held)]
    builds += [(token_blocks._build_numbers, blocks) for blocks in held]
    scans = [TokenScan(grid, order, reverse) for order in ("row_major", "column_major") for reverse in (False, True)]

    def build_scan(scan, device):
        tables = token_scan._build_tables(scan, device)
        return tables.order, tables.inverse

    builds += [(build_scan, scan) for scan in scans]
    for build, what in builds:
        expected = build(what, torch.device("cpu"))
        with torch.device("meta"):  # where tensors are made for which no device is said
            again = build(what, torch.device("cpu"))
        pairs = [pair for pair in zip(again, expected, strict=True) if isinstance(pair[0], torch.Tensor)]
        assert pairs and all(torch.equal(*pair) for pair in pairs)


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


@pytest.mark.parametrize(("grid", "block_grid", "prefix"), PARTITIONS)
def test_repeated_places_belong_to_the_block_of_their_token(grid, block_grid, prefix):
    once = TokenBlocks.from_grid(grid, block_grid, prefix)
    often = TokenBlocks(once.grid.repeat(3), once.block_grid)
    tables, expected = often.tables(torch.empty(0)), once.tables(torch.empty(0))
    assert often.num_tokens == 3 * once.num_tokens and often.max_block_size == 3 * once.max_block_size
    assert torch.equal(tables.block_of_token, expected.block_of_token.repeat_interleave(3))
    assert torch.equal(tables.tokens.flatten()[tables.slot_of_token], torch.arange(often.num_tokens))
    for row, source in zip(tables.tokens, expected.tokens, strict=True):
        members = source[source >= 0]
        assert torch.equal(row[row >= 0], (3 * members[:, None] + torch.arange(3)).flatten())


@pytest.mark.parametrize("impl", ["reference", "torch", "triton_pairwise", "triton_summary"])
def test_repeats_act_as_a_last_axis_cut_into_one_block(impl):
    """Three places for each token are a grid with an axis of three more, as long as there is no prefix."""
    q, k, v = torch.randn(3, 1, 60, 2, 4, device=DEVICE).unbind()
    mixing = torch.rand(4, 4, device=DEVICE)
    ours = mhla(q, k, v, mixing, TokenBlocks(TokenGrid((4, 5), repeats=3), (2, 2)), impl=impl)
    torch.testing.assert_close(ours, mhla(q, k, v, mixing, TokenBlocks.from_grid((4, 5, 3), (2, 2, 1)), impl=impl))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("order", ["row_major", "column_major"])
def test_scans_read_repeated_places_one_after_the_other(order, reverse):
    grid = TokenGrid((2, 3), num_prefix_tokens=1)
    like = torch.empty(0)
    once = TokenScan(grid, order, reverse).tables(like).order
    tables = TokenScan(grid.repeat(2), order, reverse).tables(like)
    expected = (2 * once[:, None] + torch.arange(2)).flatten()
    assert torch.equal(tables.order, expected)
    assert torch.equal(tables.order[tables.inverse], torch.arange(14))
    q, k, v = torch.nn.functional.normalize(torch.randn(3, 1, 14, 1, 4), dim=-1).unbind()
    gates, mask = torch.rand(1, 14, 1), torch.ones(1, 1, 1)
    scan = TokenScan(grid.repeat(2), order, reverse)
    by_scan = head_in_head(q, k, v, gates, -gates, mask, scan=scan).out
    torch.testing.assert_close(by_scan, head_in_head(q, k, v, gates, -gates, mask, scan=tables.order).out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, 2, 2, 2),), "one to three axes"),
        (((2, 0),), "positive"),
        (((2,), -1), "num_prefix_tokens must be a whole number of at least 0, got -1"),
        (((2,), 1.0), "num_prefix_tokens"),
        (((2,), "1"), "num_prefix_tokens"),
        (((2,), True), "num_prefix_tokens"),
        (((2.0,),), "one whole number for each axis"),
        ((2,), "one whole number for each axis"),
        (("22",), "one whole number for each axis"),
        ((None,), "one whole number for each axis"),
        (((2,), 0, 0), "repeats"),
    ],
)
def test_wrong_grids_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        TokenGrid(*arguments)


@pytest.mark.parametrize("block_grid", [2, None, "22", (2.0, 2), (float("nan"), 2), (True, 2), (2, "2")])
def test_block_grids_are_whole_numbers(block_grid):
    with pytest.raises(InputError, match="block_grid must be one whole number for each axis"):
        TokenBlocks.from_grid((4, 4), block_grid)


def test_a_shape_is_no_grid():
    for make in (lambda: TokenBlocks((4, 4), (2, 2)), lambda: TokenScan((4, 4))):
        with pytest.raises(InputError, match="grid must be a TokenGrid"):
            make()
    with pytest.raises(InputError, match="reverse must be True or False"):
        TokenScan.from_grid((4, 4), reverse="no")


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
        (((4, 4), (2, 2), -1), "num_prefix_tokens must be a whole number"),
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


def test_sizes_of_numpy_are_sizes():
    numpy = pytest.importorskip("numpy")
    blocks = TokenBlocks.from_grid(tuple(numpy.array([4, 6])), [numpy.int32(2), 3])
    assert blocks == TokenBlocks.from_grid((4, 6), (2, 3)) and type(blocks.num_tokens) is int


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("shape", "block_grid", "prefix"),
    [((5, 7), (2, 3), 2), ((9,), (4,), 1), ((7, 3, 4), (3, 1, 2), 0), ((6, 5), (1, 1), 3)],
)
def test_ranks_have_the_tokens_of_a_grid_between_them(shape, block_grid, prefix, size):
    whole = TokenBlocks.from_grid(shape, block_grid, prefix)
    axis = len(shape) - 1
    places, blocks_of_tokens = [], []
    everyone = [TokenRanks("", rank, size, axis) for rank in range(size)]
    for ranks in everyone:
        rank, blocks = ranks.rank, whole.of_rank(ranks)
        tables = blocks.tables(torch.empty(0))
        assert blocks.held.num_prefix_tokens == (0 if rank else prefix)
        assert tables.tokens.shape == (blocks.num_blocks, blocks.max_block_size)
        assert (tables.tokens >= 0).any(0).all() and (tables.tokens >= 0).any(1).all()
        assert tables.tokens.flatten()[tables.slot_of_token].tolist() == list(range(blocks.num_tokens))
        blocks_of_tokens.append(blocks.numbers(torch.empty(0))[tables.block_of_token])
        places.append(blocks.held.shape[axis])
    assert sum(places) == shape[axis] and max(places) - min(places) <= 1
    block_of_token = whole.tables(torch.empty(0)).block_of_token
    for ranks, own in zip(everyone, blocks_of_tokens, strict=True):
        assert torch.equal(own, ranks.split(block_of_token, whole.grid, dim=0))


def test_ranks_share_no_block_where_their_number_divides_that_of_the_blocks():
    blocks = TokenBlocks.from_grid((11, 3), (4, 2), 1)
    assert [blocks.of_rank(TokenRanks("", 0, size)).are_shared for size in (1, 2, 3, 4)] == [False, False, True, False]


@pytest.mark.parametrize(("grid", "block_grid", "prefix"), PARTITIONS)
def test_order_is_block_by_block(grid, block_grid, prefix):
    blocks = TokenBlocks.from_grid(grid, block_grid, prefix)
    like = torch.empty(0)
    order = blocks.order(like)
    keys = torch.stack([blocks.tables(like).block_of_token[order], order])
    assert torch.equal(order.sort().values, torch.arange(blocks.num_tokens))
    assert keys.T.tolist() == sorted(keys.T.tolist()) and order[:prefix].tolist() == list(range(prefix))


def test_order_of_a_clip_and_an_image():
    """Blocks in raster order of their grid, tokens in raster order inside of them."""
    assert TokenBlocks.from_grid((2, 1, 3), (1, 1, 2), 1).order(torch.empty(0)).tolist() == [0, 1, 2, 4, 5, 3, 6]
    assert TokenBlocks.from_grid((2, 1, 3), (2, 1, 2), 1).order(torch.empty(0)).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert TokenBlocks.from_grid((2, 4), (1, 2)).order(torch.empty(0)).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
