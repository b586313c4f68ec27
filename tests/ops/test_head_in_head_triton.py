"""Head-in-Head kernels: masks, indices and every branch in small float32 shapes, interpreted where there is no GPU."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from headmix_vision.ops import TokenScan, hardware, runtime
from headmix_vision.ops.head_in_head import triton_launch, triton_op

from .helpers import (
    HEAD_IN_HEAD_NAMES,
    head_in_head,
    make_head_in_head_inputs,
    relative_error,
    values_and_gradients,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESULTS = ("out", "state", *HEAD_IN_HEAD_NAMES)
# Tokens of more than one chunk, the last one incomplete.
TOKENS = {1: 70, 2: 40, 4: 37, 8: 37}


def make(tokens=None, r=2, **options):
    options = {"batch": 1, "heads": 2, "dim": 16, "value_dim": 16, "dtype": torch.float32, **options}
    inputs = make_head_in_head_inputs(tokens or TOKENS[r], r, **options)
    return [x.to(DEVICE) for x in inputs]


def run(inputs, weights=None, **options):
    return values_and_gradients(head_in_head, inputs, "triton", weights, **options)


def assert_agrees(inputs, weights=None, tolerance=1e-5, **options):
    ours = run(inputs, weights, **options)
    exact = [x.double() for x in inputs]
    expected = values_and_gradients(head_in_head, exact, "reference", weights, **options)
    for name, x, reference in zip(RESULTS, ours, expected, strict=True):
        assert relative_error(x.double(), reference) < tolerance, name
    return ours


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("r", [1, 2, 4, 8])
def test_sub_heads_and_masks(r, per_token):
    assert_agrees(make(r=r, per_token=per_token, heads=1 + per_token))


@pytest.mark.parametrize(
    ("dim", "value_dim", "r"),
    [
        (3, 1, 1),
        (24, 40, 2),
        (32, 5, 4),
        (64, 64, 2),
        (72, 24, 4),
        (72, 72, 1),
        (24, 72, 8),
        (128, 33, 8),
        (16, 128, 4),
    ],
)
def test_head_dims(dim, value_dim, r):
    assert_agrees(make(20, r, dim=dim, value_dim=value_dim, heads=1, per_token=r == 2))


@pytest.mark.parametrize(
    ("tokens", "r"),
    [
        *itertools.product([1, 15, 16, 64], [1, 4]),
        *((196, 1), (197, 4), (257, 1)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((196, 4), (197, 1), (257, 4))),
    ],
)
def test_token_counts(tokens, r):
    assert_agrees(make(tokens, r, heads=1, dim=8, value_dim=4))


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    "scan",
    [
        TokenScan.from_grid((5, 7), "column_major", num_prefix_tokens=2),
        TokenScan.from_grid((37,), reverse=True),
        torch.randperm(37, generator=torch.Generator().manual_seed(0)),
    ],
    ids=["columns", "reversed", "permutation"],
)
def test_scans(scan, per_token):
    scan = scan.to(DEVICE) if isinstance(scan, torch.Tensor) else scan
    assert_agrees(make(r=4, per_token=per_token), scan=scan)


@pytest.mark.parametrize("r", [1, 4])
def test_strided_views_and_gradients(r):
    """q, k, v out of one packed projection, odd strides and offsets; gates, mask and state transposed or expanded."""
    tokens = 37
    packed = 0.2 * torch.randn(2, tokens, 3, 2, 17, generator=torch.Generator().manual_seed(0)).to(DEVICE)[..., 1:]
    q, k, v = packed.unbind(2)
    _, _, _, beta, log_decay, mask, state = make(tokens, r, batch=2, per_token=True)
    rest = beta.transpose(0, 1).contiguous().transpose(0, 1), log_decay[:1].expand_as(log_decay)
    rest = *rest, mask.mT.contiguous().mT[:, :1].expand_as(mask), state.mT.contiguous().mT
    d_out = torch.randn(2, 2, tokens, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE).transpose(1, 2)
    d_state = torch.randn(16, 16, generator=torch.Generator().manual_seed(2)).to(DEVICE).expand(2, 2, 16, 16)
    constant = torch.ones((), device=DEVICE).expand(v.shape)
    for values in (v, v.transpose(-1, -2).contiguous().transpose(-1, -2)):
        for weights in ((d_out, d_state.mT), (constant, d_state))[: 1 if values is v else 2]:
            assert_agrees([q, k, values, *rest], weights)


def test_a_scan_whose_numbers_do_not_lie_next_to_each_other():
    inputs = make(37, r=4)
    scan = torch.stack([torch.arange(37).flip(0), torch.full((37,), 1000)], 1).to(inputs[0].device)[:, 0]
    assert not scan.is_contiguous()
    out, _ = head_in_head(*inputs, scan=scan, impl="triton")
    expected, _ = head_in_head(*(x.double() for x in inputs), scan=scan, impl="reference")
    assert relative_error(out.double(), expected) < 1e-6


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("used", [0, 1], ids=["out", "state"])
def test_a_loss_of_only_one_result(used, per_token):
    inputs = make(r=4, per_token=per_token)
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(3)) for x in (inputs[2], inputs[6])]
    weights[1 - used] = None
    assert_agrees(inputs, weights)


def test_without_an_initial_state():
    *inputs, state = make(r=4)
    out, final = head_in_head(*inputs, impl="triton")
    assert final is None
    again, _ = head_in_head(*inputs, torch.zeros_like(state), impl="triton")
    assert torch.equal(out, again)
    leaves = [x.requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    gradients = [
        torch.autograd.grad(head_in_head(*x, impl=impl)[0].square().sum(), x)
        for x, impl in ((leaves, "triton"), (exact, "reference"))
    ]
    for ours, expected in zip(*gradients, strict=True):
        assert relative_error(ours.double(), expected) < 1e-5


def test_the_state_carries_a_sequence_over():
    *inputs, mask, state = make(r=4)
    out, final = head_in_head(*inputs, mask, state, True, impl="triton")
    first, middle = head_in_head(*(x[:, :21] for x in inputs), mask, state, True, impl="triton")
    second, end = head_in_head(*(x[:, 21:] for x in inputs), mask, middle, True, impl="triton")
    assert relative_error(torch.cat([first, second], 1), out) < 1e-6
    assert relative_error(end, final) < 1e-6


@pytest.mark.parametrize("r", [1, 4])
@pytest.mark.parametrize("forget", [-float("inf"), -1e7])
def test_forgetting_everything_is_exact_and_has_finite_gradients(forget, r):
    *inputs, mask, state = make(r=r)
    inputs[4][:, 10] = forget
    out, *others = run([*inputs, mask, state])
    assert all(x.isfinite().all() for x in others)
    assert not others[1 + HEAD_IN_HEAD_NAMES.index("log_decay")][:, 10].any()
    expected, final = head_in_head(*(x[:, 10:].double() for x in inputs), mask.double(), None, True, impl="reference")
    assert relative_error(out[:, 10:].double(), expected) < 1e-6
    assert relative_error(others[0].double(), final) < 1e-6
    exact = values_and_gradients(head_in_head, [x.double() for x in (*inputs, mask, state)], "reference")
    for name, x, reference in zip(RESULTS, (out, *others), exact, strict=True):
        assert relative_error(x.double(), reference) < 2e-6, name


@pytest.mark.parametrize("r", [1, 4])
@pytest.mark.parametrize("every", [2, 16])
def test_forgetting_often_costs_the_others_nothing(every, r):
    inputs = make(64, r=r, heads=4)  # with one head the gradient of a mask of one is one number, near zero by chance
    inputs[4][:, ::every] = -float("inf")
    ours = run(inputs)
    exact = values_and_gradients(head_in_head, [x.double() for x in inputs], "reference")
    for name, x, reference in zip(RESULTS[:-1], ours, exact, strict=False):
        assert relative_error(x.double(), reference) < 2e-6, name
    assert not ours[-1].any() and not exact[-1].any()  # nothing of the initial state is left


def test_strong_decays_cost_later_ones_no_digits():
    """Their sum, 200, would leave float32 five digits for the difference of two weak ones."""
    inputs = make(64, r=1, heads=4)
    inputs[4][:, :40] = -5
    assert_agrees(inputs, tolerance=2e-6)


@pytest.mark.parametrize("name", ["beta", "k", "q"])
def test_zeros_in_an_input(name):
    inputs = dict(zip(HEAD_IN_HEAD_NAMES, make(r=4, per_token=True), strict=True))
    inputs[name] = torch.zeros_like(inputs[name])
    assert_agrees(list(inputs.values()))


def test_zero_keys_leave_the_state_empty():
    q, k, v, *rest, _ = make(r=4)
    out, final = head_in_head(q, 0 * k, v, *rest, None, True, impl="triton")
    assert not out.any() and not final.any()


def test_strong_writes():
    """The ends of what leaves a contraction: beta = 2, no decay, all keys alike."""
    q, k, v, beta, log_decay, mask, state = make(r=4)
    assert_agrees([q, k[:, :1].expand_as(k), v, torch.full_like(beta, 2), 0 * log_decay, mask, state], tolerance=1e-4)


@pytest.mark.parametrize("r", [1, 4])
def test_repeated_calls_are_bit_equal(r):
    """Under deterministic algorithms torch fills fresh memory with NaN."""
    inputs = make(r=r, dim=24, value_dim=8, per_token=True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = (run(inputs) for _ in "ab")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_item_does_not_depend_on_its_batch():
    *inputs, mask, state = make(r=4, batch=3)
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(3)) for x in (inputs[2], state)]
    together = run([*inputs, mask, state], weights)
    alone = run([*(x[1:2] for x in inputs), mask, state[1:2]], [x[1:2] for x in weights])
    for name, a, b in zip(RESULTS, together, alone, strict=True):
        assert name == "mask" or torch.equal(a[1:2], b), name


@pytest.mark.parametrize("per_token", [False, True])
def test_empty_batch(per_token):
    inputs = make(r=4, batch=0, per_token=per_token)
    out, _, *gradients = run(inputs)
    assert out.shape == inputs[2].shape
    assert [x.shape for x in gradients] == [x.shape for x in inputs]
    assert not gradients[HEAD_IN_HEAD_NAMES.index("mask")].any()


@pytest.mark.parametrize(("per_token", "with_scan"), [pytest.param(False, False, marks=pytest.mark.slow), (True, True)])
def test_opcheck(per_token, with_scan):
    inputs = [x.requires_grad_() for x in make(20, r=2, per_token=per_token, dim=8, value_dim=4, heads=1)]
    order = torch.arange(19, -1, -1, device=DEVICE) if with_scan else None
    inputs[6] = inputs[6] if with_scan else None
    forward = torch.ops.headmix_vision.head_in_head.default
    for save in (True, False):
        arguments = (*(x if save or x is None else x.detach() for x in inputs), order, save, False, False)
        torch.library.opcheck(forward, arguments)
    out, final, *saved = (x.detach() for x in forward(*inputs, order, True, False, False))
    plain = [x if x is None else x.detach() for x in inputs]
    for d_final in (None, torch.ones_like(final)):
        arguments = (torch.ones_like(out), d_final, *plain, order, *saved, False, False)
        torch.library.opcheck(torch.ops.headmix_vision.head_in_head_backward.default, arguments)


def test_compiles_as_one_graph_with_any_batch():
    scan = TokenScan.from_grid((4, 5), "column_major")
    mask = make(20, heads=1)[5]
    graphs = []

    def op(q, k, v, beta, log_decay, state):
        return head_in_head(q, k, v, beta, log_decay, mask, state, True, scan=scan, impl="triton")

    def count_graphs(graph, inputs):
        graphs.append(graph)
        return graph

    def backward(f, inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        for x in leaves:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        out, state = f(*leaves)
        return out, state, *torch.autograd.grad(out.sum() + state.square().sum(), leaves)

    torch._dynamo.reset()
    for backend in ("aot_eager", count_graphs):
        compiled = torch.compile(op, fullgraph=True, backend=backend)
        for batch in (2, 3):
            inputs = make(20, batch=batch, heads=1)
            inputs.pop(5)
            for ours, expected in zip(backward(compiled, inputs), backward(op, inputs), strict=True):
                torch.testing.assert_close(ours, expected)
    assert len(graphs) == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    def op(*x):
        return head_in_head(*x, True, impl="triton")

    results = []
    for f in (op, lambda *x: checkpoint(op, *x, use_reentrant=use_reentrant)):
        leaves = [x.requires_grad_() for x in make(r=4)]
        out, state = f(*leaves)
        (out.square().sum() + state.square().sum()).backward()
        results.append((out, state, *(x.grad for x in leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_without_gradients_no_state_is_saved(monkeypatch):
    calls = []
    original = triton_launch.saved
    monkeypatch.setattr(triton_launch, "saved", lambda *x: calls.append(original(*x)) or calls[-1])
    inputs = [x.requires_grad_() for x in make(r=4)]
    with torch.no_grad():
        head_in_head(*inputs, impl="triton")
    head_in_head(*(x.detach() for x in inputs), impl="triton")
    assert [(x.states.numel(), x.corrections.numel()) for x in calls] == [(0, 0)] * 2
    head_in_head(*inputs, impl="triton")
    assert calls[-1].states.shape[2] == calls[-1].corrections.shape[2] == 3


def test_autocast_does_not_reach_in():
    inputs = make(r=4)
    expected = run(inputs)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        ours = run(inputs)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_types_of_gates_mask_and_state_are_their_own():
    q, k, v, *rest = make(r=4)
    inputs = [q, k, v, *(x.bfloat16() for x in rest)]
    out, state, *gradients = run(inputs)
    assert (out.dtype, state.dtype) == (torch.float32, torch.float32)
    assert [x.dtype for x in gradients] == [x.dtype for x in inputs]
    exact = run([q, k, v, *(x.bfloat16().float() for x in rest)])
    for name, x, reference in zip(RESULTS, (out, state, *gradients), exact, strict=True):
        assert relative_error(x.float(), reference) < 5e-3, name


def test_a_second_derivative_is_refused():
    inputs = [x.requires_grad_() for x in make(r=4)]
    out, _ = head_in_head(*inputs, impl="triton")
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(gradient.square().sum(), inputs[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float64}, "q has type torch.float64: the kernels take bfloat16, float16 and float32"),
        ({"r": 3, "dim": 24}, r"mask has r = 3 sub-heads: the kernels take \(1, 2, 4, 8\)"),
        ({"dim": 136}, "q has head dim 136: the kernels take up to 128"),
        ({"value_dim": 136}, "v has head dim 136: the kernels take up to 128"),
    ],
)
def test_what_the_kernels_cannot_run_is_refused_by_name(options, message):
    inputs = make(20, **options)
    with pytest.raises(ValueError, match=message):
        head_in_head(*inputs, impl="triton")
    torch.testing.assert_close(head_in_head(*inputs), head_in_head(*inputs, impl="torch"))


def test_other_devices_are_refused(monkeypatch):
    monkeypatch.setattr(hardware, "find_gpu", lambda device: None)
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match=f"q is on {device}: the kernels need a CUDA device; impl='triton'"):
            head_in_head(*(x.to(device) for x in make()), impl="triton")


def test_auto_takes_torch_off_cuda(monkeypatch):
    inputs = [x.cpu() for x in make()]
    monkeypatch.setattr(triton_op.launch, "forward_pass", None)
    assert torch.equal(head_in_head(*inputs)[0], head_in_head(*inputs, impl="torch")[0])


def test_tiles_do_not_depend_on_earlier_calls():
    """Planning for few value columns once changed the constants that all later plans begin with."""

    def columns(value_dim):
        layouts = map(runtime.layout, make(dtype=torch.bfloat16, value_dim=value_dim)[:6])
        (block,) = triton_launch._plan(*layouts, None, None, False, False, 0)
        return block["scan"].constants["VALUES"]

    runtime.forget_plans()
    assert [columns(16), columns(64)] == [16, 64]


@pytest.fixture
def in_segments(monkeypatch):
    """Scan all sequences in segments of two chunks, in the backward pass a few segments at a time."""
    gpu, blocks = hardware.find_gpu(torch.device(DEVICE)), []
    plan = triton_launch._plan
    monkeypatch.setattr(triton_launch, "_plan", lambda *x: blocks.append(len(plan(*x))) or plan(*x))
    monkeypatch.setattr(triton_launch, "pays_in_segments", lambda q, v, mask: True)
    monkeypatch.setattr(triton_launch, "SEGMENT", 2)
    monkeypatch.setattr(triton_launch, "BLOCK_SHARE", 0)
    monkeypatch.setattr(triton_launch, "gpu_behind", lambda device: gpu._replace(processors=2))
    runtime.forget_plans()
    yield
    runtime.forget_plans()
    assert max(blocks) > 1


@pytest.mark.parametrize(
    ("r", "tokens", "dim", "value_dim", "per_token"),
    [(1, 300, 64, 24, False), (2, 150, 24, 40, True), (4, 75, 72, 16, False), (8, 37, 16, 24, True)],
)
def test_segments(in_segments, r, tokens, dim, value_dim, per_token):
    """The last segment is incomplete, the last block has an empty one; graphs that launch kernels take none."""
    inputs = make(tokens, r, dim=dim, value_dim=value_dim, per_token=per_token, heads=1)
    in_op, in_graph = (triton_launch.saved(inputs[0], inputs[2], inputs[5], True, inline) for inline in (False, True))
    assert (in_op.segments, in_graph.segments) == (4, 0)
    assert_agrees(inputs)


@pytest.mark.parametrize("used", [0, 1], ids=["out", "state"])
def test_a_scan_in_segments_and_a_loss_of_only_one_result(in_segments, used):
    inputs = make(75, r=4, heads=1)
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(3)) for x in (inputs[2], inputs[6])]
    weights[1 - used] = None
    assert_agrees(inputs, weights, scan=TokenScan.from_grid((15, 5), "column_major"))


def test_segments_keep_what_a_scan_promises(in_segments):
    """No initial state, a decay that forgets everything, memory that begins as NaN, equal bits and no state saved."""
    *inputs, state = make(75, r=4, dim=24, value_dim=8, heads=1)
    inputs[4][:, 40] = -float("inf")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = (run([*inputs, state]) for _ in "ab")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, second, strict=True))
    expected = values_and_gradients(head_in_head, [x.double() for x in (*inputs, state)], "reference")
    for name, x, reference in zip(RESULTS, first, expected, strict=True):
        assert relative_error(x.double(), reference) < 2e-6, name
    out, _ = head_in_head(*inputs, impl="triton")
    zeros, _ = head_in_head(*inputs, torch.zeros_like(state), impl="triton")
    assert torch.equal(out, zeros)


def test_segments_are_for_long_sequences_of_few_small_heads(monkeypatch):
    def count(tokens=16384, heads=32, r=4, dim=64, value_dim=64, dtype=torch.bfloat16):
        q, v = (torch.empty(1, tokens, heads, d, dtype=dtype, device="meta") for d in (dim, value_dim))
        return triton_launch.count_segments(q, v, torch.empty(heads, r, r, device="meta"))

    gpu = hardware.Gpu("H200", (9, 0), 227 << 10, 132)
    monkeypatch.setattr(triton_launch, "gpu_behind", lambda device: gpu)
    assert [count(heads=heads) for heads in (1, 32, 33, 34)] == [64, 65, 65, 0]
    assert [count(tokens) for tokens in (196, 4096, 16383, 2**16)] == [0, 0, 0, 260]
    assert [count(r=r) for r in (1, 2, 8)] == [16, 33, 0]
    assert count(dim=72) == count(value_dim=72) == count(dtype=torch.float16) == count(dtype=torch.float32) == 0
    monkeypatch.setattr(triton_launch, "gpu_behind", lambda device: gpu._replace(capability=(8, 0)))
    assert count() == 0


def test_scans_of_one_and_two_sub_heads_have_tiles_of_their_own_with_mma_sync(monkeypatch):
    def tiles(dim=64):
        runtime.forget_plans()
        found = []
        for r in (1, 2, 4, 8):
            x = runtime.layout(torch.empty(1, 128, 2, dim, dtype=torch.bfloat16, device=DEVICE))
            gate = runtime.layout(torch.empty(1, 128, 2, device=DEVICE))
            mask = runtime.layout(torch.empty(2, r, r, device=DEVICE))
            (block,) = triton_launch._plan(x, x, x, gate, gate, mask, x, None, False, False, 0)
            launches = block["scan"], block["inputs_backward"]
            found.append(tuple(launch.constants[name] for launch in launches for name in ("VALUES", "num_stages")))
        return found

    gpu = hardware.find_gpu(torch.device(DEVICE))._replace(capability=(8, 9), shared_memory=99 << 10)
    monkeypatch.setattr(hardware, "find_gpu", lambda device: gpu)
    assert tiles() == [(32, 2, 32, 2), (64, 2, 32, 2), (64, 3, 32, 2), (64, 3, 32, 2)]
    assert tiles(dim=128) == [(32, 1, 32, 1), (64, 1, 64, 1), (64, 1, 64, 1), (64, 1, 64, 1)]
    runtime.forget_plans()
