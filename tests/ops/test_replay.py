"""Replayed calls without a GPU, in processes whose driver stands in for CUDA's.

`replay_cases.py` compares launches, and `replay_numbers.py` results. Both need the extension, which compiles in 30 s.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from headmix_vision.ops import dispatch, hardware, replay
from headmix_vision.ops import replay_build as building

HERE = Path(__file__).parent
PROCESSES = {  # MALLOC_PERTURB_ overwrites memory that is freed
    "replay_cases.py": {"TRITON_INTERPRET": "0"},
    "replay_numbers.py": {"TRITON_INTERPRET": "1", "MALLOC_PERTURB_": "85"},
}


@pytest.mark.slow
@pytest.mark.skipif(hardware.NO_KERNELS is not None or torch.cuda.is_available(), reason="needs Triton and no GPU")
@pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("c++")), reason="needs compilers of C and C++")
@pytest.mark.parametrize("file", PROCESSES)
def test_replayed_calls_beside_another_driver(file, tmp_path):
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, HERE / "replay_driver.c"], check=True)
    env = {"HEADMIX_VISION_REPLAY": "1", "TRITON_LIBCUDA_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    env |= {"OMP_NUM_THREADS": "1"} | PROCESSES[file]
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider", HERE / file]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


needs_triton = pytest.mark.skipif(hardware.NO_KERNELS is not None, reason="needs Triton")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the extension is built on Linux alone")


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Return a function that makes a script of the shell the compiler, in a process that has built nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(building, "_loaded", [])
    monkeypatch.setattr(building, "_ready", threading.Event())
    monkeypatch.setattr(replay, "_ready", building._ready)
    monkeypatch.setattr(building, "_PYTHON", tmp_path)
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(building.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "Python.h").touch()

    def make(script):
        (tmp_path / "compiler").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "compiler").chmod(0o755)
        monkeypatch.setenv("CXX", str(tmp_path / "compiler"))

    yield make
    assert not list((tmp_path / "temporary").iterdir())


BUILT = 'while [ "$1" != -o ]; do shift; done; echo "no library" > "$2"'  # a file that does not load
BROKEN = {
    "not there": ("", {"CXX": "no-such-compiler -O3"}, "no C.. compiler 'no-such-compiler -O3': install g.."),
    "fails": ("echo noise; echo 'replay.cpp:1: fatal error: c++20' >&2; exit 3", {}, "status 3: replay.cpp:1: fatal"),
    "makes nothing": ("exit 0", {}, "No such file or directory"),
    "hangs": ("sleep 61 & sleep 62", {}, "took more than 0.3 s"),
    "disk is full": ("cat $0 > /dev/full", {}, "status 1: .*No space left on device"),
    "no folder for the cache": ("exit 0", {"TRITON_CACHE_DIR": "/dev/null/cache"}, "Not a directory"),
    "does not load": (BUILT, {}, "invalid ELF header|file too short"),
}


def commands():
    """Return the command of each process, unless it ends meanwhile."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield path.read_bytes()


@needs_triton
@on_linux
@pytest.mark.parametrize("case", BROKEN)
def test_without_an_extension_calls_are_ordinary(case, compiler, monkeypatch, caplog):
    script, env, message = BROKEN[case]
    compiler(script)
    monkeypatch.setattr(building, "_PATIENCE_S", 0.3)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(dispatch.REPLAY, raising=False)
    caplog.set_level(logging.INFO, building.__name__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none for users who have not asked
        assert building.extension() is None
    assert len(caplog.messages) == 1
    monkeypatch.setattr(building, "_loaded", [])
    monkeypatch.setenv(dispatch.REPLAY, "1")
    with pytest.warns(UserWarning, match=f"Calls of ops run in Python, .*: .*({message})") as warned:
        assert building.extension() is None
    assert len(warned) == 1 and "\n" not in str(warned[0].message)
    assert building._ready.is_set() and building.extension() is None
    call = replay.replayed(lambda x: x + 1, lambda x: x + 1, None, None)
    assert call(1) == 2
    end = time.monotonic() + 5
    while any(x in said for said in commands() for x in (b"sleep\x0061\0", b"sleep\x0062\0")):
        assert time.monotonic() < end


@needs_triton
@on_linux
def test_missing_headers_are_named(compiler, monkeypatch, tmp_path):
    compiler("exit 0")
    (tmp_path / "Python.h").unlink()
    with pytest.raises(RuntimeError, match=r"Python.h is missing, which the package python3-dev has"):
        building.build()


@needs_triton
@on_linux
def test_a_file_that_does_not_load_is_built_again(compiler, tmp_path):
    compiler(BUILT)
    first = building.build()
    assert building.build() == first
    mark = building._identity(first)
    assert building.build(unfit=mark) == first and building._identity(first) != mark


BUILDING = """
import os, signal, sys, time
from headmix_vision.ops import replay_build
signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells ignore in their background
replay_build._start()
begun = time.monotonic()
while not os.path.exists(sys.argv[1]) and time.monotonic() < begun + 20:
    time.sleep(.01)
"""


def start(tmp_path, script, argument=""):
    """Start a process that runs a script of Python, with the compiler of the test."""
    (tmp_path / "temporary").mkdir(exist_ok=True)
    env = {"PYTHONPATH": str(HERE.parents[1]), "TMPDIR": str(tmp_path / "temporary"), dispatch.REPLAY: "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-c", script, argument], env={**os.environ, **env}, **pipes)


@pytest.mark.slow
@needs_triton
@on_linux
@pytest.mark.parametrize(
    "end",
    ["", "raise SystemExit(7)", "os.kill(os.getpid(), 9)", "if not os.fork(): sys.exit()\nos.wait(); assert alive()"],
)
def test_the_end_of_a_process_ends_its_compiler(end, compiler, tmp_path):
    """Only its own end: a child that was forked meanwhile leaves the compiler and its folder alone."""
    pid = tmp_path / "pid"
    compiler(f"echo $$ > {pid}.new; mv {pid}.new {pid}; sleep 64")
    alive = f"def alive(): return len(os.listdir('{tmp_path}/temporary')) == 1 and not os.kill({{}}, 0)"
    alive = alive.format(f"int(open('{pid}').read())")
    process = start(tmp_path, f"{BUILDING}\n{alive}\nassert alive()\n{end}", str(pid))
    said = process.communicate()[0]
    assert (process.returncode, said) == (-9 if "kill" in end else 7 if "7" in end else 0, "")
    last = time.monotonic() + 5
    while any(b"sleep\x0064\0" in x for x in commands()) or list((tmp_path / "temporary").iterdir()):
        assert time.monotonic() < last


@pytest.mark.slow
@needs_triton
@on_linux
def test_one_process_compiles_and_the_others_wait(compiler, tmp_path):
    compiler(f"echo x >> {tmp_path}/runs; sleep 2; {BUILT}")
    script = "from headmix_vision.ops import replay_build\nprint(open(replay_build.build()).read())"
    found = [x.communicate()[0] for x in [start(tmp_path, script) for _ in range(3)]]
    assert found == ["no library\n\n"] * 3
    assert (tmp_path / "runs").read_text() == "x\n"


@pytest.mark.slow
@needs_triton
@on_linux
def test_a_process_waits_no_longer_than_it_has_patience(compiler, tmp_path, monkeypatch):
    compiler(f"touch {tmp_path}/begun; sleep 60")
    other = start(tmp_path, f"{BUILDING}\ntime.sleep(60)", f"{tmp_path}/begun")
    try:
        while not (tmp_path / "begun").exists():
            time.sleep(0.05)
        monkeypatch.setattr(building, "_PATIENCE_S", 0.1)
        with pytest.raises(RuntimeError, match="another process has been building it"):
            building.build()
        compiler(BUILT)
        monkeypatch.setattr(building, "_PATIENCE_S", 60)
        other.send_signal(signal.SIGINT)  # which lets go of the lock
        assert Path(building.build()).read_text() == "no library\n"
    finally:
        other.kill()
        other.communicate()


@needs_triton
def test_nothing_begins_without_a_tensor_on_a_gpu(monkeypatch):
    monkeypatch.setattr(replay, "_ready", threading.Event())
    monkeypatch.setattr(building, "_start", None)
    call = replay.replayed(lambda x: x + 1, None, None, None)
    assert call(torch.ones(1)) == 2


def test_calls_without_triton_are_ordinary(monkeypatch):
    monkeypatch.setattr(replay, "_hooks", None)
    monkeypatch.setattr(replay, "_ready", threading.Event())
    replay._ready.set()
    assert replay.replayed(lambda x: x + 1, None, None, None)(1) == 2


@needs_triton
def test_no_thread_is_no_error(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    building._start.__wrapped__()


@needs_triton
@pytest.mark.parametrize("facts", [{"platform": "win32"}, {"hip": "6.4"}, {"gil": 1}])
def test_where_the_extension_does_not_serve(facts, monkeypatch):
    monkeypatch.setattr(building.sys, "platform", facts.get("platform", "linux"))
    monkeypatch.setattr(torch.version, "hip", facts.get("hip"))
    monkeypatch.setattr(building.sysconfig, "get_config_var", lambda name: facts.get("gil"))
    assert "it takes" in str(building._why_not_here())
