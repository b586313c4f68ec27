"""Tables of classifiers and generators of Fashion-MNIST."""

from pathlib import Path

from experiments.emoji.report import quality
from headmix_lab.drawing_tasks import TEST
from headmix_lab.sweeps.recorded import network_table
from headmix_lab.tables import markdown_table, read_csv, recorded

FOLDER = Path(__file__).parent
_KINDS = {"cores": "classifiers of Fashion-MNIST", "generators": "models that draw Fashion-MNIST"}
CLAIMS = recorded(FOLDER, {name: f"attention in {kind}" for name, kind in _KINDS.items()})
CLAIMS["recipe"] = "the recipe for Fashion-MNIST, MHLA, trained on all 60,000 training pictures"
_TABLES = {
    "recipe": lambda: markdown_table(
        ["seed", "test top-1, %", "top-5, %", "loss", "top-1 of shirts, %", "minutes"],
        [list(row.values()) for row in read_csv(FOLDER / "recipe.csv")],
    ),
    "cores": lambda: network_table(FOLDER / "cores.csv", "val_percent", "test_top1_percent"),
    "generators": lambda: quality(read_csv(FOLDER / "generators.csv", split=TEST)),
}
TABLES = {f"fashion_mnist_{name}": table for name, table in _TABLES.items() if name in CLAIMS}
