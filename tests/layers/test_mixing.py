import pytest
import torch
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

from headmix_vision.layers import MixingMatrix, resample_mixing
from headmix_vision.layers.block_mixing import LOWER, clip_keep_inward_gradient, locality_weights
from headmix_vision.ops import TokenBlocks, mhla

BLOCKS = TokenBlocks.from_grid((16, 16), (4, 4))


def test_locality_init_is_the_papers():
    """m_ij ∝ 1 - dist(i, j) / max_k dist(i, k), rows summing to one (section 4.2)."""
    weights = locality_weights(BLOCKS)
    assert torch.allclose(weights.sum(1), torch.ones(16, dtype=weights.dtype))
    corner = torch.tensor([[1 - (y**2 + x**2) ** 0.5 / 18**0.5 for x in range(4)] for y in range(4)]).double()
    torch.testing.assert_close(weights[0], (corner / corner.sum()).flatten(), rtol=1e-6, atol=1e-7)
    assert not torch.allclose(weights.sum(0), torch.ones(16, dtype=weights.dtype), atol=0.05)


def test_uneven_blocks_use_their_true_centres():
    """Five tokens in three blocks of 2, 2 and 1: centres 0.5, 2.5 and 4."""
    weights = locality_weights(TokenBlocks.from_grid((5, 1), (3, 1)))
    expected = torch.tensor([[1, 1 - 2 / 3.5, 0], [0, 1, 1 - 1.5 / 2], [0, 1 - 1.5 / 3.5, 1]]).double()
    torch.testing.assert_close(weights, expected / expected.sum(1, keepdim=True), rtol=1e-6, atol=1e-7)


def test_a_single_block_has_weight_one():
    assert locality_weights(TokenBlocks.from_grid((4, 4), (1, 1))).item() == 1


def test_prefix_block_weighs_all_blocks_alike():
    weights = locality_weights(TokenBlocks.from_grid((4, 4), (2, 2), 1))
    assert torch.equal(weights[0], torch.full((5,), 0.2, dtype=weights.dtype))
    assert torch.equal(weights[1:, 0], weights[1:].amax(1))


def test_uniform_per_head_and_frozen():
    assert torch.equal(MixingMatrix(BLOCKS, num_heads=3, init="uniform")(), torch.full((3, 16, 16), 1 / 16))
    frozen = MixingMatrix(BLOCKS, trainable=False)
    assert not list(frozen.parameters())
    assert list(frozen.state_dict()) == list(MixingMatrix(BLOCKS).state_dict()) == ["weight", "block_grid"]
    with pytest.raises(ValueError, match="mixing init"):
        MixingMatrix(BLOCKS, init="random")


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_any_optimizer_keeps_the_weights_inside_and_movable(optimizer):
    mixing = MixingMatrix(TokenBlocks.from_grid((2, 2), (2, 2)))
    steps = optimizer(mixing.parameters(), lr=0.1)
    for direction, bound in ((1.0, LOWER), (-1.0, 1.0), (1.0, LOWER)):
        for _ in range(40):
            steps.zero_grad()
            (direction * mixing().sum()).backward()
            steps.step()
        assert torch.allclose(mixing(), torch.full((4, 4), bound), atol=1e-7)
        assert (mixing.weight - bound).abs().max() < 1.5  # pushed against the bound it does not drift away


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["eager", "transformed", "compiled", "repeated"])
def test_gradients_pass_but_for_those_that_lead_outwards(way, dtype):
    clip = clip_keep_inward_gradient
    if way == "compiled":
        clip = torch.compile(clip, backend="aot_eager", fullgraph=True)
    weight, nan = torch.tensor([-0.5, LOWER, 0.5, 1.0, 1.5], dtype=dtype), float("nan")
    for gradient, expected in (  # a step goes against the gradient
        ([1.0] * 5, [0, 0, 1.0, 1.0, 1.0]),
        ([-1.0] * 5, [-1.0, -1.0, -1.0, 0, 0]),
        ([0.0] * 5, [0] * 5),
        ([nan] * 5, [nan] * 5),
    ):
        given = torch.tensor(gradient, dtype=dtype)
        if way == "transformed":
            (found,) = torch.func.vjp(clip, weight)[1](given)
        else:
            leaf = weight.clone().requires_grad_()
            (found,) = torch.autograd.grad(clip(leaf), leaf, given, create_graph=way == "repeated")
        assert found.dtype == dtype
        torch.testing.assert_close(found, torch.tensor(expected, dtype=dtype), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(clip(weight), weight.clamp(LOWER, 1.0))


def test_forward_mode_differentiates_the_clipping():
    weight = torch.tensor([-0.5, LOWER, 0.5, 1.0, 1.5])
    with dual_level():
        tangent = unpack_dual(clip_keep_inward_gradient(make_dual(weight, torch.ones(5)))).tangent
    assert torch.equal(tangent, torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0]))
    assert torch.equal(torch.func.jvp(clip_keep_inward_gradient, (weight,), (torch.ones(5),))[1], tangent)


def test_splitting_blocks_leaves_the_attention_as_it_was():
    coarse, fine = (TokenBlocks.from_grid((8, 12), grid, 1) for grid in ((2, 2), (4, 6)))
    q, k, v = torch.randn(3, 2, 97, 2, 4, dtype=torch.float64).unbind()
    mixing = torch.rand(5, 5, dtype=torch.float64)
    finer = resample_mixing(mixing, (2, 2), (4, 6), num_prefix_blocks=1)
    torch.testing.assert_close(mhla(q, k, v, finer, fine), mhla(q, k, v, mixing, coarse))
    torch.testing.assert_close(resample_mixing(finer, (4, 6), (2, 2), num_prefix_blocks=1), mixing)


def test_resampling_between_unrelated_grids_keeps_bounds_and_constants():
    mixing = torch.rand(3, 16, 16)
    out = resample_mixing(mixing, (4, 4), (3, 5))
    assert out.shape == (3, 15, 15)
    assert out.min() >= mixing.min() and out.max() <= mixing.max()
    torch.testing.assert_close(resample_mixing(torch.ones(16, 16), (4, 4), (3, 5)), torch.ones(15, 15))


def test_set_blocks_resamples_only_when_the_block_grid_changes():
    mixing = MixingMatrix(BLOCKS)
    before = mixing.weight
    mixing.set_blocks(TokenBlocks.from_grid((24, 24), (4, 4)))
    assert mixing.weight is before
    mixing.set_blocks(TokenBlocks.from_grid((24, 24), (8, 8)))
    assert mixing().shape == (64, 64) and mixing.weight.requires_grad
    frozen = MixingMatrix(BLOCKS).requires_grad_(False)
    frozen.set_blocks(TokenBlocks.from_grid((24, 24), (8, 8)))
    assert not frozen.weight.requires_grad
    with pytest.raises(ValueError, match="prefix block"):
        mixing.set_blocks(TokenBlocks.from_grid((24, 24), (8, 8), 1))


def test_loading_resamples_to_the_block_grid_of_the_module():
    source, target = MixingMatrix(BLOCKS), MixingMatrix(TokenBlocks.from_grid((16, 16), (8, 8)))
    target.load_state_dict(source.state_dict())
    torch.testing.assert_close(target.weight.detach(), resample_mixing(source.weight.detach(), (4, 4), (8, 8)))
    with pytest.raises(ValueError, match="fits no block grid"):
        target.load_state_dict({"weight": torch.ones(15, 15)})


def test_wrong_resampling_is_refused():
    with pytest.raises(ValueError, match="does not fit the block grid"):
        resample_mixing(torch.ones(15, 15), (4, 4), (2, 2))
    with pytest.raises(ValueError, match="number of axes"):
        resample_mixing(torch.ones(16, 16), (4, 4), (2, 2, 4))


def test_loading_knows_the_block_grid_of_the_weights():
    """As many blocks in another shape, and as many times more: the grid of the state dict says what they are."""
    for old, new in (((2, 8), (4, 4)), ((4, 4), (2, 8)), ((2, 8), (8, 8))):
        source, target = (MixingMatrix(TokenBlocks.from_grid((16, 16), grid, 1), num_heads=2) for grid in (old, new))
        target.load_state_dict(source.state_dict())
        torch.testing.assert_close(target(), resample_mixing(source.weight, old, new, 1).detach())
        assert target.block_grid.tolist() == list(new)
    again = MixingMatrix(TokenBlocks.from_grid((16, 16), (4, 4), 1), num_heads=2)
    again.set_blocks(TokenBlocks.from_grid((16, 16), (2, 8), 1))
    again.load_state_dict(source.state_dict())
    torch.testing.assert_close(again(), source())
    with pytest.raises(ValueError, match=r"does not fit the block grid \(2, 8\)"):
        MixingMatrix(BLOCKS).load_state_dict(source.state_dict())


def test_weights_of_version_0_1_0_are_of_the_modules_grid_if_they_are_as_many():
    source, target = (
        MixingMatrix(TokenBlocks.from_grid((16, 16), (2, 8)), init=init) for init in ("locality", "uniform")
    )
    target.load_state_dict({"weight": source.weight.detach()})
    assert torch.equal(target.weight, source.weight) and target.block_grid.tolist() == [2, 8]
