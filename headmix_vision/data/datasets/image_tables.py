"""`table/NAME`: images of a table, labelled by the column NAME or by several; and how tables are read.

A table is a `.csv` whose column `path` names files from the table's folder. The column `split`, where there is one,
says which rows are of which split.
"""

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.data.datasets.folders import LabelledFiles, split_candidates
from headmix_vision.data.labels import fault_of, natural_order, number_labels
from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_file, check_memory

TABLE = "images.csv"
_ROW_BYTES = 8  # of a byte of the file, as the rows hold it

Row = dict[str, str]


def open_table(request: SplitRequest) -> LabelledFiles:
    """Open a split of a table of images: the file, or the folder that it lies in as `images.csv`.

    The classes are the values of the column that the name says, or of several: `table/style+group` has a class for each
    pair that occurs. All splits have the classes of the whole table.

    Raises:
        InputError: No table there, one with a mistake, a column that it does not have, no image of this split, or one
            without a valid label.
    """
    root, columns = request.existing_root(), request.variant.split("+")
    path = root / TABLE if root.is_dir() else root
    if path.suffix.lower() != ".csv" or not path.is_file():
        raise InputError(f"root {str(root)!r} must be a table .csv, or a folder with the table {TABLE}")
    header, rows = read_table(path)
    missing = [name for name in ("path", *columns) if name not in header]
    if missing:
        raise InputError(f"{path} has the columns {', '.join(header)}, there is no {missing[0]!r}")
    for line, row in rows:
        if not row["path"]:
            raise InputError(f"{path}, line {line}: path is missing")
    kept = rows_of_split(path, rows, request.split, request.train_split)
    names = {label for _, row in rows if not fault_of(label := _label(row, columns))}
    numbered = number_labels(
        [_label(row, columns) for _, row in kept],
        lambda number: f"{path}, line {kept[number][0]}",
        path,
        request.label_rule,
        class_names=sorted(names, key=natural_order),
    )
    paths = [path.parent / kept[number][1]["path"] for number in numbered.kept]
    return LabelledFiles(paths, numbered.targets, numbered.class_names, request.decoding)


def _label(row: Row, columns: Sequence[str]) -> str:
    """Join the labels of several columns; return the first one that is not valid, if there is one."""
    values = [row[name] for name in columns]
    return next((value for value in values if fault_of(value)), " ".join(values))


def read_table(path: Path) -> tuple[list[str], list[tuple[int, Row]]]:
    """Read the names of the columns, and the rows with their line; a cell that is missing at the end is an empty text.

    Raises:
        InputError: The file is not a text table, or has a column twice or a row with more cells than columns.
    """
    check_file(path)
    check_memory(_ROW_BYTES * path.stat().st_size, f"the table {path}")
    rows: list[tuple[int, Row]] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True, strict=True)
            header = [name.strip() for name in reader.fieldnames or ()]
            reader.fieldnames = header
            twice = next((name for name, count in Counter(header).items() if count > 1), None)
            if twice is not None:
                raise InputError(f"{path}, line {reader.line_num}: there are two columns {twice!r}")
            for row in reader:
                if None in row:
                    count = len(header) + len(row[None])
                    raise InputError(
                        f"{path}, line {reader.line_num}: {count} cells, there are {len(header)} columns; a cell with a"
                        ' comma is written in quotation marks, as "a, b"'
                    )
                rows.append((reader.line_num, {name: (row[name] or "").strip() for name in header}))
            return header, rows
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a table: {error}") from None
    except csv.Error as error:  # a quotation mark that is left open would take the rows behind it
        raise InputError(
            f"{path} is not a table: {error}, in the row after line {rows[-1][0] if rows else 1}"
        ) from None


def rows_of_split(path: Path, rows: Sequence[tuple[int, Row]], split: str, only_split: str) -> list[tuple[int, Row]]:
    """Select the rows of a split, each with its line in the file; a table without splits holds `only_split` alone.

    Raises:
        InputError: There are none.
    """
    names = split_candidates(split)
    default = split if split in split_candidates(only_split) else ""
    kept = [(line, row) for line, row in rows if row.get("split", default) in names]
    if not kept:
        raise InputError(f"{path} has no rows of the split {split!r}")
    return kept
