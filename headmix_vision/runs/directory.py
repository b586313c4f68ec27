"""The names of the files in a run directory and of the index of an export, and what a run has left in one."""

import csv
from pathlib import Path
from typing import TextIO

from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_file, read_text

CONFIG = "config.yaml"
METRICS = "metrics.csv"
CURVES = "curves.svg"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
PREDICTIONS = "predictions.csv"
FINISHED = "finished"  # of runs that another command has started
SAMPLES = "samples"
INDEX = "model_index.json"  # of a pipeline, in its own directory
LOCK = ".lock"  # while a process trains
REPLACED = ".replaced"  # the earlier run, until the one that takes its place has a checkpoint
REPLACING = ".replacing"  # files of the earlier run, while they are moved there, or back

BEST, LAST = f"{CHECKPOINTS}/best.ckpt", f"{CHECKPOINTS}/last.ckpt"
_REPORTS = (("classes", "csv"), ("confusion", "csv"), ("confusion", "png"))
# patterns of all files of a run
WRITTEN_BY_A_RUN = (
    *(CONFIG, METRICS, CURVES, PREDICTIONS, FINISHED, BEST, LAST, f"{CHECKPOINTS}/*.shards/*"),
    "curves.png",  # of version 0.1.0
    *(f"{name}_{split}.{kind}" for split in ("val", "test") for name, kind in _REPORTS),
    *(f"{TENSORBOARD}/events.out.tfevents.*", f"{TENSORBOARD}/hparams.yaml"),
    *(f"{SAMPLES}/step_*_{weights}.{kind}" for weights in ("raw", "ema") for kind in ("png", "gif")),
)

_PARENTS = frozenset(str(Path(pattern).parent) for pattern in WRITTEN_BY_A_RUN) - {"."}


def standing_places(run: Path) -> tuple[Path, ...]:
    """Return the folders with the files of the run in a directory, as killed trainings may have left it.

    They are `.replaced` if the run that takes its place has no checkpoint. Else they are the directory itself, and
    `.replacing` if files were moved when a process was killed.
    """
    if (run / REPLACED).is_dir() and not (run / LAST).is_file():
        return (run / REPLACED,)
    return run, run / REPLACING


def standing_file(run: Path, name: str) -> Path:
    """Find a file of the run in a directory, in `standing_places`; its usual place if there is none."""
    return next((place / name for place in standing_places(run) if (place / name).is_file()), run / name)


def run_files(run: Path) -> list[Path]:
    """List the files in a run directory that have names which runs give."""
    return sorted(path for pattern in WRITTEN_BY_A_RUN for path in run.glob(pattern) if path.is_file())


def check_links(run: Path) -> None:
    """Raise InputError for a link that leads out of a run directory from where a run writes."""
    names = {".*", *_PARENTS, *WRITTEN_BY_A_RUN}
    for path in sorted(path for name in names for path in (run.glob(name) if "*" in name else [run / name])):
        if path.is_symlink() and not path.resolve().is_relative_to(run.resolve()):
            raise InputError(
                f"{path} is a link to {path.resolve()}, outside of the run directory {run}, where nothing may be"
                " written: put the file or folder itself there, or give --trust-config"
            )


def run_folders(run: Path) -> list[Path]:
    """List the folders in a run directory that have names which runs give."""
    return [folder for parent in _PARENTS for folder in run.glob(parent)]


def check_folders(run: Path) -> None:
    """Raise InputError where a run cannot write its files, or would move or delete others behind a link.

    That is a link in the place of a folder of a run, or a folder or device in the place of a file.
    """
    for path in (run / name for name in WRITTEN_BY_A_RUN):
        if path.exists() and not path.is_file():
            raise InputError(
                f"{path} is not a regular file, and a run writes one there: remove it, or choose another --run-dir"
            )
    for place in (run, run / REPLACED, run / REPLACING):
        for folder in (*((place,) if place != run else ()), *run_folders(place)):
            if folder.is_symlink():
                raise InputError(
                    f"{folder} is a link to {folder.readlink()}: a run moves and deletes files in its folders. Replace"
                    " the link by a folder, or make the whole run directory a link"
                )


def is_run(run: Path) -> bool:
    """Return whether a run of this package wrote to a folder: by its configuration or its metrics."""
    try:
        lines = read_text(run / CONFIG).splitlines()
    except (FileNotFoundError, InputError):
        lines = []
    options = {line.partition(":")[0] for line in lines}  # options of groups are indented
    if options >= {"run_dir", "trainer", "model", "data"}:
        return True
    return metric_names(run)[:2] == ["epoch", "step"]


def has_results(run: Path) -> bool:
    """Return whether a run has a checkpoint, or has had one: it has been validated, or has begun another epoch."""
    if any((run / name).is_file() for name in (BEST, LAST)):
        return True
    # not by the loss of an epoch, which is there before the checkpoint
    return any(name.startswith("val/") for name in metric_names(run)) or len(_epochs(run)) > 1


def metric_names(run: Path) -> list[str]:
    """Read the columns of the metrics of a run; none where there are no metrics."""
    try:
        with _open_metrics(run) as file:
            return next(csv.reader(file), [])
    except (FileNotFoundError, UnicodeDecodeError, csv.Error):
        return []


def _open_metrics(run: Path, errors: str = "strict") -> TextIO:
    check_file(run / METRICS)
    return (run / METRICS).open(newline="", errors=errors)


def _epochs(run: Path) -> set[str]:
    try:
        with _open_metrics(run, errors="replace") as file:
            return {row["epoch"] for row in csv.DictReader(file) if row.get("epoch")}
    except (FileNotFoundError, csv.Error):
        return set()


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Read the rows of the metrics of a run, in the order of steps, without empty cells."""
    with _open_metrics(run) as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def read_curve(run: Path, name: str) -> dict[int, float]:
    """Read all values of a metric of a run, by the step at which they were logged, in their order."""
    return {int(row["step"]): row[name] for row in read_metrics(run) if name in row}
