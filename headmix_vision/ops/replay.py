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
graph, in a backward pass that autograd records, under launch hooks of Triton, and where compiled autograd is enabled.
So do calls that cannot be recorded. Compiled autograd that is enabled after a replayed forward pass raises an error.

Where the extension cannot be built, all calls stay ordinary ones. A warning says why if the variable asks for replayed
calls; else the logger of this module does. One process of those that share a cache builds it, the others wait in their
backgrounds, and the end of the process ends its compiler.
"""

from __future__ import annotations

import atexit
import copy
import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headmix_vision.ops import dispatch
from headmix_vision.ops.hardware import NO_KERNELS
from headmix_vision.ops.runtime import KernelFailed, _forget, _recording

if NO_KERNELS is None:
    from triton import knobs

    _hooks: Any = knobs.runtime

Call = Callable[..., Any]
NAME = "headmix_vision_replay"
_FILE, _SOURCE = f"{NAME}.so", Path(__file__).resolve().with_name("replay.cpp")
_TORCH, _PYTHON = Path(torch.__file__).parent, Path(sysconfig.get_paths()["include"])
_FLAGS = ("-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden",
          f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")  # fmt: skip
_PATIENCE_S = 600
# Run the compiler, which takes 1.5 GB. Where memory runs out, it ends rather than the process that trains. It ends with
# that process, too, even if a signal kills it: then the pipe ends that is read here.
_RUN = """{ echo 1000 > /proc/self/oom_score_adj; } 2> /dev/null
exec 3<&0
"$0" "$@" 3<&- < /dev/null & compiler=$!
{ trap "" TERM; read -r _ <&3; kill -TERM 0; rm -rf "$TMPDIR"; } & watch=$!
wait $compiler; status=$?
kill -KILL $watch; exit $status"""
_PACKED = {"i8": "b", "i16": "h", "i32": "i", "i64": "q", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
           "fp32": "f", "fp64": "d"}  # fmt: skip
_SPECIAL = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
_EMPTY = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")
_ABSOLUTE = ("aten::as_strided", "aten::as_strided_", "aten::set_")  # with an offset into a storage
_UNREPEATABLE = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _key() -> str:
    """Return a name for all that the extension depends on: PyTorch, Python, the processor and the source."""
    facts = torch.__version__, torch.version.git_version, sys.version, sysconfig.get_config_var("EXT_SUFFIX"), *_FLAGS
    return hashlib.sha256(" ".join([*map(str, facts), _SOURCE.read_text()]).encode()).hexdigest()


def _why_not_here() -> str | None:
    """Return why the extension cannot serve this process, or None."""
    if sys.platform != "linux":
        return "it takes Linux"
    if NO_KERNELS is not None:
        return NO_KERNELS
    if torch.version.hip is not None:
        return "it takes an NVIDIA GPU"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it takes a Python with the global interpreter lock"
    return None


def _compiler() -> list[str]:
    """Return the command of the compiler.

    Raises:
        RuntimeError: if it is not there, or headers are missing.
    """
    command = shlex.split(os.environ.get("CXX") or "c++")
    if not command or shutil.which(command[0]) is None:
        raise RuntimeError(f"there is no C++ compiler {' '.join(command)!r}: install g++ 10 or newer")
    for header, package in ((_PYTHON / "Python.h", "python3-dev"), (_TORCH / "include/ATen/ATen.h", "torch")):
        if not header.exists():
            raise RuntimeError(f"{header.name} is missing, which the package {package} has")
    return command


def build(unfit: tuple[int, int] | None = None) -> str:
    """Return the path of the extension; compile it where Triton's cache does not have it.

    Of all processes that share the cache, one compiles, and the others wait.

    Args:
        unfit: device and inode of a file of the cache that cannot be loaded.

    Raises:
        RuntimeError: with the reason.
    """
    from triton.runtime.cache import get_cache_manager

    cache: Any = get_cache_manager(_key())

    def find() -> str | None:
        path = cache.get_file(_FILE)
        return path if path is not None and _identity(path) != unfit else None

    if (path := find()) is not None:
        return path
    compiler = _compiler()
    with _alone(getattr(cache, "cache_dir", None), find):
        return find() or str(cache.put(_compile(compiler), _FILE, binary=True))


def _identity(path: str) -> tuple[int, int]:
    about = os.stat(path)
    return about.st_dev, about.st_ino


@contextmanager
def _alone(folder: str | None, find: Callable[[], str | None]) -> Iterator[None]:
    """Wait while another process holds a folder, until it has made what ``find`` returns.

    A process that ends lets go of the folder. File systems without locks are not waited for.

    Raises:
        OSError: if the folder takes no file.
        RuntimeError: if the other process takes too long.
    """
    if folder is None:
        yield
        return
    import fcntl  # of Linux

    last = time.monotonic() + _PATIENCE_S
    with open(os.path.join(folder, "building"), "w") as file:
        while find() is None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > last:
                    raise RuntimeError(f"another process has been building it for {_PATIENCE_S} s") from None
                time.sleep(0.5)
            except OSError:
                break
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # processes that were forked meanwhile have the file, too


def _compile(compiler: Sequence[str]) -> bytes:
    """Compile the extension in a folder that does not outlive the process.

    Raises:
        RuntimeError: if the compiler fails, or takes too long.
    """
    folder, owner = tempfile.mkdtemp(prefix=NAME), os.getpid()
    built, log = Path(folder, _FILE), Path(folder, "log")
    command = [*compiler, *_FLAGS, str(_SOURCE), "-o", str(built), f"-L{_TORCH / 'lib'}"]
    command += [f"-I{path}" for path in (_TORCH / "include", _TORCH / "include/torch/csrc/api/include", _PYTHON)]
    command += ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    started: list[subprocess.Popen[bytes]] = []

    def clean() -> None:
        for process in started:  # with those that it has started: the compiler's group
            if process.poll() is None:
                with suppress(OSError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(5)
            if process.stdin is not None:
                process.stdin.close()
        shutil.rmtree(folder, ignore_errors=True)

    def leave() -> None:
        if os.getpid() == owner:  # not a process that was forked meanwhile
            _leaving.set()
            clean()

    atexit.register(leave)
    try:
        with log.open("wb") as said:
            env = {**os.environ, "TMPDIR": folder, "LC_ALL": "C"}
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": said, "stderr": said}
            run = ["/bin/sh", "-c", _RUN, *command]
            started.append(subprocess.Popen(run, env=env, cwd=folder, start_new_session=True, **pipes))
        status = started[0].wait(_PATIENCE_S)
        if status:
            lines = log.read_text(errors="replace").splitlines() or ["without a word"]
            line = next((x for x in lines if "error" in x), lines[-1])
            raise RuntimeError(f"the compiler {' '.join(compiler)} ended with status {status}: {line}")
        return built.read_bytes()
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the compiler {' '.join(compiler)} took more than {_PATIENCE_S} s") from None
    finally:
        clean()
        atexit.unregister(leave)


_ready, _lock, _leaving = threading.Event(), threading.RLock(), threading.Event()
_loaded: list[Any] = []


def extension() -> Any:
    """Return the extension, when it is there; or None where it cannot be built."""
    if _loaded:
        return _loaded[0]
    reason = None
    with _lock:
        if not _loaded:
            try:
                _loaded.append(_find_or_build())
            except Exception as error:  # of the compiler, the linker, the loader, the cache or the disk
                _loaded.append(None)
                reason = " ".join(str(error).split())[:500]
            _ready.set()
    if reason is not None:
        _tell(f"Calls of ops run in Python, as their replay in C++ cannot be built: {reason}. Results are the same.")
    return _loaded[0]


def _find_or_build() -> Any:
    if NAME in sys.modules:  # this module was loaded again
        return sys.modules[NAME]
    if (reason := _why_not_here()) is not None:
        raise RuntimeError(reason)
    path = build()
    try:
        return _load(path)
    except ImportError:  # built on another kind of machine, or damaged
        return _load(build(_identity(path)))


def _load(path: str) -> Any:
    spec: Any = importlib.util.spec_from_file_location(NAME, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    return module


def _tell(message: str) -> None:
    """Warn users who have asked for replayed calls, and log for all others."""
    if _leaving.is_set():
        return
    if os.environ.get(dispatch.REPLAY) == "1":
        dispatch.warn_once(message)
    else:
        logging.getLogger(__name__).info(message)


def _begin(args: Sequence[Any]) -> None:
    """Build the extension in the background from the first call on that has a tensor on a GPU."""
    if any(isinstance(x, Tensor) and x.is_cuda for x in args) and torch.cuda.is_initialized():
        _start()


@lru_cache
def _start() -> None:
    with suppress(RuntimeError):  # no more threads, or Python ends: calls stay ordinary ones
        threading.Thread(target=extension, name=NAME, daemon=True).start()


class Tape(TorchDispatchMode):
    """Records what is launched, allocated and called of PyTorch while it is entered."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.steps = extension().Tape(tensors)
        self.device = next((x.device for x in tensors if x is not None), None)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op in dispatch.RUNS:  # one of ours: record what it does
            with self:
                return dispatch.RUNS[op](*args, **kwargs)
        if op is torch.ops.aten.detach.default:  # by torch.empty_like
            return args[0]
        if op.namespace != "aten":  # such as a collective, which must not run twice
            raise NotImplementedError(f"{op} may do more than compute")
        if _UNREPEATABLE & set(op.tags) or op._schema.name in _ABSOLUTE:
            raise NotImplementedError(f"{op} does not repeat itself")
        _recording.tape = None  # another op may launch kernels of ours
        try:
            out = op(*args, **kwargs)
        finally:
            _recording.tape = self
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        if self._is_here(args) and any(isinstance(x, Tensor) and x.device != self.device for x in outs):
            raise NotImplementedError(f"{op} leaves the device, perhaps for Python to read values")
        if op._schema.name in _EMPTY:
            self.steps.allocate(out)
        else:
            self.steps.op(op._schema.name, op._schema.overload_name, args, kwargs, outs)
        if not any(result.alias_info for result in op._schema.returns):
            self.steps.own(outs)
        return out

    def _is_here(self, args: Sequence[Any]) -> bool:
        return any(isinstance(x, Tensor) and x.device == self.device for x in args)

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
        self.steps.launch(kernel, kernel.function, grid, 32 * about.num_warps, about.shared, packed)


def _tape(call: Call, args: Sequence[Any], tensors: Sequence[Tensor | None]) -> tuple[Tape, Any]:
    """Record a call that depends on tensors; also return its results."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView"):  # they copy views
        excluded = excluded.add(getattr(torch._C.DispatchKey, name))
    caches_casts = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # a cast that was computed before would be a constant
    try:
        with torch.no_grad(), torch._C._ForceDispatchKeyGuard(included, excluded), Tape(tensors) as tape:
            _recording.tape = tape
            results = call(*args)
    finally:
        _recording.tape = None
        torch.set_autocast_cache_enabled(caches_casts)
    return tape, results


def _attempt(run: Call, plan: Call, *args: Any) -> Any:
    """Return the plan of a call, None for a kind whose calls stay ordinary ones, or NotImplemented for this call."""
    if not dispatch.is_eager():
        return NotImplemented
    try:
        return plan(*args)
    except torch.OutOfMemoryError:  # an ordinary call would meet it, too, and a later one of the kind may not
        raise
    except KernelFailed:  # of which the ordinary call warns
        return None
    except Exception as error:
        _tell(f"A call of {run.__module__}.{run.__name__} is not replayed: {error!r}"[:500])
        return None


def _is_watched() -> bool:
    """Return whether hooks of Triton, such as a profiler's, or compiled autograd have to see what a call does."""
    enter, leave = _hooks.launch_enter_hook, _hooks.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        return True
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and compiled_autograd.compiled_autograd_enabled


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
        if not _ready.is_set():
            _begin(args)
            return ordinary(*args)
        return (ordinary if _is_watched() else calls())(*args)

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
        if any(isinstance(x, Tensor) for x in tree_leaves(vars(context))):
            raise NotImplementedError("its context holds a tensor")
        outputs = [results] if isinstance(results, Tensor) else results
        if not all(tape.steps.owns(x) for x in outputs):
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
