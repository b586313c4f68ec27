"""The notebooks of examples/ run from their first cell to their last."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(notebook: str, folder: Path, **shorter: str) -> str:
    """Run the code cells in one process, with some text replaced, and return what they print."""
    cells = json.loads((EXAMPLES / notebook).read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for text, other in shorter.items():
        assert code.count(text) == 1
        code = code.replace(text, other)
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_swapped_layers_learn_what_was_lost(tmp_path: Path):
    printed = run("swap_attention.ipynb", tmp_path)
    known = [float(line.split("%")[0].rsplit(" ", 1)[1]) for line in printed.splitlines() if "%" in line]
    softmax, swapped, trained = known
    assert swapped < softmax - 10
    assert trained > softmax - 2


@pytest.mark.slow
def test_a_generator_is_trained_and_draws(tmp_path: Path):
    printed = run(
        "generator.ipynb",
        tmp_path,
        **{'"trainer.max_epochs": 24': '"trainer.max_epochs": 1', "num=100, steps=16": "num=4, steps=2"},
    )
    assert "next: headmix sample" in printed
    (grid,) = tmp_path.rglob("grid.png")
    assert grid.stat().st_size > 500
