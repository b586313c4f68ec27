"""Sums of the files in an exported folder: `SHA256SUMS`, which `sha256sum --check` reads too.

Only the files that hold a model are listed: `.json` and `.safetensors` of the folder and of its folders. Writing and
checking them costs 0.7 s of CPU time per GiB. A folder without `SHA256SUMS`, such as one of an earlier version, counts
as whole.
"""

import re
from pathlib import Path

from headmix_vision.errors import InputError
from headmix_vision.files.atomic import atomic_path
from headmix_vision.files.hashes import file_sha256
from headmix_vision.files.texts import read_text

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def write_sums(folder: Path) -> None:
    """Write the sums of all files that hold the model."""
    lines = [f"{file_sha256(folder / name)}  {name}\n" for name in _names(folder)]
    with atomic_path(folder / SUMS) as temporary:
        temporary.write_text("".join(lines))


def check_sums(folder: Path) -> None:
    """Compare the files that hold the model with their sums, where there are any.

    Raises:
        InputError: If a file has another sum, or is missing or not listed.
    """
    try:
        lines = read_text(folder / SUMS).split("\n")
    except (FileNotFoundError, NotADirectoryError):
        return
    except InputError:
        lines = ["damaged"]
    found = [match.groups() for line in lines[:-1] if (match := _LINE.fullmatch(line))]
    sums, names = {name: digest for digest, name in found}, _names(folder)
    hint = f"export it again, or delete {folder / SUMS} if you edited the folder"
    if len(found) != len(lines) - 1 or lines[-1] or sorted(sums) != names:
        raise InputError(f"{folder / SUMS} is damaged or lists other files than {folder} holds: {hint}")
    for name in names:
        if file_sha256(folder / name) != sums[name]:
            raise InputError(f"{folder / name} is damaged or was edited, its SHA-256 is not the one in {SUMS}: {hint}")


def check_sum(path: Path) -> None:
    """Compare one file with its sum in the exported folder that it lies in, where one is listed.

    Raises:
        InputError: If the file has another sum.
    """
    for folder in path.absolute().parents[:2]:
        if not (folder / SUMS).is_file():
            continue
        name = path.absolute().relative_to(folder).as_posix()
        for line in (folder / SUMS).read_text(encoding="ascii", errors="replace").splitlines():
            match = _LINE.fullmatch(line)
            if match is not None and match[2] == name and match[1] != file_sha256(path):
                raise InputError(f"{path} is damaged or was edited, its SHA-256 is not the one in {folder / SUMS}")


def _names(folder: Path) -> list[str]:
    files = [*folder.glob("[!.]*"), *folder.glob("[!.]*/[!.]*")]
    return sorted(path.relative_to(folder).as_posix() for path in files if path.suffix in (".json", ".safetensors"))
