"""Limits of the machine, asked before memory or processes are spent on a size that a file or an option states."""

import errno
import os
import resource
import shutil
import stat
import zipfile
from collections import Counter
from pathlib import Path

from headmix_vision.errors import InputError

_SMALL_BYTES = 1 << 28  # for which the machine is not asked
_WORKERS_PER_CORE = 16
_DEFLATE_RATIO = 1032  # at most
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
# files of a control group: its limit, its usage, and the entry of memory.stat that can be taken back; versions 2 and 1
_VERSIONS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_left() -> int:
    """Return the bytes that this process can still take: the least of the machine, its container and its own limit."""
    told = _numbers(Path("/proc/meminfo"))
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rooms = [1024 * told["MemAvailable:"] if "MemAvailable:" in told else whole, *_rooms_in_groups()]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        rooms.append(soft - 1024 * _numbers(Path("/proc/self/status")).get("VmSize:", 0))
    return max(min(rooms), 0)


def _rooms_in_groups() -> list[int]:
    """List the bytes that the control groups of this process have left, for each group that has a limit."""
    rooms = []
    for place in _groups():
        for limit, usage, reclaimable in _VERSIONS:
            try:
                most, used = int((place / limit).read_text()), int((place / usage).read_text())
            except (OSError, ValueError):  # another version, or the limit is "max"
                continue
            rooms.append(most - used + _numbers(place / "memory.stat").get(reclaimable, 0))
    return rooms


def _groups() -> list[Path]:
    """List the folders of the control groups that may limit the memory of this process, from its own to the root."""
    places = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        names = controllers.split(",")  # none in version 2
        if names == [""] or "memory" in names:
            root = _CONTROL_GROUPS / "memory" if "memory" in names else _CONTROL_GROUPS
            own = root / path.strip("/")
            places += [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    return places


def _numbers(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {name: int(number) for name, number, *_ in (line for line in lines if len(line) > 1) if number.isdecimal()}


def check_memory(needed_bytes: int, what: str) -> None:
    """Raise InputError for something that needs more memory than is left; small sizes pass unasked.

    Args:
        needed_bytes: Memory that it needs.
        what: Its name at the beginning of the message, with the option or file that states its size.
    """
    if needed_bytes > _SMALL_BYTES and needed_bytes > (left := memory_left()):
        raise InputError(f"{what} needs {_amount(needed_bytes)} of memory, {_amount(left)} is left")


def _amount(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count < 1e15 else f"{count:.1e} bytes"


def check_disk(place: Path, needed_bytes: int, what: str) -> None:
    """Raise InputError for files that exceed the space of a disk; the place, or a folder around it, must exist."""
    folder = next(parent for parent in (place, *place.absolute().parents) if parent.exists())
    if needed_bytes > (free := shutil.disk_usage(folder).free):
        raise InputError(f"{what} needs {_amount(needed_bytes)}, the disk of {place} has {_amount(free)} left")


def check_workers(**workers: int) -> None:
    """Raise InputError for more worker processes than the cores of this machine can serve."""
    most = _WORKERS_PER_CORE * num_cores()
    for name, number in workers.items():
        if number > most:
            raise InputError(f"{name} is {number}, it must be at most {most}: {_WORKERS_PER_CORE} for each CPU core")


def check_file(path: str | os.PathLike[str]) -> None:
    """Check that a path leads to a regular file, before it is opened: a pipe or a device may never end.

    Raises:
        InputError: It is a pipe, a socket or a device.
        OSError: It does not exist, or is a folder.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not os.path.isfile(path):
        kind = stat.S_IFMT(os.stat(path).st_mode)
        raise InputError(f"{path} is {_KINDS.get(kind, 'a special file')}, it must be a regular file")


def check_replaced(path: str | os.PathLike[str]) -> None:
    """Check that what a result is about to replace, if anything, is a file or folder: a rename would delete a device.

    Raises:
        InputError: It is a pipe, a socket or a device.
    """
    if os.path.exists(path) and not os.path.isdir(path):
        check_file(path)


def check_members(archive: zipfile.ZipFile) -> None:
    """Check that the members of a ZIP archive have different names, and sizes that the file can hold.

    Raises:
        InputError: A name twice, members that overlap, or more bytes than deflating makes of the file.
    """
    members = archive.infolist()
    name, count = Counter(member.filename for member in members).most_common(1)[0] if members else ("", 0)
    if count > 1:
        raise InputError(f"{archive.filename} holds {name} {count} times, it must hold each name once")
    packed, held = (sum(getattr(member, size) for member in members) for size in ("compress_size", "file_size"))
    if packed > os.path.getsize(str(archive.filename)) or held > _DEFLATE_RATIO * packed:
        raise InputError(f"{archive.filename} states {held} bytes in {packed}, which it cannot hold: it is damaged")


def check_files(folder: Path) -> None:
    """Check the files of a folder that a library reads by itself; see `check_file`."""
    for path in folder.iterdir():
        if not path.is_dir():
            check_file(path)
