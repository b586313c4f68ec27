"""Renew the tables and plots of all documents from the CSV files of the experiments and benchmarks.

    python -m experiments.tables            # after a run has written its CSV
    python -m experiments.tables --check    # name the documents that differ; exit status 1

A line `<!-- table NAME -->` in a document is followed by the table of that name. The `report.py` of each experiment and
of the benchmarks holds functions for tables (`TABLES`), for plots (`PLOTS`, by file), and a claim for each CSV file
(`CLAIMS`). A finished question keeps its README, CSV files, origins and plot; its code and tables are in the history.
Deviations are of samples (n - 1). The check leaves out plots.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

from benchmarks import report as benchmarks_report
from benchmarks.report import ms
from headmix_lab import finished_plots
from headmix_lab.measuring import REPOSITORY
from headmix_lab.tables import ORIGINS, markdown_table, mean_and_deviation, numbers, origins_of

HERE = Path(__file__).parent
REPORTS: list[Any] = [
    benchmarks_report,
    *(import_module(f"experiments.{path.parent.name}.report") for path in sorted(HERE.glob("*/report.py"))),
]
FINISHED = {  # folder of a question without code, and the claim of its results.csv
    "compress": "fewer heads of keys and values",
    "counting": "how many heads count pairs",
    "head_mixes": "cores with and without head mixes",
    "recall": "rank of Head-in-Head's transition",
    "stable_rates": "learning rates of explicit heads",
}
MARKER = re.compile(r"(?m)^<!-- table (?P<name>\S+) -->\n(?P<table>(?:\|.*\n)*)")


def claimed() -> dict[Path, str]:
    """Return the claim of each CSV file."""
    found = {report.FOLDER / f"{name}.csv": claim for report in REPORTS for name, claim in report.CLAIMS.items()}
    return found | {HERE / question / "results.csv": claim for question, claim in FINISHED.items()}


def plots() -> dict[Path, Callable[[Path], None]]:
    """Return the function that draws each plot."""
    drawn = {report.FOLDER / name: one for report in REPORTS for name, one in getattr(report, "PLOTS", {}).items()}
    return drawn | {HERE / name / "results.svg": partial(finished_plots.draw, HERE, name) for name in FINISHED}


def claims() -> str:
    """Return the claims with script and commit of their measurement; the file of origins holds whole commands."""
    lines = []
    for table, claim in claimed().items():
        calls = origins_of(table)
        script = " ".join(takewhile(lambda word: not word.startswith("--"), calls[-1]["command"].split()))
        commits = ", ".join(dict.fromkeys(call["commit"] for call in calls))
        place = Path(os.path.relpath(table, HERE))
        lines.append([claim, f"[`{script}`]({place.with_name(ORIGINS)})", f"[{place.name}]({place})", commits])
    return markdown_table(["claim", "command", "measured in", "commit"], lines)


def accuracies(rows: Sequence[dict[str, str]], task: str, core: str) -> list[float]:
    """Return test accuracies of a core without head mix over seeds, at its chosen learning rate: it alone has all."""
    given = {"task": task, "core": core, "mix": "plain"}
    rows = [row for row in rows if given.items() <= row.items() and row["dataset"] != "digits-tuning"]
    rates = Counter(row["rate"] for row in rows)
    return numbers(
        [row for row in rows if row["rate"] == max(rates, key=lambda rate: rates[rate])], "test_top1_percent"
    )


def attentions() -> str:
    """The cores side by side: cost, time at two lengths and peak memory at the longer, accuracy on two tasks."""
    columns = {"softmax": "cudnn_packed", "linear": "linear_kernel", "mhla": "auto"}
    names = {"softmax": "softmax (cuDNN)", "linear": "linear", "mhla": "MHLA", "hih": "Head-in-Head, r = 4"}
    read, lines = benchmarks_report.read, []
    trained = benchmarks_report.read_csv(HERE / "head_mixes" / "results.csv")
    for core, name in names.items():
        times = []
        for shape, hih_shape in (("deit", "n256"), ("k16", "n16384")):
            found = read("hih_h200", shape=hih_shape, column="r4")
            found = found if core == "hih" else read("mhla_h200", shape=shape, column=columns[core])
            times.append(ms(found[0]["forward_backward_ms"]) if found else "–")
        times.append(f"{float(found[0]['peak_mib']):,.0f}" if found else "–")
        scores = [mean_and_deviation(accuracies(trained, task, core), 1) for task in ("digits", "canvas")]
        lines.append([name, "N²" if core == "softmax" else "N", *times, *scores])
    header = ["attention", "cost", "128 images of 256 tokens, ms", "2 of 16,384, ms", "MiB", "digits, %", "canvases, %"]
    return markdown_table(header, lines)


TABLES: dict[str, Callable[[], str]] = {"claims": claims, "attentions": attentions}
for _report in REPORTS:
    assert not TABLES.keys() & _report.TABLES.keys(), _report
    TABLES |= _report.TABLES


def renewed(text: str) -> str:
    """Return a document's text with all of its tables made anew.

    Raises:
        KeyError: A marker of an unknown name.
    """
    return MARKER.sub(lambda found: f"<!-- table {found['name']} -->\n{TABLES[found['name']]()}\n", text)


def documents() -> Iterator[tuple[Path, str]]:
    """Yield all documents that have tables, with their text."""
    folders = (REPOSITORY, REPOSITORY / "docs", REPOSITORY / "benchmarks", HERE, *sorted(HERE.glob("*/")))
    for path in (path for folder in folders for path in sorted(folder.glob("*.md"))):
        if MARKER.search(text := path.read_text()):
            yield path, text


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a table differs")
    check = parser.parse_args(argv).check
    stale = [(path, new) for path, old in documents() if (new := renewed(old)) != old]
    for path, new in stale:
        print(f"{path.relative_to(REPOSITORY)} {'differs from' if check else 'is renewed by'} its CSV files")
        if not check:
            path.write_text(new)
    for path, draw in () if check else plots().items():
        draw(path)
    raise SystemExit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
