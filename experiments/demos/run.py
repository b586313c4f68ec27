"""Scores of the demos and of the weights in the package, one seed each: the small tables of the documents.

    python -m experiments.demos.run --out experiments/demos/results.csv    # 20 minutes on two CPU cores

A classifier, a generator and a model of clips are trained as `make demo` and `make demo-video` do, each on one CPU
thread: with another number of them, and on another CPU, sums are rounded otherwise, and a run ends some images apart.
A second call repeats no run that has ended.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from headmix_lab.measuring import REPOSITORY, write_csv
from headmix_lab.script_runs import run_script
from headmix_lab.script_runs import train as start_training
from headmix_vision.runs.checkpoints import DESCRIPTION_KEY, read_checkpoint
from headmix_vision.runs.directory import BEST, LAST, read_curve

COLUMNS = ("part", "what", "number", "value", "count")
WEIGHTS = REPOSITORY / "headmix_vision" / "models" / "weights"
CORES = ("softmax", "linear", "mhla", "hih")
JUDGE = WEIGHTS / "deit_mhla_digits.safetensors"
CLIPS = 400
GUIDANCE = (2, 3.5)
HOW: dict[str, Any] = {"side_by_side": True}  # on one CPU thread

Row = tuple[str, str, str, object, int]


def train(script: str, recipe: str, run: Path) -> Path:
    start_training(script, recipe, run, ["--trainer.accelerator", "cpu"], **HOW)
    return run


def draw(kind: str, run: Path, name: str, *options: object) -> Path:
    """Draw samples beside the run, unless they are there."""
    out = run / name
    if not (out / "metadata.json").exists():
        run_script(["sample.py", kind, "--model", run, "--steps", 25, "--device", "cpu", "--out", out, *options], **HOW)
    return out


def score(metric: str, *options: object) -> dict[str, Any]:
    """The result file of `headmix evaluate`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "scores.json"
        run_script(["-m", "headmix_vision.evaluate", metric, "--device", "cpu", "--out", out, *options], **HOW)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def top1(part: str, what: str, source: object, features: Path) -> Row:
    found = score("accuracy", "--fake", source, "--features", features)
    return part, what, "top1_percent", 100 * found["scores"]["top1"], found["fake"]["count"]


def fid(what: str, fake: object, real: str, features: Path) -> Row:
    found = score("fid", "--real", real, "--fake", fake, "--features", features)
    return "generator", what, "fid", found["scores"]["fid"], found["fake"]["count"]


def weights() -> Iterator[Row]:
    """Yield scores of the packaged weights on held-out digits."""
    for core in CORES:
        name = f"deit_{core}_digits"
        yield top1("weights", name, "digits:validation", WEIGHTS / f"{name}.safetensors")


def images(runs: Path) -> Iterator[Row]:
    """The classifier, and the generator as this classifier sees it."""
    judge = train("train_cls.py", "digits", runs / "classifier")
    generator = train("train_gen.py", "digits", runs / "generator")
    best = read_checkpoint(judge / BEST)
    images = score("accuracy", "--fake", "digits:validation", "--features", judge)["fake"]["count"]
    yield "classifier", "best epoch", "epoch", best["epoch"] + 1, images
    yield "classifier", "best epoch", "top1_percent", 100 * best[DESCRIPTION_KEY]["top1"], images
    yield "classifier", "last epoch", "epoch", read_checkpoint(judge / LAST)["epoch"] + 1, images
    yield "classifier", "last epoch", "top1_percent", 100 * list(read_curve(judge, "val/top1").values())[-1], images
    drawn = draw("images", generator, "drawn", "--num", 1797, "--batch-size", 128, "--npz")
    half = draw("images", generator, "half", "--num", 899, "--batch-size", 128)
    yield top1("generator", "samples", drawn / "samples.npz", judge)
    yield fid("samples, all digits", drawn, "digits", judge)
    yield fid("half of the samples, odd digits", half, "digits[1::2]", judge)
    yield fid("even digits, odd digits", "digits[::2]", "digits[1::2]", judge)


def clips(runs: Path) -> Iterator[Row]:
    """The model of clips at two scales of guidance, and real clips."""
    run = train("train_gen.py", "moving_digits", runs / "clips")
    for guidance in GUIDANCE:
        options = ["--num", CLIPS, "--guidance", guidance, "--batch-size", 40]
        drawn = draw("videos", run, f"guidance_{guidance}", *options)
        found = score("moving-digits", "--fake", drawn, "--features", JUDGE)
        for number in ("digit", "motion", "direction"):
            yield "clips", f"guidance {guidance}", number, found["scores"][number], CLIPS
            if guidance == GUIDANCE[-1]:
                yield "clips", "real clips", number, found["ceiling"][number], CLIPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the table")
    parser.add_argument("--runs", type=Path, default=Path("runs/demos"), help="folder of the runs (%(default)s)")
    arguments = parser.parse_args()
    runs = arguments.runs.absolute()
    with ThreadPoolExecutor(2) as pool:
        parts = pool.map(lambda part: list(part()), (partial(images, runs), partial(clips, runs)))
        rows = [*weights(), *chain.from_iterable(parts)]
    write_csv(arguments.out, [dict(zip(COLUMNS, row, strict=True)) for row in rows])


if __name__ == "__main__":
    main()
