"""Image folders, tar files, prediction files, and what can be wrong with them."""

import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from headmix_vision.data import Augmentation, ClassificationData, GenerationData
from headmix_vision.data.datasets.folders import ImageFiles
from headmix_vision.errors import InputError
from headmix_vision.files.pictures import Decoding

from .helpers import Recorder, attach, make_trainer, write_image

MODEL = {"img_size": 16, "in_chans": 3, "num_classes": 3}


def folder_data(root: Path, **options: object) -> ClassificationData:
    return ClassificationData(**{"dataset": "folder", "root": str(root), "batch_size": 4, "num_workers": 0, **options})


def validation_images(data: ClassificationData) -> tuple[torch.Tensor, torch.Tensor]:
    batches = list(data.val_dataloader())
    return torch.cat([images for images, _ in batches]), torch.cat([targets for _, targets in batches])


def test_folder_end_to_end(image_root: Path) -> None:
    augmentation = Augmentation(scale=(0.3, 1.0), hflip=0.5, auto_augment="rand-m5-mstd0.5")
    seen = []
    for workers in (0, 2):
        module = Recorder(**MODEL)
        data = folder_data(image_root, num_workers=workers, augmentation=augmentation)
        make_trainer(max_epochs=2).fit(module, datamodule=data)
        assert data.class_names == ["ant", "bee", "cat"]
        assert [len(targets) for _, targets in module.eval_batches] == [4, 2] * 2
        seen.append(torch.cat([images for _, images, _ in module.train_batches]))
    assert seen[0].shape == (24, 3, 16, 16)
    assert torch.equal(seen[0], seen[1])


def test_pictures_in_memory_change_nothing(image_root: Path) -> None:
    augmentation = Augmentation(scale=(0.3, 1.0), hflip=0.5, auto_augment="rand-m5-mstd0.5")
    for seed, path in enumerate(sorted(image_root.rglob("*.png"))):
        write_image(path, seed, (16, 16))
    for size, options in ((16, {"augmentation": augmentation, "num_workers": 2}), (16, {}), (24, {})):
        seen = []
        for in_memory in (False, True):
            module = Recorder(**{**MODEL, "img_size": size})
            data = folder_data(image_root, in_memory=in_memory, crop_pct=1.0, **options)
            make_trainer(max_epochs=1).fit(module, datamodule=data)
            seen.append([*(batch[1:] for batch in module.train_batches), *module.eval_batches])
        for one, other in zip(*seen, strict=True):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    write_image(image_root / "val" / "cat" / "cat1.png", 0, (7, 9))
    with pytest.raises(InputError, match=r"one size, .*cat1.png is not: 16x16 and 9x7 pixels"):
        attach(folder_data(image_root, in_memory=True), "validate", **MODEL)
    (image_root / "val" / "cat" / "cat0.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"cat0.png cannot be read"):
        attach(folder_data(image_root, in_memory=True), "validate", **MODEL)
    with pytest.raises(InputError, match=r"must be false for dataset 'latents'"):
        GenerationData("latents", str(image_root), in_memory=True)


def test_evaluation_is_timms(image_root: Path) -> None:
    data = folder_data(image_root, crop_pct=0.8, interpolation="bilinear")
    attach(data, "validate", **MODEL)
    images, targets = validation_images(data)
    transform = create_transform(16, crop_pct=0.8, interpolation="bilinear", mean=(0.5,) * 3, std=(0.5,) * 3)
    files = sorted((image_root / "val").rglob("*.png"))
    assert torch.equal(images, torch.stack([transform(Image.open(file)) for file in files]))
    assert targets.tolist() == [0, 0, 1, 1, 2, 2]


def make_tar(source: Path, target: Path, arcname: str) -> Path:
    with tarfile.open(target, "w") as archive:
        archive.add(source, arcname)
    return target


@pytest.mark.parametrize("layout", ["one tar per split", "one tar", "one tar with a top folder"])
def test_tar_reads_like_the_folder(image_root: Path, tmp_path: Path, layout: str) -> None:
    if layout == "one tar per split":
        root = tmp_path / "tars"
        root.mkdir()
        for split in ("train", "val"):
            make_tar(image_root / split, root / f"{split}.tar", ".")
    else:
        root = make_tar(image_root, tmp_path / "all.tar", "." if layout == "one tar" else "pets")
    from_tar, from_folder = folder_data(root, num_workers=2), folder_data(image_root)
    for data in (from_tar, from_folder):
        attach(data, **MODEL)
    assert from_tar.class_names == from_folder.class_names
    assert len(from_tar.train_dataloader().dataset) == 12
    images, targets = validation_images(from_tar)
    expected_images, expected_targets = validation_images(from_folder)
    assert torch.equal(images, expected_images) and torch.equal(targets, expected_targets)


def test_files_are_named_relative_to_their_place(image_root: Path, tmp_path: Path) -> None:
    tar = make_tar(image_root, tmp_path / "all.tar", "pets")
    sources = []
    for root in (image_root, tar):
        attach(data := folder_data(root), **MODEL)
        sources.append(data._splits["train"].files())
    paths = sorted((image_root / "train").rglob("*.png"))
    assert sources[0] == [(str(path.relative_to(image_root / "train")), path.stat().st_size) for path in paths]
    assert sources[1] == [(f"pets/train/{name}", size) for name, size in sources[0]]
    flat = ImageFiles(paths, Decoding()).files()
    assert flat == sources[0]


def test_tar_without_the_split(image_root: Path, tmp_path: Path) -> None:
    root = make_tar(image_root / "train", tmp_path / "train_only.tar", "train")
    with pytest.raises(ValueError, match="has none of the folders validation/, val/"):
        attach(folder_data(root), **MODEL)


def test_missing_split(image_root: Path) -> None:
    shutil.rmtree(image_root / "val")
    with pytest.raises(ValueError, match=r"has no validation split: looked for validation/, val/, .* with \.tar"):
        attach(folder_data(image_root), **MODEL)


def test_class_folders_without_a_split_around_them(image_root: Path) -> None:
    root = image_root / "train"
    with pytest.raises(ValueError, match=rf"has no train split: .* move them into {root}/train"):
        attach(folder_data(root), **MODEL)


def test_empty_class_folder(image_root: Path) -> None:
    (image_root / "train" / "bug").mkdir()
    (image_root / "train" / ".cache").mkdir()
    with pytest.raises(ValueError, match=r"class folder '.*/train/bug' has no image"):
        attach(folder_data(image_root), **MODEL)


def test_image_outside_of_a_class_folder(image_root: Path) -> None:
    write_image(image_root / "train" / "stray.png", 0)
    with pytest.raises(ValueError, match=r"train/stray.png has no label; 1 of 13 images of .* have no valid label"):
        attach(folder_data(image_root), **MODEL)
    attach(data := folder_data(image_root, skip_unlabelled=True), **MODEL)
    assert len(data._splits["train"]) == 12


def test_no_image_at_all(image_root: Path) -> None:
    for file in (image_root / "val").rglob("*.png"):
        file.unlink()
    with pytest.raises(ValueError, match=r"val. has no image$"):
        attach(folder_data(image_root), "validate", **MODEL)


def test_splits_with_different_classes(image_root: Path) -> None:
    (image_root / "val" / "cat").rename(image_root / "val" / "cow")
    with pytest.raises(ValueError, match="the data have 3 classes, the validation split has 3; they first differ in"):
        attach(folder_data(image_root), **MODEL)


def test_unknown_torchvision_and_hugging_face_sets(tmp_path: Path) -> None:
    for name, message in (("torch/cifar11", "Unknown torchvision dataset cifar11"), ("torch/cifar10", "not found")):
        with pytest.raises(ValueError, match=message) as error:
            attach(ClassificationData(dataset=name, root=str(tmp_path)), **MODEL)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("hfds", r"needs the package datasets: pip install headmix_vision\[datasets\]"),
        ("hfids/mnist", r"needs the package datasets: pip install headmix_vision\[datasets\]"),
        ("wds/", r"needs the package webdataset: pip install headmix_vision\[webdataset\]"),
        ("tfds/mnist", "needs the package tensorflow_datasets: pip install tensorflow-datasets"),
    ],
)
def test_missing_package(dataset: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        attach(ClassificationData(dataset=dataset, root=str(tmp_path)), **MODEL)


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    damaged = {"empty": b"", "truncated": content[: len(content) // 2], "text": b"not an image at all"}[how]
    path.write_bytes(damaged)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["empty", "truncated", "text"])
def test_unreadable_training_image_is_replaced_by_the_next(image_root: Path, how: str, workers: int) -> None:
    bad, following = (image_root / "train" / "bee" / f"bee{i}.png" for i in (1, 2))
    damage(bad, how)
    data = folder_data(image_root, max_unreadable=0.1, num_workers=workers, batch_size=12)
    module = Recorder(**MODEL)
    if workers == 0:
        with pytest.warns(UserWarning, match=f"skipped unreadable image {bad}.*1 of 12 so far") as found:
            make_trainer(max_epochs=2, limit_val_batches=0).fit(module, datamodule=data)
        assert sum("skipped unreadable" in str(warning.message) for warning in found) == 1
    else:
        make_trainer(max_epochs=2, limit_val_batches=0).fit(module, datamodule=data)
    assert [len(targets) for _, _, targets in module.train_batches] == [12, 12]
    replacement = np.asarray(Image.open(following).convert("RGB").crop((0, 2, 16, 18)), dtype=np.float32)
    expected = torch.from_numpy(replacement).permute(2, 0, 1) / 255 * 2 - 1
    for _, images, _ in module.train_batches:
        assert sum(torch.allclose(image, expected, atol=1e-5) for image in images) == 2


def test_unreadable_evaluation_image_is_left_out(image_root: Path) -> None:
    damage(image_root / "val" / "bee" / "bee0.png", "truncated")
    data = folder_data(image_root, max_unreadable=0.2, eval_batch_size=1)
    attach(data, "validate", **MODEL)
    with pytest.warns(UserWarning, match="skipped unreadable image .*bee0.png"):
        batches = list(data.val_dataloader())
    assert [targets.tolist() for _, targets in batches] == [[0], [0], [], [1], [2], [2]]
    assert batches[2][0].shape == (0, 3, 16, 16)


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_unreadable_images_stop_the_run(image_root: Path, workers: int) -> None:
    for i in range(3):
        damage(image_root / "train" / "cat" / f"cat{i}.png", "empty")
    data = folder_data(image_root, max_unreadable=0.2, num_workers=workers, batch_size=12)
    with (
        pytest.raises(ValueError, match=r"3 of 12 images are unreadable \(25.00%\), more than max_unreadable = 20.00%"),
        pytest.warns(UserWarning) if workers == 0 else torch.no_grad(),
    ):
        make_trainer(max_epochs=1).fit(Recorder(**MODEL), datamodule=data)


def test_predict(image_root: Path) -> None:
    write_image(image_root / "val" / "z.JPG", 1)
    (image_root / "val" / "notes.txt").write_text("not an image")
    data = folder_data(image_root, predict_path=str(image_root / "val"))
    batches = make_trainer().predict(Recorder(**MODEL), datamodule=data)
    assert batches is not None
    paths = [path for _, paths in batches for path in paths]
    assert all(isinstance(paths, list) for _, paths in batches)
    assert paths == sorted(str(file) for file in (image_root / "val").rglob("*.*") if file.suffix != ".txt")
    assert [images.shape for images, _ in batches] == [(4, 3, 16, 16), (3, 3, 16, 16)]
    assert data.class_names == ["0", "1", "2"]


def test_predict_one_file_in_grey_for_the_digits(image_root: Path) -> None:
    file = image_root / "val" / "ant" / "ant0.png"
    data = ClassificationData(predict_path=str(file))
    attach(data, "predict")
    ((images, paths),) = list(data.predict_dataloader())
    grey = Image.open(file).convert("L").resize((8, 10), Image.Resampling.BILINEAR).crop((0, 1, 8, 9))
    expected = torch.from_numpy(np.asarray(grey, dtype=np.float32)) / 255
    mean, std = data._data_config["mean"][0], data._data_config["std"][0]
    torch.testing.assert_close(images[0, 0] * std + mean, expected, atol=1e-6, rtol=0)
    assert paths == [str(file)]


def test_predict_takes_class_names_from_the_checkpoint(image_root: Path, tmp_path: Path) -> None:
    trained = folder_data(image_root)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Recorder(**MODEL), datamodule=trained)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    data = folder_data(tmp_path / "gone", predict_path=str(image_root / "val"))
    make_trainer().predict(Recorder(**MODEL), datamodule=data, ckpt_path=tmp_path / "last.ckpt")
    assert data.class_names == ["ant", "bee", "cat"]


def test_predict_without_images(image_root: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"has no image$"):
        attach(folder_data(image_root, predict_path=str(tmp_path / "none")), "predict", **MODEL)
    one = str(image_root / "val" / "ant" / "ant0.png")
    with pytest.raises(ValueError, match="1 images cannot be shared by 2 processes"):
        attach(folder_data(image_root, predict_path=one), "predict", world_size=2, **MODEL)


def test_predict_ranks_share_the_files(image_root: Path) -> None:
    paths = []
    for rank in range(2):
        data = folder_data(image_root, predict_path=str(image_root / "val"))
        attach(data, "predict", rank=rank, world_size=2, **MODEL)
        paths.append([path for _, batch in data.predict_dataloader() for path in batch])
    assert [len(part) for part in paths] == [3, 3]
    assert len({*paths[0], *paths[1]}) == 6
