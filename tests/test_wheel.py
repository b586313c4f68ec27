"""The wheel: it holds all that the commands need, and nothing of the clone."""

import email
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = [ROOT / name for name in ("headmix_lab", "headmix_vision")]
CONFIGS = ROOT / "configs"
COMMANDS = (
    *("train-cls", "train-gen", "distill", "sample", "evaluate", "export", "analyze"),
    *("cache-latents", "index-shards", "models"),
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source")
    for folder in (*PACKAGES, CONFIGS):
        shutil.copytree(folder, source / folder.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        "dist",
        ".",
    ]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (path,) = (source / "dist").iterdir()
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_packages(wheel: zipfile.ZipFile):
    found = {path for package in PACKAGES for path in package.rglob("*") if path.is_file()}
    files = {path for path in found if "__pycache__" not in path.parts}
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    recipes = {f"headmix_vision/{path.relative_to(ROOT).as_posix()}" for path in CONFIGS.rglob("*.yaml")}
    assert held == {path.relative_to(ROOT).as_posix() for path in files} | recipes
    for needed in (
        "py.typed",
        "configs/cls/digits.yaml",
        "configs/gen/overlays/gpu8.yaml",
        "models/weights/deit_mhla_digits.safetensors",
    ):
        assert f"headmix_vision/{needed}" in held


@pytest.mark.slow
def test_the_wheel_installs_the_commands_and_little_else(wheel: zipfile.ZipFile):
    (folder,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    scripts = wheel.read(f"{folder}/entry_points.txt").decode()
    installed = [line.split(" = ")[0] for line in scripts.splitlines()[1:] if line]
    assert installed == ["headmix", *sorted(f"headmix-{name}" for name in COMMANDS)]
    metadata = email.message_from_bytes(wheel.read(f"{folder}/METADATA"))
    always = [name for name in metadata.get_all("Requires-Dist", []) if "extra ==" not in name]
    assert sorted(name.split(">=")[0] for name in always) == ["einops", "torch"]
