"""Time Wan2.1-1.3B's shape, softmax and converted to MHLA: one denoising forward, one training step.

    python -m benchmarks.bench_wan                                    # all rows at all sizes, some minutes on an H200
    python -m benchmarks.bench_wan --sizes 21x30x50 --modes forward --rows cudnn converted
    python -m benchmarks.bench_wan --device cpu --tiny                # tries the script itself where there is no GPU

Rows: `installed` is diffusers with the attention that PyTorch chooses, `cudnn` the same with cuDNN's, `converted` has
MHLA in all layers, `hybrid` in two thirds of them. Weights are random, in bf16; all rows are compiled alike, block by
block, and see the same random inputs, a clip and 512 text tokens. A training step is forward, loss and backward with
each block checkpointed, and no optimizer. Sizes are tokens along time, height and width.

Before anything is timed, a layer of MHLA is compared with the same layer in float64 on the same device, at the first
size, and one of cuDNN's attention with the installed one; and after all windows outputs must be finite: otherwise the
script ends with exit code 1 and writes nothing. Peak memory counts the weights. A row compiles its blocks for each size
and mode, which takes longer than the timed steps: --sizes, --modes and --rows choose a part.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headmix_lab.measuring import (
    add_options,
    environment,
    open_device,
    release_memory,
    results_path,
    times_ms,
    write_csv,
)
from headmix_lab.tables import installed_version, print_table
from headmix_vision.models.convert_wan import WanMHLATransformer3DModel

WAN = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}  # Wan2.1-1.3B
TINY = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 3, "text_dim": 16}
ROWS = ("installed", "cudnn", "converted", "hybrid")
MODES = ("forward", "train")
SIZES = ["21x30x50", "21x30x52", "21x45x80"]
TEXT_TOKENS = 512
MAX_ERROR = 0.03  # relative, of a bf16 layer against float64, and of two bf16 softmax layers
SHOWN = dict.fromkeys(("size", "mode", "row"), "")
SHOWN |= {"ms": ".1f", "speed_of_installed": ".2f", "speed_of_cudnn": ".2f", "peak_gib": ".1f"}

Row = dict[str, Any]


def make(row: str, arguments: argparse.Namespace, **changes: int) -> nn.Module:
    """Make a row's model with random weights, with some sizes changed."""
    torch.manual_seed(0)
    options = (TINY if arguments.tiny else WAN) | changes
    kept = range(0, options["num_layers"], 3) if row == "hybrid" else ()
    with torch.device(arguments.device):
        if row in ("converted", "hybrid", "causal"):
            layers = [i for i in range(options["num_layers"]) if i not in kept]
            given = {"block_grid": (3, 2, 3) if arguments.tiny else (3, 5, 10), "causal": row == "causal"}
            model: nn.Module = WanMHLATransformer3DModel(**given, mhla_layers=layers, **options)
        else:
            model = WanTransformer3DModel(**options)
    kept_float = set(model._keep_in_fp32_modules)  # as from_pretrained(torch_dtype=...) leaves them
    for name, parameter in model.named_parameters():
        if kept_float.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(arguments.dtype)
    return model


def attention_of(row: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a row's softmax attention, cross-attention included."""
    cudnn = row != "installed" and device.type == "cuda"  # a hybrid keeps the fastest softmax
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cudnn else contextlib.nullcontext()


def draw(size: tuple[int, ...], model: nn.Module, arguments: argparse.Namespace, seed: int = 1) -> tuple[Tensor, ...]:
    """Draw latents [1, 16, T, H, W], a time and text of one clip with a grid of tokens."""
    generator = torch.Generator(arguments.device).manual_seed(seed)
    options = {"generator": generator, "device": arguments.device, "dtype": arguments.dtype}
    latents = torch.randn(1, 16, size[0], 2 * size[1], 2 * size[2], **options)
    text = torch.randn(1, TEXT_TOKENS, model.config.text_dim, **options)
    return latents, torch.full((1,), 500, device=arguments.device), text


def step(model: nn.Module, inputs: tuple[Tensor, ...], mode: str) -> Tensor:
    """Run one forward pass or one training step, and return the output or the loss."""
    if mode == "forward":
        with torch.no_grad():
            return model(*inputs, return_dict=False)[0]
    model.zero_grad()
    loss = model(*inputs, return_dict=False)[0].float().square().mean()
    loss.backward()
    return loss.detach()


def measure(row: str, size: tuple[int, ...], mode: str, arguments: argparse.Namespace) -> Row:
    """Time one row: the median of its windows, each one step, and its peak memory."""
    device, on_gpu = arguments.device, arguments.device.type == "cuda"
    torch.compiler.reset()
    release_memory()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with attention_of(row, device):
        model = make(row, arguments)
        if mode == "train":
            model.enable_gradient_checkpointing()
        if arguments.compile != "none":
            model.compile_repeated_blocks(mode=arguments.compile, fullgraph=True, dynamic=False)
        inputs = draw(size, model, arguments)
        call = partial(step, model, inputs, mode)
        times_ms(call, device, 2)  # compiles, then warms up
        times = times_ms(call, device, arguments.windows)
        last = call()
    if not last.isfinite().all():
        raise SystemExit(f"error: {row} ({mode}) gave values that are not finite, nothing reported.")
    return {
        "size": "x".join(map(str, size)),
        "tokens": size[0] * size[1] * size[2],
        "mode": mode,
        "row": row,
        "ms": statistics.median(times),
        "lowest_ms": min(times),
        "highest_ms": max(times),
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None,
        "windows": arguments.windows,
        "compile": arguments.compile,
        "dtype": str(arguments.dtype).removeprefix("torch."),
    }


@torch.no_grad()
def check(size: tuple[int, ...], arguments: argparse.Namespace) -> None:
    """Exit unless a layer of MHLA agrees with float64, and one of cuDNN's attention with PyTorch's choice."""
    model = make("converted", arguments)
    latents, *_ = draw(size, model, arguments)
    tokens = model.patch_embedding(latents).flatten(2).transpose(1, 2)
    cos, sin, grid = model.rope(latents)
    layer = model.blocks[0].attn1
    exact = copy.deepcopy(layer).double()(tokens.double(), None, None, (cos.double(), sin.double(), grid))
    report_error("a layer of MHLA", layer(tokens, None, None, (cos, sin, grid)), exact)
    layer = make("installed", arguments).blocks[0].attn1
    outputs = []
    for row in ("installed", "cudnn"):
        with attention_of(row, arguments.device):
            outputs.append(layer(tokens, None, None, (cos, sin)))
    report_error("a layer with cuDNN's attention", *outputs)


def report_error(what: str, given: Tensor, wanted: Tensor) -> None:
    error = ((given.double() - wanted.double()).norm() / wanted.double().norm()).item()
    if not error <= MAX_ERROR:
        raise SystemExit(f"error: {what} is off by {error:.2e}, nothing reported.")
    print(f"{what} is right to {error:.1e}", flush=True)


def with_ratios(rows: list[Row]) -> list[Row]:
    """Add the speed over softmax to each row of one size and mode."""
    times = {row["row"]: row["ms"] for row in rows}
    for row in rows:
        for baseline in ("installed", "cudnn"):
            row[f"speed_of_{baseline}"] = times[baseline] / row["ms"] if baseline in times else None
    return rows


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", help=f"tokens along time, height and width, by default {' '.join(SIZES)}")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--compile", help="a mode of torch.compile, or none, by default 'default'")
    parser.add_argument("--windows", type=int, default=3, help="timed steps of each row, by default 3")
    add_options(parser, tiny="a tiny model, 5x4x6 tokens, float32, not compiled")
    arguments = parser.parse_args(argv)
    arguments.compile = arguments.compile or ("none" if arguments.tiny else "default")
    arguments.dtype = torch.float32 if arguments.tiny else torch.bfloat16
    try:
        sizes = [
            tuple(map(int, size.split("x"))) for size in arguments.sizes or (["5x4x6"] if arguments.tiny else SIZES)
        ]
    except ValueError:
        sizes = []
    if not sizes or any(len(size) != 3 or min(size) < 1 for size in sizes) or arguments.windows < 1:
        raise SystemExit("error: --sizes must be like 21x30x50, and --windows at least 1.")
    arguments.sizes = sizes
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    arguments.device = open_device(arguments.device)
    facts = environment(arguments.device) | {"diffusers": installed_version("diffusers")}
    print(f"{facts['device']}, torch {facts['torch']}, diffusers {facts['diffusers']}, compile {arguments.compile}")
    check(arguments.sizes[0], arguments)
    path = results_path(arguments, "wan")
    rows: list[Row] = []
    for size in arguments.sizes:
        for mode in arguments.modes:
            found = with_ratios([measure(row, size, mode, arguments) for row in arguments.rows])
            print_table(found, SHOWN)
            rows += [row | facts for row in found]
            write_csv(path, rows)  # now, as the whole table takes long


if __name__ == "__main__":
    main()
