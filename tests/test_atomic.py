"""Files and folders are complete or absent, whatever happens while they are written."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headmix_vision.errors import InputError
from headmix_vision.files.writing import atomic_folder, atomic_path, check_place


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError])
def test_an_interrupted_write_leaves_the_old_file_alone(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_text("old")
    with pytest.raises(error), atomic_path(path) as temporary:
        assert temporary.parent == path.parent  # one file system, one rename
        temporary.write_text("ne")
        assert path.read_text() == "old"
        raise error
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights"]


@pytest.mark.parametrize("check", [check_place, lambda path: atomic_path(path).__enter__()])
def test_a_pipe_or_device_is_not_replaced(check: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(InputError, match="it must be a regular file"):
            check(place)
    assert (tmp_path / "pipe").is_fifo() and Path(os.devnull).is_char_device()


def test_a_finished_write_replaces_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "weights"
    for text in ("first", "second"):
        with atomic_path(path) as temporary:
            temporary.write_text(text)
        assert path.read_text() == text
    assert [entry.name for entry in path.parent.iterdir()] == ["weights"]


def test_a_link_in_place_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("other")
    (tmp_path / f".weights.{os.getpid()}.tmp").symlink_to("other")
    with atomic_path(tmp_path / "weights") as temporary:
        temporary.write_text("new")
    assert [(tmp_path / name).read_text() for name in ("other", "weights")] == ["other", "new"]


def test_nothing_is_left_of_a_write_that_never_began(tmp_path: Path) -> None:
    with pytest.raises(KeyError), atomic_path(tmp_path / "absent"):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_a_folder_has_one_writer_and_nothing_is_left_of_a_killed_one(tmp_path: Path) -> None:
    folder, killed = tmp_path / "data", tmp_path / ".data.tmp" / "new"
    killed.mkdir(parents=True)
    (killed / "half").touch()
    with atomic_folder(folder) as new:
        new.mkdir()
        (new / "whole").touch()
        with pytest.raises(InputError, match="data is in use by process"), atomic_folder(folder):
            pass
        assert not folder.exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "whole"]


def test_a_folder_that_holds_something_is_replaced_only_on_request(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for name, overwrite in (("first", False), ("second", False), ("third", True)):
        try:
            with atomic_folder(folder, overwrite=overwrite) as new:
                new.mkdir()
                (new / name).touch()
        except OSError as error:
            assert (name, error.errno) == ("second", errno.ENOTEMPTY)
        assert [path.name for path in tmp_path.rglob("*")] == ["data", "third" if overwrite else "first"]


def test_a_folder_that_a_killed_process_had_moved_away_comes_back(tmp_path: Path) -> None:
    (tmp_path / ".data.tmp" / "replaced").mkdir(parents=True)
    with pytest.raises(KeyError), atomic_folder(tmp_path / "data", overwrite=True):
        raise KeyError
    assert [path.name for path in tmp_path.rglob("*")] == ["data"]


def test_a_full_disk_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, atomic_folder(tmp_path / "data"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "data")
    assert not list(tmp_path.iterdir())
