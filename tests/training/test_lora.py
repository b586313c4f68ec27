"""LoRA of converted Wan and Sana: small checkpoints, exact resuming, two processes, merged and separate adapters."""

import copy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from headmix_vision.cli import distill, export, train_gen
from headmix_vision.models.convert import wan_to_mhla
from headmix_vision.models.lora import LoraConfig, LoraTransformer
from headmix_vision.runs.checkpoints import read_checkpoint

from . import test_prompted
from .test_prompted import call, fit, weights

made = test_prompted.made  # the fixture

LORA = ("--model.lora.rank", 2, "--model.lora.alpha", 4.0)


def exported(run: Path, out: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """Export a run, and open it as the command says."""
    capsys.readouterr()
    assert call(export.main, run, "--out", out, *options) == 0
    scope: dict[str, Any] = {}
    exec(capsys.readouterr().out, scope)
    scope["pipe"].set_progress_bar_config(disable=True)
    return scope["pipe"]


@pytest.mark.parametrize("kind", ["wan", pytest.param("sana", marks=pytest.mark.slow)])
def test_adapters_are_trained_resumed_merged_and_loaded(
    kind: str,
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert fit(made, kind, whole, *LORA) == 0
    assert fit(made, kind, parts, *LORA, "--trainer.max_steps", 3) == 0
    assert fit(made, kind, parts, *LORA, "--ckpt_path", "last") == 0
    one, other = (read_checkpoint(run / "checkpoints" / "last.ckpt") for run in (whole, parts))
    for state in ("state_dict", "current_model_state"):
        assert all(".lora_" in name or ".attn1.processor." in name for name in one[state])
        assert any(bool(tensor.any()) for name, tensor in one[state].items() if ".lora_B." in name)
        for name, tensor in one[state].items():
            assert torch.equal(other[state][name], tensor), name

    assert call(train_gen.main, "validate", "--run_dir", whole, "--data.val_split", "train") == 0
    drawn = {"prompt": "a red square", "num_inference_steps": 2, "output_type": "latent", "height": 32, "width": 32}
    drawn |= {"num_frames": 5} if kind == "wan" else {"use_resolution_binning": False}
    pictures = []
    for name, options in (("merged", ()), ("apart", ("--adapter",))):
        pipe = exported(whole, tmp_path / name, capsys, *options)
        pictures.append(pipe(**drawn, generator=torch.Generator().manual_seed(0))[0])
    assert (tmp_path / "apart" / "pytorch_lora_weights.safetensors").is_file()
    assert not (tmp_path / "merged" / "pytorch_lora_weights.safetensors").is_file()
    torch.testing.assert_close(pictures[0], pictures[1])
    pipe.unload_lora_weights()
    assert not torch.allclose(pictures[0], pipe(**drawn, generator=torch.Generator().manual_seed(0))[0])


def test_copies_share_the_frozen_weights() -> None:
    torch.manual_seed(0)
    original = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, ffn_dim=32, num_layers=1, text_dim=16, rope_max_seq_len=32
    )
    network = LoraTransformer(wan_to_mhla(original), LoraConfig(2))
    for (name, one), other in zip(network.named_parameters(), copy.deepcopy(network).parameters(), strict=True):
        assert (one is other) == (not one.requires_grad) and torch.equal(one, other), name
    trained = {name: value.clone() for name, value in network.state_dict().items()}
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(parameter.requires_grad)
    network.load_state_dict(trained)
    assert all(torch.equal(value, trained[name]) for name, value in network.state_dict().items())
    with pytest.raises(RuntimeError, match="lora_A"):
        network.load_state_dict({name: value for name, value in trained.items() if "lora_A" not in name})


@pytest.mark.slow
def test_adapters_learn_from_the_original(made: Path, tmp_path: Path) -> None:
    options = (*LORA, "--model.distill_steps", 3, "--model.teacher_weight", 1.0)
    assert fit(made, "wan", tmp_path / "run", *options, main=distill.main) == 0
    assert any(".lora_A." in name for name in weights(tmp_path / "run"))


def test_wrong_adapters_are_refused_in_one_line(
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(message: str, status: int) -> None:
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert status == 2 and len(lines) == 1 and message in lines[0], lines

    shutil.copytree(made / "wan", tmp_path / "wan")
    pipeline = ("--model.transformer", tmp_path / "wan")
    run, plain, last = tmp_path / "run", tmp_path / "plain", ("--ckpt_path", "last")
    assert fit(made, "wan", run, *pipeline, *LORA, "--trainer.max_steps", 3) == 0
    assert fit(made, "wan", plain, "--trainer.max_steps", 3) == 0
    refused(
        "Target modules {'nope'} not found",
        fit(made, "wan", tmp_path / "no", "--model.lora.rank", 2, "--model.lora.targets", "[nope]"),
    )
    refused("--model.lora.alpha has no effect", fit(made, "wan", tmp_path / "no", *LORA[2:]))
    refused("lora.rank must be a whole number", fit(made, "wan", tmp_path / "no", "--model.lora.rank", -1))
    refused("the checkpoint has no teacher", fit(made, "wan", plain, *last, main=distill.main))
    start_weights = ("--model.checkpoint", plain / "checkpoints" / "last.ckpt")
    refused("does not apply to model.lora", fit(made, "wan", tmp_path / "no", *LORA, *start_weights))
    refused("the checkpoint has model.lora=", fit(made, "wan", run, *pipeline, "--model.lora.rank", 3, *last))
    refused("--adapter applies only to", call(export.main, plain, "--out", tmp_path / "out", "--adapter"))
    file = tmp_path / "wan" / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({name: value + 1 for name, value in load_file(file).items()}, file, {"format": "pt"})
    refused("has other weights than when", call(export.main, run, "--out", tmp_path / "out"))
    refused("the checkpoint has model.lora=", fit(made, "wan", run, *pipeline, *LORA, *last))
    monkeypatch.setitem(sys.modules, "peft", None)
    refused(
        "model.lora needs the package peft: pip install 'headmix_vision[lora]'",
        fit(made, "wan", tmp_path / "no", *LORA),
    )
