"""Networks whose sizes come from a file or an option are refused before memory is taken for them."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from headmix_vision.errors import InputError
from headmix_vision.files import reading
from headmix_vision.models import building as module
from headmix_vision.models.building import building
from headmix_vision.runs.networks import create_generator, create_network, load_network
from headmix_vision.runs.pipelines import load_exported_network, load_pipeline

SMALL = {"embed_dim": 16, "depth": 1, "num_heads": 2}
HUGE = [
    ({"depth": 10**9}, "the depth of model .* is 1000000000, it must be at most 1000"),
    ({"embed_dim": 10**8}, r"embed_dim 100000000, .* needs 3.2e\+17 bytes of memory"),
    ({"num_classes": 10**12}, r"num_classes 1000000000000.* needs 6.4e\+04 GB of memory"),
    ({"mlp_ratio": 1e12}, "of memory"),
]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the parameters that are made while the test runs."""
    sizes: list[int] = []
    monkeypatch.setattr(reading, "memory_left", lambda: 1 << 30)
    monkeypatch.setattr(module, "memory_left", lambda: 1 << 30)
    register = torch.nn.Module.register_parameter

    def record(self: torch.nn.Module, name: str, value: Any) -> None:
        sizes.append(0 if value is None else value.numel())
        register(self, name, value)

    monkeypatch.setattr(torch.nn.Module, "register_parameter", record)
    return sizes


@pytest.mark.parametrize(("change", "message"), HUGE)
@pytest.mark.parametrize("name", ["deit_mhla_digits", "dit_mhla_digits", "dit_video_mhla_digits"])
def test_sizes_beyond_the_memory_are_refused_before_a_weight_is_made(
    name: str, change: dict[str, Any], message: str, made: list[int]
) -> None:
    create = create_network if name.startswith("deit") else create_generator
    with pytest.raises(InputError, match=message):
        create(name, model_args={**SMALL, **change})
    if name.startswith("deit"):
        about = {"name": name, "num_classes": 10, "img_size": None, "model_args": {**SMALL, **change}}
    else:
        architecture = dict(timm.create_model(name, **SMALL).architecture)
        made.clear()
        about = {"name": name, "kind": "generator", "architecture": {**architecture, **change}}
    if "num_classes" not in change or name.startswith("dit"):
        with pytest.raises(InputError, match=message):
            load_network({"headmix_vision": about, "state_dict": {}})
    assert made == []


@pytest.mark.parametrize("size", [40_000, 10**7])
def test_positions_beyond_the_memory_are_refused(size: int, made: list[int]) -> None:
    with pytest.raises(InputError, match=r"needs more than 1\.07 GB of memory"):
        create_network("deit_mhla_digits", img_size=size, model_args=SMALL)
    assert sum(made) < 1000


def test_networks_of_other_packages_are_counted_while_they_are_built(made: list[int]) -> None:
    with pytest.raises(InputError, match=r"model resnet50 needs more than 1\.07 GB of memory"):
        create_network("resnet50", model_args={"base_width": 10**5})
    assert 4 * sum(made) < 1 << 30


def test_networks_of_too_many_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TENSORS", 50)
    with pytest.raises(InputError, match="model resnet18 has more than 50 tensors"):
        create_network("resnet18", model_args={"layers": [10**9, 1, 1, 1]})


def test_a_network_is_counted_as_large_as_it_is(tmp_path: Path) -> None:
    with building("a network", {}) as _, module._Counting("a network") as counted:
        network = timm.create_model("deit_mhla_digits")
    weights = 4 * sum(value.numel() for value in network.state_dict().values())
    assert weights <= counted.size_bytes < 1.05 * weights
    with torch.device("meta"), module._Counting("a network") as counted:
        timm.create_model("deit_mhla_digits")
    assert counted.size_bytes < 0.05 * weights


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """An exported generator of an earlier version."""
    stored = Path(__file__).parents[1] / "fixtures" / "v0_1_0" / "generator" / "pipeline"
    return Path(shutil.copytree(stored, tmp_path / "pipeline"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 10**9}, "the depth of its network is 1000000000, it must be at most 1000"),
        ({"embed_dim": 10**8}, "its network with .* needs .* of memory"),
        ({"num_classes": 10**12}, "its network with .* needs .* of memory"),
    ],
)
def test_exports_that_state_huge_networks_are_refused(
    change: dict[str, Any], message: str, pipeline: Path, made: list[int]
) -> None:
    config = pipeline / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    for load in (load_pipeline, load_exported_network):
        made.clear()
        with pytest.raises(InputError, match=message):
            load(pipeline)
        assert made == []


@pytest.mark.parametrize(
    "name",
    ["transformer/config.json", "transformer/diffusion_pytorch_model.safetensors", "scheduler/scheduler_config.json"],
)
def test_exports_that_hold_pipes_or_deep_json_are_refused(name: str, pipeline: Path) -> None:
    path = pipeline / name
    if path.suffix == ".json":
        path.write_text("[" * 200_000)
        with pytest.raises(InputError, match="nested too deeply"):
            load_pipeline(pipeline)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InputError, match=f"{path.name} is a named pipe"):
        load_pipeline(pipeline)


def test_sizes_of_samples_that_a_description_states_are_refused(tmp_path: Path) -> None:
    network = timm.create_model("dit_linear_digits", **SMALL, input_size=(10**7, 10**7))
    state = {f"net.{name}": value for name, value in network.state_dict().items()}
    about = {"name": "dit_linear_digits", "kind": "generator", "architecture": dict(network.architecture)}
    about["objective"] = {}
    torch.save({"state_dict": state, "headmix_vision": about, "global_step": 1}, tmp_path / "a.ckpt")
    generator, _ = load_pipeline(tmp_path / "a.ckpt")
    with pytest.raises(InputError, match="1 images of 10000000x10000000 pixels at a time need more than"):
        generator(class_labels=[1])
