"""Tables in Markdown, and numbers over several seeds in their cells."""

import statistics
from collections.abc import Sequence


def mean_and_deviation(values: Sequence[float], digits: int = 2) -> str:
    """Write `mean ± standard deviation` (n - 1); the value alone where there is one, a dash without any."""
    if not values:
        return "–"
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])
