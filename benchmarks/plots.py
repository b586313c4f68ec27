"""Plots of times of the ops against the number of tokens, beside the floor: MHLA's and Head-in-Head's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headmix_vision.analysis import line_charts as charts

# Columns that are drawn, with label, colour and style. MHLA and softmax read the same packed views.
MHLA_LINES = {
    "auto": ("MHLA", charts.MHLA, {"linewidth": 3}),
    "cudnn_packed": ("softmax, cuDNN", charts.SOFTMAX, {"linewidth": 2}),
    "flash_packed": ("FlashAttention 2", charts.OTHERS[0], {"linewidth": 2}),
    "flash4": ("FlashAttention 4", charts.OTHERS[1], {"linewidth": 2}),
}
HIH_LINES = {
    "r4": ("r = 4", charts.HEAD_IN_HEAD, {"marker": "o"}),
    "r1": ("r = 1", charts.OTHERS[0], {"marker": "o"}),
    "fla": ("fla, r = 1", charts.LINEAR, {"marker": "o"}),
    "cudnn": ("softmax, cuDNN", charts.SOFTMAX, {"marker": "o"}),
}
WRITTEN = {"auto": (0, -14), "cudnn_packed": (15, -12)}  # columns with a number, and its distance in points
Row = Mapping[str, Any]


def draw_mhla(rows: Sequence[Row], path: Path) -> None:
    """Draw forward and backward, the number of tokens in all fixed."""
    some = next(row for row in rows if row["group"] == "sweep")
    total = int(some["batch"]) * int(some["tokens"])
    title = f"{some['device']}: {total:,} tokens in all, {some['heads']} heads of {some['head_dim']}, bf16"
    _draw(rows, "sweep", "forward_backward", "forward and backward, ms", MHLA_LINES, title, 3, path)


def draw_hih(rows: Sequence[Row], path: Path) -> None:
    """Draw the forward pass, batch and heads fixed."""
    some = next(row for row in rows if row["group"] == "scaling")
    sizes = f"{some['batch']} images, {some['heads']} heads of {some['head_dim']}"
    title = f"{some['device']}: Head-in-Head, {sizes}, bf16"
    _draw(rows, "scaling", "forward", "forward, ms", HIH_LINES, title, 1, path)


def _draw(
    rows: Sequence[Row],
    group: str,
    time: str,
    label: str,
    lines: Mapping[str, tuple[str, str, dict[str, Any]]],
    title: str,
    every_tick: int,
    path: Path,
) -> None:
    rows = sorted((row for row in rows if row["group"] == group), key=lambda row: int(row["tokens"]))
    figure, ((axes,),) = charts.line_figure()
    for column, (name, colour, style) in lines.items():
        points = {int(row["tokens"]): row[f"{time}_ms"] for row in rows if row["column"] == column}
        times = {tokens: float(ms) for tokens, ms in points.items() if ms}
        if times:
            axes.plot(list(times), list(times.values()), color=colour, label=name, **style)
            if column in WRITTEN and (at := (16_384, times.get(16_384)))[1]:
                axes.plot(*at, "o", color=colour)
                style = {"textcoords": "offset points", "ha": "center", "color": colour}
                axes.annotate(f"{at[1]:.3g}", at, WRITTEN[column], **style)
    floors = {int(row["tokens"]): float(row[f"{time}_floor_ms"]) for row in rows}
    axes.plot(list(floors), list(floors.values()), "k--", linewidth=1, label="memory's floor")
    axes.set(yscale="log", xlabel="tokens of an image (log)", ylabel=f"{label} (log)")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(floors)[::every_tick], [f"{n:,}" for n in list(floors)[::every_tick]])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(title)
    charts.label_ends(axes)
    charts.save_svg(path, figure)
