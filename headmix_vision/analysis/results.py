"""The folder of results: pictures, tables, and for each command a record that says what they are of."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from headmix_vision.analysis.figures import encode_png
from headmix_vision.analysis.line_charts import encode_svg
from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_fields, read_json
from headmix_vision.files.writing import atomic_path, check_place, hold_lock, is_temporary, remove_temporaries

LOCK = ".lock"
# What each command writes, beside its record: pictures before tables.
WRITTEN = {
    "mixing": ("iha.png", "mea.png", "mhla.png"),
    "rank": ("rank.svg", "rank.csv"),
    "entropy": ("entropy.svg", "entropy.csv"),
    "maps": ("maps.png", "maps.csv"),
    "sensitivity": ("sensitivity.csv",),
}


class ResultFolder:
    """A folder of results of one or several commands.

    Args:
        path: The folder; it need not exist.
        command: Whose results are written: one of `WRITTEN`.
        networks: What is known of the networks, `weights_sha256` of each among it.
        settings: What else decides the results; plain values, as JSON takes them.
    """

    def __init__(
        self, path: Path, command: str, networks: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
    ) -> None:
        self.path = path
        self.command = command
        self.networks = networks
        self.settings = settings

    @property
    def _record(self) -> str:
        return f"{self.command}.json"

    def check(self) -> None:
        """Check that the results may be written here; touch nothing.

        Raises:
            InputError: If there are files of someone else, or results of other weights or settings.
            OSError: If the folder cannot be made.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"--out {self.path} is a file, it must be a directory")
        if not self.path.is_dir():
            check_place(self.path)
            return
        inside = {entry.name for entry in self.path.iterdir() if entry.name != LOCK and not is_temporary(entry.name)}
        known = {name for command, names in WRITTEN.items() for name in (f"{command}.json", *names)}
        if foreign := sorted(inside - known):
            raise InputError(
                f"{self.path} holds {foreign[0]}, which is not a result of an analysis; choose another --out"
            )
        own = inside & {self._record, *WRITTEN[self.command]}
        if own and self._record not in own:
            raise InputError(f"{self.path} holds {min(own)} without {self._record}; choose another --out")
        if own:
            self._check_record()

    def _check_record(self) -> None:
        path = self.path / self._record
        try:
            record = check_fields(str(path), read_json(path), {"networks": list, "settings": dict})
            of = [
                check_fields(f"a network of {path}", about, {"weights_sha256": str})["weights_sha256"]
                for about in record["networks"]
            ]
        except ValueError as error:
            raise InputError(f"{path} is damaged: {error}; choose another --out") from None
        if of != [about["weights_sha256"] for about in self.networks]:
            raise InputError(f"{self.path} holds results of other weights; choose another --out")
        if record["settings"] != self.settings:
            raise InputError(f"{self.path} holds results of other options; choose another --out")

    def write(
        self,
        figures: Mapping[str, Figure],
        tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        numbers: Mapping[str, Any] | None = None,
    ) -> list[Path]:
        """Write results, all or none; they replace results of the same weights and settings.

        Args:
            figures: Pictures by name, without `.png` or `.svg`.
            tables: Rows of plain values by name, without `.csv`.
            numbers: What stands in the record beside networks and settings.

        Returns:
            The files.
        """
        with self._lock():
            self.check()
            remove_temporaries(self.path)
            record = {"networks": self.networks, "settings": self.settings, **_rounded(dict(numbers or {}))}
            files: dict[Path, bytes] = {}
            for name, figure in figures.items():
                path = self.picture(name)
                files[path] = (encode_svg if path.suffix == ".svg" else encode_png)(figure)
            files |= {self.path / f"{name}.csv": _csv(rows).encode() for name, rows in (tables or {}).items()}
            files[self.path / self._record] = (json.dumps(record, indent=1, allow_nan=False) + "\n").encode()
            with ExitStack() as complete:  # renames the last one, the record, first: it says whose the others are
                for path, data in files.items():
                    complete.enter_context(atomic_path(path)).write_bytes(data)
        return [*files]

    def picture(self, name: str) -> Path:
        """Return the file of a picture."""
        return self.path / next(file for file in WRITTEN[self.command] if file.startswith(f"{name}."))

    def _lock(self) -> AbstractContextManager[None]:
        return hold_lock(self.path / LOCK, f"--out {self.path}")


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_rounded(dict(row)) for row in rows)
    return text.getvalue()


def _rounded(value: Any) -> Any:
    """Round all fractions in plain values to six digits, which is more than weights of training say."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return {name: _rounded(item) for name, item in value.items()} if isinstance(value, dict) else value
