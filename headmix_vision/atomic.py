"""Files that are either complete or absent."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path beside `path` which replaces it when the block ends without an exception.

    The temporary file lies in the same folder, hence on the same file system, so that the replacement is one rename.
    It reaches the disk before the rename: a power cut leaves the old file or the new one.

    Args:
        path: The file to write; its folder is created when absent.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
