"""Record calls of the ops, and replay their forward and backward passes in C++.

Set the environment variable ``HEADMIX_VISION_REPLAY=1`` for it before the package is imported. It needs a C++ compiler:
the first call begins to compile ``replay.cpp``, which is cached where Triton caches kernels, and calls are ordinary
ones until that is done, for about half a minute. Then the first call of a kind records its allocations, kernel launches
and ops of PyTorch. They are replayed for this and all later calls of the kind.

Calls have the same kind if all that they may depend on agrees: the state of the thread (autocast, inference mode),
whether autograd records, settings, and for each tensor its dispatch keys, type, device, shape, strides, address modulo
16, and whether it is another argument, too. Compiled graphs call the ops, and these calls are replayed as eager ones
are. Graphs that launch the kernels themselves (``HEADMIX_VISION_COMPILED=inline``) have no such calls.

Calls that Python has to see stay ordinary ones: while a compiler or tracer runs them, under dispatch modes and
transformations of torch.func, of subclasses of tensors, in forward-mode differentiation, in the capture of a CUDA
graph, and in a backward pass that autograd records. So do calls that cannot be recorded; a warning says why. Compiled
autograd cannot trace the backward pass of a replayed call.
"""

from __future__ import annotations

import atexit
import copy
import hashlib
import importlib.util
import os
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode

from headmix_vision.ops import dispatch
from headmix_vision.ops.runtime import _forget, _recording

Call = Callable[..., Any]
NAME = "headmix_vision_replay"
_PATIENCE_S = 300.0
_PACKED = {"i8": "b", "i16": "h", "i32": "i", "i64": "q", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
           "fp32": "f", "fp64": "d"}  # fmt: skip
_SPECIAL = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
_EMPTY = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")
_ABSOLUTE = ("aten::as_strided", "aten::as_strided_", "aten::set_")  # with an offset into a storage
_UNREPEATABLE = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def build() -> str:
    """Return the path of the extension; compile it where Triton's cache does not have it.

    Of several processes on a machine, the others wait for the first one.
    """
    from triton.runtime.cache import get_cache_manager

    source, home = Path(__file__).with_name("replay.cpp"), Path(torch.__file__).parent
    key = hashlib.sha256(f"{torch.__version__} {sys.version} {source.read_text()}".encode()).hexdigest()
    cache, file = get_cache_manager(key), f"{NAME}.so"
    if os.environ.get("LOCAL_RANK", "0") != "0":
        last = time.monotonic() + _PATIENCE_S
        while cache.get_file(file) is None and time.monotonic() < last:
            time.sleep(1)
    if (path := cache.get_file(file)) is not None:
        return str(path)
    includes = home / "include", home / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, file)
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"]
        command += [*(f"-I{path}" for path in includes), str(source), "-o", str(built), f"-L{home / 'lib'}"]
        command += ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
        pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
        with subprocess.Popen(command, text=True, **pipe) as compiler:  # and the processes that it starts
            end = atexit.register(partial(os.killpg, compiler.pid, signal.SIGTERM))
            said = compiler.communicate()[0]
            atexit.unregister(end)
        if compiler.returncode:
            raise RuntimeError(f"{command[0]} ended with status {compiler.returncode}: {said}")
        return str(cache.put(built.read_bytes(), file, binary=True))


_ready, _lock = threading.Event(), threading.Lock()


def extension() -> Any:
    """Return the extension, when it is there; or None with a warning where it cannot be built."""
    with _lock:
        return _extension()


@lru_cache
def _extension() -> Any:
    try:
        spec: Any = importlib.util.spec_from_file_location(NAME, build())
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except Exception as error:  # of the compiler, the linker or the loader
        dispatch.warn_once(f"Calls of ops are not replayed: {error}"[:1000])
        return None
    finally:
        _ready.set()


@lru_cache
def _begin() -> None:
    if torch.cuda.is_available():  # calls on a CPU stay ordinary ones
        threading.Thread(target=extension, daemon=True).start()


class Tape(TorchDispatchMode):
    """Records what is launched, allocated and called of PyTorch while it is entered."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.steps = extension().Tape(tensors)
        self.held: list[Any] = []  # so that no two tensors are the same
        self.own: list[Tensor] = []  # tensors that are not views

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op in dispatch.RUNS:  # one of ours: record what it does
            with self:
                return dispatch.RUNS[op](*args, **kwargs)
        if op is torch.ops.aten.detach.default:  # by torch.empty_like
            return args[0]
        if _UNREPEATABLE & set(op.tags) or op._schema.name in _ABSOLUTE:
            raise NotImplementedError(f"{op} does not repeat itself")
        _recording.tape = None  # another op may launch kernels of ours
        try:
            out = op(*args, **kwargs)
        finally:
            _recording.tape = self
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        self.held += outs
        if not any(result.alias_info for result in op._schema.returns):
            self.own += outs
        if op._schema.name in _EMPTY:
            self.steps.allocate(out)
        else:
            self.steps.op(op._schema.name, op._schema.overload_name, args, kwargs, outs)
        return out

    def launch(self, kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        """Record the launch of a kernel that Triton has compiled, with its arguments by name."""
        about = kernel.metadata
        if about.num_ctas != 1 or any(getattr(kernel.run, name) for name in _SPECIAL):
            raise NotImplementedError(f"{about.name} needs scratch memory, or a special launch")
        packed = [
            arguments[name] if kind[0] == "*" else struct.pack(_PACKED[kind], arguments[name])
            for name, kind in kernel.src.signature.items()
            if kind != "constexpr"
        ]
        self.steps.launch(kernel.function, grid, 32 * about.num_warps, about.shared, packed)


def _tape(call: Call, args: Sequence[Any], tensors: Sequence[Tensor | None]) -> tuple[Tape, Any]:
    """Record a call that depends on tensors; also return its results."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView"):  # they copy views
        excluded = excluded.add(getattr(torch._C.DispatchKey, name))
    with torch.no_grad(), torch._C._ForceDispatchKeyGuard(included, excluded), Tape(tensors) as tape:
        _recording.tape = tape
        try:
            results = call(*args)
        finally:
            _recording.tape = None
    return tape, results


def _attempt(run: Call, plan: Call, *args: Any) -> Any:
    try:
        return plan(*args) if dispatch.is_eager() else None
    except Exception as error:  # such calls stay ordinary ones
        dispatch.warn_once(f"A call of {run.__module__}.{run.__name__} is not replayed: {error!r}"[:500])
        return None


def _calls(ordinary: Call, run: Call, plan: Call) -> Call:
    """Return a function that calls ``ordinary`` until the extension is there, then replays the plans of ``run``."""

    @lru_cache
    def calls() -> Call:
        if extension() is None:
            return ordinary
        made = extension().Calls(ordinary, partial(_attempt, run, plan))
        _forget.append(made.forget)
        return cast(Call, made)

    def call(*args: Any) -> Any:
        if _ready.is_set():
            return calls()(*args)
        _begin()
        return ordinary(*args)

    return call


def replayed_in_graphs(run: Call) -> Call:
    """Return a function that replays ``run``, as compiled graphs call it: without gradients, below autograd."""

    def plan_call(*args: Any) -> Any:
        tape, results = _tape(run, args, [x for x in args if isinstance(x, Tensor)])
        is_single = isinstance(results, Tensor)
        plan = extension().Plan(tape.steps, [results] if is_single else results, [])
        plan.is_single = is_single
        return plan

    return _calls(run, run, plan_call)


def replayed(ordinary: Call, run: Call, setup_context: Call, backward: Call) -> Call:
    """Return a function that replays ``ordinary``, the autograd function of the others, or calls it."""

    def plan_forward(*args: Any) -> Any:
        places = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
        tape, results = _tape(run, args, [args[i] for i in places])
        context: Any = FunctionCtx()
        setup_context(context, args, results)
        saved, not_differentiable = (getattr(context, name, ()) for name in ("to_save", "non_differentiable"))
        context.to_save = context.non_differentiable = context.saved_for_forward = ()  # which the plan does not keep
        if any(isinstance(x, Tensor) for x in vars(context).values()):
            raise NotImplementedError("its context holds a tensor")
        outputs = [results] if isinstance(results, Tensor) else results
        if not all(any(x is y for y in tape.own) for x in outputs):
            raise NotImplementedError("an output may be a view")
        differentiable = [all(x is not y for y in not_differentiable) for x in outputs]

        def gradients(*given: Tensor | None) -> list[Tensor | None]:
            """Compute the gradients of tensors from the differentiable outputs' gradients and saved tensors."""
            here, rest = copy.copy(context), iter(given)
            d_outputs = [next(rest) if is_differentiable else None for is_differentiable in differentiable]
            here.saved_tensors = tuple(rest)
            computed = backward(here, *d_outputs)
            return [computed[i] for i in places]

        def plan_backward(*given: Tensor | None) -> Any:
            tape, results = _tape(gradients, given, given)
            return extension().Plan(tape.steps, results, [])

        plan = extension().Plan(tape.steps, outputs, saved)
        plan.differentiable, plan.is_single = differentiable, isinstance(results, Tensor)
        plan.materialize = getattr(context, "materialize_grads", True)
        plan.backward = extension().Calls(gradients, partial(_attempt, run, plan_backward))
        return plan

    return _calls(ordinary, run, plan_forward)
