"""Choices of tiles reach the kernels that they are for."""

import argparse
from typing import Any

import pytest
import torch

from headmix_lab.tiles import KERNELS, choices, chosen, launches, make_call
from headmix_vision.ops.hardware import INTERPRETED
from headmix_vision.ops.runtime import Launch

WANTED = {"BQ": 32, "BK": 32, "BT": 32, "num_warps": 8, "maxnreg": 128, "VALUES": 32, "num_stages": 3}


@pytest.mark.skipif(not INTERPRETED, reason="notes launches of CPU tensors")
@pytest.mark.parametrize("name", KERNELS)
def test_a_choice_is_what_its_kernel_is_launched_with(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launch, "__call__", lambda *_: None)
    kernel = KERNELS[name]
    wanted = next(tiles for tiles in choices(kernel) if tiles == {entry: WANTED[entry] for entry in kernel.sizes})
    for tokens, dim in ((196, 64), (196, 72), (1024, 64)):
        if (kernel.resident or not kernel.regime) and (tokens, dim) != (196, 64):
            continue  # takes no others, or gives them other warps
        call = make_call(kernel, argparse.Namespace(tokens=tokens, batch=1, heads=2, dim=dim, r=4), torch.device("cpu"))

        def launched(tiles: dict[str, Any] | None) -> dict[str, Any]:
            with chosen(kernel, dim, tiles), launches() as found:  # noqa: B023
                call()  # noqa: B023
            return found[f"{name}_kernel"]

        before = launched(None)
        found = launched(wanted)
        assert {entry: found.get(entry) for entry in wanted} == wanted != before
        with pytest.raises(KeyboardInterrupt), chosen(kernel, dim, wanted):
            raise KeyboardInterrupt
        assert launched(None) == before
