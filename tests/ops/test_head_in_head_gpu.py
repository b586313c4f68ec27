"""Head-in-Head kernels on a GPU: types and sizes against float64, and what surrounds them there."""

import pytest
import torch
import torch.nn.functional as F

from headmix_vision.ops import TokenScan
from headmix_vision.ops.head_in_head import triton_launch
from headmix_vision.ops.runtime import forget_plans

from .helpers import assert_head_in_head_within_budget, head_in_head, make_head_in_head_inputs, values_and_gradients
from .helpers import run as run_with_gradients

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def exact_float32_products():
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


def make(tokens=197, r=4, dtype=BF16, **options):
    """Inputs of numbers that the type can hold, and weights of output and state in a loss.

    q, k, v are views of one packed projection, the others float32, and the output's weights have the heads in front.
    """
    options = {"batch": 2, "heads": 3, "dim": 64, "value_dim": 64, **options}
    q, k, v, *rest = (x.to("cuda", dtype) for x in make_head_in_head_inputs(tokens, r, **options))
    packed = torch.cat([q, k, v], -1).split([q.shape[-1], k.shape[-1], v.shape[-1]], -1)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (v.transpose(1, 2), rest[3])]
    d_out, d_state = (x.to("cuda", dtype) for x in weights)
    return [*packed, *(x.float() for x in rest)], [d_out.transpose(1, 2), d_state.float()]


def check(tokens=197, r=4, dtype=BF16, scan=None, **options):
    assert_head_in_head_within_budget(*make(tokens, r, dtype, **options), scan)


def run(inputs, weights, impl="triton", **options):
    return values_and_gradients(head_in_head, inputs, impl, weights, **options)


@pytest.mark.parametrize("r", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", [16, 24, 32, 64, 72, 128])
def test_head_dims(dim, r):
    check(r=r, dim=dim, value_dim=dim)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("dim", "r"), [(16, 2), (24, 2), (32, 4), (64, 1), (64, 8), (72, 4), (128, 1), (128, 8)])
def test_types(dim, r, dtype):
    check(r=r, dtype=dtype, dim=dim, value_dim=dim)


@pytest.mark.parametrize(("dim", "value_dim", "r"), [(72, 24, 4), (24, 128, 8), (64, 1, 2), (128, 72, 1)])
def test_other_value_dims(dim, value_dim, r):
    check(r=r, dim=dim, value_dim=value_dim)


@pytest.mark.parametrize("r", [1, 4])
@pytest.mark.parametrize("tokens", [1, 15, 64, 196, 257])
def test_token_counts(tokens, r):
    check(tokens, r, batch=max(2, 64 // tokens))


def test_one_item_with_one_head():
    check(1024, 2, batch=1, heads=1)


@pytest.mark.parametrize(("dim", "r"), [(64, 1), (64, 2), (72, 4), (64, 8)])
def test_a_mask_for_each_token(dim, r):
    check(r=r, dim=dim, value_dim=dim, per_token=True)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    "scan",
    [
        TokenScan.from_grid((14, 14), "column_major", num_prefix_tokens=1),
        TokenScan.from_grid((197,), reverse=True),
        torch.randperm(197, generator=torch.Generator().manual_seed(0)),
    ],
    ids=["columns", "reversed", "permutation"],
)
def test_scans(scan, per_token):
    check(scan=scan.cuda() if isinstance(scan, torch.Tensor) else scan, per_token=per_token)


@pytest.mark.parametrize("used", [0, 1], ids=["out", "state"])
def test_a_loss_of_only_one_result(used):
    inputs, weights = make()
    weights[1 - used] = None
    assert_head_in_head_within_budget(inputs, weights)


@pytest.mark.parametrize("forget", [-float("inf"), -1e7])
def test_forgetting_everything(forget):
    (*inputs, mask, state), weights = make()
    inputs[4][:, 10] = forget
    ours = run([*inputs, mask, state], weights)
    assert all(x.isfinite().all() for x in ours)
    expected, _ = head_in_head(*(x[:, 10:].double() for x in inputs), mask.double())
    assert ((ours[0][:, 10:] - expected).norm() / expected.norm()).item() < 0.01


def test_zero_keys_and_no_writes():
    (q, k, v, beta, *rest), weights = make(per_token=True)
    rest[-1] = torch.zeros_like(rest[-1])
    for inputs in ([q, 0 * k, v, beta, *rest], [q, k, v, 0 * beta, *rest]):
        out, state, *gradients = run(inputs, weights)
        assert not out.any() and not state.any()
        assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize(("r", "per_token"), [(1, True), (4, False), (8, True)])
def test_no_uninitialised_memory_is_read_and_results_repeat(r, per_token, dtype):
    """Under deterministic algorithms torch fills fresh memory with NaN."""
    inputs, weights = make(197, r, dtype, dim=72, value_dim=40, per_token=per_token)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = (run(inputs, weights) for _ in "ab")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_offsets_beyond_two_to_the_31():
    """262,144 tokens in a packed projection of 2.4e9 numbers, zero but for the last head; that against float64."""
    tokens, heads = 2**18, 48
    generator = torch.Generator("cuda").manual_seed(0)
    packed = torch.zeros(1, tokens, 3, heads, 64, device="cuda", dtype=BF16)
    assert packed.numel() > 2**31
    last = torch.randn(1, tokens, 3, 64, device="cuda", generator=generator)
    packed[:, :, :, -1] = torch.cat([F.normalize(last[:, :, :2], dim=-1), last[:, :, 2:]], 2).to(BF16)
    packed.requires_grad_()
    beta = torch.rand(1, tokens, heads, device="cuda", generator=generator)
    log_decay = -0.2 * torch.rand(1, tokens, heads, device="cuda", generator=generator)
    mask = torch.ones(heads, 1, 1, device="cuda")
    out, _ = head_in_head(*packed.unbind(2), beta, log_decay, mask, impl="triton")
    d_out = torch.randn(1, tokens, 1, 64, device="cuda", generator=generator).to(BF16)
    (gradient,) = torch.autograd.grad(out[:, :, -1:], packed, d_out)

    exact = [x[:, :, -1:].detach().double().requires_grad_() for x in packed.unbind(2)]
    gates = [x[:, :, -1:].double() for x in (beta, log_decay)]
    expected, _ = head_in_head(*exact, *gates, mask[-1:].double())
    references = torch.autograd.grad(expected, exact, d_out.double())
    for ours, reference in (
        (out[:, :, -1:], expected),
        *zip((x[:, :, -1:] for x in gradient.unbind(2)), references, strict=True),
    ):
        assert ((ours.double() - reference).norm() / reference.norm()).item() < 0.01


@pytest.mark.parametrize("r", [1, 4])
def test_long_sequences_in_segments(monkeypatch, r):
    """16,384 tokens: errors within budget, equal bits when repeated, and less memory than a scan as one.

    The backward pass of 16 heads goes block by block. Fewer heads of r = 1 are in one block, which saves no memory.
    """
    check(16384, r, batch=1, heads=2)
    inputs, weights = make(16384, r, batch=1, heads=16)
    assert triton_launch.count_segments(inputs[0], inputs[2], inputs[5]) > 1

    def results_and_peak_bytes():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = run(inputs, weights)
        return results, torch.cuda.max_memory_allocated() - before

    (first, in_segments), (second, _) = (results_and_peak_bytes() for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    monkeypatch.setattr(triton_launch, "LEAST_TOKENS", 2**31)
    forget_plans()  # which replayed calls keep
    _, as_one = results_and_peak_bytes()
    assert in_segments < as_one


def test_compiled_by_inductor_with_any_batch():
    scan = TokenScan.from_grid((14, 14), "column_major", num_prefix_tokens=1)

    def block(x, weight, gates, mask):
        q, k, v = (x @ weight).unflatten(-1, (3, 3, 64)).unbind(-3)
        beta, decay = (x @ gates).float().chunk(2, -1)
        q, k = (F.normalize(y.float(), dim=-1).to(BF16) for y in (q, k))
        out, _ = head_in_head(q, k, v, beta.sigmoid(), -F.softplus(decay), mask, scan=scan, impl="triton")
        return F.silu(out.flatten(2))  # smooth: a sign that differs by rounding must not switch gradients

    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=generator).to(BF16)

    compiled = torch.compile(block, fullgraph=True, dynamic=None)
    weights = normal(96, 3 * 3 * 64) / 10, normal(96, 6) / 10, make()[0][5]
    for batch in (2, 3, 5):
        inputs, d_out = (normal(batch, 197, 96), *weights), normal(batch, 197, 192)
        ours, expected = (run_with_gradients(f, inputs, d_out) for f in (compiled, block))
        for a, b in zip(ours, expected, strict=True):
            assert ((a - b).float().norm() / b.float().norm()).item() < 0.01


@pytest.mark.parametrize("r", [1, 4])
def test_cuda_graph(r):
    inputs, weights = make(r=r)
    inputs = [x.clone() for x in inputs]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(inputs, weights)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(inputs, weights)
    inputs[0].neg_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, run(inputs, weights), strict=True))


@torch.no_grad()
def test_inductor_graphs_without_gradients():
    """Its CUDA graphs refuse tensors that outlive them, such as a table of the scan that they make themselves."""
    scan, (inputs, _) = TokenScan.from_grid((14, 14), reverse=True), make(196)

    def both(*x):
        return head_in_head(*x, scan=scan, impl="triton")[0] + head_in_head(*x, impl="triton")[0]

    compiled = torch.compile(both, mode="reduce-overhead")
    for _ in range(3):
        out = compiled(*inputs)
    expected = both(*inputs)
    assert ((out - expected).float().norm() / expected.float().norm()).item() < 0.01


def test_auto_takes_the_kernels_wherever_they_can_run():
    inputs, weights = make()
    ours = run(inputs, weights)
    for context in (torch.autocast("cuda", dtype=BF16, enabled=enabled) for enabled in (False, True)):
        with context:
            again = run(inputs, weights, "auto")
        assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    for options in ({"dim": 136}, {"value_dim": 136}, {"r": 3, "dim": 24}):
        others, _ = make(**options)
        assert torch.equal(head_in_head(*others)[0], head_in_head(*others, impl="torch")[0])


def test_without_gradients_less_memory_is_taken():
    inputs, _ = make(4096, batch=8, heads=8)
    leaves = [x.detach().requires_grad_() for x in inputs]

    def peak_bytes(inputs):
        head_in_head(*inputs, impl="triton")  # plans, and records where calls are replayed
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        head_in_head(*inputs, impl="triton")
        return torch.cuda.max_memory_allocated() - before

    with torch.no_grad():
        without = peak_bytes(leaves)
    chunks = 4096 // 16
    kept = 8 * 8 * chunks * 64 * (64 + 64) * 2  # states and corrections
    assert peak_bytes(leaves) - without >= kept


def test_devices_may_not_mix():
    inputs, _ = make()
    for place, name in ((1, "k"), (3, "beta"), (5, "mask"), (6, "initial_state")):
        changed = [x.cpu() if i == place else x for i, x in enumerate(inputs)]
        with pytest.raises(ValueError, match=f"{name} is on cpu, q on cuda"):
            head_in_head(*changed)
