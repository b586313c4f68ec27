"""Hugging Face data sets on disk and webdataset shards, where their packages are installed."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from inputs import turned, write_tar
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from headmix_vision.data import Augmentation, ClassificationData
from headmix_vision.data.datasets import open_split
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.data.datasets.streams import Stream
from headmix_vision.errors import InputError
from headmix_vision.files.pictures import Decoding

from .helpers import Recorder, attach, make_trainer

MODEL = {"img_size": 16, "in_chans": 3, "num_classes": 2}


def make_image(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 20, 3), dtype=np.uint8))


def make_png(seed: int) -> bytes:
    buffer = io.BytesIO()
    make_image(seed).save(buffer, "png")
    return buffer.getvalue()


@pytest.mark.parametrize("layout", ["save_to_disk", "parquet"])
def test_hugging_face_directory(tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    splits = datasets.DatasetDict(
        {
            split: datasets.Dataset.from_dict(
                {"image": [make_image(i) for i in range(size)], "label": [i % 2 for i in range(size)]}, features
            )
            for split, size in (("train", 8), ("validation", 4))
        }
    )
    root = tmp_path / "pets"
    if layout == "save_to_disk":
        splits.save_to_disk(str(root))
    else:
        root.mkdir()
        for split, rows in splits.items():
            rows.to_parquet(str(root / f"{split}-00000-of-00001.parquet"))
    for workers in (0, 2):
        data = ClassificationData(dataset="hfds", root=str(root), batch_size=4, num_workers=workers)
        module = Recorder(**MODEL)
        make_trainer(max_epochs=1).fit(module, datamodule=data)
        assert data.class_names == ["cat", "dog"]
        assert [len(targets) for _, _, targets in module.train_batches] == [4, 4]
        assert module.eval_batches[0][1].tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="dev") as error:
        attach(ClassificationData(dataset="hfds", root=str(root), val_split="dev", batch_size=4), **MODEL)
    assert "\n" not in str(error.value)


def make_shards(root: Path) -> Path:
    root.mkdir()
    info: dict[str, dict] = {"splits": {}}
    for split, size in (("train", 8), ("validation", 4)):
        name = f"pets-{split}-0.tar"
        with tarfile.open(root / name, "w") as shard:
            for i in range(size):
                for suffix, content in (("png", make_png(i)), ("cls", str(i % 2).encode())):
                    member = tarfile.TarInfo(f"{i:04d}.{suffix}")
                    member.size = len(content)
                    shard.addfile(member, io.BytesIO(content))
        info["splits"][split] = {"name": split, "num_samples": size, "filenames": [name], "shard_lengths": [size]}
    (root / "info.json").write_text(json.dumps(info))
    return root


def test_webdataset_is_reproducible(tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    root = make_shards(tmp_path / "shards")

    def run(workers: int) -> tuple[Recorder, ClassificationData]:
        augmentation = Augmentation(scale=(0.3, 1.0), hflip=0.5)
        data = ClassificationData(
            dataset="wds/", root=str(root), batch_size=4, num_workers=workers, augmentation=augmentation
        )
        module = Recorder(**MODEL)
        make_trainer(max_epochs=3).fit(module, datamodule=data)
        return module, data

    for workers in (0, 1):
        module, data = run(workers)
        assert (data.num_classes, data.class_names) == (2, ["0", "1"])
        assert [len(targets) for _, _, targets in module.train_batches] == [4, 4] * 3
        again, _ = run(workers)
        for (_, images, _), (_, expected, _) in zip(again.train_batches, module.train_batches, strict=True):
            assert torch.equal(images, expected)
        first, second = (torch.cat([b for _, b, _ in module.train_batches[i : i + 2]]) for i in (0, 2))
        assert not torch.equal(first.sort(0).values, second.sort(0).values)
        assert sorted(torch.cat([targets for _, targets in module.eval_batches]).tolist()) == [0] * 6 + [1] * 6
    with pytest.raises(ValueError, match="split 'dev'"):
        attach(ClassificationData(dataset="wds/", root=str(root), val_split="dev", batch_size=4), **MODEL)


def test_webdataset_is_decoded_and_labelled_like_other_data(tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    lying = turned(make_image(0), 3)
    for label in (b"1", b"-1"):
        root = tmp_path / label.decode()
        write_tar(root / "a.tar", [("0.jpg", lying), ("0.cls", label)])
        split = {"name": "train", "num_samples": 1, "filenames": ["a.tar"], "shard_lengths": [1]}
        (root / "info.json").write_text(json.dumps({"splits": {"train": split}}))
        stream = open_split(SplitRequest("wds/", "train", (3, 20, 20), "classification", str(root), num_classes=2))
        assert isinstance(stream, Stream)
        stream.transform = pil_to_tensor
        if label == b"-1":
            with pytest.raises(InputError, match=r"image 0 of wds/ has the label -1, which is below 0"):
                next(iter(stream))
            continue
        image, target = next(iter(stream))
        assert target == 1 and torch.equal(image, pil_to_tensor(Decoding().first_frame(lying)))
    with pytest.raises(InputError, match="skip_unlabelled is true, it must be false for the stream 'wds/'"):
        request = SplitRequest("wds/", "train", (3, 20, 20), "classification", str(root), skip_unlabelled=True)
        open_split(request)
    with pytest.raises(InputError, match="dataset 'wds/' needs root, the place of the data"):
        open_split(SplitRequest("wds/", "train", (3, 20, 20), "classification"))
