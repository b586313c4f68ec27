"""A run stops on numbers that are not finite, and keeps nothing that came of them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headmix_vision.training.callbacks import non_finite
from headmix_vision.training.callbacks.checkpointing import LastCheckpoint
from headmix_vision.training.callbacks.classifier_results import PredictionsCSV
from headmix_vision.training.callbacks.non_finite import Later, NonFiniteError, StopOnNonFinite
from headmix_vision.training.classifier import ClassificationMetrics, ImageClassifier
from headmix_vision.training.generator import ImageGenerator
from headmix_vision.training.signals import InterruptRequest

from . import gen_helpers
from .helpers import load, run, write_config


def poison_loss(epoch: int, batch: int) -> Callable[..., torch.Tensor]:
    original = ImageClassifier.training_step

    def patched(self: ImageClassifier, images: Any, batch_idx: int) -> torch.Tensor:
        loss = original(self, images, batch_idx)
        return loss * float("nan") if (self.current_epoch, batch_idx) == (epoch, batch) else loss

    return patched


def poison_gradient(epoch: int, batch: int) -> Callable[..., torch.Tensor]:
    original = ImageClassifier.training_step

    def patched(self: ImageClassifier, images: Any, batch_idx: int) -> torch.Tensor:
        loss = original(self, images, batch_idx)
        if (self.current_epoch, batch_idx) == (epoch, batch):
            # sqrt at 0 has value 0 and an infinite slope
            loss = loss + (self.net.head.bias * 0).sum().sqrt()
        return loss

    return patched


@pytest.mark.parametrize(
    ("poison", "on_device"), [(poison_loss, False), (poison_gradient, False), (poison_gradient, True)]
)
def test_non_finite_numbers_stop_the_run_before_they_are_kept(
    poison: Callable[..., Any],
    on_device: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """On a device the numbers of a step are read after it, but before the checkpoint of the step."""
    if on_device:
        monkeypatch.setattr(Later, "is_here", False)
    config = write_config(tmp_path / "tiny.yaml", checkpoint_every_n_steps=1)
    run_dir = tmp_path / "run"
    steps = []
    original = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *a, **k: (original(*a, **k), steps.append(1))[0])
    monkeypatch.setattr(ImageClassifier, "training_step", poison(1, 2))
    assert run("fit", "-c", config, "--run_dir", run_dir) == 1
    error = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("error: "))
    batch = "batch 2" if poison is poison_loss else "batch 3"
    assert f"epoch 1, step 4, {batch} (rank 0" in error
    assert len(steps) == (5 if on_device else 4)
    last = load(run_dir / "checkpoints" / "last.ckpt")
    assert last["global_step"] == 4
    for state in (last["state_dict"], last["current_model_state"]):
        assert all(torch.isfinite(value).all() for value in state.values())


def test_numbers_on_a_device_are_read_while_it_works_on_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Later, "is_here", False)
    loop = SimpleNamespace(batch_idx=0)
    trainer: Any = SimpleNamespace(
        precision="32", world_size=1, current_epoch=0, global_step=0, global_rank=0, fit_loop=loop
    )
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    stop: Any = StopOnNonFinite()
    for step, loss in enumerate((1.0, float("nan"))):
        loop.batch_idx = trainer.global_step = step
        module.zero_grad()
        stop.on_before_backward(trainer, module, torch.tensor(loss))
        (module(torch.ones(1, 1)).sum() * loss).backward()
        stop.on_before_optimizer_step(trainer, module, optimizer)
    for hook in (stop.on_validation_start, stop.on_train_epoch_end, lambda *_: stop.on_save_checkpoint(*_, {})):
        pending = stop._check
        with pytest.raises(NonFiniteError, match=r"epoch 0, step 1, batch 1 \(rank 0: loss nan, gradient norm nan\)"):
            hook(trainer, module)
        stop._check = pending
    stop.on_before_backward(trainer, module, torch.tensor(1.0))
    with pytest.raises(NonFiniteError, match="step 1, batch 1"):
        stop.on_before_optimizer_step(trainer, module, optimizer)


def test_fused_optimizers_leave_a_bad_step_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On a device the optimizer steps before the numbers are read. Lightning clips for them under autocast, too."""
    monkeypatch.setattr(Later, "is_here", False)
    monkeypatch.setattr(ImageClassifier, "training_step", poison_gradient(1, 2))
    original, optimizers = ImageClassifier.configure_optimizers, []
    monkeypatch.setattr(
        ImageClassifier, "configure_optimizers", lambda self: optimizers.append(original(self)) or optimizers[0]
    )
    fused = {"model__optimizer": {"args": {"fused": True}}, "trainer__precision": "bf16-mixed"}
    config = write_config(tmp_path / "tiny.yaml", **fused)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 1
    assert "epoch 1, step 4, batch 3" in capfd.readouterr().err
    for parameter, state in optimizers[0].state.items():
        assert all(x.isfinite().all() for x in (parameter, *state.values()))
        assert state["step"] == 4


def test_weights_that_are_not_finite_are_not_saved() -> None:
    module: Any = torch.nn.Linear(1, 1)
    module.weight.data.fill_(float("inf"))
    with pytest.raises(NonFiniteError, match="weights are not finite after step 6"):
        StopOnNonFinite().on_save_checkpoint(SimpleNamespace(global_step=7), module, {})  # type: ignore[arg-type]


def test_processes_agree_to_stop_without_waiting_for_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices one step later; the other process's answer is known then."""
    monkeypatch.setattr(Later, "is_here", False)
    answers = iter([0.0, 1.0, 0.0])  # of the other process
    monkeypatch.setattr(non_finite.dist, "all_reduce", lambda tensor: tensor.add_(next(answers)))
    trainer: Any = SimpleNamespace(world_size=2, strategy=SimpleNamespace(root_device="cpu"))
    interrupt = LastCheckpoint(Path("last.ckpt"), InterruptRequest())
    assert [interrupt._requested_lately(trainer) for _ in range(3)] == [False, False, True]


def test_validation_of_a_generator_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One batch is enough, although metrics leave NaN out unless told otherwise."""
    original = ImageGenerator._losses

    def poisoned(self: ImageGenerator, x0: torch.Tensor, *args: Any) -> torch.Tensor:
        bad = not self.trainer.training and self.trainer.global_step == 3 and not done
        done.extend([True] if bad else [])
        return original(self, x0, *args) * (float("nan") if bad else 1)

    done: list[bool] = []
    monkeypatch.setattr(ImageGenerator, "_losses", poisoned)
    config = gen_helpers.write_config(tmp_path / "tiny.yaml", samples__every_n_steps=None)
    assert gen_helpers.run("fit", "-c", config, "--run_dir", tmp_path / "run") == 1
    assert "error: the validation loss is not finite in epoch 0, step 3" in capfd.readouterr().err


def test_validation_of_a_classifier_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original, factors = ClassificationMetrics.update, iter([float("nan")])

    def poisoned(self: ClassificationMetrics, logits: torch.Tensor, targets: torch.Tensor) -> None:
        original(self, logits * next(factors, 1.0), targets)  # the first batch only

    monkeypatch.setattr(ClassificationMetrics, "update", poisoned)
    assert run("fit", "-c", write_config(tmp_path / "tiny.yaml"), "--run_dir", tmp_path / "run") == 1
    assert "error: val/loss is not finite in epoch 0, step 0" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_prediction_names_the_file(tmp_path: Path) -> None:
    module: Any = SimpleNamespace(class_names=None)
    prediction = ["a.png", "b.png"], torch.tensor([[0.5, 0.5], [float("nan"), 1]])
    with pytest.raises(NonFiniteError, match=r"prediction of b\.png is not finite"):
        PredictionsCSV(tmp_path / "out.csv").write_on_batch_end(None, module, prediction, None, None, 0, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", ["state_dict", "current_model_state"])
def test_checkpoint_with_bad_weights_is_refused(
    state: str, reference_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = load(reference_run / "checkpoints" / "last.ckpt")
    checkpoint[state]["net.head.bias"][3] = float("nan")
    del checkpoint["tensors_sha256"], checkpoint["values_sha256"]
    torch.save(checkpoint, tmp_path / "bad.ckpt")
    config = reference_run / "config.yaml"
    assert run("validate", "-c", config, "--ckpt_path", tmp_path / "bad.ckpt") == 2
    assert "error: the weights of the checkpoint are not finite, first net.head.bias" in capfd.readouterr().err
