"""What a training run leaves behind, and the arithmetic of its parts."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from inputs import photo
from lightning.pytorch import LightningModule, Trainer

from headmix_vision.errors import InputError
from headmix_vision.runs.directory import LAST
from headmix_vision.training import TrainingRequest, base_cli, train
from headmix_vision.training.callbacks import progress_display
from headmix_vision.training.callbacks.curves import LearningCurves
from headmix_vision.training.callbacks.ema import EmaWithWarmup, WarmedUpAverage, ema_decay
from headmix_vision.training.classifier import ClassificationMetrics, ImageClassifier
from headmix_vision.training.options import MONITORED

from .helpers import TINY, assert_equal, load, read_csv, run, write_config


def test_run_directory(reference_run: Path) -> None:
    names = {path.name for path in reference_run.iterdir()}
    assert names == {"config.yaml", "metrics.csv", "tensorboard", "checkpoints", "curves.svg"}
    assert {path.name for path in (reference_run / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    assert ">val/top1</text>" in (reference_run / "curves.svg").read_text()
    config = yaml.safe_load((reference_run / "config.yaml").read_text())
    assert config["run_dir"] == str(reference_run)
    assert config["model"]["name"] == TINY["model"]["name"]


def test_python_trains_and_validates_as_the_commands_do(reference_run: Path, tmp_path: Path) -> None:
    config, run_dir = write_config(tmp_path / "tiny.yaml"), tmp_path / "run"
    options = {"trainer.max_epochs": 1, "model.model_args": TINY["model"]["model_args"], "model.checkpoint": None}
    request = TrainingRequest(kind="classifier", configs=[config], options=options, run_dir=run_dir)
    assert train(request).run_dir == run_dir
    first, last = (load(run_dir / "checkpoints" / "last.ckpt"), read_csv(run_dir / "metrics.csv")[-1])
    assert first["epoch"] == 0
    with pytest.raises(InputError, match="already holds a run"):
        train(request)
    validated = train(TrainingRequest(kind="classifier", action="validate", run_dir=run_dir, checkpoint="last"))
    assert f"{validated.metrics['val/loss']:.6f}" == f"{float(last['val/loss']):.6f}"
    train(replace(request, overwrite=True, options={}))
    assert_equal(load(run_dir / "checkpoints/last.ckpt")["state_dict"], load(reference_run / LAST)["state_dict"])
    with pytest.raises(InputError, match="action must be one of fit, validate, test, predict"):
        TrainingRequest(kind="classifier", action="sample")  # type: ignore[arg-type]


def test_without_validation_the_last_checkpoint_is_tested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As for the last training of a model on all pictures, of which no part is left to choose by."""
    run_dir = tmp_path / "run"
    splits = {"data__train_split": "all", "data__val_split": None, "data__test_split": "validation"}
    config = write_config(tmp_path / "tiny.yaml", trainer__max_epochs=1, **splits)
    assert run("fit", "-c", config, "--run_dir", run_dir) == 0
    assert f"run {run_dir} · checkpoint {run_dir / LAST}" in capsys.readouterr().out
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["last.ckpt"]
    assert run("test", "--run_dir", run_dir) == 0
    assert (run_dir / "classes_test.csv").is_file()


def test_metrics_have_one_row_per_step(reference_run: Path) -> None:
    rows = read_csv(reference_run / "metrics.csv")
    assert [int(row["step"]) for row in rows] == list(range(6))
    validated = [row for row in rows if row["val/top1"]]
    assert [int(row["epoch"]) for row in validated] == [0, 1]
    for row in validated:
        assert all(row[name] for name in ("train/loss", "val/loss", "val/top5"))


def test_the_seed_reaches_model_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = ImageClassifier.training_step, []

    def record(self: ImageClassifier, batch: Any, batch_idx: int) -> torch.Tensor:
        seen.append((self.seed, self.trainer.datamodule.seed, batch[1].tolist(), float(torch.rand(()))))  # type: ignore[attr-defined]
        return original(self, batch, batch_idx)

    monkeypatch.setattr(ImageClassifier, "training_step", record)
    short = {"trainer__max_epochs": 1, "trainer__limit_train_batches": 1, "trainer__limit_val_batches": 0}
    config = write_config(tmp_path / "tiny.yaml", **short, trainer__accumulate_grad_batches=1)
    for name in ("one", "two"):
        assert run("fit", "-c", config, "--run_dir", tmp_path / name, "--seed_everything", len(seen) + 5) == 0
    (first, second) = seen
    assert first[:2] == (5, 5) and second[:2] == (6, 6)
    assert first[2] != second[2] and first[3] != second[3]


@pytest.mark.parametrize("monitor", ["val/top1", "val/balanced", "val/loss"])
def test_the_best_checkpoint_and_the_line_at_the_end_are_of_what_is_monitored(
    monitor: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    best, epochs = {"val/loss": 0, "val/balanced": 1, "val/top1": 2}, iter(range(3))

    def compute(metrics: ClassificationMetrics) -> dict[str, torch.Tensor]:  # each is best in an epoch of its own
        epoch = next(epochs)
        values = {
            name: 0.6 if (best.get(name) == epoch) == (name != "val/loss") else 0.3 for name in (*MONITORED, "val/top5")
        }
        return {name.removeprefix("val/"): torch.tensor(value) for name, value in values.items()}

    monkeypatch.setattr(ClassificationMetrics, "compute", compute)
    config = write_config(tmp_path / "tiny.yaml", trainer__max_epochs=3, trainer__num_sanity_val_steps=0)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run", "--best.monitor", monitor) == 0
    last = capfd.readouterr().out.strip().splitlines()[-1]
    found = "0.3000" if monitor == "val/loss" else "60.00 %"
    assert last.startswith(f"best {MONITORED[monitor]} {found} (epoch {best[monitor] + 1})")
    assert load(tmp_path / "run" / "checkpoints" / "best.ckpt")["epoch"] == best[monitor]
    for name in ("run", "run/checkpoints/best.ckpt", "run/curves.svg"):
        assert str(tmp_path / name) in last


def test_a_run_keeps_to_what_its_best_checkpoint_is_of(
    reference_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = Path(shutil.copytree(reference_run, tmp_path / "run"))
    best = (copied / "checkpoints" / "best.ckpt").read_bytes()
    command = ("fit", "--run_dir", copied, "--ckpt_path", "last", "--trainer.max_epochs", 3)
    assert run(*command, "--best.monitor", "val/balanced") == 2
    assert capsys.readouterr().err.endswith("is that of val/top1, not of val/balanced: set best.monitor=val/top1\n")
    assert (copied / "checkpoints" / "best.ckpt").read_bytes() == best


def test_a_run_goes_on_without_its_best_checkpoint_but_not_beside_a_damaged_one(
    reference_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = Path(shutil.copytree(reference_run, tmp_path / "run"))
    best = copied / "checkpoints" / "best.ckpt"
    best.write_bytes(best.read_bytes()[:-1000])
    command = ("fit", "--run_dir", copied, "--ckpt_path", "last", "--trainer.max_epochs", 3)
    assert run(*command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the best checkpoint of the run cannot be opened: ")
    assert line.endswith(f"delete {best} to go on without it")
    best.unlink()
    assert run(*command, "--dry_run") == 0


def test_curves_are_drawn_between_epochs_when_the_interval_is_over(tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    rows = [{"step": 5.0, "epoch": 0.0, "train/loss": 1.0, "val/top1": 0.5}]
    for interval_s in (60.0, 0.0):
        curves = LearningCurves(tmp_path / "curves.svg", lambda: rows, min_interval_s=interval_s)
        curves.on_train_epoch_start(trainer, LightningModule())
        assert (tmp_path / "curves.svg").exists() == (interval_s == 0)


def test_lines_in_a_log_that_is_no_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "tiny.yaml", trainer__enable_progress_bar=None, trainer__enable_model_summary=None)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run", "--trainer.check_val_every_n_epoch", 2) == 0
    captured = capfd.readouterr()
    assert "\r" not in captured.out + captured.err
    assert "FLOP" not in captured.out + captured.err
    first, *epochs, _ = captured.out.splitlines()
    assert re.fullmatch(r"model vit_tiny_patch16_224: [\d,]+ parameters", first)
    numbers = [re.sub(r"\d+\.?\d*", "N", line) for line in epochs]
    assert numbers == [
        "epoch N/N: loss N, N images/s, N s left",
        "epoch N/N: loss N, val loss N, val top-N N %, val balanced N %, N images/s, took N s",
    ]
    rows = read_csv(tmp_path / "run" / "metrics.csv", without="")
    rates = [float(row["train/images_per_s"]) for row in rows if row["train/loss"]]
    assert rates == pytest.approx([int(line.split(" images/s")[0].split()[-1]) for line in epochs], abs=1)
    assert f"loss {float(rows[-1]['train/loss']):.4f}, val loss {float(rows[-1]['val/loss']):.4f}, " in epochs[1]
    photo(size=(8, 8)).save(tmp_path / "image.png")
    predict = ("predict", "--data.predict_path", tmp_path / "image.png")
    for command, said in (
        (("validate",), "validating: 2/2"),
        (("test",), "testing: 23/23"),
        (predict, "predicting: 1/1"),
    ):
        assert run(*command, "--run_dir", tmp_path / "run") == 0
        captured = capfd.readouterr()
        assert "\r" not in captured.out + captured.err and f"{said} batches, " in captured.err


def test_a_terminal_gets_a_bar_with_loss_and_speed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_cli, "is_terminal", lambda stream: True)
    monkeypatch.setattr(progress_display.ImagesPerSecondBar.__init__, "__defaults__", (1,))
    config = write_config(tmp_path / "tiny.yaml", trainer__enable_progress_bar=None, trainer__max_epochs=1)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 0
    captured = capfd.readouterr()
    *_, last = re.findall(r"loss=([\d.]+), images/s=(\d+)", captured.out + captured.err)
    (row,) = [row for row in read_csv(tmp_path / "run" / "metrics.csv", without="") if row["train/loss"]]
    assert 0 < float(last[0]) < 2 * float(row["train/loss"]) and int(last[1]) > 0 and "v_num" not in captured.err


def test_an_epoch_that_is_cut_short_has_no_loss_and_the_run_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    short = {"trainer__limit_val_batches": 0, "trainer__limit_train_batches": 2, "trainer__accumulate_grad_batches": 1}
    config = write_config(tmp_path / "tiny.yaml", **short, trainer__max_steps=3, trainer__enable_progress_bar=None)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 0
    *_, first, second, last = capfd.readouterr().out.splitlines()
    assert "loss" in first and re.fullmatch(r"epoch 2/2: took \d+ s", second)
    assert last == f"run {tmp_path}/run · checkpoint {tmp_path}/run/checkpoints/last.ckpt"
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file()


def test_run_directory_is_named_after_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "tiny.yaml", trainer__max_epochs=1, trainer__limit_train_batches=1)
    assert run("fit", "-c", "tiny.yaml") == 0
    assert (tmp_path / "runs" / "tiny" / "config.yaml").exists()
    assert run("validate", "-c", "runs/tiny/config.yaml", "--ckpt_path", "best") == 0


def test_validate_reproduces_the_logged_accuracy(reference_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("validate", "-c", reference_run / "config.yaml", "--ckpt_path", "last") == 0
    logged = float(read_csv(reference_run / "metrics.csv")[-1]["val/loss"])
    table = capfd.readouterr().out
    assert "last.ckpt (EMA of step 6" in table
    printed = next(line for line in table.splitlines() if "val/loss" in line)
    assert float(printed.replace("│", " ").split()[-1]) == pytest.approx(logged, rel=1e-6)


def test_learning_rate_is_stepped_per_optimizer_step(reference_run: Path) -> None:
    rates = [float(row["lr"]) for row in read_csv(reference_run / "metrics.csv")]
    warmup = 2  # half an epoch of 3 steps, rounded
    expected = [1e-6 + (1e-3 - 1e-6) * t / warmup for t in range(warmup)]
    expected += [
        1e-5 + 0.5 * (1e-3 - 1e-5) * (1 + torch.cos(torch.tensor(torch.pi * t / 6)).item()) for t in range(warmup, 6)
    ]
    assert rates == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("batches", "accumulate"), [(5, 2), (3, 8)])
def test_warmup_takes_the_steps_of_its_epochs(batches: int, accumulate: int, tmp_path: Path) -> None:
    """Where the accumulation does not divide an epoch Lightning steps at the end of the epoch as well."""
    trainer = {"trainer__limit_train_batches": batches, "trainer__accumulate_grad_batches": accumulate}
    schedule = {"model__schedule": {"sched": "constant", "warmup_epochs": 1}, "trainer__max_epochs": 3}
    config = write_config(tmp_path / "tiny.yaml", **trainer, **schedule, trainer__limit_val_batches=0)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 0
    steps = [row for row in read_csv(tmp_path / "run" / "metrics.csv") if row["lr"]]
    assert len(steps) == load(tmp_path / "run" / "checkpoints" / "last.ckpt")["global_step"]
    full = max(float(row["lr"]) for row in steps)
    assert [float(row["lr"]) == full for row in steps] == [int(row["epoch"]) > 0 for row in steps]


def test_command_line_wins_over_the_checkpoint_on_resuming(tmp_path: Path) -> None:
    config = write_config(tmp_path / "tiny.yaml", trainer__max_epochs=1)
    run_dir = tmp_path / "run"
    assert run("fit", "-c", config, "--run_dir", run_dir) == 0
    changes = ("--trainer.max_epochs", 2, "--model.optimizer.lr", 0.01, "--model.optimizer.weight_decay", 0.3)
    assert run("fit", "-c", run_dir / "config.yaml", "--ckpt_path", "last", *changes) == 0
    (state,) = load(run_dir / "checkpoints" / "last.ckpt")["optimizer_states"]
    assert {group["weight_decay"] for group in state["param_groups"]} == {0.0, 0.3}
    expected = 1e-5 + 0.5 * (0.01 - 1e-5) * (1 + torch.cos(torch.tensor(torch.pi * 3 / 6)).item())
    assert float(read_csv(run_dir / "metrics.csv")[3]["lr"]) == pytest.approx(expected, rel=1e-5)


def test_accumulation_equals_the_large_batch(tmp_path: Path) -> None:
    common: dict[str, Any] = {
        "model__mixup": {"mixup_alpha": 0.0, "cutmix_alpha": 0.0},
        "model__model_args": {**TINY["model"]["model_args"], "drop_path_rate": 0.0},
        "trainer__max_epochs": 1,
    }
    small = write_config(tmp_path / "small.yaml", **common)
    change = {"data__batch_size": 16, "trainer__accumulate_grad_batches": 1, "trainer__limit_train_batches": 3}
    large = write_config(tmp_path / "large.yaml", **common, **change)
    for config in (small, large):
        assert run("fit", "-c", config, "--run_dir", tmp_path / config.stem) == 0
    states = [load(tmp_path / name / "checkpoints" / "last.ckpt") for name in ("small", "large")]
    assert states[0]["global_step"] == states[1]["global_step"] == 3
    for name, value in states[0]["current_model_state"].items():
        # float32 sums in another order; Adam's normalisation magnifies them where a gradient is close to zero
        torch.testing.assert_close(value, states[1]["current_model_state"][name], rtol=1e-4, atol=2e-5)


def test_ema_warms_up_and_keeps_constants() -> None:
    assert [ema_decay(n, 0.5) for n in (0, 1, 8, 100)] == [0.1, 2 / 11, 0.5, 0.5]
    model = torch.nn.Linear(2, 2, bias=False)
    model.register_buffer("index", torch.tensor([7, 11]))
    model.register_buffer("constant", torch.tensor([0.1, 0.7]))
    average = WarmedUpAverage(model, 0.5)
    expected = model.weight.detach().clone()
    for n in range(12):
        model.weight.data.normal_()
        average.update_parameters(model)
        decay = 0.0 if n == 0 else ema_decay(n, 0.5)
        expected = decay * expected + (1 - decay) * model.weight.detach()
        torch.testing.assert_close(average.module.weight.detach(), expected)
        assert_equal(average.module.index, model.index)
        assert_equal(average.module.constant, model.constant)


def test_ema_follows_the_model_to_its_device_and_counts_on_the_cpu() -> None:
    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 2)

    module, trainer, callback = Module(), Trainer(logger=False), EmaWithWarmup(0.5)
    callback.setup(trainer, module, "fit")  # Lightning calls this before it moves the module
    module.to("meta")
    callback.on_fit_start(trainer, module)
    assert callback.average is not None and callback.average.device.type == "meta"
    assert {x.device.type for x in callback.average.state_dict().values()} == {"meta"}
    assert callback._average_model is not None and callback._average_model.n_averaged.device.type == "cpu"


def test_the_average_is_as_precise_as_the_weights(tmp_path: Path) -> None:
    config = write_config(tmp_path / "tiny.yaml", trainer__max_epochs=1, trainer__precision="64-true")
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 0
    checkpoint = load(tmp_path / "run" / "checkpoints" / "last.ckpt")
    for state in ("state_dict", "current_model_state"):
        assert {x.dtype for x in checkpoint[state].values() if x.is_floating_point()} == {torch.float64}


def test_soft_binary_cross_entropy_and_no_ema(tmp_path: Path) -> None:
    config = write_config(tmp_path / "tiny.yaml", model__loss={"kind": "bce", "smoothing": 0.1}, ema={"decay": None})
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run", "--trainer.max_epochs", 1) == 0
    checkpoint = load(tmp_path / "run" / "checkpoints" / "best.ckpt")
    assert "current_model_state" not in checkpoint
