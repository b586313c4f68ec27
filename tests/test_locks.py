"""Locks: held by one process at a time, released by death."""

import errno
import os
import shutil
import signal
import time
import warnings
from pathlib import Path

import pytest

from headmix_vision.errors import InputError
from headmix_vision.files import writing
from headmix_vision.files.writing import hold_lock, lock_holder


def test_second_holder_is_refused_and_nothing_stays_behind(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run" / ".lock"
    with hold_lock(path, "run directory x"):
        with pytest.raises(InputError, match=rf"run directory x is in use by process {os.getpid()} on "):
            hold_lock(path, "run directory x").__enter__()
        assert path.exists() and (lock_holder(path) or "").startswith(f"process {os.getpid()} on ")
    assert lock_holder(path) is None
    assert list(tmp_path.iterdir()) == []
    with hold_lock(path, "run"):
        (path.parent / "metrics.csv").touch()
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.csv"]


def test_a_full_disk_is_said_with_the_name_of_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context, pytest.raises(OSError) as caught:
        context.setattr(os, "write", refuse)
        hold_lock(tmp_path / "run" / ".lock", "run").__enter__()
    assert caught.value.filename == str(tmp_path / "run" / ".lock") and not list(tmp_path.iterdir())


def test_death_releases_the_lock_although_a_forked_process_lives_on(tmp_path: Path) -> None:
    path, (receiver, sender) = tmp_path / ".lock", os.pipe()
    holder = os.fork()
    if holder == 0:
        with hold_lock(path, "run"):
            worker = os.fork()  # like a data worker's
            if worker:
                os.write(sender, str(worker).encode())
            time.sleep(60)
    worker = int(os.read(receiver, 20))
    try:
        with pytest.raises(InputError, match=f"process {holder} on"):
            hold_lock(path, "run").__enter__()
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        with hold_lock(path, "run"):
            pass
        os.kill(worker, 0)
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(receiver)
        os.close(sender)


def test_a_file_removed_by_its_last_holder_is_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first holder ends between our opening its file and locking it."""
    path, original, opened = tmp_path / ".lock", os.open, []

    def open_then_lose(*args: object) -> int:
        opened.append(original(*args))
        if len(opened) == 1:
            path.unlink()
        return opened[-1]

    monkeypatch.setattr(writing.os, "open", open_then_lose)
    with hold_lock(path, "run"):
        assert len(opened) == 2 and path.exists()


def test_the_lock_of_a_folder_that_was_made_again_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "run" / ".lock"
    with hold_lock(path, "deleted run"):
        shutil.rmtree(path.parent)
        second = hold_lock(path, "run")
        second.__enter__()
    with pytest.raises(InputError, match="is in use"):
        hold_lock(path, "run").__enter__()
    second.__exit__(None, None, None)
    assert not path.exists()


def test_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(writing.fcntl, "flock", refuse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with hold_lock(tmp_path / ".lock", "run"):
            pass
    assert "has no locks (No locks available)" in str(caught[0].message)
