"""Options and files that data sets refuse, each in one line before any training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headmix_vision.data import Augmentation, ClassificationData, GenerationData
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.data.datasets.canvas import CanvasDigits
from headmix_vision.data.datasets.digits import Digits
from headmix_vision.data.datasets.folders import find_images
from headmix_vision.errors import InputError

from .helpers import Recorder, attach, make_trainer

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("hflip", "vflip", "reprob", "translate") for value in (NAN, -0.1, 1.1)),
        *((name, (low, 1.0)) for name in ("scale", "ratio", "rescale") for low in (NAN, 0.0, -1.0, 2.0)),
        *((name, (0.5, INF)) for name in ("scale", "ratio", "rescale")),
        *((name, (0.5, 0.6, 0.7)) for name in ("scale", "ratio", "rescale")),
        *((name, value) for name in ("color_jitter", "degrees") for value in (NAN, INF, -1.0)),
        *(
            ("auto_augment", policy)
            for policy in ("", "foo", "rand-mX", "rand-m9-mstdx", "original-foo", "augmix-m5-w-1")
        ),
        *((name, value) for name in ("hflip", "degrees", "scale") for value in ("0.5", None, [1], True)),
        ("scale", ("0.5", "1")),
        *(("repeats", value) for value in (0, 1.5, "2", None)),
        ("recount", 0),
        ("remode", "x"),
        ("interpolation", "x"),
    ],
)
def test_augmentation_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"augmentation\.{name}(\[\d\])? must be .*, got "):
        Augmentation(**{name: value}).check()


@pytest.mark.parametrize(
    "policy",
    [
        "rand-m9-mstd0.5-inc1",
        "rand-m9-n3-p0.5-mmax9",
        "rand-mstd1-tweights",
        "augmix-m5-w4-d2-b1",
        "original-mstd0.5",
        "v0r",
    ],
)
def test_policies_of_timm_are_taken(policy: str) -> None:
    Augmentation(auto_augment=policy).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 59}, "size is 59, a canvas needs at least 60 pixels"),
        ({"size": -64}, "size is -64"),
        ({"size": 64.5}, "size is 64.5"),
        ({"size": NAN}, "size is nan"),
        ({"size": 10**7}, r"the layout of 50000 canvases of 10000000 pixels needs .* of memory"),
        ({"length": 10**15}, "canvases of 64 pixels needs .* of memory"),
        ({"length": 0}, "length must be a whole number of at least 1, got 0"),
        ({"channels": 2}, "channels is 2"),
        ({"rule": "x"}, "rule is 'x'"),
        ({"split": "all"}, "split 'all' does not exist"),
    ],
)
def test_canvases_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CanvasDigits(**{"split": "train", **options})


@pytest.mark.parametrize("channels", [0, -1, 2, 4])
def test_digits_of_other_channels(channels: int) -> None:
    with pytest.raises(InputError, match=f"digits are images of 1 or 3 channels, asked for {channels}"):
        Digits("train", channels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"canvas_size": 64}, "canvas_size is 64, it must be null for dataset 'digits'"),
        ({"dataset": "canvas", "canvas_size": 0}, "size is 0, a canvas needs"),
        ({"hflip": NAN}, "hflip must be a finite number from 0 to 1, got nan"),
        ({"max_unreadable": NAN}, "max_unreadable must be .* got nan"),
        ({"dataset": "fodler"}, "dataset 'fodler' is unknown"),
        ({"dataset": "latents"}, "needs root"),
        ({"root": "here"}, "dataset 'digits' needs no files and takes no root, got 'here': leave root out"),
        ({"dataset": "wds/"}, "is a stream and cannot train a generator"),
        ({"batch_size": 0}, "batch_size must be .* got 0"),
    ],
)
def test_options_of_generators(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        data, module = GenerationData(num_workers=0, **options), Recorder()
        del module.net
        module.net = SimpleNamespace(in_channels=1, input_size=(64, 64), num_classes=10)
        data.trainer = make_trainer(max_epochs=1)
        data.trainer.strategy.connect(module)
        data.setup("fit")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "path,kind,kind\na.png,x,y\n", "line 1: there are two columns 'kind'"),
        ("a.csv", "path,kind\na.png,x,y\n", "line 2: 3 cells, there are 2 columns"),
        ("a.csv", "path,kind\na.png,x\n,y\n", "line 3: path is missing"),
        ("a.csv", "path,sort\na.png,x\n", "has the columns path, sort, there is no 'kind'"),
        ("a.csv", "kind\nx\n", "has the columns kind, there is no 'path'"),
        ("a.tsv", "path\tkind\n", "must be a table .csv, or a folder with the table"),
    ],
)
def test_tables_with_mistakes(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        open_source(SplitRequest("table/kind", "train", (3,), "scoring", root=str(tmp_path / name)))
    with pytest.raises(InputError, match="is a file, it must be a directory or a"):
        open_source(SplitRequest("folder", "train", (3,), "scoring", root=str(tmp_path / name)))


@pytest.mark.parametrize("split", ["", ".", ".."])
def test_splits_that_are_no_names(split: str, image_root: Path) -> None:
    data = ClassificationData("folder", str(image_root), train_split=split, batch_size=4, num_workers=0)
    with pytest.raises(InputError, match="it must be the name of a folder or tar file"):
        attach(data, img_size=16, in_chans=3, num_classes=3)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_no_readable_image_at_all(share: float, image_root: Path) -> None:
    for file in (image_root / "val").rglob("*.png"):
        file.write_bytes(b"")
    data = ClassificationData("folder", str(image_root), batch_size=4, num_workers=0, max_unreadable=share)
    attach(data, "validate", img_size=16, in_chans=3, num_classes=3)
    message = "none of the 6 images is readable" if share == 1 else "4 of 6 images are unreadable"
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(InputError, match=message):
        list(data.val_dataloader())


def test_images_to_predict_are_named_by_their_option(tmp_path: Path) -> None:
    for path, message in (("", "is ''"), (str(tmp_path / "no"), "is neither"), (str(tmp_path), "has no image")):
        data = ClassificationData(predict_path=path)
        with pytest.raises(InputError, match=rf"data\.predict_path .*{message}"):
            attach(data, "predict")
    (tmp_path / "a.png").mkdir()
    (tmp_path / "b.png").symlink_to(tmp_path / "nowhere")
    assert [file.name for file in find_images(str(tmp_path), "--images")] == ["b.png"]


@pytest.mark.parametrize("data", [ClassificationData, GenerationData])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("batch_size", (2.5, "8", True, NAN, None)),
        ("eval_batch_size", (2.5, "8")),
        ("num_workers", (1.5, "2", True)),
        ("seed", ("x", 1.5, -1, None)),
        ("max_unreadable", ("0.1", True, None)),
        ("dataset", (None, 3)),
        ("skip_unlabelled", ("false", 1, None)),
    ],
)
def test_options_of_another_kind(data: type, name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(InputError, match=name):
            data(**{name: value})


def test_by_default_nothing_is_augmented() -> None:
    Augmentation().check()
    assert Augmentation().is_idle


@pytest.mark.parametrize("augmentation", [None, {"hflip": 0.5}])
def test_an_augmentation_that_is_none(augmentation: Any) -> None:
    with pytest.raises(InputError, match="augmentation must be an Augmentation"):
        ClassificationData(augmentation=augmentation)


def test_a_recipe_is_tried_with_fake_samples_and_its_own_root() -> None:
    data, module = GenerationData("fake", "no/such/folder", num_workers=0, background="black"), Recorder()
    del module.net
    module.net = SimpleNamespace(in_channels=1, input_size=(8, 8), num_classes=10)
    data.trainer = make_trainer(max_epochs=1)
    data.trainer.strategy.connect(module)
    data.setup("fit")
