"""Files and folders that are either complete or absent."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headmix_vision.files.limits import check_replaced
from headmix_vision.files.locks import hold_lock

_TEMPORARY_NAME = re.compile(r"\..+\.\d+\.tmp")


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path beside `path` which replaces it when the block ends without an exception.

    The temporary file lies in the same folder, hence on the same file system, so that the replacement is one rename.
    It reaches the disk before the rename: a power cut leaves the old file or the new one.

    Args:
        path: The file to write; its folder is created when absent.

    Raises:
        InputError: If it is a pipe, a socket or a device.
    """
    target = Path(path)
    check_replaced(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    if temporary.is_symlink():  # to elsewhere
        temporary.unlink()
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        # a full disk shows when writing, where the system names no file
        error.filename = error.filename or os.fspath(target)
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give the place of a folder beside `path` that becomes it when the block ends without an exception.

    One process at a time writes it. What a killed one has left is deleted by the next.

    Args:
        path: The folder to write; its parents are created when absent.
        overwrite: Replace a folder that exists.

    Raises:
        InputError: If another process is writing it.
        OSError: If it cannot be written, or holds something and is not to be replaced.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with hold_lock(path.with_name(f".{path.name}.lock"), f"folder {path}"):
        try:
            killed_in_between = (temporary / "replaced").exists() and not path.exists()
            if killed_in_between and not temporary.is_symlink():
                (temporary / "replaced").rename(path)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            yield temporary / "new"
            if overwrite and path.exists():
                path.rename(temporary / "replaced")
            (temporary / "new").rename(path)
        except OSError as error:
            if error.errno is not None:  # a full disk shows when writing, where the system names no file
                error.filename = error.filename or os.fspath(path)
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def is_temporary(name: str) -> bool:
    """Return whether a file's name is one of `atomic_path`."""
    return _TEMPORARY_NAME.fullmatch(name) is not None


def remove_temporaries(folder: Path, pattern: str = "*") -> None:
    """Delete what killed processes were writing to a folder; only for who holds the folder's lock.

    Args:
        folder: The folder; it need not exist.
        pattern: The files they were writing to.
    """
    for entry in folder.glob(f".{pattern}.*.tmp"):
        if is_temporary(entry.name):
            entry.unlink(missing_ok=True)


def check_place(path: Path) -> None:
    """Check, before the work whose result it takes, that a file or folder can be made.

    Raises:
        InputError: It is a pipe, a socket or a device.
        OSError: Where its folder would be, there is something else, or it may not be written to.
    """
    check_replaced(path)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    for number, wrong in ((errno.ENOTDIR, not folder.is_dir()), (errno.EACCES, not os.access(folder, os.W_OK))):
        if wrong:
            raise OSError(number, os.strerror(number), str(folder))
