"""Fit the cost model that picks the regime of the Triton MHLA, `headmix_vision/ops/mhla/regimes.py`.

    python -m benchmarks.fit_mhla_regimes
    python -m benchmarks.fit_mhla_regimes --device cpu --tiny    # tries the script itself, on the plain form

Times both regimes, forward with backward in bf16, over tokens, blocks and head dims, and prints each time as it comes.
Fits the constants by non-negative least squares on relative errors, then scales the summary regime's by the factor that
loses least time to wrong choices. Prints constants and losses. GPUs that multiply by mma.sync have other constants:
`python -m headmix_lab.stand_in benchmarks.fit_mhla_regimes --jobs 1`.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from functools import partial

import torch
from scipy.optimize import nnls

from benchmarks.columns import Column, measure, run_checks, warm_up
from benchmarks.mhla_cases import Shape, raster_inputs, run_mhla
from headmix_lab.measuring import open_device, release_memory
from headmix_lab.tables import markdown_table
from headmix_vision.ops.mhla import regimes

GRIDS = ((8, 8), (14, 14), (16, 16), (20, 20), (24, 24), (32, 32))
BLOCK_GRIDS = ((1, 1), (2, 2), (4, 4), (8, 8))
HEAD_DIMS = (32, 64, 72, 128)
TOKEN_HEADS = 1 << 18  # tokens times batch times heads: a millisecond or less for a call
HEADS = 8
SCALES = (1, 1.05, 0.95, 1.1, 0.9, 1.15, 0.85, 1.2, 0.8, 1.25, 0.75, 1.3)  # of the summary's costs
IMPLS = {"cuda": ("triton_pairwise", "triton_summary"), "cpu": ("torch", "torch")}


def shapes() -> list[Shape]:
    return [
        Shape("", max(1, TOKEN_HEADS // (grid[0] * grid[1] * HEADS)), HEADS, grid, dim, block_grid)
        for dim, grid, block_grid in itertools.product(HEAD_DIMS, GRIDS, BLOCK_GRIDS)
    ]


def column(impl: str) -> Column:
    return Column(impl, raster_inputs, partial(run_mhla, impl), ours=True)


def time_ns(shape: Shape, impl: str, device: torch.device) -> float:
    """Time of forward with backward in nanoseconds per batch item and head."""
    both_ms: float = measure(shape, column(impl), device, math.inf)[0]["both"]
    return both_ms * 1e6 / (shape.batch * shape.heads)


def compile_kernels(shape: Shape, device_name: str) -> list[str]:
    """Leave what a shape needs in Triton's cache on disk."""
    for impl in IMPLS["cuda"]:
        warm_up(shape, column(impl), torch.Generator(device_name).manual_seed(0))
    return []


def fit(terms: Sequence[tuple[float, ...]], times: list[float]) -> list[float]:
    """Non-negative constants for the sum of terms, by least squares on relative errors."""
    scaled = torch.tensor(terms, dtype=torch.float64) / torch.tensor(times, dtype=torch.float64)[:, None]
    return nnls(scaled.numpy(), torch.ones(len(times)).numpy())[0].tolist()


def label(shape: Shape) -> str:
    return f"{shape.tokens} / {shape.blocks.num_blocks} / {shape.head_dim}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--tiny", action="store_true", help="small versions of a few shapes")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile kernels first, by default 8")
    given = parser.parse_args(argv)
    device = open_device(given.device)
    chosen = [shape.tiny() for shape in shapes()[::5]] if given.tiny else shapes()
    if device.type == "cuda":
        run_checks(partial(compile_kernels, device_name=str(device)), chosen, given.jobs)
    measured = []
    for shape in chosen:
        pairwise_ns, summary_ns = (time_ns(shape, impl, device) for impl in IMPLS[device.type])
        print(f"{label(shape)}: {pairwise_ns:.0f} {summary_ns:.0f}", flush=True)
        measured.append((shape, pairwise_ns, summary_ns))
        release_memory()
    costs = regimes.costs_on(device) if device.type == "cuda" else regimes.WGMMA
    name = "WGMMA" if costs is regimes.WGMMA else "MMA_SYNC"
    arguments = [(shape.blocks, shape.head_dim, shape.head_dim) for shape, *_ in measured]
    pairwise_terms = [regimes.pairwise_terms(*a, on_hopper=costs is regimes.WGMMA) for a in arguments]
    summary_terms = [regimes.summary_terms(*a, costs.rows) for a in arguments]
    pairwise, summary = (fit(x, [times[i] for times in measured]) for i, x in ((1, pairwise_terms), (2, summary_terms)))

    def choices(scale: float) -> list[tuple[str, float, float, str, float]]:
        rows = []
        for (shape, a, b), x, y in zip(measured, pairwise_terms, summary_terms, strict=True):
            choice = regimes.choose(regimes.cost(pairwise, x), scale * regimes.cost(summary, y))
            rows.append((label(shape), a, b, choice, (b if choice == "summary" else a) / min(a, b)))
        return rows

    scale = min(SCALES, key=lambda scale: sum(loss for *_, loss in choices(scale)))
    print(name, "=", *(tuple(float(f"{x:.3g}") for x in some) for some in (pairwise, [scale * x for x in summary])))
    rows = choices(scale)
    header = ("tokens / blocks / head dim", "pairwise ns", "summary ns", "choice", "over the better")
    print(markdown_table(header, [(name, f"{a:.0f}", f"{b:.0f}", *more, f"{x:.2f}") for name, a, b, *more, x in rows]))
    print(f"over the better: mean {sum(x[-1] for x in rows) / len(rows):.3f}, worst {max(x[-1] for x in rows):.2f}")


if __name__ == "__main__":
    main()
