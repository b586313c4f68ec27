"""Stopping and resuming a real trainer: the batches seen must equal the batches of a run that was never stopped."""

import shutil
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from headmix_vision.cli import cache_latents
from headmix_vision.data import Augmentation, ClassificationData
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.data.shard_index import write_index

from .helpers import Recorder, make_trainer, write_image

BATCH_SIZE = 80  # 360 digits: 4 batches an epoch
EPOCHS = 3


def make_data(**options: object) -> ClassificationData:
    augmentation = Augmentation(degrees=10, translate=0.1, reprob=0.2)
    splits = {"train_split": "validation", "val_split": "validation"}
    return ClassificationData(batch_size=BATCH_SIZE, augmentation=augmentation, seed=3, **splits, **options)


def run(callbacks: list[Callback] | None = None, ckpt_path: Path | None = None, workers: int = 0, **options: object):
    module = Recorder()
    trainer = make_trainer(callbacks=callbacks or [], **{"max_epochs": EPOCHS, **options})
    trainer.fit(module, datamodule=make_data(num_workers=workers), ckpt_path=ckpt_path)
    return module.train_batches


def assert_same_batches(found: list, expected: list) -> None:
    assert len(found) == len(expected)
    for (_, images, targets), (_, expected_images, expected_targets) in zip(found, expected, strict=True):
        assert torch.equal(images, expected_images)
        assert torch.equal(targets, expected_targets)


@pytest.fixture(scope="module")
def uninterrupted() -> list:
    return run()


class Interrupt(Callback):
    """Saves and stops at the end of a given batch, or in the validation after it, like a signal would."""

    def __init__(self, path: Path, step: int, in_validation: bool = False) -> None:
        self.path, self.step, self.in_validation = path, step, in_validation

    def _stop(self, trainer) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt

    def on_train_batch_end(self, trainer, *args) -> None:
        if not self.in_validation:
            self._stop(trainer)

    def on_validation_batch_end(self, trainer, *args) -> None:
        if self.in_validation:
            self._stop(trainer)


def run_until_interrupt(interrupt: Interrupt) -> list:
    module = Recorder()
    trainer = make_trainer(callbacks=[interrupt], max_epochs=EPOCHS)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(module, datamodule=make_data())
    return module.train_batches


def test_one_epoch_holds_each_image_at_most_once() -> None:
    """Digits without augmentation, which are all different."""
    module, data = Recorder(), ClassificationData(train_split="validation", batch_size=BATCH_SIZE, seed=3)
    make_trainer(max_epochs=2, limit_val_batches=0).fit(module, datamodule=data)
    assert [index for index, _, _ in module.train_batches] == [0, 1, 2, 3] * 2
    images = [image.numpy().tobytes() for _, batch, _ in module.train_batches for image in batch]
    epochs = [images[i * 4 * BATCH_SIZE : (i + 1) * 4 * BATCH_SIZE] for i in range(2)]
    assert all(len(set(epoch)) == 4 * BATCH_SIZE for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 2
    assert len(set(images)) > 335  # the images that an epoch leaves out are others in the next


@pytest.mark.parametrize("step", [1, 3, 4, 5, 8, 11])
def test_interrupt_after_any_step(tmp_path: Path, uninterrupted: list, step: int) -> None:
    path = tmp_path / "last.ckpt"
    before = run_until_interrupt(Interrupt(path, step))
    after = run(ckpt_path=path)
    assert_same_batches(before + after, uninterrupted)
    assert [index for index, _, _ in before + after] == [index for index, _, _ in uninterrupted]


@pytest.mark.parametrize("step", [4, 8])
def test_interrupt_in_validation(tmp_path: Path, uninterrupted: list, step: int) -> None:
    path = tmp_path / "last.ckpt"
    before = run_until_interrupt(Interrupt(path, step, in_validation=True))
    assert_same_batches(before + run(ckpt_path=path), uninterrupted)


def test_checkpoint_at_the_end_of_an_epoch(tmp_path: Path, uninterrupted: list) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
    before = run([checkpoint], max_epochs=2, enable_checkpointing=True)
    assert_same_batches(before + run(ckpt_path=tmp_path / "last.ckpt"), uninterrupted)


@pytest.mark.parametrize(
    ("more", "count"),
    # Lightning counts the epoch that max_steps cut short as a whole one, so max_epochs comes early.
    [({"max_steps": 12, "max_epochs": 10}, 6), ({"max_steps": -1, "max_epochs": 3}, 4)],
)
def test_max_steps_within_an_epoch_then_more(tmp_path: Path, uninterrupted: list, more: dict, count: int) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
    before = run([checkpoint], max_steps=6, enable_checkpointing=True)
    assert len(before) == 6
    after = run(ckpt_path=tmp_path / "last.ckpt", **more)
    assert len(after) == count
    assert_same_batches(before + after, uninterrupted[: 6 + count])


def test_resuming_with_workers(tmp_path: Path, uninterrupted: list) -> None:
    path = tmp_path / "last.ckpt"
    before = run_until_interrupt(Interrupt(path, 5))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not resumable")
        after = run(ckpt_path=path, workers=2)
    assert_same_batches(before + after, uninterrupted)


def test_another_batch_size_is_pointed_out(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    run_until_interrupt(Interrupt(path, 2))
    data = ClassificationData(train_split="validation", batch_size=BATCH_SIZE // 2, seed=3)
    with pytest.warns(UserWarning, match="global_batch_size was 80 and is now 40"):
        make_trainer(max_epochs=1).fit(Recorder(), datamodule=data, ckpt_path=path)


def test_overfit_batches_repeats_the_same_batches() -> None:
    seen = run(overfit_batches=2)
    assert len(seen) == 2 * EPOCHS
    assert_same_batches(seen[2:4], seen[:2])


def test_another_class_list_in_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    run_until_interrupt(Interrupt(path, 1))
    checkpoint = torch.load(path, weights_only=True)
    names = checkpoint["ClassificationData"]["class_names"]
    for others, first in (([*names[:3], "drei", *names[4:]], "'3'"), (names[::-1], "'their order'")):
        checkpoint["ClassificationData"]["class_names"] = others
        torch.save(checkpoint, path)
        with pytest.raises(ValueError, match=f"first differ in {first}"):
            run(ckpt_path=path)


def timeless(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime = 0
    return member


def as_folder(classes: Path, root: Path) -> str:
    shutil.copytree(classes, root / "train")
    return "folder"


def as_tar(classes: Path, root: Path) -> str:
    with tarfile.open(root / "train.tar", "w") as archive:
        archive.add(classes, "train")
    return "folder"


def as_table(classes: Path, root: Path) -> str:
    shutil.copytree(classes, root / "all")
    paths = sorted(path.relative_to(root) for path in root.rglob("*.png"))
    rows = [f"{path},{path.parent.name}" for path in paths]
    (root / "images.csv").write_text("\n".join(["path,kind", *rows]))
    return "table/kind"


def as_shards(classes: Path, root: Path) -> str:
    with tarfile.open(root / "0.tar", "w") as archive:
        for path in sorted(classes.rglob("*.png")):
            label = path.with_suffix(".cls")
            label.write_text(path.parent.name)
            for file in (path, label):
                archive.add(file, f"{path.parent.name}{file.name}", filter=timeless)
    write_index(root)
    return "shards"


def as_latents(classes: Path, root: Path) -> str:
    options = ("--images", classes, "--vae", "none", "--image-size", 8, "--workers", 0, "--device", "cpu")
    cache_latents.main([*map(str, options), "--out", str(root / "train")])
    return "latents"


def removed(classes: Path) -> None:
    (classes / "a" / "0.png").unlink()


def renamed(classes: Path) -> None:
    (classes / "a" / "0.png").rename(classes / "a" / "9.png")


def moved(classes: Path) -> None:
    (classes / "a" / "0.png").rename(classes / "b" / "9.png")


@pytest.mark.parametrize("kind", [as_folder, as_tar, as_table, as_shards, as_latents])
def test_samples_are_told_apart_from_others_wherever_they_lie(
    kind: Callable[[Path, Path], str], tmp_path: Path
) -> None:
    def keys(name: str, change: Callable[[Path], None] | None = None) -> list[str] | None:
        classes, root = tmp_path / f"{name}-classes", tmp_path / name
        root.mkdir()
        for number, label in enumerate("aabb"):
            write_image(classes / label / f"{number}.png", number, (8, 8))
        if change is not None:
            change(classes)
        dataset, use = kind(classes, root), "generation"
        return open_source(SplitRequest(dataset, "train", (3, 8, 8), use, root=str(root), num_classes=2)).keys()

    first = keys("first")
    assert first and keys("second") == first
    changed = [keys(change.__name__, change) for change in (removed, renamed, moved)]
    assert all(first != other for other in changed)
