"""Choices of tiles reach the kernels that they are for."""

import argparse
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headmix_lab.tiles import KERNELS, choices, chosen, launches, main, make_call, read_sizes
from headmix_vision.ops.hardware import INTERPRETED
from headmix_vision.ops.runtime import Launch

WANTED = {"BQ": 32, "BK": 32, "BT": 32, "num_warps": 8, "maxnreg": 128, "VALUES": 32, "num_stages": 3}


def launched(name: str, call: Callable[[], object], tiles: dict[str, Any] | None) -> dict[str, Any]:
    with chosen(KERNELS[name], tiles), launches() as found:
        call()
    return found[f"{name}_kernel"]


@pytest.mark.skipif(not INTERPRETED, reason="notes launches of CPU tensors")
@pytest.mark.parametrize("name", KERNELS)
def test_a_choice_is_what_its_kernel_is_launched_with(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launch, "__call__", lambda *_: None)
    kernel = KERNELS[name]
    wanted = next(tiles for tiles in choices(kernel) if tiles == {entry: WANTED[entry] for entry in kernel.sizes})
    others = () if kernel.resident or not kernel.regime else ((196, 72), (1024, 64))  # which the rest does not take
    for tokens, dim in ((196, 64), *others):
        given = argparse.Namespace(tokens=tokens, batch=1, heads=2, dim=dim, r=4, dtype="bfloat16")
        call = make_call(kernel, given, torch.device("cpu"))
        before = launched(name, call, None)
        found = launched(name, call, wanted)
        assert {entry: found.get(entry) for entry in wanted} == wanted != before
        with pytest.raises(KeyboardInterrupt), chosen(kernel, wanted):
            raise KeyboardInterrupt
        assert launched(name, call, None) == before


def test_values_to_try_are_read() -> None:
    assert read_sizes("STAGES=0,2") == ("STAGES", (0, 2))
    assert read_sizes("DOTS=True,None") == ("DOTS", (True, None))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tokens", "0"], "tokens must be a whole number of at least 1, got 0."),
        (["--try", "VALUES"], "--try VALUES: give a constant and its values, such as maxnreg=None,128"),
    ],
)
def test_wrong_numbers_are_refused(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["scan", *given])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"
