"""Videos of folders and tables: which frames make a clip, what is skipped in training, and what is refused."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from PIL import Image
from torch import Tensor

from headmix_vision.data.cache_sources import EvenClips
from headmix_vision.data.clip_frames import ClipConfig
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.data.datasets.videos import open_video_folder
from headmix_vision.data.generation import GenerationData
from headmix_vision.data.stills import StillsConfig
from headmix_vision.errors import InputError
from headmix_vision.files.video import write_video

from .helpers import make_trainer

FRAMES = 20


def write_counting(path: Path, seed: int, frames: int = FRAMES, rate: float = 8) -> None:
    """A video whose frames are gray, each by 8 lighter than the one before; the left half is darker by `seed`."""
    levels = np.broadcast_to(40 + 8 * np.arange(frames)[:, None, None, None], (frames, 24, 32, 3)).astype(np.uint8)
    levels = levels.copy()
    levels[:, :, :16] -= np.uint8(4 * seed)
    write_video(path, levels, rate)


def write_frames(path: Path, frames: int, size: tuple[int, int] = (32, 24)) -> None:
    path.mkdir(parents=True)
    for number in range(frames):
        Image.new("RGB", size, (40 + 8 * number,) * 3).save(path / f"{number:03d}.png")


def numbers(clip: Tensor) -> list[int]:
    """Numbers of the frames of a clip [C, T, H, W] in [0, 1], as their right halves tell them."""
    return ((clip[:, :, :, -4:].mean((0, 2, 3)) * 255 - 40) / 8).round().int().tolist()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train: 2 classes of 3 videos, val: 2 classes of 1 video; skies: 2 clips as folders of frames."""
    root = tmp_path_factory.mktemp("videos")
    for split, count in (("train", 3), ("val", 1)):
        for label, name in enumerate(("run", "walk")):
            for number in range(count):
                write_counting(root / "ucf" / split / name / f"{name}{number}.mp4", 3 * label + number)
    for number in range(2):
        write_frames(root / "skies" / "train" / f"sky{number}" / "part", FRAMES)
    return root


def source(root: Path, grid: tuple[int, ...] = (4, 8, 8), split: str = "train", **options: Any) -> Any:
    name = options.pop("name", "videos")
    return open_source(SplitRequest(name, split, (3, *grid), "generation", root=str(root), **options))


def test_frames_are_those_of_the_rate_or_stride_that_is_asked_for(root: Path) -> None:
    videos = source(root / "ucf")
    assert len(videos) == 6 and videos.class_names == ["run", "walk"]
    clip, label = videos.read(4)
    assert clip.shape == (3, 4, 8, 8) and clip.dtype == torch.float32 and label == 1
    assert numbers(clip) == [8, 9, 10, 11]  # the middle
    assert numbers(videos.read_part(4, 0.0)[0]) == [0, 1, 2, 3]
    assert numbers(videos.read_part(4, 1.0)[0]) == [16, 17, 18, 19]
    assert [numbers(EvenClips(videos, 2).read(number)[0])[0] for number in (8, 9)] == [4, 12]
    assert numbers(source(root / "ucf", clip=ClipConfig(frame_stride=3)).read(0)[0]) == [5, 8, 11, 14]
    assert numbers(source(root / "ucf", clip=ClipConfig(frame_rate=3)).read(0)[0]) == [6, 9, 11, 14]
    assert numbers(source(root / "ucf", (1, 8, 8)).read(0)[0]) == [10]
    # ADM's crop of the middle 24 columns: the border between the halves stays in the middle
    assert (clip[:, :, :, 3] - clip[:, :, :, 4]).abs().min() > 5 / 255
    assert source(root / "ucf", (4,)).read(0)[0].shape == (3, 4, 24, 32)
    assert videos.files()[3] == ("walk/walk0.mp4[0:]", (root / "ucf/train/walk/walk0.mp4").stat().st_size)


def test_gifs_have_a_frame_rate_and_other_animated_pictures_none(tmp_path: Path) -> None:
    write_counting(tmp_path / "gifs" / "a.gif", 0, rate=10)
    videos = source(tmp_path / "gifs", clip=ClipConfig(frame_rate=5))
    assert numbers(videos.read_part(0, 0.0)[0]) == [0, 2, 4, 6]
    pictures = [Image.new("RGB", (32, 24), (40 + 8 * number,) * 3) for number in range(FRAMES)]
    (tmp_path / "webps").mkdir()
    pictures[0].save(tmp_path / "webps" / "a.webp", save_all=True, append_images=pictures[1:])
    with pytest.raises(InputError, match=r"a\.webp is an animated picture, which states no frame rate"):
        source(tmp_path / "webps", clip=ClipConfig(frame_rate=5))


def test_folders_of_frames(root: Path) -> None:
    videos = source(root / "skies", name="videos/unlabelled")
    assert len(videos) == 2 and videos.class_names == [] and videos.read(1)[1] == 0
    assert numbers(videos.read(1)[0]) == [8, 9, 10, 11]
    assert source(root / "skies").class_names == ["sky0", "sky1"]
    assert videos.files()[1] == ("sky1/part[0:]", FRAMES)
    assert source(root / "skies" / "train" / "sky0").class_names == []  # the folder itself is the training split
    with pytest.raises(InputError, match=r"sky0/part is a folder of frames, .* by a stride instead of the rate 8"):
        source(root / "skies", clip=ClipConfig(frame_rate=8))


def test_tables(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "ucf" / "train", tmp_path / "clips")
    table = tmp_path / "all.csv"
    table.write_text(
        "path,label,split,start,end\nclips/run/run0.mp4,10,train,,\nclips/run/run1.mp4,9,train,4,10\n"
        "clips/walk/walk0.mp4,10,test,2,\n"
    )
    videos = source(table)
    assert videos.class_names == ["9", "10"] and [videos.read(i)[1] for i in range(2)] == [1, 0]
    assert numbers(videos.read_part(1, 0.0)[0]) == [4, 5, 6, 7] and numbers(videos.read_part(1, 1.0)[0]) == [6, 7, 8, 9]
    assert numbers(source(table, split="test").read_part(0, 0.0)[0]) == [2, 3, 4, 5]
    request = SplitRequest("videos", "test", (3, 4, 8, 8), "caching")
    assert numbers(open_video_folder(table, request).read_part(0, 0.0)[0]) == [2, 3, 4, 5]
    (tmp_path / "train.csv").write_text("path,label\nclips/run/run0.mp4,a\n")
    assert source(tmp_path).class_names == ["a"]
    for text, message in (
        ("path\nclips/run/run0.mp4", None),
        ("file,label\nx,y", r"has the columns file, label; it must have path"),
        ("path,label\n,y", "line 2: path is missing"),
        ("path,label\nx,", "line 2 has no label; 1 of 1 videos of .* have no valid label"),
        ("path,start\nx,1.5", "line 2: start is '1.5', it must be the number of a frame"),
        ("path,start,end\nx,4,4", "line 2: end is 4, it must be above start 4"),
        ("path,split\nx,val", "has no rows of the split 'train'"),
        ("path\n", "has no rows"),
        (b"\xff\xfe\x00", "is not a table"),
        ('path,label\nx,a\ny,"b\nz,c\n', "is not a table: unexpected end of data, in the row after line 2"),
    ):
        table.write_bytes(text if isinstance(text, bytes) else text.encode())
        if message is None:
            assert source(table).class_names == []
            continue
        with pytest.raises(InputError, match=message):
            source(table)


def test_a_sheet_shows_a_clip_from_its_start_to_its_end(root: Path) -> None:
    sheets = open_source(SplitRequest("sheets", "train", (3, 96, 96), "classification", root=str(root / "ucf")))
    assert sheets.class_names == ["run", "walk"] and [sheets.read(index)[1] for index in range(6)] == [0] * 3 + [1] * 3
    image, _ = sheets.read(0)
    assert isinstance(image, Image.Image) and image.size == (128, 128)
    cells = np.asarray(image)[16::32, 28::32, 0]
    assert ((cells.flatten() - 40.0) / 8).round().tolist() == [place * FRAMES // 16 for place in range(16)]
    with pytest.raises(InputError, match="'sheets' cannot train a generator"):
        open_source(SplitRequest("sheets", "train", (3, 8, 8), "generation", root=str(root / "ucf")))


class Keep(torch.nn.Module):
    in_channels, input_size, num_classes, frame_rate = 3, (4, 8, 8), 2, 4.0


def fit(root: Path, callbacks: list[Callback], ckpt_path: Path | None = None, **options: Any) -> list[Tensor]:
    return [x for x, _ in fit_labelled(root, callbacks, ckpt_path, **options)]


def fit_labelled(
    root: Path, callbacks: list[Callback], ckpt_path: Path | None = None, **options: Any
) -> list[tuple[Tensor, Tensor]]:
    class Recorder(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.weight, self.seen = Keep(), torch.nn.Parameter(torch.zeros(1)), []

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            self.seen.append(batch)
            return self.weight.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Recorder()
    defaults = {"val_split": None, "batch_size": 2, "seed": 3, "hflip": 0.5, "stills": StillsConfig(0.25)}
    data = GenerationData("videos", str(root / "ucf"), **{**defaults, **options})
    trainer = make_trainer(max_epochs=4, callbacks=callbacks)
    with suppress(KeyboardInterrupt, SystemExit):
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module.seen


def test_stills_of_some_classes_stand_still_for_a_patch(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train" / "walk").mkdir(parents=True)
    for name, grey in (("a", 51), ("b", 102)):
        Image.new("RGB", (8, 8), (grey,) * 3).save(tmp_path / "train" / "walk" / f"{name}.png")
    monkeypatch.setattr(Keep, "patch_size", (2, 4, 4), raising=False)
    stills = StillsConfig(0.25, "folder", str(tmp_path))
    batches = fit_labelled(root, [], num_workers=0, stills=stills)
    assert [x.shape[2] for x, _ in batches] == [4, 4, 4, 2] * 3
    for x, labels in batches[3::4]:
        assert labels.tolist() == [1, 1] and torch.equal(x[:, :, 0], x[:, :, 1])
        assert sorted(x[:, 0, 0, 0, 0].tolist()) == pytest.approx([51 / 127.5 - 1, 102 / 127.5 - 1])
    (tmp_path / "train" / "walk").rename(tmp_path / "train" / "swim")
    with pytest.raises(InputError, match="2 classes, the data set of stills has 1; they first differ in 'run'"):
        fit(root, [], num_workers=0, stills=stills)


class Interrupt(Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *args: object) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


def test_resuming_reads_the_frames_that_an_uninterrupted_run_reads(root: Path, tmp_path: Path) -> None:
    whole = fit(root, [], num_workers=0)
    assert [len(clip) for clip in whole] == [2] * 12 and [x.shape[2] for x in whole] == [4, 4, 4, 1] * 3
    begins = [numbers((clip + 1) / 2)[0] for batch in whole for clip in batch if clip.shape[1] == 4]
    assert len(set(begins)) > 6 and max(begins) <= FRAMES - 7  # at 4 of 8 frames a second a clip spans 7
    before = fit(root, [Interrupt(tmp_path / "last.ckpt", 5)], num_workers=0)
    after = fit(root, [], tmp_path / "last.ckpt", num_workers=2)
    assert len(before) == 5 and all(map(torch.equal, [*before, *after], whole)) and len(after) == 7


@pytest.fixture
def broken(root: Path, tmp_path: Path) -> Path:
    """Six videos, of which one is damaged and one is too short."""
    shutil.copytree(root / "ucf", tmp_path / "ucf")
    (tmp_path / "ucf/train/run/run1.mp4").write_bytes(b"nonsense")
    write_counting(tmp_path / "ucf/train/walk/walk2.mp4", 0, frames=6)
    return tmp_path


def test_unreadable_and_short_videos_are_named_skipped_and_counted(broken: Path) -> None:
    with pytest.warns(UserWarning, match="skipped unreadable video") as found:
        batches = fit(broken, [], max_unreadable=0.4, num_workers=0, stills=StillsConfig())
    lines = sorted(str(warning.message) for warning in found if "skipped" in str(warning.message))
    assert len(lines) == 2 and len(batches) == 12
    assert "run1.mp4 (" in lines[0] and "cannot be read as a video" in lines[0]
    assert "walk2.mp4 (it has 6 frames, a clip needs 7), " in lines[1]
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(InputError, match=r"2 of 6 videos are unreadable .* more than max_unreadable = 20.00%"),
    ):
        fit(broken, [], max_unreadable=0.2, num_workers=0, stills=StillsConfig())


def test_refusals(root: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    (empty / "train" / "run").mkdir(parents=True)
    shutil.copytree(root / "ucf" / "val", tmp_path / "half" / "val")
    shutil.copytree(root / "ucf" / "val", tmp_path / "gap" / "train")
    (tmp_path / "gap" / "train" / "sit").mkdir()
    (tmp_path / "file.txt").write_text("")
    for place, options, message in (
        (tmp_path / "absent", {}, "does not exist"),
        (empty, {}, "has no videos"),
        (tmp_path / "half", {}, "has no train split: looked for train/, train.csv"),
        (root / "ucf", {"split": "test"}, "has no test split"),
        (tmp_path / "gap", {}, "class folder .*sit' has no video"),
        (tmp_path / "file.txt", {}, "it must be a folder or a table .csv"),
        (root / "skies" / "train" / "sky0" / "part", {}, "is a folder of frames itself"),
        (root / "ucf", {"grid": ()}, "needs the number of frames of a clip"),
        (root / "ucf", {"grid": (8, 8)}, "'videos' holds clips, asked for images of 8x8"),
    ):
        with pytest.raises(InputError, match=message):
            source(place, **options)
    write_frames(tmp_path / "mixed" / "sky", 4)
    Image.new("RGB", (10, 10)).save(tmp_path / "mixed" / "sky" / "002.png")
    with pytest.raises(ValueError, match="it has frames of 10x10 and of 32x24 pixels"):
        source(tmp_path / "mixed").read(0)
    for options, message in (
        ({"frame_rate": -1}, "frame_rate must be a finite number above 0, got -1"),
        ({"frame_stride": 0}, "the stride of frames must be a whole number of at least 1, got 0"),
        ({"frame_rate": 8.0, "frame_stride": 2}, "the frame rate is 8.0 and the stride is 2: set one of them"),
    ):
        with pytest.raises(InputError, match=message):
            ClipConfig(**options)
