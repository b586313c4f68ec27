"""`hfds`, `hfds/NAME`: data sets of Hugging Face, in a local directory or by name."""

import importlib
import re
from pathlib import Path
from typing import Any

import yaml

from headmix_vision.data.datasets.base import RawImage, Selection, Source, SplitRequest
from headmix_vision.data.datasets.timm_readers import create_timm_dataset, reader_class_names
from headmix_vision.data.labels import number_labels
from headmix_vision.errors import InputError
from headmix_vision.files.reading import parse_yaml, read_text

_DESCRIPTIONS = ("README.md", ".huggingface.yaml")


def open_huggingface(request: SplitRequest) -> Source:
    """Open a split of a data set by name, or, without a name, of the directory that is the root.

    Such a directory was written by `save_to_disk` or can be read by `load_dataset`.

    Raises:
        InputError: No such directory, split or column, files that the directory names elsewhere, an image without a
            valid label, or whatever the reader complains about.
    """
    if request.variant:
        return _open_reader(request.name, request.root, request)
    root = request.existing_root()
    if any((root / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return _open_saved(root, request)
    for name in _DESCRIPTIONS:
        _check_local(root / name)
    return _open_reader(f"hfds/{root}", None, request)


def _check_local(description: Path) -> None:
    """Raise InputError for a description of a data set that names addresses, which `datasets` would fetch."""
    if not description.is_file():
        return
    text = read_text(description)
    head = re.match(r"\s*---\r?\n(.*?)\n---", text, re.DOTALL)
    try:
        found = parse_yaml(head[1] if head else text if description.suffix == ".yaml" else "")
    except yaml.YAMLError:
        raise InputError(f"the description of the data set in {description} is not YAML") from None
    address = re.search(r"[\w+.-]+://[^\s'\"]*", str(found.get("configs")) if isinstance(found, dict) else "")
    if address:
        raise InputError(f"{description} names data at {address[0]}: fetch it yourself, and name the local files")


def _open_reader(name: str, root: str | None, request: SplitRequest) -> Source:
    reader = create_timm_dataset(name, root=root, split=request.split).reader
    return _make(reader.dataset, reader_class_names(reader), name, request)


def _open_saved(root: Path, request: SplitRequest) -> Source:
    datasets, split = importlib.import_module("datasets"), request.split
    saved = datasets.load_from_disk(str(root))
    if not isinstance(saved, dict):
        raise InputError(f"root {str(root)!r} holds a data set without splits, save a DatasetDict instead")
    if split not in saved:
        raise InputError(f"root {str(root)!r} has no split {split!r}, it has {', '.join(saved)}")
    for column in ("image", *(("label",) if request.needs_labels else ())):
        if column not in saved[split].column_names:
            raise InputError(f"split {split!r} of {str(root)!r} has no column {column!r}: {saved[split].column_names}")
    images = saved[split].cast_column("image", datasets.Image(decode=False))
    return _make(images, getattr(images.features.get("label"), "names", None), str(root), request)


def _make(data: Any, class_names: list[str] | None, place: str, request: SplitRequest) -> "HuggingFaceImages":
    place = f"{place}, {request.split}"
    kept, targets, names = number_labels(
        list(data["label"]) if "label" in data.column_names else [None] * len(data),
        lambda number: f"{place}[{number}]",
        place,
        request.label_rule,
        class_names=class_names or None,
    )
    return HuggingFaceImages(place, data, kept, targets, names, request.decoding)


class HuggingFaceImages(Selection):
    """Images of one split, encoded, of which none is touched but the one that is read.

    Args:
        place: What messages call the split.
        selection: As for `Selection`.
    """

    def __init__(self, place: str, *selection: Any) -> None:
        super().__init__(*selection)
        self.place = place

    def read(self, index: int) -> tuple[RawImage, int]:
        assert self.targets is not None
        stored = self.data[self.kept[index]]["image"]
        if stored is None:
            raise ValueError("the image is missing")
        return self.decoding.first_frame(stored["bytes"] or stored["path"]), self.targets[index]

    def name(self, index: int) -> str:
        return f"{self.place}[{self.kept[index]}]"
