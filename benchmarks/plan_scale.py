"""A table on paper: what a training step sends, holds and takes on many GPUs, from steps that were measured on one.

    python -m benchmarks.plan_scale                     # 8 and 512 GPUs in hosts of 8
    python -m benchmarks.plan_scale --gpus 256 --rates 450 25 --cpe

Measured are time and peak memory of a step on one GPU: of DiT-XL/2 at 256 px by bench_scale.py (H100), and of
Wan2.1-1.3B with MHLA on 21x45x80 tokens by bench_wan.py (H200). P is the number of parameters. All else is
computed.

Ways: `ddp` keeps everything on each GPU; `fsdp2` keeps one copy of weights, Adam's moments and averaged weights on all
GPUs together, `hybrid` one on each host; `spread` is hybrid with the tokens of a clip spread over the GPUs of a host.

Sent: to gather B bytes, or to sum and scatter them, over h hosts of g GPUs, each GPU sends B/g (h-1)/h to other hosts
and B (g-1)/g within its own; a sum over all is both. DDP sums gradients; `fsdp2` and `hybrid` gather blocks twice
(forward, backward) and the other weights once, and sum and scatter gradients, which hybrid then sums over the hosts.
Blocks travel in bf16, gradients and the other weights in float32. In each layer spread tokens gather the summaries of
blocks, forward, forward again for checkpointing, and backward: D x D numbers a head and block, in bf16. With --cpe each
layer also sends the tokens of an edge in float32 to either neighbour; Wan has no such convolution.

Held: 16P bytes of weights, moments and average, divided among the GPUs that share a copy, and what the measured peak
has beyond those: gradients, which DDP sums where they are, are made as activations are freed. Sharding adds whole
weights, all outside of blocks and two blocks at a time, and the gradients of one, twice: as they are computed, in bf16,
and as they are sent. Where tokens are spread, activations are counted on the GPU with most tokens, beside the
summaries that a layer gathers.

Time: the measured step, or that GPU's share of it, and bytes over rates; first if computing hides all the traffic of
weights that fits, then if it hides none. What layers exchange is never hidden.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.bench_wan import WAN
from headmix_lab.measuring import RESULTS
from headmix_lab.model_families import make_model
from headmix_lab.tables import markdown_table, read_csv
from headmix_vision.models.convert_wan import WanMHLATransformer3DModel
from headmix_vision.ops import TokenBlocks, TokenRanks
from headmix_vision.ops.token_ranks import even_axis

HOST = 8
GPUS = (8, 512)
RATES = (450.0, 50.0)  # GB/s that a GPU sends within its host and to others, nominal: NVLink, and 400 Gb/s of network
WAN_TOKENS, WAN_BLOCKS = (21, 45, 80), ((3, 5, 10), (3, 5, 8))
HEADER = ("model, samples a GPU", "GPUs", "way", "GB sent", "to other hosts", "GiB held", "ms a step", "samples/s")

Measured = dict[tuple[str, int], tuple[float, float]]


class Spread(NamedTuple):
    """Tokens of a clip on the GPUs of a host: the largest share of one, bytes [2] sent in a step, held by a layer."""

    share: float = 1.0
    sent: np.ndarray = np.zeros(2)
    gathered: int = 0


class Model(NamedTuple):
    """A model: parameters in its blocks and outside, and measurements by number of GPUs.

    `measured` has s and GiB by way, `one` on one GPU; `rest` is its peak in bytes without weights, moments and average.
    """

    name: str
    batch: int
    blocks: int
    outside: int
    depth: int
    rest: float
    measured: Measured
    spreads: dict[str, Spread]


def model_of(
    name: str, network: Any, batch: int, kept: int, measured: Measured, spreads: dict[str, Spread] | None = None
) -> Model:
    """Describe a network, of which the step on one GPU held `kept` bytes of each parameter all the time."""
    whole, blocks = (sum(p.numel() for p in part.parameters()) for part in (network, network.blocks))
    rest, sizes = measured["one", 1][1] * 2**30 - kept * whole, (blocks, whole - blocks, len(network.blocks))
    return Model(f"{name}, {batch}", batch, *sizes, rest, measured, spreads or {})


def trained(path: Path = RESULTS / "scale_h100.csv", name: str = "dit_mhla_xl_2", batch: int = 160) -> Model:
    """A DiT for latents of 32 x 32 as bench_scale.py measured it with such a batch."""
    rows = read_csv(path, model=name, batch=str(batch))
    measured = {(row["what"], int(row["gpus"])): (float(row["step_s"]), float(row["peak_gib"])) for row in rows}
    with torch.device("meta"):
        network = make_model(name, 32)
    return model_of(f"{name}, 256 px", network, batch, 16, measured)


def wan(cpe: bool) -> Model:
    """Wan as bench_wan.py measured it: weights in bf16, without an optimizer."""
    (row,) = read_csv(RESULTS / "wan_h200.csv", size="x".join(map(str, WAN_TOKENS)), mode="train", row="converted")
    with torch.device("meta"):
        network = WanMHLATransformer3DModel(**WAN)
    heads, dim = network.config.num_attention_heads, network.config.attention_head_dim
    spreads = {
        f"spread, {'x'.join(map(str, grid))} blocks": spread_over_host(
            TokenBlocks.from_grid(WAN_TOKENS, grid), heads, dim, len(network.blocks), cpe
        )
        for grid in WAN_BLOCKS
    }
    measured = {("one", 1): (float(row["ms"]) / 1e3, float(row["peak_gib"]))}
    return model_of("Wan-1.3B, 720p", network, 1, 2, measured, spreads)


def spread_over_host(blocks: TokenBlocks, heads: int, dim: int, layers: int, cpe: bool) -> Spread:
    """Count what a checkpointed step sends between the GPUs of a host that share the tokens of a clip."""
    axis = even_axis(blocks.grid.shape, blocks.block_grid, HOST)
    parts = [blocks.of_rank(TokenRanks("", rank, HOST, axis)) for rank in range(HOST)]
    summaries = heads * dim**2 * max(part.num_blocks for part in parts)
    gathered = HOST * summaries * 2
    sent = collective(gathered, 1, HOST)
    edge = blocks.num_tokens // blocks.grid.shape[axis]
    sent[0] += cpe * 2 * edge * heads * dim * 4
    return Spread(max(part.num_tokens for part in parts) / blocks.num_tokens, 3 * layers * sent, gathered)


def collective(size: float, hosts: int, per_host: int) -> np.ndarray:
    """Bytes [2] that a GPU sends within its host and to others to gather `size` bytes, or to sum and scatter them."""
    return size * np.array([1 - 1 / per_host, (1 - 1 / hosts) / per_host])


def weights_sent(blocks: int, outside: int, way: str, hosts: int, per_host: int) -> np.ndarray:
    """Bytes [2] of weights and gradients that a GPU sends in a step, of so many parameters in blocks and outside."""
    gradients, moved = 4 * (blocks + outside), 8 * (blocks + outside)
    if way == "ddp":
        return 2 * collective(gradients, hosts, per_host)
    if way == "fsdp2":
        return collective(moved, hosts, per_host)
    return collective(moved, 1, per_host) + 2 * collective(gradients / per_host, hosts, 1)


def line(model: Model, way: str, hosts: int, per_host: int, rates: Sequence[float]) -> list[str]:
    gpus, whole = hosts * per_host, model.blocks + model.outside
    spread = model.spreads.get(way, Spread())
    sent = weights_sent(model.blocks, model.outside, way, hosts, per_host)
    held = 16 * whole / {"ddp": 1, "fsdp2": gpus}.get(way, per_host) + model.rest * spread.share + spread.gathered
    held += 0 if way == "ddp" else 4 * model.outside + 10 * model.blocks / model.depth
    one_s = spread.share * model.measured["one", 1][0]
    sent_s, spread_s = ((x / 1e9 / rates).sum() for x in (sent, spread.sent))
    steps_s = max(one_s, sent_s) + spread_s, one_s + sent_s + spread_s
    samples = model.batch * (hosts if way in model.spreads else gpus)
    step_s, peak_gib = model.measured.get((way, gpus), (0.0, 0.0))
    return [
        model.name,
        str(gpus),
        way,
        *(f"{x / 1e9:.1f}" for x in ((sent + spread.sent).sum(), sent[1])),
        f"{held / 2**30:.1f}" + (f" (measured: {peak_gib:.1f})" if step_s else ""),
        "–".join(f"{1e3 * s:,.0f}" for s in steps_s) + (f" (measured: {1e3 * step_s:,.0f})" if step_s else ""),
        "–".join(f"{samples / s:,.{1 if samples / s < 100 else 0}f}" for s in steps_s),
    ]


def lines(model: Model, counts: Sequence[int], rates: Sequence[float]) -> list[list[str]]:
    """A line for each way on each number of GPUs, those measured included."""
    found = []
    for gpus in sorted({*counts, *(gpus for _, gpus in model.measured if gpus > 1)}):
        ways = ["ddp", "fsdp2", *(["hybrid"] if gpus > HOST else []), *(model.spreads if gpus >= HOST else ())]
        found += [line(model, way, max(1, gpus // HOST), min(gpus, HOST), rates) for way in ways]
    return found


def plan(counts: Sequence[int] = GPUS, rates: Sequence[float] = RATES, cpe: bool = False) -> list[list[str]]:
    return lines(trained(), counts, rates) + lines(wan(cpe), counts, rates)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS, help="numbers of GPUs, by default 8 512")
    parser.add_argument("--rates", type=float, nargs=2, default=RATES, help="GB/s a GPU sends, by default 450 50")
    parser.add_argument("--cpe", action="store_true", help="count the edges of a convolution of spread tokens, too")
    arguments = parser.parse_args(argv)
    if any(n < 2 or (n > HOST and n % HOST) for n in arguments.gpus) or min(arguments.rates) <= 0:
        raise SystemExit("error: --gpus must be 2 to 8 or multiples of 8, --rates positive.")
    print(markdown_table(HEADER, plan(arguments.gpus, arguments.rates, arguments.cpe)))


if __name__ == "__main__":
    main()
