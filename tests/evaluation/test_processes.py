"""Several processes score as one does, and refuse as one does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from .helpers import digit_pixels, run, write_digits

# Calls the command line once for each list of arguments, and prints rank and exit status of each call.
CALLS = """
import json, os, sys
from headmix_vision.evaluate import main
for arguments in json.loads(sys.argv[1]):
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    sys.stdout.write(f"rank {os.environ['RANK']} ended with {status or 0}\\n")
    sys.stdout.flush()
"""


def run_shared(folder: Path, world_size: int, *calls: list[Any]) -> subprocess.CompletedProcess[str]:
    script = folder / "calls.py"
    script.write_text(CALLS)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    arguments = json.dumps([[str(argument) for argument in call] for call in calls])
    return subprocess.run(
        [sys.executable, *launcher, str(script), arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_scores_are_equal_to_the_bit_and_errors_told_once(
    world_size: int, classifier: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    real, fake = folders
    pixels = digit_pixels(range(60))
    moving = np.stack([np.roll(pixels, shift, axis=2) for shift in range(6)], axis=1)
    np.savez(tmp_path / "clips.npz", arr_0=moving[..., None])
    np.savez(tmp_path / "images.npz", arr_0=pixels, labels=np.arange(60) % 10)
    clips, images = tmp_path / "clips.npz", tmp_path / "images.npz"
    sides, common = ("--real", real, "--fake", fake), ("--features", classifier, "--batch-size", 7)
    calls: dict[str, tuple[Any, ...]] = {
        "fid": (*sides, *common),
        "kid": (*sides, *common, "--subsets", 5),
        "prc": (*sides, *common),
        "is": ("--fake", fake, *common),
        "accuracy": ("--fake", images, *common),
        "fvd": ("--real", clips, "--fake", clips, *common, "--frames", 4, "--real-offset", "random", "--mirror-real"),
        "stats": ("--real", real, *common),
    }
    endings = dict.fromkeys(calls, "json") | {"stats": "safetensors"}
    for name, arguments in calls.items():
        assert run(name, *arguments, "--out", tmp_path / f"{name}_one.{endings[name]}") == 0
    shared = [
        [name, *arguments, "--out", tmp_path / f"{name}_many.{endings[name]}"] for name, arguments in calls.items()
    ]
    damaged = write_digits(tmp_path / "damaged", range(30))
    (damaged / "0010.png").write_bytes(b"none")  # of the second process's first batch
    wrong = [
        ["fid", "--real", real, "--fake", damaged, *common],
        ["fid", "--real", "/nowhere", "--fake", damaged, *common],
        ["kid", *sides, *common, "--subset-size", 1000],
        ["fid", "--nonsense"],
    ]
    result = run_shared(tmp_path, world_size, *shared, *wrong)
    assert result.returncode == 0, result.stderr
    for rank in range(world_size):
        assert result.stdout.count(f"rank {rank} ended with 0") == len(calls)
        assert result.stdout.count(f"rank {rank} ended with 2") == len(wrong)
    assert result.stdout.count("is_mean ") == 1
    for name in calls.keys() - {"stats"}:
        one, many = (tmp_path / f"{name}_{count}.json" for count in ("one", "many"))
        assert one.read_bytes() == many.read_bytes(), name
    first, other = (load_file(tmp_path / f"stats_{count}.safetensors") for count in ("one", "many"))
    assert first.keys() == other.keys() and all(torch.equal(first[name], other[name]) for name in first)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert [line.startswith("error: ") for line in errors] == [True] * len(wrong)
    assert "0010.png" in errors[0] and "/nowhere" in errors[1] and "kid subset size" in errors[2]
