"""On a CUDA device: CUDA graphs train as launched kernels do."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headmix_vision.training.base_module import BaseModule, compile_blocks

from . import gen_helpers
from .helpers import read_csv
from .test_context_parallel import PLAIN, train

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {
    **PLAIN,
    "trainer__accelerator": "gpu",
    "trainer__accumulate_grad_batches": 2,
    "ema__decay": 0.9,
    "model__model_args__class_dropout": 0.0,  # graphs draw other labels to drop
    "samples__guidance": 1.0,
}


def read_losses(run: Path) -> list[float]:
    """Return the losses of training and validation."""
    rows = read_csv(run / "metrics.csv")
    return [float(row[name]) for row in rows for name in ("train/loss_step", "val/loss") if row[name]]


def losses(run: Path, compile: str) -> list[float]:
    """Train 6 steps of 2 batches with validations and samples; return the losses."""
    further = {"trainer__devices": 1, "model__model_args__depth": 3, "model__compile": compile}
    config = gen_helpers.write_config(run.with_suffix(".yaml"), **OPTIONS, **further)
    assert gen_helpers.run("fit", "-c", config, "--run_dir", run) == 0
    return read_losses(run)


@pytest.fixture(autouse=True)
def ordinary_afterwards() -> Any:
    with torch._dynamo.config.patch(recompile_limit=8, optimize_ddp=True):
        yield
    torch.compiler.reset()


@pytest.mark.parametrize("by_blocks", [False, True])
def test_cuda_graphs_train_as_launched_kernels(
    by_blocks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = losses(tmp_path / "launched", "false")

    def configure(module: Any) -> None:
        compile_blocks(module.net, "reduce-overhead")

    if by_blocks:  # as on several processes
        monkeypatch.setattr(BaseModule, "configure_model", configure)
    found = losses(tmp_path / "graphs", "graphs")
    assert len(found) == len(expected) >= 8 and found == pytest.approx(expected, rel=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_share_tokens_in_cuda_graphs_as_in_launched_kernels(tmp_path: Path) -> None:
    runs = [train(tmp_path / way, 2, 2, "--model.compile", way, **OPTIONS) for way in ("false", "graphs")]
    expected, found = map(read_losses, runs)
    assert len(expected) >= 8 and found == pytest.approx(expected, rel=1e-3)
