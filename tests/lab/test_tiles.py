"""Choices of tiles reach the kernels that they are for."""

import argparse
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headmix_lab.tiles import CONSTANTS, KERNELS, choices, chosen, launches, main, make_call, read_sizes
from headmix_vision.ops import hardware
from headmix_vision.ops.hardware import INTERPRETED
from headmix_vision.ops.runtime import Launch

WANTED = {"BQ": 32, "BK": 32, "BT": 32, "num_warps": 8, "maxnreg": 128, "VALUES": 32, "num_stages": 3}


def launched(name: str, call: Callable[[], object], tiles: dict[str, Any] | None) -> dict[str, Any]:
    with chosen(KERNELS[name], tiles), launches() as found:
        call()
    return found[f"{name}_kernel"]


@pytest.mark.skipif(not INTERPRETED, reason="notes launches of CPU tensors")
@pytest.mark.parametrize(("capability", "kilobytes"), [((9, 0), 227), ((8, 9), 99), ((8, 0), 163)])
@pytest.mark.parametrize("name", KERNELS)
def test_a_choice_is_what_its_kernel_is_launched_with(
    name: str, capability: tuple[int, int], kilobytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = hardware.Gpu("a GPU", capability, kilobytes << 10)
    monkeypatch.setattr(hardware, "find_gpu", lambda device: gpu)
    monkeypatch.setattr(Launch, "__call__", lambda *_: None)
    kernel = KERNELS[name]
    wanted = next(tiles for tiles in choices(kernel) if tiles == {entry: WANTED[entry] for entry in kernel.sizes})
    sizes = [(196, 64)]
    if kernel.regime == "pairwise" and not kernel.resident:
        sizes += [(196, 72), (1024, 64)]
    if kernel.regime == "summary":
        sizes = [(1024, 64), (1024, 72)]  # blocks of 64 tokens: elsewhere tiles can be too long for parts
    for tokens, dim in sizes:
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
    assert read_sizes("DOTS=True,False") == ("DOTS", (True, False))
    assert read_sizes("maxnreg=None,128") == ("maxnreg", (None, 128))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tokens", "0"], "tokens must be a whole number of at least 1, got 0."),
        *(
            (["--try", text], f"--try {text}: give the constant's values, such as maxnreg=None,128 or DOTS=True,False")
            for text in ("VALUES", "BT=-1", "BT=0", "num_warps=None", "DOTS=2", "STAGES=x", "maxnreg=True")
        ),
        *(
            (["--try", text], f"--try {text}: no constant of the kernels; there are {', '.join(CONSTANTS)}")
            for text in ("=3", "ONE_TILE=True")
        ),
    ],
)
def test_wrong_numbers_are_refused(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["scan", *given])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"
