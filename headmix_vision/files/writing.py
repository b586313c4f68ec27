"""Writing files and folders: each is complete or absent, and one process at a time writes to a locked folder."""

import errno
import fcntl
import os
import re
import shutil
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_replaced

_TEMPORARY_NAME = re.compile(r"\..+\.\d+\.tmp")
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_held: set[int] = set()


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


@contextmanager
def hold_lock(path: Path, what: str) -> Iterator[None]:
    """Hold an exclusive lock on a file while the block runs.

    The kernel releases the lock when the process ends, however it ends. Forked processes (data workers) do not keep it.
    The file, and the folders that had to be made for it, are removed at the end; a killed process leaves them behind,
    and they do no harm. The lock is `flock`: on NFS and Lustre it holds between machines where the mount supports it
    (not with `local_lock` or `localflock`). Where the file system has no locks, a warning says so and the block runs
    without one.

    Args:
        path: The lock file, usually inside of the folder that is locked.
        what: What is locked, for the message: `run directory runs/digits`.

    Raises:
        InputError: At once, if another holder has the lock; it names the other process and its machine.
        OSError: If the file cannot be made, or a link lies there, which is not followed.
    """
    made = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _locked(path, what)
    _held.add(descriptor)
    try:
        _name_holder(descriptor, path)
        yield
    finally:
        # Before the file is unlocked: whoever opened it meanwhile finds that it is gone, and opens a new one.
        if _lies_at(path, descriptor):  # someone may have deleted the folder, and another process made it again
            path.unlink()
        _held.discard(descriptor)
        os.close(descriptor)
        with suppress(OSError):  # not empty
            for folder in made:
                folder.rmdir()


def lock_holder(path: Path) -> str | None:
    """Name who holds the lock on a file, at once; None where nobody is known to."""
    with suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read_holder(file.fileno())
    return None


def _name_holder(descriptor: int, path: Path) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except OSError as error:
        error.filename = os.fspath(path)  # a full disk is said without a name
        raise


def _read_holder(descriptor: int) -> str:
    return os.read(descriptor, 200).decode(errors="replace").strip() or "another process"


def _locked(path: Path, what: str) -> int:
    """Open and lock the file that lies at the path."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _lies_at(path, descriptor):
                return descriptor
        except BlockingIOError:
            holder = _read_holder(descriptor)
            os.close(descriptor)
            raise InputError(f"{what} is in use by {holder}; wait until it ends or stop it (lock {path})") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            warnings.warn(
                f"the file system of {path} has no locks ({error.strerror}): a second process would not be refused",
                stacklevel=4,
            )
            return descriptor
        os.close(descriptor)


def _lies_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _close_in_child() -> None:
    """Drop a forked process's share of the locks, which would outlive its parent."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
