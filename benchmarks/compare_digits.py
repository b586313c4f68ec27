"""Softmax, linear, MHLA and Head-in-Head attention on the embedded digits under one recipe, several seeds.

    python benchmarks/compare_digits.py --out docs/digits.csv            # about 50 minutes on two CPU cores
    python benchmarks/compare_digits.py --out docs/digits.csv --jobs 16  # side by side, for example on one GPU
    python benchmarks/compare_digits.py --out docs/digits.csv --cores hih  # this core alone; other rows stay

Each run is `train_cls.py fit -c digits` with another model, seed or position encoding. Prints a table
of top-1 accuracies (mean ± standard deviation over seeds, of the last epoch and of the best) and writes a CSV; runs
which it holds and which are not repeated are kept.
"""

import argparse
import csv
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from training_runs import train

from headmix_vision.console.scripts import RunFailed
from headmix_vision.console.tables import markdown_table, mean_and_deviation
from headmix_vision.files.result_table import write_table
from headmix_vision.runs.directory import read_curve

CORES = ("softmax", "linear", "mhla", "hih")
COLUMNS = ("core", "cpe", "seed", "last_top1_percent", "best_top1_percent")
Results = dict[tuple[str, bool, int], tuple[float, float]]  # of core, CPE and seed


def train_setting(core: str, cpe: bool, seed: int, directory: Path, jobs: int) -> tuple[float, float]:
    """Top-1 of the last and of the best epoch, in percent."""
    run = directory / f"{core}-cpe_{cpe}-seed_{seed}"
    arguments: list[object] = ["--model.name", f"deit_{core}_digits", "--model.model_args.cpe", str(cpe).lower()]
    arguments += ["--seed_everything", seed, "--trainer.devices", 1, "--trainer.enable_progress_bar", "false"]
    train("train_cls.py", "digits", run, arguments, side_by_side=jobs > 1)
    top1 = [100 * value for value in read_curve(run, "val/top1").values()]
    return top1[-1], max(top1)


def read_results(path: Path) -> Results:
    """Results of an earlier call, none if there is no such file."""
    if not path.exists():
        return {}
    with path.open() as file:
        try:
            return {
                (row["core"], row["cpe"] == "True", int(row["seed"])): (
                    float(row["last_top1_percent"]),
                    float(row["best_top1_percent"]),
                )
                for row in csv.DictReader(file)
            }
        except (KeyError, TypeError, ValueError) as error:
            raise SystemExit(f"error: {path} was not written by this script ({error!r}), it is left as it is") from None


def in_order(results: Results) -> Results:
    """With CPE first, then by core and seed."""
    known = [*CORES, *(core for core, _, _ in results if core not in CORES)]
    return dict(sorted(results.items(), key=lambda item: (not item[0][1], known.index(item[0][0]), item[0][2])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cores", nargs="+", choices=CORES, default=CORES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    arguments = parser.parse_args()
    earlier = read_results(arguments.out)

    settings = [(core, cpe, seed) for cpe in (True, False) for core in arguments.cores for seed in arguments.seeds]
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(arguments.jobs) as pool:
        try:
            results = list(pool.map(lambda setting: train_setting(*setting, Path(directory), arguments.jobs), settings))
        except RunFailed as error:
            pool.shutdown(cancel_futures=True)
            raise SystemExit(f"error: {error}") from None

    merged = in_order(earlier | dict(zip(settings, results, strict=True)))
    settings, results = list(merged), list(merged.values())
    lines = ((*setting, *(f"{score:.2f}" for score in scores)) for setting, scores in merged.items())
    write_table(arguments.out, COLUMNS, (dict(zip(COLUMNS, line, strict=True)) for line in lines), completed=True)
    rows = []
    for core, cpe in dict.fromkeys((core, cpe) for core, cpe, _ in settings):
        scores = [score for setting, score in zip(settings, results, strict=True) if setting[:2] == (core, cpe)]
        rows.append(
            [core, "on" if cpe else "off", *(mean_and_deviation(column) for column in zip(*scores, strict=True))]
        )
    print(markdown_table(["attention", "CPE", "last epoch", "best epoch"], rows))


if __name__ == "__main__":
    main()
