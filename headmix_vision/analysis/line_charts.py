"""Plots of a few labelled lines, as SVG of one page's width that can be read at half of it."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from headmix_vision.files.writing import atomic_path

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # told apart by colour-blind eyes too
BLACK = "#000000"
SOFTMAX, LINEAR, MHLA, HEAD_IN_HEAD, *OTHERS = OKABE_ITO  # where a plot shows attentions, each has the same colour
_WIDTH_IN, _TEXT_PT, _PITCH_PT = 6.0, 11, 13
_PAD_IN = 0.1  # beside the labels: fonts of browsers are a little wider
_STYLE: Any = {
    "font.size": _TEXT_PT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "lines.linewidth": 2.0,
    "svg.hashsalt": "headmix_vision",  # the same plot is the same file
}


def line_figure(rows: int = 1, columns: int = 1, height_in: float = 3.6, **shared: Any) -> tuple[Figure, np.ndarray]:
    """Make a figure of panels, six inches wide.

    Args:
        rows: Panels one above the other.
        columns: Panels side by side.
        height_in: Height of all, in inches.
        **shared: `sharex` and `sharey` of `Figure.subplots`.

    Returns:
        The figure and its panels [rows, columns].
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout=ConstrainedLayoutEngine(w_pad=_PAD_IN))
        FigureCanvasSVG(figure)
        return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def label_ends(*panels: Axes) -> None:
    """Write each line's label right of its panel, at the height of its last point and in its colour.

    Where lines end close to each other, their labels stand one above the other. Call it last: it goes by where the
    points are in the finished plot.

    Args:
        *panels: Panels of one figure; it is laid out once for all of them, which takes time.
    """
    figure = panels[0].figure
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()
    for axes in panels:
        _label_ends(axes, pt=72 / figure.dpi)


def _label_ends(axes: Axes, pt: float) -> None:
    """Labels the lines of a panel that is laid out; a pixel has so many points."""
    lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    points = {line: np.asarray(line.get_xydata()) for line in lines}
    ends = {line: float(axes.transData.transform(xy[-1])[1]) for line, xy in points.items() if len(xy)}
    named = sorted(ends, key=lambda line: ends[line])
    heights = apart([ends[line] * pt for line in named], _PITCH_PT, axes.get_window_extent().ymax * pt)
    for line, height in zip(named, heights, strict=True):
        axes.annotate(
            str(line.get_label()),
            (1, points[line][-1][1]),
            xycoords=axes.get_yaxis_transform(),
            xytext=(6, height - ends[line] * pt),
            textcoords="offset points",
            va="center",
            color=line.get_color(),
            annotation_clip=False,
        )


def apart(places: Sequence[float], pitch: float, most: float) -> list[float]:
    """Move places, in rising order, apart to a pitch: those that are closer stand evenly about their mean.

    Args:
        places: What is moved.
        pitch: Least distance of two neighbours.
        most: Where the last may stand.
    """
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _span(groups[-1], pitch)[0] < _span(groups[-2], pitch)[1] + pitch:
            groups[-2:] = [groups[-2] + groups[-1]]
    moved = [_span(group, pitch)[0] + index * pitch for group in groups for index in range(len(group))]
    return [min(place, most - pitch * after) for after, place in zip(range(len(moved))[::-1], moved, strict=True)]


def _span(group: Sequence[float], pitch: float) -> tuple[float, float]:
    """Where the first and the last of a group stand."""
    middle, half = sum(group) / len(group), pitch * (len(group) - 1) / 2
    return middle - half, middle + half


def save_svg(path: Path, figure: Figure) -> None:
    """Write a figure as an SVG that is complete or absent, text as text."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(encode_svg(figure))


def encode_svg(figure: Figure) -> bytes:
    """Make the file of a figure: an SVG, text as text. Two strokes cut a linear axis that does not begin at zero."""
    for axes in figure.axes:
        _mark_cut_axes(axes)
    encoded = io.StringIO()
    with mpl.rc_context(_STYLE | {"svg.fonttype": "none"}):
        figure.savefig(encoded, format="svg", metadata={"Date": None})
    return encoded.getvalue().encode()


def _mark_cut_axes(axes: Axes) -> None:
    """Draw two strokes across the beginning of each linear axis that begins above zero."""
    strokes: Any = {"transform": axes.transAxes, "color": BLACK, "clip_on": False, "linestyle": "none", "markersize": 9}
    if axes.get_yscale() == "linear" and axes.get_ylim()[0] > 0:
        axes.add_line(Line2D([0, 0], [0.03, 0.06], marker=[(-5, -2), (5, 2)], **strokes))
    if axes.get_xscale() == "linear" and axes.get_xlim()[0] > 0:
        axes.add_line(Line2D([0.02, 0.035], [0, 0], marker=[(-2, -5), (2, 5)], **strokes))
