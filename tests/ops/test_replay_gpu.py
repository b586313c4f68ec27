"""Replayed calls on a GPU: equal to the bit to ordinary ones, in graphs, streams, threads and on a second device."""

import shutil
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from headmix_vision.ops import TokenBlocks, TokenGrid, grid_conv, head_in_head, mhla, mix_heads
from headmix_vision.ops.dispatch import REPLAY, as_function, without_dispatcher
from headmix_vision.ops.grid_conv import triton_op as conv_op
from headmix_vision.ops.head_in_head import triton_op as hih_op
from headmix_vision.ops.mhla import triton_op as mhla_op
from headmix_vision.ops.mix_heads import triton_op as mix_op

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def replay(monkeypatch):
    """Let eager calls be ordinary ones, and return a function that makes a context in which they are replayed."""
    from headmix_vision.ops.replay import extension, replayed

    assert extension() is not None
    monkeypatch.setenv(REPLAY, "0")
    replacing = []
    for op, name, *functions in (
        (mix_op, "_flat", mix_op._forward_flat, mix_op._setup_flat, mix_op._backward_flat),
        *((op, "_call_forward", op._forward, op._setup_context, op._backward) for op in (mhla_op, hih_op, conv_op)),
    ):
        calls = [ordinary := as_function(*functions), replayed(ordinary, *functions)]
        if name == "_call_forward":
            calls = [without_dispatcher(op._forward_op, call, differentiable=True) for call in calls]
        monkeypatch.setattr(op, name, calls[0])
        replacing.append((op, name, calls[1]))

    @contextmanager
    def replaying():
        with monkeypatch.context() as patch:
            for replaced in replacing:
                patch.setattr(*replaced)
            yield

    return replaying


def draw(*shape, dtype=BF16, device="cuda"):
    return torch.randn(shape, device=device).to(dtype)


def mhla_case(grid, dtype=BF16, prefix=0, dim=64, batch=3, **options):
    blocks = TokenBlocks.from_grid(grid, (4, 4), num_prefix_tokens=prefix)
    packed = draw(batch, blocks.num_tokens, 3, 2, dim, dtype=dtype)
    mixing = torch.rand(blocks.num_blocks, blocks.num_blocks, device="cuda")
    return [*packed.unbind(2), mixing], lambda *x: mhla(*x, blocks, impl="triton", **options)


def one_block_case():
    blocks = TokenBlocks.from_grid((24, 24), (1, 1))
    inputs = [*draw(3, 576, 3, 2, 64).unbind(2), torch.rand(1, 1, device="cuda")]
    return inputs, lambda *x: mhla(*x, blocks, impl="triton")


def hih_case(r, dtype=BF16):
    """The state stays finite: keys have length 1, and masks are positive semidefinite with ones on the diagonal."""
    size = (2, 256, 3)
    gates = torch.rand(size, device="cuda").to(dtype), -torch.rand(size, device="cuda").to(dtype)
    q, k, v = (draw(*size, 64, dtype=dtype) for _ in range(3))
    mask = (0.5 + 0.5 * torch.eye(r, device="cuda")).expand(3, r, r).to(dtype)
    inputs = [q, torch.nn.functional.normalize(k, dim=-1), v, *gates, mask]
    return inputs, lambda *x: head_in_head(*x, impl="triton")[0]


def conv_case(dtype=BF16, prefix=0, **options):
    inputs = [draw(3, 196 + prefix, 96, dtype=dtype), draw(96, 1, 3, 3, dtype=F32), draw(96, dtype=F32)]
    return inputs, lambda *x: grid_conv(*x, grid=TokenGrid((14, 14), prefix), impl="triton", **options)


def mix_case():
    inputs = [draw(2, 196, 6, 64), draw(2, 196, 6, 64), draw(2, 12, 6, dtype=F32)]
    return inputs, lambda x, y, w: torch.cat(mix_heads([x, y], w, impl="triton"), 2)


CASES = {
    "mhla 196": lambda: mhla_case((14, 14)),
    "mhla 197": lambda: mhla_case((14, 14), prefix=1),
    "mhla 256": lambda: mhla_case((16, 16)),
    "mhla 256, 72 dims": lambda: mhla_case((16, 16), dim=72),
    "mhla 1024": lambda: mhla_case((32, 32)),
    "mhla 576 in one block": one_block_case,
    "mhla 4096": lambda: mhla_case((64, 64), batch=1),
    "mhla 196 float16": lambda: mhla_case((14, 14), F16),
    "mhla 1024 float32": lambda: mhla_case((32, 32), F32),
    "mhla 196 source_block": lambda: mhla_case((14, 14), normalizer="source_block"),
    "mhla 256 causal": lambda: mhla_case((16, 16), causal=True),
    "mhla 4096 causal": lambda: mhla_case((64, 64), causal=True, batch=1),
    "head_in_head 1": lambda: hih_case(1),
    "head_in_head 4": lambda: hih_case(4),
    "head_in_head 4 float16": lambda: hih_case(4, F16),
    "grid_conv": lambda: conv_case(residual=True),
    "grid_conv silu": lambda: conv_case(silu=True),
    "grid_conv prefix": lambda: conv_case(prefix=1, silu=True),
    "grid_conv float16": lambda: conv_case(F16, residual=True),
    "mix_heads": mix_case,
}


def compute(inputs, op, d_out=None):
    """Return the output and all gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = op(*leaves)
    d_out = torch.cos(out.detach()) if d_out is None else d_out
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def assert_equal(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        assert b.isfinite().all()  # numbers that are not are unequal to themselves
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


@pytest.mark.parametrize("case", CASES)
def test_replayed_calls_are_equal_to_the_bit(case, replay):
    inputs, op = CASES[case]()
    expected = compute(inputs, op)
    with replay():
        for _ in range(3):
            ours = compute(inputs, op)
            assert_equal(ours, expected)


@pytest.mark.parametrize("case", ["mhla 196", "mhla 1024", "mhla 576 in one block", "head_in_head 4", "grid_conv"])
def test_replays_run_no_python(case, replay, monkeypatch):
    inputs, op = CASES[case]()
    with replay():
        compute(inputs, op)
        for module in (mhla_op, hih_op, conv_op):
            monkeypatch.setattr(module, "_run_backward_kernels", None, raising=False)
            monkeypatch.setattr(module, "unpack_cached", None, raising=False)
        monkeypatch.setattr("headmix_vision.ops.runtime.Launch.__call__", None)
        compute(inputs, op)


def test_each_layout_has_its_own_record(replay):
    inputs, op = CASES["mhla 196"]()
    flat = draw(1 + 3 * 196 * 2 * 64)
    forms = [inputs, [x.contiguous() for x in inputs], [x[:2] for x in inputs[:3]] + inputs[3:],
             [*[flat[1:].view(3, 196, 2, 64)] * 3, inputs[3]], [inputs[0], inputs[0], inputs[2], inputs[3]],
             [*inputs[:3], inputs[3].T], [*(x.half() for x in inputs[:3]), inputs[3]], inputs]  # fmt: skip
    d_outs = [None, torch.ones((), device="cuda", dtype=BF16).expand(3, 196, 2, 64)]
    for form in forms:
        for d_out in d_outs:
            if d_out is not None and (form[0].shape != d_out.shape or form[0].dtype != BF16):
                continue
            expected = compute(form, op, d_out)
            with replay():
                for _ in range(2):
                    assert_equal(compute(form, op, d_out), expected)


@pytest.mark.parametrize("case", ["mhla 196", "mhla 1024", "head_in_head 4", "grid_conv silu"])
def test_graphs_of_replayed_calls(case, replay):
    inputs, op = CASES[case]()
    leaves = [x.detach().requires_grad_() for x in inputs]
    d_out = torch.cos(op(*leaves).detach())
    with replay():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                torch.autograd.grad(op(*leaves), leaves, d_out)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = op(*leaves)
            gradients = torch.autograd.grad(out, leaves, d_out)
    with torch.no_grad():
        for x in leaves:
            x.mul_(0.5)
    graph.replay()
    assert_equal([out.detach(), *gradients], compute(leaves, op, d_out))


def test_streams_and_threads(replay):
    inputs, op = CASES["mhla 196"]()
    expected = compute(inputs, op)
    with replay():
        compute(inputs, op)
        found = {}

        def work(i):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                for _ in range(20):
                    found[i] = compute(inputs, op)
            stream.synchronize()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    torch.cuda.synchronize()
    for ours in found.values():
        assert_equal(ours, expected)
    assert len(found) == 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one(replay):
    inputs, op = CASES["mhla 196"]()
    expected = compute(inputs, op)
    with replay():
        for device in ("cuda:1", "cuda:0", "cuda:1"):
            ours = compute([x.to(device) for x in inputs], op)
            assert all(x.device == torch.device(device) for x in ours)
            assert_equal([x.cuda(0) for x in ours], expected)


def test_second_derivatives_are_refused_as_ever(replay):
    inputs, op = CASES["mhla 196"]()
    leaves = [x.detach().requires_grad_() for x in inputs]

    def second():
        (d_q,) = torch.autograd.grad(op(*leaves).sum(), leaves[:1], create_graph=True)
        d_q.sum().backward()

    with pytest.raises(RuntimeError) as expected:
        second()
    with replay():
        compute(inputs, op)
        with pytest.raises(RuntimeError) as ours:
            second()
    assert str(ours.value) == str(expected.value)


def settled_bytes():
    """Return the allocated bytes, when the engine's thread has let go of the gradients of the last call."""
    torch.cuda.synchronize()
    time.sleep(0.5)
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("case", ["mhla 196", "mhla 1024", "head_in_head 4", "grid_conv silu"])
def test_replays_take_no_more_memory(case, replay):
    inputs, op = CASES[case]()

    def peak():
        compute(inputs, op)
        before = settled_bytes()
        torch.cuda.reset_peak_memory_stats()
        compute(inputs, op)
        assert settled_bytes() == before
        return torch.cuda.max_memory_allocated() - before

    expected = peak()
    with replay():
        assert peak() <= expected


@pytest.mark.parametrize("case", ["mhla 196", "mhla 1024", "head_in_head 4", "grid_conv silu"])
def test_a_recorded_call_takes_no_more_memory(case, replay):
    inputs, op = CASES[case]()
    compute(inputs, op)  # compiles the kernels

    def peak():
        before = settled_bytes()
        torch.cuda.reset_peak_memory_stats()
        compute(inputs, op)
        return torch.cuda.max_memory_allocated() - before

    expected = peak()
    with replay():
        assert peak() <= expected + 512  # one number for the CUDA context of a thread


@pytest.mark.parametrize("is_known", [False, True])
def test_a_call_without_memory_raises_and_can_be_repeated(is_known, replay):
    """Outputs of 64 MiB have a segment of their own, so that none of them fits where no segment may be added."""
    inputs, op = mhla_case((32, 32), batch=256)
    expected = compute(inputs, op)
    total = torch.cuda.get_device_properties(0).total_memory
    with replay():
        if is_known:
            compute(inputs, op)
        settled_bytes()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                compute(inputs, op)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        for _ in range(2):
            assert_equal(compute(inputs, op), expected)


def test_launch_hooks_see_all_launches(replay):
    from triton import knobs

    inputs, op = CASES["mhla 196"]()
    seen = []

    def count():
        seen.clear()
        knobs.runtime.launch_enter_hook.add(seen.append)
        try:
            compute(inputs, op)
        finally:
            knobs.runtime.launch_enter_hook.remove(seen.append)
        return len(seen)

    expected = count()
    assert expected > 0
    with replay():
        compute(inputs, op)
        assert count() == expected


def test_a_profiler_sees_replayed_kernels(replay):
    inputs, op = CASES["mhla 196"]()

    def kernels():
        compute(inputs, op)
        torch.cuda.synchronize()
        with torch.profiler.profile() as profile:
            compute(inputs, op)
            torch.cuda.synchronize()
        on_gpu = [x.name for x in profile.events() if x.device_type == torch.autograd.DeviceType.CUDA]
        return sorted(name for name in on_gpu if name.isidentifier() and "_kernel" in name)  # Triton's

    expected = kernels()
    assert expected
    with replay():
        assert kernels() == expected


def test_the_first_call_with_a_tensor_on_the_gpu_begins_to_build(monkeypatch):
    from headmix_vision.ops import replay, replay_build

    begun = []
    monkeypatch.setattr(replay, "_ready", threading.Event())
    monkeypatch.setattr(replay_build, "_start", lambda: begun.append(1))
    call = replay.replayed(lambda x: x + 1, None, None, None)
    call(torch.ones(1))
    assert not begun
    call(torch.ones(1, device="cuda"))
    assert begun


def test_compiled_and_transformed_calls_agree(replay):
    inputs, op = CASES["mhla 196"]()
    expected = compute(inputs, op)
    with replay():
        compute(inputs, op)
        compiled = compute(inputs, torch.compile(op, fullgraph=True))
        torch.testing.assert_close(compiled, expected)
        loss = torch.func.grad(lambda q: mhla(q, *inputs[1:], TokenBlocks.from_grid((14, 14), (4, 4))).float().sum())
        assert loss(inputs[0]).shape == inputs[0].shape
