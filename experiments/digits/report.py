"""Table of attention cores on digits."""

from pathlib import Path

from headmix_lab.tables import markdown_table, mean_and_deviation, numbers, read_csv

FOLDER = Path(__file__).parent
CLAIMS = {"results": "cores on digits"}


def table(path: Path = FOLDER / "results.csv") -> str:
    """Accuracies of each core with and without CPE, over seeds."""
    rows, lines = read_csv(path), []
    for core, cpe in dict.fromkeys((row["core"], row["cpe"]) for row in rows):
        found = [row for row in rows if (row["core"], row["cpe"]) == (core, cpe)]
        scores = [mean_and_deviation(numbers(found, f"{which}_top1_percent")) for which in ("last", "best")]
        lines.append([core, "on" if cpe == "True" else "off", *scores])
    return markdown_table(["attention", "CPE", "last epoch", "best epoch"], lines)


TABLES = {"digits": table}
