"""The table of a sweep in Markdown, and the rule by which its networks are compared."""

import math
import statistics
from collections.abc import Sequence

from headmix_lab.sweeps.kinds import Variant
from headmix_lab.sweeps.runs import AT_LIMIT, NOT_FINITE, Runs
from headmix_lab.tables import ResultTable, Row, markdown_table, mean_and_deviation
from headmix_vision.console import sentence

LABELS = {
    "val_percent": "validation, %",
    "test_top1_percent": "top-1, %",
    "test_balanced_percent": "balanced accuracy, %",
    "images_per_s": "training, images/s",
    "rank": "rank of attention",
    "stable_rank": "stable rank",
    "entropy": "entropy of a row, nats",
}
"""Labels of the numeric columns."""

_LEARNED = 0.1  # of the way from the accuracy of naming the commonest class to 100 %


def values(rows: Sequence[Row], column: str) -> list[float]:
    """Read a column of rows, where it is not empty."""
    return [float(row[column]) for row in rows if row[column]]


def lines_of(variants: Sequence[Variant]) -> dict[str, list[Variant]]:
    """Group networks by the line of the figure."""
    lines: dict[str, list[Variant]] = {}
    for variant in variants:
        lines.setdefault(variant.line, []).append(variant)
    return lines


def report(table: ResultTable, runs: Runs) -> str:
    """Return comparison, rule and table in Markdown: means ± standard deviations over seeds."""
    request, config = runs.request, runs.config
    patience, monitor = config["early_stopping"]["patience"], config["early_stopping"]["monitor"] or runs.monitor
    limit = config["trainer"]["max_epochs"]
    end = f"A run ends when {monitor} has not improved for {patience} validations, or after {limit} epochs."
    if request.epochs is not None:
        end = f"All train for {limit} epochs, over which the learning rate falls to zero by half a cosine."
    held_out = "training images that are held out" if runs.holds_out else "the validation split"
    rates = f"the best of {', '.join(runs.rates)} at seed 0" if len(runs.rates) > 1 else runs.rates[0]
    rule = (
        f"Recipe {' '.join(request.recipes)}. {end} The learning rate is {rates}. Whatever is chosen, the tested"
        f" checkpoint too, is chosen by {runs.monitor} of {held_out}; top-1 and balanced accuracy are of the split"
        f" {runs.reported}. Mean ± standard deviation (of a sample) over seeds."
    )
    parts = [sentence(request.sweep.about), rule, _table(table, runs)]
    if request.sweep.axis == "tokens":
        parts.append(_falls(table, runs))
    return "\n\n".join(filter(None, parts)) + "\n"


def _table(table: ResultTable, runs: Runs) -> str:
    found = {name: rows for name in runs.variants if (rows := runs.rows(table, name))}
    shown = [name for name in LABELS if any(values(rows, name) for rows in found.values())]
    lines = []
    for name, rows in found.items():
        epochs = mean_and_deviation(values(rows, "epochs"), 0)
        cells = [mean_and_deviation(values(rows, column), 0 if column == "images_per_s" else 2) for column in shown]
        remarks = _remarks(rows, runs)
        lines.append([name + remarks, rows[0]["parameters"], rows[0]["rate"], str(len(rows)), epochs, *cells])
    if floors := [floor for rows in found.values() for floor in values(rows, "floor_percent")]:
        cells = [f"{floors[0]:.2f}" if name == "test_top1_percent" else "–" for name in shown]
        lines.append(["always the commonest class", *"––––", *cells])
    return markdown_table(
        ["network", "parameters", "rate", "seeds", "epochs", *(LABELS[name] for name in shown)], lines
    )


def _remarks(rows: Sequence[Row], runs: Runs) -> str:
    """Return the caveats of a network in brackets."""
    ways = {row["ended"] for row in rows}
    scores = [(float(row["test_top1_percent"]), float(row["floor_percent"])) for row in rows if row["floor_percent"]]
    remarks = {
        "numbers not finite": NOT_FINITE in ways,
        "has not learned": any(score < floor + _LEARNED * (100 - floor) for score, floor in scores),
        "still improving": AT_LIMIT in ways and runs.request.epochs is None,
        "rate at the edge": len(runs.rates) > 1 and rows[0]["rate"] in (runs.rates[0], runs.rates[-1]),
    }
    said = ", ".join(text for text, holds in remarks.items() if holds)
    return f" ({said})" if said else ""


def _falls(table: ResultTable, runs: Runs) -> str:
    """Describe where the accuracy of each line falls more than two standard errors below its best."""
    said = []
    for line, variants in lines_of(runs.request.sweep.variants).items():
        found = [(one.x, values(runs.rows(table, one.name), runs.accuracy)) for one in variants]
        found = [(x, scores) for x, scores in found if len(scores) > 1]
        if len(found) < 2:
            continue
        best = max(range(len(found)), key=lambda index: statistics.mean(found[index][1]))
        falls = (x for x, scores in found[best + 1 :] if _is_below(scores, found[best][1]))
        fall = next(falls, None)
        where = f"falls off at {fall:,.0f}" if fall else f"does not fall off up to {found[-1][0]:,.0f}"
        said.append(f"{line} {where} tokens")
    return f"{'; '.join(said)} (a fall is of more than two standard errors, from the best length)." if said else ""


def _is_below(scores: Sequence[float], best: Sequence[float]) -> bool:
    error = math.sqrt(sum(statistics.variance(each) / len(each) for each in (scores, best)))
    return statistics.mean(best) - statistics.mean(scores) > 2 * error
