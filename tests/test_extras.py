"""What works with how little installed, and what the rest says about what it lacks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm

import headmix_vision
from headmix_vision.cli import COMMANDS
from headmix_vision.errors import PACKAGES, MissingExtraError

ROOT = Path(__file__).parents[1]

BARE = f"""
import sys
for package in {sorted({package for packages in PACKAGES.values() for package in packages})}:
    sys.modules[package] = None  # as if it were not installed

import torch
from headmix_vision.layers import HeadMixAttention
from headmix_vision.ops import TokenBlocks, mhla

q = torch.randn(2, 16, 3, 8, requires_grad=True)
mhla(q, q, q, torch.eye(4), TokenBlocks.from_grid((4, 4), (2, 2))).sum().backward()
assert HeadMixAttention(24, 3, core="hih", grid=(4, 4))(torch.randn(2, 16, 24)).shape == (2, 16, 24)

import importlib
from headmix_vision.errors import MissingExtraError
for part in "models", "runs", "diffusion", "sampling", "evaluation", "training":
    try:
        importlib.import_module(f"headmix_vision.{{part}}")
    except MissingExtraError as error:
        print(error)
"""


def test_ops_and_layers_need_torch_and_einops_alone():
    result = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    needs = {"models": "models", "runs": "models", "diffusion": "diffusion", "sampling": "diffusion"}
    needs |= {"evaluation": "eval", "training": "train"}
    assert result.stdout.splitlines() == [
        f"headmix_vision.{part} needs the package timm: pip install 'headmix_vision[{extra}]'"
        for part, extra in needs.items()
    ]


def test_generators_need_diffusers_and_say_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    message = re.escape("dit_mhla_s_2 needs the package diffusers: pip install 'headmix_vision[diffusion]'")
    with pytest.raises(MissingExtraError, match=message):
        timm.create_model("dit_mhla_s_2")
    with pytest.raises(ImportError, match="HeadMixDiT needs the package diffusers"):
        headmix_vision.models.HeadMixDiT  # noqa: B018
    assert timm.create_model("deit_mhla_digits").num_classes == 10


@pytest.mark.parametrize(
    ("command", "package", "what", "extra"),
    [
        ("train-cls", "lightning", "headmix_vision.training", "train"),
        ("train-gen", "jsonargparse", "headmix_vision.training", "train"),
        ("sample", "diffusers", "headmix_vision.sampling", "diffusion"),
        ("evaluate", "torch_fidelity", "headmix_vision.evaluation", "eval"),
        ("analyze", "matplotlib", "headmix analyze", "analysis"),
        ("cache-latents", "rich", "headmix cache-latents", "diffusion"),
    ],
)
def test_commands_end_with_what_to_install(command, package, what, extra, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith(what)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match="2"):
        COMMANDS[command]([])
    line = f"error: {what} needs the package {package}: pip install 'headmix_vision[{extra}]'\n"
    assert capsys.readouterr().err == line


def test_extras_install_what_their_parts_ask_for():
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def packages(extra: str) -> set[str]:
        found = set()
        for requirement in extras[extra]:
            own = re.match(r"headmix_vision\[(.*)\]", requirement)
            found |= set().union(*map(packages, own[1].split(","))) if own else {re.split(r"[\[<>=]", requirement)[0]}
        return {"sklearn" if name == "scikit-learn" else name.replace("-", "_") for name in found}

    for extra, needed in PACKAGES.items():
        assert set(needed) <= packages(extra)
    assert packages("all") == set().union(*map(packages, PACKAGES))
