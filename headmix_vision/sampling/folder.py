"""The folder of samples: what is in it, when it may be written to, and what is still to be done.

It holds `images/000000.png` and so on, lossless: an image is a PNG, a clip an animated PNG. A later call must repeat
the settings in `metadata.json`. At the end the contact sheet `grid.png` is written and, if asked for, `samples.npz`.
Clips also have files to watch, made of the lossless ones and made again where they are missing: `videos/000000.mp4` (or
`.gif`) or `frames/000000/000000.png`, and `grid.gif`, a contact sheet that moves. The folder is locked while it is
written to.
"""

from __future__ import annotations

import json
import math
import os
import re
import zipfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from headmix_vision.errors import InputError, check_choice
from headmix_vision.files.pictures import check_png, is_whole_png, read_png, write_png
from headmix_vision.files.reading import check_replaced, read_json
from headmix_vision.files.video import check_video_name, is_whole_video, write_video
from headmix_vision.files.writing import atomic_path, hold_lock, is_temporary, remove_temporaries

IMAGES, METADATA, GRID, NPZ, LOCK = "images", "metadata.json", "grid.png", "samples.npz", ".lock"
VIDEOS, FRAMES, MOVING_GRID = "videos", "frames", "grid.gif"
FORMATS = ("mp4", "gif", "frames", "png")
MAX_SAMPLES = 1_000_000  # their names have six digits; longer ones would sort before shorter ones
_IMAGE_NAME = re.compile(r"\d{6,}\.png")
_FRAME = "{:06d}.png"
_GAP, _MARGIN = 4, 8
_BACKGROUND, _INK = (255, 255, 255), (32, 32, 32)


class SampleFolder:
    """A folder of images or clips.

    Args:
        path: The folder; it need not exist.
        frame_rate: Frames per second of the files to watch; None for images.
        form: One of `FORMATS`, the form of the files to watch; with `png` there are none but the lossless ones.

    Raises:
        InputError: If the form is unknown, or PyAV is needed for it and missing.
    """

    files: ClassVar[tuple[str, ...]] = (METADATA, GRID, NPZ, MOVING_GRID)
    folders: ClassVar[dict[str, re.Pattern[str]]] = {
        IMAGES: _IMAGE_NAME,
        VIDEOS: re.compile(r"\d{6,}\.(mp4|gif)"),
        FRAMES: re.compile(r"\d{6,}"),
    }
    """Names of what is in them."""

    def __init__(self, path: Path, frame_rate: float | None = None, form: str = "png") -> None:
        check_choice("form", form, FORMATS)
        if form in ("mp4", "gif"):
            check_video_name(f"{VIDEOS}.{form}")
        self.path, self.frame_rate, self.form = path, frame_rate, form

    def sample_path(self, index: int) -> Path:
        """Name the file of a sample."""
        return self.path / IMAGES / f"{index:06d}.png"

    def watched_path(self, index: int) -> Path | None:
        """Return the file, or the folder of frames, to watch a sample in; None where there is none."""
        if self.form == "png":
            return None
        if self.form == "frames":
            return self.path / FRAMES / f"{index:06d}"
        return self.path / VIDEOS / f"{index:06d}.{self.form}"

    def check(self, settings: dict[str, Any], num: int) -> None:
        """Check that samples with these settings may be written here; touches nothing.

        Raises:
            InputError: If there are files of someone else, samples with other settings, or more samples than `num`.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"--out {self.path} is a file, it must be a directory")
        if not self.path.is_dir():
            return
        inside = {entry.name for entry in self.path.iterdir() if entry.name != LOCK and not is_temporary(entry.name)}
        foreign = sorted(inside - {*self.files, *self.folders})
        for folder, pattern in self.folders.items():
            if (self.path / folder).is_symlink():
                raise InputError(f"{self.path / folder} is a link, it must be a folder; choose another --out")
            if (self.path / folder).is_dir():
                foreign += self._check_entries(folder, pattern)
            elif folder in inside:
                foreign.append(folder)
        foreign += [name for name in self.files if (self.path / name).is_dir()]
        for name in self.files:
            check_replaced(self.path / name)
        if foreign:
            raise InputError(f"{self.path} holds {foreign[0]}, which is not a sample; choose another --out")
        if METADATA not in inside:
            if inside:
                raise InputError(f"{self.path} holds samples without {METADATA}; choose another --out")
            return
        different = _difference(self.read_metadata()["settings"], settings)
        if different is not None:
            name, stored, asked = different
            raise InputError(
                f"{self.path} holds samples with {name} {_short(stored)}, asked for {_short(asked)};"
                " choose another --out"
            )
        existing = self.existing()
        if existing and max(existing) >= num:
            raise InputError(f"{self.path} holds sample {max(existing)} already, --num is {num}; choose another --out")

    def _check_entries(self, folder: str, pattern: re.Pattern[str]) -> list[str]:
        """List the entries of a folder that are not samples, and refuse samples that are pipes or devices."""
        foreign = []
        with os.scandir(self.path / folder) as entries:
            for entry in entries:
                if not (pattern.fullmatch(entry.name) or is_temporary(entry.name)):
                    foreign.append(f"{folder}/{entry.name}")
                else:
                    check_replaced(entry.path)
        return sorted(foreign)

    def existing(self) -> set[int]:
        """List the indices of the samples that are there."""
        if not (self.path / IMAGES).is_dir():
            return set()
        names = (entry.name for entry in (self.path / IMAGES).iterdir())
        return {int(name.removesuffix(".png")) for name in names if _IMAGE_NAME.fullmatch(name)}

    def damaged(self, indices: set[int], shape: tuple[int, ...]) -> set[int]:
        """List the samples whose files are damaged or have another shape, as `write_sample` takes them."""
        bad = set()
        for index in indices:
            try:
                check_png(self.sample_path(index), shape)
            except InputError:
                bad.add(index)
        return bad

    def count_files(self, missing: Sequence[int], num: int, shape: tuple[int, ...]) -> int:
        """Count the files to write for samples 0 to `num` - 1 of a shape, some of which are missing.

        The files to watch samples in count, too; of a folder of frames, its frames.
        """
        unwatchable = 0 if self.form == "png" else sum(not self.is_watchable(index) for index in range(num))
        return len(missing) + unwatchable * (shape[0] if self.form == "frames" else 1)

    def check_space(self, count: int, npz_bytes: int) -> None:
        """Check that the disk can take files of samples, each of which needs a block at the least.

        Args:
            count: Number of files to write.
            npz_bytes: Pixels of the npz file to write.

        Raises:
            InputError: If it cannot.
        """
        disk = os.statvfs(next(place for place in (self.path, *self.path.absolute().parents) if place.exists()))
        needed, free = count * disk.f_frsize + npz_bytes, disk.f_bavail * disk.f_frsize
        if needed > free:
            raise InputError(
                f"{count} files of samples need at least {needed / 1e9:.3f} GB,"
                f" the disk of {self.path} has {free / 1e9:.3f} GB left"
            )
        if disk.f_files and count > disk.f_favail:  # some file systems do not count them
            raise InputError(f"the disk of {self.path} has room for {disk.f_favail} files, not for {count} of samples")

    def lock(self) -> AbstractContextManager[None]:
        """Keep other commands from writing here while the block runs; makes the folder where it is absent.

        Raises:
            InputError: If another command is at it.
        """
        return hold_lock(self.path / LOCK, f"--out {self.path}")

    def remove_leftovers(self) -> None:
        """Delete half-written files of a killed call; only for who holds the lock."""
        for folder in ("", *self.folders):
            remove_temporaries(self.path / folder)

    def read_metadata(self) -> dict[str, Any]:
        """Read the metadata.

        Raises:
            InputError: If the file is damaged.
        """
        try:
            metadata = read_json(self.path / METADATA)
        except InputError as error:
            raise InputError(f"{error}; choose another --out") from None
        if not isinstance(metadata, dict) or not isinstance(metadata.get("settings"), dict):
            raise InputError(f"{self.path / METADATA} holds no settings of samples; choose another --out")
        return metadata

    def is_complete(self, num: int, npz: bool) -> bool:
        """Return whether everything has been written that a call for `num` samples would write."""
        files = [METADATA, GRID, *([NPZ] if npz else [])]
        if not all((self.path / name).is_file() for name in files):
            return False
        if self.frame_rate is not None and not is_whole_video(self.path / MOVING_GRID):
            return False
        if not all(map(self.is_watchable, range(num))):
            return False
        if not is_whole_png(self.path / GRID) or (npz and not zipfile.is_zipfile(self.path / NPZ)):
            return False
        metadata = self.read_metadata()
        return metadata.get("complete") is True and metadata.get("num") == num

    def write_metadata(self, metadata: dict[str, Any]) -> None:
        """Write the metadata."""
        with atomic_path(self.path / METADATA) as temporary:
            temporary.write_text(json.dumps(metadata, indent=2) + "\n")

    def write_sample(self, index: int, pixels: np.ndarray) -> None:
        """Write a sample and the file to watch it in: uint8 [H, W, 1 or 3], or for a clip [T, H, W, 1 or 3]."""
        write_png(self.sample_path(index), pixels)
        self._write_watched(index, pixels)

    def complete_samples(self, num: int) -> None:
        """Make the files to watch samples in that are missing."""
        for index in range(num):
            if not self.is_watchable(index):
                self._write_watched(index, self.read_sample(index))

    def is_watchable(self, index: int) -> bool:
        """Return whether the file to watch a sample in is there and whole."""
        watched = self.watched_path(index)
        if watched is None:
            return True
        if self.form != "frames":
            return is_whole_video(watched)
        return (watched / _FRAME.format(0)).is_file() and all(map(is_whole_png, watched.glob("*.png")))

    def read_sample(self, index: int) -> np.ndarray:
        """Read a sample as `write_sample` took it."""
        return read_png(self.sample_path(index))

    def write_grid(self, picture: np.ndarray) -> None:
        """Write the contact sheet, uint8 [height, width, 3]."""
        write_png(self.path / GRID, picture)

    def write_moving_grid(self, pictures: np.ndarray) -> None:
        """Write the contact sheet of clips, uint8 [T, height, width, 3]."""
        assert self.frame_rate is not None
        write_video(self.path / MOVING_GRID, pictures, self.frame_rate)

    def write_npz(self, num: int, labels: list[int] | None) -> None:
        """Write samples 0 to `num` - 1 as ADM does: `arr_0`, uint8 [N, *grid, channels], and `labels`, int64 [N]."""
        # Sample by sample, for all of them together can be more than the memory.
        with atomic_path(self.path / NPZ) as temporary, zipfile.ZipFile(temporary, "w") as archive:
            shape = (num, *self.read_sample(0).shape)
            with archive.open("arr_0.npy", "w", force_zip64=True) as file:
                header = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.uint8)), "fortran_order": False}
                np.lib.format.write_array_header_1_0(file, {**header, "shape": shape})
                for index in range(num):
                    file.write(self.read_sample(index).tobytes())
            if labels is not None:
                with archive.open("labels.npy", "w") as file:
                    np.lib.format.write_array(file, np.asarray(labels, np.int64))

    def _write_watched(self, index: int, pixels: np.ndarray) -> None:
        watched = self.watched_path(index)
        if watched is None:
            return
        if self.form != "frames":
            assert self.frame_rate is not None
            write_video(watched, pixels, self.frame_rate)
            return
        for number, frame in reversed([*enumerate(pixels)]):  # where the first one is, the others are
            write_png(watched / _FRAME.format(number), frame)


def _difference(stored: Any, asked: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Find the first setting that differs: its name with dots, what is stored, what is asked for."""
    if not (isinstance(stored, dict) and isinstance(asked, dict)):
        return None if stored == asked else (name, stored, asked)
    for key in [*asked, *stored]:
        inner = _difference(stored.get(key), asked.get(key), f"{name}.{key}" if name else key)
        if inner is not None:
            return inner
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def draw_grid(
    images: np.ndarray,
    captions: Sequence[str] | None = None,
    title: str = "",
    columns: int | None = None,
    min_side: int = 48,
) -> np.ndarray:
    """Draw images side by side with a caption below each and a title above all; clips play side by side.

    Args:
        images: uint8 [N, H, W, channels], 1 or 3 channels, or clips [N, T, H, W, channels].
        captions: one for each image.
        title: may have several lines.
        columns: images in a row; about the square root of N when None.
        min_side: smaller images are enlarged to about this many pixels, every pixel becoming a square.

    Returns:
        An RGB picture, uint8 [height, width, 3], or one for each frame, [T, height, width, 3].
    """
    if images.ndim == 5:
        return np.stack([draw_grid(frames, captions, title, columns, min_side) for frames in images.swapaxes(0, 1)])
    count, height, width, _ = images.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    scale = max(1, -(-min_side // max(height, width)))
    cell_width, cell_height = width * scale, height * scale
    font = ImageFont.load_default(size=12)
    caption_height = 16 if captions is not None else 0
    title_height = 18 * len(title.splitlines())
    grid_width = columns * (cell_width + _GAP) - _GAP
    title_width = max((math.ceil(font.getlength(line)) for line in title.splitlines()), default=0)
    size = (
        max(grid_width, title_width) + 2 * _MARGIN,
        title_height + rows * (cell_height + caption_height + _GAP) - _GAP + 2 * _MARGIN,
    )
    picture = Image.new("RGB", size, _BACKGROUND)
    pen = ImageDraw.Draw(picture)
    if title:
        pen.multiline_text((_MARGIN, _MARGIN - 2), title, fill=_INK, font=font, spacing=4)
    for i, pixels in enumerate(images):
        x = _MARGIN + i % columns * (cell_width + _GAP)
        y = _MARGIN + title_height + i // columns * (cell_height + caption_height + _GAP)
        image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).convert("RGB")
        picture.paste(image.resize((cell_width, cell_height), Image.Resampling.NEAREST), (x, y))
        if captions is not None:
            text = _shortened(captions[i], cell_width, font)
            pen.text((x + cell_width / 2, y + cell_height + 1), text, fill=_INK, font=font, anchor="ma")
    return np.array(picture)


def draw_strips(
    clips: np.ndarray, captions: Sequence[str] | None, title: str, frame_rate: float, frames: int = 8
) -> np.ndarray:
    """Draw clips one below the other, as frames at equal distances from the first to the last one.

    Args:
        clips: uint8 [N, T, H, W, channels].
        captions: one for each clip.
        title: may have several lines.
        frame_rate: frames a second; the captions of frames but the first are their times.
        frames: frames of a clip at most.

    Returns:
        An RGB picture, uint8 [height, width, 3].
    """
    shown = np.linspace(0, clips.shape[1] - 1, min(frames, clips.shape[1])).round().astype(int)
    times = [f"{number / frame_rate:.2f} s" for number in shown[1:]]
    texts = [text for i in range(len(clips)) for text in (captions[i] if captions is not None else "0 s", *times)]
    return draw_grid(clips[:, shown].reshape(-1, *clips.shape[2:]), texts, title, columns=len(shown))


def _shortened(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
