"""Text files of settings and records, JSON and YAML: of limited size, depth and expansion, or refused in one line."""

import json
import os
from typing import Any

from headmix_vision.errors import InputError
from headmix_vision.files.fields import MAX_LEVELS, check_nesting
from headmix_vision.files.limits import check_file

MAX_TEXT_BYTES = 1 << 26
MAX_YAML_VALUES = 100_000


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

    sizes: dict[str, int] = {}  # values behind each anchor that is complete
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and number of values before it
    count = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
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
            raise InputError(f"the YAML is too large, aliases written out: {what}")
