"""timm's readers, which folders, tar files, Hugging Face sets and streams share, with the checks that timm leaves out."""

from typing import Any

from PIL import Image

from headmix_vision.data.datasets.base import RawImage, Source
from headmix_vision.errors import InputError


def create_timm_dataset(name: str, **kwargs: Any) -> Any:
    """Call `timm.data.create_dataset`, with its many ways to fail turned into an InputError of one line."""
    from timm.data import create_dataset

    try:
        return create_dataset(name, **kwargs)
    except Exception as error:  # every reader and every library below it raises its own types
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(
            f"dataset {name or 'folder'!r}, split {kwargs.get('split')!r}, root {kwargs.get('root')!r}: {reason}"
        ) from error


def reader_class_names(reader: Any) -> list[str]:
    """Class names of a timm reader in the order of their index, empty if it does not know them."""
    indices = getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", None) or {}
    return sorted(indices, key=indices.__getitem__)


class TimmReader(Source):
    """A timm reader (folder, tar, Hugging Face) without the silent retries of timm's ImageDataset.

    Args:
        reader: A reader of timm with random access.
        class_names: One name per label.
        mode: PIL mode of the images, `L` or `RGB`.
    """

    def __init__(self, reader: Any, class_names: list[str], mode: str) -> None:
        self.reader = reader
        self.class_names = class_names
        self.mode = mode

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, index: int) -> tuple[RawImage, int]:
        stream, target = self.reader[index]
        with stream, Image.open(stream) as image:
            return image.convert(self.mode), int(target)

    def name(self, index: int) -> str:
        return str(self.reader.filename(index, absolute=True) or f"image {index}")
