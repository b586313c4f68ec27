"""timm's readers, shared by folders, tar files, Hugging Face sets and streams, with the checks that timm leaves out."""

from tarfile import TarInfo
from typing import Any

from PIL import Image

from headmix_vision.data.datasets.base import Pictures, RawImage, relative_sizes, to_mode
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


class TimmReader(Pictures):
    """A timm reader (folder, tar, Hugging Face) without the retries of timm's ImageDataset, which no limit counts."""

    def read(self, index: int) -> tuple[RawImage, int]:
        stream, target = self.data[index]
        with stream, Image.open(stream) as image:
            return to_mode(image, self.mode), int(target)

    def files(self) -> list[tuple[str, int]] | None:
        """Names and sizes of files in a folder or of members of a tar file."""
        entries = [sample[0] for sample in getattr(self.data, "samples", ())]
        if not entries:
            return None
        if isinstance(entries[0], TarInfo):
            return [(entry.name, entry.size) for entry in entries]
        return relative_sizes(entries, self.data.root)

    def name(self, index: int) -> str:
        return str(self.data.filename(index, absolute=True) or f"image {index}")
