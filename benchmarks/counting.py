"""How many heads it takes to count pairs, with interleaved heads and without: CPM-3 of arXiv 2602.21371.

    python benchmarks/counting.py --out docs/counting.csv --plot docs/images/counting.png --jobs 8
    python benchmarks/counting.py --out /tmp/counting.csv --tiny

The task is `headmix_vision/data/datasets/counting.py`: N numbers below M on a grid, and at each the number of pairs
that close a sum with it. The model is a ViT of one block that classifies each count; of width and everything else it
keeps but the number of heads and of pseudo-heads. Trained are softmax and MHLA, plain and with P = 2 and P = H, and two
controls: plain at twice the width with sqrt(N) heads, and plain on one-hot symbols with 1 and sqrt(N) heads.

Rule of training, the same for all: a fixed number of steps, warm-up, half a cosine to zero. Of several learning rates
the table takes for each model the best on the first half of the held-out images and reports the second half. Finished
runs are read from the CSV and not repeated. Prints tables of counts that are exactly right (mean ± standard deviation
over seeds) and of sizes, and draws the former.
"""

import argparse
import csv
import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headmix_vision  # noqa: F401  registers the models
from headmix_vision.data.datasets.counting import ENCODINGS, PairCounting
from headmix_vision.files.atomic import atomic_path
from headmix_vision.layers import CORES

WARMUP_STEPS = 100
EAGER_STEPS = 10  # before a step is recorded as a CUDA graph
EVALUATIONS = 10
MOST_PSEUDO_HEADS = 8  # P = H beyond it is left out: 16 heads would attend 256 places in each of 16 heads
RESULTS = ("step", "loss", "tuning_percent", "exact_percent", "floor_percent", "parameters", "attention_flops")
TINY = {"grid": 2, "heads": [1, 2], "moduli": [3], "width": 8, "seeds": [0, 1], "steps": 4, "batch_size": 8}


class Setting(NamedTuple):
    """One run; its fields are columns of the CSV, and runs with equal ones are the same."""

    encoding: str
    modulus: int
    core: str
    pseudo_heads: int
    heads: int
    width: int
    grid: int
    steps: int
    lr: float
    seed: int


FIELDS = (*Setting._fields, *RESULTS)
Row = dict[str, str]


def plan(options: argparse.Namespace) -> Iterator[Setting]:
    """Yield all runs, those of a learning rate, of values and of the last modulus first."""
    root = options.grid
    for lr in options.lr:
        for encoding in ENCODINGS:
            for modulus in reversed(options.moduli):
                for seed in options.seeds:
                    for core in options.cores:
                        for heads, pseudo, width in models(encoding, root, options.heads, options.width):
                            yield Setting(
                                encoding, modulus, core, pseudo, heads, width, options.grid, options.steps, lr, seed
                            )


def models(encoding: str, root: int, heads: list[int], width: int) -> Iterator[tuple[int, int, int]]:
    """Yield heads, pseudo-heads and width of every model."""
    for count in heads:
        if encoding == "value":
            for pseudo in sorted({1, 2, min(count, MOST_PSEUDO_HEADS)}):
                if pseudo <= 2 or pseudo == count:
                    yield count, pseudo, width
        elif count in (1, root):
            yield count, 1, width
    if encoding == "value" and root in heads:
        yield root, 1, 2 * width


def build_model(setting: Setting) -> nn.Module:
    """A ViT of one block: images [B, C, grid, grid] -> logits of the counts 0 to N² at each number [B, N, N² + 1]."""
    mixed = setting.pseudo_heads > 1
    return timm.create_model(
        f"vit_{setting.core}_iha_tiny" if mixed else f"vit_{setting.core}_tiny",
        img_size=setting.grid,
        patch_size=1,
        in_chans=1 if setting.encoding == "value" else setting.modulus,
        embed_dim=setting.width,
        depth=1,
        num_heads=setting.heads,
        block_grid=min(2, setting.grid),
        class_token=False,
        global_pool="",
        num_classes=setting.grid**4 + 1,
        **({"head_mix_args": {"pseudo_heads": setting.pseudo_heads}} if mixed else {}),
    )


def open_data(setting: Setting, split: str, length: int, seed: int = 0) -> PairCounting:
    """The images of a run; the coefficient is the smallest above 2 M that makes the order of a pair matter."""
    modulus = setting.modulus
    return PairCounting(split, setting.grid, modulus, 2 * modulus + 2, setting.encoding, seed, length)


def train(setting: Setting, batch_size: int, eval_images: int, device_name: str) -> list[dict[str, Any]]:
    """Rows of the CSV of one run."""
    device = torch.device(device_name)
    torch.set_num_threads(1)
    torch.manual_seed(setting.seed)
    model = build_model(setting).to(device)
    rate = torch.tensor(setting.lr, device=device)
    optimizer = torch.optim.AdamW(
        model.parameters(), rate, weight_decay=0.0, fused=True, capturable=device.type == "cuda"
    )
    data = open_data(setting, "train", setting.steps * batch_size, setting.seed)
    validation = open_data(setting, "validation", eval_images)
    held_out = validation.encode(torch.from_numpy(validation.numbers(0, eval_images)).to(device))
    images, counts = (x[:batch_size].clone() for x in data.encode(torch.from_numpy(data.numbers(0, batch_size))))
    images, counts, total = images.to(device), counts.to(device), torch.zeros((), device=device)
    sizes = (sum(p.numel() for p in model.parameters()), model.blocks[0].attn.flops())

    def step() -> None:
        loss = F.cross_entropy(model(images).flatten(0, 1), counts.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total.add_(loss.detach())

    rows, number, advance = [], 0, step
    for end in sorted({setting.steps * tenth // EVALUATIONS for tenth in range(1, EVALUATIONS + 1)} - {0}):
        start = number
        drawn = torch.from_numpy(data.numbers(start * batch_size, (end - start) * batch_size))
        batches = [x.split(batch_size) for x in data.encode(drawn.to(device))]
        for new_images, new_counts in zip(*batches, strict=True):
            images.copy_(new_images)
            counts.copy_(new_counts)
            rate.fill_(setting.lr * learning_rate(number + 1, setting.steps))
            advance()
            number += 1
            if device.type == "cuda" and number == EAGER_STEPS:
                advance = recorded(step)
        loss = total.item() / (end - start)
        total.zero_()
        results = (end, f"{loss:.4f}", *exact_percents(model, *held_out, batch_size), *sizes)
        rows.append(dict(zip(FIELDS, (*setting, *results), strict=True)))
    return rows


def recorded(step: Callable[[], None]) -> Callable[[], None]:
    """Record a step, without running it, as a CUDA graph: launching its kernels one by one would take most of it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    return graph.replay


def train_on_stream(setting: Setting, batch_size: int, eval_images: int, device: str) -> list[dict[str, Any]]:
    """Train on a stream of its own where there is a GPU: the default stream cannot be recorded."""
    if torch.device(device).type != "cuda":
        return train(setting, batch_size, eval_images, device)
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        return train(setting, batch_size, eval_images, device)


@torch.no_grad()
def exact_percents(model: nn.Module, images: Tensor, counts: Tensor, batch_size: int) -> list[str]:
    """Percentage of right counts on the first and the second half of images, and of the second's commonest count."""
    right = torch.cat([model(batch).argmax(-1) for batch in images.split(batch_size)]) == counts
    tuning, reported = right.chunk(2)
    answers = counts.chunk(2)[1].flatten()
    floor = torch.bincount(answers).max() / answers.numel()
    return [f"{100 * share.double().mean().item():.2f}" for share in (tuning, reported, floor)]


def learning_rate(step: int, steps: int) -> float:
    """Share of the highest rate at a step from 1 to ``steps``: a linear rise, then half a cosine."""
    return min(1.0, step / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * (step - 1) / steps))


def read_rows(path: Path) -> dict[Setting, list[Row]]:
    """The runs that a CSV holds."""
    runs: dict[Setting, list[Row]] = {}
    if path.exists():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                kinds = Setting.__annotations__
                setting = Setting(**{name: kinds[name](row[name]) for name in Setting._fields})
                runs.setdefault(setting, []).append(row)
    return runs


def write_rows(path: Path, runs: dict[Setting, list[Row]]) -> None:
    with atomic_path(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for setting in sorted(runs):
            writer.writerows(runs[setting])


def run_all(settings: list[Setting], options: argparse.Namespace) -> dict[Setting, list[Row]]:
    """Train what the CSV does not hold yet, and write the CSV after each run."""
    runs = read_rows(options.out)
    missing = [setting for setting in settings if setting not in runs]
    gpus = torch.cuda.device_count()
    devices = [f"cuda:{index}" for index in range(gpus)] if options.device == "cuda" and gpus else [options.device]
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {
            pool.submit(
                train_on_stream, setting, options.batch_size, options.eval_images, devices[index % len(devices)]
            ): setting
            for index, setting in enumerate(missing)
        }
        for count, future in enumerate(as_completed(waiting), start=1):
            setting = waiting[future]
            runs[setting] = [{name: str(value) for name, value in row.items()} for row in future.result()]
            write_rows(options.out, runs)
            print(f"{count} of {len(missing)}: {' '.join(map(str, setting))}", file=sys.stderr, flush=True)
    return {setting: runs[setting] for setting in settings}


def best_runs(runs: dict[Setting, list[Row]]) -> dict[Setting, list[list[Row]]]:
    """The runs of all seeds of each model, at its learning rate; keys are settings of seed 0."""
    by_rate: dict[Setting, dict[float, list[list[Row]]]] = {}
    for setting, rows in runs.items():
        rates = by_rate.setdefault(setting._replace(lr=0.0, seed=0), {})
        rates.setdefault(setting.lr, []).append(rows)

    def tuned(rate: list[list[Row]]) -> float:
        return statistics.mean(float(rows[-1]["tuning_percent"]) for rows in rate)

    return {setting: max(rates.values(), key=tuned) for setting, rates in by_rate.items()}


def column(setting: Setting, width: int) -> str:
    """Name of the line and of the column that a model belongs to; P = H = 2 is one model of two lines."""
    if setting.encoding == "symbol":
        return "plain, symbols"
    if setting.width != width:
        return "plain, twice the width"
    return {1: "plain", 2: "P = 2"}.get(setting.pseudo_heads, "P = H")


def finals(seeds: list[list[Row]]) -> list[float]:
    return [float(rows[-1]["exact_percent"]) for rows in seeds]


def print_tables(best: dict[Setting, list[list[Row]]], width: int) -> None:
    """Exact counts by number of heads, then learning rate, losses and sizes of each model."""
    columns = list(dict.fromkeys(column(setting, width) for setting in best))
    print(f"| M | core | heads | {' | '.join(columns)} |\n|---|---|---|{'---|' * len(columns)}")
    for modulus, core, heads in sorted({(s.modulus, s.core, s.heads) for s in best}, key=lambda k: (k[0], k[1], k[2])):
        cells = dict.fromkeys(columns, "")
        for setting, seeds in best.items():
            if (setting.modulus, setting.core, setting.heads) == (modulus, core, heads):
                cells[column(setting, width)] = spread(finals(seeds))
        print(f"| {modulus} | {core} | {heads} | {' | '.join(cells.values())} |")
    print("\n| M | core | heads | model | rate | loss, last tenths | parameters | attention, MFLOP |")
    print("|---|---|---|---|---|---|---|---|")
    for s, seeds in sorted(best.items()):
        tenths = [statistics.mean(float(rows[index]["loss"]) for rows in seeds) for index in (-2, -1)]
        last = seeds[0][-1]
        print(
            f"| {s.modulus} | {s.core} | {s.heads} | {column(s, width)} | {last['lr']} | {tenths[0]:.3f}, {tenths[1]:.3f} "
            f"| {int(last['parameters']):,} | {int(last['attention_flops']) / 1e6:.2f} |"
        )


def spread(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def plot(path: Path, best: dict[Setting, list[list[Row]]], width: int) -> None:
    """Exact counts against heads, a panel for each modulus and core; lines are means, bands extremes over seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    moduli, cores = sorted({s.modulus for s in best}), list(dict.fromkeys(s.core for s in best))
    figure = Figure(figsize=(1 + 4 * len(cores), 0.8 + 2.8 * len(moduli)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(moduli), len(cores), sharex=True, sharey=True, squeeze=False)
    for modulus, line in zip(moduli, panels, strict=True):
        for core, axes in zip(cores, line, strict=True):
            some = {s: seeds for s, seeds in best.items() if (s.modulus, s.core) == (modulus, core)}
            draw_lines(axes, some, width)
            axes.set(title=f"{core}, M = {modulus}", ylim=(0, 102))
            axes.set_xscale("log", base=2)
            heads = sorted({s.heads for s in best})
            axes.set_xticks(heads, map(str, heads))
            axes.grid(alpha=0.3)
        line[0].set_ylabel("counts exactly right, %")
    for axes in panels[-1]:
        axes.set_xlabel("heads")
    panels[0, 0].legend(loc="lower right", fontsize="small")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def draw_lines(axes: Any, best: dict[Setting, list[list[Row]]], width: int) -> None:
    names = list(dict.fromkeys(column(setting, width) for setting in best))
    for index, name in enumerate(names):
        points = {s.heads: finals(seeds) for s, seeds in best.items() if column(s, width) == name}
        if name == "P = H":  # one head has one pseudo-head, two have two
            points |= {
                s.heads: finals(seeds)
                for s, seeds in best.items()
                if s.pseudo_heads == s.heads <= 2 and column(s, width) in ("plain", "P = 2")
            }
        x = sorted(points)
        style = "o" if name.startswith("plain,") else ".-"
        means = [statistics.mean(points[heads]) for heads in x]
        axes.plot(x, means, style, color=f"C{index}", markerfacecolor="none", label=name)
        if style == ".-":
            lows, highs = ([extreme(points[heads]) for heads in x] for extreme in (min, max))
            axes.fill_between(x, lows, highs, color=f"C{index}", alpha=0.2)
    floor = next(iter(best.values()))[0][-1]["floor_percent"]
    axes.axhline(float(floor), color="grey", linestyle=":", label="commonest count")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="CSV to go on with, or to write")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    parser.add_argument("--heads", type=positive, nargs="+", default=[1, 2, 4, 8, 16], help="divisors of the width")
    parser.add_argument("--moduli", type=positive, nargs="+", default=[3, 5], help="M, at least 3 each")
    parser.add_argument("--cores", nargs="+", default=["softmax", "mhla"], choices=tuple(CORES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-3], help="learning rates to choose from")
    parser.add_argument("--steps", type=positive, default=5000)
    parser.add_argument("--batch_size", type=positive, default=256)
    parser.add_argument("--grid", type=positive, default=4, help="numbers along each side, sqrt(N)")
    parser.add_argument("--width", type=positive, default=64)
    parser.add_argument("--eval_images", type=positive, default=4096)
    parser.add_argument("--jobs", type=positive, default=1, help="runs at a time, spread over the GPUs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="other defaults, for a trial of seconds")
    if parser.parse_args().tiny:
        parser.set_defaults(**TINY, eval_images=16)
    arguments = parser.parse_args()
    try:
        for setting in {setting._replace(lr=0.0, seed=0) for setting in plan(arguments)}:
            open_data(setting, "train", arguments.batch_size)
            build_model(setting)
        torch.empty(0, device=arguments.device)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise SystemExit(f"error: {str(error).splitlines()[0]}") from None
    return arguments


def main() -> None:
    arguments = read_arguments()
    best = best_runs(run_all(list(plan(arguments)), arguments))
    print_tables(best, arguments.width)
    if arguments.plot:
        plot(arguments.plot, best, arguments.width)


if __name__ == "__main__":
    main()
