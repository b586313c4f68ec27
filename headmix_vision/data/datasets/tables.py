"""`table/NAME`: images of a table, labelled by the column NAME or by several; and how tables are read.

A table is a `.csv` whose column `path` names files from the table's folder. The column `split`, where there is one,
says which rows are of which split.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.data.datasets.folders import split_candidates
from headmix_vision.data.datasets.image_files import LabelledFiles
from headmix_vision.errors import InputError

TABLE = "images.csv"

Row = dict[str, str]


def open_table(request: SplitRequest) -> LabelledFiles:
    """Open a split of a table of images: the file, or the folder that it lies in as `images.csv`.

    The classes are the values of the column that the name says, or of several: `table/style+group` has a class for each
    pair that occurs. Images without such a value are left out. All splits have the classes of the whole table.

    Raises:
        InputError: No table there, a column that it does not have, or no image of this split.
    """
    root, columns = request.existing_root(), request.variant.split("+")
    path = root / TABLE if root.is_dir() else root
    if path.suffix.lower() != ".csv" or not path.is_file():
        raise InputError(f"root {str(root)!r} must be a table .csv, or a folder with the table {TABLE}")
    header, rows = read_table(path)
    missing = [name for name in ("path", *columns) if name not in header]
    if missing:
        raise InputError(f"{path} has the columns {', '.join(header)}, there is no {missing[0]!r}")
    if not all(row["path"] for row in rows):
        raise InputError(f"{path} has a row without a path")
    labelled = [row for row in rows if all(row[name] for name in columns)]
    labels = {_label(row, columns) for row in labelled}
    kept = [row for _, row in rows_of_split(path, labelled, request.split, request.train_split)]
    return LabelledFiles(
        [path.parent / row["path"] for row in kept],
        [_label(row, columns) for row in kept],
        sorted(labels, key=natural_order),
        request.decoding,
    )


def _label(row: Row, columns: Sequence[str]) -> str:
    return " ".join(row[name] for name in columns)


def read_table(path: Path) -> tuple[list[str], list[Row]]:
    """Reads the names of the columns and the rows, with an empty text for a cell that is missing.

    Raises:
        InputError: The file is no text or no table.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            header = list(reader.fieldnames or ())
            return header, [{name: (row[name] or "").strip() for name in header} for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is no table: {error}") from None


def rows_of_split(path: Path, rows: Sequence[Row], split: str, only_split: str) -> list[tuple[int, Row]]:
    """Selects the rows of a split, each with its line in the file; a table without splits holds `only_split` alone.

    Raises:
        InputError: There are none.
    """
    names = split_candidates(split)
    default = split if split in split_candidates(only_split) else ""
    kept = [(line, row) for line, row in enumerate(rows, start=2) if row.get("split", default) in names]
    if not kept:
        raise InputError(f"{path} has no rows of the split {split!r}")
    return kept


def natural_order(label: str) -> tuple[int, int | str]:
    """Puts numbers in the order of numbers, and before other labels."""
    return (0, int(label)) if label.isdecimal() else (1, label)
