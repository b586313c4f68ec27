"""Wrong input of `sample.py images`: one line, status 2, and nothing written, lost or left behind."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from headmix_vision.cli.sample import main

RUN = Path(__file__).parents[1] / "fixtures" / "v0_1_0" / "generator"
PIPELINE, CHECKPOINT = RUN / "pipeline", RUN / "checkpoints" / "last.ckpt"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
NAN, INF = float("nan"), float("inf")
Edit = Callable[[Any], Any]


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capfd.readouterr()
    try:
        main(["images", "--num", "2", "--steps", "2", "--batch-size", "2", *map(str, arguments)])
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    return status, *capfd.readouterr()


def refused(capfd: pytest.CaptureFixture[str], out: Path, *arguments: object) -> str:
    """The line that is printed, where what lies in the folder stays as it is."""
    before = files(out)
    status, stdout, stderr = run(capfd, "--out", out, *arguments)
    assert (status, stdout, len(stderr.splitlines())) == (2, "", 1), stderr
    assert stderr.startswith("error: ") and files(out) == before
    return stderr


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--num", ["0", "-3", "1.5", "1e3", "abc", "", "1000001", "99999999999"]),
        ("--steps", ["0", "-1", "2.5", "1001", "1000000"]),
        ("--batch-size", ["0", "x", "1000001", "99999999999"]),
        ("--guidance", ["inf", "-inf", "nan", "-1", "1e39", "x"]),
        ("--guidance-interval", ["nan,1", "0,inf", "0", "a,b", "0.9,0.1", "-1,1", "0,1,2", ""]),
        ("--guidance-channels", ["two", "first_three"]),
        ("--size", ["0", "-8", "9", "8.0", "nan", "8,8,8", "", "200000", "99999999998"]),
        ("--classes", ["", "1.5", "10", "-1", "all", "3,", "1_0", "True"]),
        ("--scheduler", ["plms", "ddpm", ""]),
        ("--seed", ["x", "1.5"]),
        ("--device", ["foo", "", "meta", "cuda:99"]),
        ("--dtype", ["int8", "float64"]),
        ("--vae", ["none", "/nowhere", "."]),
        ("--checkpoint", ["last", "best", "nowhere.ckpt"]),
        ("--gidance", ["2"]),
        ("--npz", ["yes"]),
    ],
)
def test_options(option: str, values: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for value in values:
        line = refused(capfd, tmp_path / "out", "--model", PIPELINE, f"{option}={value}")
        assert option in line or option in ("--scheduler", "--device"), line


def test_images_that_pillow_would_not_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert "--size 16: Pillow" in refused(capfd, tmp_path / "out", "--model", PIPELINE, "--size", 16)


def test_options_that_do_not_go_together(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert "leave out --raw" in refused(capfd, out, "--model", PIPELINE, "--raw")
    assert "leave out --checkpoint last" in refused(capfd, out, "--model", CHECKPOINT, "--checkpoint", "last")
    assert "trained on pixels" in refused(capfd, out, "--model", CHECKPOINT, "--vae", PIPELINE)
    assert "no checkpoint at" in refused(capfd, out, "--model", RUN, "--checkpoint", "best")
    assert "--model" in refused(capfd, out)
    for absent in ("", "/nowhere", "/etc/hostname", "facebook/DiT-XL-2-256", tmp_path / "absent.ckpt"):
        refused(capfd, out, "--model", absent)


@pytest.mark.parametrize(
    ("variable", "value"), [("RANK", "a"), ("WORLD_SIZE", "2"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "")]
)
def test_environment(
    variable: str, value: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    status, _, stderr = run(capfd, "--out", tmp_path / "out", "--model", PIPELINE)
    assert status == 2 and len(stderr.splitlines()) == 1 and variable in stderr


def entries(file: str, **values: Any) -> Edit:
    """Changes entries of a JSON file, or removes those that are `...`."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / file).read_text()) | values
        kept = {name: value for name, value in content.items() if value is not ...}
        (folder / file).write_text(json.dumps(kept))

    return edit


def weights(**values: Any) -> Edit:
    def edit(folder: Path) -> None:
        state = load_file(folder / WEIGHTS)
        for name, change in values.items():
            name = name.replace("__", ".")
            value = state.pop(name, torch.zeros(16))
            if change is not ...:
                state[name] = change(value)
        save_file(state, folder / WEIGHTS)

    return edit


index, network, scheduler = "model_index.json", "transformer/config.json", "scheduler/scheduler_config.json"
FORGED: dict[str, Edit] = {
    **{f"index is {text}": lambda d, text=text: (d / index).write_text(text) for text in ("", "{", "{}", "[]")},
    **{f"{value}": entries(index, _class_name=value) for value in ("DiTPipeline", None, ...)},
    **{f"network {v}": entries(index, transformer=v) for v in (..., ["os", "system"], [None, None], [])},
    **{
        f"scheduler {v}": entries(index, scheduler=v)
        for v in (..., [], [None, None], ["diffusers", "PNDMScheduler"], ["os", "system"], ["a", ["b"]])
    },
    **{f"names {v}": entries(index, class_names=v) for v in ("abc", [1], {"a": 1})},
    **{f"objective {v}": entries(index, objective=v) for v in ("flow", {"kind": "x"}, {"bogus": 1}, {"shift": "1"})},
    **{f"vae {v}": entries(index, vae=v) for v in (["diffusers", "AutoencoderKL"], "x")},
    **{f"depth {v}": entries(network, depth=v) for v in (0, 2, "x", None)},
    **{f"width {v}": entries(network, embed_dim=v) for v in (-16, 0, 32, "x")},
    "classes": entries(network, num_classes=5),
    "core": entries(network, core="unknown"),
    "heads": entries(network, num_heads=3),
    "unknown option": entries(network, bogus=3),
    "no network": lambda d: shutil.rmtree(d / "transformer"),
    "no weights": lambda d: (d / WEIGHTS).unlink(),
    "no scheduler": lambda d: shutil.rmtree(d / "scheduler"),
    **{f"weights of {n} bytes": lambda d, n=n: os.truncate(d / WEIGHTS, n) for n in (0, 7, 5000)},
    **{f"scheduler is {text}": lambda d, text=text: (d / scheduler).write_text(text) for text in ("{", "[]", "3")},
    **{f"shift {v}": entries(scheduler, shift=v) for v in (NAN, INF, "x", None)},
    "other steps": entries(scheduler, num_train_timesteps=10),
    "weight missing": weights(x_embedder__proj__bias=...),
    "weight unknown": weights(bogus=lambda value: value),
    "weight shape": weights(x_embedder__proj__bias=lambda value: value[:3].clone()),
    "weight nan": weights(x_embedder__proj__bias=lambda value: value * NAN),
    "weight inf": weights(t_embedder__mlp__0__bias=lambda value: value + INF),
}


def test_forged_pipelines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for number, (name, edit) in enumerate(FORGED.items()):
        folder = tmp_path / str(number)
        shutil.copytree(PIPELINE, folder)
        edit(folder)
        line = refused(capfd, tmp_path / "out", "--model", folder)
        assert str(folder) in line and len(line) < 700, f"{name}: {line}"


def test_forged_checkpoints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def bias(value: Any) -> Edit:
        return lambda c: c["state_dict"].update({"net.x_embedder.proj.bias": value})

    about = "headmix_vision"
    edits: dict[str, Edit] = {
        "description": lambda c: c.pop(about),
        "list": lambda c: c.update({about: [1]}),
        **{f"no {name}": lambda c, name=name: c[about].pop(name) for name in ("objective", "architecture", "name")},
        "option": lambda c: c[about]["architecture"].update(bogus=1),
        "heads": lambda c: c[about]["architecture"].update(num_heads=3),
        "objective": lambda c: c[about]["objective"].update(bogus=1),
        "shift": lambda c: c[about]["objective"].update(shift=INF),
        "vae": lambda c: c[about].update(vae=3),
        "names": lambda c: c[about].update(class_names=[1]),
        "state": lambda c: c.update(state_dict=[]),
        "empty": lambda c: c.update(state_dict={}),
        "nan": bias(torch.full((16,), NAN)),
        "text": bias("x"),
        "shape": bias(torch.zeros(3)),
    }
    for name, edit in edits.items():
        checkpoint = torch.load(CHECKPOINT, weights_only=True)
        edit(checkpoint)
        path = tmp_path / f"{name.replace(' ', '_')}.ckpt"
        torch.save(checkpoint, path)
        assert str(path) in refused(capfd, tmp_path / "out", "--model", path)
    for length in (0, 5, 9000):
        shutil.copy(CHECKPOINT, tmp_path / "cut.ckpt")
        os.truncate(tmp_path / "cut.ckpt", length)
        refused(capfd, tmp_path / "out", "--model", tmp_path / "cut.ckpt")
    assert "of the classifier" in refused(capfd, tmp_path / "out", "--model", RUN.parent / "classifier")


def test_autoencoders(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of other latents, damaged, or none."""
    folder, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(PIPELINE, folder)
    state = load_file(folder / WEIGHTS)
    state["x_embedder.proj.weight"] = state["x_embedder.proj.weight"].repeat(1, 4, 1, 1)
    state["final_layer.linear.weight"] = state["final_layer.linear.weight"].repeat(4, 1)
    state["final_layer.linear.bias"] = state["final_layer.linear.bias"].repeat(4)
    save_file(state, folder / WEIGHTS)
    entries(network, in_channels=4)(folder)
    assert "give their autoencoder by --vae" in refused(capfd, out, "--model", folder)

    blocks = {"block_out_channels": (8,), "norm_num_groups": 4, "layers_per_block": 1}
    for channels in (3, 4):
        vae = diffusers.AutoencoderKL(latent_channels=channels, **blocks)
        if channels == 4:
            torch.nn.init.constant_(vae.decoder.conv_out.bias, NAN)
        vae.save_pretrained(tmp_path / f"vae{channels}")
    assert "3 channels" in refused(capfd, out, "--model", folder, "--vae", tmp_path / "vae3")
    assert "not finite" in refused(capfd, out, "--model", folder, "--vae", tmp_path / "vae4")
    assert "no autoencoder" in refused(capfd, out, "--model", folder, "--vae", tmp_path)
    refused(capfd, out, "--model", folder, "--vae", "a/b/c")


def test_folders(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = tmp_path / "whole"
    assert run(capfd, "--model", PIPELINE, "--out", whole)[0] == 0
    edits: dict[str, Edit] = {
        **{
            f"metadata {text!r}": lambda d, text=text: (d / "metadata.json").write_bytes(text)
            for text in (b"", b"{", b"[1]", b"{}", b'{"settings": [1]}', b"\xff\xfe\x80")
        },
        "no metadata": lambda d: (d / "metadata.json").unlink(),
        "foreign": lambda d: (d / "holiday.jpg").write_bytes(b"precious"),
        "foreign sample": lambda d: (d / "images" / "notes.txt").write_text("mine"),
        "far sample": lambda d: (d / "images" / "99999999999999.png").write_bytes(b""),
        "folder for metadata": lambda d: ((d / "metadata.json").unlink(), (d / "metadata.json").mkdir()),
        "folder for grid": lambda d: ((d / "grid.png").unlink(), (d / "grid.png").mkdir()),
        "folder for npz": lambda d: (d / "samples.npz").mkdir(),
        "folder for a sample": lambda d: ((d / "images/000001.png").unlink(), (d / "images/000001.png").mkdir()),
        "file for images": lambda d: (shutil.rmtree(d / "images"), (d / "images").write_text("x")),
    }
    for number, edit in enumerate(edits.values()):
        out = tmp_path / str(number)
        shutil.copytree(whole, out)
        edit(out)
        refused(capfd, out, "--model", PIPELINE)
    for change in (("--steps", 3), ("--size", 16), ("--num", 1), ("--dtype", "bfloat16"), ("--scheduler", "heun")):
        refused(capfd, whole, "--model", PIPELINE, *change)
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("a" * 300)):
        assert run(capfd, "--model", PIPELINE, "--out", out)[0] == 2
    assert (tmp_path / "file").read_text() == "x"
