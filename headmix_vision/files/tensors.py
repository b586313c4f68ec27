"""Files of tensors: their hashes, safetensors, the sums of an exported folder, and weights that others wrote.

The header of a safetensors file holds a SHA-256 over its texts and tensors, which is compared before a tensor is used.
Files without it, as earlier versions wrote them, are read as they are. An exported folder holds `SHA256SUMS`, which
`sha256sum --check` reads too: the sums of the files that hold a model, `.json` and `.safetensors` of the folder and of
its folders. A folder without it counts as whole. One thread hashes 1 GiB in 0.65 s on a CPU with SHA instructions; the
CRC-32 of zlib takes 0.3 s.
"""

import hashlib
import json
import os
import pickle
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_file, check_members, check_memory, parse_json, read_text
from headmix_vision.files.writing import atomic_path

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
HASH = "tensors_sha256"
_PLACES, _SAMPLE = 8, 1024  # of a tensor, and values at each, in `sampled_sha256`
_REAL = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    check_file(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def state_sha256(state: dict[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values of a state dict, whatever file it came from."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(f"{name} {state[name].dtype} {list(state[name].shape)}\n".encode())
        digest.update(tensor_bytes(state[name]))
    return digest.hexdigest()


def tensors_sha256(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, types, shapes and values of tensors, of which several are hashed at a time."""

    def line(named: tuple[str, Tensor]) -> str:
        name, value = named
        return f"{name} {value.dtype} {list(value.shape)} {hashlib.sha256(tensor_bytes(value)).hexdigest()}\n"

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return hashlib.sha256("".join(sorted(pool.map(line, tensors))).encode()).hexdigest()


def sampled_sha256(files: Iterable[Path]) -> str:
    """SHA-256 over shapes and samples of large weights, which names, division into files and repeats do not change.

    Of each tensor 1,024 values at 8 places are read, or all where it has no more. Values are rounded to bfloat16, so
    that a bfloat16 copy of weights is not another model. An edit of single rows can go unnoticed. Files other than
    `.safetensors` are hashed whole.

    Raises:
        InputError: If a file is damaged.
    """
    digests: set[str] = set()
    for path in files:
        digests |= _sampled_tensors(path) if path.suffix == ".safetensors" else {file_sha256(path)}
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()


def _sampled_tensors(path: Path) -> set[str]:
    """Hash shape and samples of each tensor; through a map of the file, each sample may read many MiB ahead."""
    with open_tensors(path, check=False):  # which checks the header
        pass
    digests = set()
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        header = parse_json(file.read(int.from_bytes(file.read(8), "little")), f"the header of {path}")
        start = file.tell()
        header.pop("__metadata__", None)
        for entry in header.values():
            digest = hashlib.sha256(str(entry["shape"]).encode())
            dtype, (first, last) = _REAL.get(entry["dtype"]), entry["data_offsets"]
            size = 1 if dtype is None else dtype.itemsize
            count = (last - first) // size
            spare = count - _SAMPLE
            places = [place * spare // (_PLACES - 1) for place in range(_PLACES)]
            for value in places if count > _PLACES * _SAMPLE else range(0, count, _SAMPLE):
                file.seek(start + first + value * size)
                sample = file.read(min(_SAMPLE, count - value) * size)
                digest.update(sample if dtype is None else _rounded(sample, dtype))
            digests.add(digest.hexdigest())
    return digests


def _rounded(sample: bytes, dtype: torch.dtype) -> memoryview:
    return tensor_bytes(torch.frombuffer(bytearray(sample), dtype=dtype).to(torch.bfloat16))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Values of a tensor as they lie in memory, row by row."""
    array: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


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


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], *, hashed: bool = True) -> None:
    """Write tensors by name, and texts by name in the header, with the hash of both unless the tensors have their own.

    Equal tensors and texts give equal files.

    Raises:
        OSError: If the file cannot be written.
    """
    # Not `save_file`: it makes a file that its owner alone may read, and leaves a temporary one when it is killed.
    texts = {**metadata, HASH: _sha256(metadata, tensors.items())} if hashed else metadata
    data = memoryview(save(tensors, texts or None))
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:start]))
    if texts:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))  # `save` has them in any order
    described = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    described += b" " * (-len(described) % 8)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.writelines((len(described).to_bytes(8, "little"), described, data[start:]))


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


def read_weights(path: Path, load: Callable[[Path], Any] | None = None) -> dict[str, Tensor]:
    """Read weights by name, on the CPU.

    Args:
        path: A `.safetensors` file, or whatever `torch.save` wrote.
        load: Reader of other files than `.safetensors`; `load_plain` when None.

    Raises:
        InputError: If it is not a file, is damaged, or holds other things than weights by name.
    """
    if path.suffix == ".safetensors" and path.is_file():
        check_sum(path)
        return check_weights(path, read_tensors(path))
    return check_weights(path, (load or load_plain)(path))


def load_plain(path: Path) -> Any:
    """Read what `torch.save` wrote, of tensors and plain values alone; see `one_line_damage`."""
    with one_line_damage(path):
        check_memory(path.stat().st_size, f"the file {path}")
        return torch.load(path, map_location="cpu", weights_only=True)


@contextmanager
def one_line_damage(path: Path) -> Iterator[None]:
    """Turn what a reader of weights raises within the block into an error of one line.

    Raises:
        InputError: If the file is damaged or of another kind.
    """
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise InputError(f"{path} is {kind}; give a file of weights")
    if is_archive(path):
        check_archive(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as that the file looks like TorchScript
            yield
    except (InputError, FileNotFoundError, PermissionError, MemoryError):
        raise
    except Exception as error:  # readers raise whatever comes of the bytes
        if isinstance(error, pickle.UnpicklingError) or isinstance(error.__cause__, pickle.UnpicklingError):
            raise InputError(
                f"{path} holds objects other than tensors and plain values, or is not a file of weights; nothing was"
                " loaded"
            ) from None
        known = isinstance(error, RuntimeError | OSError | ValueError)
        reason = str(error).partition("\n")[0][:300] if known else "it is not a table of weights by name"
        raise InputError(f"{path} holds no readable weights: {reason or type(error).__name__}") from None


def is_archive(path: Path) -> bool:
    """Return whether a file is a ZIP archive, as `torch.save` writes, possibly a damaged one."""
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:
        return True


def check_archive(path: Path, *, tensors: bool | None = None) -> None:
    """Compare the CRC-32 of the members of an archive of `torch.save`, which torch does not; 0.35 s per GiB.

    Args:
        path: The archive.
        tensors: Whether to take the members that hold tensors, or all others; all when None.

    Raises:
        InputError: If one is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            check_members(archive)
            for member in archive.infolist():
                if tensors is not None and ("/data/" in member.filename) != tensors:
                    continue
                if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
                    raise InputError(
                        f"{path} is damaged, or torch.save did not write it: {member.filename} is compressed"
                    )
                with archive.open(member) as file:
                    while file.read(1 << 20):
                        pass
    except InputError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError, LookupError) as error:
        raise InputError(f"{path} is truncated or damaged: {str(error) or type(error).__name__}") from None


def check_weights(path: Path, found: Any) -> dict[str, Tensor]:
    """Check that what was read are plain tensors by name.

    Raises:
        InputError: If it is something else, or nothing.
    """
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise InputError(f"{path} holds no weights by name")
    if not found:
        raise InputError(f"{path} holds no weights by name: it is empty")
    for name, tensor in found.items():
        check_plain(path, name, tensor)
        if tensor.is_meta:
            raise InputError(f"{path}: {name} has no values")
    return found


def check_plain(path: Path, name: str, tensor: Tensor) -> None:
    """Refuse tensors that are not dense or not real, and those that are larger than their part of the file.

    Raises:
        InputError: If it is one.
    """
    tiny = tensor.is_floating_point() and tensor.element_size() < 2  # torch cannot compute with them
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex() or tiny:
        kind = f"{tensor.dtype}, {tensor.layout}".replace("torch.", "")
        raise InputError(f"{path}: {name} is {kind}; it must be a dense tensor of real numbers")
    if not tensor.is_meta and tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        raise InputError(f"{path}: {name} of shape {list(tensor.shape)} repeats its values instead of holding them")
