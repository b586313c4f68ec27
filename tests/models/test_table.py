"""Operations and parameters of the models, and the table of them in the documents."""

import shlex
import subprocess
from pathlib import Path

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from headmix_vision.models.model_list import count_flops, describe
from headmix_vision.models.table import main, rows

DOCUMENT = Path(__file__).parents[2] / "docs" / "using_models.md"


def counted_by_torch(model):
    """What PyTorch sees in a forward pass of one image on the meta device: products and convolutions."""
    x = torch.empty(1, *model.pretrained_cfg["input_size"], device="meta")
    conditions = (torch.empty(1, device="meta"), torch.empty(1, dtype=torch.long, device="meta"))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(x, *(conditions if hasattr(model, "x_embedder") else ()))
    return counter.get_total_flops()


ACROSS = {"head_mix_args": {"pseudo_heads": 3, "collapse": "across_heads"}}
UNFOLDED = {"head_mix_args": {"fold": False}}  # else weights are composed, not tokens
COUNTED = [
    ("deit_softmax_small", {}),
    ("deit_softmax_iha_small", ACROSS),
    ("deit_softmax_mea_small", {"head_mix_args": {"component_heads": 2}}),
    ("vit_softmax_mea_tiny_patch16_384", {"head_mix_args": {"key_value_heads": 1}}),
    ("deit_softmax_digits", {}),
    ("vit_softmax_tiny", {"reg_tokens": 4, "output_gate": True, "cpe": True, "qkv_bias": False}),
    ("dit_softmax_s_2", {}),
    ("dit_softmax_iha_s_4", ACROSS),
    ("dit_softmax_mea_s_2", {"learned_variance": True, **UNFOLDED}),
    ("dit_mhla_s_2", {}),  # its blocks are equal: none is filled up
    ("dit_mhla_mea_s_2", UNFOLDED),
]


@pytest.mark.parametrize(("name", "options"), COUNTED)
def test_operations_are_those_that_torch_counts(name, options):
    with torch.device("meta"):
        model = timm.create_model(name, depth=2, **options)
    assert count_flops(model) == counted_by_torch(model)


def test_operations_that_only_an_implementation_does():
    """Pseudo-heads collapsed to their own heads are weighed by a matrix that is zero for all other heads."""
    with torch.device("meta"):
        model = timm.create_model("deit_softmax_iha_small", depth=2)
    zeros = 2 * 197 * 64 * (2 * 6) * (6 - 1)
    assert counted_by_torch(model) - count_flops(model) == 2 * zeros


def test_published_operations():
    """Multiply-adds of DeiT-S/16 and DiT-S/2, B/2 in units of 10^9: 4.6, 6.06, 23.01 (arXiv 2012.12877, 2212.09748)."""
    for name, published in {"deit_softmax_small": 4.6, "dit_softmax_s_2": 6.06, "dit_softmax_b_2": 23.01}.items():
        with torch.device("meta"):
            assert count_flops(timm.create_model(name)) / 2e9 == pytest.approx(published, rel=0.01)


def test_the_table_of_the_document_is_that_of_the_command():
    section = DOCUMENT.read_text().split("<!-- models -->")[1].split("<!-- end of models -->")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    (command,) = (line for line in section.splitlines() if line.startswith("python -m headmix_vision.models.table "))
    expanded = subprocess.check_output(["bash", "-c", f"echo {command}"], text=True)
    names = shlex.split(expanded)[3:]
    assert [line.split("`")[1] for line in lines[2:]] == names
    assert lines == list(rows(describe(names)))


def test_command_line(capsys: pytest.CaptureFixture[str]):
    main(["deit_softmax_tiny", "*_softmax_tiny"])
    assert capsys.readouterr().out.splitlines() == [
        "| model | parameters, M | GFLOPs | input |",
        "|---|---:|---:|---|",
        "| `deit_softmax_tiny` | 5.72 | 2.51 | 3 x 224 x 224 |",
        "| `vit_softmax_tiny` | 5.72 | 2.51 | 3 x 224 x 224 |",
    ]
    with pytest.raises(SystemExit, match="2"):
        main(["deit_softmax_tinny"])
    assert "no model of this package is called deit_softmax_tinny" in capsys.readouterr().err
