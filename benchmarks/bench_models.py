"""Images per second, peak memory and compile time of whole models beside their equals with softmax.

    python -m benchmarks.bench_models --minutes 8 --jobs 8     # goes on with the whole table, what tells most first
    python -m benchmarks.bench_models --kinds deit_s --sizes 224 --batch 256 --compile default    # a part of it
    python -m benchmarks.bench_models --models deit_mhla_small deit_linear_small --sizes 224 512 --batch 256 64
    python -m benchmarks.bench_models --baseline deit_iha_small --models deit_mhla_iha_small:global_every=5 --sizes 512
    python -m benchmarks.bench_models --device cpu --tiny      # tries the script itself where there is no GPU

Options of a model follow its name and a colon, separated by commas; a dot stands for a mapping inside an option.
Baselines are the model that differs in its core alone, softmax, with and without its convolution of tokens (CPE), and
timm's DeiT of the same size; or the --baseline. Models of a setting take turns on the same random data, window by
window, under bf16 autocast and one mode of torch.compile: `none` (eager), `default`, `reduce-overhead` (CUDA graphs).
Where calls are replayed, rows say `replayed` for `none` and `replayed default`; not in CUDA graphs.
A figure is the median of the windows. A training step is forward, loss, backward and a fused AdamW step.

Peak memory is a model's need beyond the data; of CUDA graphs PyTorch does not count it. Compile time is the first call
with its backward pass, left out where a cache had a part. Models that do not fit together are timed in pairs, then
alone; one that does not fit alone has a row that says so.

Before a compiled model is timed its outputs, and in training its gradients, are compared with the uncompiled model;
after all windows losses and outputs must be finite. A model that fails has a note instead of a speed, and the exit
code is 1. A second call keeps the rows of the CSV file, except failed ones, and goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.model_table import KINDS, Setting, equal_softmax, timm_deit, whole_table
from headmix_lab import measuring
from headmix_lab import model_families as families
from headmix_lab.measuring import release_memory, synchronize
from headmix_lab.model_families import family_of
from headmix_lab.tables import print_table, read_csv
from headmix_vision.layers.head_mixes import HEAD_MIXES
from headmix_vision.ops.dispatch import are_calls_replayed
from headmix_vision.training.base_module import compile_blocks

BF16 = "inference_bf16"  # inference without autocast, all weights in bfloat16
MAX_ERROR = {"outputs": 0.05, "gradients": 0.1}  # relative, of two bf16 passes
PARTS = 8  # of a batch, for the uncompiled pass of the gate: it must not need more memory than the compiled one
MODES = ("train", "inference")
COMPILE = ("none", "default", "blocks", *torch._inductor.list_mode_options())
KEY = ("size", "batch", "mode", "compile", "model")  # tells rows apart
FAILED = "failed: "
SHOWN = dict.fromkeys(KEY, "") | {
    "imgs_per_s": ".1f", "ratio_to_baseline": ".2f", "ratio_to_plain": ".2f", "ratio_to_timm": ".2f",
    "peak_gib": ".2f", "compile_s": ".0f", "note": "",
}  # fmt: skip

Row = dict[str, Any]


@torch.no_grad()
def _fill_zeros(model: nn.Module) -> None:
    """Draw weights that start at zero: a model that outputs zeros would pass the comparison with its compiled form."""
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)


class Contestant:
    """A model ready to be timed: compiled, warmed up and its peak memory known.

    Without `check` its compiled form is not compared with the uncompiled one, as of models with stochastic depth.
    """

    def __init__(
        self, name: str, setting: Setting, inputs: tuple[Tensor, ...], window_s: float, check: bool = True
    ) -> None:
        family, mode, compile_mode = family_of(name), setting.mode, setting.compile
        self.name, self.mode, self.loss_of, self.device = name, mode, family.loss, inputs[0].device
        self.weights = torch.bfloat16 if mode == BF16 else torch.float32
        self.inputs = tuple(x.to(self.weights) if x.is_floating_point() else x for x in inputs)
        self.last: Tensor | None = None
        self.rates: list[float] = []
        on_gpu = self.device.type == "cuda"
        before = torch.cuda.memory_allocated(self.device) if on_gpu else 0
        torch.manual_seed(0)
        self.model = (
            families.make_model(name, setting.size, **family.options)
            .to(self.device, self.weights)
            .train(mode == "train")
        )
        _fill_zeros(self.model)
        self.call: Callable[..., Tensor] = self.model
        self.compile_s: float | None = None
        if compile_mode == "blocks":
            compile_blocks(self.model)
        elif compile_mode != "none":
            self.call = torch.compile(self.model, mode=compile_mode)
        if compile_mode != "none" and check:
            self._check_compiled()
        if mode == "train":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        for _ in range(3):  # of CUDA graphs the second call is captured
            self.step()
        synchronize(self.device)
        if on_gpu:
            release_memory()
            torch.cuda.reset_peak_memory_stats(self.device)
        self.steps = 1
        self.steps = max(1, math.ceil(window_s / self.window()))
        counted = on_gpu and compile_mode != "reduce-overhead"
        self.peak_gib = (torch.cuda.max_memory_allocated(self.device) - before) / 2**30 if counted else None

    def step(self) -> None:
        """One training step, or one forward pass."""
        if self.mode != "train":
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
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        synchronize(self.device)
        return time.perf_counter() - start

    def check_finite(self) -> None:
        if self.last is not None and not self.last.isfinite().all():
            raise SystemExit(f"error: {self.name} ({self.mode}) gave values that are not finite, nothing reported.")

    def _check_compiled(self) -> None:
        """Compile, which is timed, and compare with the uncompiled model."""
        cached, start = _cache_hits(), time.perf_counter()
        found = self._results(1)
        synchronize(self.device)
        self.compile_s = time.perf_counter() - start if _cache_hits() == cached else None
        with torch.compiler.set_stance("force_eager"):
            expected = self._results(PARTS)
        for (what, allowed), x, y in zip(MAX_ERROR.items(), found, expected, strict=False):
            error = ((x - y).norm() / y.norm()).item()
            if not error <= allowed:
                raise SystemExit(f"error: {what} of {self.name} compiled are off by {error:.2e}, nothing reported.")

    def _results(self, parts: int) -> list[Tensor]:
        """Return outputs, and in training all gradients, of the batch in so many parts."""
        outputs, training = [], self.mode == "train"
        for part in zip(*(x.chunk(parts) for x in self.inputs), strict=True):
            with torch.inference_mode(not training), self._autocast():
                output = self.call(*part)
                outputs.append(output.detach().float().clone())
            if training:
                with self._autocast():
                    loss = self.loss_of(output, part)
                (loss * (len(output) / len(self.inputs[0]))).backward()
        gradients = [x.grad.flatten().float() for x in self.model.parameters() if x.grad is not None]
        self.model.zero_grad()
        return [torch.cat(outputs), *([torch.cat(gradients)] if training else [])]

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.mode != BF16)


def _cache_hits() -> int:
    return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


def open_contestant(name: str, setting: Setting, device: torch.device, window_s: float) -> Contestant:
    inputs = family_of(name).inputs(setting.batch, setting.size, torch.Generator(device).manual_seed(0))
    return Contestant(name, setting, inputs, window_s)


def compare(names: Sequence[str], setting: Setting, arguments: argparse.Namespace) -> list[Row]:
    """Return a row for each model at one setting.

    Raises:
        torch.OutOfMemoryError: The models do not fit together; one that does not fit alone has a row.
    """
    ready: dict[str, Contestant] = {}
    notes: dict[str, str] = {}
    for name in names:
        try:
            ready[name] = open_contestant(name, setting, arguments.device, arguments.window_s)
        except torch.OutOfMemoryError:
            if ready:
                raise
            notes[name] = "out of memory"
        except (Exception, SystemExit) as error:  # of any kind: the other rows stay
            notes[name] = f"{FAILED}{type(error).__name__} {error}".splitlines()[0]
        if name in notes:
            release_memory()  # outside of the handler, which keeps the tensors of the failed call
    for _ in range(arguments.windows):
        for contestant in ready.values():
            contestant.rates.append(contestant.steps * setting.batch / contestant.window())
    for contestant in ready.values():
        contestant.check_finite()
    settled = {"windows": arguments.windows, "autocast": "bfloat16" if setting.mode != BF16 else "off"}
    return [_row(name, arguments.baseline, ready, setting) | settled | {"note": notes.get(name, "")} for name in names]


def _row(name: str, baseline: str | None, ready: Mapping[str, Contestant], setting: Setting) -> Row:
    speeds = {other: statistics.median(contestant.rates) for other, contestant in ready.items()}
    peaks = {other: contestant.peak_gib for other, contestant in ready.items()}
    own, baseline = ready.get(name), baseline or equal_softmax(name)
    others = {"baseline": baseline, "plain": equal_softmax(name, cpe=False), "timm": timm_deit(name)}

    def ratio(values: Mapping[str, float | None], other: str | None) -> float | None:
        mine, theirs = values.get(name), values.get(other or "")
        return mine / theirs if mine and theirs else None

    replayed = "replayed " if are_calls_replayed() and setting.compile != "reduce-overhead" else ""
    return {
        "size": "x".join(map(str, setting.size)) if isinstance(setting.size, tuple) else setting.size,
        "batch": setting.batch,
        "mode": setting.mode,
        "compile": f"{replayed}{setting.compile}".replace("replayed none", "replayed"),
        "model": name,
        "imgs_per_s": speeds.get(name),
        "lowest_imgs_per_s": min(own.rates) if own else None,
        "highest_imgs_per_s": max(own.rates) if own else None,
        "baseline": baseline,
        **{f"ratio_to_{what}": ratio(speeds, other) for what, other in others.items()},
        "peak_gib": peaks.get(name),
        "peak_ratio_to_baseline": ratio(peaks, baseline),
        "compile_s": own.compile_s if own else None,
        "steps_per_window": own.steps if own else None,
    }


def compare_as_fits(
    names: Sequence[str], baselines: Sequence[str], setting: Setting, arguments: argparse.Namespace
) -> list[Row]:
    """:func:`compare` all models; where they do not fit together each with its baselines, or else alone."""
    torch.compiler.reset()
    release_memory()
    with contextlib.suppress(torch.OutOfMemoryError):
        return compare(names, setting, arguments)
    others = [name for name in names if name not in baselines]
    groups = [[*baselines, name] for name in others] if len(others) > 1 else [[name] for name in names]
    print(f"too large together: {', '.join(names)}", flush=True)
    rows: dict[str, Row] = {}
    for group in groups:
        for row in compare_as_fits(group, baselines, setting, arguments):
            rows.setdefault(row["model"], row)
    return list(rows.values())


def baselines_of(models: Sequence[str], baseline: str | None) -> list[str]:
    """Return what models are timed beside: the equal softmax without and with CPE, timm's DeiT; or the one given."""
    found = [f(name) for f in (partial(equal_softmax, cpe=False), equal_softmax, timm_deit) for name in models]
    return [baseline] if baseline else list(dict.fromkeys(name for name in found if name and name not in models))


def _compile_ahead(task: tuple[str, Setting, str]) -> None:
    """Leave the programs of a model in the caches on disk; what fails here fails again where it is reported."""
    with contextlib.suppress(Exception, SystemExit):
        open_contestant(*task[:2], torch.device(task[2]), 0.0)
    torch.compiler.reset()
    release_memory()


def settings_of(arguments: argparse.Namespace) -> list[Setting]:
    """Return the settings of --models, else the part of the whole table that the other options choose."""
    if arguments.models:
        batches = arguments.batch * (len(arguments.sizes) // len(arguments.batch))
        sizes = list(zip(arguments.sizes, batches, strict=True))
        settings = product([tuple(arguments.models)], sizes, arguments.modes, arguments.compile)
        return [Setting(models, *size, mode, compile_mode) for models, size, mode, compile_mode in settings]
    table = whole_table(arguments.kinds, arguments.modes, arguments.tiny)
    allowed = (arguments.sizes, arguments.batch, arguments.modes, arguments.compile)
    return [x for x in table if all(some is None or y in some for y, some in zip(x[1:], allowed, strict=True))]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="parts of the whole table, by default all")
    add("--models", nargs="+", help="names known to timm instead of the table; options follow a colon, see above")
    add("--baseline", help="model beside them, by default their equals with softmax and timm's DeiT")
    add("--sizes", type=families.read_size, nargs="+", help="pixels, or latents of a dit_* such as 32 or 16x32x32")
    add("--batch", type=int, nargs="+", help="one for each size of --models, or one for all")
    add("--modes", nargs="+", default=list(MODES), choices=(*MODES, BF16), help="by default train and inference")
    add("--compile", nargs="+", choices=COMPILE, help="modes of torch.compile, 'none' (eager), 'blocks'")
    add("--windows", type=int, help="windows of each model, by default 7")
    add("--window_s", type=float, help="seconds of a window, at least one step, by default 0.7")
    add("--minutes", type=float, default=math.inf, help="begin no setting that would end later, as the longest so far")
    add(
        "--jobs",
        type=int,
        default=1,
        help="processes that fill the compiler's caches before a setting is timed",
    )
    measuring.add_options(parser, tiny="tiny models, 64 px, batch 2, not compiled")
    arguments = parser.parse_args(argv)
    measuring.fill(arguments, {"windows": 2, "window_s": 0.1} if arguments.tiny else {"windows": 7, "window_s": 0.7})
    if arguments.models:
        measuring.fill(arguments, {"sizes": [64 if arguments.tiny else 224], "batch": [2 if arguments.tiny else 256]})
        measuring.fill(arguments, {"compile": ["none" if arguments.tiny else "default"]})
    return arguments


def check_arguments(arguments: argparse.Namespace) -> None:
    """One line and exit code 1 for what cannot run."""
    sizes, batch, names = arguments.sizes, arguments.batch, given_models(arguments)
    if arguments.baseline and not arguments.models:
        raise SystemExit("error: --baseline needs --models; the whole table has its baselines.")
    if arguments.models and len(batch) not in (1, len(sizes)):
        raise SystemExit(f"error: --batch needs one value, or one for each of {len(sizes)} --sizes, got {len(batch)}.")
    if min(*(batch or [1]), arguments.windows, arguments.jobs) < 1 or min(arguments.window_s, arguments.minutes) <= 0:
        raise SystemExit("error: --batch, --windows, --window_s, --jobs and --minutes must be positive.")
    families.check_spellings(names)
    if len(set(names)) < len(names):
        raise SystemExit("error: --models names a model twice, or the --baseline.")
    if len({id(family_of(name)) for name in names}) > 1:
        raise SystemExit("error: dit_* models cannot be compared with image classifiers.")


def given_models(arguments: argparse.Namespace) -> list[str]:
    return [*(arguments.models or ()), *([arguments.baseline] if arguments.baseline else ())]


def name_of_results(spellings: Sequence[str]) -> str:
    """Name the file of a run: "models" for the whole table; family and head mixes follow for given models."""
    words = [families.read_spelling(spelling)[0].split("_") for spelling in spellings]
    mixes = sorted({word for name in words for word in name if word in HEAD_MIXES})
    return "_".join(["models", *(words[0][:1] if words else ()), *mixes])


def key_of(row: Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in KEY)


def main(argv: Sequence[str] | None = None) -> None:
    start = time.monotonic()
    arguments = parse_arguments(argv)
    check_arguments(arguments)
    arguments.device = measuring.open_device(arguments.device)
    facts = measuring.environment(arguments.device) | {"timm": timm.__version__}
    print(f"{facts['device']}, torch {facts['torch']}, timm {facts['timm']}, bf16 autocast")
    gc.freeze()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // arguments.jobs)))
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(arguments.jobs, spawn) if arguments.jobs > 1 else None

    path = measuring.results_path(arguments, name_of_results(given_models(arguments)))
    known = read_csv(path) if path and path.exists() else []
    if any("note" not in row for row in known):
        raise SystemExit(f"error: {path} is of an earlier version of this script; choose another --out.")
    rows = {key_of(row): row for row in known if not row["note"].startswith(FAILED)}
    longest_s, failures = 0.0, []
    for setting in settings_of(arguments):
        begun = time.monotonic()
        baselines = baselines_of(setting.models, arguments.baseline)
        keys = {name: (*key_of(_row("", None, {}, setting))[:-1], name) for name in (*baselines, *setting.models)}
        if rows.keys() >= set(keys.values()):
            continue
        if begun - start + longest_s > 60 * arguments.minutes:
            print("the next setting would end after --minutes; the same command goes on")
            break
        names = [*baselines, *(name for name in setting.models if keys[name] not in rows)]
        if pool and setting.compile != "none":
            list(pool.map(_compile_ahead, ((name, setting, str(arguments.device)) for name in names)))
        found = compare_as_fits(names, baselines, setting, arguments)
        print_table(found, SHOWN)
        rows |= {key: row | facts for row in found if (key := key_of(row)) not in rows}
        measuring.write_csv(path, list(rows.values()), completed=True)
        failures += [row["note"] for row in found if row["note"].startswith(FAILED)]
        longest_s = max(longest_s, time.monotonic() - begun)
    if failures:
        raise SystemExit("\n".join([*failures, "error: rows failed; the same command tries them again."]))


if __name__ == "__main__":
    main()
