"""What bench_hih.py prints and draws from its rows (the rows of the CSV)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from columns import Row
from matplotlib.figure import Figure
from training_runs import markdown_table

from headmix_vision.files.atomic import atomic_path

TIMES = ("forward_ms", "forward_backward_ms")
# Column, base, most times slower forward and forward with backward.
BARS = (("r1", "fla", 1.25, 1.25), ("r4", "r1", 3.0, 3.5))
LABELS = {
    "fla": "flash-linear-attention, gated delta rule",
    "mhla": "MHLA",
    "flash": "FlashAttention",
    "cudnn": "cuDNN",
}


def label(column: str) -> str:
    """Name of a column in tables and plots: of "torch_r4" it is "torch, r = 4"."""
    if r := _sub_heads(column):
        return f"{column.removesuffix(r).rstrip('_') or 'Triton'}, r = {r[1:]}"
    return LABELS.get(column, column)


def _sub_heads(column: str) -> str:
    """The end of the name that tells the number of sub-heads, "r4" of "torch_r4"; empty for other columns."""
    last = column.rpartition("_")[2]
    return last if last[1:].isdigit() else ""


def _cells(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    return {(row["shape"], row["column"]): row for row in rows}


def ratio(rows: Sequence[Row], shape: str, column: str, base: str, time: str) -> float | None:
    """How many times slower than the base a column is at a shape; None where either has no time."""
    cells = _cells(rows)
    ours, theirs = (cells.get((shape, name), {}).get(time) for name in (column, base))
    return ours / theirs if ours is not None and theirs is not None else None


def tables(rows: Sequence[Row]) -> str:
    """A Markdown table for each shape: times, how many times those of others they are, peak memory."""
    header = ["", *(f"{t} {x}" for t in ("forward", "with backward") for x in ("ms", "x fla", "x r=1", "x floor"))]
    blocks = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        own = [row for row in rows if row["shape"] == shape]
        table = []
        for row in own:
            line = [label(row["column"])]
            for time in TIMES:
                refused = row["note"].startswith("refused") and row[time] is None
                line.append("refused" if refused else _number(row[time], ".3f"))
                line += [_number(ratio(rows, shape, row["column"], base, time), ".2f") for base in ("fla", "r1")]
                floor = row[time.replace("_ms", "_floor_ms")]
                line.append(_number(row[time] and row[time] / floor, ".1f"))
            table.append([*line, _number(row["peak_mib"], ",.0f")])
        floors = " and ".join(f"{own[0][time.replace('_ms', '_floor_ms')]:.4f}" for time in TIMES)
        sizes = "·".join(str(own[0][key]) for key in ("batch", "tokens", "heads", "head_dim"))
        blocks.append(f"B·N·H·D = {sizes}, floor {floors} ms\n\n{markdown_table([*header, 'peak MiB'], table)}")
    return "\n\n".join(blocks)


def _number(x: float | None, form: str) -> str:
    return "–" if x is None else f"{x:{form}}"


def bars(rows: Sequence[Row]) -> list[str]:
    """One line for each of `BARS` at each shape where both columns have a time, "met" or "missed"."""
    lines = []
    for shape in dict.fromkeys(row["shape"] for row in rows if row["group"] != "scaling"):
        for column, base, *limits in BARS:
            for time, limit in zip(TIMES, limits, strict=True):
                x = ratio(rows, shape, column, base, time)
                if x is not None:
                    name = time.removesuffix("_ms").replace("_", " with ")
                    verdict = "met" if x <= limit else "missed"
                    lines.append(
                        f"{shape} {name}: {label(column)} takes {x:.2f}x {label(base)}, at most {limit:g}: {verdict}"
                    )
    return lines


def draw(rows: Sequence[Row], path: Path) -> None:
    """Time per token and head against the number of tokens, log-log, with the floor: flat is linear in N."""
    rows = sorted((row for row in rows if row["group"] != "scaling"), key=lambda row: row["tokens"])
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    columns = list(dict.fromkeys(row["column"] for row in rows))
    colours = list(dict.fromkeys(_sub_heads(name) or name for name in columns))  # one for all forms with the same r
    styles = {"": "-", "torch": ":", "loop": "-."}
    for axis, time, title in zip(axes, TIMES, ("forward", "forward with backward"), strict=True):
        for name in columns:
            points = [(row["tokens"], _per_token(row, time)) for row in rows if row["column"] == name and row[time]]
            style = styles[name.rpartition("_")[0]] if _sub_heads(name) else "--"
            colour = f"C{colours.index(_sub_heads(name) or name)}"
            # Without points too, so that both panels have the same colours.
            xs, ys = zip(*points, strict=True) if points else ((), ())
            width = 2.5 if style == "-" else 1.5
            axis.plot(xs, ys, style, color=colour, marker="o", markersize=4, linewidth=width, label=label(name))
        floor = time.replace("_ms", "_floor_ms")
        floors = {row["tokens"]: _per_token(row, floor) for row in rows}
        axis.plot(list(floors), list(floors.values()), color="black", linewidth=1, label="copy floor")
        axis.set(yscale="log", xlabel="tokens N", title=title)
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(floors), [f"{n:,}" for n in floors])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ns per token and head")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    figure.suptitle(f"{rows[0]['device']}: gated delta rules with r sub-heads, head dim {rows[0]['head_dim']}, bf16")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def _per_token(row: Row, time: str) -> float:
    return row[time] * 1e6 / (row["batch"] * row["tokens"] * row["heads"])
