"""The list of models."""

import pytest
import timm

from headmix_vision.cli.models import main
from headmix_vision.layers.cores import SoftmaxCore
from headmix_vision.models import table
from headmix_vision.models.model_list import count_flops, describe, find_names
from headmix_vision.models.names import FAMILIES


def test_names_are_those_that_timm_knows():
    names = find_names([])
    assert set(names) == {name for variants in FAMILIES.values() for name in variants} <= set(timm.list_models())
    assert find_names(["dit_mhla_s_*", "deit_hih_tiny"]) == ["deit_hih_tiny", *(f"dit_mhla_s_{p}" for p in (2, 4, 8))]


def test_sizes_are_those_of_the_models():
    (model,) = describe(["deit_mhla_digits"])
    made = timm.create_model("deit_mhla_digits")
    parameters = sum(p.numel() for p in made.parameters())
    assert model == ("deit_mhla_digits", parameters, count_flops(made), (1, 8, 8), True)


def test_command_line(capsys: pytest.CaptureFixture[str]):
    main(["deit_softmax_tiny", "deit_softmax_digits"])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["deit_softmax_digits", "0.21", "M", "0.03", "GFLOPs", *["1", "x", "8", "x", "8"], "pretrained"],
        ["deit_softmax_tiny", "5.72", "M", "2.51", "GFLOPs", *["3", "x", "224", "x", "224"]],
    ]
    with pytest.raises(SystemExit, match="2"):
        main(["deit_mlha_small"])
    assert "no model of this package is called deit_mlha_small; did you mean deit_mhla_small" in capsys.readouterr().err


def test_a_core_that_does_not_count_its_operations_is_listed_without_them(capsys, monkeypatch):
    monkeypatch.delattr(SoftmaxCore, "flops")
    main(["deit_softmax_digits"])
    assert capsys.readouterr().out.split()[3:5] == ["–", "GFLOPs"]
    table.main(["deit_softmax_digits"])
    assert capsys.readouterr().out.splitlines()[-1] == "| `deit_softmax_digits` | 0.21 | – | 1 x 8 x 8 |"
