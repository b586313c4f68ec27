"""What the rank of Head-in-Head's transition is good for: associative recall over image patches.

    python benchmarks/expressivity.py --out docs/expressivity.csv --plot docs/images/expressivity.svg
    python benchmarks/expressivity.py --out docs/expressivity.csv --plot docs/images/expressivity.svg --jobs 9

The task is `headmix_vision/data/datasets/recall.py`. The model is a ViT of one block whose attention is Head-in-Head
with one head, scanned forward, that answers at every patch; all of it is equal for every r but the r x r mask. Prints a
table of glyphs recalled without a wrong dot (mean ± standard deviation over seeds), writes a CSV and a plot of this
share in the course of training and by the age of what is asked for.
"""

import argparse
import math
import multiprocessing
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import headmix_vision  # noqa: F401  registers the models
from headmix_vision.analysis.lines import OKABE_ITO, label_ends, line_figure, save_svg
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


def print_table(rows: list[dict[str, Any]], steps: int) -> None:
    """Mean ± standard deviation over seeds after the last step, for each number of attributes and r."""
    last = [row for row in rows if row["step"] == steps and row["age"] == "all"]
    print("| places per write | r | glyphs recalled, % | dots right, % | parameters |\n|---|---|---|---|---|")
    for attributes, sub_heads in dict.fromkeys((row["attributes"], row["sub_heads"]) for row in last):
        some = [row for row in last if (row["attributes"], row["sub_heads"]) == (attributes, sub_heads)]
        cells = [spread([float(row[name]) for row in some]) for name in ("glyphs_percent", "dots_percent")]
        print(f"| {attributes} | {sub_heads} | {cells[0]} | {cells[1]} | {some[0]['parameters']:,} |")


def spread(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def plot(path: Path, rows: list[dict[str, Any]], steps: int) -> None:
    """Left the share of glyphs recalled in the course of training, right by age; lines are means, bands extremes."""
    attributes = list(dict.fromkeys(row["attributes"] for row in rows))
    height_in = 0.8 + 2.4 * len(attributes)
    figure, panels = line_figure(len(attributes), 2, height_in, sharex="col", sharey=True)
    for (training, ages), count in zip(panels, attributes, strict=True):
        some = [row for row in rows if row["attributes"] == count]
        final = [row for row in some if row["age"] != "all"]
        ranges = sorted({row["age"] for row in final})
        draw_lines(training, [row for row in some if row["age"] == "all"], "step")
        draw_lines(ages, [row | {"age": ranges.index(row["age"])} for row in final], "age")
        for axes in (training, ages):
            axes.set(title=f"{count} place{'s' if count != 1 else ''} per write", ylim=(0, 102))
        training.set_ylabel("glyphs recalled, %")
        ages.set_xticks(range(len(ranges)), map(str, ranges))
    panels[-1, 0].set_xlabel("training step")
    panels[-1, 1].set_xlabel(f"age in patches, at least, after {steps} steps")
    label_ends(*panels[:, 1])
    save_svg(path, figure)


def draw_lines(axes: Any, rows: list[dict[str, Any]], x_name: str) -> None:
    """A line of means with a band of extremes for each r."""
    for sub_heads, colour in zip(dict.fromkeys(row["sub_heads"] for row in rows), cycle(OKABE_ITO), strict=False):
        points: dict[int, list[float]] = {}
        for row in rows:
            if row["sub_heads"] == sub_heads:
                points.setdefault(row[x_name], []).append(float(row["glyphs_percent"]))
        x, values = sorted(points), [points[key] for key in sorted(points)]
        axes.plot(x, [statistics.mean(v) for v in values], ".-", color=colour, label=f"r = {sub_heads}")
        axes.fill_between(x, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.2)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def read_arguments() -> argparse.Namespace:
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
    arguments = parser.parse_args()
    try:
        for attributes in arguments.attributes:
            PatchRecall("train", attributes, arguments.grid)
        for sub_heads in arguments.ranks:
            build_model(sub_heads, arguments.grid, arguments.width, arguments.beta_max)
        torch.empty(0, device=arguments.device)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise SystemExit(f"error: {str(error).splitlines()[0]}") from None
    return arguments


def main() -> None:
    arguments = read_arguments()
    settings = [
        Setting(attributes, sub_heads, seed, arguments)
        for attributes in arguments.attributes
        for sub_heads in arguments.ranks
        for seed in arguments.seeds
    ]
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        rows = [row for run in pool.map(train, settings) for row in run]
    write_table(arguments.out, FIELDS, rows)
    print_table(rows, arguments.steps)
    if arguments.plot:
        plot(arguments.plot, rows, arguments.steps)


if __name__ == "__main__":
    main()
