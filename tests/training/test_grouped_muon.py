"""GroupedMuon against timm's Muon: the same parameters and states, in fewer iterations."""

import copy

import pytest
import torch
from timm.optim import Muon
from torch import nn

from headmix_vision.training import grouped_muon
from headmix_vision.training.classifier import ImageClassifier
from headmix_vision.training.grouped_muon import GroupedMuon
from headmix_vision.training.options import OptimizerConfig

OPTIONS = {
    "muon": {},
    "nesterov": {"nesterov": True, "weight_decay": 0.1},
    "scaled": {
        "adjust_lr_fn": "original",
        "scale_eps": True,
        "ns_coefficients": "polar_express",
        "safety_factor": 1.01,
    },
    "unscaled": {"adjust_lr_fn": None, "ns_steps": 2, "momentum": 0.8},
    "adamuon": {"algo": "adamuon"},
}


def networks() -> tuple[nn.Module, nn.Module]:
    """Two equal ones: matrices of three shapes, one of them once, vectors, a kernel, and an unused layer."""
    torch.manual_seed(0)
    layers = [
        nn.Linear(8, 24),
        nn.Linear(24, 8),
        nn.Linear(8, 24),
        nn.Linear(24, 8),
        nn.Linear(8, 24),
        nn.Linear(24, 6),
    ]
    network = nn.ModuleList([*layers, nn.Conv2d(4, 6, 3), nn.Linear(8, 24)])
    return network, copy.deepcopy(network)


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in [*network.parameters()][:-2]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        if step == 3:
            network[2].weight.grad = None
        optimizer.step()
        assert step == 3 or network[2].weight.grad is not None, "gradients are still there"


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps_and_states_are_those_of_timm(options):
    (ours, theirs), made = networks(), {"lr": 0.02, **options}
    train(theirs, expected := Muon(theirs.parameters(), **made), range(6))
    train(ours, first := GroupedMuon(ours.parameters(), **made), range(2))
    resumed = GroupedMuon(ours.parameters(), **made)
    resumed.load_state_dict(first.state_dict())
    train(ours, resumed, range(2, 6))
    start, _ = networks()
    for name, parameter in ours.named_parameters():
        moved = (theirs.get_parameter(name) - start.get_parameter(name)).norm()
        assert (parameter - theirs.get_parameter(name)).norm() <= 1e-2 * moved, name  # products of bfloat16
    assert [*resumed.state_dict()["state"]] == [*expected.state_dict()["state"]]
    for mine, other in zip(resumed.state.values(), expected.state.values(), strict=True):
        assert mine.keys() == other.keys()
        for name in mine.keys() - {"use_muon"}:
            torch.testing.assert_close(mine[name], other[name])
    assert resumed.param_groups[0].keys() == expected.param_groups[0].keys()


@pytest.mark.parametrize("elements, sizes", [(2**24, [3, 2]), (2 * 8 * 24, [2, 2]), (1, [])])
def test_matrices_of_a_shape_share_an_iteration(monkeypatch, elements, sizes):
    network, _ = networks()
    optimizer, seen = GroupedMuon(network.parameters(), lr=0.02), []
    iterate = grouped_muon.zeropower_via_newtonschulz

    def count(matrices, *rest, **options):
        seen.append(len(matrices))
        return iterate(matrices, *rest, **options)

    monkeypatch.setattr(grouped_muon, "GROUP_ELEMENTS", elements)
    monkeypatch.setattr(grouped_muon, "zeropower_via_newtonschulz", count)
    train(network, optimizer, range(1))
    assert not seen, "the first step makes the states"
    train(network, optimizer, range(1, 2))
    assert seen == sizes


@pytest.mark.parametrize("name", ["muon", "nmuon"])
def test_runs_take_it_with_the_options_of_timm(name):
    module = ImageClassifier("deit_mhla_digits", optimizer=OptimizerConfig(opt=name, lr=0.01))
    optimizer = module.configure_optimizers()
    assert type(optimizer) is GroupedMuon
    assert {group["nesterov"] for group in optimizer.param_groups} == {name == "nmuon"}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, OptimizerConfig().weight_decay}
