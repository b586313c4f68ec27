"""Make the index of a folder of tar shards, once, for `dataset: shards`: `headmix-index-shards --help`.

    headmix-index-shards /data/imagenet/train                 # pictures with .cls
    headmix-index-shards /data/clips --label class            # videos with an entry of .json as their label

Files of one name that stand together in a tar file are a sample, as WebDataset has it: 000017.jpg, 000017.cls. Labels
are the texts of .cls where there are such files, or what --label names; whole numbers count as the classes' numbers,
other texts are numbered in their order. Samples without a picture or video are left out, and counted.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from headmix_vision.checks import check_counts
from headmix_vision.console.arguments import OneLineParser
from headmix_vision.console.progress import progress
from headmix_vision.data.datasets.base import number_names
from headmix_vision.data.datasets.shards import FORMAT, INDEX, KINDS, TENSORS, describe_shard, find_shards
from headmix_vision.data.datasets.tables import natural_order
from headmix_vision.data.loading import as_it_is
from headmix_vision.errors import InputError, explain, one_line_errors
from headmix_vision.files.pictures import Decoding, picture_suffixes
from headmix_vision.files.tars import Member, list_members
from headmix_vision.files.tensor_files import write_tensors
from headmix_vision.files.video import VIDEO_SUFFIXES, EncodedVideo, probe

_DIGITS = 6  # of a class's number; longer ones are texts


class ShardContent(NamedTuple):
    """The samples of a shard: where their files begin, their bytes, endings and labels, and which are left out."""

    offsets: list[int]
    sizes: list[int]
    suffixes: list[str]
    labels: list[str | None]
    left_out: list[str]


class ScannedShards(Dataset[ShardContent]):
    """The content of each shard, from the headers of its tar file.

    Args:
        paths: The shards.
        label: Entry of each sample's .json that is its label; .cls where there are such files when None.
        suffix: Ending of the files that are the samples; pictures and videos when None.
        check: Decode each picture, and count the frames of each video; leave out what is damaged.
    """

    def __init__(self, paths: Sequence[Path], label: str | None, suffix: str | None, check: bool) -> None:
        self.paths = paths
        self.label = label
        self.suffixes = picture_suffixes() | VIDEO_SUFFIXES
        if suffix is not None:
            self.suffixes = frozenset({f".{suffix.removeprefix('.').lower()}"})
        self.check = check

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> ShardContent:
        path, content = self.paths[index], ShardContent([], [], [], [], [])
        with path.open("rb") as shard:
            for key, files in _samples(list_members(path)):
                self._add(content, shard, f"{path}: {key}", files)
        return content

    def _add(self, content: ShardContent, shard: BinaryIO, name: str, files: dict[str, Member]) -> None:
        found = [suffix for suffix in files if suffix in self.suffixes]
        if len(found) > 1:
            raise InputError(f"{name} has the files {found[0]} and {found[1]}: choose one by --suffix")
        fault = "no picture or video" if not found else None
        if found and self.check:
            fault = _fault(name, found[0], files[found[0]].read(shard))
        if fault is not None:
            content.left_out.append(f"{name} ({fault})")
            return
        content.offsets.append(files[found[0]].offset)
        content.sizes.append(files[found[0]].size)
        content.suffixes.append(found[0])
        content.labels.append(self._label(shard, name, files))

    def _label(self, shard: BinaryIO, name: str, files: dict[str, Member]) -> str | None:
        file = files.get(".cls" if self.label is None else ".json")
        try:
            text = None if file is None else file.read(shard).decode()
            if self.label is None:
                return text and text.strip()
            return str(json.loads(text or "")[self.label])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{name} has no label {self.label!r} ({explain(error)})") from None


def write_index(
    folder: Path,
    *,
    label: str | None = None,
    unlabelled: bool = False,
    suffix: str | None = None,
    check: bool = False,
    workers: int = 0,
) -> tuple[dict[str, Any], list[str]]:
    """Makes the index of a folder of shards.

    Args:
        folder: The folder.
        label: Entry of each sample's .json that is its label; .cls where there are such files when None.
        unlabelled: Leave the labels out.
        suffix: Ending of the files that are the samples, where there are several.
        check: Leave out pictures and videos that are damaged, for which all are read.
        workers: Processes that read shards.

    Returns:
        What the index says about the shards, and what was left out.

    Raises:
        InputError: No shards, a damaged one, one without samples, samples with and without labels, or pictures among
            videos.
    """
    check_counts(0, workers=workers)
    paths = find_shards(folder)
    if not paths:
        raise InputError(f"{folder} has no shards (.tar)")
    scanned = ScannedShards(paths, label, suffix, check)
    loader: Any = DataLoader(scanned, batch_size=None, num_workers=workers, collate_fn=as_it_is)
    contents: list[ShardContent] = []
    with progress("indexing", len(paths), "shards") as advance:
        for content in loader:
            contents.append(content)
            advance(1)
    labels = [label for content in contents for label in content.labels]
    if not labels:
        raise InputError(f"the shards of {folder} have no samples: no {suffix or 'pictures and no videos'}")
    targets, class_names = _number([None] * len(labels) if unlabelled else labels, folder)
    suffixes = {suffix for content in contents for suffix in content.suffixes}
    # a GIF is whichever the others are
    is_clip = {suffix in VIDEO_SUFFIXES for suffix in suffixes - {".gif"} or suffixes}
    if len(is_clip) > 1:
        raise InputError(f"the shards of {folder} hold pictures and videos: choose by --suffix")
    index = {
        "format": FORMAT,
        "kind": KINDS[is_clip.pop()],
        "class_names": class_names,
        "shards": [
            {"name": path.name, "samples": len(content.sizes), **describe_shard(path)}
            for path, content in zip(paths, contents, strict=True)
        ],
    }
    columns = (
        [offset for content in contents for offset in content.offsets],
        [size for content in contents for size in content.sizes],
        targets,
    )
    tensors = {name: torch.tensor(column) for name, column in zip(TENSORS, columns, strict=True)}
    write_tensors(folder / INDEX, tensors, {"shards": json.dumps(index)})
    return index, [name for content in contents for name in content.left_out]


def _samples(members: Iterable[Member]) -> Iterator[tuple[str, dict[str, Member]]]:
    """Files of each sample by ending; those of one name up to the first dot stand together, but for hidden ones."""

    def key(member: Member) -> str:
        folder, name = os.path.split(member.name)
        return os.path.join(folder, name.partition(".")[0])

    for name, files in groupby((member for member in members if not member.is_hidden), key):
        yield name, {f".{os.path.basename(file.name).partition('.')[2].lower()}": file for file in files}


def _fault(name: str, suffix: str, data: bytes) -> str | None:
    try:
        if suffix in VIDEO_SUFFIXES:
            probe(EncodedVideo(name, data))
        else:
            Decoding().first_frame(data)
    except Exception as error:  # decoders raise whatever comes to mind on a damaged file
        return explain(error)
    return None


def _number(labels: list[str | None], folder: Path) -> tuple[list[int], list[str]]:
    """Numbers of the labels, and the names of the classes; all are 0, and there are no classes, without labels."""
    names = {label for label in labels if label is not None}
    if not names:
        return [0] * len(labels), []
    if None in labels:
        raise InputError(f"{labels.count(None)} of {len(labels)} samples of {folder} have no label: see --unlabelled")
    if all(name.isdecimal() and len(name) <= _DIGITS for name in names):
        targets = [int(label or 0) for label in labels]
        return targets, number_names(targets)
    class_names = sorted(names, key=natural_order)
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(class_names)}
    return [numbers[label] for label in labels], class_names


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; wrong input ends the process with one line and exit status 2."""
    options = vars(_parser().parse_args(args))
    with one_line_errors():
        if options["label"] is not None and options["unlabelled"]:
            raise InputError("--label and --unlabelled are both given")
        folder = options.pop("folder")
        index, left_out = write_index(folder, **options)
        for name in left_out:
            print(f"left out {name}", file=sys.stderr)
        total = sum(shard["samples"] for shard in index["shards"])
        print(
            f"{folder / INDEX}: {total} {index['kind']} in {len(index['shards'])} shards,"
            f" {len(index['class_names'])} classes; {len(left_out)} left out"
        )


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="headmix-index-shards", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the shards of a split")
    parser.add_argument("--label", help="entry of .json that is the label (the text of .cls)")
    parser.add_argument("--unlabelled", action="store_true", help="leave labels out")
    parser.add_argument("--suffix", help="ending of the files that are the samples, where there are several")
    parser.add_argument("--check", action="store_true", help="read all samples, and leave out damaged ones")
    parser.add_argument("--workers", type=int, default=4, help="processes that read shards (4)")
    return parser


if __name__ == "__main__":
    main()
