"""Head-in-Head: agreement of the implementations, and the invariants of the method in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from headmix_vision.ops import TokenScan
from headmix_vision.ops.token_scan import SCAN_ORDERS

from .helpers import HEAD_IN_HEAD_NAMES as NAMES
from .helpers import head_in_head, head_in_head_rwkv7, relative_error, values_and_gradients
from .helpers import make_head_in_head_inputs as make_inputs

IMPLS = ("reference", "torch")


def make_rwkv7_inputs(tokens=40, r=2, dtype=torch.float64, **kwargs):
    """q, k, v, a, b, log_decay, mask, initial_state."""
    q, k, v, beta, _, mask, state = make_inputs(tokens, r, dtype=torch.float64, **kwargs)
    generator = torch.Generator().manual_seed(1)
    a = F.normalize(torch.randn(q.shape, generator=generator, dtype=q.dtype), dim=-1)
    log_decay = -0.6 * torch.rand(q.shape, generator=generator, dtype=q.dtype)
    return [x.to(dtype) for x in (q, k, v, a, -beta[..., None] * a, log_decay, mask, state)]


def gated_delta_rule(q, k, v, beta, log_decay):
    """The delta rule in its prediction-error form, one head at a time."""
    out = torch.empty_like(v)
    for n in range(q.shape[0]):
        for h in range(q.shape[2]):
            state = v.new_zeros(q.shape[3], v.shape[3])
            for t in range(q.shape[1]):
                state = log_decay[n, t, h].exp() * state
                error = v[n, t, h] - k[n, t, h] @ state
                state = state + beta[n, t, h] * torch.outer(k[n, t, h], error)
                out[n, t, h] = q[n, t, h] @ state / q.shape[3] ** 0.5
    return out


@pytest.mark.parametrize("r", [1, 2, 4, 8])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("tokens", [1, 15, 64, 131])
def test_torch_agrees_with_the_loop_in_values_and_gradients(tokens, per_token, r):
    inputs = make_inputs(tokens, r, per_token=per_token)
    scan = TokenScan.from_grid((tokens,), reverse=True) if per_token else None
    results = [values_and_gradients(head_in_head, inputs, impl, scan=scan) for impl in IMPLS]
    for name, reference, ours in zip(("out", "state", *NAMES), *results, strict=True):
        assert relative_error(ours, reference) < 1e-9, name


@pytest.mark.parametrize("r", [1, 4])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_rwkv7_torch_agrees_with_the_loop_in_values_and_gradients(tokens, per_token, r):
    inputs = make_rwkv7_inputs(tokens, r, per_token=per_token)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(3)) if per_token else None
    results = [values_and_gradients(head_in_head_rwkv7, inputs, impl, scan=order) for impl in IMPLS]
    for reference, ours in zip(*results, strict=True):
        assert relative_error(ours, reference) < 1e-9


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("r", [1, 4])
def test_one_sub_head_or_a_mask_of_ones_is_the_gated_delta_rule(impl, r):
    q, k, v, beta, log_decay, _, _ = make_inputs(70)
    out, state = head_in_head(q, k, v, beta, log_decay, torch.ones(2, r, r), impl=impl)
    assert relative_error(out, gated_delta_rule(q, k, v, beta, log_decay)) < 1e-12
    assert state is None


@pytest.mark.parametrize("impl", IMPLS)
def test_identity_mask_is_independent_delta_rules_which_share_values(impl):
    r, dim = 4, 8
    q, k, v, beta, log_decay, _, _ = make_inputs(35, dim=dim)
    out, _ = head_in_head(q, k, v, beta, log_decay, torch.eye(r).expand(2, r, r), impl=impl)
    parts = zip(q.chunk(r, -1), k.chunk(r, -1), strict=True)
    expected = sum(gated_delta_rule(a, b, v, beta, log_decay) for a, b in parts)
    assert relative_error(out, expected / r**0.5) < 1e-12  # Dk^-0.5 of the whole head


@pytest.mark.parametrize("impl", IMPLS)
def test_without_writes_the_state_decays(impl):
    q, k, v, beta, log_decay, mask, state = make_inputs(50)
    out, final = head_in_head(q, k, v, 0 * beta, log_decay, mask, state, True, impl=impl)
    decay = log_decay.cumsum(1).exp()
    expected = decay[..., None] * torch.einsum("bnhd,bhde->bnhe", q, state) / q.shape[-1] ** 0.5
    assert relative_error(out, expected) < 1e-12
    assert relative_error(final, decay[:, -1, :, None, None] * state) < 1e-12


@pytest.mark.parametrize("impl", IMPLS)
def test_transition_has_eigenvalues_of_a_contraction(impl):
    """The op itself, fed unit states: I - k k^T * E(M) has eigenvalues in [0, 1], rank at least Dk - r."""
    r, dim = 4, 8
    q, k, v, beta, log_decay, mask, _ = make_inputs(1, r, dim=dim, value_dim=dim)
    identity = torch.eye(dim, dtype=q.dtype).expand(2, 2, dim, dim)
    _, transition = head_in_head(q, k, 0 * v, 0 * beta + 1, 0 * log_decay, mask, identity, True, impl=impl)
    eigenvalues = torch.linalg.eigvalsh(transition)
    assert eigenvalues.min() > -1e-12 and eigenvalues.max() < 1 + 1e-12
    assert ((eigenvalues - 1).abs() > 1e-9).sum(-1).max() == r


@pytest.mark.parametrize("impl", IMPLS)
def test_a_scan_is_a_permutation_of_the_input(impl):
    *inputs, state = make_inputs(12, per_token=True)
    for scan in (
        TokenScan.from_grid((3, 4), reverse=True),
        TokenScan.from_grid((2, 5), "column_major", num_prefix_tokens=2),
        torch.randperm(12, generator=torch.Generator().manual_seed(0)),
    ):
        order = scan if isinstance(scan, torch.Tensor) else scan.tables(state).order
        out, final = head_in_head(*inputs, state, True, scan=scan, impl=impl)
        expected, expected_final = head_in_head(*(x[:, order] for x in inputs), state, True, impl=impl)
        assert relative_error(out[:, order], expected) < 1e-12
        assert relative_error(final, expected_final) < 1e-12


@pytest.mark.parametrize("op", [head_in_head, head_in_head_rwkv7])
@pytest.mark.parametrize("impl", IMPLS)
def test_the_state_carries_a_sequence_over(op, impl):
    *inputs, state = make_inputs(40) if op is head_in_head else make_rwkv7_inputs(40)
    mask = inputs.pop()
    out, final = op(*inputs, mask, state, True, impl=impl)
    first, middle = op(*(x[:, :23] for x in inputs), mask, state, True, impl=impl)
    second, end = op(*(x[:, 23:] for x in inputs), mask, middle, True, impl=impl)
    assert relative_error(torch.cat([first, second], 1), out) < 1e-12
    assert relative_error(end, final) < 1e-12


@pytest.mark.parametrize("impl", IMPLS)
def test_rwkv7_form_contains_the_gated_delta_rule(impl):
    q, k, v, beta, log_decay, mask, state = make_inputs(40, 4)
    written, decay = beta[..., None] * k, log_decay[..., None].expand_as(k)
    expected = head_in_head(q, k, v, beta, log_decay, mask, state, True, impl="reference")
    out = head_in_head_rwkv7(q, written, v, k, -decay.exp() * written, decay, mask, state, True, impl=impl)
    for x, y in zip(out, expected, strict=True):
        assert relative_error(x, y) < 1e-12


def test_gradcheck():
    inputs = [x.requires_grad_() for x in make_inputs(3, 2, batch=1, heads=1, dim=4, value_dim=2)]
    order = torch.tensor([1, 2, 0])

    def op(*args):
        return head_in_head(*args, True, scan=order)

    assert torch.autograd.gradcheck(op, inputs)
    assert torch.autograd.gradgradcheck(op, inputs)
    inputs = [x.requires_grad_() for x in make_rwkv7_inputs(3, 2, batch=1, heads=1, dim=4, value_dim=2)]
    assert torch.autograd.gradcheck(lambda *args: head_in_head_rwkv7(*args, True), inputs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("forget", [-float("inf"), -1e7])
@pytest.mark.parametrize("op", [head_in_head, head_in_head_rwkv7])
def test_forgetting_everything_is_exact_and_has_finite_gradients(op, forget, impl):
    """In a chunk, differences of summed logs would be infinity minus infinity, or lose the small decays."""
    *inputs, mask, state = make_inputs(24) if op is head_in_head else make_rwkv7_inputs(24)
    inputs[4 if op is head_in_head else 5][:, 10] = forget
    if op is head_in_head_rwkv7:
        inputs[4][:, 10] = 0  # its correction reads the state that the decay has not touched
    out, *others = values_and_gradients(op, [x.float() for x in (*inputs, mask, state)], impl)
    assert all(x.isfinite().all() for x in others)
    expected, _ = op(*(x[:, 10:] for x in inputs), mask, impl="reference")
    assert relative_error(out[:, 10:].double(), expected) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", IMPLS)
def test_low_precision_accumulates_in_float32(impl, dtype):
    """Only the inputs and the result are rounded: the error stays at the size of rounding, whatever N."""
    inputs = make_inputs(1024, 4, batch=1, heads=1, dim=16)
    inputs = [x.to(dtype) if i < 3 else x.float() for i, x in enumerate(inputs)]
    expected, _ = head_in_head(*(x.double() for x in inputs))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = head_in_head(*inputs, True, impl=impl)
    assert out.dtype is dtype and state.dtype is torch.float32
    assert (out.double() - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize(("dim", "value_dim", "r"), [(16, 128, 8), (24, 24, 4), (72, 72, 8), (128, 64, 4), (80, 80, 1)])
def test_float32_head_dims_of_real_models(dim, value_dim, r):
    inputs = make_inputs(197, r, batch=1, heads=1, dim=dim, value_dim=value_dim, dtype=torch.float32)
    expected, _ = head_in_head(*(x.double() for x in inputs), impl="reference")
    assert relative_error(head_in_head(*inputs)[0].double(), expected) < 1e-5


@pytest.mark.parametrize("impl", IMPLS)
def test_zero_keys_leave_the_state_empty(impl):
    q, k, v, *rest = make_inputs(20)
    k = torch.zeros_like(k, requires_grad=True)
    out, _ = head_in_head(q, k, v, *rest[:-1], impl=impl)
    out.sum().backward()
    assert not out.any() and k.grad.isfinite().all()


def test_strided_views_of_a_packed_projection():
    packed = torch.randn(2, 36, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    rest = make_inputs(36)[3:6]
    gradient = torch.randn(2, 2, 36, 8, dtype=torch.float64).transpose(1, 2)
    results = []
    for impl in IMPLS:
        out, _ = head_in_head(*(0.3 * packed).unbind(2), *rest, impl=impl)
        results.append((out, *torch.autograd.grad(out, packed, gradient)))
    for reference, ours in zip(*results, strict=True):
        assert relative_error(ours, reference) < 1e-9


@pytest.mark.parametrize("dynamic_batch", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiles_as_one_graph(dynamic_batch):
    scan = TokenScan.from_grid((6, 7), "column_major")
    mask = make_inputs()[5]
    batches = []

    def op(q, k, v, beta, log_decay, mask, state):
        return head_in_head(q, k, v, beta, log_decay, mask, state, True, scan=scan)

    def count_graphs(graph, inputs):
        batches.append(inputs)
        return graph

    torch._dynamo.reset()
    for backend in ("aot_eager", count_graphs):
        compiled = torch.compile(op, fullgraph=True, backend=backend)
        for batch in (3, 5):
            inputs = make_inputs(42, batch=batch)
            inputs[5] = mask
            results = []
            for f in (op, compiled):
                leaves = [x.clone().requires_grad_() for x in inputs]
                if dynamic_batch:
                    for i in (0, 1, 2, 3, 4, 6):
                        torch._dynamo.mark_dynamic(leaves[i], 0)
                out, state = f(*leaves)
                results.append((out, state, *torch.autograd.grad(out.sum() + state.square().sum(), leaves)))
            for eager, traced in zip(*results, strict=True):
                torch.testing.assert_close(traced, eager)
            if not dynamic_batch:
                break
    assert len(batches) == 1


class Work(TorchDispatchMode):
    """Counts operator calls and the numbers that they return."""

    calls = 0
    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        self.calls += 1
        self.numbers += sum(x.numel() for x in tree_leaves(results) if isinstance(x, torch.Tensor))
        return results


def test_work_grows_linearly_and_is_done_in_fewer_steps_than_by_the_loop():
    def work(tokens, impl):
        inputs = make_inputs(tokens, 4, batch=1, heads=2, dim=32, value_dim=32)
        with Work() as done, FlopCounterMode(display=False) as flops:
            head_in_head(*inputs, impl=impl)
        return done.calls, done.numbers, flops.get_total_flops()

    short, long, loop = work(512, "torch"), work(8192, "torch"), work(512, "reference")
    assert all(b <= 16.5 * a for a, b in zip(short, long, strict=True))  # 256 times if quadratic
    assert short[0] < loop[0] / 10


def test_grid_orders():
    like = torch.empty(0)

    def order(*args, **kwargs):
        return TokenScan.from_grid(*args, **kwargs).tables(like).order.tolist()

    assert order((2, 3)) == [0, 1, 2, 3, 4, 5]
    assert order((2, 3), "column_major") == [0, 3, 1, 4, 2, 5]
    assert order((2, 3), "column_major", reverse=True) == [5, 2, 4, 1, 3, 0]
    assert order((2, 2), num_prefix_tokens=2) == [2, 3, 4, 5, 0, 1]
    assert order((2, 2), reverse=True, num_prefix_tokens=2) == [1, 0, 5, 4, 3, 2]
    assert order((2, 1, 2), "column_major") == [0, 2, 1, 3]
    for grid, direction, reverse in itertools.product([(7,), (3, 4), (2, 3, 2)], SCAN_ORDERS, (False, True)):
        tables = TokenScan.from_grid(grid, direction, reverse, num_prefix_tokens=1).tables(like)
        assert torch.equal(tables.inverse, tables.order.argsort())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask": torch.ones(2, 3, 3)}, "mask has r = 3 sub-heads, which does not divide the head dim of q, 8"),
        ({"mask": torch.ones(2, 2)}, r"mask must be \[H, r, r\] or \[B, N, H, r, r\].* got shape \(2, 2\)"),
        ({"mask": torch.ones(2, 2, 4)}, r"mask must be \[H, r, r\].* got shape \(2, 2, 4\)"),
        ({"mask": torch.ones(2, 7, 2, 2, 2)}, r"mask must be .* got shape \(2, 7, 2, 2, 2\)"),
        ({"mask": torch.ones(2, 2, 2, dtype=torch.long)}, "mask must have a floating type"),
        ({"log_decay": torch.full((2, 6, 2), 0.1)}, r"log_decay must not be above 0, got 0\.1"),
        ({"log_decay": torch.zeros(2, 6)}, r"log_decay must be \[B, N, H\] = \(2, 6, 2\), got shape \(2, 6\)"),
        ({"beta": torch.zeros(2, 6, 3)}, r"beta must be \[B, N, H\]"),
        ({"q": torch.zeros(6, 2, 8)}, r"q must be \[B, N, H, Dk\]"),
        ({"q": torch.zeros(2, 0, 2, 8), "k": torch.zeros(2, 0, 2, 8), "v": torch.zeros(2, 0, 2, 5)}, "one token"),
        ({"k": torch.zeros(2, 6, 2, 7)}, "k must have the shape of q"),
        ({"v": torch.zeros(2, 5, 2, 7)}, "v must be"),
        ({"k": torch.zeros(2, 6, 2, 8)}, "k has type torch.float32, q torch.float64"),
        ({"v": torch.zeros(2, 6, 2, 5, device="meta", dtype=torch.float64)}, "v is on meta, q on cpu"),
        ({"initial_state": torch.zeros(2, 2, 8, 4)}, r"initial_state must be \[B, H, Dk, Dv\] = \(2, 2, 8, 5\)"),
        ({"scan": torch.tensor([0, 1, 2, 3, 4, 4])}, "scan must be a permutation of 0 to 5"),
        ({"scan": torch.arange(1, 7)}, "scan must be a permutation of 0 to 5"),
        ({"scan": torch.arange(5)}, r"scan must be int64 \[N\] with N = 6"),
        ({"scan": torch.arange(6.0)}, r"scan must be int64 \[N\] with N = 6"),
        ({"scan": TokenScan.from_grid((2, 2))}, "scan orders 4 tokens, q has 6"),
        *(({name: [0.0]}, f"{name} must be a tensor, got list") for name in (*NAMES, "initial_state")),
        ({"scan": "row_major"}, "scan, if no TokenScan, must be a tensor, got str"),
        ({"impl": "fast"}, "impl must be one of .*'torch'.* got 'fast'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    valid = dict(zip(NAMES, make_inputs(6), strict=True))
    for impl in ("auto",) if "impl" in arguments else IMPLS:
        with pytest.raises(ValueError, match=message):
            head_in_head(**{**valid, "impl": impl, **arguments})


def test_wrong_rwkv7_arguments_are_refused():
    names = ("q", "k", "v", "a", "b", "log_decay", "mask", "initial_state")
    valid = dict(zip(names, make_rwkv7_inputs(6), strict=True))
    for arguments, message in (
        ({"a": valid["a"][..., :4]}, "a must have the shape of q"),
        ({"b": valid["b"].float()}, "b has type torch.float32"),
        ({"log_decay": valid["log_decay"][..., 0]}, "log_decay must have the shape of q"),
        ({"log_decay": -valid["log_decay"]}, "log_decay must not be above 0"),
        ({"mask": torch.ones(2, 3, 3)}, "does not divide"),
        ({"impl": "fast"}, "impl must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            head_in_head_rwkv7(**{**valid, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, 2, 2, 2),), "grid must have one to three axes"),
        (((0, 2),), "at least one token"),
        (((2, 2), "diagonal"), "scan order must be one of"),
        (((2, 2), "row_major", False, -1), "num_prefix_tokens must be a whole number of at least 0"),
    ],
)
def test_wrong_scans_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenScan.from_grid(*arguments)


@pytest.mark.parametrize("inference", [False, True])
def test_a_permutation_is_checked_again_after_it_changed(inference):
    q, k, v, beta, log_decay, mask, _ = make_inputs(tokens=6)
    with torch.inference_mode(inference):
        order = torch.arange(6).flip(0)
        for _ in range(2):
            head_in_head(q, k, v, beta, log_decay, mask, scan=order)
        order[2] = 5
        with pytest.raises(ValueError, match="scan must be a permutation of 0 to 5"):
            head_in_head(q, k, v, beta, log_decay, mask, scan=order)
