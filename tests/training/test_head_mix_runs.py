"""Training of models that mix heads: a run goes on bit for bit, and wrong options of a mix are refused in one line."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from headmix_vision.cli import export
from headmix_vision.runs.checkpoints import model_state, read_checkpoint

from . import gen_helpers
from .helpers import TINY, assert_same_run, run, write_config
from .test_refusals import refused
from .test_resume import interrupt_in

MIXED: dict[str, Any] = {
    "model__name": "vit_hih_iha_tiny",
    "model__model_args": {
        **TINY["model"]["model_args"],
        **{"global_every": 2, "head_mix_args": {"collapse": "across_heads"}, "core_args": {"num_sub_heads": 2}},
    },
}


def test_interrupted_run_continues_bit_for_bit_and_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "tiny.yaml", **MIXED)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "whole") == 0
    with monkeypatch.context() as context:
        interrupt_in(context, "training_step", 1, 2, signal.SIGINT)
        assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 130
    assert run("fit", "-c", tmp_path / "run" / "config.yaml", "--ckpt_path", "last") == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    weights = model_state(read_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt"))
    assert weights["blocks.0.attn.head_mix.mix"].shape == (3, 2, 3, 3)
    assert "blocks.1.attn.head_mix.mix" not in weights  # the layer of the schedule without a mix

    capsys.readouterr()
    export.main([str(tmp_path / "run"), "--checkpoint", "last", "--out", str(tmp_path / "model.safetensors")])
    scope: dict[str, torch.nn.Module] = {}
    exec(capsys.readouterr().out, scope)
    loaded = scope["model"].state_dict()
    assert loaded.keys() == weights.keys() and all(torch.equal(loaded[name], weights[name]) for name in loaded)


WRONG = [
    ("pseudo_heads: 0", "pseudo_heads must be a whole number of at least 1, got 0"),
    ("pseudo_heads: two", "pseudo_heads must be a whole number of at least 1, got 'two'"),
    ("pseudo_head: 2", "head_mix_args of 'iha' has no 'pseudo_head'; did you mean pseudo_heads"),
    ("collapse: sum", "collapse must be one of ('per_head', 'across_heads'), got 'sum'"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_options_of_a_mix(options: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "tiny.yaml", model__name="vit_mhla_iha_tiny")
    arguments = ("--run_dir", tmp_path / "run", f"--model.model_args.head_mix_args={{{options}}}")
    assert message in refused(capfd, "fit", "-c", config, *arguments)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--model.name", "dit_mhla_mea_digits", "--model.model_args.head_mix_args={component_heads: 3}"),
            "from 1 to 2",
        ),
        (("--model.model_args.head_mix_args={pseudo_heads: 2}",), "needs a head_mix, one of"),
        (("--model.model_args.head_mix", "ihaa"), "head_mix must be None or one of"),
        (("--model.model_args.global_every", "2"), "global_every=2 needs a head_mix or a window"),
        (
            ("--model.name", "dit_softmax_digits", "--model.model_args.core_args={window: 5}"),
            "window (5, 5) is larger than the token grid (4, 4)",
        ),
        (
            ("--model.name", "dit_iha_digits", "--model.model_args.global_every", "1"),
            "global_every must be 0, or at least 2, got 1",
        ),
    ],
)
def test_wrong_options_of_a_generator(
    options: tuple[str, ...], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = gen_helpers.write_config(tmp_path / "tiny.yaml")
    capfd.readouterr()
    assert gen_helpers.run("fit", "-c", config, "--run_dir", tmp_path / "run", *options) == 2
    said = capfd.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert message in line and "Traceback" not in said
