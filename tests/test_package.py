"""The package as a whole: what importing it does, and running other people's scripts with its models."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, timm
model = timm.create_model(sys.argv[1])
print(type(model).__name__, __name__, sys.argv[1:])
"""


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True)


def test_importing_loads_neither_training_nor_plotting():
    heavy = "lightning", "matplotlib", "sklearn", "torchmetrics", "tensorboard", "jsonargparse"
    code = f"import sys, headmix_vision; print([m for m in {heavy} if m in sys.modules])"
    assert python("-c", code).stdout.strip() == "[]"


def test_a_script_runs_with_the_models_registered(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = python("-m", "headmix_vision", script, "deit_mhla_digits", "--flag")
    assert result.stdout.split(maxsplit=2) == [
        "HeadMixVisionTransformer",
        "__main__",
        "['deit_mhla_digits', '--flag']\n",
    ]
    assert python("-m", "headmix_vision").returncode == 1


def test_imports_point_downward():
    order = ["ops", "layers", "models", "data", "evaluation", "diffusion", "training"]
    package = Path(__file__).parents[1] / "headmix_vision"
    for height, name in enumerate(order):
        for path in (package / name).rglob("*.py"):
            for above in order[height + 1 :]:
                assert f"headmix_vision.{above}" not in path.read_text(), f"{path} imports {above}"
