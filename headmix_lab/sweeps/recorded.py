"""Tables of the documents, from the CSV files that `headmix analyze sweep` has written."""

from collections.abc import Sequence
from pathlib import Path

from headmix_lab.sweeps.table import LABELS, values
from headmix_lab.tables import Row, markdown_table, mean_and_deviation, read_csv

SCORES = ("val_percent", "test_top1_percent", "test_balanced_percent")


def compared(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the runs of each network at its rate, the best validation at seed 0."""
    found = {}
    for name in dict.fromkeys(row["variant"] for row in rows):
        tuning = [row for row in rows if (row["variant"], row["seed"]) == (name, "0")]
        rate = max(tuning, key=lambda row: float(row["val_percent"]))["rate"]
        found[name] = [row for row in rows if (row["variant"], row["rate"]) == (name, rate)]
    return found


def cells(rows: Sequence[Row], of_it: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Return a network's rate, with a star at an end of those that were tried, and means ± standard deviations."""
    rate, tried = of_it[0]["rate"], sorted({float(row["rate"]) for row in rows})
    star = "*" if len(tried) > 1 and float(rate) in (tried[0], tried[-1]) else ""
    return [rate + star, *(mean_and_deviation(values(of_it, column)) for column in columns)]


def network_table(path: Path, *columns: str) -> str:
    """Return networks with their learning rates and these columns in Markdown."""
    rows = read_csv(path)
    lines = [[network, *cells(rows, of_it, columns)] for network, of_it in compared(rows).items()]
    return markdown_table(["network", "rate", *(LABELS[column] for column in columns)], lines)
