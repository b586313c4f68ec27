"""Reading what others wrote: regular files, sizes that this machine can hold, texts with the entries that are needed.

Memory, disk and processes are checked before they are spent on a size that a file or an option states. JSON and YAML
are limited in size, depth and expansion. What is wrong is refused in one line.
"""

import errno
import json
import os
import resource
import shutil
import stat
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

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
MAX_LEVELS, MAX_VALUES = 64, 1_000_000
MAX_TEXT_BYTES = 1 << 26
MAX_YAML_VALUES = 100_000


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


def check_fields(where: str, found: object, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Check that a mapping which was read from a file has the entries that its readers take.

    Args:
        where: What to call the mapping in a message, with its file.
        found: What was read.
        wanted: The type of each entry, as `isinstance` takes it. One that may be None may also be absent.

    Returns:
        The mapping, with None for what is absent.

    Raises:
        InputError: No mapping, or an entry that is missing or of another type.
    """
    if not isinstance(found, dict):
        raise InputError(f"{where} is {_short(found)}, it must be a table of entries")
    for name, kind in wanted.items():
        value = found.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and not _takes_bool(kind)):
            state = f"is {_short(found[name])}" if name in found else "is missing"
            raise InputError(f"{where}: entry {name!r} {state}, it must be of type {getattr(kind, '__name__', kind)}")
    return {**dict.fromkeys(wanted), **found}


def check_nesting(where: str, found: object) -> None:
    """Check that lists and tables that were read from a file can be walked: not too deep, and without end.

    Args:
        where: What to call them in a message.
        found: What was read.

    Raises:
        InputError: More than `MAX_LEVELS` levels, a table that holds itself, or parts that are held so often that the
            whole has more than `MAX_VALUES` values, and twice as many as the file.
    """
    sizes: dict[int, tuple[int, int]] = {}  # values and levels of each list or table
    distinct = 0

    def measure(value: object, level: int) -> tuple[int, int]:
        nonlocal distinct
        if not isinstance(value, dict | list | tuple):
            return 1, 0
        if id(value) not in sizes:
            inner = value.values() if isinstance(value, dict) else value
            distinct += len(value)
            measured = [measure(one, level + 1) for one in inner] if level < MAX_LEVELS else [(0, MAX_LEVELS)]
            sizes[id(value)] = (
                1 + sum(size for size, _ in measured),
                1 + max((levels for _, levels in measured), default=0),
            )
        if sizes[id(value)][1] > MAX_LEVELS:
            raise InputError(f"{where} is damaged: it is nested too deeply, or holds itself")
        return sizes[id(value)]

    size, _ = measure(found, 0)
    if size > max(MAX_VALUES, 2 * distinct):
        raise InputError(f"{where} is damaged: its parts are held so often that the whole has {size} values")


def _takes_bool(kind: Any) -> bool:
    """Return whether a type is meant to take true and false, which Python counts as whole numbers."""
    return bool in (get_args(kind) or (kind,))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a text file whole.

    Raises:
        InputError: It is not a regular file, has more than `MAX_TEXT_BYTES`, or is not UTF-8.
        OSError: It cannot be read.
    """
    check_file(path)
    with open(path, "rb") as file:
        data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise InputError(f"{path} has more than {MAX_TEXT_BYTES >> 20} MiB, which is too much for a file of settings")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is damaged: it is not UTF-8 text ({error.reason} at byte {error.start})") from None


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file; see `read_text` and `parse_json`."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str | bytes, where: str) -> Any:
    """Parse JSON.

    Args:
        text: The JSON.
        where: Its place, for the message.

    Raises:
        InputError: It is not JSON, or is nested too deeply.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise InputError(f"{where} is damaged: its JSON is nested too deeply") from None
    except ValueError as error:
        raise InputError(f"{where} is damaged: {error}") from None
    check_nesting(where, value)
    return value


def parse_yaml(text: str) -> Any:
    """Load YAML of plain values; see `check_yaml`."""
    import yaml

    check_yaml(text)
    return yaml.safe_load(text)


def check_yaml(text: str) -> None:
    """Check that YAML is small when its aliases are written out, and not nested deeply, before it is loaded.

    Raises:
        InputError: More than `MAX_YAML_VALUES` values or `MAX_LEVELS` levels, or an alias within its own anchor.
        yaml.YAMLError: It is not YAML.
    """
    import yaml

    try:
        _check_events(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except yaml.YAMLError as error:
        if "maximum nesting depth" not in str(error):
            raise
        raise InputError(_TOO_LARGE.format("nested too deeply")) from None  # libyaml looks 1,000 levels ahead


_TOO_LARGE = "the YAML is too large, aliases written out: {}"


def _check_events(events: Iterable[Any]) -> None:
    import yaml

    sizes: dict[str, int] = {}  # values behind each anchor that is complete
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and number of values before it
    count = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in [anchor for anchor, _ in open_nodes]:
                raise InputError(f"the YAML alias *{event.anchor} stands within its own anchor")
            count += sizes.get(event.anchor, 0)
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            sizes |= {} if event.anchor is None else {event.anchor: 1}
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, count))
            count += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            sizes |= {} if anchor is None else {anchor: count - before}
        if count > MAX_YAML_VALUES or len(open_nodes) > MAX_LEVELS:
            what = f"more than {MAX_YAML_VALUES} values" if count > MAX_YAML_VALUES else "nested too deeply"
            raise InputError(_TOO_LARGE.format(what))
