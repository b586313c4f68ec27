"""Export, and starting from exported weights."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open

from headmix_vision.cli import export
from headmix_vision.runs.checkpoints import model_state, read_checkpoint
from headmix_vision.runs.exporting import ExportRequest, export_run
from headmix_vision.runs.networks import create_network

from .helpers import TINY

ARGUMENTS = {"patch_size": 2, "in_chans": 1, "depth": 2, "embed_dim": 24, "num_heads": 3, "img_size": 8}


@pytest.mark.parametrize("raw", [False, True])
def test_timm_loads_the_exported_file(
    raw: bool, reference_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model.safetensors"
    export.main([str(reference_run), "--out", str(out), "--checkpoint", "last", *(["--raw"] if raw else [])])
    printed = capsys.readouterr().out
    scope: dict[str, torch.nn.Module] = {}
    exec(printed, scope)
    loaded = scope["model"].eval()

    checkpoint = read_checkpoint(reference_run / "checkpoints" / "last.ckpt")
    expected = timm.create_model("vit_tiny_patch16_224", num_classes=10, **ARGUMENTS).eval()
    expected.load_state_dict(model_state(checkpoint, raw=raw))
    images = torch.randn(3, 1, 8, 8)
    assert torch.equal(loaded(images), expected(images))
    assert not torch.equal(model_state(checkpoint)["head.weight"], model_state(checkpoint, raw=True)["head.weight"])


def test_header_describes_the_model(reference_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    export.main([str(reference_run / "checkpoints" / "best.ckpt"), "--out", str(out)])
    with safe_open(out, "pt") as file:
        header = file.metadata()
    assert header["format"] == "pt"
    assert header["model_name"] == "vit_tiny_patch16_224"
    assert json.loads(header["model_args"]) == {**ARGUMENTS, "num_classes": 10}
    assert 0 <= json.loads(header["top1"]) <= 1
    assert json.loads(header["class_names"]) == [str(i) for i in range(10)]


def test_export_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        export.main([str(tmp_path), "--out", str(tmp_path / "model.safetensors")])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: no checkpoint at")


def test_start_weights(reference_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    checkpoint = reference_run / "checkpoints" / "last.ckpt"
    export_run(ExportRequest(run=checkpoint, out=out))
    model_args = TINY["model"]["model_args"]
    expected = model_state(read_checkpoint(checkpoint))
    for path in (out, checkpoint):
        network = create_network("vit_tiny_patch16_224", 10, 8, model_args, str(path))
        assert torch.equal(network.state_dict()["head.weight"], expected["head.weight"])
        assert "state_dict" not in network.pretrained_cfg
        with pytest.raises(ValueError, match="has 10 classes, the model 7"):
            create_network("vit_tiny_patch16_224", 7, 8, model_args, str(path))
        with pytest.raises(ValueError, match="does not fit model"):
            create_network("vit_tiny_patch16_224", 10, 8, {**model_args, "depth": 3}, str(path))
    larger = create_network("vit_tiny_patch16_224", 10, 12, model_args, str(out))
    assert larger.pos_embed.shape[1] == 37


def test_unknown_model_suggests_a_name() -> None:
    with pytest.raises(ValueError, match=r"did you mean.*vit_tiny_patch16_224"):
        create_network("vit_tiny_patch16_225")
