"""What is lost when the key and value heads of trained classifiers are compressed, and what more training recovers.

    python -m experiments.compress.run --out experiments/compress/results.csv
    python -m experiments.compress.run --out /tmp/compress.csv --cores softmax --seeds 0 --heads 4  # one short chain

For each core and seed a digits model of 8 heads is trained by the recipe `digits`, its keys and values are compressed
to each number h' of component heads by `headmix_vision.models.compress_heads`, and training goes on from these
weights for a short schedule: an eighth of the steps is warm-up, a third of the recipe's learning rate, 8 epochs instead
of 32, and else the recipe. All 8 heads, that is the same function trained further in the same way, are the ceiling; the
same model trained for the short schedule alone, from new weights, is the floor. Prints a table (top-1 on the held-out
digits after the last epoch, mean ± standard deviation over seeds; the base model and all that follows from it share a
seed) and writes a CSV and a plot. Runs are trained side by side, see graphed_training.py.
"""

import argparse
import logging
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import timm.data
import torch
from torch import nn

from experiments.compress.report import draw, table
from experiments.harness.graphed_training import Trained, train_side_by_side
from headmix_vision.data.datasets.digits import Digits
from headmix_vision.files.result_table import write_table
from headmix_vision.files.tensor_files import write_tensors
from headmix_vision.models import compress_heads

CORES = ("softmax", "mhla")
HEADS = 8
RECOVERY_LR = 1e-3
RESULTS = ("base_top1_percent", "compressed_top1_percent", "recovered_top1_percent", "scratch_top1_percent")
FIELDS = ("core", "component_heads", "seed", "parameters", "keys_error_percent", "values_error_percent", *RESULTS)
Row = dict[str, Any]


def command(model: str, seed: int, epochs: int, warmup_epochs: float, *options: object) -> list[str]:
    """Options of `headmix-train-cls fit` for a training of so many epochs."""
    shared = ["-c", "digits", "--model.name", model, "--model.model_args.num_heads", HEADS, "--seed_everything", seed]
    shared += ["--trainer.max_epochs", epochs, "--model.schedule.warmup_epochs", warmup_epochs]
    return list(map(str, (*shared, *options)))


def base_command(core: str, seed: int, epochs: int) -> list[str]:
    """Train all heads by the recipe."""
    return command(f"deit_{core}_digits", seed, epochs, min(3, epochs / 8))


def short_command(core: str, heads: int, seed: int, epochs: int) -> list[str]:
    """Train h' component heads by the short schedule."""
    network = ["--model.model_args.head_mix_args", f"{{component_heads: {heads}}}"]
    network += ["--model.model_args.output_norm", "false"]  # the base has none
    rate = ["--model.optimizer.lr", RECOVERY_LR]
    return command(f"deit_{core}_mea_digits", seed, epochs, epochs / 8, *network, *rate)


def train(commands: Sequence[list[str]], arguments: argparse.Namespace) -> list[Trained]:
    """Train in groups, and bring the networks to the CPU."""
    trained: list[Trained] = []
    for first in range(0, len(commands), arguments.group):
        group = train_side_by_side(commands[first : first + arguments.group], torch.device(arguments.device))
        trained += [each._replace(net=each.net.cpu()) for each in group]
        print(f"trained {len(trained)} of {len(commands)} runs", flush=True)
    return trained


def compress(base: Trained, heads: int, path: Path) -> Row:
    """Compress a trained model: write its weights, and return what is known of them without training."""
    compressed, errors = compress_heads(base.net, heads)
    write_tensors(path, {name: value.contiguous() for name, value in compressed.state_dict().items()}, {})
    return {
        "component_heads": heads,
        "parameters": sum(parameter.numel() for parameter in compressed.parameters()),
        "keys_error_percent": 100 * statistics.mean(error.keys for error in errors),
        "values_error_percent": 100 * statistics.mean(error.values for error in errors),
        "base_top1_percent": 100 * base.top1,
        "compressed_top1_percent": top1(compressed),
    }


@torch.inference_mode()
def top1(model: nn.Module) -> float:
    """Share of the held-out digits that are told right, in percent."""
    config, digits = timm.data.resolve_model_data_config(model), Digits("validation")
    predictions = model((digits.images - config["mean"][0]) / config["std"][0]).argmax(1)
    return 100 * (predictions == torch.tensor(digits.targets)).float().mean().item()


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Train the bases, compress each to all numbers of heads, train on, and train the same from new weights."""
    cases = list(product(arguments.cores, arguments.seeds))
    bases = train([base_command(core, seed, arguments.epochs) for core, seed in cases], arguments)
    rows, recovered, scratch = [], [], []
    with TemporaryDirectory() as folder:
        for ((core, seed), base), heads in product(zip(cases, bases, strict=True), arguments.heads):
            weights = Path(folder) / f"{core}_{seed}_{heads}.safetensors"
            rows.append({"core": core, "seed": seed, **compress(base, heads, weights)})
            scratch.append(short_command(core, heads, seed, arguments.recovery_epochs))
            recovered.append([*scratch[-1], "--model.checkpoint", str(weights)])
        trained = train([*recovered, *scratch], arguments)
    for row, on, anew in zip(rows, trained[: len(rows)], trained[len(rows) :], strict=True):
        row |= {"recovered_top1_percent": 100 * on.top1, "scratch_top1_percent": 100 * anew.top1}
    rows.sort(key=lambda row: (arguments.cores.index(row["core"]), row["component_heads"], row["seed"]))
    return [{name: f"{row[name]:.2f}" if "percent" in name else row[name] for name in FIELDS} for row in rows]


def read_arguments(args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--plot", type=Path, help="SVG to write")
    parser.add_argument("--cores", nargs="+", choices=CORES, default=CORES)
    parser.add_argument("--heads", type=int, nargs="+", default=range(1, HEADS + 1), help="component heads h'")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=32, help="of the models with all heads")
    parser.add_argument("--recovery-epochs", type=int, default=8)
    parser.add_argument("--group", type=int, default=24, help="runs side by side (%(default)s)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=device, help="(%(default)s)")
    arguments = parser.parse_args(args)
    if not set(arguments.heads) <= set(range(1, HEADS + 1)):
        raise SystemExit(f"error: --heads must be from 1 to {HEADS}, got {arguments.heads}")
    if min(arguments.epochs, arguments.recovery_epochs, arguments.group) < 1:
        raise SystemExit("error: --epochs, --recovery-epochs and --group must be positive")
    return arguments


def main(args: Sequence[str] | None = None) -> None:
    arguments = read_arguments(args)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # its notes on devices
    rows = measure(arguments)
    write_table(arguments.out, FIELDS, rows)
    print(table(arguments.out))
    if arguments.plot:
        draw(arguments.plot, arguments.out)


if __name__ == "__main__":
    main()
