"""`folder`: a directory or tar file per split, with a directory of images per class."""

import os
from pathlib import Path

import numpy as np

from headmix_vision.data.datasets.base import EVAL_SYNONYMS, TRAIN_SYNONYMS, Source, SplitRequest
from headmix_vision.data.datasets.timm_readers import TimmReader, create_timm_dataset, reader_class_names
from headmix_vision.errors import InputError


def open_folder(request: SplitRequest) -> Source:
    """Open a split of a folder.

    Its root is a directory with one sub-directory or tar file per split, or one tar file of that; `train`,
    `validation` and their synonyms are interchangeable.

    Raises:
        InputError: Nothing there, an empty class folder, or images outside of a class folder.
    """
    root, mode = request.existing_root(), request.mode
    if request.split in ("", ".", ".."):
        raise InputError(f"split is {request.split!r}, it must be the name of a folder or tar file in {str(root)!r}")
    names = split_candidates(request.split)
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
    raise InputError(f"root {str(root)!r} has no {request.split} split: looked for {looked_for} and the same with .tar")


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
