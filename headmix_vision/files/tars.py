"""Files within tar archives: their names and places, by which they are read without the archive."""

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from headmix_vision.errors import InputError
from headmix_vision.files.pictures import ending, is_hidden
from headmix_vision.files.reading import check_file


class Member(NamedTuple):
    """A file in a tar archive: its name, where its bytes begin, their number, and the archive within that holds it."""

    name: str
    offset: int
    size: int
    archive: str = ""

    @property
    def is_hidden(self) -> bool:
        """Whether it is left out, or lies in a folder that is."""
        return any(map(is_hidden, PurePosixPath(self.name).parts))

    def read(self, file: BinaryIO) -> bytes:
        """Read its bytes from the open archive; ValueError where this ends before."""
        end = file.seek(0, os.SEEK_END)
        if self.offset + self.size > end:
            raise ValueError(f"the archive ends after {max(end - self.offset, 0)} of {self.size} bytes")
        file.seek(self.offset)
        return file.read(self.size)


def list_members(path: Path, nested: bool = False) -> Iterator[Member]:
    """Yield the regular files of a tar archive in their order, hidden ones too.

    Args:
        path: The archive.
        nested: Yield the files of tar archives within it instead of these.

    Raises:
        InputError: It is compressed, truncated or no tar file, or has members that state impossible sizes.
    """
    check_file(path)
    try:
        with tarfile.open(path, "r:") as archive:
            yield from _members(archive, nested)
    except RecursionError:
        raise InputError(f"{path} is damaged: too many headers follow each other") from None
    except (tarfile.TarError, ValueError, OSError) as error:
        if getattr(error, "filename", None) is not None:  # it cannot be opened
            raise
        raise InputError(f"{path} is truncated or no tar file ({error})") from None


def _members(archive: tarfile.TarFile, nested: bool) -> Iterator[Member]:
    for member in archive:
        if not member.isreg():
            continue
        if member.size < 0 or member.issparse():
            raise tarfile.ReadError(f"{member.name} has {member.size} bytes, or is sparse")
        found = Member(member.name, member.offset_data, member.size)
        if not (nested and ending(found.name) == ".tar") or found.is_hidden:
            yield found
            continue
        with tarfile.open(fileobj=archive.extractfile(member), mode="r:") as within:
            for inner in _members(within, False):
                yield inner._replace(offset=inner.offset + found.offset, archive=found.name)
    _check_end(archive)


def _check_end(archive: tarfile.TarFile) -> None:
    """Check that a file ends where `tarfile` stopped, which it does at invalid headers and at zeros in the middle."""
    file: Any = archive.fileobj
    file.seek(archive.offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("no end of the archive")
    while rest := file.read(tarfile.RECORDSIZE):
        if rest.strip(b"\0"):
            raise tarfile.ReadError(f"more behind an end of the archive at byte {archive.offset}")
