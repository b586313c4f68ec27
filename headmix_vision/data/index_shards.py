"""Making the index of a folder of tar shards, once, for `dataset: shards`.

Files of one name that stand together in a tar file are a sample, as in WebDataset: 000017.jpg, 000017.cls. Labels are
the texts of .cls where there are such files, or an entry of .json. Whole numbers count as the numbers of classes, other
texts are numbered in their order. Samples without a picture or video are left out, and counted. A sample without a
valid label among others is refused, unless such samples are to be left out.
"""

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from headmix_vision.console import progress, say_left_out
from headmix_vision.data.datasets.shards import FORMAT, INDEX, KINDS, TENSORS, describe_shard, find_shards
from headmix_vision.data.labels import LabelRule, Labels, keep_labelled, number_labels
from headmix_vision.data.loading import as_it_is
from headmix_vision.data.shard_content import ScannedShards, ShardContent
from headmix_vision.errors import InputError, check_counts, check_request
from headmix_vision.files.pictures import VIDEO_SUFFIXES
from headmix_vision.files.reading import check_workers
from headmix_vision.files.tensors import write_tensors


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
    """Tell whether samples have labels; refuse labels that stand apart from them, or an entry that none has."""
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
