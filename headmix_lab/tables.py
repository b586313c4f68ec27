"""Tables of results: CSV files that outlive an interruption, their origins, and tables in Markdown.

One `origins.json` a folder holds commit, command, device and versions of the calls that wrote its tables.
"""

import csv
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

import headmix_vision
from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_file, read_json
from headmix_vision.files.writing import atomic_path

ORIGINS = "origins.json"
COMMIT_VARIABLE = "HEADMIX_VISION_COMMIT"  # for copies of a clone without its git directory
_REPOSITORY = Path(__file__).parents[1]
_CODE = ("headmix_*", "benchmarks/*.py", "experiments/*.py", "experiments/*.yaml")  # results are not changes
Row = dict[str, str]
Key = TypeVar("Key", bound=Iterable[object])


def origins_of(table: Path) -> list[dict[str, str]]:
    """Return the recorded calls that wrote a table, none if its folder has no `origins.json`."""
    return _read(table.with_name(ORIGINS)).get(table.name, [])


def write_origin(table: Path, completed: bool) -> None:
    """Record the call of this process as an origin of a table.

    Args:
        table: The table.
        completed: Keep the recorded calls, as the table keeps their rows.
    """
    call = _this_call()
    calls = origins_of(table) if completed else []
    if call not in calls:
        path = table.with_name(ORIGINS)
        origins = {**_read(path), table.name: [*calls, call]}
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(dict(sorted(origins.items())), indent=1) + "\n")


def _read(path: Path) -> dict[str, list[dict[str, str]]]:
    return read_json(path) if path.exists() else {}


@cache
def _this_call() -> dict[str, str]:
    program, module = Path(sys.argv[0]), sys.modules["__main__"].__spec__
    called = ["python", os.path.relpath(program)] if program.suffix == ".py" else [program.name]
    if module is not None:  # python -m
        called = ["python", "-m", module.name.removesuffix(".__main__")]
    return {
        "commit": _commit(),
        "command": shlex.join([*called, *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "headmix_vision": headmix_vision.__version__,
        "python": platform.python_version(),
        **{name: installed_version(name) for name in ("torch", "triton")},
    }


def _commit() -> str:
    """The commit of the code, with "+changes" if its files differ; "unknown" where neither git nor a user tells it."""
    if told := os.environ.get(COMMIT_VARIABLE):
        return told
    if not (_REPOSITORY / ".git").exists():  # what lies around an installed package is not its repository
        return "unknown"
    try:
        changes = _git("status", "--short", *_CODE)
        return _git("rev-parse", "--short", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or a clone of somebody else: no reason to lose a result
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", os.fspath(_REPOSITORY), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def installed_version(package: str) -> str:
    """Version of an installed package, "none" where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def write_table(
    path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]], *, completed: bool = False
) -> None:
    """Write a CSV file that is complete or absent, and record beside it by which call it was written.

    Args:
        path: The file; its folder is created when absent.
        columns: The header.
        rows: What each row has in its columns; None is an empty field.
        completed: Rows of earlier calls are among these, so that the origins of those calls stay.
    """
    completed = completed and path.exists()
    with atomic_path(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    write_origin(path, completed)


class ResultTable:
    """The rows of a CSV file whose first columns tell them apart; it is rewritten whole with every new one.

    Args:
        path: The file; rows that it has are kept.
        columns: All columns; one of them is `recipe`, a hash of everything that the row depends on.
        keys: How many of them, from the first on, tell the rows apart.
        order: Gives the place of a row, by these texts.

    Raises:
        InputError: The file is of another kind.
    """

    def __init__(self, path: Path, columns: Sequence[str], keys: int, order: Callable[[tuple[str, ...]], Any]) -> None:
        self.path, self.columns, self.keys, self.order = path, columns, keys, order
        self.rows: dict[tuple[str, ...], Row] = {}
        if path.exists():
            check_file(path)
            try:
                with path.open(newline="") as file:
                    reader = csv.DictReader(file)
                    rows, header = list(reader), reader.fieldnames or ()
            except (UnicodeDecodeError, csv.Error):
                rows, header = [], ()
            if any(set(names) != set(columns) for names in (header, *rows)):
                raise InputError(f"{path} is not a table of this command; choose another --out")
            self.rows = {tuple(row[name] for name in columns[:keys]): row for row in rows}

    def add(self, key: Iterable[object], **values: object) -> Row:
        """Add or replace a row; numbers that are not whole get two decimals."""
        texts = tuple(map(str, key))
        given = {name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in values.items()}
        self.rows[texts] = dict.fromkeys(self.columns, "") | dict(zip(self.columns, texts, strict=False)) | given
        ordered = (self.rows[texts] for texts in sorted(self.rows, key=self.order))
        write_table(self.path, self.columns, ordered, completed=True)
        return self.rows[texts]

    def row(self, key: Iterable[object], recipe: str) -> Row | None:
        """The row of a key; None if there is none, or one of another recipe."""
        row = self.rows.get(tuple(map(str, key)))
        return row if row and row["recipe"] == recipe else None

    def lacking(self, keys: Iterable[Key], recipe: Callable[[Key], str]) -> list[Key]:
        """Return the keys without a row of their recipe."""
        return [key for key in keys if self.row(key, recipe(key)) is None]


def read_csv(path: Path, **wanted: str) -> list[dict[str, str]]:
    """Read the rows of a CSV file with these texts in their columns."""
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if all(row[column] == text for column, text in wanted.items())]


def numbers(rows: Sequence[Mapping[str, str]], column: str) -> list[float]:
    """Return the numbers of a column."""
    return [float(row[column]) for row in rows]


def recorded(folder: Path, claims: Mapping[str, str]) -> dict[str, str]:
    """Return the claims whose CSV files exist; a question that was not run yet has none."""
    return {name: claim for name, claim in claims.items() if (folder / f"{name}.csv").exists()}


def mean_and_deviation(values: Sequence[float], digits: int = 2) -> str:
    """Write `mean ± standard deviation` (n - 1); the value alone where there is one, a dash without any."""
    if not values:
        return "–"
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def column_cell(rows: Sequence[Row], column: str) -> str:
    """Write the mean ± standard deviation of a column, where it is not empty."""
    return mean_and_deviation(numbers([row for row in rows if row[column]], column))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


def print_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Print columns of rows in Markdown, each in its format; a dash for None, no column that is empty throughout."""
    shown = {name: form for name, form in columns.items() if any(row[name] not in (None, "") for row in rows)}
    lines = [["–" if row[name] is None else f"{row[name]:{form}}" for name, form in shown.items()] for row in rows]
    print(f"\n{markdown_table(list(shown), lines)}\n", flush=True)
