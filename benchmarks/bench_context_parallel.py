"""Time, error and traffic of tokens that are spread over GPUs, against one GPU with all of them.

    torchrun --nproc-per-node 2 -m benchmarks.bench_context_parallel                # 31,500 and 262,144 tokens
    torchrun --nproc-per-node 2 -m benchmarks.bench_context_parallel --grids 21x30x50/4x5x10 --repeats 50
    torchrun --nproc-per-node 2 -m benchmarks.bench_context_parallel --device cpu --tiny    # tries the script itself

Timed are MHLA itself (``mhla``), its layer with a convolution of tokens (``layer``) and a video DiT (``model``),
forward, and forward with backward, on one clip in bf16, with the heads and widths of Wan 1.3B. Clips are parted along
the first axis of which each process gets as many tokens and whole blocks, or else along time. First one process does
all of it while the others wait, then each does its part. The figures are medians of the slowest process, of CUDA
graphs, collectives among them; the CSV file also has launches from Python, which wait for the host. Gradients of the
model are summed over the processes while the backward pass goes on, as DistributedDataParallel does.

Sent is what a process gives to collectives in one call, for block summaries, the gradient of the mixing, the edges of
the convolution and the output of the model, without the gradients of weights.

Before anything is timed, MHLA of two heads is compared with float64: the processes' mean and largest errors must be at
most twice one process's, of gradients three times; otherwise the script writes nothing and ends with exit code 1.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headmix_lab.measuring import (
    add_options,
    as_graph,
    environment,
    fill,
    open_device,
    release_memory,
    results_path,
    run_in_group,
    times_ms,
    write_csv,
)
from headmix_lab.tables import print_table
from headmix_vision.layers import HeadMixAttention
from headmix_vision.models import HeadMixVideoDiT
from headmix_vision.ops import TokenBlocks, TokenRanks, mhla
from headmix_vision.ops.token_ranks import even_axis

SHOWN = dict.fromkeys(("what", "tokens", "blocks", "pass"), "") | {"one_ms": ".3f", "spread_ms": ".3f", "ratio": ".2f"}
DEFAULTS: dict[str, Any] = {
    "grids": ["21x30x50/3x5x2", "21x30x50/3x5x10", "64x64x64/4x8x8"],
    "heads": 12,
    "head_dim": 128,
    "depth": 2,  # 262,144 tokens and their graph do not fit 80 GB even so
    "repeats": 20,
}
TINY_DEFAULTS: dict[str, Any] = {
    "grids": ["5x4x6/2x2x3", "8x4x4/4x2x2"],
    "heads": 2,
    "head_dim": 8,
    "depth": 1,
    "repeats": 2,
}
COLLECTIVES = ("all_gather_into_tensor", "all_reduce", "all_to_all_single")
SHOWN |= {f"{name}_bytes": "," for name in COLLECTIVES}

Row = dict[str, Any]
Call = Callable[[], object]


class Case(NamedTuple):
    """Calls of one thing on one process with all tokens, and on each process with its own."""

    what: str
    mode: str
    alone: Call
    spread: Call


class Sent(TorchDispatchMode):
    """Counter of the bytes passed to collectives, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = dict.fromkeys(COLLECTIVES, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0].removesuffix("_coalesced")
        if name in COLLECTIVES:
            self.bytes[name] += sum(x.nbytes for x in (args[0] if isinstance(args[0], list) else args[:1]))
        return func(*args, **(kwargs or {}))


def read_grid(spelling: str) -> TokenBlocks:
    """Read ``"21x30x50/3x5x10"``: tokens along each axis, and blocks."""
    try:
        shape, block_grid = (tuple(map(int, part.split("x"))) for part in spelling.split("/"))
        if len(shape) != 3:
            raise ValueError("a clip has three axes.")
        return TokenBlocks.from_grid(shape, block_grid)
    except ValueError as error:
        raise SystemExit(f"error: --grids {spelling!r}, tokens/blocks of a clip: {error}") from None


def draw(blocks: TokenBlocks, heads: int, dim: int, device: torch.device) -> list[Tensor]:
    """Draw q, k, v, an output gradient and a mixing matrix, the same in each process."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, blocks.num_tokens, heads, dim)
    tokens = [torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(4)]
    return [*tokens, torch.rand(blocks.num_blocks, blocks.num_blocks, generator=generator, device=device)]


def run_op(inputs: Sequence[Tensor], d_out: Tensor, blocks: TokenBlocks) -> list[Tensor]:
    """Output, and gradients of q, k, v and the mixing."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = mhla(*leaves, blocks)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def check_errors(blocks: TokenBlocks, dim: int, ranks: TokenRanks, device: torch.device) -> Row:
    """Compare with float64, and return the relative errors of the output of one process and of all."""
    *tokens, d_out, mixing = draw(blocks, 2, dim, device)
    exact = run_op([x.double() for x in (*tokens, mixing)], d_out.double(), blocks)
    alone = run_op([*tokens, mixing], d_out, blocks)
    parts = [ranks.split(x, blocks.grid) for x in (*tokens, d_out)]
    *spread, d_mixing = run_op([*parts[:3], mixing], parts[3], blocks.of_rank(ranks))
    together = [*(ranks.gather(x, blocks.grid) for x in spread), d_mixing * ranks.size]
    for name, one, all_, x in zip(("output", "d_q", "d_k", "d_v", "d_mixing"), alone, together, exact, strict=True):
        factor = 2 if name == "output" else 3
        for kind, measure in (("mean", torch.mean), ("largest", torch.max)):
            error, budget = (measure((y.double() - x).abs()).item() for y in (all_, one))
            if not error <= factor * budget + 1e-12:
                raise SystemExit(
                    f"error: {blocks.grid}: {kind} error of {name} is {error:.2e}, of one process {budget:.2e}, "
                    "nothing reported."
                )
    norm = exact[0].norm()
    errors = [((y[0].double() - exact[0]).norm() / norm).item() for y in (alone, together)]
    return dict(zip(("error_one", "error_spread"), errors, strict=True))


def cases(blocks: TokenBlocks, ranks: TokenRanks, arguments: argparse.Namespace) -> Iterator[Case]:
    device, width = arguments.device, arguments.heads * arguments.head_dim
    *tokens, d_out, mixing = draw(blocks, arguments.heads, arguments.head_dim, device)
    parts = [ranks.split(x, blocks.grid) for x in (*tokens, d_out)]
    own = blocks.of_rank(ranks)
    yield Case("mhla", "forward", lambda: mhla(*tokens, mixing, blocks), lambda: mhla(*parts[:3], mixing, own))
    alone, spread = ([*x, mixing] for x in (tokens, parts[:3]))
    yield Case("mhla", "both", lambda: run_op(alone, d_out, blocks), lambda: run_op(spread, parts[3], own))

    grid = blocks.grid.shape
    sizes: dict[str, Any] = {"block_grid": blocks.block_grid, "cpe": True}
    layer = HeadMixAttention(width, arguments.heads, grid=grid, **sizes, device=device)
    spread_layer = deepcopy(layer)
    spread_layer.context_parallel(ranks)
    x = d_out.flatten(2)
    part = ranks.split(x, blocks.grid)
    yield from both_passes("layer", layer, spread_layer, x.requires_grad_(), part.requires_grad_())

    clip, latent = (grid[0], 2 * grid[1], 2 * grid[2]), (1, 16)
    model = HeadMixVideoDiT(
        clip, embed_dim=width, depth=arguments.depth, num_heads=arguments.heads, in_channels=16, num_classes=0, **sizes,
        device=device,
    )  # fmt: skip
    x = torch.randn(*latent, *clip, device=device, generator=torch.Generator(device).manual_seed(0))
    spread_model = deepcopy(model)
    spread_model.context_parallel(dist.group.WORLD)
    noise_level = torch.full((1,), 500.0, device=device)
    yield from both_passes("model", model, spread_model, x, x, noise_level, end_backward=sum_gradients(spread_model))


def sum_gradients(module: torch.nn.Module) -> Call:
    """Sum each gradient of a module over the processes from when it is complete; what waits for all sums."""
    sums: list[dist.Work] = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda x: sums.append(dist.all_reduce(x.grad, async_op=True)))

    def wait() -> None:
        while sums:
            sums.pop().wait()

    return wait


def both_passes(
    what: str,
    alone: torch.nn.Module,
    spread: torch.nn.Module,
    whole: Tensor,
    part: Tensor,
    *further: Tensor,
    end_backward: Call = lambda: None,
) -> Iterator[Case]:
    """Forward, and forward with backward, of a module on all of its tokens and on a part of them.

    ``end_backward`` is called after the backward pass of the part's module.
    """

    def forward(module: torch.nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            out: Tensor = module(x, *further)
        return out

    def both(module: torch.nn.Module, x: Tensor, end_backward: Call) -> None:
        forward(module, x).float().square().mean().backward()
        end_backward()
        module.zero_grad()
        x.grad = None

    no_grad = torch.no_grad()
    yield Case(what, "forward", no_grad(lambda: forward(alone, whole)), no_grad(lambda: forward(spread, part)))
    yield Case(what, "both", lambda: both(alone, whole, lambda: None), lambda: both(spread, part, end_backward))


def measure(case: Case, ranks: TokenRanks, arguments: argparse.Namespace) -> Row:
    """Time one process while the others wait, then all; count what this one sends."""
    device = arguments.device

    def medians_ms(call: Call) -> list[float]:
        found = []
        for way in (call, as_graph(call, device)):
            way()
            found.append(statistics.median(times_ms(way, device, arguments.repeats)))
        return found

    times = torch.zeros(4, device=device)
    if ranks.rank == 0:
        times[:2] = torch.tensor(medians_ms(case.alone))
    ranks.all_reduce(times)  # the others wait
    release_memory()
    case.spread()
    times[2:] = torch.tensor(medians_ms(case.spread))
    slowest = torch.cat(ranks.all_gather([times[None]], [1] * ranks.size, 0)[0]).amax(0).tolist()
    named = dict(zip(("one_launched_ms", "one_ms", "spread_launched_ms", "spread_ms"), slowest, strict=True))
    with Sent() as sent:
        case.spread()
    return {
        "what": case.what, "pass": case.mode, "ranks": ranks.size, **named,
        "ratio": named["one_ms"] / named["spread_ms"], **{f"{name}_bytes": count for name, count in sent.bytes.items()},
    }  # fmt: skip


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", nargs="+", help="tokens/blocks of clips, as in 21x30x50/3x5x10")
    for name in ("heads", "head_dim", "depth", "repeats"):
        parser.add_argument(f"--{name}", type=int)
    add_options(parser, tiny="sizes that try the script itself")
    arguments = parser.parse_args(argv)
    fill(arguments, TINY_DEFAULTS if arguments.tiny else DEFAULTS)
    if min(arguments.heads, arguments.head_dim, arguments.depth, arguments.repeats) < 1:
        raise SystemExit("error: --heads, --head_dim, --depth and --repeats must be positive.")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    grids = [read_grid(spelling) for spelling in arguments.grids]
    arguments.device = open_device(arguments.device)
    run_in_group(partial(compare, grids), arguments)


def compare(grids: Sequence[TokenBlocks], arguments: argparse.Namespace) -> None:
    facts, rows, size = environment(arguments.device), [], dist.get_world_size()
    show, show_rows = (print, print_table) if dist.get_rank() == 0 else 2 * (lambda *args: None,)
    show(f"{size} x {facts['device']}, torch {facts['torch']}, bf16")
    path = results_path(arguments, "context_parallel") if dist.get_rank() == 0 else None
    for blocks in grids:
        ranks = TokenRanks.of(dist.group.WORLD, even_axis(blocks.grid.shape, blocks.block_grid, size))
        errors = check_errors(blocks, arguments.head_dim, ranks, arguments.device)
        release_memory()
        sizes = {"tokens": blocks.num_tokens, "blocks": blocks.num_blocks, "axis": ranks.axis, "depth": arguments.depth}
        show("\nrelative error of mhla: {error_one:.2e} on one, {error_spread:.2e} on all".format(**errors))
        for case in cases(blocks, ranks, arguments):
            rows.append(measure(case, ranks, arguments) | sizes | errors | facts)
            show_rows(rows, SHOWN)
            write_csv(path, rows)  # after each: the next may take more memory than there is


if __name__ == "__main__":
    main()
