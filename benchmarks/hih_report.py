"""What bench_hih.py prints and draws from its rows (the rows of the CSV)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.columns import Row
from headmix_vision.analysis.lines import (
    BLACK,
    HEAD_IN_HEAD,
    LINEAR,
    OTHERS,
    SOFTMAX,
    label_ends,
    line_figure,
    save_svg,
)
from headmix_vision.console.tables import markdown_table

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


# What is drawn, of more columns at the shapes of fixed batch and heads: a plot of more lines says less.
LINES = {
    "r4": ("r = 4", HEAD_IN_HEAD),
    "r1": ("r = 1", OTHERS[0]),
    "fla": ("fla, r = 1", LINEAR),
    "cudnn": ("softmax, cuDNN", SOFTMAX),
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Time of a forward pass against the number of tokens, batch and heads fixed, and the floor."""
    rows = sorted((row for row in rows if row["group"] == "scaling"), key=lambda row: int(row["tokens"]))
    some = rows[-1]
    figure, ((axes,),) = line_figure()
    for name, (line, colour) in LINES.items():
        points = [(int(row["tokens"]), float(row["forward_ms"])) for row in rows if row["column"] == name
                  and row["forward_ms"]]  # fmt: skip
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=line)
    floors = {int(row["tokens"]): float(row["forward_floor_ms"]) for row in rows}
    axes.plot(list(floors), list(floors.values()), color=BLACK, linestyle="--", linewidth=1, label="memory's floor")
    axes.set(yscale="log", xlabel="tokens of an image", ylabel="forward, ms")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(floors), [f"{n:,}" for n in floors])
    axes.yaxis.set_major_formatter("{x:g}")
    sizes = f"{some['batch']} images, {some['heads']} heads of {some['head_dim']}"
    axes.set_title(f"{some['device']}: Head-in-Head, {sizes}, bf16")
    label_ends(axes)
    save_svg(path, figure)
