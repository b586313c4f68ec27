"""Softmax, linear, MHLA and Head-in-Head attention on the embedded digits under one recipe, several seeds.

    python -m experiments.digits.run --out experiments/digits/results.csv            # 50 minutes on two CPU cores
    python -m experiments.digits.run --out experiments/digits/results.csv --jobs 16  # side by side, as on one GPU
    python -m experiments.digits.run --out experiments/digits/results.csv --cores hih  # this core alone

Each run is `train_cls.py fit -c digits` with another model, seed or position encoding. Runs in the CSV that are not
repeated stay. Prints the table of top-1 accuracies.
"""

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.digits.report import table
from headmix_lab.script_runs import train
from headmix_lab.scripts import RunFailed
from headmix_lab.tables import read_csv, write_table
from headmix_vision.runs.directory import read_curve

CORES = ("softmax", "linear", "mhla", "hih")
COLUMNS = ("core", "cpe", "seed", "last_top1_percent", "best_top1_percent")
Setting = tuple[str, str, str]  # core, CPE, seed
Row = dict[str, str]


def train_setting(core: str, cpe: str, seed: str, directory: Path, jobs: int) -> tuple[float, float]:
    """Train, and return top-1 of the last and of the best epoch in percent."""
    run = directory / f"{core}-cpe_{cpe}-seed_{seed}"
    arguments: list[object] = ["--model.name", f"deit_{core}_digits", "--model.model_args.cpe", cpe.lower()]
    arguments += ["--seed_everything", seed, "--trainer.devices", 1, "--trainer.enable_progress_bar", "false"]
    train("train_cls.py", "digits", run, arguments, side_by_side=jobs > 1)
    top1 = [100 * value for value in read_curve(run, "val/top1").values()]
    return top1[-1], max(top1)


def read_results(path: Path) -> dict[Setting, Row]:
    """Read the rows of earlier calls, none if there is no such file."""
    rows = read_csv(path) if path.exists() else []
    if any(set(row) != set(COLUMNS) or row["core"] not in CORES for row in rows):
        raise SystemExit(f"error: {path} was not written by this script, it is left as it is")
    return {(row["core"], row["cpe"], row["seed"]): row for row in rows}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cores", nargs="+", choices=CORES, default=CORES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    arguments = parser.parse_args(argv)
    rows = read_results(arguments.out)

    settings = [
        (core, cpe, str(seed)) for cpe in ("True", "False") for core in arguments.cores for seed in arguments.seeds
    ]
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(arguments.jobs) as pool:
        try:
            results = list(pool.map(lambda setting: train_setting(*setting, Path(directory), arguments.jobs), settings))
        except RunFailed as error:
            pool.shutdown(cancel_futures=True)
            raise SystemExit(f"error: {error}") from None
    for setting, scores in zip(settings, results, strict=True):
        rows[setting] = dict(zip(COLUMNS, (*setting, *(f"{score:.2f}" for score in scores)), strict=True))
    ordered = sorted(rows.values(), key=lambda row: (row["cpe"] != "True", CORES.index(row["core"]), int(row["seed"])))
    write_table(arguments.out, COLUMNS, ordered, completed=True)
    print(table(arguments.out))


if __name__ == "__main__":
    main()
