"""Kernels of the depthwise convolution on a GPU: types and sizes against float64, and what surrounds them there."""

import pytest
import torch
import torch.nn.functional as F

from headmix_vision.ops import TokenGrid, grid_conv

from .helpers import assert_errors_within, grid_conv_call, make_grid_conv_inputs, run

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
VIDEO = TokenGrid((8, 8, 8))


def make(grid, extents, channels, dtype=BF16, **options):
    """A view of a packed projection, weights and bias in float32, and an output gradient that is a view too."""
    (x, *rest), d_out = make_grid_conv_inputs(grid, extents, channels, **options)
    x = x._base.to("cuda", dtype)[..., channels : 2 * channels]
    d_out = torch.cat([d_out, d_out], -1).to("cuda", dtype)[..., :channels]
    return [x, *(y.to("cuda", torch.float32) for y in rest)], d_out


def eager(grid, residual=False, silu=False):
    """PyTorch's convolution with every step in the type of the input."""

    def call(x, weight, bias=None):
        prefix, tokens = x.split_with_sizes([grid.num_prefix_tokens, grid.num_grid_tokens], 1)
        conv = (F.conv1d, F.conv2d, F.conv3d)[weight.ndim - 3]
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        padding = [extent // 2 for extent in weight.shape[2:]]
        images = tokens.mT.unflatten(2, grid.shape)
        out = conv(images, weight, bias, padding=padding, groups=x.shape[2]).flatten(2).mT
        out = torch.cat([prefix, tokens + out if residual else out], 1)
        return F.silu(out) if silu else out

    return call


def check(grid, extents, channels, dtype=BF16, residual=False, silu=False, **sizes):
    inputs, d_out = make(grid, extents, channels, dtype, **sizes)
    options = {"residual": residual, "silu": silu}
    ours = run(grid_conv_call(grid, "triton", **options), inputs, d_out)
    exact = run(grid_conv_call(grid, "torch", **options), [x.double() for x in inputs], d_out)
    names = ("out", "dx", "dweight", "dbias")[: len(ours)]
    assert_errors_within(names, ours, run(eager(grid, **options), inputs, d_out), exact)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("channels", [24, 36, 72, 192, 385])
@pytest.mark.parametrize("options", [{"residual": True}, {"silu": True, "bias": False}], ids=str)
def test_channels_and_types(channels, dtype, options):
    with torch.backends.cudnn.flags(allow_tf32=False):
        check(TokenGrid((14, 14), 1), (3, 3), channels, dtype, **options)
        check(VIDEO, (3, 3, 3), channels, dtype, **options)


@pytest.mark.parametrize(
    ("grid", "extents"),
    [
        ((197,), (5,)),
        ((1, 1), (3, 3)),
        ((32, 32), (5, 5)),
        ((7, 31), (3, 1)),
        ((5, 9, 14), (3, 3, 3)),
        ((4, 6, 5), (5, 5, 5)),
        ((17, 30, 52), (3, 1, 1)),
        ((3, 15, 13), (1, 3, 3)),
    ],
    ids=str,
)
def test_grids_and_extents(grid, extents):
    check(TokenGrid(grid, 2), extents, 128, silu=True)


def test_one_layout_with_each_type_of_weights():
    """Launches are kept by layout: another type of weights and bias is another kernel."""
    inputs, d_out = make(VIDEO, (3, 3, 3), 72)
    inputs = [inputs[0], *(y.to(BF16).float() for y in inputs[1:])]
    op = grid_conv_call(VIDEO, "triton", silu=True)
    expected = run(op, inputs, d_out)
    for dtype in (BF16, torch.float64):
        found = run(op, [inputs[0], *(y.to(dtype) for y in inputs[1:])], d_out)
        assert all(map(torch.equal, found[:2], expected[:2]))
        for gradient, reference in zip(found[2:], expected[2:], strict=True):
            assert gradient.dtype is dtype
            torch.testing.assert_close(gradient, reference.to(dtype))
    x, weight, bias = inputs
    assert torch.equal(op(x, weight), op(x, weight, torch.zeros_like(bias)))


@pytest.mark.parametrize("silu", [False, True])
def test_repeated_backward_is_bit_equal_in_poisoned_memory(silu):
    """Under deterministic algorithms torch fills fresh memory with NaN."""
    inputs, d_out = make(TokenGrid((14, 14), 1), (3, 3), 72)
    op = grid_conv_call(TokenGrid((14, 14), 1), "triton", silu=silu)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = (run(op, inputs, d_out) for _ in "ab")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_surrounds_a_view_does_not_reach_in():
    (x, *rest), d_out = make(VIDEO, (3, 3, 3), 72)
    memory = torch.full((4, 520, 90), float("nan"), device="cuda", dtype=BF16)
    surrounded = memory[1:3, 4:516, 8:80].copy_(x)
    op = grid_conv_call(VIDEO, "triton")
    ours, expected = run(op, [surrounded, *rest], d_out), run(op, [x, *rest], d_out)
    assert all(map(torch.equal, ours[:2], expected[:2]))
    for sums, others in zip(ours[2:], expected[2:], strict=True):  # in the order of the tile, which follows the strides
        torch.testing.assert_close(sums, others, rtol=1e-5, atol=1e-4)


def test_addresses_that_are_no_multiples_of_sixteen_bytes():
    (x, *rest), d_out = make(VIDEO, (3, 3, 3), 72)
    op = grid_conv_call(VIDEO, "triton")
    expected = run(op, [x, *rest], d_out)
    for width, first in ((73, 0), (80, 1)):
        odd = torch.empty(2, 512, width, device="cuda", dtype=BF16)[..., first : first + 72].copy_(x)
        assert all(torch.equal(a, b) for a, b in zip(run(op, [odd, *rest], d_out), expected, strict=True))


def test_offsets_beyond_two_to_the_31():
    """The last image of a packed projection, and of outputs, of more than 2**31 numbers."""
    grid, channels = TokenGrid((16, 128, 128)), 1536
    packed = torch.empty(6, grid.num_tokens, 3 * channels, device="cuda", dtype=BF16)
    x = packed[..., channels : 2 * channels]
    assert x.numel() > 2**31
    packed.zero_()
    x[-1].normal_(generator=torch.Generator("cuda").manual_seed(0))
    weight = torch.randn(channels, 1, 3, 3, 3, device="cuda")
    out = grid_conv(x, weight, grid=grid)
    assert out[:-1].count_nonzero() == 0
    assert torch.equal(out[-1:], grid_conv(x[-1:], weight, grid=grid))


def test_strides_beyond_two_to_the_31():
    """The last token lies 2.2e9 numbers away."""
    grid = TokenGrid((3, 3))
    (x, *rest), d_out = make(grid, (3, 3), 64, batch=1)
    far = torch.empty(8 * (2**28 + 8) + 64, device="cuda", dtype=BF16)
    far = far.as_strided(x.shape, (1, 2**28 + 8, 1)).copy_(x)
    op = grid_conv_call(grid, "triton")
    assert all(map(torch.equal, run(op, [far, *rest], d_out), run(op, [x, *rest], d_out)))


def test_compiled_by_inductor_with_any_batch():
    def block(x, projection, weight):
        parts = (x @ projection).chunk(3, -1)
        return sum(grid_conv(part, weight, grid=VIDEO, silu=True, impl="triton") for part in parts).sin()

    compiled = torch.compile(block, fullgraph=True, dynamic=None)
    projection = torch.randn(96, 3 * 64, device="cuda", dtype=BF16) / 10
    weight = torch.randn(64, 1, 3, 3, 3, device="cuda") / 5
    for batch in (2, 3, 5):
        x = torch.randn(batch, 512, 96, device="cuda", dtype=BF16)
        d_out = torch.randn(batch, 512, 64, device="cuda", dtype=BF16)
        ours, expected = (run(f, (x, projection, weight), d_out) for f in (compiled, block))
        for a, b in zip(ours, expected, strict=True):
            assert ((a - b).float().norm() / b.float().norm()).item() < 0.01


def test_cuda_graph():
    inputs, d_out = make(VIDEO, (3, 3, 3), 192)
    leaves = [x.clone().requires_grad_() for x in inputs]

    def step():
        out = grid_conv(*leaves, grid=VIDEO, residual=True)
        return out, *torch.autograd.grad(out, leaves, d_out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        leaves[0].neg_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def test_auto_takes_the_kernels_wherever_they_can_run():
    inputs, _ = make(VIDEO, (3, 3, 3), 72)
    expected = grid_conv(*inputs, grid=VIDEO, impl="triton")
    assert torch.equal(grid_conv(*inputs, grid=VIDEO), expected)
    with torch.autocast("cuda", dtype=BF16):
        assert torch.equal(grid_conv(*inputs, grid=VIDEO), expected)
    inputs, _ = make(VIDEO, (7, 1, 1), 72)
    with pytest.warns(UserWarning, match="weight has extents"):
        assert torch.equal(grid_conv(*inputs, grid=VIDEO), grid_conv(*inputs, grid=VIDEO, impl="torch"))
