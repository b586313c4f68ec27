"""`videos`: video files and folders of frames, by folder or by table; `sheets`: a picture of each, for classifiers.

A split is a folder with a folder of videos for each class (UCF-101), or with videos alone. A folder that holds images
is one video, its frames in the order of their names (SkyTimelapse). Or it is a table `SPLIT.csv`, or one table for all
splits: `path` (relative to the table's folder) and `label`, and, where there are such columns, `split`, and `start` and
`end`, the numbers of the first frame that may be used and of the one after the last.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image
from torch import Tensor

from headmix_vision.console import say_left_out
from headmix_vision.data.datasets.base import EVAL_SYNONYMS, ClipSource, SplitRequest
from headmix_vision.data.datasets.derived import Derived
from headmix_vision.data.datasets.folders import split_candidates
from headmix_vision.data.datasets.image_tables import read_table, rows_of_split
from headmix_vision.data.fitting import SHEET_SIDE, crop_frames, draw_sheet, sheet_numbers
from headmix_vision.data.labels import number_labels
from headmix_vision.errors import InputError
from headmix_vision.files.pictures import find_clips, find_frames, is_hidden, is_video
from headmix_vision.files.video import probe_clip, read_clip, require_av

UNLABELLED = "unlabelled"
_PROBE_THREADS = 8
_COLUMNS = ("path", "label", "split", "start", "end")


@dataclass(frozen=True)
class Video:
    """A video of a list: a file or a folder of frames, its label, the frames that may be used, and where it is named.

    The label is None for videos that are not labelled at all.
    """

    path: Path
    label: str | None = None
    start: int = 0
    end: int | None = None
    place: str = ""


def open_videos(request: SplitRequest) -> "Videos":
    """Open a split, `videos/unlabelled` without the classes that folders or tables tell.

    The root is a folder with a folder or table for each split, where `train`, `validation` and their synonyms are
    interchangeable, a table, or, for the training split, the folder of the videos itself.

    Raises:
        InputError: Nothing there, an empty class folder, a table with a mistake, a clip without a length, or a frame
            rate for folders of frames, which have none.
    """
    videos, folder = _find_split(request)
    return make_videos(videos, folder, request)


def open_video_folder(folder: Path, request: SplitRequest) -> "Videos":
    """Open a folder of videos, with a folder for each class or with videos alone, or a table; see `open_videos`."""
    if folder.is_file():
        return make_videos(_read_table(folder, request.split, request.train_split), folder.parent, request)
    return make_videos(_find_videos(folder), folder, request)


def open_sheets(request: SplitRequest) -> "Sheets":
    """Open a split of videos as `open_videos` does, each as one picture: 16 of its frames in four rows."""
    return Sheets(open_videos(replace(request, shape=(request.channels, SHEET_SIDE**2))))


def make_videos(videos: list[Video], folder: Path, request: SplitRequest) -> "Videos":
    """Make the source of a list of videos; see `open_videos`."""
    if not request.grid:
        raise InputError(f"dataset {request.name!r} needs the number of frames of a clip")
    if any(is_video(video.path) for video in videos):
        require_av("reading a video")
    frames = next((video.path for video in videos if video.path.is_dir() or not is_video(video.path)), None)
    if frames is not None and request.clip.frame_rate is not None:
        what = "a folder of frames" if frames.is_dir() else "an animated picture"
        raise InputError(
            f"{frames} is {what}, which states no frame rate: choose frames by a stride"
            f" instead of the rate {request.clip.frame_rate:g}"
        )
    labels = [video.label for video in videos]
    if request.variant == UNLABELLED or not any(label is not None for label in labels):
        return Videos(videos, [0] * len(videos), [], folder, request)
    kept, targets, names = number_labels(
        labels, lambda number: videos[number].place, folder, request.label_rule, what="video"
    )
    return Videos([videos[number] for number in kept], targets, names, folder, request)


class Videos(ClipSource):
    """Videos of a list, of which clips are read.

    Args:
        videos: The videos.
        targets: The class of each, a number.
        class_names: The names of the classes.
        folder: What the names of videos are relative to.
        request: T, or T, H and W, the frames of a clip and the size to which each is cropped; the pixels that they
            become; which frames make a clip.
    """

    def __init__(
        self,
        videos: Sequence[Video],
        targets: Sequence[int],
        class_names: list[str],
        folder: Path,
        request: SplitRequest,
    ) -> None:
        self.videos = list(zip(videos, targets, strict=True))
        self.folder = folder
        self.num_frames, *self.size = request.grid
        self.decoding, self.clip = request.decoding, request.clip
        self.class_names = class_names

    def __len__(self) -> int:
        return len(self.videos)

    def read_part(self, index: int, place: float) -> tuple[Tensor, int]:
        """As `ClipSource` says; ValueError for a video that is damaged, too short or too slow."""
        video, target = self.videos[index]
        try:
            frames = read_clip(video.path, lambda *known: self._choose(video, place, *known), self.decoding)
            return crop_frames(frames, self.size), target
        except InputError as error:
            raise ValueError(str(error)) from None  # one of many: training skips it

    def _choose(
        self, video: Video, place: float, count: int, frame_rate: float | None, times: tuple[float, ...] | None
    ) -> list[int]:
        end = count if video.end is None else video.end
        if end > count:
            raise InputError(f"it has {count} frames, the table names frames up to {end}")
        times = times and times[video.start : end + 1]
        numbers = self.clip.frames(self.num_frames, end - video.start, frame_rate, place, times)
        return [video.start + number for number in numbers]

    def leave_out_unusable(self) -> list[str]:
        """As `ClipSource` says."""
        with ThreadPoolExecutor(_PROBE_THREADS) as pool:
            faults = list(pool.map(self._fault, (video for video, _ in self.videos)))
        self.videos = [video for video, fault in zip(self.videos, faults, strict=True) if fault is None]
        return [fault for fault in faults if fault is not None]

    def _fault(self, video: Video) -> str | None:
        try:
            info = probe_clip(video.path)
            self._choose(video, 0, info.num_frames, info.frame_rate, info.times)
        except (InputError, OSError) as error:
            return f"{video.path} ({error})"
        return None

    def name(self, index: int) -> str:
        return str(self.videos[index][0].path)

    def files(self) -> list[tuple[str, int]]:
        """Name relative to the folder with the frames that may be used, and sizes: bytes, or frames of a folder."""
        return [
            (
                f"{os.path.relpath(video.path, self.folder)}[{video.start}:{'' if video.end is None else video.end}]",
                len(find_frames(video.path)) if video.path.is_dir() else os.path.getsize(video.path),
            )
            for video, _ in self.videos
        ]

    def keys(self) -> list[str]:
        """Name relative to the folder, the frames that may be used, and labels."""
        return [
            f"{os.path.relpath(video.path, self.folder)}[{video.start}:{video.end}] {target}"
            for video, target in self.videos
        ]


class Sheets(Derived):
    """Videos as pictures, so that a classifier of images is one of clips.

    Args:
        source: The videos.
    """

    source: Videos

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Sheet of the whole video, and target; see `draw_sheet`."""
        video, target = self.source.videos[index]

        def choose(count: int, frame_rate: float | None, times: tuple[float, ...] | None) -> list[int]:
            end = count if video.end is None else video.end
            return [video.start + number for number in sheet_numbers(end - video.start)]

        return draw_sheet(read_clip(video.path, choose, self.source.decoding)), target

    def files(self) -> list[tuple[str, int]]:
        return self.source.files()


def _find_split(request: SplitRequest) -> tuple[list[Video], Path]:
    root = request.existing_root()
    if request.split in ("", ".", ".."):
        raise InputError(f"split is {request.split!r}, it must be the name of a folder or table in {str(root)!r}")
    if root.is_file():
        return _read_table(root, request.split, request.train_split), root.parent
    for name in split_candidates(request.split):
        if (root / name).is_dir():
            return _find_videos(root / name), root / name
        if (root / f"{name}.csv").is_file():
            return _read_table(root / f"{name}.csv", request.split, request.split), root
    others = [name for name in (*EVAL_SYNONYMS, "test") if (root / name).is_dir()]
    if request.split == request.train_split and not others:
        return _find_videos(root), root
    looked_for = ", ".join(f"{name}/, {name}.csv" for name in split_candidates(request.split))
    raise InputError(f"root {str(root)!r} has no {request.split} split: looked for {looked_for}")


def _find_videos(folder: Path) -> list[Video]:
    """List the videos below a folder by name, with the first folder on the way to each as its class."""
    listing = find_clips(folder)
    listing.check_filled(f"{str(folder)!r}", "videos and no folders of frames")
    say_left_out(folder, len(listing.paths), "videos", listing.left_out)
    paths = listing.paths
    if paths == [folder]:
        raise InputError(f"{str(folder)!r} is a folder of frames itself, give the folder that it is in")
    parts = [path.relative_to(folder).parts for path in paths]
    if all(len(names) == 1 for names in parts):
        return [Video(path) for path in paths]
    filled = {names[0] for names in parts}
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not is_hidden(entry.name) and entry.name not in filled:
            raise InputError(f"class folder {str(entry)!r} has no video and no frames")
    labels = ["" if len(names) == 1 else names[0] for names in parts]  # beside class folders there is no class
    return [Video(path, label, place=str(path)) for path, label in zip(paths, labels, strict=True)]


def _read_table(path: Path, split: str, only_split: str) -> list[Video]:
    """Read the rows of a split; a table without the column `split` holds `only_split` alone."""
    if path.suffix.lower() != ".csv":
        raise InputError(f"{str(path)!r} is a file, it must be a folder or a table .csv")
    header, rows = read_table(path)
    unknown = [name for name in header if name not in _COLUMNS]
    if "path" not in header or unknown:
        raise InputError(f"{path} has the columns {', '.join(header)}; it must have path, and may have label, split,"
                         " start, end")  # fmt: skip
    kept = rows_of_split(path, rows, split, only_split)
    return [_read_row(row, path, f"{path}, line {number}") for number, row in kept]


def _read_row(row: dict[str, str], table: Path, where: str) -> Video:
    values = {name: row.get(name, "") for name in _COLUMNS}
    if not values["path"]:
        raise InputError(f"{where}: path is missing")
    for name in ("start", "end"):
        if values[name] and not values[name].isdecimal():
            raise InputError(f"{where}: {name} is {values[name]!r}, it must be the number of a frame")
    start, end = int(values["start"] or 0), int(values["end"]) if values["end"] else None
    if end is not None and end <= start:
        raise InputError(f"{where}: end is {end}, it must be above start {start}")
    return Video(table.parent / values["path"], row.get("label"), start, end, where)
