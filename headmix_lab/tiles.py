"""Time a Triton kernel with other tiles, numbers of warps and limits of registers than it has.

    python -m headmix_lab.tiles pairwise_backward_key --tokens 196
    python -m headmix_lab.stand_in headmix_lab.tiles scan --tokens 1024 --batch 16     # as on RTX 30, 40 and 50

Each line is a choice: us of the kernel in a call, by PyTorch's profiler, and the largest difference from the results
with the tiles that there are, relative to their size. Those are the line `now`. Inputs are random, in bfloat16. Tiles
stand in `headmix_vision/ops/mhla/triton_tuning.py` and `headmix_vision/ops/head_in_head/triton_launch.py`. What a
choice needs of each GPU is told by `python -m benchmarks.compile_kernels`.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from headmix_lab.measuring import open_device
from headmix_vision.console import OneLineParser, one_line_errors
from headmix_vision.ops import TokenBlocks, head_in_head, mhla
from headmix_vision.ops.head_in_head import triton_launch
from headmix_vision.ops.mhla import triton_tuning
from headmix_vision.ops.runtime import KernelFailed, forget_plans

CALLS = 12  # that are timed, after two others
WARPS, REGISTERS = (4, 8), (None, 128, 168)
BLOCKS = 4  # along each side of the picture


class Kernel(NamedTuple):
    """Where the tiles of a kernel stand, and what may be tried.

    Attributes:
        place: Module of the tiles.
        constant: Name of the tiles in the module: of one choice, or of a table with rows by head dim.
        sizes: Values to try of each entry.
        regime: How MHLA computes; Head-in-Head where it is empty.
        resident: Whether all keys, or queries, of a head are on chip.
    """

    place: Any
    constant: str
    sizes: dict[str, tuple[Any, ...]]
    regime: str = ""
    resident: bool = False


def _tiles(**sizes: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    return {**sizes, "num_warps": WARPS, "maxnreg": REGISTERS}


_SIDES = _tiles(BQ=(32, 64, 128), BK=(32, 64, 128))
_TOKENS = _tiles(BT=(32, 64, 128))
_COLUMNS = {"num_warps": (1, 2, 4, 8), "num_stages": (1, 2, 3), "VALUES": (32, 64)}
KERNELS = {
    "resident_forward": Kernel(triton_tuning, "RESIDENT_FORWARD", _SIDES, "pairwise", True),
    "pairwise_forward": Kernel(triton_tuning, "PAIRWISE_FORWARD", _SIDES, "pairwise"),
    "pairwise_backward_query": Kernel(triton_tuning, "PAIRWISE_BACKWARD_QUERY", _SIDES, "pairwise"),
    "pairwise_backward_key": Kernel(triton_tuning, "PAIRWISE_BACKWARD_KEY", _SIDES, "pairwise"),
    "resident_backward_key": Kernel(triton_tuning, "RESIDENT_BACKWARD_KEY", _SIDES, "pairwise", True),
    "summarize": Kernel(triton_tuning, "SUMMARIZE", _TOKENS, "summary"),
    "apply": Kernel(triton_tuning, "APPLY", _TOKENS, "summary"),
    "backward_query": Kernel(triton_tuning, "BACKWARD_QUERY", _TOKENS, "summary"),
    "backward_key": Kernel(triton_tuning, "BACKWARD_KEY", _TOKENS, "summary"),
    "prepare": Kernel(triton_launch, "PREPARE", {name: _COLUMNS[name] for name in ("num_warps", "num_stages")}),
    "scan": Kernel(triton_launch, "SCAN", _COLUMNS),
    "inputs_backward": Kernel(triton_launch, "INPUTS_BACKWARD", _COLUMNS),
}


def choices(kernel: Kernel) -> Iterator[dict[str, Any]]:
    """Yield what may be tried, without the entries that are None."""
    for values in itertools.product(*kernel.sizes.values()):
        yield {name: value for name, value in zip(kernel.sizes, values, strict=True) if value is not None}


@contextmanager
def chosen(kernel: Kernel, dim: int, tiles: dict[str, Any] | None) -> Iterator[None]:
    """Let the kernel have these entries beside those of its tiles that are not tried, or all that it has."""
    with ExitStack() as stack:
        if kernel.regime == "pairwise" and not kernel.resident:
            stack.enter_context(mock.patch.object(triton_tuning, "RESIDENT_TOKENS", 0))
        if tiles is not None:
            now = getattr(kernel.place, kernel.constant)
            if isinstance(now, tuple):
                row = 0 if dim <= 64 else 1 if dim < 128 else 2
                rest = {name: value for name, value in now[row].items() if name not in kernel.sizes}
                new: Any = (*now[:row], rest | tiles, *now[row + 1 :])
            else:
                new = {name: value for name, value in now.items() if name not in kernel.sizes} | tiles
            stack.enter_context(mock.patch.object(kernel.place, kernel.constant, new))
            if kernel.constant == "SCAN":  # many heads have it with other stages
                stack.enter_context(mock.patch.object(kernel.place, "CROWDED_SCAN", new))
        forget_plans()
        yield
    forget_plans()


def make_call(kernel: Kernel, given: argparse.Namespace, device: torch.device) -> Callable[[], list[Tensor]]:
    """Draw inputs, and return a call that gives the output and all gradients."""
    draw = torch.Generator(device).manual_seed(0)
    side = int(given.tokens**0.5)
    sizes = (given.batch, given.tokens, 3, given.heads, given.dim)
    q, k, v = torch.randn(sizes, generator=draw, device=device, dtype=torch.bfloat16).unbind(2)
    if kernel.regime:
        blocks = TokenBlocks.from_grid((side, given.tokens // side), (BLOCKS, BLOCKS))
        given_inputs = [q, k, v, torch.rand(blocks.num_blocks, blocks.num_blocks, generator=draw, device=device)]
    else:
        beta, decay = torch.rand(2, *sizes[:2], given.heads, generator=draw, device=device).bfloat16()
        rows = F.normalize(torch.randn(given.heads, given.r, given.r, generator=draw, device=device), dim=-1)
        given_inputs = [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta, -decay, rows @ rows.mT]
    inputs: list[Any] = [x.detach().requires_grad_() for x in given_inputs]
    d_out = torch.randn(sizes[:2] + sizes[3:], generator=draw, device=device, dtype=torch.bfloat16)

    def call() -> list[Tensor]:
        if kernel.regime:
            q, k, v, mixing = inputs
            out = mhla(q, k, v, mixing, blocks, impl=f"triton_{kernel.regime}")
        else:
            out, _ = head_in_head(*inputs, impl="triton")
        return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]

    return call


def time_us(call: Callable[[], object], name: str) -> float:
    """Time a kernel, in us of a call."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    found = [event.self_device_time_total for event in profile.key_averages() if event.key == f"{name}_kernel"]
    return sum(found) / CALLS


def main(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("kernel", choices=KERNELS, help="the kernel, without `_kernel`")
    add("--tokens", type=int, default=256, help="of a picture (%(default)s)")
    add("--batch", type=int, default=128, help="pictures (%(default)s)")
    add("--heads", type=int, default=6, help="attention heads (%(default)s)")
    add("--dim", type=int, default=64, help="of a head (%(default)s)")
    add("--r", type=int, default=4, help="sub-heads of Head-in-Head (%(default)s)")
    given = parser.parse_args(argv)
    with one_line_errors():
        kernel, device = KERNELS[given.kernel], open_device("cuda")
        call, expected = make_call(kernel, given, device), None
        for tiles in (None, *choices(kernel)):
            name = "now" if tiles is None else ", ".join(f"{entry} {value}" for entry, value in tiles.items())
            with chosen(kernel, given.dim, tiles):
                try:
                    found = [x.double() for x in call()]
                    us = time_us(call, given.kernel)
                except (KernelFailed, RuntimeError) as error:  # no such tiles, or not enough memory for them
                    print(f"{name}: {str(error)[:160]}", flush=True)
                    continue
            expected = expected or found
            off = max(((x - y).norm() / y.norm()).item() for x, y in zip(found, expected, strict=True))
            print(f"{us:8.1f} us  off by {off:.1e}  {name}" if us else f"{name}: not launched", flush=True)


if __name__ == "__main__":
    main()
