"""Which labels are valid, and what becomes of samples without one, in every kind of data set."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inputs import encode, photo, write_film, write_tar

from headmix_vision.cli import cache_latents, index_shards
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.data.datasets.latents import LatentShards
from headmix_vision.data.labels import LabelRule, fault_of, number_labels
from headmix_vision.data.shard_index import write_index
from headmix_vision.errors import InputError

needs_datasets = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs datasets")


@pytest.mark.parametrize(
    "label", [0, 7, np.int64(3), True, "cat", "0", "999999", "02119789", "none", "2 cats", "1f600"]
)
def test_valid_labels(label: Any) -> None:
    assert fault_of(label) is None


@pytest.mark.parametrize(
    "label", [None, float("nan"), np.float32("nan"), "", " ", "None", "nan", "NaN", "null", "<NA>"]
)
def test_missing_labels(label: Any) -> None:
    assert fault_of(label) == "has no label"


@pytest.mark.parametrize(
    ("label", "fault"),
    [
        (-1, "has the label -1, which is below 0"),
        ("-1", "has the label -1, which is below 0"),
        (3.0, "has the label 3.0, which is neither a whole number nor a name"),
        ("1.5", "has the label 1.5, which is neither"),
        ("inf", "has the label inf, which is neither"),
        ([1], r"has the label \[1\], which is neither"),
        (10**9, "has the label 1000000000, which is above 999999"),
    ],
)
def test_wrong_labels(label: Any, fault: str) -> None:
    with pytest.raises(InputError, match=rf"^c {fault}.*; 1 of 3 images of x have no valid label: mend them, or leave"):
        number_labels(
            [0, 1, label] if not isinstance(label, str) else ["0", "1", label], "abc".__getitem__, "x", LabelRule()
        )


def test_one_bad_label_never_renumbers_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    for labels in ([5, -1, 0, None, 2], ["5", "-1", "0", "", "2"]):
        found = number_labels(labels, str, "here", LabelRule(skip=True))
        assert found.kept == [0, 2, 4] and [found.class_names[target] for target in found.targets] == ["5", "0", "2"]
        assert number_labels(labels, str, "here", LabelRule(needed=False)).kept == [0, 1, 2, 3, 4]
    said = "here: 3 images, 2 without a valid label left out: the label -1 1, no label 1\n"
    assert capsys.readouterr().err == said
    with pytest.raises(InputError, match=r"0 has no label; 2 of 2 images of here have no valid label$"):
        number_labels([None, None], str, "here", LabelRule(skip=True))
    with pytest.raises(InputError, match=r"1 has the label 3, which is above 2"):
        number_labels([0, 3], str, "here", LabelRule(), class_names=["a", "b", "c"])


def refused(capsys: pytest.CaptureFixture[str], main: Any, *args: object) -> str:
    """The one line with which a command refuses its input."""
    with pytest.raises(SystemExit, match="2"):
        main([str(arg) for arg in args])
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    return line


def open_set(name: str, root: Path, use: Any = "classification", **options: Any) -> Any:
    return open_source(SplitRequest(name, "train", (3, 24, 32), use, root=str(root), **options))


BAD, GOOD = -1, [2, 0, 1, 2]
"""A label that is none, behind four that are."""


def table(root: Path) -> tuple[str, Path]:
    lines = [f"{number}.png,{label}" for number, label in enumerate([*GOOD, BAD])]
    (root / "images.csv").write_text("\n".join(["path,kind", *lines]))
    for number in range(5):
        photo(number).save(root / f"{number}.png")
    return "table/kind", root


def hub(root: Path) -> tuple[str, Path]:
    import datasets

    rows = {"image": [photo(number) for number in range(5)], "label": [*GOOD, BAD]}
    splits = {"train": datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())}
    datasets.DatasetDict(splits).save_to_disk(str(root / "hub"))
    return "hfds", root / "hub"


@pytest.mark.parametrize("make", [table, pytest.param(hub, marks=needs_datasets)])
def test_a_bad_label_is_refused_by_every_command_or_left_out(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, root = make(tmp_path)
    message = r"has the label -1, which is below 0; 1 of 5 images of .* have no valid label"
    for use in ("classification", "generation", "caching"):
        with pytest.raises(InputError, match=message):
            open_set(name, root, use)
    kept = open_set(name, root, skip_unlabelled=True)
    assert [kept.read(index)[1] for index in range(len(kept))] == GOOD and kept.class_names == ["0", "1", "2"]
    scored = open_set(name, root, "scoring", needs_labels=False)
    assert len(scored) == 5 and scored.read(4)[1] == 0

    cached = ("--dataset", name, "--root", root, "--vae", "none", "--image-size", 16, "--workers", 0, "--out")
    assert "has the label -1, which is below 0" in refused(capsys, cache_latents.main, *cached, tmp_path / "a")
    cache_latents.main([str(arg) for arg in (*cached, tmp_path / "b", "--skip-unlabelled")])
    assert LatentShards(tmp_path / "b").labels().tolist() == GOOD


def sample(number: int, label: str | None, kind: str = "cls") -> list[tuple[str, bytes]]:
    content = label if kind == "cls" else json.dumps({"kind": None if label is None else json.loads(label)})
    files = [(f"{number:03d}.png", encode(photo(number)))]
    return files if label is None and kind == "cls" else [*files, (f"{number:03d}.{kind}", str(content).encode())]


@pytest.mark.parametrize("kind", ["cls", "json"])
@pytest.mark.parametrize(
    ("label", "fault"),
    [("-1", "has the label -1"), (None, "has no label"), ("NaN", "has no label"), ("1.5", "has the label 1.5")],
)
def test_bad_labels_in_shards(
    kind: str, label: str | None, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [file for number, good in enumerate(GOOD) for file in sample(number, str(good), kind)]
    write_tar(tmp_path / "train" / "0.tar", [*files, *sample(4, label, kind), *sample(5, "1", kind)])
    option = {} if kind == "cls" else {"label": "kind"}
    with pytest.raises(InputError, match=rf"0.tar: 004 {fault}.*; 1 of 6 samples of .* have no valid label"):
        write_index(tmp_path / "train", **option)
    arguments = [str(tmp_path / "train"), "--workers", "0", *(["--label", "kind"] if option else [])]
    assert fault in refused(capsys, index_shards.main, *arguments)
    index_shards.main([*arguments, "--skip-unlabelled"])
    assert "5 images in 1 shards, 3 classes; 0 left out" in capsys.readouterr().out
    source = open_set("shards", tmp_path)
    assert [source.read(index)[1] for index in range(5)] == [*GOOD, 1]
    assert np.array_equal(np.asarray(source.read(4)[0]), np.asarray(photo(5)))


def test_hidden_labels_are_not_class_0(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [file for number in range(3) for file in sample(number, "-1")])
    for skip in (False, True):
        with pytest.raises(InputError, match=r"000 has the label -1, which is below 0; 3 of 3 samples"):
            write_index(tmp_path, skip_unlabelled=skip)
    write_tar(tmp_path / "0.tar", [file for number in range(3) for file in sample(number, ["1", "cat", "2"][number])])
    with pytest.raises(InputError, match=r"sample 1 has the label 'cat', 2 of 3 labels of .* are numbers"):
        write_index(tmp_path)


def test_labels_that_stand_apart_are_named_before_training(tmp_path: Path) -> None:
    samples = [sample(number, str(label)) for number, label in enumerate(GOOD)]
    pictures, labels = zip(*samples, strict=True)
    write_tar(tmp_path / "train" / "0.tar", [*pictures, *labels])
    message = r"000.cls in the shards of .* stands apart from its picture or video: the files of a sample must follow"
    with pytest.raises(InputError, match=message):
        write_index(tmp_path / "train")
    write_tar(tmp_path / "train" / "0.tar", list(pictures))
    write_tar(tmp_path / "train" / "1.tar", list(labels))
    with pytest.raises(InputError, match=message):
        write_index(tmp_path / "train", skip_unlabelled=True)
    write_tar(tmp_path / "train" / "0.tar", list(pictures))
    (tmp_path / "train" / "1.tar").unlink()
    write_index(tmp_path / "train")  # lost
    for use in ("classification", "generation"):
        with pytest.raises(InputError, match=r"have no labels: make the index again .* or train a generator without"):
            open_set("shards", tmp_path, use)
    assert len(open_set("shards", tmp_path, "generation", needs_labels=False)) == 4


def test_shards_of_a_mac_keep_their_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [file for number in range(20) for file in sample(number, str(number % 4))]
    write_tar(tmp_path / "train" / "0.tar", [(f"./{name}", data) for name, data in files], mac=True)
    index_shards.main([str(tmp_path / "train"), "--workers", "0"])
    captured = capsys.readouterr()
    assert "20 images in 1 shards, 4 classes; 0 left out" in captured.out
    assert "20 samples, 40 other files left out: hidden 40" in captured.err
    source = open_set("shards", tmp_path)
    assert [source.read(index)[1] for index in range(20)] == [number % 4 for number in range(20)]


@needs_datasets
def test_a_hugging_face_set_with_one_picture_missing_is_read(tmp_path: Path) -> None:
    import datasets

    rows = {"image": [photo(0), None, photo(2)], "label": [0, 1, 2]}
    splits = {"train": datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path))
    source = open_set("hfds", tmp_path)
    assert source.name(1) == f"{tmp_path}, train[1]" and source.read(2)[1] == 2
    with pytest.raises(ValueError, match="the image is missing"):
        source.read(1)


@needs_datasets
@pytest.mark.parametrize("layout", ["saved", "parquet"])
def test_a_hugging_face_set_without_labels_can_be_scored(layout: str, tmp_path: Path, monkeypatch: Any) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = datasets.Dataset.from_dict({"image": [photo(0), photo(1)]}).cast_column("image", datasets.Image())
    (tmp_path / "set").mkdir()
    if layout == "saved":
        datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "set"))
    else:
        rows.to_parquet(str(tmp_path / "set" / "train-00000-of-00001.parquet"))
    assert len(open_set("hfds", tmp_path / "set", "scoring", needs_labels=False)) == 2
    with pytest.raises(InputError, match=r"has no column 'label'|train\[0\] has no label; 2 of 2 images"):
        open_set("hfds", tmp_path / "set")


def test_videos_without_a_label(tmp_path: Path) -> None:
    for place in ("train/run/a.mp4", "train/walk/b.mp4", "train/c.mp4"):
        write_film(tmp_path / place, [np.full((16, 16, 3), 90, np.uint8)] * 3)
    with pytest.raises(InputError, match=r"c.mp4 has no label; 1 of 3 videos of .* have no valid label"):
        open_source(SplitRequest("videos", "train", (3, 2, 8, 8), "generation", root=str(tmp_path)))
    request = SplitRequest("videos", "train", (3, 2, 8, 8), "generation", root=str(tmp_path), skip_unlabelled=True)
    assert open_source(request).class_names == ["run", "walk"] and len(open_source(request)) == 2
    unlabelled = open_source(SplitRequest("videos/unlabelled", "train", (3, 2, 8, 8), "generation", root=str(tmp_path)))
    assert len(unlabelled) == 3 and unlabelled.class_names == []


def test_pictures_beside_class_folders_are_not_taken_for_a_set_without_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ("cat/0.png", "dog/1.png", "stray.png"):
        (tmp_path / "set" / place).parent.mkdir(parents=True, exist_ok=True)
        photo().save(tmp_path / "set" / place)
    arguments = ("--images", tmp_path / "set", "--vae", "none", "--image-size", 16, "--workers", 0, "--out")
    assert "stray.png has no label" in refused(capsys, cache_latents.main, *arguments, tmp_path / "a")
    cache_latents.main([str(arg) for arg in (*arguments, tmp_path / "b", "--skip-unlabelled")])
    assert torch.equal(LatentShards(tmp_path / "b").labels(), torch.tensor([0, 1]))
