"""Depthwise convolution on the token grid: agreement of the implementations with the definition in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from headmix_vision.ops import TokenGrid, grid_conv

from .helpers import grid_conv_call, make_grid_conv_inputs, relative_error, run

IMPLS = ("reference", "torch")
GRIDS = [
    (TokenGrid((7,)), (5,)),
    (TokenGrid((4, 5), 2), (3, 3)),
    (TokenGrid((4, 3), 1, 2), (1, 5)),
    (TokenGrid((3, 4, 5), 1), (3, 3, 3)),
    (TokenGrid((1, 4, 2), 0, 3), (5, 1, 3)),
]


@pytest.mark.parametrize("options", [{}, {"residual": True}, {"silu": True}, {"residual": True, "silu": True}], ids=str)
@pytest.mark.parametrize(("grid", "extents"), GRIDS, ids=str)
def test_torch_agrees_with_the_reference_in_values_and_gradients(grid, extents, options):
    inputs, d_out = make_grid_conv_inputs(grid, extents, 6, bias=not options)
    ours, expected = (run(grid_conv_call(grid, impl, **options), inputs, d_out) for impl in ("torch", "reference"))
    for a, b in zip(ours, expected, strict=True):
        assert relative_error(a, b) < 1e-12


@pytest.mark.parametrize("impl", IMPLS)
def test_definition(impl):
    """Of one place of three: its neighbours within the grid alone, and neither another place nor a prefix token."""
    grid = TokenGrid((3, 4), 1, 3)
    (x, weight, bias), _ = make_grid_conv_inputs(grid, (3, 3), 5)
    out = grid_conv(x, weight, bias, grid=grid, impl=impl)
    assert torch.equal(out[:, :3], x[:, :3])
    for row, column, place in itertools.product(range(3), range(4), range(3)):
        expected = bias.clone()
        for i, j in itertools.product(range(3), range(3)):
            h, w = row + i - 1, column + j - 1
            if 0 <= h < 3 and 0 <= w < 4:
                expected = expected + weight[:, 0, i, j] * x[:, 3 * (1 + 4 * h + w) + place]
        assert relative_error(out[:, 3 * (1 + 4 * row + column) + place], expected) < 1e-12


@pytest.mark.parametrize("impl", IMPLS)
def test_silu_comes_after_the_residual_and_reaches_the_prefix(impl):
    grid = TokenGrid((3, 4), 2)
    inputs, _ = make_grid_conv_inputs(grid, (3, 3), 5)
    out = grid_conv(*inputs, grid=grid, impl=impl)
    summed = grid_conv(*inputs, grid=grid, residual=True, impl=impl)
    assert torch.equal(summed[:, :2], inputs[0][:, :2])
    assert relative_error(summed[:, 2:], inputs[0][:, 2:] + out[:, 2:]) < 1e-12
    both = grid_conv(*inputs, grid=grid, residual=True, silu=True, impl=impl)
    assert relative_error(both, F.silu(summed)) < 1e-12


@pytest.mark.parametrize(("grid", "extents"), [((2, 3), (3, 3)), ((3, 2, 2), (3, 1, 3))], ids=str)
def test_gradcheck(grid, extents):
    inputs, _ = make_grid_conv_inputs(TokenGrid(grid), extents, 2, batch=1)
    leaves = [x.detach().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(grid_conv_call(grid, "torch", silu=True), leaves)
    assert torch.autograd.gradgradcheck(grid_conv_call(grid, "torch", silu=True), leaves)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_accumulates_in_float32(dtype, impl):
    """Only the inputs and the result are rounded, not the weights nor the sums."""
    grid = TokenGrid((2, 3, 4))
    (x, weight, bias), _ = make_grid_conv_inputs(grid, (3, 3, 3), 8)
    x, weight, bias = x.to(dtype), weight.float(), bias.float()
    expected = grid_conv(x.double(), weight.double(), bias.double(), grid=grid, residual=True, impl="reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = grid_conv(x, weight, bias, grid=grid, residual=True, impl=impl)
    assert out.dtype is dtype
    assert ((out.double() - expected).abs() <= 0.6 * torch.finfo(dtype).eps * expected.abs() + 1e-5).all()


@pytest.mark.parametrize(("grid", "extents"), [((3, 4), (3, 3)), ((2, 3, 2), (3, 3, 3))], ids=str)
def test_transformations_of_torch_func(grid, extents):
    (x, weight), _ = make_grid_conv_inputs(TokenGrid(grid), extents, 3, bias=False)
    (tangent, weight_tangent), _ = make_grid_conv_inputs(TokenGrid(grid), extents, 3, bias=False, seed=1)
    conv = grid_conv_call(grid, "torch")
    out, jvp = torch.func.jvp(conv, (x, weight.requires_grad_()), (tangent, weight_tangent))
    assert relative_error(jvp, conv(tangent, weight) + conv(x, weight_tangent)) < 1e-12
    batched = torch.func.vmap(conv, (0, None))(torch.stack([x, tangent]), weight)
    assert relative_error(batched, torch.stack([out, conv(tangent, weight)])) < 1e-12
    gradient = torch.func.grad(lambda w: conv(x, w).square().sum())(weight)
    expected = torch.autograd.grad(grid_conv(x, weight, grid=grid, impl="reference").square().sum(), weight)[0]
    assert relative_error(gradient, expected) < 1e-12


@pytest.mark.parametrize(
    ("grid", "extents"),
    [
        ((3, 4), (3, 3)),
        ((1, 3, 2), (3, 1, 3)),
        pytest.param((2, 3, 2), (3, 1, 3), marks=pytest.mark.slow),  # a graph of each tap in time
    ],
    ids=str,
)
def test_compiles_as_one_graph_with_any_batch(grid, extents):
    call = grid_conv_call(grid, "torch", silu=True)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=None)
    for batch in (2, 3):
        inputs, d_out = make_grid_conv_inputs(TokenGrid(grid), extents, 3, batch)
        ours, expected = (run(f, inputs, d_out) for f in (compiled, call))
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b)


X, W, B = torch.zeros(2, 12, 6), torch.zeros(6, 1, 3, 3), torch.zeros(6)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "options", "message"),
    [
        ([1.0], W, B, {}, "x must be a tensor, got list"),
        (X, None, B, {}, "weight must be a tensor, got NoneType"),
        (X[0], W, B, {}, r"x must be \[B, N, C\] with the N = 12 of a 3x4 grid, got shape \(12, 6\)"),
        (X[:, :11], W, B, {}, r"x must be .* got shape \(2, 11, 6\)"),
        (X[..., :0], W[:0], B[:0], {}, r"x must be .* got shape \(2, 12, 0\)"),
        (X, W[:5], B, {}, r"weight must be \[C, 1, \*extents\] with C = 6 .* of 2 axes, got shape \(5, 1, 3, 3\)"),
        (X, W.expand(-1, 6, -1, -1), B, {}, r"weight must be \[C, 1"),
        (X, W[..., 0], B, {}, r"weight must be \[C, 1"),
        (X, W[..., :2], B, {}, r"weight must be .* an odd extent for each of 2 axes"),
        (X, W, B[:5], {}, r"bias must be \[C\] with C = 6 channels, got shape \(5,\)"),
        (X.long(), W, B, {}, "x must have a floating type"),
        (X, W.to("meta"), B, {}, "weight is on meta, x on cpu"),
        (X, W, B, {"silu": 1}, "silu must be true or false, got 1"),
        (X, W, B, {"residual": X}, "residual must be true or false"),
        (X, W, B, {"grid": (3, 0)}, "a token grid must have one to three axes"),
    ],
)
@pytest.mark.parametrize("impl", [*IMPLS, "triton", "auto"])
def test_wrong_arguments_are_refused_by_name(x, weight, bias, options, message, impl):
    with pytest.raises(ValueError, match=message):
        grid_conv(x, weight, bias, **({"grid": (3, 4)} | options), impl=impl)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"impl must be one of .*, got 'cuda'"):
        grid_conv(X, W, grid=(3, 4), impl="cuda")
