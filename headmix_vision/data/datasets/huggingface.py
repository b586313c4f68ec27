"""`hfds`, `hfds/NAME`: data sets of Hugging Face, in a local directory or by name."""

import importlib
from pathlib import Path

from headmix_vision.data.datasets.base import Pictures, RawImage, Source, SplitRequest, number_names
from headmix_vision.data.datasets.timm_readers import create_timm_dataset, reader_class_names
from headmix_vision.errors import InputError


def open_huggingface(request: SplitRequest) -> Source:
    """Open a split of a data set by name, or, without a name, of the directory that is the root.

    Such a directory was written by `save_to_disk` or can be read by `load_dataset`.

    Raises:
        InputError: No such directory, split or column, or whatever the reader complains about.
    """
    if request.variant:
        return _open_reader(request.name, request.root, request)
    root = request.existing_root()
    if any((root / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return _open_saved(root, request)
    return _open_reader(f"hfds/{root}", None, request)


def _open_reader(name: str, root: str | None, request: SplitRequest) -> Source:
    reader = create_timm_dataset(name, root=root, split=request.split).reader
    return HubImages(reader, reader_class_names(reader) or number_names(reader.iter_targets()), request.decoding)


def _open_saved(root: Path, request: SplitRequest) -> Source:
    datasets, split = importlib.import_module("datasets"), request.split
    saved = datasets.load_from_disk(str(root))
    if not isinstance(saved, dict):
        raise InputError(f"root {str(root)!r} holds a data set without splits, save a DatasetDict instead")
    if split not in saved:
        raise InputError(f"root {str(root)!r} has no split {split!r}, it has {', '.join(saved)}")
    for column in ("image", "label"):
        if column not in saved[split].column_names:
            raise InputError(f"split {split!r} of {str(root)!r} has no column {column!r}: {saved[split].column_names}")
    images = saved[split].cast_column("image", datasets.Image(decode=False))
    names = getattr(images.features["label"], "names", None) or number_names(images["label"])
    return SavedImages(images, list(names), request.decoding)


class HubImages(Pictures):
    """timm's reader of one split, without the retries of its data set, which no limit counts."""

    def read(self, index: int) -> tuple[RawImage, int]:
        stream, target = self.data[index]
        with stream:
            return self.decoding.first_frame(stream), int(target)

    def name(self, index: int) -> str:
        return str(self.data.filename(index, absolute=True) or f"image {index}")


class SavedImages(Pictures):
    """One split written by Hugging Face's `save_to_disk`, which timm's reader cannot open."""

    def read(self, index: int) -> tuple[RawImage, int]:
        item = self.data[index]
        stored = item["image"]
        return self.decoding.first_frame(stored["bytes"] or stored["path"]), int(item["label"])

    def name(self, index: int) -> str:
        return str(self.data[index]["image"]["path"] or f"image {index}")
