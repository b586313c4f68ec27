"""On a CUDA device: training steps do not wait for it, and stop before bad numbers are kept."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headmix_vision.data.generation import GenerationData
from headmix_vision.training.classifier import ImageClassifier

from . import helpers
from .test_waits import CASES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES)
def test_steps_do_not_wait_for_the_device(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second batch to the fourth; the first compiles kernels, the last one logs."""
    module, cls, overrides = CASES[case]
    original, checked = cls.training_step, []

    def watched(self: Any, batch: Any, batch_idx: int) -> Any:
        torch.cuda.set_sync_debug_mode("error" if 1 <= batch_idx < 4 else "default")
        checked.append(batch_idx)
        return original(self, batch, batch_idx)

    monkeypatch.setattr(cls, "training_step", watched)
    once = {"trainer__accelerator": "gpu", "trainer__max_epochs": 1, "trainer__log_every_n_steps": 100}
    config = module.write_config(tmp_path / "tiny.yaml", **once, **overrides)
    options = () if module is helpers else ("--samples.every_n_steps", "null")
    try:
        assert module.run("fit", "-c", config, "--run_dir", tmp_path / "run", *options) == 0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert checked == list(range(6))


def test_bad_step_is_in_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original, modules = ImageClassifier.training_step, []

    def poisoned(self: ImageClassifier, batch: Any, batch_idx: int) -> Any:
        modules.append(self)
        return original(self, batch, batch_idx) * (float("nan") if self.trainer.global_step == 4 else 1)

    monkeypatch.setattr(ImageClassifier, "training_step", poisoned)
    config = helpers.write_config(tmp_path / "tiny.yaml", trainer__accelerator="gpu", checkpoint_every_n_steps=1)
    assert helpers.run("fit", "-c", config, "--run_dir", tmp_path / "run") == 1
    assert "epoch 1, step 4, batch 2, 3 (rank 0" in capfd.readouterr().err
    last = helpers.load(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert last["global_step"] == 4
    in_memory = modules[-1].state_dict()  # the optimizer is fused
    assert all(x.isfinite().all() for state in (last["current_model_state"], in_memory) for x in state.values())


def test_batches_arrive_whole_while_the_device_computes() -> None:
    """Each is copied beside the step before, in whose memory it may lie only when that step is done."""
    data, sums = GenerationData(), []
    data.num_classes = 8
    for number in range(8):
        batch = torch.full((64, 4, 64, 64), float(number)).pin_memory(), torch.full((64,), number).pin_memory()
        images, labels = data.transfer_batch_to_device(batch, torch.device("cuda", 0), 0)
        torch.cuda._sleep(20_000_000)
        sums.append(torch.stack([images.mean(), labels.float().mean()]))
        del images, labels
    assert torch.stack(sums).tolist() == [[number, number] for number in range(8)]
