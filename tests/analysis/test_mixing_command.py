"""`headmix analyze mixing`: what it opens, what it leaves in its folder, and what it refuses in one line."""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from headmix_vision.cli.analyze import main as analyze
from headmix_vision.runs.exporting import ExportRequest, export_run

FIXTURES = Path(__file__).parents[1] / "fixtures" / "v0_1_0"
GENERATOR, PIPELINE = FIXTURES / "generator", FIXTURES / "generator" / "pipeline"
SMALL = {"embed_dim": 16, "depth": 2}


def write_run(folder: Path, name: str, **model_args: Any) -> Path:
    """Write the best checkpoint of a classifier's run, whose average differs from the weights being trained."""
    torch.manual_seed(0)
    average, trained = (timm.create_model(name, **SMALL, **model_args).state_dict() for _ in range(2))
    about = {"name": name, "num_classes": 10, "img_size": None, "model_args": {**SMALL, **model_args}}
    about |= {"class_names": None, "top1": 0.5}
    (folder / "checkpoints").mkdir(parents=True)
    states = {"state_dict": average, "current_model_state": trained}
    named = {key: {f"net.{k}": v for k, v in state.items()} for key, state in states.items()}
    torch.save({**named, "global_step": 7, "headmix_vision": about}, folder / "checkpoints" / "best.ckpt")
    return folder


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", "deit_mhla_iha_digits")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    try:
        analyze(["mixing", "--model", *map(str, arguments)])
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    return status, *capsys.readouterr()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*"))}


def refused(capsys: pytest.CaptureFixture[str], out: Path, *arguments: object) -> str:
    """The line that is printed, where what lies in the folder stays as it is."""
    before = files(out)
    status, stdout, stderr = run(capsys, *arguments, "--out", out)
    assert (status, stdout, len(stderr.splitlines())) == (2, "", 1), stderr
    assert stderr.startswith("error: ") and files(out) == before
    return stderr


def test_a_run_leaves_pictures_and_numbers(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "pictures"
    status, stdout, stderr = run(capsys, run_dir, "--out", out, "--dry-run")
    assert (status, stderr, out.exists()) == (0, "", False)
    assert [line.split(": ")[0] for line in stdout.splitlines()] == [
        f"would draw {out / name}" for name in ("iha.png", "mhla.png")
    ]
    assert run(capsys, run_dir, "--out", out) == (0, stdout.replace("would draw ", ""), "")
    drawn = files(out)
    assert list(drawn) == ["iha.png", "mhla.png", "mixing.json"]
    for name in ("iha.png", "mhla.png"):
        with Image.open(out / name) as picture:
            assert picture.width > 500 and len(picture.convert("RGB").getcolors(1 << 24) or ()) > 20
    numbers = json.loads(drawn["mixing.json"])
    (about,), settings = numbers.pop("networks"), numbers.pop("settings")
    assert settings == {}
    assert (about["name"], about["step"], about["weights"]) == ("deit_mhla_iha_digits", 7, "ema")
    assert {name: [entry["name"] for entry in of_kind] for name, of_kind in numbers.items()} == {
        kind: ["blocks.0.attn", "blocks.1.attn"] for kind in ("iha", "mhla")
    }
    # the same command again replaces what it made, after whatever a killed one has left
    (out / "iha.png").unlink()
    (out / f".mhla.png.{os.getpid()}.tmp").touch()
    assert run(capsys, run_dir, "--out", out)[0] == 0
    assert files(out) == drawn


def test_exports_are_the_runs_they_come_from(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    exported = tmp_path / "model.safetensors"
    export_run(ExportRequest(run=run_dir / "checkpoints" / "best.ckpt", out=exported))
    numbers = []
    for name, source in (("a", run_dir), ("b", run_dir / "checkpoints" / "best.ckpt"), ("c", exported)):
        assert run(capsys, source, "--out", tmp_path / name)[0] == 0
        numbers.append(json.loads((tmp_path / name / "mixing.json").read_text()))
    hashes = {of_source.pop("networks")[0]["weights_sha256"] for of_source in numbers}
    assert len(hashes) == 1 and numbers[0] == numbers[1] == numbers[2]


def test_generators_are_opened_without_their_autoencoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, source, weights in (("run", GENERATOR, "ema"), ("pipeline", PIPELINE, "exported")):
        assert run(capsys, source, "--out", tmp_path / name)[0] == 0
        assert list(files(tmp_path / name)) == ["mhla.png", "mixing.json"]
        numbers = json.loads((tmp_path / name / "mixing.json").read_text())
        assert numbers["networks"][0]["weights"] == weights
        assert [(entry["layer"], entry["head"]) for entry in numbers["mhla"]] == [(0, 0), (0, 1)]


def test_wrong_input_is_refused(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    kinds = "is neither a run directory (with checkpoints/), nor a .ckpt, nor a .safetensors of headmix export, nor an"
    for source in (tmp_path / "absent", tmp_path / "empty", Path(__file__), tmp_path / "absent.safetensors"):
        assert f"{source} {kinds}" in refused(capsys, out, source)
    assert "no checkpoint at" in refused(capsys, out, tmp_path / "absent.ckpt")
    assert "asked for last" in refused(capsys, out, run_dir, "--checkpoint", "last")
    best = run_dir / "checkpoints" / "best.ckpt"
    assert "is a checkpoint itself: leave out --checkpoint best" in refused(capsys, out, best, "--checkpoint", "best")
    assert "leave out --raw" in refused(capsys, out, PIPELINE, "--raw")
    assert "leave out --checkpoint last" in refused(capsys, out, PIPELINE, "--checkpoint", "last")
    assert "--rav; did you mean --raw?" in refused(capsys, out, run_dir, "--rav")
    assert "--data is not an option of this command" in refused(capsys, out, run_dir, "--data")
    assert run(capsys, run_dir)[:2] == (2, "")

    for name in ("deit_softmax_digits", "deit_hih_digits"):
        plain = write_run(tmp_path / name, name)
        line = refused(capsys, out, plain)
        assert f"nothing can be drawn of {plain} ({name}): it has neither" in line
    assert not out.exists()


def test_damaged_files_are_refused(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, source = tmp_path / "out", tmp_path / "model.safetensors"
    export_run(ExportRequest(run=run_dir / "checkpoints" / "best.ckpt", out=source))
    whole, state = source.read_bytes(), load_file(source)
    for kept in (0, 5, 300, len(whole) - 50):
        source.write_bytes(whole[:kept])
        assert "is truncated or no safetensors file" in refused(capsys, out, source)
    header = {"model_name": "deit_mhla_iha_digits", "model_args": json.dumps(SMALL)}
    for change, message in (
        ({"model_name": "no_such_model"}, "which timm does not know here"),
        ({"model_name": "dit_mhla_digits"}, "is of the generator dit_mhla_digits, whose export is a directory"),
        ({"model_args": "{"}, "model_args of .* is damaged"),
        ({"model_args": '{"depth": 3, "embed_dim": 16}'}, "does not fit model"),
    ):
        save_file(state, source, metadata={**header, **change})
        line = refused(capsys, out, source)
        assert message in line or "is damaged" in line
    save_file(state, source)
    assert "does not say of which model it is: it was not written by headmix export" in refused(capsys, out, source)
    save_file({**state, "blocks.0.attn.head_mix.mix": torch.full((3, 2, 2, 2), torch.nan)}, source, metadata=header)
    assert "are not finite, first blocks.0.attn.head_mix.mix" in refused(capsys, out, source)

    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes((run_dir / "checkpoints" / "best.ckpt").read_bytes()[:2000])
    assert "is not a checkpoint, or it is truncated" in refused(capsys, out, tmp_path / "run")
    broken = tmp_path / "pipeline"
    shutil.copytree(PIPELINE, broken)
    weights = broken / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "is not a pipeline of this package" in refused(capsys, out, broken)
    assert not out.exists()


def test_folders_of_others_are_left_alone(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    (tmp_path / "file").touch()
    assert "is a file, it must be a directory" in refused(capsys, tmp_path / "file", run_dir)
    out.mkdir()
    (out / "thesis.png").touch()
    assert "holds thesis.png, which is not a result of an analysis" in refused(capsys, out, run_dir)
    (out / "thesis.png").rename(out / "iha.png")
    assert "holds iha.png without mixing.json" in refused(capsys, out, run_dir)
    (out / "iha.png").unlink()
    assert run(capsys, run_dir, "--out", out)[0] == 0
    assert "holds results of other weights; choose another --out" in refused(capsys, out, run_dir, "--raw")
    for text in (
        "{",
        "[]",
        '{"networks": 3}',
        '{"networks": [{}], "settings": {}}',
        '{"networks": [3], "settings": {}}',
    ):
        (out / "mixing.json").write_text(text)
        assert "mixing.json is damaged" in refused(capsys, out, run_dir)


def test_the_package_is_a_command(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        sys, "argv", ["analysis", "mixing", "--model", str(run_dir), "--out", str(tmp_path / "out"), "--dry-run"]
    )
    runpy.run_module("headmix_vision.analysis", run_name="__main__")
    assert "iha.png: 2 layers" in capsys.readouterr().out
