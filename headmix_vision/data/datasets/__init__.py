"""Opening data sets through timm, with the checks that timm leaves out."""

import importlib
import importlib.util
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headmix_vision.data.datasets.base import (
    EVAL_SYNONYMS,
    TRAIN_SYNONYMS,
    SavedImages,
    Source,
    TimmReader,
    TorchvisionImages,
)
from headmix_vision.data.datasets.canvas import RULES, CanvasDigits
from headmix_vision.errors import InputError

RANDOM_ACCESS = ("folder", "torch", "hfds")
STREAMING = ("hfids", "wds", "tfds")
BUILT_IN = ("digits", "canvas", "fake")
DATASET_NAMES = (
    "digits, canvas, canvas/opposite, fake, folder, hfds, torch/NAME, hfds/NAME, hfids/NAME, wds/, tfds/NAME"
)

_NEEDED_PACKAGES = {
    "hfds": ("datasets", "pip install headmix_vision[datasets]"),
    "hfids": ("datasets", "pip install headmix_vision[datasets]"),
    "wds": ("webdataset", "pip install headmix_vision[webdataset]"),
    "tfds": ("tensorflow_datasets", "pip install tensorflow-datasets"),
}


def reader_kind(dataset: str) -> str:
    """What a data set is read by: the part of its name before the slash, in lower case.

    Raises:
        InputError: Unknown name.
    """
    prefix, slash, rest = dataset.partition("/")
    kind = prefix.lower()
    if slash and kind == "canvas":
        known = rest in RULES
    elif slash:
        known = kind in ("torch", "hfds", *STREAMING) and bool(rest or kind == "wds")
    else:
        known = kind in (*BUILT_IN, "folder", "hfds")
    if not known:
        raise InputError(f"dataset {dataset!r} is unknown, it must be one of {DATASET_NAMES}")
    return kind


def open_canvas(dataset: str, split: str, image_size: tuple[int, int], channels: int) -> CanvasDigits:
    """Open the data set `canvas` or `canvas/RULE` at a size in pixels.

    Raises:
        InputError: The size is no square, or is too small.
    """
    if image_size[0] != image_size[1]:
        raise InputError(f"dataset {dataset!r} is square, the model takes {image_size[0]}x{image_size[1]} pixels")
    _, _, rule = dataset.partition("/")
    return CanvasDigits(split, image_size[0], rule=rule or "same", channels=channels)


def check_location(dataset: str, root: str | None) -> None:
    """Raise InputError if a needed package is not installed, or the place of the data is not given or missing."""
    kind = reader_kind(dataset)
    package, command = _NEEDED_PACKAGES.get(kind, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise InputError(f"dataset {dataset!r} needs the package {package}: {command}")
    local = kind in ("folder", "torch") or dataset.lower() == "hfds"
    if root is None and (local or kind == "wds"):
        raise InputError(f"dataset {dataset!r} needs root, the place of the data")
    if local and not os.path.exists(str(root)):
        raise InputError(f"root {root!r} does not exist (dataset {dataset!r})")


def open_source(dataset: str, root: str | None, split: str, mode: str) -> Source:
    """Open one split of a random-access data set.

    Args:
        dataset: `folder`, `hfds` or a timm name `torch/NAME`, `hfds/NAME`.
        root: For `folder` a directory with one sub-directory or tar file per split, or one tar file of that; for
            `hfds` a local directory, either written by `save_to_disk` or readable by `load_dataset`; else timm's root.
        split: Name of the split; `train`, `validation` and their synonyms are interchangeable for folders.
        mode: PIL mode of the images, `L` or `RGB`.

    Raises:
        InputError: Nothing there, an empty class folder, images outside of a class folder, or whatever the reader
            complains about.
    """
    kind = reader_kind(dataset)
    check_location(dataset, root)
    if kind == "folder":
        return _open_folder(Path(str(root)), split, mode)
    if dataset.lower() == "hfds" and root is not None:
        return _open_huggingface_directory(root, split, mode)
    opened = create_timm_dataset(dataset, root=root, split=split)
    if kind == "torch":
        names = getattr(opened, "classes", None) or _number_names(getattr(opened, "targets", []))
        return TorchvisionImages(opened, [_class_name(name) for name in names], mode)
    return _hfds_source(opened.reader, mode)


def create_timm_dataset(name: str, **kwargs: Any) -> Any:
    """`timm.data.create_dataset`, with its many ways to fail turned into a ValueError of one line."""
    from timm.data import create_dataset

    try:
        return create_dataset(name, **kwargs)
    except Exception as error:  # every reader and every library below it raises its own types
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(
            f"dataset {name or 'folder'!r}, split {kwargs.get('split')!r}, root {kwargs.get('root')!r}: {reason}"
        ) from error


def _open_folder(root: Path, split: str, mode: str) -> Source:
    names = split_candidates(split)
    if root.is_file():
        if root.suffix != ".tar":
            raise InputError(f"root {str(root)!r} is a file, it must be a directory or a .tar")
        return _open_tar(root, mode, names)
    for name in names:
        if (root / name).is_dir():
            return open_class_folders(root / name, mode)
        if (root / f"{name}.tar").is_file():
            return _open_tar(root / f"{name}.tar", mode)
    looked_for = ", ".join(f"{name}/" for name in names)
    raise InputError(f"root {str(root)!r} has no {split} split: looked for {looked_for} and the same with .tar")


def split_candidates(split: str) -> tuple[str, ...]:
    """Directory names that may hold a split: its own and timm's synonyms."""
    synonyms = next((group for group in (TRAIN_SYNONYMS, EVAL_SYNONYMS) if split in group), ())
    return tuple(dict.fromkeys((split, *synonyms)))


def open_class_folders(folder: Path, mode: str) -> Source:
    """Open a directory with one sub-directory of images per class.

    Raises:
        InputError: Images outside of a class folder, or an empty one.
    """
    # timm labels by leaf folder and forgets a class without images, which would shift all later class indices.
    from timm.data.readers.img_extensions import get_img_extensions

    reader = create_timm_dataset("", root=str(folder), search_split=False).reader
    classes = set(reader.class_to_idx)
    if "" in classes:
        raise InputError(f"{str(folder)!r} has images outside of a class folder, for example {reader.filename(0)!r}")
    filled = {Path(path).relative_to(folder).parts[0] for path, _ in reader.samples}
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir() and not entry.name.startswith(".") and entry.name not in filled:
            raise InputError(f"class folder {entry.path!r} has no image ({', '.join(get_img_extensions())})")
    return TimmReader(reader, reader_class_names(reader), mode)


def _open_tar(path: Path, mode: str, splits: tuple[str, ...] = ()) -> Source:
    # cache_tarfiles off: an open tar file shared by forked workers would share one read position.
    reader = create_timm_dataset("", root=str(path), search_split=False, cache_tarfiles=False).reader
    if splits:
        folders = [Path(sample[0].path).parts[:-2] for sample in reader.samples]
        split = next((name for name in splits if any(name in parts for parts in folders)), None)
        if split is None:
            raise InputError(f"{str(path)!r} has none of the folders {', '.join(f'{name}/' for name in splits)}")
        keep = np.array([split in parts for parts in folders])
        reader.samples, reader.targets = reader.samples[keep], reader.targets[keep]
    names = reader_class_names(reader)
    missing = sorted(set(range(len(names))) - set(reader.targets.tolist()))
    if missing:
        raise InputError(f"class {names[missing[0]]!r} has no image in {str(path)!r} {'/'.join(splits[:1])}".rstrip())
    return TimmReader(reader, names, mode)


def _open_huggingface_directory(root: str, split: str, mode: str) -> Source:
    if not any((Path(root) / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return _hfds_source(create_timm_dataset(f"hfds/{root}", root=None, split=split).reader, mode)

    datasets = importlib.import_module("datasets")

    saved = datasets.load_from_disk(root)
    if not isinstance(saved, dict):
        raise InputError(f"root {root!r} holds a data set without splits, save a DatasetDict instead")
    if split not in saved:
        raise InputError(f"root {root!r} has no split {split!r}, it has {', '.join(saved)}")
    for column in ("image", "label"):
        if column not in saved[split].column_names:
            raise InputError(f"split {split!r} of {root!r} has no column {column!r}: {saved[split].column_names}")
    images = saved[split].cast_column("image", datasets.Image(decode=False))
    names = getattr(images.features["label"], "names", None) or _number_names(images["label"])
    return SavedImages(images, list(names), mode)


def _hfds_source(reader: Any, mode: str) -> Source:
    return TimmReader(reader, reader_class_names(reader) or _number_names(reader.iter_targets()), mode)


def reader_class_names(reader: Any) -> list[str]:
    """Class names of a timm reader in the order of their index, empty if it does not know them."""
    indices = getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", None) or {}
    return sorted(indices, key=indices.__getitem__)


def _number_names(targets: Iterable[int]) -> list[str]:
    return [str(i) for i in range(max((int(target) for target in targets), default=-1) + 1)]


def _class_name(name: str | Sequence[str]) -> str:
    # torchvision's ImageNet has a tuple of synonyms per class
    return name if isinstance(name, str) else ", ".join(name)
