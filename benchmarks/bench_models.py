"""Images per second and peak memory of whole models against a baseline, training and inference.

    python -m benchmarks.bench_models                          # deit_mhla_small against timm's softmax DeiT-S
    python -m benchmarks.bench_models --models deit_mhla_small deit_linear_small --sizes 224 512 --batch 256 64
    python -m benchmarks.bench_models --baseline deit_iha_small:head_mix_args.pseudo_heads=4 \
        --models deit_mhla_iha_small:head_mix_args.pseudo_heads=4 --sizes 512 --batch 64
    python -m benchmarks.bench_models --models dit_mhla_xl_2 --baseline dit_softmax_xl_2 --sizes 64 --batch 32
    python -m benchmarks.bench_models --device cpu --tiny      # tries the script itself where there is no GPU

All models of a run see the same random data under bf16 autocast and the same torch.compile mode. A training step is
forward, loss, backward and a fused AdamW step; inference is a forward pass in inference mode. The models take turns,
window by window, and each figure is the median of its windows. Peak memory is what a model needs beyond the data: its
weights, gradients, optimizer states (training) and activations; of CUDA graphs (`--compile reduce-overhead`), whose
memory PyTorch does not count, it is left out. Where a batch does not fit, all models of that size are measured again at
half of it.

Options of a model follow its name and a colon, separated by commas; a dot stands for a mapping inside an option.

Before inference with a compiled model is timed its output is compared with the uncompiled one, and after all windows
losses and outputs must be finite; otherwise the script ends with exit code 1 and writes nothing.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import timm
import torch
from torch import Tensor, nn

from benchmarks.measuring import add_options, environment, fill, open_device, release_memory, results_path, write_csv
from benchmarks.model_families import check_spellings, family_of, make_model, read_spelling
from headmix_lab.tables import markdown_table
from headmix_vision.layers.head_mixes import HEAD_MIXES
from headmix_vision.training.base_module import compile_blocks

MAX_COMPILE_ERROR = 0.05  # relative, of two bf16 forward passes
MODES = ("train", "inference")
HEADER = ("model", "size", "batch", "mode", "images/s", "ratio", "peak GiB", "ratio")

DEFAULTS: dict[str, Any] = {
    "models": ["deit_mhla_small"],
    "baseline": "deit_small_patch16_224",
    "sizes": [224, 512],
    "batch": [256, 64],
    "compile": "default",
    "windows": 7,
    "window_s": 1.0,
}
TINY_DEFAULTS: dict[str, Any] = {
    "models": ["deit_mhla_tiny"],
    "baseline": "deit_tiny_patch16_224",
    "sizes": [64],
    "batch": [2],
    "compile": "none",
    "windows": 2,
    "window_s": 0.1,
}

Row = dict[str, Any]


@torch.no_grad()
def _fill_zeros(model: nn.Module) -> None:
    """Draw weights that start at zero: a model that outputs zeros would pass the comparison with its compiled form."""
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)


class Contestant:
    """A model ready to be timed: compiled, warmed up and its peak memory known."""

    def __init__(
        self, name: str, size: int, inputs: tuple[Tensor, ...], mode: str, compile_mode: str, window_s: float
    ) -> None:
        self.name, self.mode, self.inputs, self.loss_of = name, mode, inputs, family_of(name).loss
        self.device = inputs[0].device
        self.last: Tensor | None = None
        on_gpu = self.device.type == "cuda"
        before = torch.cuda.memory_allocated(self.device) if on_gpu else 0
        torch.manual_seed(0)
        self.model = make_model(name, size).to(self.device).train(mode == "train")
        _fill_zeros(self.model)
        self.call: Callable[..., Tensor] = self.model
        if compile_mode == "blocks":
            compile_blocks(self.model)
        elif compile_mode != "none":
            self.call = torch.compile(self.model, mode=compile_mode)
        if mode == "train":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        elif compile_mode != "none":
            self._check_compiled()
        for _ in range(2):
            self.step()
        self._synchronize()
        if on_gpu:
            release_memory()
            torch.cuda.reset_peak_memory_stats(self.device)
        self.steps = 1
        self.steps = max(1, math.ceil(window_s / self.window()))
        counted = on_gpu and compile_mode != "reduce-overhead"
        self.peak_gib = (torch.cuda.max_memory_allocated(self.device) - before) / 2**30 if counted else None

    def step(self) -> None:
        """One training step, or one forward pass."""
        if self.mode == "inference":
            with torch.inference_mode(), self._autocast():
                self.last = self.call(*self.inputs)
            return
        with self._autocast():
            loss = self.loss_of(self.call(*self.inputs), self.inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.last = loss.detach()

    def window(self) -> float:
        """Return the seconds of a window of ``steps`` steps, waiting for the device at both ends."""
        self._synchronize()
        start = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        self._synchronize()
        return time.perf_counter() - start

    def check_finite(self) -> None:
        if self.last is not None and not self.last.isfinite().all():
            raise SystemExit(f"error: {self.name} ({self.mode}) gave values that are not finite, nothing reported.")

    def _check_compiled(self) -> None:
        with torch.inference_mode(), self._autocast():
            compiled, eager = self.call(*self.inputs).float(), self.model(*self.inputs).float()
        error = (compiled - eager).norm().item()
        if not error <= MAX_COMPILE_ERROR * eager.norm().item():
            raise SystemExit(f"error: {self.name} compiled differs from uncompiled by {error:.2e}, nothing reported.")

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def compare(names: Sequence[str], size: int, batch: int, mode: str, arguments: argparse.Namespace) -> list[Row]:
    """A row for each model, the first of which is the baseline, at one size and mode."""
    generator = torch.Generator(arguments.device).manual_seed(size)
    inputs = family_of(names[0]).inputs(batch, size, generator)
    contestants = [Contestant(name, size, inputs, mode, arguments.compile, arguments.window_s) for name in names]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.windows):
        for contestant in contestants:
            rates[contestant.name].append(contestant.steps * batch / contestant.window())
    for contestant in contestants:
        contestant.check_finite()

    baseline_rate, baseline_peak = statistics.median(rates[names[0]]), contestants[0].peak_gib
    rows = []
    for contestant in contestants:
        own, peak = rates[contestant.name], contestant.peak_gib
        rows.append(
            {
                "size": size,
                "batch": batch,
                "mode": mode,
                "model": contestant.name,
                "imgs_per_s": statistics.median(own),
                "lowest_imgs_per_s": min(own),
                "highest_imgs_per_s": max(own),
                "ratio_to_baseline": statistics.median(own) / baseline_rate,
                "peak_gib": peak,
                "peak_ratio_to_baseline": peak / baseline_peak if peak and baseline_peak else None,
                "windows": arguments.windows,
                "steps_per_window": contestant.steps,
                "compile": arguments.compile,
                "autocast": "bfloat16",
            }
        )
    return rows


def compare_at_largest_batch(
    names: Sequence[str], size: int, batch: int, mode: str, arguments: argparse.Namespace
) -> list[Row]:
    """:func:`compare` at ``batch``, halved until every model fits."""
    while True:
        torch.compiler.reset()
        release_memory()
        try:
            return compare(names, size, batch, mode, arguments)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise SystemExit(f"error: not even a batch of 1 at size {size} fits into memory.") from None
            batch //= 2
        print(f"size {size}, {mode}: out of memory, batch {batch} instead", flush=True)


def format_row(row: Row) -> list[str]:
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
    peak_ratio = "-" if row["peak_ratio_to_baseline"] is None else f"{row['peak_ratio_to_baseline']:.2f}x"
    rate, ratio = f"{row['imgs_per_s']:.1f}", f"{row['ratio_to_baseline']:.2f}x"
    return [row["model"], str(row["size"]), str(row["batch"]), row["mode"], rate, ratio, peak, peak_ratio]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", help="names known to timm, by default deit_mhla_small; options follow a colon, see above"
    )
    parser.add_argument("--baseline", help="by default deit_small_patch16_224")
    parser.add_argument("--sizes", type=int, nargs="+", help="pixels, or latents of a dit_*, by default 224 512")
    parser.add_argument("--batch", type=int, nargs="+", help="one for each size, or one for all, by default 256 64")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--compile", help="a mode of torch.compile, or none, by default 'default'")
    parser.add_argument("--windows", type=int, help="windows of each model, by default 7")
    parser.add_argument("--window_s", type=float, help="seconds of a window, at least one step, by default 1")
    add_options(parser, tiny="other defaults: tiny models, 64 px, batch 2, not compiled")
    arguments = parser.parse_args(argv)
    fill(arguments, TINY_DEFAULTS if arguments.tiny else DEFAULTS)
    return arguments


def check_arguments(arguments: argparse.Namespace) -> None:
    """One line and exit code 1 for what cannot run."""
    sizes, batch, names = arguments.sizes, arguments.batch, [arguments.baseline, *arguments.models]
    if len(batch) not in (1, len(sizes)):
        raise SystemExit(f"error: --batch needs one value, or one for each of {len(sizes)} --sizes, got {len(batch)}.")
    if min(*sizes, *batch, arguments.windows) < 1 or arguments.window_s <= 0:
        raise SystemExit("error: --sizes, --batch, --windows and --window_s must be positive.")
    check_spellings(names)
    if len(set(names)) < len(names):
        raise SystemExit("error: --models names a model twice, or the --baseline.")
    if len({id(family_of(name)) for name in names}) > 1:
        raise SystemExit("error: dit_* models cannot be compared with image classifiers.")
    if arguments.compile not in ("none", "default", *torch._inductor.list_mode_options()):
        raise SystemExit(f"error: --compile {arguments.compile!r} is no mode of torch.compile, nor none.")


def name_of_results(spellings: Sequence[str]) -> str:
    """Name the file of a run by the family of the baseline, and by the head mixes of all models."""
    words = [read_spelling(spelling)[0].split("_") for spelling in spellings]
    mixes = sorted({word for name in words for word in name if word in HEAD_MIXES})
    return "_".join(["models", words[0][0], *mixes])


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    check_arguments(arguments)
    arguments.device = open_device(arguments.device)
    names = [arguments.baseline, *arguments.models]
    batches = arguments.batch * (len(arguments.sizes) // len(arguments.batch))
    facts = environment(arguments.device) | {"timm": timm.__version__}
    print(
        f"{facts['device']}, torch {facts['torch']}, timm {facts['timm']}, bf16 autocast, compile {arguments.compile}"
    )
    gc.freeze()

    path = results_path(arguments, name_of_results(names))
    rows: list[Row] = []
    for size, batch in zip(arguments.sizes, batches, strict=True):
        for mode in arguments.modes:
            found = compare_at_largest_batch(names, size, batch, mode, arguments)
            print(f"\n{markdown_table(HEADER, [format_row(row) for row in found])}", flush=True)
            rows += [row | facts for row in found]
            write_csv(path, rows)


if __name__ == "__main__":
    main()
