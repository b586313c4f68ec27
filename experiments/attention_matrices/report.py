"""Table of the attention matrices of the digits classifiers in the package."""

import statistics
from pathlib import Path

from headmix_lab.tables import markdown_table, numbers, read_csv

FOLDER = Path(__file__).parent
CLAIMS = {"rank": "rank of attention matrices", "entropy": "entropy and reach of attention matrices"}
COLUMNS = {
    "rank": "rank",
    "stable_rank": "stable rank",
    "entropy": "entropy of a row, nats",
    "distance": "mean distance, tokens",
}


def table() -> str:
    """Means over layers and heads."""
    ranks, entropies = (read_csv(FOLDER / f"{name}.csv") for name in CLAIMS)
    rows = [rank | entropy for rank, entropy in zip(ranks, entropies, strict=True)]
    lines = []
    for core in dict.fromkeys(row["core"] for row in rows):
        of_core = [row for row in rows if row["core"] == core]
        lines.append([core, *(f"{statistics.mean(numbers(of_core, column)):.2f}" for column in COLUMNS)])
    return markdown_table(["core", *COLUMNS.values()], lines)


TABLES = {"attention_numbers": table}
