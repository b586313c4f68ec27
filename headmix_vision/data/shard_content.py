"""Contents of tar shards: neighbouring files of one name are a sample, as in WebDataset."""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from torch.utils.data import Dataset

from headmix_vision.data.labels import DIGITS, fault_of
from headmix_vision.errors import InputError, explain
from headmix_vision.files.pictures import HIDDEN, VIDEO_SUFFIXES, Decoding, picture_suffixes
from headmix_vision.files.reading import check_file, parse_json
from headmix_vision.files.tars import Member, list_members
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
    """Files of each sample by ending; those of one name up to the first dot stand together, but for hidden ones."""

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
