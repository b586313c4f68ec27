"""Replayed calls without a GPU. `test_replay.py` runs this file beside a driver that stands in for CUDA's."""

import ctypes
import gc
import os
import re
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import triton
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from headmix_vision.layers.block_mixing import clip_keep_inward_gradient
from headmix_vision.ops import TokenBlocks, TokenRanks, grid_conv, hardware, head_in_head, mhla
from headmix_vision.ops import replay as replay_module
from headmix_vision.ops.dispatch import COMPILED, _warned, as_function
from headmix_vision.ops.hardware import right_assembler
from headmix_vision.ops.runtime import Launch, _recording, forget_plans

assert replay_module.extension() is not None  # before the tests: calls do not wait for it
CUDA = ctypes.CDLL("libcuda.so.1")
CUDA.take.restype = ctypes.c_char_p


class Kernel:
    """Stands in for a kernel of Triton, before and after it is compiled."""

    __name__ = "product_kernel"
    arg_names = ("out", "x", "y", "n", "factor")
    src = SimpleNamespace(signature=dict(zip(arg_names, ("*fp64", "*fp64", "*fp64", "i32", "fp32"), strict=True)))
    metadata = SimpleNamespace(name=__name__, num_ctas=1, num_warps=2, shared=0)
    function = ctypes.addressof(ctypes.c_char.in_dll(CUDA, "product_kernel"))
    global_scratch_size = profile_scratch_size = launch_cooperative_grid = launch_pdl = 0

    @property
    def run(self):
        return self

    def __getitem__(self, grid):
        def launch(out, x, y, n, factor, **_):
            values = (out, x, y)
            values = [v if isinstance(v, int) else v.data_ptr() for v in values]
            values = [*map(ctypes.c_uint64, values), ctypes.c_int(n), ctypes.c_float(factor)]
            values += [ctypes.c_uint64(0), ctypes.c_uint64(0)]
            pointers = (ctypes.c_void_p * 7)(*map(ctypes.addressof, values))
            CUDA.cuLaunchKernel(ctypes.c_void_p(self.function), *grid, 64, 1, 1, 0, None, pointers, None)
            return self

        return launch


class Op:
    """An op of two tensors, whose functions count their calls: out = 3 x y, and x y summed from a zero."""

    def __init__(self):
        self.forwards = self.backwards = 0
        self.apply = as_function(self._forward, self._setup_context, self._backward)

    def _multiply(self, out, x, y, factor):
        Launch(Kernel(), (1,), (out.numel(), factor), {})(out, x.contiguous(), y.contiguous())

    def _forward(self, x, y, factor):
        self.forwards += 1
        out, other = x.new_empty(x.shape), torch.empty_like(x)
        self._multiply(out, x, y, factor)
        other.copy_(out.flatten().sum().expand(x.shape))
        return out, other

    def _setup_context(self, ctx, inputs, output):
        x, y, ctx.factor = inputs
        ctx.save_for_backward(x, None, y, output[0])
        ctx.mark_non_differentiable(output[1])

    def _backward(self, ctx, d_out, _):
        self.backwards += 1
        x, nothing, y, _ = ctx.saved_tensors
        assert nothing is None
        d_x, d_y = x.new_empty(x.shape), x.new_zeros((2, *x.shape))
        self._multiply(d_x, d_out, y, ctx.factor)
        self._multiply(d_y[1], d_out, x, ctx.factor)
        return d_x, d_y.sum(0), None


@pytest.fixture
def op(monkeypatch):
    monkeypatch.setattr(hardware, "find_gpu", lambda device: hardware.Gpu("no GPU", (8, 9), 99 << 10))
    return Op()


def draw(*shape):
    return torch.rand(shape, dtype=torch.float64)


def check(op, x, y, factor=3.0, d_out=None):
    """Call with gradients, and compare."""
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    out, other = op.apply(x, y, factor)
    d_out = draw(*x.shape) if d_out is None else d_out
    d_x, d_y = torch.autograd.grad(out, (x, y), d_out)
    torch.testing.assert_close(out, x * y * factor)
    torch.testing.assert_close(other, out.sum().expand(x.shape))
    assert not other.requires_grad
    torch.testing.assert_close(d_x, d_out * y * factor)
    torch.testing.assert_close(d_y, d_out * x * factor)


FACTOR = 3.0


def replay(op, *shape):
    """Call often enough for a replay in both passes, and return how often Python has run."""
    for _ in range(5):
        check(op, draw(*shape), draw(*shape), FACTOR)
    return op.forwards, op.backwards


def test_second_call_runs_no_python(op):
    assert replay(op, 4, 5) == (1, 1)
    assert replay(op, 4, 5) == (1, 1)


def test_calls_are_ordinary_until_the_extension_is_there(op, monkeypatch):
    there, asked = threading.Event(), []
    monkeypatch.setattr(replay_module, "_ready", there)
    monkeypatch.setattr(replay_module, "_begin", lambda args: asked.append(args))
    assert replay(op, 4, 5) == (5, 5) and len(asked) == 5
    there.set()
    assert replay(op, 4, 5) == (6, 6)


def test_numbers_are_equal_by_value_and_type(op):
    for i in range(6):
        check(op, draw(4, 5), draw(4, 5), float(f"{i % 2}.5"))
    assert op.forwards == 2
    x, y = draw(4, 5), draw(4, 5)
    for factor in (2, 2.0, True, 2, 2.0, True):
        assert torch.equal(op.apply(x, y, factor)[0], x * y * factor)
    assert op.forwards == 5


def test_each_kind_is_its_own(op):
    replay(op, 4, 6)
    for _ in range(4):
        check(op, draw(4, 6), draw(4, 6), 2.0)
        check(op, draw(3, 6), draw(3, 6), FACTOR)
        check(op, draw(6, 4).T, draw(4, 6), FACTOR)
        check(op, draw(25)[1:].view(4, 6), draw(4, 6), FACTOR)
        check(op, draw(4, 6), draw(4, 6), FACTOR, d_out=draw(1).expand(4, 6))
        check(op, draw(4, 6), draw(4, 6), FACTOR, d_out=draw(4, 12)[:, ::2])


def test_one_tensor_twice(op):
    x = draw(3, 4)
    for _ in range(4):
        out, _ = op.apply(x, x, FACTOR)
        torch.testing.assert_close(out, x * x * FACTOR)
    y = draw(3, 4)
    for _ in range(4):
        torch.testing.assert_close(op.apply(x, y, FACTOR)[0], x * y * FACTOR)


def test_results_own_their_memory(op):
    replay(op, 4, 4)
    x, y = draw(4, 4), draw(4, 4)
    first = op.apply(x, y, FACTOR)[0]
    kept = first.clone()
    op.apply(y, y.clone(), FACTOR)
    assert torch.equal(first, kept)


def test_changed_inputs_and_freed_tensors_raise(op):
    replay(op, 4, 4)
    x, y = draw(4, 4).requires_grad_(), draw(4, 4)
    z = x + 1
    out = op.apply(z, y, FACTOR)[0]
    z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out = op.apply(x + 1, y, FACTOR)[0]
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_saved_tensors_go_with_the_backward_pass(op):
    replay(op, 4, 4)
    x, y = draw(4, 4).requires_grad_(), draw(4, 4)
    z = x + 1
    out, alive = op.apply(z, y, FACTOR)[0], weakref.ref(z)
    del z
    assert alive() is not None
    loss = out.sum()
    loss.backward()
    assert alive() is None


def test_hooks_and_checkpoints(op):
    seen = {"packed": 0, "unpacked": 0, "output": 0, "node": 0}

    def hook(name, x, factor=1):
        seen[name] += 1
        return x if factor == 1 else factor * x

    y = draw(4, 4)
    for _ in range(5):
        x = draw(4, 4).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(partial(hook, "packed"), partial(hook, "unpacked")):
            out = op.apply(x, y, FACTOR)[0]
        out.register_hook(partial(hook, "output", factor=2))
        out.grad_fn.register_prehook(partial(hook, "node"))
        out.backward(torch.ones(4, 4, dtype=torch.float64))
        torch.testing.assert_close(x.grad, 2 * y * FACTOR)
    assert seen == {"packed": 15, "unpacked": 15, "output": 5, "node": 5}
    for _ in range(5):
        x = draw(4, 4).requires_grad_()
        checkpoint(lambda x: op.apply(x + 1, y, FACTOR)[0], x, use_reentrant=False).sum().backward()
        torch.testing.assert_close(x.grad, y * FACTOR)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("replayed_first", [False, True])
def test_checkpoints_of_calls_that_begin_or_cease_to_be_replayed(op, monkeypatch, replayed_first, use_reentrant):
    """The recomputation saves what the forward pass has saved, as a checkpoint demands."""
    there = threading.Event()
    monkeypatch.setattr(replay_module, "_ready", there)
    for _ in range(3):
        x, y = draw(4, 4).requires_grad_(), draw(4, 4)
        (there.set if replayed_first else there.clear)()
        out = checkpoint(lambda x, y=y: op.apply(x + 1, y, FACTOR)[0], x, use_reentrant=use_reentrant)
        (there.clear if replayed_first else there.set)()
        out.sum().backward()
        torch.testing.assert_close(x.grad, y * FACTOR)


def test_selective_checkpoints_and_tensors_kept_on_the_cpu(op):
    def choose(context, op, *_, **options):
        return CheckpointPolicy.MUST_SAVE if "mul" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    for _ in range(3):
        x, y = draw(4, 4).requires_grad_(), draw(4, 4)
        contexts = partial(create_selective_checkpoint_contexts, choose)
        call = partial(checkpoint, use_reentrant=False, context_fn=contexts)
        call(lambda x, y=y: op.apply(x * 2, y, FACTOR)[0], x).sum().backward()
        with torch.autograd.graph.save_on_cpu():
            out = op.apply(x + 1, y, FACTOR)[0]
        out.sum().backward()
        torch.testing.assert_close(x.grad, 3 * y * FACTOR)


def test_derivatives_agree_with_differences(op):
    x, y = draw(3, 3).requires_grad_(), draw(3, 3).requires_grad_()
    for _ in range(2):  # with gradients of outputs that are missing, of zeros and of other strides
        assert torch.autograd.gradcheck(lambda x, y: op.apply(x, y, 1.5)[0], (x, y))
    assert op.forwards == 1


def test_gradients_of_gradients_are_ordinary(op):
    replay(op, 4, 4)
    before = op.backwards
    x, y = draw(4, 4).requires_grad_(), draw(4, 4)
    torch.autograd.grad(op.apply(x, y, FACTOR)[0].sum(), x, create_graph=True)
    assert op.backwards == before + 1


def test_no_grad_inference_and_threads_states(op):
    x, y = draw(4, 4).requires_grad_(), draw(4, 4)
    for _ in range(4):
        with torch.no_grad():
            assert not op.apply(x, y, FACTOR)[0].requires_grad
        with torch.inference_mode():
            assert op.apply(x, y, FACTOR)[0].is_inference()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            check(op, x, y, FACTOR)
        check(op, x, y, FACTOR)


def test_calls_in_a_capture_are_ordinary(op):
    replay(op, 4, 4)
    x, y = draw(4, 4), draw(4, 4)
    CUDA.capture(1)
    try:
        check(op, x, y, FACTOR)
        check(op, draw(2, 9), draw(2, 9), FACTOR)
        check(op, draw(2, 9), draw(2, 9), FACTOR)
    finally:
        CUDA.capture(0)
    assert (op.forwards, op.backwards) == (4, 4)
    check(op, x, y, FACTOR)
    assert (op.forwards, op.backwards) == (4, 4)


def test_a_changed_output_that_is_saved_raises(op):
    replay(op, 4, 4)
    out = op.apply(draw(4, 4).requires_grad_(), draw(4, 4), FACTOR)[0]
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("which", [0, 1])
def test_one_input_alone_requires_grad(op, which):
    for _ in range(4):
        inputs = [draw(4, 4), draw(4, 4)]
        inputs[which].requires_grad_()
        op.apply(*inputs, FACTOR)[0].sum().backward()
        torch.testing.assert_close(inputs[which].grad, inputs[1 - which] * FACTOR)
        assert inputs[1 - which].grad is None


def test_anomaly_and_deterministic_modes_and_threads(op):
    replay(op, 4, 4)
    with torch.autograd.detect_anomaly(check_nan=True):
        check(op, draw(4, 4), draw(4, 4), FACTOR)
    torch.use_deterministic_algorithms(True)
    try:
        check(op, draw(4, 4), draw(4, 4), FACTOR)
    finally:
        torch.use_deterministic_algorithms(False)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(check, op, draw(4, 4), draw(4, 4), FACTOR) for _ in range(40)]:
            done.result()
    assert (op.forwards, op.backwards) == (1, 1)


def test_gradients_of_other_types_are_cast(op):
    replay(op, 4, 4)
    x, y, d_out = draw(4, 4).requires_grad_(), draw(4, 4), draw(4, 4).float()
    op.apply(x, y, FACTOR)[0].backward(d_out)
    assert x.grad.dtype == torch.float64
    torch.testing.assert_close(x.grad, d_out.double() * y * FACTOR)


def test_tensors_of_ended_transformations(op):
    replay(op, 4, 4)
    kept = []
    torch.func.grad(lambda x: kept.append(x) or x.sum())(draw(4, 4))
    for _ in range(3):
        torch.testing.assert_close(op.apply(kept[0], kept[0], FACTOR)[0], kept[0] * kept[0] * FACTOR)


class Forward(Op):
    """An op without gradients, whose forward pass is given."""

    def __init__(self, forward, setup_context=lambda *_: None):
        self.run, self.set_up = forward, setup_context
        super().__init__()

    def _forward(self, *args):
        self.forwards += 1
        return self.run(self, *args)

    def _setup_context(self, *args):
        self.set_up(*args)

    def product(self, x, y, factor=1.0):
        out = x.new_empty(x.shape)
        self._multiply(out, x, y, factor)
        return out


def test_casts_that_autocast_keeps_are_no_constants(op):
    op = Forward(lambda op, x, w: op.product(x, (w @ w).double()))
    x, w = torch.eye(64, dtype=torch.float64), torch.rand(64, 64, requires_grad=True)
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = x * (w @ w).double()  # and casts w, for all of the context
            assert torch.equal(op.apply(x, w), expected)
        with torch.no_grad():
            w.mul_(1.5)


def test_memory_goes_as_in_an_ordinary_call(op):
    def forward(op, x):
        buffer = op.product(x, x)
        out, gone = op.product(buffer, buffer), weakref.ref(buffer)
        del buffer
        alive.append(gone() is not None)
        return out

    alive = []
    op, x = Forward(forward), draw(4, 4)
    torch.testing.assert_close(op.apply(x), x**4)
    assert op.forwards == 1 and alive == [False]
    refs = []
    for _ in range(3):
        x, y = draw(5, 5).requires_grad_(), draw(5, 5)
        out = Op().apply(x, y, FACTOR)[0]
        out.backward(d_out := torch.ones_like(out))
        refs += map(weakref.ref, (x, y, out, d_out, x.grad))
        del x, y, out, d_out
    assert not any(ref() is not None for ref in refs)


def test_kernels_live_as_long_as_their_launches(op):
    kernels = weakref.WeakSet()

    def forward(op, x):
        kernel = Kernel()
        kernels.add(kernel)
        Launch(kernel, (1,), (x.numel(), 1.0), {})(out := x.new_empty(x.shape), x, x)
        return out

    op = Forward(forward)
    op.apply(draw(4, 4))
    gc.collect()
    assert len(kernels) == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none left"), KeyboardInterrupt()])
def test_errors_that_pass_are_not_kept(op, error):
    """Neither warning nor lasting harm: the next call of the kind is recorded."""

    def forward(op, x, y):
        if op.forwards == 1:
            raise error
        return op.product(x, y)

    def backward(ctx, d_out):
        op.backwards += 1
        if op.backwards == 1:
            raise error
        return d_out, d_out

    op = Forward(forward)
    op._backward = backward
    op.apply = as_function(op._forward, op._setup_context, backward)
    x, y = draw(4, 4).requires_grad_(), draw(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(type(error)):
            op.apply(x, y)
        assert _recording.tape is None and _get_current_dispatch_mode() is None and torch.is_autocast_cache_enabled()
        out = op.apply(x, y)
        with pytest.raises(type(error)):
            out.sum().backward(retain_graph=True)
        for _ in range(3):
            op.apply(x, y).sum().backward()
    assert (op.forwards, op.backwards) == (2, 2)


def test_errors_of_replays_have_their_types(op):
    replay(op, 4, 4)
    with pytest.raises(IndexError):  # of a boxed call
        take = Forward(lambda op, x, i: op.product(x, x.index_select(0, i)))
        for index in ([0, 1], [1, 0], [1, 9]):
            take.apply(draw(2, 2), torch.tensor(index))
    assert take.forwards == 1


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return op(*args, **(kwargs or {}))


def test_calls_that_others_watch_are_ordinary(op):
    replay(op, 4, 4)
    hook, add = list, knobs.runtime.launch_enter_hook.add
    for i in range(3):
        with Watch():
            check(op, draw(4, 4), draw(4, 4))
        add(hook)
        check(op, draw(4, 4), draw(4, 4))
        knobs.runtime.launch_enter_hook.remove(hook)
        assert (op.forwards, op.backwards) == (3 + 2 * i, 3 + 2 * i)
    check(op, draw(4, 4), draw(4, 4))
    assert (op.forwards, op.backwards) == (7, 7)


def test_compiled_autograd(op):
    replay(op, 4, 4)
    x, y = draw(4, 4).requires_grad_(), draw(4, 4)
    out = op.apply(x, y, FACTOR)[0]
    with compiled_autograd._enable(torch.compile(backend="eager")):
        op.apply(x, y, FACTOR)[0].sum().backward()
        torch.testing.assert_close(x.grad, y * FACTOR)
        with pytest.raises(
            NotImplementedError, match="Enable it before the forward pass, or set HEADMIX_VISION_REPLAY"
        ):
            out.sum().backward()


def test_effects_happen_once(op):
    """A record would run a collective once, and its replay a second time, perhaps on one rank alone."""
    runs, library = [], torch.library.Library("test_of_replay", "FRAGMENT")
    library.define("reduce(Tensor x) -> Tensor")
    library.impl("reduce", lambda x: runs.append(1) or x.clone(), "CPU")
    op = Forward(lambda op, x: op.product(torch.ops.test_of_replay.reduce(x), x))
    with pytest.warns(UserWarning, match="not replayed: .*may have an effect"):
        for i in range(3):
            op.apply(draw(3, 3))
            assert len(runs) == i + 1


def test_settings_are_equal_by_value_and_type(op):
    op = Forward(lambda op, x, settings: op.product(x, x, float(len(settings))))
    for _ in range(2):
        for settings in ((1, 2), [1, 2], (1, 2, 3), (), [], (1, True), (1, 2.5)):
            x = draw(3, 3)  # tuples of whole numbers are made anew, and all others are constants of this function
            given = tuple(list(settings)) if settings == (1, 2) and isinstance(settings, tuple) else settings
            torch.testing.assert_close(op.apply(x, given), x * x * len(settings))
    assert op.forwards == 7


def test_kinds_have_an_end(op):
    op = Forward(lambda op, x: op.product(x, x))
    for i in range(600):
        op.apply(draw(1, 1 + i))
    before = op.forwards
    for i in range(600):
        op.apply(draw(1, 1 + i))
    assert before == 600 and op.forwards == 688  # 512 kinds are kept


def test_forks_and_racing_threads(op):
    def work(size):
        check(op, draw(4, size), draw(4, size))

    for size in range(4, 12):
        threads = [threading.Thread(target=work, args=(size,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    child = os.fork()
    if not child:
        try:
            work(4)
            work(20)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_places_of_missing_tensors_are_a_part_of_the_kind(op):
    op = Forward(lambda op, x, y, z: op.product(x, y, 2.0) if z is None else op.product(x, z, 3.0))
    x, y = draw(4, 4), draw(4, 4)
    for _ in range(3):
        torch.testing.assert_close(op.apply(x, y, None), x * y * 2)
        torch.testing.assert_close(op.apply(x, None, y), x * y * 3)
    assert op.forwards == 2


def test_types_of_autocast_are_a_part_of_the_kind(op):
    op = Forward(lambda op, x, y: op.product(x, (y.float() @ y.float()).double()))
    x, y = torch.eye(64, dtype=torch.float64), draw(64, 64)
    for _ in range(3):
        found = {}
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                found[dtype] = op.apply(x, y)
                assert torch.equal(found[dtype], x * (y.to(dtype) @ y.to(dtype)).double())
    assert op.forwards == 2 and not torch.equal(*found.values())


def hide(x):
    """Return a view that no mode sees."""
    with _disable_current_modes():
        return x.view(x.shape)


@pytest.mark.parametrize(
    ("forward", "setup_context", "message"),
    [
        (lambda op, x: op.product(hide(x), x), lambda *_: None, "a view was made without an op"),
        (lambda op, x: op.product(x, x.as_strided((3, 3), (3, 1), 0)), lambda *_: None, "does not repeat itself"),
        (lambda op, x: op.product(x, torch.rand_like(x)), lambda *_: None, "does not repeat itself"),
        (lambda op, x: op.product(x, x), lambda ctx, *_: setattr(ctx, "kept", draw(1)), "its context holds a tensor"),
        (
            lambda op, x: op.product(x, x),
            lambda ctx, *_: setattr(ctx, "kept", [(draw(1),)]),
            "its context holds a tensor",
        ),
        (lambda op, x: x.view(9), lambda *_: None, "an output may be a view"),
        (lambda op, x: op.product(x, x) if x.to("meta").is_meta else x, lambda *_: None, "copies to another device"),
    ],
    ids=[
        "hidden view",
        "absolute offset",
        "random numbers",
        "tensor of a context",
        "list of a context",
        "view",
        "copy",
    ],
)
def test_calls_that_do_not_repeat_are_ordinary(op, forward, setup_context, message):
    op = Forward(forward, setup_context)
    _warned.clear()
    with pytest.warns(UserWarning, match=f"not replayed: .*{message}"):
        for _ in range(3):
            op.apply(draw(3, 3))
    assert op.forwards == 4


def test_errors_of_the_driver_are_raised(op):
    replay(op, 4, 4)
    x, y = draw(4, 4).requires_grad_(), draw(4, 4)
    out = op.apply(x, y, FACTOR)[0]
    CUDA.fail(1)
    try:
        with pytest.raises(RuntimeError, match="a failure of the test"):
            op.apply(x, y, FACTOR)
        with pytest.raises(RuntimeError, match="a failure of the test"):
            out.backward(draw(4, 4))
    finally:
        CUDA.fail(0)
    check(op, x, y, FACTOR)


def test_unknown_parameters_are_refused(op, monkeypatch):
    monkeypatch.setitem(Kernel.src.signature, "n", "i64")
    with pytest.warns(UserWarning, match="not replayed: .* other parameters"):
        assert replay(op, 7, 1)[0] == 6


def test_forgotten_plans_are_made_anew(op):
    forwards, _ = replay(op, 4, 4)
    forget_plans()
    assert replay(op, 4, 4)[0] == 2 * forwards


def test_clips_of_mixing_weights_are_replayed():
    weight = torch.tensor([-0.5, 0.0, 0.5, 1.0, 1.5], requires_grad=True)
    for _ in range(4):
        for gradient, expected in ((torch.ones(5), [0, 0, 1, 1, 1]), (-torch.ones(5), [-1, -1, -1, 0, 0])):
            out = clip_keep_inward_gradient(weight, 0.0, 1.0)
            assert out.grad_fn.name() == "ReplayedBackward"
            (found,) = torch.autograd.grad(out, weight, gradient)
            assert torch.equal(found, torch.tensor(expected, dtype=torch.float32))
            assert torch.equal(out, weight.clamp(0, 1))


def test_tangents_of_gradients_are_kept():
    weight, grad, tangent = torch.rand(5).requires_grad_(), torch.rand(5), torch.rand(5)
    for _ in range(3):
        out = clip_keep_inward_gradient(weight, 0.0, 1.0)
        torch.autograd.grad(out, weight, grad, retain_graph=True)
        with forward_ad.dual_level():
            (found,) = torch.autograd.grad(out, weight, forward_ad.make_dual(grad, tangent))
            assert torch.equal(forward_ad.unpack_dual(found).tangent, tangent)


def parameters_of(ptx):
    """Read the sizes of a kernel's parameters."""
    entry = ptx[ptx.index(".entry") :].partition(")")[0]
    return [int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)", entry)]


class DriverKernel(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int), ("sizes", ctypes.c_int * 96), ("run", ctypes.c_void_p))


KEPT = []  # as long as Triton keeps what it has compiled


@pytest.fixture(params=[(9, 0), (8, 9)], ids=str)
def gpu(request, monkeypatch):
    """Compile for a GPU that is not there; Triton's launcher and ours reach the driver that stands in."""

    def compile(kernel, key, signature, device, constants, options, attributes, warmup):
        source = kernel.ASTSource(kernel, signature, constants, attributes)
        with right_assembler():
            compiled = triton.compile(source, target=target, options=options.__dict__)
        sizes = parameters_of(compiled.asm["ptx"])
        KEPT.append(DriverKernel(len(sizes), (ctypes.c_int * 96)(*sizes)))
        compiled.module, compiled.function = compiled, ctypes.addressof(KEPT[-1])
        compiled._run = CudaLauncher(compiled.src, compiled.metadata)
        kernel.device_caches[device][0][key] = compiled
        return compiled

    target = GPUTarget("cuda", 10 * request.param[0] + request.param[1], 32)
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)  # the driver lacks functions that nothing calls
    utils = CudaUtils()
    sys.setdlopenflags(flags)
    active = SimpleNamespace(utils=utils, get_current_device=lambda: target.arch, get_current_stream=lambda _: 0,
                             get_current_target=lambda: target)  # fmt: skip
    driver.set_active(active)
    monkeypatch.setattr(JITFunction, "_do_compile", compile)
    memory = 227 << 10 if request.param == (9, 0) else 99 << 10
    monkeypatch.setattr(hardware, "find_gpu", lambda device: hardware.Gpu("no GPU", request.param, memory, 132))
    forget_plans()
    yield
    forget_plans()


BLOCKS = TokenBlocks.from_grid((14, 14), (4, 4))

ONE_BLOCK = TokenBlocks.from_grid((24, 24), (1, 1))


def half(*shape):
    return torch.rand(shape, dtype=torch.bfloat16).requires_grad_()


CASES = {
    "mhla": lambda: ([half(2, 196, 6, 64) for _ in range(3)] + [torch.rand(16, 16).requires_grad_()],
                     lambda *x: mhla(*x, BLOCKS, impl="triton")),
    "mhla summary": lambda: ([half(2, 196, 6, 64) for _ in range(3)] + [torch.rand(16, 16).requires_grad_()],
                             lambda *x: mhla(*x, BLOCKS, impl="triton_summary")),
    "mhla of one block": lambda: ([half(2, 576, 3, 64) for _ in range(3)] + [torch.rand(1, 1).requires_grad_()],
                                  lambda *x: mhla(*x, ONE_BLOCK, impl="triton")),
    "head_in_head": lambda: ([*(half(1, 64, 3, 64) for _ in range(3)), half(1, 64, 3), -half(1, 64, 3), half(3, 4, 4)],
                             lambda *x: head_in_head(*x, impl="triton")[0]),
    "grid_conv": lambda: ([half(2, 196, 64), torch.rand(64, 1, 3, 3).requires_grad_(), torch.rand(64).requires_grad_()],
                          lambda *x: grid_conv(*x, grid=(14, 14), residual=True, silu=True, impl="triton")),
}  # fmt: skip


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_launches_are_those_of_triton(gpu, case, in_graph, monkeypatch):
    """All that reaches the driver is equal, but for the addresses of tensors that live within a call."""
    inputs, op = CASES[case]()
    if in_graph:
        op = torch.compile(op, backend="aot_eager", fullgraph=True)
    d_out, launches = torch.zeros_like(op(*inputs)), []
    forget_plans()
    names = {f"{x.data_ptr():x}": f"tensor {i}" for i, x in enumerate((*inputs, d_out))}

    def take():
        for line in CUDA.take().decode().splitlines():
            words = [names.get(word, word) for word in line.split()[1:]]
            yield [word if word.startswith("tensor") or len(word) < 9 else "address" for word in words]

    for i in range(4):
        if i == 1 and in_graph:  # what the graph calls must not run any more
            monkeypatch.setattr(Launch, "__call__", None)
        CUDA.take()
        out = op(*inputs)
        launches.append([*take()])
        torch.autograd.grad(out, inputs, d_out)
        launches.append([*take()])
    assert in_graph or out.grad_fn.name() == "ReplayedBackward"
    for first, *later in (launches[::2], launches[1::2]):  # by Triton, and then by us
        assert first == 2 * later[0] and later[0] == later[1] == later[2]


def test_graphs_of_ranks_launch_their_kernels(gpu, monkeypatch):
    monkeypatch.setenv(COMPILED, "inline")
    targets = []

    def compiler(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        blocks = BLOCKS.of_rank(TokenRanks.of(dist.group.WORLD))
        inputs = [*(half(2, blocks.num_tokens, 6, 64) for _ in range(3)), torch.rand(16, 16).requires_grad_()]
        call = partial(mhla, blocks=blocks, impl="triton")
        backend = aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
        torch.compile(call, fullgraph=True, backend=backend)(*inputs).sum().backward()
    finally:
        dist.destroy_process_group()
    assert not any("headmix_vision" in target for target in targets)
    for part, count in (("triton_kernel_wrapper", 4), ("all_gather_into_tensor_coalesced", 2), ("all_reduce", 0)):
        assert sum(part in target for target in targets) == count
