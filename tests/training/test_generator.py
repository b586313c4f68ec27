"""Generator training: what a run leaves behind, exact resume, refusals."""

import os
import signal
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from headmix_vision.cli.sample import main as sample
from headmix_vision.data.batches import PreparedSamples, SampleKey
from headmix_vision.data.cache_request import CacheRequest
from headmix_vision.data.datasets.digits import Digits
from headmix_vision.data.datasets.latents import LatentShards
from headmix_vision.data.latent_cache import write_cache
from headmix_vision.diffusion.objectives import ObjectiveConfig
from headmix_vision.errors import InputError
from headmix_vision.models.autoencoders import load_autoencoder
from headmix_vision.training.callbacks.ema import ema_decay
from headmix_vision.training.generator import ImageGenerator

from .gen_helpers import VIDEO, run, write_config
from .helpers import assert_equal, load, read_csv

EXACT = ("epoch", "global_step", "state_dict", "current_model_state", "averaging_state", "optimizer_states")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of the tiny run, uninterrupted."""
    folder = tmp_path_factory.mktemp("generator")
    torch.set_num_threads(1)
    assert run("fit", "-c", write_config(folder / "tiny.yaml"), "--run_dir", folder / "run") == 0
    return folder / "run"


@pytest.fixture(scope="session")
def video_reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of the tiny run of clips, uninterrupted."""
    folder = tmp_path_factory.mktemp("video_generator")
    torch.set_num_threads(1)
    assert run("fit", "-c", write_config(folder / "tiny.yaml", **VIDEO), "--run_dir", folder / "run") == 0
    return folder / "run"


def assert_same_run(a: Path, b: Path) -> None:
    first, second = load(a / "checkpoints" / "last.ckpt"), load(b / "checkpoints" / "last.ckpt")
    for key in EXACT:
        assert_equal(first[key], second[key], key)
    assert read_csv(a / "metrics.csv") == read_csv(b / "metrics.csv")
    names = sorted(path.name for path in (b / "samples").iterdir())
    assert names == sorted(path.name for path in (a / "samples").iterdir())
    for name in names:
        assert (a / "samples" / name).read_bytes() == (b / "samples" / name).read_bytes()


def test_what_a_run_leaves_behind(reference: Path) -> None:
    entries = {path.name for path in reference.iterdir()}
    assert entries == {"config.yaml", "metrics.csv", "tensorboard", "checkpoints", "samples", "curves.svg"}
    assert [path.name for path in (reference / "checkpoints").iterdir()] == ["last.ckpt"]
    checkpoint = load(reference / "checkpoints" / "last.ckpt")
    about = checkpoint["headmix_vision"]
    assert (about["kind"], about["name"], about["objective"]["kind"]) == ("generator", "dit_mhla_digits", "flow")
    assert about["class_names"] == [str(i) for i in range(10)] and about["architecture"]["embed_dim"] == 16
    rows = read_csv(reference / "metrics.csv")
    ends = [row for row in rows if row["train/loss"]]
    assert [int(row["step"]) for row in rows] == list(range(6)) and len(ends) == 2
    assert all(float(row["val/loss"]) > 0 for row in ends)
    assert sum(bool(value) for name, value in ends[0].items() if name.startswith("train/loss_level_")) >= 8
    names = {path.name for path in (reference / "samples").iterdir()}
    assert names == {f"step_{step:08d}_{kind}.png" for step in (4, 6) for kind in ("raw", "ema")}
    raw, ema = (np.asarray(Image.open(reference / "samples" / f"step_00000006_{kind}.png")) for kind in ("raw", "ema"))
    assert not np.array_equal(raw[20:, :200], ema[20:, :200])  # below the title
    assert (reference / "curves.svg").is_file() and (reference / "config.yaml").is_file()
    events = b"".join(path.read_bytes() for path in (reference / "tensorboard").iterdir())
    assert b"samples/raw" in events and b"samples/ema" in events
    assert b"train/images_per_s" in events


def test_what_a_video_run_leaves_behind(video_reference: Path) -> None:
    about = load(video_reference / "checkpoints" / "last.ckpt")["headmix_vision"]
    assert (about["input_size"], about["objective"]["clean_prefix"]) == ([4, 16, 16], 0.5)
    assert about["class_names"][7] == "1 up"
    names = {path.name for path in (video_reference / "samples").iterdir()}
    steps = [f"step_{step:08d}_{kind}" for step in (4, 6) for kind in ("raw", "ema")]
    assert names == {f"{name}.{suffix}" for name in steps for suffix in ("gif", "png")}
    with Image.open(video_reference / "samples" / f"{steps[0]}.gif") as moving:
        count = getattr(moving, "n_frames", 1)
        duration = sum(moving.seek(i) or moving.info["duration"] for i in range(count))
    assert (count, duration) == (4, 500)  # at 8 frames a second
    with Image.open(video_reference / "samples" / f"{steps[0]}.png") as sheet:
        assert getattr(sheet, "n_frames", 1) == 1
    rows = read_csv(video_reference / "metrics.csv")
    assert sum(bool(value) for name, value in rows[2].items() if name.startswith("train/loss_level_")) >= 8
    events = b"".join(path.read_bytes() for path in (video_reference / "tensorboard").iterdir())
    assert b"samples/ema" in events


def test_average_is_counted_and_another_than_the_weights(reference: Path) -> None:
    checkpoint = load(reference / "checkpoints" / "last.ckpt")
    assert int(checkpoint["averaging_state"]["n_averaged"]) == 6
    assert [round(ema_decay(n, 0.9999), 3) for n in (0, 90)] == [0.1, 0.91]
    name = "net.blocks.0.attn.qkv.weight"
    assert not torch.equal(checkpoint["state_dict"][name], checkpoint["current_model_state"][name])


@pytest.mark.parametrize(
    ("kind", "epoch", "batch", "step"), [("", 0, 1, 1), ("", 1, 2, 5), ("", 0, 5, 3), ("video_", 1, 2, 5)]
)
def test_interrupted_run_continues_bit_for_bit(
    kind: str,
    epoch: int,
    batch: int,
    step: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    original, fired = ImageGenerator.training_step, []
    reference = request.getfixturevalue(f"{kind}reference")

    def interrupt(self: ImageGenerator, samples: Any, batch_idx: int) -> Any:
        if (self.current_epoch, batch_idx) == (epoch, batch) and not fired:
            fired.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, samples, batch_idx)

    config, run_dir = write_config(tmp_path / "tiny.yaml", **(VIDEO if kind else {})), tmp_path / "run"
    with monkeypatch.context() as context:
        context.setattr(ImageGenerator, "training_step", interrupt)
        assert run("fit", "-c", config, "--run_dir", run_dir) == 130
    assert load(run_dir / "checkpoints" / "last.ckpt")["global_step"] == step
    assert run("fit", "-c", run_dir / "config.yaml", "--ckpt_path", "last") == 0
    assert_same_run(run_dir, reference)


def test_sample_grids_change_nothing(reference: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "tiny.yaml", samples__every_n_steps=None)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 0
    assert not (tmp_path / "run" / "samples").exists()
    assert read_csv(tmp_path / "run" / "metrics.csv") == read_csv(reference / "metrics.csv")


def test_non_finite_loss_stops_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original = ImageGenerator.training_step

    def broken(self: ImageGenerator, samples: Any, batch_idx: int) -> Any:
        return original(self, samples, batch_idx) * (float("nan") if self.trainer.global_step == 4 else 1)

    monkeypatch.setattr(ImageGenerator, "training_step", broken)
    config = write_config(tmp_path / "tiny.yaml", trainer__max_epochs=3)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 1
    assert "epoch 1, step 4" in capfd.readouterr().err
    last = load(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert last["global_step"] == 3
    assert all(value.isfinite().all() for value in last["current_model_state"].values())


@pytest.mark.parametrize(
    "overrides",
    [
        {"model__objective": {"kind": "ddpm", "learned_variance": True}, "samples__scheduler": "ddpm"},
        {"model__objective": {"kind": "ddpm", "prediction": "v"}, "samples__scheduler": "unipc"},
        {"model__num_classes": 0, "samples": {"every_n_steps": 2, "steps": 2}, "data__val_split": None},
        {"data__dataset": "fake", "data__val_split": None, "trainer__max_epochs": -1, "trainer__max_steps": 2},
        {"model__compile": False, "trainer__precision": "bf16-mixed", "model__input_size": [8, 16]},
        {**VIDEO, "data__stills": {"share": 0.5}, "trainer__max_epochs": 1},
    ],
    ids=["learned-variance", "v", "unconditional", "fake-steps", "bf16-wide", "clips-and-stills"],
)
def test_other_objectives_and_models(overrides: dict[str, Any], tmp_path: Path) -> None:
    config = write_config(tmp_path / "tiny.yaml", **overrides)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 0
    assert list((tmp_path / "run" / "samples").iterdir())
    config = tmp_path / "run" / "config.yaml"
    if overrides.get("data__val_split", "") is not None:
        assert run("validate", "-c", config, "--ckpt_path", "last") == 0


def test_starts_from_other_weights(reference: Path, tmp_path: Path) -> None:
    """A softmax run's weights into a model with MHLA: what both have is taken over."""
    start = reference / "checkpoints" / "last.ckpt"
    config = write_config(tmp_path / "tiny.yaml")
    options = ("--model.name", "dit_softmax_digits", "--model.optimizer.lr", 1e-12, "--model.checkpoint", start)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run", *options) == 0
    name = "net.blocks.0.mlp.fc1.weight"
    state = load(tmp_path / "run" / "checkpoints" / "last.ckpt")["state_dict"]
    torch.testing.assert_close(state[name], load(start)["state_dict"][name])
    assert not any("mixing" in key for key in state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model.name", "dit_mla_digits"), "did you mean"),
        (("--model.name", "deit_mhla_digits"), "is a classifier, which headmix train-cls trains"),
        (("--model.num_classes", "7"), "the data have 10 classes, the model 7: set model.num_classes=10"),
        (("--model.model_args.width", "7"), "unknown argument 'width' of model"),
        (("--model.input_size", "9"), "latent size 9x9 is not a multiple of the patch size 2"),
        (("--model.objective.shift", "0"), "objective.shift"),
        (("--model.objective.clean_prefix", "0.5"), "must be 0 for dit_mhla_digits, a model of images"),
        (("--model.model_args.learned_variance", "true"), "must agree"),
        (("--samples.scheduler", "plms"), "unknown scheduler 'plms'"),
        (("--samples.scheduler", "ddim"), "does not fit"),
        (("--samples.classes", "[3, 10]"), "samples.classes must be from 0 to 9"),
        (("--model.model_args.class_dropout", "0.0"), "needs a model with a null class"),
        (("--model.vae", "/nowhere/vae"), "is not a folder, a hub id"),
        (("--model.checkpoint", "absent.ckpt"), "no checkpoint at absent.ckpt"),
        (("--data.dataset", "latents"), "needs root"),
        (("--data.dataset", "wds/"), "is a stream"),
        (("--data.dataset", "folder", "--data.root", "/nowhere"), "does not exist"),
        (("--data.stills.split", "x"), "--data.stills.split has no effect: data.stills.share is 0"),
        (("--data.root", "x"), "dataset 'digits' needs no files and takes no root, got 'x'"),
        (("--data.batch_size", "2000"), "fewer than one global batch"),
        (("--ckpt_path", "last"), "no checkpoint at"),
    ],
)
def test_wrong_options(
    options: tuple[str, ...], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "tiny.yaml")
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run", *options) == 2
    captured = capfd.readouterr().err
    assert message in captured and "Traceback" not in captured
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_clips_that_continue_known_frames_may_lose_their_class() -> None:
    options = {"input_size": [4, 16, 16], "objective": ObjectiveConfig(clean_prefix=0.5, prefix_class_dropout=0.25)}
    module = ImageGenerator("dit_video_mhla_digits", **options, model_args={"depth": 1, "embed_dim": 16})
    torch.manual_seed(0)
    labels, times = torch.full((20000,), 7), torch.tensor([[0.0, 0, 500, 500], [500, 500, 500, 500]]).repeat(10000, 1)
    continued, whole = module._without_some(labels, times).view(-1, 2).unbind(1)
    assert set(continued.tolist()) == {7, module.num_classes} and (whole == 7).all()
    assert (continued == 7).float().mean() == pytest.approx(0.75, abs=0.01)
    with pytest.raises(InputError, match=r"prefix_class_dropout needs a model with a null class"):
        ImageGenerator("dit_video_mhla_digits", **options, model_args={"depth": 1, "class_dropout": 0.0})


def test_clean_first_frames_of_a_causal_model_are_whole_blocks() -> None:
    network = {"depth": 1, "embed_dim": 16, "block_grid": (2, 2, 2), "cpe": False, "core_args": {"causal": "rows"}}
    options = {"input_size": [8, 16, 16], "objective": ObjectiveConfig(clean_prefix=0.5)}
    module = ImageGenerator("dit_video_mhla_digits", **options, model_args={**network, "patch_size": (2, 4, 4)})
    torch.manual_seed(0)
    clean = (module._draw_times(torch.empty(500, 1, 8, 16, 16)) == 0).sum(1)
    assert set(clean.tolist()) == {0, 4}
    with pytest.raises(InputError, match=r"causal='rows' needs objective.kind=flow"):
        ImageGenerator("dit_video_mhla_digits", model_args=network, objective=ObjectiveConfig(kind="ddpm"))


def test_another_objective_does_not_continue_a_run(reference: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = reference / "config.yaml"
    assert run("validate", "-c", config, "--ckpt_path", "last", "--model.objective.shift", 2) == 2
    assert "was trained with objective" in capfd.readouterr().err


def test_scores_while_training(tmp_path: Path) -> None:
    """With the features of an untrained classifier, which is an extractor like any other."""
    features, config = tmp_path / "features.safetensors", write_config(tmp_path / "tiny.yaml", trainer__max_epochs=2)
    torch.manual_seed(0)
    header = {"model_name": "deit_linear_digits", "model_args": '{"depth": 1}'}
    save_file(timm.create_model("deit_linear_digits", depth=1).state_dict(), features, metadata=header)
    options = ("--fid.every_n_epochs", 2, "--fid.features", features, "--fid.num", 60, "--fid.steps", 2)
    options += ("--fid.real", "digits[:100]")
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run", *options) == 0
    rows = read_csv(tmp_path / "run" / "metrics.csv")
    assert [bool(row["val/fid"]) for row in rows] == [False] * 5 + [True]
    assert float(rows[5]["val/fid"]) > 0


def test_latents_of_an_autoencoder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Cache, train with grids that are decoded, sample: the autoencoder is in none of the checkpoints."""
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    sizes = {"block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
    diffusers.AutoencoderKL(**blocks, **sizes, scaling_factor=0.7).save_pretrained(tmp_path / "vae")
    vae = load_autoencoder(str(tmp_path / "vae"))
    write_cache(
        Digits("validation", 3),
        vae,
        CacheRequest(vae="none", out=tmp_path / "latents", image_size=16, workers=0),
        "digits",
    )
    samples = PreparedSamples(LatentShards(tmp_path / "latents", seed=3))
    first, again, later = (samples[SampleKey(5, epoch, 0)][0] for epoch in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, later)  # drawn from their moments in each epoch
    config = write_config(
        tmp_path / "tiny.yaml",
        model__vae=str(tmp_path / "vae"),
        model__model_args={"in_channels": 4, "depth": 1, "embed_dim": 16, "num_heads": 2},
        data={"dataset": "latents", "root": str(tmp_path / "latents"), "val_split": None, "batch_size": 8},
        data__num_workers=0,
    )
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 0
    checkpoint = load(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert all(name.startswith(("net.", "val_loss")) for name in checkpoint["state_dict"])
    assert checkpoint["headmix_vision"]["vae"] == str(tmp_path / "vae")
    assert len(list((tmp_path / "run" / "samples").iterdir())) == 4
    sample(["images", "--model", str(tmp_path / "run"), "--num", "2", "--steps", "2", "--out", str(tmp_path / "out")])
    with Image.open(tmp_path / "out" / "images" / "000001.png") as image:
        assert image.size == (16, 16) and image.mode == "RGB"
    for options, message in (
        (("--model.input_size", 16), "the latents of .* are of shape [4, 8, 8], the network takes [4, 16, 16]"),
        (("--data.val_split", "val"), "has no folder val: set data.val_split=null"),
        (("--model.vae", "null"), "set model.vae to see samples"),
    ):
        assert run("fit", "-c", config, "--run_dir", tmp_path / "other", *options) == 2
        assert message.split(" .* ")[-1] in capfd.readouterr().err
    options = ("--model.vae", "null", "--samples.every_n_steps", "null")
    assert run("fit", "-c", config, "--run_dir", tmp_path / "undecoded", *options) == 0
    assert f"headmix sample images --model {tmp_path / 'undecoded'} --vae {tmp_path / 'vae'}" in capfd.readouterr().out
    text = config.read_text().replace(f"vae: {tmp_path / 'vae'}", "vae: owner/other")
    (tmp_path / "other.yaml").write_text(text)
    assert run("fit", "-c", tmp_path / "other.yaml", "--run_dir", tmp_path / "other") == 2
    assert f"the latents of {tmp_path / 'latents'}: give --model.vae {tmp_path / 'vae'}" in capfd.readouterr().err
    (tmp_path / "splits").mkdir()
    (tmp_path / "latents").rename(tmp_path / "splits/train")
    other = (tmp_path / "other.yaml", "--data.root", tmp_path / "splits")
    assert run("fit", "-c", *other, "--run_dir", tmp_path / "other") == 2
    assert f"the latents of {tmp_path / 'splits'}: give --model.vae {tmp_path / 'vae'}" in capfd.readouterr().err


def test_small_image_folder(tmp_path: Path) -> None:
    for split, count in (("train", 8), ("val", 4)):
        for name, value in (("dark", 30), ("light", 220)):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (20, 14), (value, value, i)).save(folder / f"{i}.png")
    config = write_config(
        tmp_path / "tiny.yaml",
        model__num_classes=2,
        model__model_args={"in_channels": 3, "depth": 1, "embed_dim": 16, "num_heads": 2},
        samples__classes=None,
        data={"dataset": "folder", "root": str(tmp_path / "pictures"), "batch_size": 8, "hflip": 0.5, "num_workers": 0},
    )
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 0
    about = load(tmp_path / "run" / "checkpoints" / "last.ckpt")["headmix_vision"]
    assert about["class_names"] == ["dark", "light"]
