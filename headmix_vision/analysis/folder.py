"""The folder of pictures: `iha.png` and so on, and `numbers.json`, which also says of which weights they are."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from headmix_vision.analysis.figures import Picture, save_figure
from headmix_vision.analysis.pictures import PICTURES
from headmix_vision.errors import InputError
from headmix_vision.files.atomic import atomic_path, check_place, is_temporary, remove_temporaries
from headmix_vision.files.fields import check_fields
from headmix_vision.files.locks import hold_lock

NUMBERS, LOCK = "numbers.json", ".lock"


class PictureFolder:
    """A folder of pictures.

    Args:
        path: The folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, weights_sha256: str) -> None:
        """Checks that pictures of these weights may be written here; touches nothing.

        Raises:
            InputError: If there are files of someone else, or pictures of other weights.
            OSError: If the folder cannot be made.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"--out {self.path} is a file, it must be a directory")
        if not self.path.is_dir():
            check_place(self.path)
            return
        inside = {entry.name for entry in self.path.iterdir() if entry.name != LOCK and not is_temporary(entry.name)}
        foreign = sorted(inside - {NUMBERS, *(f"{name}.png" for name in PICTURES)})
        if foreign:
            raise InputError(f"{self.path} holds {foreign[0]}, which is no picture of a network; choose another --out")
        if inside and NUMBERS not in inside:
            raise InputError(f"{self.path} holds pictures without {NUMBERS}; choose another --out")
        if inside and self._drawn_from() != weights_sha256:
            raise InputError(f"{self.path} holds pictures of other weights; choose another --out")

    def write(self, network: dict[str, Any], pictures: Mapping[str, Picture]) -> list[Path]:
        """Writes pictures and their numbers; those of the same weights are replaced.

        Args:
            network: What is known of the network, `weights_sha256` among it.
            pictures: The pictures by name.

        Returns:
            The files.
        """
        with self._lock():
            self.check(network["weights_sha256"])
            remove_temporaries(self.path)
            numbers = {"network": network, **{name: _rounded(picture.numbers) for name, picture in pictures.items()}}
            with atomic_path(self.path / NUMBERS) as temporary:
                temporary.write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n")
            for name, picture in pictures.items():
                save_figure(self.path / f"{name}.png", picture.figure)
        return [*(self.path / f"{name}.png" for name in pictures), self.path / NUMBERS]

    def _lock(self) -> AbstractContextManager[None]:
        return hold_lock(self.path / LOCK, f"--out {self.path}")

    def _drawn_from(self) -> str:
        """Reads the hash of the weights from which the pictures in the folder were drawn."""
        path = self.path / NUMBERS
        try:
            numbers = check_fields(str(path), json.loads(path.read_text()), {"network": dict})
            about = check_fields(f"the network of {path}", numbers["network"], {"weights_sha256": str})
        except ValueError as error:
            raise InputError(f"{path} is damaged: {error}; choose another --out") from None
        sha256: str = about["weights_sha256"]
        return sha256


def _rounded(value: Any) -> Any:
    """Rounds all fractions in plain values to six digits, which is more than weights of training say."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return {name: _rounded(item) for name, item in value.items()} if isinstance(value, dict) else value
