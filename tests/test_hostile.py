"""Wrong options and damaged files end in one line: some of the cases that `hostile.py` draws, and its judgement."""

import random
import subprocess
import sys
from pathlib import Path

import hostile
import mutations
import pytest
import torch
from hostile_lines import LINES

PROGRAM = Path(__file__).with_name("hostile.py")
QUICK = ("sample images", "export", "evaluate", "analyze rank", "cache-latents", "index-shards", "models")


def test_commands_refuse_what_is_wrong_in_one_line() -> None:
    command = [sys.executable, PROGRAM, "--cases", "60", "--seed", "5", "--jobs", "2", "--command", *QUICK]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].split()[:2] == ["all", "60"]


@pytest.mark.parametrize(
    ("status", "stderr", "certain", "after", "verdicts"),
    [
        (2, "note: x\nerror: no", True, {"a": "1"}, {"refused"}),
        (2, "error: no\nerror: never", True, {"a": "1"}, {"traceback"}),
        (1, "Traceback (most recent call last):\nerror: no", True, {"a": "1"}, {"traceback"}),
        (-11, "", False, {"a": "1"}, {"traceback"}),
        (0, "", True, {"a": "1"}, {"silent"}),
        (0, "", False, {"a": "1", "new.safetensors": "2"}, {"harmless"}),
        (0, "", False, {"a": "1", "other": "2"}, {"harmless", "changed"}),
        (2, "error: no", True, {"a": "2"}, {"refused", "changed"}),
        (None, "", False, {"a": "1"}, {"time-out"}),
    ],
)
def test_endings_are_judged(
    status: int | None, stderr: str, certain: bool, after: dict[str, str], verdicts: set[str], tmp_path: Path
) -> None:
    line = next(line for line in LINES if line.out == "new.safetensors")
    case = hostile.Case(line, line.words.split(), "", certain)
    end = hostile.Ending(status, "", stderr, {"a": "1"}, after, executed=False, done="")
    assert hostile.judge(case, end, tmp_path, 1) == verdicts


@pytest.mark.parametrize("device", ["cpu", "meta"])  # sharded checkpoints hold tensors without values
def test_every_value_of_a_checkpoint_can_be_changed(device: str, tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    for seed in range(60):
        torch.save({"a": torch.ones((), device=device), "b": {"c": [torch.ones(2, device=device), 1, "x"]}}, path)
        mutations.checkpoint_values(path, random.Random(seed))
