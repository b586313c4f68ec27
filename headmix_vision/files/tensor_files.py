"""Safetensors files: complete or absent, readable to whom the umask says, refused in one line where damaged.

The header of a file holds a SHA-256 over its texts and tensors, which is compared before a tensor is used. This costs
what `tensors_sha256` costs; files without the hash, such as those of earlier versions, are read as they are.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.files.atomic import atomic_path
from headmix_vision.files.hashes import tensors_sha256
from headmix_vision.files.limits import check_file, check_memory

HASH = "tensors_sha256"


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], *, hashed: bool = True) -> None:
    """Write tensors by name, and texts by name in the header, with the hash of both unless the tensors have their own.

    Raises:
        OSError: If the file cannot be written.
    """
    # Not `save_file`: it makes a file that its owner alone may read, and leaves a temporary one when it is killed.
    texts = {**metadata, HASH: _sha256(metadata, tensors.items())} if hashed else metadata
    with atomic_path(path) as temporary:
        temporary.write_bytes(save(tensors, texts))


@contextmanager
def open_tensors(path: Path, *, check: bool = True) -> Iterator[Any]:
    """Open a file for reading, as `safetensors.safe_open` does; see `check_file` and `refuse_damage`.

    Args:
        path: The file.
        check: Compare the hash in the header, where there is one, with what the file holds.
    """
    check_file(path)
    with refuse_damage(path), safe_open(path, "pt") as file:
        texts = file.metadata() or {}
        if check and HASH in texts:
            names = file.keys()
            if _sha256(texts, ((name, file.get_tensor(name)) for name in names)) != texts[HASH]:
                raise InputError(f"{path} is damaged or was edited: its tensors do not have the SHA-256 in its header")
        yield file


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file; see `open_tensors`."""
    check_file(path)
    check_memory(path.stat().st_size, f"the file {path}")
    with open_tensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping


def _sha256(texts: Mapping[str, str], tensors: Iterable[tuple[str, Tensor]]) -> str:
    described = json.dumps({name: text for name, text in texts.items() if name != HASH}, sort_keys=True)
    return hashlib.sha256(f"{described}\n{tensors_sha256(tensors)}".encode()).hexdigest()


@contextmanager
def refuse_damage(path: Path) -> Iterator[None]:
    """Turn what safetensors raises within the block into an error of one line.

    Raises:
        InputError: If the file is truncated, of another kind, or lacks what is read from it.
    """
    try:
        yield
    except SafetensorError as error:
        raise InputError(f"{path} is truncated or no safetensors file: {error}") from None


def header_of(path: Path) -> Mapping[str, str]:
    """Read the texts in the header of a file, unchecked; see `refuse_damage`."""
    with open_tensors(path, check=False) as file:
        return file.metadata() or {}
