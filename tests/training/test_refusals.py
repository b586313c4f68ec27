"""Wrong input: one line, exit status 2, nothing done."""

import os
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from headmix_vision.errors import InputError
from headmix_vision.runs.checkpoints import read_checkpoint
from headmix_vision.runs.networks import create_network

from .helpers import load, run, write_config

SHARDED = ("--trainer.strategy", "headmix_vision.training.sharding.ShardedStrategy")


def refused(capfd: pytest.CaptureFixture[str], *args: object) -> str:
    capfd.readouterr()
    assert run(*args) == 2
    captured = capfd.readouterr().err
    lines = [line for line in captured.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "Traceback" not in captured
    assert "usage:" not in captured
    return lines[0]


def test_second_run_in_the_same_directory(
    reference_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = (reference_run / "metrics.csv").read_bytes()
    config = write_config(tmp_path / "tiny.yaml")
    message = refused(capfd, "fit", "-c", config, "--run_dir", reference_run)
    for way_out in ("--ckpt-path last", "--run-dir", "--overwrite"):
        assert way_out in message
    both = ("--ckpt_path", "last", "--overwrite", "true")
    assert "would delete" in refused(capfd, "fit", "-c", config, "--run_dir", reference_run, *both)
    assert (reference_run / "metrics.csv").read_bytes() == before


def test_another_optimizer_cannot_go_on(reference_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copied = shutil.copytree(reference_run, tmp_path / "run")
    changed = ("--run_dir", copied, "--ckpt_path", "last", "--trainer.max_epochs", 3, "--model.optimizer.opt", "lion")
    message = refused(capfd, "fit", "-c", copied / "config.yaml", *changed)
    assert "model.optimizer.opt=lion cannot go on with the state of adamw" in message


def test_overwrite_replaces_the_run_only(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "tiny.yaml", trainer__max_epochs=1)
    assert run("fit", "-c", config, "--run_dir", run_dir) == 0
    (run_dir / "notes.txt").write_text("mine")
    assert run("fit", "-c", config, "--run_dir", run_dir, "--overwrite", "true", "--seed_everything", 4) == 0
    assert {path.name for path in run_dir.iterdir()} == {
        *("notes.txt", "config.yaml", "metrics.csv", "tensorboard", "checkpoints", "curves.svg")
    }
    assert "seed_everything: 4" in (run_dir / "config.yaml").read_text()
    assert "\noverwrite:" not in (run_dir / "config.yaml").read_text()


class Bomb:
    """Creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_bad_checkpoints(reference_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good = reference_run / "checkpoints" / "last.ckpt"
    trace = tmp_path / "executed"
    files = {name: tmp_path / f"{name}.ckpt" for name in ("truncated", "bomb", "pickle", "foreign", "text")}
    files["truncated"].write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    torch.save({**load(good), "extra": Bomb(trace)}, files["bomb"])
    files["pickle"].write_bytes(pickle.dumps(Bomb(trace)))
    torch.save({"state_dict": {"weight": torch.zeros(1)}}, files["foreign"])
    files["text"].write_text("not a checkpoint")
    expected = {
        "truncated": "truncated",
        "bomb": "objects other than tensors",
        "pickle": "is not a checkpoint",
        "foreign": "not written by this package",
        "text": "is not a checkpoint",
    }
    for name, path in files.items():
        with pytest.raises(ValueError, match=expected[name]):
            read_checkpoint(path)
    config = reference_run / "config.yaml"
    assert "objects other than" in refused(capfd, "validate", "-c", config, "--ckpt_path", files["bomb"])
    assert "truncated" in refused(capfd, "fit", "-c", config, "--ckpt_path", files["truncated"])
    assert not trace.exists()


def test_checkpoint_of_another_model(reference_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    args = ("validate", "-c", reference_run / "config.yaml", "--ckpt_path", "last")
    assert "of model vit_tiny_patch16_224, not of" in refused(capfd, *args, "--model.name", "vit_small_patch16_224")
    assert "has 10 classes, the model 12" in refused(capfd, *args, "--model.num_classes", 12)
    assert "another shape" in refused(capfd, *args, "--model.model_args.embed_dim", 48)
    assert "lacks" in refused(capfd, *args, "--model.model_args.depth", 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model.name", "vit_tinny_patch16_224"), "did you mean"),
        (("--model.num_classes", "7"), "the model has 7 classes, the data 10: set model.num_classes=10"),
        (("--data.batch_size", "7"), "even data.batch_size"),
        (("--checkpoint_every_n_steps", "0"), "at least 1"),
        (("--ckpt_path", "last"), "no checkpoint at"),
        (("--trainer.precision", "bf16-true"), "float32 weights"),
        (("--trainer.precision", "bf17"), "'64-true', '64', '32', '16', 'bf16' or null, got bf17"),
        (("--model.loss.kind", "mse"), "model.loss.kind must be 'cross_entropy' or 'bce', got mse"),
        (("--model.img_size", "[a]"), "model.img_size must be int, list[int] or null, got ['a']"),
        (("--data.batch_size", "2.5"), "data.batch_size must be int, got 2.5"),
        (("--trainer.accelerator", "cdua"), "invalid accelerator name"),
        (("--trainer.devices", "0"), "devices='0'"),
        (("--trainer.strategy", "fsdp3"), "invalid strategy name: `strategy='fsdp3'`"),
        ((*SHARDED, "--trainer.strategy.shard_size", "1.5"), "trainer.strategy.shard_size must be int or null"),
        ((*SHARDED, "--trainer.strategy.shard_sise", "1"), "trainer.strategy has no 'shard_sise'; did you mean"),
        ((*SHARDED, "--trainer.strategy.reshard_after_forward", "null"), "reshard_after_forward must be true or false"),
        (("--trainer.strategy.shard_size", "1"), "goes with a class path as trainer.strategy, not with auto"),
        (("--trainer.max_epochs", "0"), "trainer.max_epochs must be at least 1, or -1 for no limit, got 0"),
        (("--trainer.accumulate_grad_batches", "0"), "trainer.accumulate_grad_batches must be at least 1"),
        (("--trainer.accumulate_grad_batches", "9" * 30), "trainer.accumulate_grad_batches must be at most 2147483647"),
        (("--model.num_classes", "1"), "model.num_classes must be at least 2, got 1"),
        (("--model.model_args.dept", "3"), "unknown argument 'dept' of model vit_tiny_patch16_224"),
        (("--model.model_args.dept", "3"), "did you mean depth?; allowed: act_layer, "),
        (("--model.model_args.num_heads", "5"), "dim should be divisible by num_heads"),
        (("--model.model_args.drop_path_rate", "2"), "drop_path_rate of model vit_tiny_patch16_224 must be in [0, 1)"),
        (("--model.optimizer.opt", "adamv"), "did you mean adam"),
        (("--model.optimizer.args.betas", "[2, 3]"), "Invalid beta parameter"),
        (("--model.optimizer.lr", ".inf"), "optimizer.lr must be positive and finite"),
        (("--data.bath_size", "3"), "unrecognized arguments: --data.bath_size 3; did you mean --data.batch_size?"),
        (("--lr", "3"), "did you mean --model.optimizer.lr?"),
        (("--trainer.val_check_interval", "7"), "trainer.val_check_interval is 7, but an epoch has 6 batches"),
        (("--seed_everything", "-1"), "seed_everything must be in [0, 2**32), got -1"),
        (("--trainer.val_check_interval", "0"), "trainer.val_check_interval must be above 0, got 0"),
        (("--trainer.max_time", "00:00:00:00"), "trainer.max_time must be a time above 0, got 00:00:00:00"),
        (("--trainer.max_time", "soon"), "trainer.max_time=soon: "),
        (("--trainer.limit_train_batches", "0"), "trainer.limit_train_batches=0 leaves nothing to fit"),
        (("--trainer.min_epochs", "-1"), "trainer.min_epochs must be at least 1, got -1"),
        (("--trainer.min_epochs", "5"), "trainer.min_epochs=5 is above trainer.max_epochs=2"),
        (("--trainer.precision", "transformer-engine"), "'transformer_engine>=0.11.0' not met"),
        (("--trainer.accelerator", "tpu"), "torch_xla"),
        (("--trainer.strategy", "deepspeed"), "DeepSpeed installed"),
        (("--trainer.strategy", "ddp_spawn", "--trainer.devices", "2"), "trainer.strategy=ddp_spawn copies a process"),
        (("--trainer.profiler", "foo"), "it can only be one of"),
        (("--data.val_split", ""), "data.val_split is an empty text"),
        (("--ckpt_path", ""), "ckpt_path is an empty text"),
        (("--trainer.accelerator", "/dev/null"), "/dev/null is a device, it must be a regular file"),
        (("--data=/dev/zero",), "/dev/zero is a device, it must be a regular file"),
        (("-c", "data: 3"), "data must be a mapping of options to values, got '3'"),
        (("-c", "ema: null"), "ema must be a mapping of options to values, got 'None'"),
        (("-c", "model: {loss: [1]}"), "model.loss must be a mapping of options to values, got '[1]'"),
        (("--foo", "3"), "--help-all shows all options"),
        (("--model.mixup.cutmix_alpha", "1e-320"), "mixup.cutmix_alpha must be a finite number from 1e-06 to 1e+06"),
        (("--model.schedule.warmup_epochs", "2.5"), "warmup_epochs=2.5 is longer than the run of 2 epochs"),
        (("--data.holdout_every", "1500"), "holdout_every=1500 is more than the 1437 images"),
    ],
)
def test_wrong_options(
    options: tuple[str, ...], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "tiny.yaml")
    assert message in refused(capfd, "fit", "-c", config, "--run_dir", tmp_path / "run", *options)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("command", "options", "cause"),
    [
        ("fit", ("--early_stopping.monitor", "val/loss"), "early_stopping.patience is null"),
        ("fit", ("--analysis.images=3",), "analysis.every_n_epochs is null"),
        (
            "fit",
            ("--model.mixup.switch_prob", "0.3", "--model.mixup.cutmix_alpha", "0"),
            "for mixup and CutMix together",
        ),
        ("fit", ("--model.schedule.warmup_lr", "0", "--model.schedule.warmup_epochs", "0"), "warmup_epochs is 0"),
        ("fit", ("--data.val_split", "all", "--data.holdout_every", "5"), "the samples of data.holdout_every"),
        ("fit", ("--model.checkpoint", "x.pth", "--ckpt_path", "last"), "weights come from --ckpt-path"),
        ("fit", ("--trainer.logger", "false"), "a run directory has its own files"),
        ("fit", ("--trainer.model_registry", "x"), "a run directory has its own files"),
        ("validate", ("--ema.decay", "null"), "it is for fit"),
        ("test", ("--overwrite",), "it is for fit"),
    ],
)
def test_given_options_without_effect(
    command: str, options: tuple[str, ...], cause: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "tiny.yaml")
    name = options[0].partition("=")[0]
    line = refused(capfd, command, "-c", config, "--run_dir", tmp_path / "run", *options)
    assert line.startswith(f"error: {name} has no effect: ") and cause in line


def test_options_of_a_recipe_may_have_no_effect(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    idle = {"early_stopping": {"min_delta": 0.1}, "analysis": {"images": 3}}
    schedule = {"sched": "constant", "min_lr": 0.0}  # and the warm-up of 10 epochs that nobody asked for
    config = write_config(tmp_path / "tiny.yaml", **idle, model__schedule=schedule)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run", "--dry_run") == 0
    assert "warmup_epochs=10 is longer than the run of 2 epochs" in capfd.readouterr().err


def test_a_warm_up_that_is_longer_than_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "tiny.yaml", model__schedule={"warmup_epochs": 1.5})
    fit = ("fit", "-c", config, "--run_dir", tmp_path / "run", "--dry_run")
    assert run(*fit) == 0
    longer = "warmup_epochs=1.5 is longer than the run of 1 epochs"
    assert run(*fit, "--trainer.max_epochs", 1) == 0, "a recipe is tried"
    assert f"note: model.schedule.{longer}" in capfd.readouterr().err
    assert longer in refused(capfd, *fit, "--trainer.max_epochs", 1, "--model.schedule.warmup_epochs", 1.5)


def test_wrong_config_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = {
        "broken: [1, 2": "broken.yaml",
        "- 1": "list.yaml",
        "model:\n  nmae: vit_tiny_patch16_224": "typo.yaml",
    }
    messages = [
        "Problems parsing config",
        "Unexpected config",
        "does not accept option 'model.nmae'; did you mean --model.name?",
    ]
    for (text, name), message in zip(files.items(), messages, strict=True):
        (tmp_path / name).write_text(text)
        assert message in refused(capfd, "fit", "-c", tmp_path / name)
    assert "neither a file nor" in refused(capfd, "fit", "-c", tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    assert "is not text" in refused(capfd, "fit", "-c", tmp_path / "binary.yaml")


def test_start_weights_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "text.pth").write_text("abc")
    with pytest.raises(InputError, match="holds no readable weights"):
        create_network("deit_mhla_digits", checkpoint=str(tmp_path / "text.pth"))


def test_batch_too_large_for_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def exhausted(*args: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."
        )

    monkeypatch.setattr("headmix_vision.training.classifier.ImageClassifier.training_step", exhausted)
    config = write_config(tmp_path / "tiny.yaml")
    message = refused(capfd, "fit", "-c", config, "--run_dir", tmp_path / "run")
    assert message.endswith("Tried to allocate 2.00 GiB; lower data.batch_size or data.eval_batch_size")


@pytest.mark.parametrize("name", ["global_step", "loops", "optimizer_states", "pytorch-lightning_version"])
def test_checkpoints_that_lack_an_entry(
    name: str, reference_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = load(reference_run / "checkpoints" / "last.ckpt")
    del checkpoint["values_sha256"]
    wrong = "must be a whole number" if name == "global_step" else "is not a "
    for change, message in (({name: None}, wrong), ({}, "lacks the entry")):
        torch.save({**{k: v for k, v in checkpoint.items() if k != name}, **change}, tmp_path / "forged.ckpt")
        options = ("--run_dir", tmp_path / "run", "--ckpt_path", tmp_path / "forged.ckpt")
        args = ("fit", "-c", reference_run / "config.yaml", *options)
        assert f"{name!r}" in (line := refused(capfd, *args))
        assert message in line


def test_evaluation_needs_weights(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "tiny.yaml")
    assert "--ckpt-path" in refused(capfd, "validate", "-c", config)
    assert "no checkpoint at" in refused(capfd, "predict", "-c", config, "--ckpt_path", "best")
    for command, limit in (("validate", "limit_val_batches"), ("test", "limit_test_batches")):
        line = refused(capfd, command, "-c", config, "--ckpt_path", "best", f"--trainer.{limit}", 0)
        assert f"trainer.{limit}=0 leaves nothing to {command}" in line
    assert "no run in" in refused(capfd, "validate", "--run_dir", tmp_path / "absent")
    assert "a recipe by -c, or the folder of a run by --run-dir" in refused(capfd, "validate")


def test_option_groups_check_their_values(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "tiny.yaml")
    assert run("fit", "-c", config, "--model.optimizer.lr", "-1") == 2
    assert "optimizer.lr must be positive" in capfd.readouterr().err


def test_wrong_input_found_by_a_data_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fetch(*args: object) -> None:
        raise InputError("a shard is damaged")

    config = write_config(tmp_path / "tiny.yaml", data__num_workers=1)
    monkeypatch.setattr("torch.utils.data._utils.fetch._MapDatasetFetcher.fetch", fetch)  # workers are forked
    assert refused(capfd, "fit", "-c", config, "--run_dir", tmp_path / "run") == "error: a shard is damaged"


def test_a_data_worker_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "tiny.yaml", data__num_workers=1)
    fetch = "torch.utils.data._utils.fetch._MapDatasetFetcher.fetch"  # workers are forked
    monkeypatch.setattr(fetch, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if "DataLoader" in line]
    assert len(lines) == 1 and lines[0].startswith("error: DataLoader worker (pid")


def test_defects_keep_their_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ValueError("not the user's fault")

    config = write_config(tmp_path / "tiny.yaml")
    monkeypatch.setattr("headmix_vision.training.classifier.ImageClassifier.training_step", broken)
    with pytest.raises(ValueError, match="not the user's fault"):
        run("fit", "-c", config, "--run_dir", tmp_path / "run")


def test_a_folder_that_does_not_fit_its_recipe_is_refused_once_with_all_options(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for index in range(60):
        path = tmp_path / "pictures" / "train" / "abc"[index % 3] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (index, 0, 0)).save(path)
    command = ["fit", "-c", "imagenet", "--model.name", "deit_mhla_tiny", "--data.root", "pictures", "--dry-run"]
    message = refused(capfd, *command)
    options = "--data.holdout_every 5 --data.batch_size 16 --model.num_classes 3"
    assert message.endswith(f"These options fit the training split: {options}")
    assert run(*command, *options.split()) == 0
    message = refused(capfd, *command, "--data.holdout_every", 5)
    assert message.endswith("These options fit the training split: --data.batch_size 16 --model.num_classes 3")


def test_a_length_in_steps_beyond_the_epochs_is_noted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "tiny.yaml")
    for steps, noted in ((4000, True), (3, False)):
        assert run("fit", "-c", config, "--dry-run", "--trainer.max_steps", steps) == 0
        assert (f"before trainer.max_steps={steps}" in capfd.readouterr().err) == noted
