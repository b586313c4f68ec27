"""Choices of tiles reach the kernels that they are for."""

import argparse
from typing import Any

import pytest
import torch

from headmix_lab.tiles import KERNELS, choices, chosen, make_call
from headmix_vision.ops.runtime import Launch

SMALL = {"BQ": 32, "BK": 32, "BT": 32, "num_warps": 8, "maxnreg": 128, "VALUES": 32, "num_stages": 3}


@pytest.mark.parametrize("name", KERNELS)
def test_a_choice_is_what_its_kernel_is_launched_with(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: dict[str, dict[str, Any]] = {}

    def record(launch: Launch, *tensors: Any) -> None:
        launched[launch.kernel.__name__] = launch.constants

    monkeypatch.setattr(Launch, "__call__", record)
    kernel = KERNELS[name]
    wanted = next(tiles for tiles in choices(kernel) if tiles == {x: SMALL[x] for x in tiles} and len(tiles) > 1)
    given = argparse.Namespace(tokens=64, batch=1, heads=2, dim=64, r=4)
    call = make_call(kernel, given, torch.device("cpu"))
    with chosen(kernel, given.dim, wanted):
        call()
    found = launched[f"{name}_kernel"]
    assert {entry: found.get(entry) for entry in wanted} == wanted
    with chosen(kernel, given.dim, None):
        call()
    assert launched[f"{name}_kernel"] != found
