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


def losses(run: Path, compile: str) -> list[float]:
    """Train 6 steps of 2 batches with validations and samples; return the losses of training and validation."""
    arguments = {"depth": 3, "embed_dim": 32, "num_heads": 2, "class_dropout": 0.0}  # graphs draw other labels to drop
    samples = {"every_n_steps": 4, "classes": [3, 7], "rows": 2, "steps": 2}
    further: dict[str, Any] = {"trainer__accelerator": "gpu", "trainer__accumulate_grad_batches": 2, "ema__decay": 0.9}
    options = {**PLAIN, **further, "model__model_args": arguments, "model__compile": compile, "samples": samples}
    config = gen_helpers.write_config(run.with_suffix(".yaml"), **options)
    assert gen_helpers.run("fit", "-c", config, "--run_dir", run) == 0
    rows = read_csv(run / "metrics.csv")
    return [float(row[name]) for row in rows for name in ("train/loss_step", "val/loss") if row[name]]


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
    further: dict[str, Any] = {"trainer__accelerator": "gpu", "trainer__accumulate_grad_batches": 2, "ema__decay": 0.9}
    further["model__model_args__class_dropout"] = 0.0
    runs = [train(tmp_path / way, 2, 2, "--model.compile", way, **further) for way in ("false", "graphs")]
    expected, found = ([float(row["train/loss_step"]) for row in read_csv(run / "metrics.csv")] for run in runs)
    assert found == pytest.approx(expected, rel=1e-3)
