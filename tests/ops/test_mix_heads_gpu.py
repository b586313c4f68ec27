"""Head mixing kernels on a GPU: types and sizes against float64, and what surrounds them there."""

from functools import partial

import pytest
import torch

from headmix_vision.ops import mix_heads

from .helpers import assert_errors_within, make_mix_heads_inputs, mix_heads_call, run

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
TRITON = mix_heads_call("triton")


@pytest.fixture(autouse=True)
def exact_float32_products():
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


def make(count, batch, tokens, heads, out_heads, dim, dtype=BF16, weights_dtype=torch.float32):
    """Views of one packed projection, weights, and output gradients with the heads in front."""
    (*inputs, weights), d_outs = make_mix_heads_inputs(count, batch, tokens, heads, out_heads, dim)
    packed = torch.stack(inputs, 2).to("cuda", dtype)
    d_outs = [d.to("cuda", dtype).transpose(1, 2).contiguous().transpose(1, 2) for d in d_outs]
    return [*packed.unbind(2), weights.to("cuda", weights_dtype)], d_outs


def eager(*tensors):
    """The definition with every step in the type of the inputs."""
    *inputs, weights = tensors
    return [torch.einsum("gh,bnhd->bngd", w, x) for w, x in zip(weights.to(inputs[0].dtype), inputs, strict=True)]


def check(*sizes, **options):
    inputs, d_outs = make(*sizes, **options)
    ours = run(TRITON, inputs, d_outs)
    exact = run(mix_heads_call("torch"), [x.double() for x in inputs], d_outs)
    names = [f"{kind}{c}" for kind in ("out", "dx") for c in range(sizes[0])]
    assert_errors_within((*names, "dweights"), ours, run(eager, inputs, d_outs), exact)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [16, 24, 64, 72, 80, 128])
def test_head_dims_and_types(dim, dtype):
    check(3, 2, 197, 6, 12, dim, dtype=dtype)


@pytest.mark.parametrize("weights_dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_types_of_weights(dtype, weights_dtype):
    check(2, 2, 50, 8, 8, 64, dtype=dtype, weights_dtype=weights_dtype)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("pseudo_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("heads", [3, 6, 12, 16, 24, 32])
def test_pseudo_heads_and_their_collapse(heads, pseudo_heads, dtype):
    check(3, 1, 65, heads, pseudo_heads * heads, 64, dtype=dtype)
    check(1, 1, 65, pseudo_heads * heads, heads, 64, dtype=dtype)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_one_head_is_scaled(dtype):
    """Here a gradient of the weights is one number, whose error in the eager form is a matter of luck."""
    inputs, d_outs = make(3, 2, 197, 1, 1, 64, dtype=dtype)
    *ours, d_weights = run(TRITON, inputs, d_outs)
    *exact, expected = run(mix_heads_call("torch"), [x.double() for x in inputs], d_outs)
    for x, reference in zip(ours, exact, strict=True):
        torch.testing.assert_close(x.double(), reference, rtol=torch.finfo(dtype).eps, atol=1e-7)
    torch.testing.assert_close(d_weights.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dim", [64, 72])
@pytest.mark.parametrize(("heads", "out_heads"), [(3, 6), (8, 16), (12, 16), (5, 7)], ids=lambda n: str(n))
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (300, 1), (3, 15), (2, 256), (1, 5000)], ids=lambda n: str(n))
def test_images_and_component_heads(batch, tokens, heads, out_heads, dim):
    check(2, batch, tokens, heads, out_heads, dim)


def test_weights_keep_their_digits():
    """A weight of float32 is not rounded to the type of the inputs: the output is as exact as its own type."""
    (*inputs, weights), _ = make(3, 2, 197, 6, 12, 64)
    exact = mix_heads([x.double() for x in inputs], weights.double(), impl="torch")
    for ours, reference in zip(mix_heads(inputs, weights, impl="triton"), exact, strict=True):
        error, rounding = (x.double().sub(reference).abs().mean() for x in (ours, reference.to(BF16)))
        assert error < 1.01 * rounding


@pytest.mark.parametrize("heads", [(6, 12), (70, 140)], ids=str)
def test_no_uninitialised_memory_is_read_and_results_repeat(heads):
    """Under deterministic algorithms torch fills fresh memory with NaN."""
    inputs, d_outs = make(3, 2, 99, *heads, 72)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = (run(TRITON, inputs, d_outs) for _ in "ab")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_surrounds_a_view_does_not_reach_in():
    """The last tile reaches beyond the image, and masked rows beyond the heads, where there is NaN."""
    inputs, d_outs = make(2, 2, 23, 5, 7, 24)
    surrounded = []
    for x in inputs[:-1]:
        memory = torch.full((4, 30, 9, 24), float("nan"), device="cuda", dtype=BF16)
        surrounded.append(memory[1:3, 3:26, 2:7].copy_(x))
    ours, expected = run(TRITON, [*surrounded, inputs[-1]], d_outs), run(TRITON, inputs, d_outs)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_zero_and_large_inputs(scale):
    (*inputs, weights), d_outs = make(2, 2, 50, 6, 12, 64)
    ours = run(TRITON, [*(x * scale for x in inputs), weights], d_outs)
    assert all(x.isfinite().all() for x in ours)


def test_offsets_beyond_two_to_the_31():
    """The last tokens of a packed projection and of outputs of more than 2**31 numbers."""
    B, N, H, D = 3, 131072, 48, 64
    packed = torch.empty(B, N, 2, H, D, device="cuda", dtype=BF16)
    assert packed.numel() > 2**31
    packed.zero_()[-1, -300:].normal_(generator=torch.Generator("cuda").manual_seed(0))
    weights = torch.randn(2, 96, H, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).requires_grad_()
    leaves = [x.requires_grad_() for x in packed.unbind(2)]
    first, second = mix_heads(leaves, weights)
    assert first.numel() > 2**31
    d_out = torch.zeros_like(second)
    d_out[-1, -300:].normal_()
    ours = second[-1, -300:], *torch.autograd.grad(second, (leaves[1], weights), d_out)
    tail = leaves[1].detach()[-1:, -300:].double().requires_grad_()
    exact_weights = weights.detach()[1:].double().requires_grad_()
    expected = mix_heads([tail], exact_weights, impl="torch")[0]
    d_tail, d_weights = torch.autograd.grad(expected, (tail, exact_weights), d_out[-1:, -300:].double())
    for a, b in ((ours[0], expected[0]), (ours[1][-1, -300:], d_tail[0]), (ours[2][1], d_weights[0])):
        assert ((a.double() - b).norm() / b.norm()).item() < 0.01


def test_strides_beyond_two_to_the_31():
    """The last head, and the last token, lie 2.2e9 numbers away."""
    inputs, d_outs = make(1, 1, 3, 3, 6, 64)
    x, weights = inputs
    for strides in ((1, 64, 2**30 + 8, 1), (1, 2**30 + 8, 64, 1)):
        far = torch.empty(2**31 + 4096, device="cuda", dtype=BF16).as_strided(x.shape, strides).copy_(x)
        ours, expected = run(TRITON, [far, weights], d_outs), run(TRITON, [x.contiguous(), weights], d_outs)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_compiled_by_inductor_with_any_batch():
    def block(x, weight, weights):
        parts = (x @ weight).unflatten(-1, (3, 3, 64)).unbind(-3)
        return torch.cat([y.flatten(2) for y in mix_heads(parts, weights, impl="triton")], -1).relu()

    compiled = torch.compile(block, fullgraph=True, dynamic=None)
    weight = torch.randn(96, 3 * 3 * 64, device="cuda", dtype=BF16) / 10
    weights = torch.randn(3, 6, 3, device="cuda")
    for batch in (2, 3, 5):
        x = torch.randn(batch, 197, 96, device="cuda", dtype=BF16)
        d_out = torch.randn(batch, 197, 3 * 6 * 64, device="cuda", dtype=BF16)
        ours, expected = (run(f, (x, weight, weights), d_out) for f in (compiled, block))
        for a, b in zip(ours, expected, strict=True):
            assert ((a - b).float().norm() / b.float().norm()).item() < 0.01


def test_cuda_graph():
    inputs, d_outs = make(3, 2, 197, 6, 12, 64)
    leaves = [x.clone().requires_grad_() for x in inputs]
    step = partial(run_once, leaves, d_outs)
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


def run_once(leaves, d_outs):
    outs = TRITON(*leaves)
    return *outs, *torch.autograd.grad(outs, leaves, d_outs)


def test_auto_takes_the_kernels_wherever_they_can_run():
    (*inputs, weights), _ = make(2, 2, 50, 6, 12, 64)
    expected = mix_heads(inputs, weights, impl="triton")
    assert all(map(torch.equal, mix_heads(inputs, weights), expected))
    with torch.autocast("cuda", dtype=BF16):
        assert all(map(torch.equal, mix_heads(inputs, weights), expected))
    (*wide, weights), _ = make(2, 2, 50, 6, 12, 136)
    assert all(map(torch.equal, mix_heads(wide, weights), mix_heads(wide, weights, impl="torch")))


def test_devices_may_not_mix():
    (x, weights), _ = make(1, 2, 5, 6, 12, 64)
    with pytest.raises(ValueError, match=r"weights is on cpu, inputs\[0\] on cuda"):
        mix_heads([x], weights.cpu())
