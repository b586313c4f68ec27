"""Tables of results: CSV files, their origins recorded beside them, and one that outlives an interruption."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headmix_vision.errors import InputError
from headmix_vision.files.origins import write_origin
from headmix_vision.files.reading import check_file
from headmix_vision.files.writing import atomic_path

Row = dict[str, str]


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
                raise InputError(f"{path} is no table of this command; choose another --out")
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
