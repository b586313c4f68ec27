"""Kernels of the depthwise convolution: small float32 shapes, interpreted where there is no GPU."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from headmix_vision.ops import TokenGrid, grid_conv
from headmix_vision.ops.grid_conv import triton_kernels

from .helpers import grid_conv_call, make_grid_conv_inputs, relative_error, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float32
SMALL = TokenGrid((4, 5), 1)


def make(grid, extents, channels=8, **options):
    inputs, d_out = make_grid_conv_inputs(grid, extents, channels, dtype=DTYPE, **options)
    return [x.to(DEVICE) for x in inputs], d_out.to(DEVICE)


def assert_agrees(grid, inputs, d_out, tolerance=1e-6, **options):
    ours = run(grid_conv_call(grid, "triton", **options), inputs, d_out)
    exact = run(grid_conv_call(grid, "reference", **options), [x.double() for x in inputs], d_out)
    for name, x, reference in zip(("out", "d_x", "d_weight", "d_bias"), ours, exact, strict=False):
        assert relative_error(x.double(), reference) < tolerance, name
    return ours


@pytest.mark.parametrize(
    ("grid", "extents"),
    [
        (TokenGrid((1, 1)), (3, 3)),
        (TokenGrid((40,), 1, 2), (5,)),
        (TokenGrid((9, 17), 1), (3, 3)),
        (TokenGrid((3, 6), 0, 3), (5, 3)),
        (TokenGrid((5, 9), 2, 2), (3, 1)),
        (TokenGrid((3, 5, 6)), (3, 3, 3)),
        pytest.param(TokenGrid((9, 5, 6)), (3, 3, 3), marks=pytest.mark.slow),
        (TokenGrid((2, 3, 4), 1, 2), (1, 5, 3)),
        (TokenGrid((3, 2, 9)), (5, 1, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{"residual": True}, {"silu": True}], ids=str)
def test_grids_and_extents(grid, extents, options):
    assert_agrees(grid, *make(grid, extents, batch=1, bias="residual" in options), **options)


@pytest.mark.parametrize("channels", [1, 5, 24, 64, 72])
def test_channels(channels):
    assert_agrees(SMALL, *make(SMALL, (3, 3), channels), residual=True, silu=True)


def test_weights_of_extent_five_in_three_axes():
    grid = TokenGrid((3, 2, 3))
    assert_agrees(grid, *make(grid, (5, 5, 5), batch=1))


@pytest.mark.parametrize(("shape", "batch"), [((7, 6), 3), ((5, 3, 2), 2)], ids=str)
def test_images_of_several_parts_and_sums_in_several_steps(monkeypatch, shape, batch):
    grid = TokenGrid(shape)
    monkeypatch.setattr(triton_kernels, "MOST_STEPS", 3)
    monkeypatch.setattr(triton_kernels, "PART_ITEMS", 2)
    monkeypatch.setattr(triton_kernels, "TOKENS", 4)
    monkeypatch.setattr(triton_kernels, "SUM_ROWS", 4)
    assert_agrees(grid, *make(grid, (3,) * len(shape), batch=batch))


def test_strided_tensors():
    """Tokens an odd width apart, channels apart, an expanded output gradient, and one with tokens in front."""
    (x, weight, bias), d_out = make(SMALL, (3, 3), 7)
    odd = torch.randn(2, SMALL.num_tokens, 15, device=DEVICE, dtype=DTYPE)[..., 3:10]
    apart = torch.randn(2, 7, SMALL.num_tokens, device=DEVICE, dtype=DTYPE).mT
    weight = weight.flip(-1).transpose(2, 3)
    expanded = torch.ones((), device=DEVICE, dtype=DTYPE).expand_as(x)
    tokens_first = d_out.transpose(0, 1).contiguous().transpose(0, 1)
    biases = torch.randn(7, 2, device=DEVICE, dtype=DTYPE)[:, 0], bias[:1].expand(7)
    for y, gradient, bias in ((odd, expanded, biases[0]), (apart, tokens_first, biases[1])):
        assert_agrees(SMALL, [y, weight, bias], gradient, silu=True)


def test_a_number_that_is_none_reaches_the_taps_that_see_it_alone():
    (x, weight, bias), d_out = make(SMALL, (3, 3), 5)
    x = x.clone()
    x[0, 5, 3] = float("inf")  # at the end of the first row, in the first column of no tap
    found, expected = (
        run(grid_conv_call(SMALL, impl), [x, weight, bias], d_out)[2] for impl in ("triton", "reference")
    )
    assert torch.equal(found.isfinite(), expected.isfinite())


def test_what_surrounds_a_view_does_not_reach_in():
    (x, *rest), d_out = make(SMALL, (3, 3), 5)
    memory = torch.full((4, SMALL.num_tokens + 4, 9), float("nan"), device=DEVICE, dtype=DTYPE)
    surrounded = memory[1:3, 2:-2, 2:7].copy_(x)
    op = grid_conv_call(SMALL, "triton")
    ours, expected = run(op, [surrounded, *rest], d_out), run(op, [x, *rest], d_out)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_a_number_that_is_none_reaches_its_neighbours_alone():
    (x, *rest), _ = make(SMALL, (3, 3), 5)
    x = x.clone()
    x[0, 1, 2] = float("nan")  # the first token of the grid
    lost = grid_conv(x, *rest, grid=SMALL, impl="triton").isnan()
    expected = torch.zeros_like(lost)
    expected[0, [1, 2, 6, 7], 2] = True
    assert torch.equal(lost, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_types(dtype):
    """Weights keep their digits; results have the types of what they belong to. The interpreter cuts bf16 off."""
    (x, weight, bias), d_out = make(SMALL, (3, 3))
    inputs, d_out = [x.to(dtype), weight, bias.double()], d_out.to(dtype)
    out, d_x, d_weight, d_bias = run(grid_conv_call(SMALL, "triton", residual=True), inputs, d_out)
    assert [y.dtype for y in (out, d_x, d_weight, d_bias)] == [dtype, dtype, DTYPE, torch.float64]
    assert out.is_contiguous() and d_x.is_contiguous()
    exact = run(grid_conv_call(SMALL, "reference", residual=True), [y.double() for y in inputs], d_out.double())
    for y, reference in ((out, exact[0]), (d_x, exact[1])):
        assert ((y.double() - reference).abs() <= torch.finfo(dtype).eps * reference.abs() + 1e-5).all()
    for y, reference in ((d_weight, exact[2]), (d_bias, exact[3])):
        assert relative_error(y.double(), reference) < 1e-6


def test_repeated_backward_is_bit_equal():
    inputs, d_out = make(SMALL, (3, 3))
    first, second = (run(grid_conv_call(SMALL, "triton"), inputs, d_out) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_item_does_not_depend_on_its_batch():
    (x, *rest), d_out = make(SMALL, (3, 3), batch=3)
    op = grid_conv_call(SMALL, "triton", silu=True)
    out, d_x, *_ = run(op, (x, *rest), d_out)
    alone, d_alone, *_ = run(op, (x[1:2], *rest), d_out[1:2])
    assert torch.equal(out[1:2], alone) and torch.equal(d_x[1:2], d_alone)


def test_nothing_to_convolve():
    inputs, d_out = make(SMALL, (3, 3), batch=0)
    out, d_x, d_weight, d_bias = run(grid_conv_call(SMALL, "triton"), inputs, d_out)
    assert out.shape == d_x.shape == inputs[0].shape
    assert d_weight.count_nonzero() == d_bias.count_nonzero() == 0


def test_opcheck():
    leaves = [x.requires_grad_() for x in make(SMALL, (3, 3))[0]]
    options = [4, 5], 1, 1, True, True, False, False
    torch.library.opcheck(torch.ops.headmix_vision.grid_conv.default, (*leaves, *options))


def test_compiles_as_one_graph_with_any_batch():
    call = grid_conv_call(SMALL, "triton", silu=True)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for batch in (1, 2, 3):
        inputs, d_out = make(SMALL, (3, 3), batch=batch)
        torch._dynamo.maybe_mark_dynamic(inputs[0], 0)
        ours, expected = (run(f, inputs, d_out) for f in (compiled, call))
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_activation_checkpointing():
    inputs, d_out = make(SMALL, (3, 3))
    call = grid_conv_call(SMALL, "triton")
    plain, again = (run(f, inputs, d_out) for f in (call, lambda *x: checkpoint(call, *x, use_reentrant=False)))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_only_inputs_and_weights_are_saved():
    inputs, _ = make(SMALL, (3, 3))
    own = {x.data_ptr() for x in inputs}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: own.remove(x.data_ptr()), lambda x: x):
        grid_conv(*[x.requires_grad_() for x in inputs], grid=SMALL, silu=True, impl="triton")
    assert not own


def test_a_second_derivative_is_refused():
    (x, *rest), d_out = make(SMALL, (3, 3))
    x.requires_grad_()
    (d_x,) = torch.autograd.grad(grid_conv(x, *rest, grid=SMALL, silu=True, impl="triton"), x, d_out, create_graph=True)
    with pytest.raises(RuntimeError, match=r"Trying to backward through headmix_vision\.grid_conv_gradients"):
        d_x.sum().backward()


def test_what_the_kernels_cannot_run_is_refused_by_name():
    (x, weight, bias), _ = make(SMALL, (3, 7))
    with pytest.raises(ValueError, match=r"weight has extents \(3, 7\): .* up to 5; impl='triton' was asked for"):
        grid_conv(x, weight, bias, grid=SMALL, impl="triton")
    with pytest.raises(ValueError, match=r"x has type torch\.float64"):
        grid_conv(x.double(), weight, grid=SMALL, impl="triton")
    assert torch.equal(grid_conv(x, weight, grid=SMALL), grid_conv(x, weight, grid=SMALL, impl="torch"))


def test_meta_tensors_and_transformations_are_refused():
    (x, weight, _), _ = make(SMALL, (3, 3))
    with pytest.raises(ValueError, match="x is on meta: the kernels need a CUDA device"):
        grid_conv(x.to("meta"), weight.to("meta"), grid=SMALL, impl="triton")
    assert grid_conv(x.to("meta"), weight.to("meta"), grid=SMALL).shape == x.shape
    with pytest.raises(ValueError, match="x is under a transformation"):
        torch.func.vmap(lambda x: grid_conv(x, weight, grid=SMALL, impl="triton"))(x[None])
