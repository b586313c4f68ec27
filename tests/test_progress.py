"""How a long job is shown: lines in a log, a bar on a terminal."""

import os
import pty
import subprocess
import sys

import pytest

from headmix_vision import console as module
from headmix_vision.console import duration, progress

# without the package around it, which takes seconds to import
SHORT = f"""
import runpy
progress = runpy.run_path({module.__file__!r})["progress"]
with progress("sampling", 8, "images") as advance:
    advance(8)
"""


def test_a_log_gets_a_line_for_each_tenth_and_one_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with progress("sampling", 1000, "images", done=200) as advance:
        for _ in range(160):
            clock[0] += 1
            advance(5)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 8 and lines[0] == "sampling: 300/1000 images (30 %), 5/s, 2 min 20 s left"
    assert lines[-1] == "sampling: 1000/1000 images, 5/s, took 2 min 40 s"


def test_a_slow_job_tells_a_line_a_minute_and_a_fast_one_few(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with progress("caching", 1000, "images") as advance:
        for _ in range(10):
            clock[0] += 20
            advance(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines[:2]] == ["caching: 0/1000 images (0 %)"] * 2 and len(lines) == 4
    with progress("caching", 1000, "images") as advance:
        for _ in range(1000):
            clock[0] += 0.001
            advance(1)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_nothing_is_shown_where_nothing_is_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for options in ({"done": 4}, {"enabled": False}):
        with progress("sampling", 4, "images", **options) as advance:
            advance(1)
    assert capsys.readouterr().err == ""


def test_fractions_make_a_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("sampling", 3, "images") as advance:
        for _ in range(33):
            advance(1 / 11)
    assert capsys.readouterr().err.startswith("sampling: 3/3 images")


def test_a_log_has_no_carriage_returns_and_a_terminal_has_a_bar() -> None:
    log = subprocess.run([sys.executable, "-c", SHORT], capture_output=True, env={**os.environ, "FORCE_COLOR": "1"})
    assert log.returncode == 0 and log.stdout == b"" and b"\r" not in log.stderr and log.stderr.count(b"\n") == 1

    master, terminal = pty.openpty()
    child = subprocess.run([sys.executable, "-c", SHORT], stderr=terminal, env={**os.environ, "TERM": "xterm"})
    os.close(terminal)
    shown = os.read(master, 65536).decode()
    os.close(master)
    assert child.returncode == 0 and "━" in shown and "8/8" in shown and "images/s" in shown


def test_durations() -> None:
    assert [duration(s) for s in (0.2, 59.4, 60, 750, 12000, 187200)] == [
        "0 s",
        "59 s",
        "1 min",
        "12 min 30 s",
        "3 h 20 min",
        "2 d 4 h",
    ]
