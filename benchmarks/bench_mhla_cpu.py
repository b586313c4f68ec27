"""Time of mhla(impl="torch") on a CPU against the number of tokens, at a fixed number of blocks.

    MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=1073741824 \\
        python -m benchmarks.bench_mhla_cpu --out benchmarks/results/mhla_cpu.csv

The form is linear in N: from 4,096 to 16,384 tokens the time should grow 4 times. Before any time is printed the
result is compared with the float64 reference. The variables make glibc keep freed memory; without them tensors above
32 MB are fresh pages at every step, and from 65,536 tokens on their page faults cost more than the operation.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from benchmarks.measuring import environment, write_csv
from headmix_vision.ops import TokenBlocks, mhla

BATCH, HEADS, DIM, BLOCK_GRID = 1, 6, 64, (4, 4)


def make_inputs(side: int, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], TokenBlocks]:
    blocks = TokenBlocks.from_grid((side, side), BLOCK_GRID)
    generator = torch.Generator().manual_seed(side)
    packed = torch.randn(BATCH, side * side, 3, HEADS, DIM, generator=generator, dtype=dtype)
    mixing = torch.rand(blocks.num_blocks, blocks.num_blocks, generator=generator, dtype=dtype)
    return [x.contiguous().requires_grad_() for x in (*packed.unbind(2), mixing)], blocks


def check_correctness() -> None:
    """Refuse to time a wrong result: values and gradients against the float64 reference."""
    inputs, blocks = make_inputs(24)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = mhla(*inputs, blocks, impl="torch"), mhla(*exact, blocks, impl="reference")
    pairs = [
        (out, expected),
        *zip(*(torch.autograd.grad(o.sum(), x) for o, x in ((out, inputs), (expected, exact))), strict=True),
    ]
    worst = max(((a.double() - b).norm() / b.norm().clamp(min=1e-6)).item() for a, b in pairs)
    if not worst < 1e-4:
        raise SystemExit(f"error: relative error {worst:.1e} against the reference, nothing timed.")
    print(f"correct: relative error {worst:.1e} against the float64 reference")


def times_ms(side: int, repeats: int) -> tuple[float, float]:
    """Median time of a forward and of a forward with backward pass, in ms."""
    inputs, blocks = make_inputs(side)
    forward, both = [], []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        out = mhla(*inputs, blocks, impl="torch")
        middle = time.perf_counter()
        out.sum().backward()
        forward.append(middle - start)
        both.append(time.perf_counter() - start)
    return 1e3 * statistics.median(forward[2:]), 1e3 * statistics.median(both[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", type=int, nargs="+", default=[32, 64, 128, 256], help="token grid sides")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="the table (default: none)")
    arguments = parser.parse_args()
    check_correctness()
    facts = environment(torch.device("cpu")) | {"threads": str(torch.get_num_threads())}
    print(f"B={BATCH} H={HEADS} D={DIM} M={BLOCK_GRID[0] * BLOCK_GRID[1]}, {facts['threads']} threads, float32")
    rows = []
    for side in arguments.sides:
        forward_ms, both_ms = times_ms(side, arguments.repeats)
        print(f"{side * side:8d} tokens: forward {forward_ms:.2f} ms, with backward {both_ms:.2f} ms", flush=True)
        rows.append({"tokens": side * side, "forward_ms": forward_ms, "both_ms": both_ms} | facts)
    if arguments.out is not None:
        write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
