"""How many heads it takes to count pairs, with interleaved heads and without: CPM-3 of arXiv 2602.21371.

    python -m experiments.counting.run --out experiments/counting/results.csv --jobs 8
    python -m experiments.counting.run --out /tmp/counting.csv --tiny

The task is `headmix_vision/data/datasets/counting.py`: N numbers below M on a grid, and at each the number of pairs
that close a sum with it. The model is a ViT of one block that classifies each count; width and everything else stay
the same but the number of heads and of pseudo-heads. Trained are softmax and MHLA, plain and with P = 2 and P = H, and
two controls: plain at twice the width with sqrt(N) heads, and plain on one-hot symbols with 1 and sqrt(N) heads.

Rule of training, the same for all: a fixed number of steps, warm-up, half a cosine to zero. Where several learning
rates are given, the best on the first half of the held-out images is taken for each model; the second half is what is
reported. Runs that the CSV holds are not repeated. Prints a table of counts that are exactly right (mean ± standard
deviation over seeds) and one of losses and sizes, and draws the former; models whose seeds are not complete are left
out of them.
"""

import argparse
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headmix_vision  # noqa: F401  registers the models
from experiments.counting.report import (
    FIELDS,
    Runs,
    Setting,
    accuracy_table,
    plot,
    read_runs,
    training_table,
    tuned,
    unseeded,
    write_runs,
)
from headmix_vision.data.datasets.counting import ENCODINGS, PairCounting
from headmix_vision.layers import CORES

WARMUP_STEPS = 100
EAGER_STEPS = 10  # before a step is recorded as a CUDA graph
EVALUATIONS = 10
MOST_PSEUDO_HEADS = 8  # P = H beyond it is left out: 16 heads would attend to 256 places, each
TINY = {"grid": 2, "heads": [1, 2], "moduli": [3], "width": 8, "seeds": [0, 1], "steps": 12, "batch_size": 8}


def plan(options: argparse.Namespace) -> Iterator[Setting]:
    """Yield all runs: the last modulus first, all seeds of a model one after the other."""
    size = (options.grid, options.steps, options.batch_size)
    for modulus in reversed(options.moduli):
        for lr in options.lr:
            for encoding in ENCODINGS:
                for core in options.cores:
                    for pseudo, heads, width in sizes(encoding, options.grid, options.heads, options.width):
                        for seed in options.seeds:
                            yield Setting(encoding, modulus, core, pseudo, heads, width, *size, lr, seed)


def sizes(encoding: str, root: int, heads: list[int], width: int) -> Iterator[tuple[int, int, int]]:
    """Yield pseudo-heads, heads and width of every model; ``root`` is sqrt(N)."""
    if encoding == "symbol":
        yield from ((1, count, width) for count in heads if count in (1, root))
        return
    for count in heads:
        for pseudo in sorted({1, 2, count if count <= MOST_PSEUDO_HEADS else 1}):
            yield pseudo, count, width
    if root in heads:
        yield 1, root, 2 * width


def build_model(setting: Setting) -> nn.Module:
    """A ViT of one block: images [B, C, grid, grid] -> logits of the counts 0 to N² at each number [B, N, N² + 1]."""
    mix: dict[str, Any] = {"head_mix_args": {"pseudo_heads": setting.pseudo_heads}} if setting.pseudo_heads > 1 else {}
    return timm.create_model(
        f"vit_{setting.core}_iha_tiny" if mix else f"vit_{setting.core}_tiny",
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
        **mix,
    )


def open_data(setting: Setting, split: str, length: int, seed: int = 0) -> PairCounting:
    """The images of a run, whose coefficient G is 2 M + 2: above 2 M, as in the paper, and 2 modulo M."""
    modulus = setting.modulus
    return PairCounting(split, setting.grid, modulus, 2 * modulus + 2, setting.encoding, seed, length)


def train(setting: Setting, eval_images: int, device: torch.device) -> list[dict[str, Any]]:
    """Rows of the CSV of one run."""
    torch.set_num_threads(1)
    torch.manual_seed(setting.seed)
    model: Any = build_model(setting).to(device)
    counted = (sum(p.numel() for p in model.parameters()), model.blocks[0].attn.flops())
    data = open_data(setting, "train", setting.steps * setting.batch_size, setting.seed)
    held_out = open_data(setting, "validation", eval_images)
    validation = held_out.encode(torch.from_numpy(held_out.numbers(0, eval_images)).to(device))
    training = Training(model, setting, device)
    rows, start = [], 0
    for end in sorted({setting.steps * tenth // EVALUATIONS for tenth in range(1, EVALUATIONS + 1)} - {0}):
        first, count = start * setting.batch_size, (end - start) * setting.batch_size
        images, counts = data.encode(torch.from_numpy(data.numbers(first, count)).to(device))
        loss = training.run(images, counts)
        percents = exact_percents(model, *validation, setting.batch_size)
        rows.append(dict(zip(FIELDS, (*setting, end, f"{loss:.4f}", *percents, *counted), strict=True)))
        start = end
    return rows


class Training:
    """Steps of AdamW on the cross-entropy of counts, replayed as a CUDA graph where there is a GPU."""

    def __init__(self, model: nn.Module, setting: Setting, device: torch.device) -> None:
        self.model, self.setting, self.device = model, setting, device
        self.rate = torch.tensor(setting.lr, device=device)
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            model.parameters(), self.rate, weight_decay=0.0, fused=True, capturable=on_gpu
        )
        self.total = torch.zeros((), device=device)
        self.images, self.counts = torch.empty(0), torch.empty(0)
        self.number = 0
        self.advance: Callable[[], None] = self.step

    def run(self, images: Tensor, counts: Tensor) -> float:
        """Train on one batch after another, and return the mean loss."""
        batches = list(zip(images.split(self.setting.batch_size), counts.split(self.setting.batch_size), strict=True))
        if self.number == 0:
            self.images, self.counts = (x.clone() for x in batches[0])
        for new_images, new_counts in batches:
            self.images.copy_(new_images)
            self.counts.copy_(new_counts)
            self.number += 1
            self.rate.fill_(self.setting.lr * learning_rate(self.number, self.setting.steps))
            self.advance()
            if self.device.type == "cuda" and self.number == EAGER_STEPS:
                self.advance = recorded(self.step)
        mean = self.total.item() / len(batches)
        self.total.zero_()
        return mean

    def step(self) -> None:
        """Train on what the buffers hold."""
        loss = F.cross_entropy(self.model(self.images).flatten(0, 1), self.counts.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.total.add_(loss.detach())


def recorded(step: Callable[[], None]) -> Callable[[], None]:
    """Record a step, without running it, as a CUDA graph: one kernel after the other, launching would take most."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    return graph.replay


def learning_rate(step: int, steps: int) -> float:
    """Share of the highest rate at a step from 1 to ``steps``: a linear rise, then half a cosine."""
    return min(1.0, step / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * (step - 1) / steps))


@torch.no_grad()
def exact_percents(model: nn.Module, images: Tensor, counts: Tensor, batch_size: int) -> list[str]:
    """Percentages of right counts on the first and second half of images, and of the second half's commonest count."""
    right = torch.cat([model(batch).argmax(-1) for batch in images.split(batch_size)]) == counts
    tuning, reported = right.chunk(2)
    commonest = counts.chunk(2)[1].flatten().bincount().max() / reported.numel()
    return [f"{100 * share.item():.2f}" for share in (tuning.double().mean(), reported.double().mean(), commonest)]


def train_on(setting: Setting, eval_images: int, device_name: str, deadline_s: float) -> list[dict[str, Any]]:
    """Train in a process of its own; on a GPU on a stream of its own, as the default stream cannot be recorded.

    Returns no rows after the deadline, a time of the clock.
    """
    if time.time() > deadline_s:
        return []
    device = torch.device(device_name)
    if device.type != "cuda":
        return train(setting, eval_images, device)
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):
        return train(setting, eval_images, device)


def run_all(settings: list[Setting], options: argparse.Namespace) -> Runs:
    """Train what the CSV does not hold yet, as far as time allows, and write it anew after each run."""
    runs = read_runs(options.out)
    missing = [setting for setting in settings if setting not in runs]
    devices = [options.device]
    if options.device == "cuda":
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    deadline_s, failed = time.time() + options.limit_s, 0
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {
            pool.submit(train_on, setting, options.eval_images, devices[index % len(devices)], deadline_s): setting
            for index, setting in enumerate(missing)
        }
        for count, future in enumerate(as_completed(waiting), start=1):
            setting = waiting[future]
            name = f"{count} of {len(missing)}: {' '.join(map(str, setting))}"
            if (error := future.exception()) is not None:  # the others go on
                failed += 1
                print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            elif rows := future.result():
                runs[setting] = [{key: str(value) for key, value in row.items()} for row in rows]
                write_runs(options.out, runs)
                print(name, file=sys.stderr, flush=True)
    done = {setting: runs[setting] for setting in settings if setting in runs}
    if len(done) < len(settings):
        print(f"{len(settings) - len(done)} runs are missing, {failed} of them failed", file=sys.stderr)
    return done


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="CSV to go on with, or to write")
    parser.add_argument("--plot", type=Path, help="SVG to write")
    parser.add_argument("--heads", type=positive, nargs="+", default=[1, 2, 4, 8, 16], help="divisors of the width")
    parser.add_argument("--moduli", type=positive, nargs="+", default=[3, 5], help="M, at least 3 each")
    parser.add_argument("--cores", nargs="+", default=["softmax", "mhla"], choices=tuple(CORES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-3], help="learning rates to choose from")
    parser.add_argument("--steps", type=positive, default=5000)
    parser.add_argument("--batch_size", type=positive, default=256)
    parser.add_argument("--grid", type=positive, default=4, help="numbers along each side, sqrt(N)")
    parser.add_argument("--width", type=positive, default=64)
    parser.add_argument("--eval_images", type=positive, default=4096, help="one half for tuning, one to report")
    parser.add_argument("--jobs", type=positive, default=1, help="runs at a time, spread over the GPUs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit_s", type=float, default=math.inf, help="begin no run after so many seconds")
    parser.add_argument("--tiny", action="store_true", help="other defaults, for a trial of seconds")
    if parser.parse_args(argv).tiny:
        parser.set_defaults(**TINY, eval_images=16)
    arguments = parser.parse_args(argv)
    try:
        for setting in {unseeded(setting) for setting in plan(arguments)}:
            open_data(setting, "train", arguments.batch_size)
            build_model(setting)
        torch.empty(0, device=arguments.device)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise SystemExit(f"error: {str(error).splitlines()[0]}") from None
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = read_arguments(argv)
    models = tuned(run_all(list(plan(arguments)), arguments), len(arguments.seeds))
    if not models:
        raise SystemExit("error: no model has been trained with all seeds")
    print(accuracy_table(models, arguments.width), training_table(models, arguments.width), sep="\n\n")
    if arguments.plot:
        plot(arguments.plot, models, arguments.width)


if __name__ == "__main__":
    main()
