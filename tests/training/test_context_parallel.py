"""Context parallelism in training: the tokens of each sample on several processes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from . import gen_helpers
from .helpers import assert_equal, read_csv
from .test_processes import start
from .test_sharding import finish, read

# Adam and clipping would hide gradients of another size
PLAIN: dict[str, Any] = {
    "trainer__accumulate_grad_batches": 1,
    "trainer__gradient_clip_val": None,
    "model__optimizer": {"opt": "sgd", "lr": 0.05},
    "ema__decay": None,
}


def train(
    folder: Path, processes: int, sharers: int, *arguments: object, strategy: str = "ddp", **options: Any
) -> Path:
    """Train with a global batch of 8; returns the run."""
    folder.mkdir(exist_ok=True)
    batch_size = 8 * sharers // processes
    config = gen_helpers.write_config(
        folder / f"{batch_size}.yaml", **{**PLAIN, **options}, data__batch_size=batch_size
    )
    run = folder / f"{strategy}-{processes}-{sharers}"
    how = ("--trainer.devices", processes, "--trainer.strategy", strategy, "--model.context_parallel", sharers)
    command = ("fit", "-c", config, "--run_dir", run, *how, *arguments)
    if processes == 1:  # here, which spares the imports
        assert gen_helpers.run(*command) == 0
    else:
        finish(start(*command, script="train_gen.py"))
    return run


def assert_alike(run: Path, other: Path, steps: int = 12) -> None:
    """Compare weights, losses of training, and names of samples."""
    a, b = (read(path / "checkpoints" / "last.ckpt") for path in (run, other))
    assert a["batch"] == b["batch"] and a["global_step"] == b["global_step"] == steps
    torch.testing.assert_close(dict(a["state_dict"]), dict(b["state_dict"]), rtol=1e-5, atol=1e-6)
    for row, expected in zip(*(read_csv(path / "metrics.csv") for path in (run, other)), strict=True):
        for name in ("train/loss", "train/loss_step"):  # the validation loss depends on the number of processes
            assert bool(row[name]) == bool(expected[name])
            assert not row[name] or float(row[name]) == pytest.approx(float(expected[name]), rel=1e-5)
    drawn, expected_names = (sorted(path.name for path in (path / "samples").iterdir()) for path in (run, other))
    assert drawn == expected_names != []


def test_processes_that_share_tokens_train_as_one(tmp_path: Path) -> None:
    assert_alike(train(tmp_path, 2, 2), train(tmp_path, 1, 1, strategy="auto"))


@pytest.mark.slow
def test_processes_train_blocks_that_are_graphs_as_uncompiled_ones(tmp_path: Path) -> None:
    further: dict[str, Any] = {"trainer__accumulate_grad_batches": 2, "trainer__gradient_clip_val": 0.1}
    further |= {"ema__decay": 0.9, "model__model_args__depth": 2}
    graphs, plain = (train(tmp_path / way, 2, 2, "--model.compile", way, **further) for way in ("graphs", "false"))
    assert_alike(graphs, plain, steps=6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_pairs_of_processes_train_on_clips_as_single_ones(strategy: str, tmp_path: Path) -> None:
    pairs = train(tmp_path, 4, 2, strategy=strategy, **gen_helpers.VIDEO)
    assert_alike(pairs, train(tmp_path, 2, 1, **gen_helpers.VIDEO))


@pytest.mark.slow
def test_a_run_goes_on_with_and_without_others_that_share_its_tokens(tmp_path: Path) -> None:
    keep = {"dirpath": str(tmp_path / "kept"), "every_n_train_steps": 4, "save_top_k": -1, "filename": "{step}"}
    keeps = [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": keep}]
    whole = train(tmp_path / "whole", 2, 2, "--trust-config", trainer__callbacks=keeps)
    within = ("--ckpt_path", tmp_path / "kept" / "step=4.ckpt")  # of 6 in the first epoch
    again = train(tmp_path / "again", 2, 2, *within)
    alone = train(tmp_path / "alone", 1, 1, *within, strategy="auto")
    a, b, c = (read(run / "checkpoints" / "last.ckpt")["state_dict"] for run in (whole, again, alone))
    assert_equal(a, b)
    torch.testing.assert_close(dict(a), dict(c), rtol=1e-5, atol=1e-6)
    losses = [[float(row["train/loss"]) for row in read_csv(run / "metrics.csv") if row["train/loss"]]
              for run in (whole, again, alone)]  # fmt: skip
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-5)
    assert len(losses[0]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model__context_parallel": 2}, "model.context_parallel=2 needs a multiple of 2 processes, got 1"),
        ({"model__spread_tokens": 2}, "model.context_parallel=2 needs a multiple of 2 processes, got 1"),
        ({"model__context_parallel": 0}, "model.context_parallel must be a whole number"),
        (
            {"model__context_parallel": 2, "model__spread_tokens": 4},
            "model.spread_tokens=4 is the former name of model.context_parallel=2: set one of them",
        ),
    ],
)
def test_context_parallelism_needs_processes(
    options: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = gen_helpers.write_config(tmp_path / "tiny.yaml", **options)
    assert gen_helpers.run("fit", "-c", config, "--run_dir", tmp_path / "run") == 2
    assert f"error: {message}" in capsys.readouterr().err
