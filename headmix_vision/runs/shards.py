"""Shards of a checkpoint, the files in which several processes write one: named, checked, read and deleted.

Each process writes its own part. The entry `shards` of the `.ckpt` file names the folder beside it, in the format of
`torch.distributed.checkpoint`, and holds the SHA-256 of each file in there. Each process compares them, at 0.7 s per
GiB, with the files that it reads. Shards of earlier versions have none.
"""

import pickle
import shutil
import warnings
from collections.abc import Mapping
from glob import escape
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, Metadata, load
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_fields
from headmix_vision.files.tensors import file_sha256

FORMAT = 1
SHARDS_INDEX = ".metadata"  # written when all shards are whole
_FIELDS = {"format": int, "folder": str, "identity": int, "processes": int, "sha256": dict | None}
_IDENTITY = "[0-9a-f]" * 16
_MARKS = "/identity/"
_KNOWN = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
}


def identity_name(process: int) -> str:
    """Name the number which a process writes into its shard, by which shards of other checkpoints are told."""
    return f"{_MARKS}{process}"


def shards_folder(checkpoint: Path, identity: int) -> Path:
    """Name the folder of the shards of a checkpoint file."""
    return checkpoint.with_name(f"{checkpoint.stem}.{identity:016x}.shards")


def remove_shards(checkpoint: Path, keep: str | None = None) -> None:
    """Delete the folders of shards of a checkpoint file, but one."""
    for folder in checkpoint.parent.glob(f"{escape(checkpoint.stem)}.{_IDENTITY}.shards"):
        if folder.name != keep:
            shutil.rmtree(folder)


def remove_unfinished(checkpoints: Path) -> None:
    """Delete shards that killed processes were writing to a folder; only for who holds the lock of its run."""
    for folder in checkpoints.glob(f"*.{_IDENTITY}.shards"):
        if not (folder / SHARDS_INDEX).exists():
            shutil.rmtree(folder)


def check_shards(path: Path, about: Any, tensors: Mapping[str, Tensor]) -> None:
    """Check that all shards of a checkpoint are there.

    Args:
        path: The `.ckpt` file.
        about: Its entry `shards`.
        tensors: The sharded tensors without values, by their names in the checkpoint.

    Raises:
        InputError: If one is missing or truncated, if they are of another number of processes or another version of
            this format, or if a tensor is not in them.
    """
    about = check_fields(f"the entry 'shards' of {path}", about, _FIELDS)
    if about["format"] != FORMAT:
        raise InputError(f"the shards of {path} have format {about['format']}, this version reads {FORMAT}")
    reader = _Reader(path, about)
    folder = Path(reader.path)
    if not folder.is_dir():
        raise InputError(f"{path} lacks the folder of its shards, {folder}: copy or move both")
    metadata = reader.read_metadata()
    marks = [name for name in metadata.state_dict_metadata if name.startswith(_MARKS)]
    if about["processes"] != len(marks) or not marks:
        raise InputError(
            f"{path} is of {about['processes']} processes, but its shards {folder} of {len(marks)}: copy both again"
        )
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        shard = folder / Path(name).name
        if not shard.is_file():
            raise InputError(f"the shard {shard} of {path} is missing")
        if shard.stat().st_size < end:
            raise InputError(f"the shard {shard} of {path} is truncated ({shard.stat().st_size} bytes)")
    stored, held = metadata.state_dict_metadata, sum((folder / Path(name).name).stat().st_size for name in ends)
    for name, tensor in tensors.items():
        found = stored.get(name)
        alike = isinstance(found, TensorStorageMetadata) and found.size == tensor.shape
        if not (alike and tensor.numel() * tensor.element_size() <= held):
            raise InputError(f"{path} is damaged: {name} of shape {list(tensor.shape)} is not in its shards {folder}")


def read_shards(path: Path, about: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read tensors whole, on the CPU.

    Args:
        path: The `.ckpt` file.
        about: Its entry `shards`.
        tensors: Tensors of the same shapes and types without values, by their names in the checkpoint.

    Raises:
        InputError: If a shard is damaged or of another checkpoint.
    """
    values = {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}
    fill(values, path, about, whole=True)
    return values


def fill(
    tensors: dict[str, Tensor],
    path: Path,
    about: dict[str, Any],
    *,
    whole: bool = False,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Read values into tensors, of which DTensors get this process's part.

    Args:
        tensors: What to fill, by names in the checkpoint.
        path: The `.ckpt` file.
        about: Its entry `shards`.
        whole: Whether this process reads alone; else all processes of the group have to call this.
        group: The processes; all when None.

    Raises:
        InputError: If a shard is damaged or of another checkpoint.
    """
    marks = {identity_name(process): torch.zeros((), dtype=torch.int64) for process in range(about["processes"])}
    reader = _Reader(path, about)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it was asked to read alone
            load({**tensors, **marks}, storage_reader=reader, process_group=group, no_dist=whole)
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise InputError(f"the shards of {path} are damaged: {reason}") from None
    for process, mark in enumerate(marks.values()):
        if int(mark) != about["identity"]:
            raise InputError(f"the shard of process {process} in {reader.path} is of another checkpoint than {path}")


class _Reader(FileSystemReader):
    """Read shards without unpickling anything but their index, and compare the hashes of all files that it reads.

    Args:
        checkpoint: The `.ckpt` file.
        about: Its entry `shards`.
    """

    def __init__(self, checkpoint: Path, about: dict[str, Any]) -> None:
        super().__init__(checkpoint.parent / Path(about["folder"]).name)
        self.sha256: dict[str, str] | None = about.get("sha256")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / SHARDS_INDEX
        try:
            self._check(SHARDS_INDEX)
            with path.open("rb") as file:
                metadata = _IndexUnpickler(file).load()
        except FileNotFoundError:
            raise InputError(f"{path.parent} is not a complete folder of shards: it lacks {SHARDS_INDEX}") from None
        except InputError:
            raise
        except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, LookupError) as error:
            raise InputError(f"{path} is damaged: {error}") from None
        kinds = metadata.state_dict_metadata.values() if isinstance(metadata, Metadata) else [None]
        if not all(isinstance(kind, TensorStorageMetadata) for kind in kinds):  # torch would unpickle all else
            raise InputError(f"{path} is not an index of tensors")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for name in sorted({self.storage_data[item.storage_index].relative_path for item in plan.items}):
            self._check(name)
        return super().read_data(plan, planner)

    def _check(self, name: str) -> None:
        path = Path(self.path) / name
        if name != path.name:
            raise InputError(f"{Path(self.path) / SHARDS_INDEX} is damaged: it names the shard {name!r:.60}")
        if self.sha256 is not None and file_sha256(path) != self.sha256.get(name):
            raise InputError(f"the shard {path} is damaged: it does not have the SHA-256 in its checkpoint")


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _KNOWN.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}")
