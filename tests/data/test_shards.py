"""Tar shards: what the index says, which sample comes when, exact resume, and what is refused."""

import io
import json
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headmix_vision.cli import cache_latents, index_shards
from headmix_vision.data import Augmentation, ClassificationData
from headmix_vision.data.batches import TrainBatchSampler
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.data.datasets.latents import LatentShards
from headmix_vision.data.datasets.shards import INDEX
from headmix_vision.data.shard_index import write_index
from headmix_vision.errors import InputError
from headmix_vision.files.tensors import write_tensors
from headmix_vision.files.video import write_video

from .helpers import Recorder, attach, make_trainer

SIZES = (7, 5, 8, 4)
MODEL = {"in_chans": 3, "num_classes": 3}


def write_tar(path: Path, files: Sequence[tuple[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as shard:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            shard.addfile(member, io.BytesIO(data))


def png(number: int) -> bytes:
    """A gray picture that tells its number."""
    encoded = io.BytesIO()
    Image.new("RGB", (8, 8), (number,) * 3).save(encoded, "png")
    return encoded.getvalue()


def sample(number: int, **more: bytes) -> list[tuple[str, bytes]]:
    files = {"png": png(number), "cls": str(number % 3).encode(), **more}
    return [(f"{number:05d}.{suffix}", data) for suffix, data in files.items()]


def write_shards(folder: Path) -> Path:
    """24 pictures in 4 shards of uneven sizes."""
    first = 0
    for shard, size in enumerate(SIZES):
        write_tar(folder / f"{shard:05d}.tar", [file for i in range(first, first + size) for file in sample(i)])
        first += size
    return folder


def number_of(image: Any) -> int:
    return int(np.asarray(image)[0, 0, 0])


def open_shards(root: Path, shape: tuple[int, ...] = (3, 8, 8), use: Any = "generation", **options: Any) -> Any:
    return open_source(SplitRequest("shards", "train", shape, use, root=str(root), **options))


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root whose folder `train` has an index."""
    root = tmp_path_factory.mktemp("shards")
    write_index(write_shards(root / "train"))
    return root


@pytest.fixture
def root(indexed: Path, tmp_path: Path) -> Path:
    """A copy of it, to damage."""
    return Path(shutil.copytree(indexed, tmp_path / "root"))


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_read_by_their_number(workers: int, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "train")
    (folder / "00000.parquet").touch()  # as img2dataset leaves it
    _, left_out = write_index(folder, workers=workers)
    source = open_shards(tmp_path)
    assert left_out == [] and source.shard_sizes == list(SIZES) and source.class_names == ["0", "1", "2"]
    assert [(number_of(image), label) for image, label in map(source.read, range(24))] == [
        (i, i % 3) for i in range(24)
    ]
    assert source.name(8) == f"{folder / '00001.tar'}[1]" and source.files()[8] == ("00001.tar[1]", len(png(8)))
    assert open_shards(tmp_path, num_classes=5).class_names == ["0", "1", "2", "3", "4"]
    assert len(open_shards(folder)) == 24  # the root itself is the training split


def test_files_of_one_name_are_a_sample(tmp_path: Path) -> None:
    def entry(label: object) -> bytes:
        return json.dumps({"caption": "x", "kind": label}).encode()

    long = "a folder/" + "n" * 200  # beyond a tar header
    files = [
        *sample(0, json=entry("dog")),
        *((f"{long}.{suffix}", data) for suffix, data in (("PNG", png(7)), ("json", entry("cat")))),
        ("00002.txt", b"its download failed"),
        ("._00003.png", b"of a Mac"),
        *(("00004.json", entry("dog")), ("00004.png", png(9)), ("00004.mask.png", png(1))),
    ]
    write_tar(tmp_path / "0.tar", files)
    index, left_out = write_index(tmp_path, label="kind")
    source = open_shards(tmp_path)
    assert source.class_names == ["cat", "dog"] and index["shards"][0]["samples"] == 3
    assert [(number_of(image), label) for image, label in map(source.read, range(3))] == [(0, 1), (7, 0), (9, 1)]
    assert left_out == [f"{tmp_path / '0.tar'}: 00002 (no picture or video)"]
    with pytest.raises(InputError, match=r"0.tar: a folder/n* has no label; 2 of 3 samples of .* have no valid label"):
        write_index(tmp_path)
    write_index(tmp_path, unlabelled=True)
    unlabelled = open_shards(tmp_path, needs_labels=False)
    assert unlabelled.class_names == [] and unlabelled.read(1)[1] == 0
    for use in ("classification", "generation"):
        with pytest.raises(InputError, match=r"have no labels: make the index again with headmix index-shards --label"):
            open_shards(tmp_path, use=use)
    with pytest.raises(InputError, match=r"no sample in the shards of .* has the entry 'colour' in its .json"):
        write_index(tmp_path, label="colour")


def order_of(sampler: TrainBatchSampler) -> list[int]:
    return [key.sample for batch in sampler for key in batch]


def test_shards_are_read_in_groups_drawn_anew_in_every_epoch() -> None:
    groups = set()
    for epoch in range(6):
        options = {"shard_sizes": [30] * 8, "shuffle_shards": 2, "first_batch": lambda epoch=epoch: 60 * epoch}
        order = order_of(TrainBatchSampler(240, 4, **options))
        assert sorted(order) == list(range(240))
        for start in range(0, 240, 60):
            shards = [index // 30 for index in order[start : start + 60]]
            assert len({*shards}) == 2 and len({*shards[:30]}) == 2  # mixed, and nothing else between
        groups.add(frozenset(index // 30 for index in order[:60]))
    assert len(groups) > 3


def test_shards_of_uneven_sizes() -> None:
    sampler = TrainBatchSampler(24, 4, shard_sizes=SIZES, shuffle_shards=3)
    order = order_of(sampler)
    assert sorted(order) == list(range(24))
    last = {next(shard for shard in range(4) if index < sum(SIZES[: shard + 1])) for index in order[-4:]}
    assert len(last) == 1  # the group that is left over
    assert sampler.state()["shuffle_shards"] == 3 and "shuffle_shards" not in TrainBatchSampler(24, 4).state()


def make_data(root: Path, workers: int = 0, batch_size: int = 6, **options: Any) -> ClassificationData:
    return ClassificationData(
        "shards", str(root), val_split="train", batch_size=batch_size, num_workers=workers, seed=3, shuffle_shards=2,
        augmentation=Augmentation(hflip=0.5, reprob=0.5), max_unreadable=0.2, **options,
    )  # fmt: skip


def fit(data: ClassificationData, steps: int, ckpt_path: Path | None = None, save: Path | None = None) -> list:
    module = Recorder(**MODEL)
    trainer = make_trainer(max_steps=steps, limit_val_batches=0)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    return module.train_batches


def test_resuming_within_an_epoch_on_another_number_of_workers(indexed: Path, tmp_path: Path) -> None:
    expected = fit(make_data(indexed), 10)
    before = fit(make_data(indexed, workers=2), 6, save=tmp_path / "last.ckpt")
    after = fit(make_data(indexed, workers=1), 10, ckpt_path=tmp_path / "last.ckpt")
    assert len(before) == 6 and len(after) == 4
    for (_, images, targets), (_, wanted, wanted_targets) in zip(before + after, expected, strict=True):
        assert torch.equal(images, wanted) and torch.equal(targets, wanted_targets)


def test_any_number_of_processes_sees_the_same_batches_from_any_step(indexed: Path) -> None:
    def batches(rank: int, world_size: int) -> list[torch.Tensor]:
        data = make_data(indexed, batch_size=6 // world_size)
        attach(data, rank=rank, world_size=world_size, **MODEL)
        data.trainer.fit_loop.epoch_loop.batch_progress.total.processed = 5
        return [images for images, _ in data.train_dataloader()]

    whole = batches(0, 1)
    for world_size in (2, 3):
        shares = [batches(rank, world_size) for rank in range(world_size)]
        for expected, parts in zip(whole, zip(*shares, strict=True), strict=True):
            assert torch.equal(torch.stack(parts, 1).flatten(0, 1), expected)


def test_held_out_samples_keep_their_shards(indexed: Path) -> None:
    data = make_data(indexed, holdout_every=4)
    attach(data, **MODEL)
    assert data._splits["train"].shard_sizes == [5, 4, 6, 3] and data._splits["val"].shard_sizes == [2, 1, 2, 1]


def test_unreadable_samples_are_counted(root: Path) -> None:
    for number, position in ((0, 700), (2, 1200)):
        path = root / "train" / f"{number:05d}.tar"
        data = bytearray(path.read_bytes())
        place = data.index(b"IHDR", 4096 + position)
        data[place : place + 4] = b"XXXX"
        path.write_bytes(data)
    with pytest.warns(UserWarning, match=r"skipped unreadable image .*0000[02]\.tar\[\d\] .*, 2 of 24 so far"):
        batches = fit(make_data(root), 4)
    assert [len(targets) for _, _, targets in batches] == [6] * 4
    data = make_data(root)
    data.max_unreadable = 0.05
    with pytest.raises(InputError, match=r"2 of 24 images are unreadable"):
        fit(data, 4)
    _, left_out = write_index(root / "train", check=True)
    assert len(left_out) == 2 and len(open_shards(root)) == 22


def remove(folder: Path) -> None:
    (folder / "00002.tar").unlink()


def shorten(folder: Path) -> None:
    path = folder / "00001.tar"
    path.write_bytes(path.read_bytes()[:-512])


def replace(folder: Path) -> None:
    path = folder / "00003.tar"
    size = path.stat().st_size
    write_tar(path, [file for i in range(40, 44) for file in sample(i)])
    assert path.stat().st_size == size


def add(folder: Path) -> None:
    write_tar(folder / "00004.tar", sample(30))


def forge(folder: Path, label: int | None = None, **change: Any) -> None:
    with index_of(folder) as file:
        index = json.loads(file.metadata()["shards"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no dictionary
    if label is not None:
        tensors["label"][5] = label
    write_tensors(folder / INDEX, tensors, {"shards": json.dumps({**index, **change})})


def index_of(folder: Path) -> Any:
    from safetensors import safe_open

    return safe_open(folder / INDEX, "pt")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove, r"lacks 1 of 4 shards, first 00002\.tar: restore it, or make the index again"),
        (shorten, r"00001\.tar has 19968 bytes, index\.safetensors says 20480: restore it"),
        (replace, r"00003\.tar is another shard than index\.safetensors was made of"),
        (add, r"00004\.tar is not in index\.safetensors: remove it, or make the index again"),
        (lambda folder: forge(folder, format=2), "is of format 2, this version reads 1"),
        (lambda folder: forge(folder, shards=[]), "has 24 samples, its shards have 0"),
        (lambda folder: forge(folder, kind=None), "entry 'kind' is None"),
        (lambda folder: forge(folder, label=-1), "labels are -1 to 2, there are 3 classes"),
        (lambda folder: forge(folder, label=3), "labels are 0 to 3, there are 3 classes"),
        (lambda folder: (folder / INDEX).write_bytes(b"x" * 100), "is truncated or no safetensors file"),
        (lambda folder: (folder / INDEX).unlink(), "make it with headmix index-shards"),
        (shutil.rmtree, "train has no index|has no index.safetensors"),
    ],
    ids=[
        "missing",
        "shorter",
        "foreign",
        "unknown",
        "version",
        "counts",
        "entry",
        "low label",
        "high label",
        "damaged",
        "no index",
        "no folder",
    ],
)
def test_other_shards_than_those_of_the_index(damage: Any, message: str, root: Path) -> None:
    damage(root / "train")
    with pytest.raises(InputError, match=message) as caught:
        open_shards(root)
    assert "\n" not in str(caught.value)


def test_options_that_do_not_apply(indexed: Path) -> None:
    with pytest.raises(InputError, match="shuffle_shards is 2, but 'digits' is not in shards"):
        attach(ClassificationData(shuffle_shards=2))
    with pytest.raises(InputError, match="shuffle_shards must be a whole number of at least 1, got 0"):
        ClassificationData("shards", str(indexed), shuffle_shards=0)
    with pytest.raises(InputError, match="hold images, asked for clips"):
        open_shards(indexed, (3, 4, 8, 8))
    with pytest.raises(InputError, match="has no folder 'val' of shards"):
        open_source(SplitRequest("shards", "val", (3, 8, 8), "generation", root=str(indexed)))


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    with pytest.raises(SystemExit, match="2"):
        index_shards.main([str(arg) for arg in ("--workers", 0, *args)])
    return capsys.readouterr().err.splitlines()[-1]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_shards(tmp_path / "train")
    index_shards.main([str(folder), "--workers", "0"])
    expected = f"{folder / INDEX}: 24 images in 4 shards, 3 classes; 0 left out\n"
    assert capsys.readouterr().out == expected
    before = (folder / INDEX).read_bytes()

    assert "has no shards" in refused(capsys, tmp_path)
    assert "--label and --unlabelled are both given" in refused(capsys, folder, "--label", "x", "--unlabelled")
    whole = (folder / "00002.tar").read_bytes()
    for place in (700, 1024, 5 * 512):  # within a file, before and within a header
        (folder / "00002.tar").write_bytes(whole[:place])
        assert "00002.tar is truncated or no tar file" in refused(capsys, folder)
    (folder / "00002.tar").write_bytes(whole[:1024] + b"x" * 512 + whole[1536:])
    assert "00002.tar is truncated or no tar file (no end of the archive)" in refused(capsys, folder)
    (folder / "00002.tar").write_bytes(whole[:1024] + bytes(512) + whole[1536:])
    assert "00002.tar is truncated or no tar file (more behind an end of the archive at byte 1024)" in refused(
        capsys, folder
    )
    write_tar(folder / "00002.tar", [*sample(1), ("00001.jpg", b"")])
    assert "00001 has the files .png and .jpg: choose one by --suffix" in refused(capsys, folder)
    write_tar(folder / "00002.tar", [("1.mp4", b""), ("1.cls", b"2")])
    assert "hold pictures and videos: choose by --suffix" in refused(capsys, folder)
    assert (folder / INDEX).read_bytes() == before
    index_shards.main([str(folder), "--suffix", "png", "--workers", "0"])
    assert "16 images in 4 shards, 3 classes; 1 left out" in capsys.readouterr().out


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Three videos, the last one too short, in two shards, and as files."""
    videos = tmp_path / "videos"
    for number, frames in enumerate((20, 20, 3)):
        pixels = np.broadcast_to(10 * number + 8 * np.arange(frames)[:, None, None, None], (frames, 16, 16, 3))
        videos.mkdir(exist_ok=True)
        write_video(videos / f"{number}.mp4", pixels.astype(np.uint8), 8)
    data = [(path.name, path.read_bytes()) for path in sorted(videos.iterdir())]
    write_tar(tmp_path / "train" / "0.tar", data[:2])
    write_tar(tmp_path / "train" / "1.tar", data[2:])
    write_index(tmp_path / "train")
    return tmp_path


def test_clips_are_those_of_the_files(clips: Path) -> None:
    source = open_shards(clips, (3, 4, 8, 8), needs_labels=False)
    files = open_source(SplitRequest("videos", "train", (3, 4, 8, 8), "generation", root=str(clips / "videos")))
    for index, place in ((0, 0.0), (1, 0.7)):
        assert torch.equal(source.read_part(index, place)[0], files.read_part(index, place)[0])
    with pytest.raises(ValueError, match="it has 3 frames, a clip needs 4") as caught:
        source.read(2)
    assert not isinstance(caught.value, InputError)  # training counts and skips it


def test_pictures_serve_as_clips_of_one_frame(indexed: Path) -> None:
    clip, label = open_shards(indexed, (3, 1, 4, 4)).read(8)
    assert clip.shape == (3, 1, 4, 4) and label == 2 and (clip * 255).round().unique().tolist() == [8]


def test_latents_of_shards(clips: Path, indexed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def cache(root: Path, out: Path, *args: object) -> LatentShards:
        common = ("--dataset", "shards", "--root", root, "--vae", "none", "--out", out, "--workers", 0)
        cache_latents.main([str(arg) for arg in (*common, "--image-size", 8, "--shard-size", 10, *args)])
        return LatentShards(out)

    latents = cache(indexed, tmp_path / "images")
    assert latents.shape == (3, 8, 8) and latents.shard_sizes == [10, 10, 4]
    assert latents.labels().tolist() == [i % 3 for i in range(24)]
    assert cache(clips, tmp_path / "clips", "--frames", 3).shape == (3, 3, 8, 8)
    longer = cache(clips, tmp_path / "longer", "--frames", 8, "--skip-unusable", "--clips-per-video", 2)
    assert len(longer) == 4 and f"skipped {clips / 'train' / '1.tar'}[0] (it has 3 frames" in capsys.readouterr().err
