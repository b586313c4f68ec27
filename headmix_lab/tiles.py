"""Time a Triton kernel over choices of tiles, warps and limits of registers.

    python -m headmix_lab.tiles pairwise_backward_key --tokens 196
    python -m headmix_lab.tiles summarize --tokens 16384 --batch 4 --try BT=32,64 STAGES=0,2,3 maxnreg=None
    python -m headmix_lab.stand_in headmix_lab.tiles scan --tokens 1024 --batch 16     # as on RTX 30, 40 and 50

Each line is a choice: us of the kernel in a call, by PyTorch's profiler, and the largest difference from the results
with the present tiles, relative to their size. The line `now` has the present tiles. Inputs are random. `--try` gives
other values of a constant. Kernels that share tiles are timed together: `scan` is the forward and the backward scan of
Head-in-Head, `causal_apply` all kernels for pairs within parts of blocks of causal MHLA. Pairwise kernels are the
portable ones, on Hopper too. A choice that the launch overrules, such as a tile longer than a part of a block, is `not
launched so`. Tiles stand in `headmix_vision/ops/mhla/triton_tuning.py` and
`headmix_vision/ops/head_in_head/triton_launch.py`. To see the registers and memory that a choice takes on each GPU,
write it there and run `python -m benchmarks.compile_kernels --match KERNEL`.
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

from headmix_vision.console import OneLineParser, one_line_errors
from headmix_vision.errors import InputError, check_counts
from headmix_vision.ops import TokenBlocks, head_in_head, mhla
from headmix_vision.ops.head_in_head import triton_launch
from headmix_vision.ops.mhla import triton_pairwise, triton_tuning
from headmix_vision.ops.runtime import KernelFailed, Launch, forget_plans

CALLS = 12  # that are timed, after two others
WARPS, REGISTERS = (2, 4, 8), (None, 128, 168)
MOST_SCORES = 64  # of a thread, in registers, which accumulators need, too: larger tiles are left out
BLOCKS = 4  # along each side of the picture
PASSES = "backward", "forward"
NEVER_KB = 1 << 20  # more shared memory than a GPU has: kernels that need it are not launched


class Kernel(NamedTuple):
    """Where the tiles of a kernel stand, and what is tried.

    Attributes:
        place: Module of the tiles.
        constants: Names of the tiles in the module: of one choice, or of a table with rows by head dim.
        sizes: Values to try of each entry.
        regime: How MHLA computes; Head-in-Head where it is empty.
        resident: The pass, "forward" or "backward", in which all keys, or queries, of a head are on chip.
        also: Other kernels with the same tiles, which are timed with it.
        causal: Whether tokens see those before them.
    """

    place: Any
    constants: tuple[str, ...]
    sizes: dict[str, tuple[Any, ...]]
    regime: str = ""
    resident: str = ""
    also: tuple[str, ...] = ()
    causal: bool = False


def _tiles(**sizes: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    return {**sizes, "num_warps": WARPS, "maxnreg": REGISTERS}


_SIDES = _tiles(BQ=(32, 64, 128), BK=(32, 64, 128))
_TOKENS = _tiles(BT=(16, 32, 64, 128))
_CHUNKS = {"num_warps": (1, 2, 4, 8), "num_stages": (1, 2, 3), "maxnreg": REGISTERS}
_COLUMNS = {**_CHUNKS, "VALUES": (32, 64)}
_CAUSAL = ("causal_backward_query", "causal_backward_key", "summarize_gradients")
KERNELS = {
    "resident_forward": Kernel(triton_tuning, ("RESIDENT_FORWARD",), _SIDES, "pairwise", resident="forward"),
    "pairwise_forward": Kernel(triton_tuning, ("PAIRWISE_FORWARD",), _SIDES, "pairwise"),
    "pairwise_backward_query": Kernel(triton_tuning, ("PAIRWISE_BACKWARD_QUERY",), _SIDES, "pairwise"),
    "pairwise_backward_key": Kernel(triton_tuning, ("PAIRWISE_BACKWARD_KEY",), _SIDES, "pairwise"),
    "resident_backward_key": Kernel(triton_tuning, ("RESIDENT_BACKWARD_KEY",), _SIDES, "pairwise", resident="backward"),
    "summarize": Kernel(triton_tuning, ("SUMMARIZE",), _TOKENS, "summary"),
    "apply": Kernel(triton_tuning, ("APPLY",), _TOKENS, "summary"),
    "backward_query": Kernel(triton_tuning, ("BACKWARD_QUERY", "BACKWARD_QUERY_LONG"), _TOKENS, "summary"),
    "backward_key": Kernel(triton_tuning, ("BACKWARD_KEY",), _TOKENS, "summary"),
    "causal_apply": Kernel(triton_tuning, ("CAUSAL",), _TOKENS, "summary", also=_CAUSAL, causal=True),
    "prepare": Kernel(triton_launch, ("PREPARE",), _CHUNKS),
    "scan": Kernel(triton_launch, ("SCAN", "CROWDED_SCAN", "NARROW_SCAN"), _COLUMNS, also=("scan_backward",)),
    "inputs_backward": Kernel(triton_launch, ("INPUTS_BACKWARD", "NARROW_INPUTS_BACKWARD"), _COLUMNS),
}


FLAGS = ("DOTS", "DIVIDE")
CONSTANTS = (*sorted({name for kernel in KERNELS.values() for name in kernel.sizes}), "STAGES", *FLAGS)


def read_sizes(text: str) -> tuple[str, tuple[Any, ...]]:
    """Read the values of a constant, such as "maxnreg=None,128".

    Raises:
        InputError: It names no constant of the kernels, or a value is not one of its kind.
    """
    name, _, values = text.partition("=")
    if name not in CONSTANTS:
        raise InputError(f"--try {text}: no constant of the kernels; there are {', '.join(CONSTANTS)}")
    words = {"None": None} if name == "maxnreg" else {"True": True, "False": False} if name in FLAGS else {}
    given = values.split(",")
    if not all(x in words or (name not in FLAGS and x.isdecimal() and int(x) >= (name != "STAGES")) for x in given):
        raise InputError(f"--try {text}: give the constant's values, such as maxnreg=None,128 or DOTS=True,False")
    return name, tuple(words[x] if x in words else int(x) for x in given)


def choices(kernel: Kernel) -> Iterator[dict[str, Any]]:
    """Yield what is tried, without the entries that are None."""
    for values in itertools.product(*kernel.sizes.values()):
        yield {name: value for name, value in zip(kernel.sizes, values, strict=True) if value is not None}


@contextmanager
def chosen(kernel: Kernel, tiles: dict[str, Any] | None) -> Iterator[None]:
    """Give the kernel these tiles, beside entries that are not tried; None keeps its own."""

    def replaced(now: Any) -> Any:
        """Replace a choice, or each of a table."""
        if isinstance(now, tuple):
            return tuple(map(replaced, now))
        return {name: value for name, value in now.items() if name not in kernel.sizes} | (tiles or {})

    with ExitStack() as stack:
        stack.callback(forget_plans)  # when all is as it was

        def put(name: str, value: Any, place: Any = triton_tuning) -> None:
            stack.enter_context(mock.patch.object(place, name, value))

        if kernel.regime == "pairwise":
            put("HOPPER_KB", NEVER_KB)
            put("is_resident", lambda *_, forward: kernel.resident == PASSES[forward], triton_pairwise)
        new = {name: replaced(getattr(kernel.place, name)) for name in kernel.constants if tiles is not None}
        for name, value in new.items():
            put(name, value, kernel.place)
        if new and not kernel.regime:  # also for wide heads and other types
            usual = triton_launch._tiles
            put("_tiles", lambda x, k: x if any(x is y for y in new.values()) else usual(x, k), triton_launch)
        forget_plans()
        yield


def make_call(kernel: Kernel, given: argparse.Namespace, device: torch.device) -> Callable[[], list[Tensor]]:
    """Draw inputs, and return a call that gives the output and all gradients."""
    draw = torch.Generator(device).manual_seed(0)
    sizes = (given.batch, given.tokens, 3, given.heads, given.dim)
    dtype = getattr(torch, given.dtype)
    q, k, v = torch.randn(sizes, generator=draw, device=device, dtype=dtype).unbind(2)
    if kernel.regime:
        height = next(side for side in range(int(given.tokens**0.5), 0, -1) if given.tokens % side == 0)
        blocks = TokenBlocks.from_grid((height, given.tokens // height), (min(BLOCKS, height), BLOCKS))
        drawn = [q, k, v, torch.rand(blocks.num_blocks, blocks.num_blocks, generator=draw, device=device)]
    else:
        beta, decay = torch.rand(2, *sizes[:2], given.heads, generator=draw, device=device).to(dtype)
        rows = F.normalize(torch.randn(given.heads, given.r, given.r, generator=draw, device=device), dim=-1)
        drawn = [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta, -decay, rows @ rows.mT]
    inputs: list[Any] = [x.detach().requires_grad_() for x in drawn]
    d_out = torch.randn(sizes[:2] + sizes[3:], generator=draw, device=device, dtype=dtype)

    def call() -> list[Tensor]:
        if kernel.regime:
            q, k, v, mixing = inputs
            out = mhla(q, k, v, mixing, blocks, causal=kernel.causal, impl=f"triton_{kernel.regime}")
        else:
            out, _ = head_in_head(*inputs, impl="triton")
        return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]

    return call


@contextmanager
def launches() -> Iterator[dict[str, dict[str, Any]]]:
    """Note the constants of each kernel that is launched, by its name."""
    found: dict[str, dict[str, Any]] = {}
    run = Launch.__call__

    def note(launch: Launch, *tensors: Tensor | None) -> None:
        found[launch.kernel.__name__] = launch.constants
        run(launch, *tensors)

    with mock.patch.object(Launch, "__call__", note):
        yield found


def time_us(call: Callable[[], object], names: Sequence[str]) -> float:
    """Time kernels, in us of a call."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages() if event.key in names) / CALLS


def main(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("kernel", choices=KERNELS, help="the kernel, without `_kernel`")
    add("--tokens", type=int, default=256, help="of a picture (%(default)s)")
    add("--batch", type=int, default=128, help="pictures (%(default)s)")
    add("--heads", type=int, default=6, help="attention heads (%(default)s)")
    add("--dim", type=int, default=64, help="of a head (%(default)s)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the inputs (%(default)s)")
    add("--try", nargs="+", default=(), metavar="NAME=VALUES", dest="sizes", help="other values to try: num_warps=4,8")
    add("--r", type=int, default=4, help="sub-heads of Head-in-Head (%(default)s)")
    given = parser.parse_args(argv)
    with one_line_errors():
        check_counts(1, tokens=given.tokens, batch=given.batch, heads=given.heads, dim=given.dim, r=given.r)
        sizes = dict(map(read_sizes, given.sizes))
        if not torch.cuda.is_available():
            raise InputError("there is no CUDA device here to time kernels on")
        kernel, device = KERNELS[given.kernel], torch.device("cuda")
        kernel = kernel._replace(sizes=kernel.sizes | sizes)
        names = [f"{name}_kernel" for name in (given.kernel, *kernel.also)]
        call, expected = make_call(kernel, given, device), None
        for tiles in (None, *choices(kernel)):
            name = "now" if tiles is None else ", ".join(f"{entry} {value}" for entry, value in tiles.items())
            if tiles and tiles.get("BQ", 0) * tiles.get("BK", 0) > MOST_SCORES * 32 * tiles["num_warps"]:
                print(f"{name}: left out, more than {MOST_SCORES} scores for a thread", flush=True)
                continue
            with chosen(kernel, tiles):
                try:
                    with launches() as launched:
                        found = [x.double() for x in call()]
                    used = launched.get(names[0])
                    if used is None or any(used.get(entry) != value for entry, value in (tiles or {}).items()):
                        print(f"{name}: not launched so", flush=True)
                        continue
                    us = time_us(call, names)
                except KernelFailed as error:  # no such tiles, or too much memory for a program
                    print(f"{name}: {str(error)[:160]}", flush=True)
                    continue
            expected = expected or found
            off = torch.stack([(x - y).norm() / y.norm() for x, y in zip(found, expected, strict=True)]).max()
            print(f"{us:8.1f} us  off by {off.item():.1e}  {name}", flush=True)


if __name__ == "__main__":
    main()
