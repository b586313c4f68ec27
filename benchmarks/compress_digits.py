"""What is lost when the key and value heads of trained classifiers are compressed, and what more training recovers.

    python benchmarks/compress_digits.py --out docs/compress.csv --plot docs/images/compress.png --jobs 64
    python benchmarks/compress_digits.py --out docs/compress.csv --cores softmax --seeds 0 --heads 4  # one short chain

For each core and seed a digits model of 8 heads is trained by the recipe `digits`, its keys and values are compressed
to each number h' of component heads by `headmix_vision.models.compress_heads`, and training goes on from these
weights for a short schedule: an eighth of the steps is warm-up, a third of the recipe's learning rate, 8 epochs instead
of 32, and else the recipe. All 8 heads, that is the same function trained further in the same way, are the ceiling; the
same model trained for the short schedule alone, from new weights, is the floor. Prints a table (top-1 on the held-out
digits after the last epoch, mean ± standard deviation over seeds; the base model and all that follows from it share a
seed) and writes a CSV and a plot. With `--runs` finished runs are kept there and not repeated.
"""

import argparse
import csv
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import timm
import timm.data
import torch
from torch import nn
from training_runs import RunFailed, markdown_table, mean_and_deviation, read_metric, train

from headmix_vision.data.datasets.digits import Digits
from headmix_vision.files.atomic import atomic_path
from headmix_vision.files.tensor_files import write_tensors
from headmix_vision.models import compress_heads
from headmix_vision.runs.checkpoints import read_checkpoint
from headmix_vision.runs.networks import load_network

CORES = ("softmax", "mhla")
HEADS = 8
RECOVERY_LR = 1e-3
RESULTS = ("base_top1_percent", "compressed_top1_percent", "recovered_top1_percent", "scratch_top1_percent")
FIELDS = ("core", "component_heads", "seed", "parameters", "keys_error_percent", "values_error_percent", *RESULTS)
Row = dict[str, Any]


class Case(NamedTuple):
    """A core and a seed, and everything that is trained with them."""

    core: str
    seed: int
    arguments: argparse.Namespace

    def directory(self, name: str, epochs: int) -> Path:
        """Run directory of a training of so many epochs."""
        return self.arguments.runs / f"{self.core}-seed_{self.seed}" / f"base_{self.arguments.epochs}-{name}-{epochs}"

    def train(self, name: str, epochs: int, model: str, options: Sequence[object]) -> float:
        """Train, and return top-1 of the last epoch in percent."""
        run = self.directory(name, epochs)
        shared: list[object] = ["--model.name", model, "--model.model_args.num_heads", HEADS]
        shared += ["--seed_everything", self.seed, "--trainer.max_epochs", epochs, "--trainer.devices", 1]
        shared += ["--trainer.enable_progress_bar", "false"]
        train("train_cls.py", "digits", run, [*shared, *options], one_thread=self.arguments.jobs > 1)
        return 100 * read_metric(run, "val/top1")[-1]

    def train_base(self) -> float:
        """Train all heads by the recipe."""
        warmup = min(3, self.arguments.epochs / 8)
        options = ["--model.schedule.warmup_epochs", warmup]
        return self.train("base", self.arguments.epochs, f"deit_{self.core}_digits", options)

    def base(self) -> nn.Module:
        """The trained network, with its averaged weights."""
        run = self.directory("base", self.arguments.epochs)
        return load_network(read_checkpoint(run / "checkpoints" / "last.ckpt")).eval()

    def train_compressed(self, heads: int, weights: Path | None) -> float:
        """Train h' component heads by the short schedule, from compressed weights or from new ones."""
        epochs = self.arguments.recovery_epochs
        options: list[object] = ["--model.model_args.head_mix_args", f"{{component_heads: {heads}}}"]
        options += ["--model.model_args.output_norm", "false"]  # the base has none
        options += ["--model.optimizer.lr", RECOVERY_LR, "--model.schedule.warmup_epochs", epochs / 8]
        if weights is not None:
            options += ["--model.checkpoint", weights.absolute()]
        name = f"{'scratch' if weights is None else 'recovered'}_{heads}"
        return self.train(name, epochs, f"deit_{self.core}_mea_digits", options)


def compress(case: Case, heads: int) -> tuple[Path, Row]:
    """Compress a trained model: the file of its weights, and what is known of them without training."""
    compressed, errors = compress_heads(case.base(), heads)
    path = case.directory(f"compressed_{heads}", 0).with_suffix(".safetensors")
    write_tensors(path, {name: value.contiguous() for name, value in compressed.state_dict().items()}, {})
    return path, {
        "parameters": sum(parameter.numel() for parameter in compressed.parameters()),
        "keys_error_percent": 100 * statistics.mean(error.keys for error in errors),
        "values_error_percent": 100 * statistics.mean(error.values for error in errors),
        "compressed_top1_percent": top1(compressed),
    }


@torch.inference_mode()
def top1(model: nn.Module) -> float:
    """Share of the held-out digits that are told right, in percent."""
    config, digits = timm.data.resolve_model_data_config(model), Digits("validation")
    predictions = model((digits.images - config["mean"][0]) / config["std"][0]).argmax(1)
    return 100 * (predictions == torch.tensor(digits.targets)).float().mean().item()


def measure(case: Case, heads: int, base_top1: float) -> Row:
    """Compress to one number of heads, train on, and train the same from new weights."""
    weights, row = compress(case, heads)
    row |= {"core": case.core, "component_heads": heads, "seed": case.seed, "base_top1_percent": base_top1}
    row["recovered_top1_percent"] = case.train_compressed(heads, weights)
    row["scratch_top1_percent"] = case.train_compressed(heads, None)
    return {name: f"{row[name]:.2f}" if "percent" in name else row[name] for name in FIELDS}


def groups(rows: list[Row]) -> Iterator[tuple[str, int, Callable[[str], list[float]]]]:
    """Each core and number of heads, with a function that collects a column over the seeds."""
    for core, heads in dict.fromkeys((row["core"], row["component_heads"]) for row in rows):
        some = [row for row in rows if (row["core"], row["component_heads"]) == (core, heads)]
        yield core, heads, lambda name, some=some: [float(row[name]) for row in some]


def table(rows: list[Row]) -> str:
    """Mean ± standard deviation over seeds, for each core and number of heads."""
    header = ["attention", "h'", "parameters", "error of keys, %", "of values, %"]
    header += ["all heads", "compressed", "trained on", "new weights, as long"]
    lines = []
    for core, heads, column in groups(rows):
        errors = [mean_and_deviation(column(name), 1) for name in ("keys_error_percent", "values_error_percent")]
        cells = [mean_and_deviation(column(name)) for name in RESULTS]
        lines.append([core, str(heads), f"{column('parameters')[0]:,.0f}", *errors, *cells])
    return markdown_table(header, lines)


def plot(path: Path, rows: list[Row]) -> None:
    """Top-1 against component heads, a panel for each core; lines are means, bands extremes over seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cores = list(dict.fromkeys(row["core"] for row in rows))
    figure = Figure(figsize=(4.5 * len(cores), 4), layout="constrained")
    FigureCanvasAgg(figure)
    labels = ("all heads", "compressed", "compressed, trained on", "new weights, trained as long")
    for axes, core in zip(figure.subplots(1, len(cores), sharey=True, squeeze=False)[0], cores, strict=True):
        points = [(heads, column) for name, heads, column in groups(rows) if name == core]
        for name, label in zip(RESULTS, labels, strict=True):
            x, values = [heads for heads, _ in points], [column(name) for _, column in points]
            style = {"color": "gray", "linestyle": "--"} if name == "base_top1_percent" else {"marker": "."}
            (line,) = axes.plot(x, [statistics.mean(v) for v in values], label=label, **style)
            axes.fill_between(x, [min(v) for v in values], [max(v) for v in values], color=line.get_color(), alpha=0.2)
        axes.set(title=core, xlabel=f"component heads of keys and values, of {HEADS}", xticks=x)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("top-1 on held-out digits, %")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def read_arguments(args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    parser.add_argument("--cores", nargs="+", choices=CORES, default=CORES)
    parser.add_argument("--heads", type=int, nargs="+", default=range(1, HEADS + 1), help="component heads h'")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=32, help="of the models with all heads")
    parser.add_argument("--recovery-epochs", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of one thread each")
    parser.add_argument("--runs", type=Path, help="directory of the runs; a temporary one by default")
    arguments = parser.parse_args(args)
    if not set(arguments.heads) <= set(range(1, HEADS + 1)):
        raise SystemExit(f"error: --heads must be from 1 to {HEADS}, got {arguments.heads}")
    if min(arguments.epochs, arguments.recovery_epochs, arguments.jobs) < 1:
        raise SystemExit("error: --epochs, --recovery-epochs and --jobs must be positive")
    return arguments


@contextmanager
def directory_of_runs(arguments: argparse.Namespace) -> Iterator[None]:
    """Hold a temporary directory for the runs where none is given."""
    if arguments.runs is not None:
        yield
        return
    with tempfile.TemporaryDirectory() as arguments.runs:
        arguments.runs = Path(arguments.runs)
        yield


def main(args: Sequence[str] | None = None) -> None:
    arguments = read_arguments(args)
    torch.set_num_threads(1 if arguments.jobs > 1 else torch.get_num_threads())
    cases = [Case(core, seed, arguments) for core in arguments.cores for seed in arguments.seeds]
    with directory_of_runs(arguments), ThreadPoolExecutor(arguments.jobs) as pool:
        try:
            bases = list(pool.map(Case.train_base, cases))
            settings = [(*chain, heads) for heads in arguments.heads for chain in zip(cases, bases, strict=True)]
            found = list(pool.map(lambda setting: measure(setting[0], setting[2], setting[1]), settings))
        except RunFailed as error:
            pool.shutdown(cancel_futures=True)
            raise SystemExit(f"error: {error}") from None
    rows = sorted(found, key=lambda row: (arguments.cores.index(row["core"]), row["component_heads"], row["seed"]))
    with atomic_path(arguments.out) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    print(table(rows))
    if arguments.plot:
        plot(arguments.plot, rows)


if __name__ == "__main__":
    main()
