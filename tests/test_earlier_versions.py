"""Checkpoints, exports and stopped runs of earlier versions load, and give the numbers that they gave then.

The README beside the files tells how they were made.
"""

import csv
import runpy
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import headmix_vision  # noqa: F401  (registers the models with timm)
from headmix_vision.diffusion import HeadMixDiTPipeline
from headmix_vision.models import HeadMixDiT

ROOT = Path(__file__).parents[1]
FILES = ROOT / "tests" / "fixtures" / "v0_1_0"
SMALL = {"embed_dim": 16, "num_heads": 2}
# float32 sums in another order; Adam's normalisation magnifies them where a gradient is close to zero
TRAINED = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def networks() -> dict[str, Tensor]:
    return load_file(FILES / "networks.safetensors")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Runs a script, or with `-m` a module, in the folder `tmp_path` of this process; it must end well."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.chdir(tmp_path)

    def run(script: object, *args: object) -> None:
        is_module = script == "-m"
        name, *rest = map(str, args if is_module else (script, *args))
        monkeypatch.setattr(sys, "argv", [name, *rest])
        try:
            (runpy.run_module if is_module else runpy.run_path)(name, run_name="__main__")
        except SystemExit as end:
            assert not end.code, end

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("core", ["softmax", "linear", "mhla", "hih"])
@pytest.mark.parametrize("family", ["deit", "dit"])
def test_networks_compute_what_they_did(family: str, core: str, networks: dict[str, Tensor]) -> None:
    name = f"{family}_{core}_digits"
    model = timm.create_model(name, depth=2, qk_norm=True, **SMALL).eval()
    prefix = f"{name}/state/"
    state = {key.removeprefix(prefix): value for key, value in networks.items() if key.startswith(prefix)}
    model.load_state_dict(state, strict=True)
    conditions = (torch.tensor([10.0, 700.0]), torch.tensor([1, 2])) if family == "dit" else ()
    with torch.no_grad():
        output = model(networks[f"{name}/input"], *conditions)
    # Frequencies of times are float32, whose last bit is each processor's own: 4e-5 of an angle at time 700.
    tolerances = (1e-5, 5e-4) if conditions else (1e-5,) * len(output)
    for ours, theirs, atol in zip(output, networks[f"{name}/output"], tolerances, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=atol)


def test_exported_classifier_loads_through_timm(networks: dict[str, Tensor]) -> None:
    model = timm.create_model(
        "deit_mhla_digits",
        checkpoint_path=str(FILES / "classifier" / "model.safetensors"),
        depth=1,
        output_gate=True,
        core_args={"mixing_per_head": True},
        **SMALL,
    ).eval()
    with torch.no_grad():
        logits = model(networks["deit_mhla_digits/input"])
    torch.testing.assert_close(logits, networks["classifier/logits"], rtol=1e-5, atol=1e-6)


def test_exported_pipeline_draws_the_same_samples(networks: dict[str, Tensor]) -> None:
    pipe = HeadMixDiTPipeline.from_pretrained(FILES / "generator" / "pipeline")
    pipe.set_progress_bar_config(disable=True)
    options = {"guidance_scale": 1.5, "num_inference_steps": 5, "output_type": "pt"}
    samples = pipe(class_labels=[3, 7], generator=torch.Generator().manual_seed(0), **options).images
    torch.testing.assert_close(samples, networks["pipeline/samples"], rtol=1e-5, atol=1e-5)
    folder = FILES / "generator" / "pipeline" / "transformer"
    assert not HeadMixDiT.from_pretrained(folder, output_loading_info=True)[1]["missing_keys"]


@pytest.mark.parametrize(("kind", "script"), [("classifier", "train_cls.py"), ("generator", "train_gen.py")])
def test_stopped_run_ends_as_it_would_have(
    kind: str, script: str, tmp_path: Path, command: Callable[..., None]
) -> None:
    shutil.copytree(FILES / kind, tmp_path / "runs" / kind)  # the run directory in its config.yaml
    config = f"runs/{kind}/config.yaml"
    command(ROOT / script, "fit", "-c", config, "--ckpt_path", "last")
    checkpoint = torch.load(tmp_path / "runs" / kind / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 12
    for name, expected in load_file(FILES / kind / "end.safetensors").items():
        which, _, weight = name.partition("/")
        state = checkpoint["state_dict" if which == "average" else "current_model_state"]
        torch.testing.assert_close(state[f"net.{weight}"], expected, **TRAINED)
    new = {"train/images_per_s", *(["val/balanced"] if kind == "classifier" else [])}
    with (FILES / kind / "metrics.csv").open() as then, (tmp_path / "runs" / kind / "metrics.csv").open() as now:
        for before, after in zip(csv.DictReader(then), csv.DictReader(now), strict=True):
            assert after.keys() - before.keys() == new and after.keys() > before.keys()
            for name, value in before.items():
                assert (after[name] == "") == (value == ""), name
                assert not value or float(after[name]) == pytest.approx(float(value), rel=1e-5), name


@pytest.mark.parametrize(
    ("kind", "out", "weights"),
    [
        ("classifier", "model.safetensors", "model.safetensors"),
        ("generator", "pipeline", "pipeline/transformer/diffusion_pytorch_model.safetensors"),
    ],
)
def test_stopped_run_is_exported_alike(
    kind: str, out: str, weights: str, tmp_path: Path, command: Callable[..., None]
) -> None:
    options = ("--checkpoint", "last", "--out", out)
    command("-m", "headmix_vision.export", FILES / kind, *options)
    with safe_open(tmp_path / weights, "pt") as now, safe_open(FILES / kind / weights, "pt") as then:
        assert {name: text for name, text in now.metadata().items() if name != "tensors_sha256"} == then.metadata()
    now, then = load_file(tmp_path / weights), load_file(FILES / kind / weights)
    assert {name for name in now if not name.endswith(".block_grid")} == then.keys()
    assert all(torch.equal(now[name], then[name]) for name in then)


def test_stopped_generator_is_sampled(tmp_path: Path, command: Callable[..., None]) -> None:
    options = ("--num", 6, "--steps", 5, "--guidance", 1.5, "--npz", "--out", "drawn")
    command(ROOT / "sample.py", "images", "--model", FILES / "generator", *options)
    now, then = (np.load(path)["arr_0"] for path in (tmp_path / "drawn/samples.npz", FILES / "generator/samples.npz"))
    assert now.shape == then.shape == (6, 8, 8, 1)
    assert np.abs(now.astype(int) - then.astype(int)).max() <= 1  # a float32 sum may round to the other side
