"""Training steps of Wan2.1-1.3B's shape with MHLA on several GPUs: FSDP2 and context parallelism against one GPU.

    torchrun --standalone --nproc_per_node 2 -m benchmarks.bench_wan_gpus
    torchrun --standalone --nproc_per_node 2 -m benchmarks.bench_wan_gpus --device cpu --tiny

Each step trains on a clip for each GPU, by AdamW, in bf16 autocast with float32 weights, all blocks checkpointed. `one`
computes all clips on one GPU; `fsdp2` one clip on each GPU; `context` each clip on all GPUs. Losses and gradient norms
of all rows must agree, else the exit code is 1.
"""

import argparse
import math
import statistics

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import get_total_norm

from benchmarks.bench_wan import draw, make
from headmix_lab import measuring
from headmix_vision.ops import TokenRanks

ROWS = ("one", "fsdp2", "context")


def measure(row, arguments, ranks):
    """Time a row's steps, and return losses and gradient norms [steps, 2] besides."""
    device, found = arguments.device, []
    measuring.release_memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model = make("converted", arguments, **({"num_layers": arguments.layers} if arguments.layers else {}))
    model.enable_gradient_checkpointing()
    if row == "context":
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks.size))
    for part in (*model.blocks, model) if row == "fsdp2" else ():
        fully_shard(part)
    for block in model.blocks if arguments.compile else ():
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    clips = [ranks.rank] if row == "fsdp2" else range(ranks.size)

    def step():
        total = torch.zeros((), device=device)
        for clip in clips:
            latents, time, text = draw(arguments.tokens, model, arguments, 1 + clip)
            noise = latents.roll(1, -1)
            with torch.autocast(device.type, torch.bfloat16, enabled=not arguments.tiny):
                velocity = model((latents + noise) / 2, time, text, return_dict=False)[0]
            loss = (velocity.float() - noise + latents).square().mean() / len(clips)
            loss.backward()
            total += loss.detach()
        if row == "context":
            ranks.sum_gradients(model.parameters())
        norm = get_total_norm([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        if row == "fsdp2":
            total, norm = ranks.all_reduce(total) / ranks.size, norm.full_tensor()
        found.append(torch.stack([total, norm]))

    times = measuring.times_ms(step, device, 2 + arguments.steps)[2:]  # the first ones warm up
    ms = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(ms, dist.ReduceOp.MAX)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    return ms.item(), peak, torch.stack(found).double().cpu()


def compare(arguments):
    """Measure and print all rows, and end unless losses and norms agree with the first row's."""
    ranks, rows, first = TokenRanks.of(dist.group.WORLD), [], None
    torch.accelerator.device_count = lambda: max(1, torch.cuda.device_count())  # diffusers counts GPUs
    tokens = ranks.size * math.prod(arguments.tokens)
    for name in arguments.rows:
        ms, peak, found = measure(name, arguments, ranks)
        first = (ms, found) if first is None else first
        error = (found / first[1] - 1).abs().max().item()
        if not error <= (1e-4 if arguments.tiny else 1e-2):
            raise SystemExit(f"error: {name} is off by {error:.1e} in loss and gradient norm: {found}, not {first[1]}.")
        row = {"row": name, "gpus": 1 if name == "one" else ranks.size, "ms": ms, "tokens_per_s": 1e3 * tokens / ms}
        row |= {"ratio": first[0] / ms, "peak_gib": peak, "first_loss": found[0, 0].item()}
        row |= {"last_loss": found[-1, 0].item(), "largest_difference": error, "compile": arguments.compile}
        rows.append(row | {"tokens": tokens} | measuring.environment(arguments.device))
        if ranks.rank == 0:
            print(*(f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
    measuring.write_csv(measuring.results_path(arguments, "wan_gpus", False) if ranks.rank == 0 else None, rows)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS)
    parser.add_argument("--tokens", default="21x30x52", help="time x height x width, a multiple of the number of GPUs")
    parser.add_argument("--layers", type=int, help="30 by default")
    parser.add_argument("--steps", type=int, default=4, help="timed steps")
    parser.add_argument("--compile", action="store_true", help="compile each block")
    measuring.add_options(parser, tiny="a tiny model, all in float32")
    arguments = parser.parse_args(argv)
    arguments.tokens = tuple(map(int, ("5x4x6" if arguments.tiny else arguments.tokens).split("x")))
    arguments.device, arguments.dtype = measuring.open_device(arguments.device), torch.float32
    measuring.run_in_group(compare, arguments)


if __name__ == "__main__":
    main()
