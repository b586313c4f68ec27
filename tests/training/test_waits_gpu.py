"""On a CUDA device: training steps do not wait for it, and stop before bad numbers are kept."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headmix_vision.training.classifier import ImageClassifier
from headmix_vision.training.generator import ImageGenerator

from . import gen_helpers, helpers

pytestmark = pytest.mark.gpu
DDPM = {"kind": "ddpm", "learned_variance": True}
CASES = {
    "classifier": (helpers, ImageClassifier, {}),
    "flow": (gen_helpers, ImageGenerator, {}),
    "ddpm": (gen_helpers, ImageGenerator, {"model__objective": DDPM}),
}


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
    original = ImageClassifier.training_step

    def poisoned(self: ImageClassifier, batch: Any, batch_idx: int) -> Any:
        return original(self, batch, batch_idx) * (float("nan") if self.trainer.global_step == 4 else 1)

    monkeypatch.setattr(ImageClassifier, "training_step", poisoned)
    config = helpers.write_config(tmp_path / "tiny.yaml", trainer__accelerator="gpu", checkpoint_every_n_steps=1)
    assert helpers.run("fit", "-c", config, "--run_dir", tmp_path / "run") == 1
    assert "epoch 1, step 4, batch 2, 3 (rank 0" in capfd.readouterr().err
    last = helpers.load(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert last["global_step"] == 4
    assert all(value.isfinite().all() for value in last["current_model_state"].values())
