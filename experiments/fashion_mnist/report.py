"""Tables of classifiers and generators of Fashion-MNIST."""

from collections.abc import Callable
from pathlib import Path

from experiments.emoji.report import quality
from experiments.emoji.runs import TEST
from headmix_lab.sweeps.recorded import network_table
from headmix_lab.tables import read_csv

FOLDER = Path(__file__).parent
FILES: dict[str, tuple[str, Callable[[Path], str]]] = {
    "cores": (
        "attention in classifiers of Fashion-MNIST",
        lambda path: network_table(path, "val_percent", "test_top1_percent"),
    ),
    "generators": (
        "attention in models that draw Fashion-MNIST",
        lambda path: quality(read_csv(path, split=TEST)),
    ),
}
_FOUND = {name: FOLDER / f"{name}.csv" for name in FILES if (FOLDER / f"{name}.csv").exists()}
CLAIMS = {name: FILES[name][0] for name in _FOUND}
TABLES: dict[str, Callable[[], str]] = {
    f"fashion_mnist_{name}": lambda name=name, path=path: FILES[name][1](path)  # type: ignore[misc]
    for name, path in _FOUND.items()
}
