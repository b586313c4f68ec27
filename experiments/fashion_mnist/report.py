"""Tables of classifiers and generators of Fashion-MNIST."""

from pathlib import Path

from experiments.emoji.report import quality
from headmix_lab.drawing_tasks import TEST
from headmix_lab.sweeps.recorded import network_table
from headmix_lab.tables import read_csv, recorded

FOLDER = Path(__file__).parent
CORES, GENERATORS = FOLDER / "cores.csv", FOLDER / "generators.csv"
CLAIMS = recorded(
    FOLDER,
    {
        CORES.stem: "attention in classifiers of Fashion-MNIST",
        GENERATORS.stem: "attention in models that draw Fashion-MNIST",
    },
)
_TABLES = {
    CORES.stem: lambda: network_table(CORES, "val_percent", "test_top1_percent"),
    GENERATORS.stem: lambda: quality(read_csv(GENERATORS, split=TEST)),
}
TABLES = {f"fashion_mnist_{name}": table for name, table in _TABLES.items() if name in CLAIMS}
