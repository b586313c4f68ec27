"""`bench_training.py`: small runs on a CPU."""

import csv
import math
from pathlib import Path

import pytest

from benchmarks import bench_training as bench


def test_bench_training_compares_commands_with_the_bare_step(tmp_path: Path):
    bench.main(["--device", "cpu", "--tiny", "--steps", "6", "--warmup_steps", "2", "--out", str(tmp_path)])
    with (tmp_path / "training_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["what"] for row in rows] == 2 * ["bare step", "no averaging", "averaging"]
    assert [row["model"].partition(":")[0] for row in rows[::3]] == ["dit_mhla_s_2", "deit_mhla_tiny"]
    for bare, command in ((rows[0], rows[1]), (rows[3], rows[5])):
        assert float(bare["ratio_to_bare"]) == 1
        ratio = float(bare["step_ms"]) / float(command["step_ms"])
        assert math.isclose(float(command["ratio_to_bare"]), ratio, rel_tol=1e-3)


def test_the_clock_leaves_out_the_first_steps_and_the_last(monkeypatch: pytest.MonkeyPatch):
    trainer, module = Trainer(), None
    clock = bench.Clock(2)
    monkeypatch.setattr(clock, "_now", lambda _: 10.0 * trainer.global_step)
    for step in range(6):
        trainer.global_step = step
        clock.on_train_batch_start(trainer, module, None, step)
        trainer.global_step = step + 1
        clock.on_train_batch_end(trainer, module, None, None, step)
    assert clock.step_s == 10


class Trainer:
    max_steps, global_step = 6, 0
