"""What the rank of Head-in-Head's transition is good for: associative recall over image patches.

    python -m experiments.recall.run --out experiments/recall/results.csv --attributes 1 2 4 --steps 1000 --jobs 5

The task is `headmix_vision/data/datasets/recall.py`. The model is a ViT of one block whose attention is Head-in-Head
with one head, scanned forward, that answers at every patch; all of it is equal for every r but the r x r mask. Prints a
table of glyphs recalled without a wrong dot (mean ± standard deviation over seeds), writes a CSV and a plot of this
share in the course of training and by the age of what is asked for.
"""

import argparse
import math
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import headmix_vision  # noqa: F401  registers the models
from experiments.recall.report import draw, table
from headmix_vision.data.datasets.recall import GLYPH, PATCH, PatchRecall
from headmix_vision.files.result_table import write_table

WARMUP_STEPS = 50
EVALUATIONS = 20
AGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # upper edges: the patch itself, 1, 2-3, 4-7, ...
FIELDS = ("attributes", "sub_heads", "seed", "step", "age", "glyphs_percent", "dots_percent", "parameters")


class Setting(NamedTuple):
    """One run."""

    attributes: int
    sub_heads: int
    seed: int
    arguments: argparse.Namespace


def build_model(sub_heads: int, grid: int, width: int, beta_max: float) -> nn.Module:
    """A ViT of one block and one head that answers at every patch: [B, 3, 8 grid, 8 grid] -> logits [B, grid², 16]."""
    return timm.create_model(
        "vit_hih_tiny",
        img_size=grid * PATCH,
        patch_size=PATCH,
        embed_dim=width,
        depth=1,
        num_heads=1,
        core_args={"num_sub_heads": sub_heads, "scans": "forward", "conv_size": 0, "beta_max": beta_max},
        pos_embed="none",
        class_token=False,
        global_pool="",
        num_classes=GLYPH**2,
    )


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, answers: Tensor, batch_size: int) -> Tensor:
    """Which dots are right: bool [B, N, 16]."""
    model.eval()
    logits = torch.cat([model(batch) for batch in images.split(batch_size)])
    model.train()
    return (logits > 0) == (answers > 0.5)


def scores(right: Tensor) -> tuple[float, float]:
    """Percentage of glyphs without a wrong dot, and of dots; ``right`` bool [..., 16]."""
    return 100 * right.all(-1).double().mean().item(), 100 * right.double().mean().item()


def by_age(right: Tensor, ages: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Lowest age and answers of each range of ages; ``right`` [B, N, 16], ``ages`` int64 [B, N]."""
    ranges = torch.bucketize(ages, torch.tensor(AGES), right=True)
    for index in ranges.unique().tolist():
        yield (AGES[index - 1] if index else 0), right[ranges == index]


def train(setting: Setting) -> list[dict[str, Any]]:
    """Rows of the CSV of one run."""
    attributes, sub_heads, seed, options = setting
    device = torch.device(options.device)
    torch.set_num_threads(max(1, torch.get_num_threads() // options.jobs))
    torch.manual_seed(seed)
    model = build_model(sub_heads, options.grid, options.width, options.beta_max).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    validation = PatchRecall("validation", attributes, options.grid, length=options.eval_images)
    images, answers = (
        torch.stack(x).to(device) for x in zip(*map(validation.__getitem__, range(len(validation))), strict=True)
    )
    sources = torch.stack([torch.from_numpy(validation.record(i).sources) for i in range(len(validation))])
    ages = torch.arange(options.grid**2) - sources

    def row(step: int, age: Any, right: Tensor) -> dict[str, Any]:
        percents = [f"{x:.2f}" for x in scores(right)]
        return dict(zip(FIELDS, (attributes, sub_heads, seed, step, age, *percents, parameters), strict=True))

    rows = []
    data = PatchRecall("train", attributes, options.grid, seed, options.steps * options.batch_size)
    for step, (batch, targets) in enumerate(DataLoader(data, options.batch_size), start=1):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * learning_rate(step, options.steps)
        loss = F.binary_cross_entropy_with_logits(model(batch.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == options.steps or step % max(1, options.steps // EVALUATIONS) == 0:
            right = evaluate(model, images, answers, options.batch_size).cpu()
            rows.append(row(step, "all", right))
    print(f"{attributes} places per write, r = {sub_heads}, seed {seed}: done", file=sys.stderr, flush=True)
    return rows + [row(options.steps, age, some) for age, some in by_age(right, ages)]


def learning_rate(step: int, steps: int) -> float:
    """Share of the highest rate at a step from 1 to ``steps``: a linear rise, then half a cosine."""
    return min(1.0, step / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * (step - 1) / steps))


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--plot", type=Path, help="SVG to write")
    parser.add_argument(
        "--ranks", type=positive, nargs="+", default=[1, 2, 4], help="sub-heads r, divisors of the width"
    )
    parser.add_argument("--attributes", type=int, nargs="+", default=[2], help="places per write, 1 to 4 each")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=positive, default=500)
    parser.add_argument("--batch_size", type=positive, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--grid", type=positive, default=8, help="patches along each side")
    parser.add_argument("--width", type=positive, default=64, help="width of the model and both dims of its state")
    parser.add_argument("--beta_max", type=float, default=2.0, help="upper bound of the strength of a write, up to 2")
    parser.add_argument("--eval_images", type=positive, default=512)
    parser.add_argument("--jobs", type=positive, default=1, help="runs at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    try:
        for attributes in arguments.attributes:
            PatchRecall("train", attributes, arguments.grid)
        for sub_heads in arguments.ranks:
            build_model(sub_heads, arguments.grid, arguments.width, arguments.beta_max)
        torch.empty(0, device=arguments.device)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise SystemExit(f"error: {str(error).splitlines()[0]}") from None
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = read_arguments(argv)
    settings = [
        Setting(attributes, sub_heads, seed, arguments)
        for attributes in arguments.attributes
        for sub_heads in arguments.ranks
        for seed in arguments.seeds
    ]
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        rows = [row for run in pool.map(train, settings) for row in run]
    write_table(arguments.out, FIELDS, rows)
    print(table(arguments.out))
    if arguments.plot:
        draw(arguments.plot, arguments.out)


if __name__ == "__main__":
    main()
