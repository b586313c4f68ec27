"""Build and load the extension that replays calls of the ops, ``replay.cpp``, in the background.

It is cached where Triton caches kernels. One process of those that share a cache compiles it, the others wait in their
backgrounds, and the end of a process ends its compiler. Where it cannot be built, all calls stay ordinary ones. A
warning says why if the variable ``HEADMIX_VISION_REPLAY`` asks for replayed calls; else the logger of this module does.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headmix_vision.ops import dispatch
from headmix_vision.ops.hardware import NO_KERNELS

NAME = "headmix_vision_replay"
_FILE, _SOURCE = f"{NAME}.so", Path(__file__).resolve().with_name("replay.cpp")
_TORCH, _PYTHON = Path(torch.__file__).parent, Path(sysconfig.get_paths()["include"])
_FLAGS = ("-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden",
          f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")  # fmt: skip
_PATIENCE_S = 600
# Run the compiler, which takes 1.5 GB. Where memory runs out, it ends rather than the process that trains, unless
# a container ends as a whole. It ends with that process, too, even if a signal kills it: then the pipe ends.
_RUN = """{ echo 1000 > /proc/self/oom_score_adj; } 2> /dev/null
exec 3<&0
"$0" "$@" 3<&- < /dev/null & compiler=$!
{ trap "" TERM; read -r _ <&3; kill -TERM 0; rm -rf "$TMPDIR"; } & watch=$!
wait $compiler; status=$?
kill -KILL $watch; exit $status"""


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
