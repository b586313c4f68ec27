"""The folder of samples that are clips: the lossless ones, and files to watch made of them.

Beside what a folder of images holds there are `videos/000000.mp4` (or `.gif`) or `frames/000000/000000.png`, made of
the animated PNG of a sample and made again from it where they are missing, and `grid.gif`, a contact sheet that moves.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from headmix_vision.checks import check_choice
from headmix_vision.files.png import is_whole_png, write_png
from headmix_vision.files.video import check_video_name, is_whole_video, write_video
from headmix_vision.sampling.folder import SampleFolder

VIDEOS, FRAMES, MOVING_GRID = "videos", "frames", "grid.gif"
_FRAME = "{:06d}.png"
FORMATS = ("mp4", "gif", "frames", "png")


class ClipFolder(SampleFolder):
    """A folder of clips.

    Args:
        path: The folder; it need not exist.
        frame_rate: Frames a second, for the files to watch.
        form: One of `FORMATS`, the form of these files; of `png` there are none but the lossless ones.

    Raises:
        InputError: If the form is unknown, or PyAV is needed for it and missing.
    """

    files: ClassVar[tuple[str, ...]] = (*SampleFolder.files, MOVING_GRID)
    folders: ClassVar[dict[str, re.Pattern[str]]] = {
        **SampleFolder.folders,
        VIDEOS: re.compile(r"\d{6,}\.(mp4|gif)"),
        FRAMES: re.compile(r"\d{6,}"),
    }

    def __init__(self, path: Path, frame_rate: float, form: str = "mp4") -> None:
        super().__init__(path)
        check_choice("form", form, FORMATS)
        if form in ("mp4", "gif"):
            check_video_name(f"{VIDEOS}.{form}")
        self.frame_rate, self.form = frame_rate, form

    def watched_path(self, index: int) -> Path | None:
        """Names the file, or the folder of frames, to watch a sample in; None where there is none."""
        if self.form == "png":
            return None
        if self.form == "frames":
            return self.path / FRAMES / f"{index:06d}"
        return self.path / VIDEOS / f"{index:06d}.{self.form}"

    def count_files(self, missing: Sequence[int], num: int, shape: tuple[int, ...]) -> int:
        """Counts as for images, and the files to watch samples in; of a folder of frames, its frames."""
        unwatchable = sum(not self.is_watchable(index) for index in range(num))
        return len(missing) + unwatchable * (shape[0] if self.form == "frames" else 1)

    def write_sample(self, index: int, pixels: np.ndarray) -> None:
        """Writes a clip, uint8 [T, H, W, 1 or 3], and the file to watch it in."""
        super().write_sample(index, pixels)
        self._write_watched(index, pixels)

    def complete_samples(self, num: int) -> None:
        """Makes the files to watch samples in that are missing."""
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

    def is_complete(self, num: int, npz: bool) -> bool:
        """Tells whether everything has been written that a call for `num` samples would write."""
        there = is_whole_video(self.path / MOVING_GRID) and all(map(self.is_watchable, range(num)))
        return there and super().is_complete(num, npz)

    def write_moving_grid(self, pictures: np.ndarray) -> None:
        """Writes the contact sheet of clips, uint8 [T, height, width, 3]."""
        write_video(self.path / MOVING_GRID, pictures, self.frame_rate)

    def _write_watched(self, index: int, pixels: np.ndarray) -> None:
        watched = self.watched_path(index)
        if watched is None:
            return
        if self.form != "frames":
            write_video(watched, pixels, self.frame_rate)
            return
        for number, frame in reversed([*enumerate(pixels)]):  # where the first one is, the others are
            write_png(watched / _FRAME.format(number), frame)
