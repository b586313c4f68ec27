"""Making the index of a folder of tar shards, once, for `dataset: shards`.

Files of one name that stand together in a tar file are a sample, as in WebDataset: 000017.jpg, 000017.cls. Labels are
the texts of .cls where there are such files, or an entry of .json. Whole numbers count as the numbers of classes, other
texts are numbered in their order. Samples without a picture or video are left out, and counted. A sample without a
valid label among others is refused, unless such samples are to be left out.
"""

import json
import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from headmix_vision.console import progress, say_left_out
from headmix_vision.data.batches import as_it_is
from headmix_vision.data.datasets.shards import FORMAT, INDEX, KINDS, TENSORS, describe_shard, find_shards
from headmix_vision.data.labels import DIGITS, LabelRule, Labels, fault_of, keep_labelled, number_labels
from headmix_vision.errors import InputError, check_counts, check_request, explain
from headmix_vision.files.pictures import HIDDEN, VIDEO_SUFFIXES, Decoding, picture_suffixes
from headmix_vision.files.reading import check_file, check_workers, parse_json
from headmix_vision.files.tars import Member, list_members
from headmix_vision.files.tensors import write_tensors
from headmix_vision.files.video import EncodedVideo, probe


class ShardContent(NamedTuple):
    """The samples of a shard: where their files begin, their bytes, endings and labels.

    Args:
        offsets: Where the pictures or videos begin.
        sizes: Their bytes.
        suffixes: Their endings.
        labels: Their labels as they are stored; numbers in texts are numbers.
        faulty: Names of the samples without a valid label, by their number.
        left_out: Samples that are left out, and why.
        orphans: Names of the label files that no picture or video stands beside.
        hidden: One entry for each hidden file.
    """

    offsets: list[int]
    sizes: list[int]
    suffixes: list[str]
    labels: list[Any]
    faulty: dict[int, str]
    left_out: list[str]
    orphans: list[str]
    hidden: list[str]


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
        path, content = self.paths[index], ShardContent([], [], [], [], {}, [], [], [])
        check_file(path)
        with path.open("rb") as shard:
            for key, files in _samples(list_members(path), content.hidden):
                self._add(content, shard, path, key, files)
        return content

    def _add(self, content: ShardContent, shard: BinaryIO, path: Path, key: str, files: dict[str, Member]) -> None:
        found, name = [suffix for suffix in files if suffix in self.suffixes], f"{path}: {key}"
        if len(found) > 1:
            raise InputError(f"{name} has the files {found[0]} and {found[1]}: choose one by --suffix")
        label = files.get(".cls" if self.label is None else ".json")
        if not found and label is not None:
            content.orphans.append(key)
        fault = "no picture or video" if not found else None
        if found and self.check:
            fault = _fault(name, found[0], files[found[0]].read(shard))
        if fault is not None:
            content.left_out.append(f"{name} ({fault})")
            return
        content.offsets.append(files[found[0]].offset)
        content.sizes.append(files[found[0]].size)
        content.suffixes.append(found[0])
        content.labels.append(None if label is None else self._label(name, label.read(shard)))
        if fault_of(content.labels[-1]):
            content.faulty[len(content.labels) - 1] = key

    def _label(self, name: str, data: bytes) -> Any:
        try:
            value = data.decode() if self.label is None else parse_json(data, "it").get(self.label)
        except (ValueError, AttributeError) as error:
            raise InputError(f"the label of {name} cannot be read ({explain(error)})") from None
        text = str(value).strip() if isinstance(value, str | bool) else value
        return int(text) if isinstance(text, str) and text.isdecimal() and len(text) <= DIGITS else text


def _samples(members: Iterable[Member], hidden: list[str]) -> Iterator[tuple[str, dict[str, Member]]]:
    """Group neighbouring files of one name, up to the first dot, by ending; hidden files are listed in ``hidden``."""

    def key(member: Member) -> str:
        folder, name = os.path.split(member.name)
        return os.path.join(folder, name.partition(".")[0])

    def seen() -> Iterator[Member]:
        for member in members:
            if member.is_hidden:
                hidden.append(HIDDEN)
            else:
                yield member

    for name, files in groupby(seen(), key):
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


@dataclass(frozen=True, kw_only=True)
class IndexRequest:
    """Request for the index of a folder of shards; see `write_index`.

    Raises:
        InputError: Labels are to be left out, and to be read or skipped.
    """

    folder: Path
    label: str | None = None
    unlabelled: bool = False
    skip_unlabelled: bool = False
    suffix: str | None = None
    check: bool = False
    workers: int = 4

    def __post_init__(self) -> None:
        check_request(self)
        if self.label is not None and self.unlabelled:
            raise InputError("--label and --unlabelled are both given")
        if self.skip_unlabelled and self.unlabelled:
            raise InputError("--skip-unlabelled and --unlabelled are both given")


@dataclass(frozen=True)
class Indexed:
    """Result of `index_shards`.

    Args:
        path: The index.
        kind: What the samples are.
        samples: Number of samples.
        shards: Number of shards.
        classes: Number of classes.
        left_out: Names of files and samples that were left out.
    """

    path: Path
    kind: str
    samples: int
    shards: int
    classes: int
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        found = f"{self.samples} {self.kind} in {self.shards} shards, {self.classes} classes"
        return f"{self.path}: {found}; {len(self.left_out)} left out"


def index_shards(request: IndexRequest) -> Indexed:
    """Make the index of a folder of shards; see `write_index`."""
    settings = vars(request) | {}
    folder = settings.pop("folder")
    index, left_out = write_index(folder, **settings)
    shards = index["shards"]
    total = sum(shard["samples"] for shard in shards)
    return Indexed(folder / INDEX, index["kind"], total, len(shards), len(index["class_names"]), tuple(left_out))


def write_index(
    folder: Path,
    *,
    label: str | None = None,
    unlabelled: bool = False,
    skip_unlabelled: bool = False,
    suffix: str | None = None,
    check: bool = False,
    workers: int = 0,
) -> tuple[dict[str, Any], list[str]]:
    """Make the index of a folder of shards.

    Args:
        folder: The folder.
        label: Entry of each sample's .json that is its label; .cls where there are such files when None.
        unlabelled: Leave the labels out.
        skip_unlabelled: Leave samples without a valid label out, instead of refusing them.
        suffix: Ending of the files that are the samples, where there are several.
        check: Leave out pictures and videos that are damaged, for which all are read.
        workers: Processes that read shards.

    Returns:
        What the index says about the shards, and what was left out.

    Raises:
        InputError: No shards, a damaged one, one without samples, a sample without a valid label among others, labels
            that stand apart from their samples, numbers among names, or pictures among videos.
    """
    check_counts(0, workers=workers)
    check_workers(workers=workers)
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
    total = sum(len(content.labels) for content in contents)
    if not total:
        raise InputError(f"the shards of {folder} have no samples: no {suffix or 'pictures and no videos'}")
    say_left_out(folder, total, "samples", Counter(kind for content in contents for kind in content.hidden))
    numbered = Labels(list(range(total)), [0] * total, [])
    if not unlabelled and _are_labelled(contents, folder, label):
        numbered = _number(contents, paths, folder, skip_unlabelled)
        contents = _select(contents, numbered.kept)
    suffixes = {suffix for content in contents for suffix in content.suffixes}
    # a GIF is whichever the others are
    is_clip = {suffix in VIDEO_SUFFIXES for suffix in suffixes - {".gif"} or suffixes}
    if len(is_clip) > 1:
        raise InputError(f"the shards of {folder} hold pictures and videos: choose by --suffix")
    index = {
        "format": FORMAT,
        "kind": KINDS[is_clip.pop()],
        "class_names": numbered.class_names,
        "shards": [
            {"name": path.name, "samples": len(content.sizes), **describe_shard(path)}
            for path, content in zip(paths, contents, strict=True)
        ],
    }
    columns = (
        [offset for content in contents for offset in content.offsets],
        [size for content in contents for size in content.sizes],
        numbered.targets,
    )
    tensors = {name: torch.tensor(column) for name, column in zip(TENSORS, columns, strict=True)}
    write_tensors(folder / INDEX, tensors, {"shards": json.dumps(index)})
    return index, [name for content in contents for name in content.left_out]


def _are_labelled(contents: list[ShardContent], folder: Path, label: str | None) -> bool:
    """Return whether samples have labels; refuse labels that stand apart from them, or an entry that none has."""
    orphans = dict.fromkeys(key for content in contents for key in content.orphans)
    faulty = {key for content in contents for key in content.faulty.values()}
    labelled = any(value is not None for content in contents for value in content.labels)
    apart = next((key for key in orphans if key in faulty or not labelled), None)
    if apart is not None:
        suffix = "cls" if label is None else "json"
        raise InputError(
            f"{apart}.{suffix} in the shards of {folder} stands apart from its picture or video: the files of a sample"
            " must follow each other; write the shards again in the order of names, or see --unlabelled"
        )
    if label is not None and not labelled:
        raise InputError(f"no sample in the shards of {folder} has the entry {label!r} in its .json")
    return labelled


def _number(contents: list[ShardContent], paths: Sequence[Path], folder: Path, skip: bool) -> Labels:
    """Number the classes of samples with a valid label; refuse the others unless they are skipped."""
    labels = [label for content in contents for label in content.labels]
    starts = list(accumulate((len(content.labels) for content in contents), initial=0))

    def name(index: int) -> str:
        shard = bisect_right(starts, index) - 1
        number = index - starts[shard]
        return f"{paths[shard]}: {contents[shard].faulty.get(number, f'sample {number}')}"

    kept = keep_labelled(labels, name, folder, "sample", skip)
    texts = [index for index in kept if isinstance(labels[index], str)]
    if texts and len(texts) < len(kept):
        raise InputError(
            f"{name(texts[0])} has the label {labels[texts[0]]!r}, {len(kept) - len(texts)} of {len(kept)} labels of"
            f" {folder} are numbers: all must be numbers, or all names"
        )
    numbered = number_labels([labels[index] for index in kept], name, folder, LabelRule())
    return numbered._replace(kept=kept)


def _select(contents: list[ShardContent], kept: list[int]) -> list[ShardContent]:
    """Keep some of the samples of all shards."""
    starts = list(accumulate((len(content.labels) for content in contents), initial=0))
    chosen = []
    for content, (start, end) in zip(contents, pairwise(starts), strict=True):
        stay = [index - start for index in kept[bisect_left(kept, start) : bisect_left(kept, end)]]
        chosen.append(
            content._replace(
                offsets=[content.offsets[number] for number in stay],
                sizes=[content.sizes[number] for number in stay],
                suffixes=[content.suffixes[number] for number in stay],
                labels=[content.labels[number] for number in stay],
            )
        )
    return chosen
