"""The folder of samples: what is in it, when it may be written to, and what is still to be done.

It holds `images/000000.png` and so on, lossless: an image is a PNG, a clip an animated PNG; `metadata.json`, whose
settings a later call must repeat; at the end also `grid.png` and, if asked for, `samples.npz`.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from headmix_vision.atomic import atomic_path
from headmix_vision.errors import InputError
from headmix_vision.png import read_png, write_png

IMAGES, METADATA, GRID, NPZ = "images", "metadata.json", "grid.png", "samples.npz"
_IMAGE_NAME = re.compile(r"\d{6,}\.png")
_TEMPORARY_NAME = re.compile(r"\..+\.\d+\.tmp")


class SampleFolder:
    """A folder of samples.

    Args:
        path: The folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def sample_path(self, index: int) -> Path:
        """Names the file of a sample."""
        return self.path / IMAGES / f"{index:06d}.png"

    def check(self, settings: dict[str, Any], num: int) -> None:
        """Checks that samples with these settings may be written here; touches nothing.

        Raises:
            InputError: If there are files of someone else, samples with other settings, or more samples than `num`.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"--out {self.path} is a file, it must be a directory")
        if not self.path.is_dir():
            return
        inside = {entry.name for entry in self.path.iterdir()}
        foreign = sorted(name for name in inside - {IMAGES, METADATA, GRID, NPZ} if not _TEMPORARY_NAME.fullmatch(name))
        if (self.path / IMAGES).is_dir():
            names = (entry.name for entry in (self.path / IMAGES).iterdir())
            foreign += sorted(
                f"{IMAGES}/{name}"
                for name in names
                if not (_IMAGE_NAME.fullmatch(name) or _TEMPORARY_NAME.fullmatch(name))
            )
        if foreign:
            raise InputError(f"{self.path} holds {foreign[0]}, which is no sample; choose another --out")
        if METADATA not in inside:
            if inside:
                raise InputError(f"{self.path} holds samples without {METADATA}; choose another --out")
            return
        stored = self.read_metadata().get("settings", {})
        different = [name for name in settings if stored.get(name) != settings[name]]
        if different:
            name = different[0]
            raise InputError(
                f"{self.path} holds samples with {name} {stored.get(name)!r}, asked for {settings[name]!r};"
                " choose another --out"
            )
        existing = self.existing()
        if existing and max(existing) >= num:
            raise InputError(f"{self.path} holds sample {max(existing)} already, --num is {num}; choose another --out")

    def existing(self) -> set[int]:
        """Lists the indices of the samples that are there."""
        if not (self.path / IMAGES).is_dir():
            return set()
        names = (entry.name for entry in (self.path / IMAGES).iterdir())
        return {int(name.removesuffix(".png")) for name in names if _IMAGE_NAME.fullmatch(name)}

    def remove_leftovers(self) -> None:
        """Deletes half-written files of an interrupted call."""
        for folder in (self.path, self.path / IMAGES):
            for entry in folder.iterdir() if folder.is_dir() else ():
                if _TEMPORARY_NAME.fullmatch(entry.name):
                    entry.unlink(missing_ok=True)

    def read_metadata(self) -> dict[str, Any]:
        """Reads the metadata.

        Raises:
            InputError: If the file is damaged.
        """
        try:
            return json.loads((self.path / METADATA).read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"{self.path / METADATA} cannot be read: {error}") from None

    def write_metadata(self, metadata: dict[str, Any]) -> None:
        """Writes the metadata."""
        with atomic_path(self.path / METADATA) as temporary:
            temporary.write_text(json.dumps(metadata, indent=2) + "\n")

    def write_sample(self, index: int, pixels: np.ndarray) -> None:
        """Writes a sample: an image, uint8 [H, W, 1 or 3], or a clip, uint8 [T, H, W, 1 or 3]."""
        write_png(self.sample_path(index), pixels)

    def read_sample(self, index: int) -> np.ndarray:
        """Reads a sample as `write_sample` took it."""
        return read_png(self.sample_path(index))

    def write_grid(self, picture: np.ndarray) -> None:
        """Writes the picture of many samples, uint8 [height, width, 3], or of clips [T, height, width, 3]."""
        write_png(self.path / GRID, picture)

    def write_npz(self, num: int, labels: list[int] | None) -> None:
        """Writes samples 0 to `num` - 1 as ADM does: `arr_0`, uint8 [N, *grid, channels], and `labels`, int64 [N]."""
        first = self.read_sample(0)
        images = np.empty((num, *first.shape), np.uint8)
        for index in range(num):
            images[index] = self.read_sample(index)
        arrays: dict[str, Any] = {"arr_0": images}
        if labels is not None:
            arrays["labels"] = np.asarray(labels, np.int64)
        with atomic_path(self.path / NPZ) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)
