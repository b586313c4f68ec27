"""Figures of many small panels: a column for each layer, in as many lines as needed, under common colour scales.

Everything stands at a place computed in inches: text, then the bars of the colour scales, then lines of panels.
"""

import io
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

_DPI = 120
_SIGNED, _POSITIVE = "RdBu_r", "YlGnBu"  # both are white or nearly so at zero
_TEXT_PT, _SMALL_PT = 9, 7
_CHARACTER_IN, _BOLD_CHARACTER_IN, _TEXT_LINE_IN = 0.072, 0.08, 0.17  # of text of that size
_MARGIN_IN, _TICKS_IN, _TITLE_IN = 0.12, 0.2, 0.22
_MOST_WIDE_IN, _LEAST_WIDE_IN = 16.5, 5.0
_BAR_IN, _BAR_PITCH_IN, _BARS_IN = 1.8, 2.4, 0.6  # width of a bar, with what parts it from the next, and height of all


class Picture(NamedTuple):
    """Picture of one kind of mixing that a network has learned.

    Attributes:
        figure: The picture.
        numbers: For each layer the numbers that sum it up; plain values, as JSON takes them.
        summary: One line for the terminal.
    """

    figure: Figure
    numbers: list[dict[str, Any]]
    summary: str


class Scale(NamedTuple):
    """Colour scale: label, numbers of the first and the last colour, and name of the colours."""

    label: str
    norm: Normalize
    colours: str


def signed_scale(label: str, matrices: Sequence[Tensor]) -> Scale:
    """Make a colour scale for all matrices that is symmetric about zero, which is white."""
    most = max(float(matrix.nan_to_num(0).abs().max()) for matrix in matrices) or 1.0
    return Scale(label, Normalize(-most, most), _SIGNED)


def positive_scale(label: str, matrices: Sequence[Tensor], power: float = 1) -> Scale:
    """Make a colour scale for all matrices from zero to the largest value; colours grow with a power of the value."""
    most = max(float(matrix.nan_to_num(0).max()) for matrix in matrices) or 1.0
    return Scale(label, PowerNorm(power, 0, most), _POSITIVE)


class Panels:
    """A figure with a column of panels for each title, and the bars of its colour scales.

    Args:
        text: What stands above all; the first line is its title, the others are one paragraph.
        scales: The colour scales.
        titles: What stands above each column; it may have several lines, as many in all.
        rows: The label of each row, of one or several lines, and the height of its panels as a multiple of their width.
        width_in: The width of a panel, in inches.
        gap_in: What parts two columns, and two rows, in inches.

    Attributes:
        figure: The figure.
        rows: The panels of each row, one for each title.
    """

    def __init__(
        self,
        text: str,
        scales: Sequence[Scale],
        titles: Sequence[str],
        rows: dict[str, float],
        width_in: float,
        gap_in: float,
    ) -> None:
        left = _MARGIN_IN + _width_in(rows) + _TICKS_IN
        pitch = max(width_in, _width_in(titles)) + gap_in
        lines = -(-len(titles) // max(1, int((_MOST_WIDE_IN - left) / pitch)))
        per_line = -(-len(titles) // lines)
        self._width = max(_LEAST_WIDE_IN, left + per_line * pitch, _BAR_PITCH_IN * len(scales) + 2 * _MARGIN_IN)
        first, *others = text.splitlines()
        room = self._width - 2 * _MARGIN_IN
        heading = textwrap.wrap(first, int(room / _BOLD_CHARACTER_IN))
        paragraph = textwrap.wrap(" ".join(others), int(room / _CHARACTER_IN))
        top = _TEXT_LINE_IN * len(heading + paragraph) + 2 * _MARGIN_IN
        title_in = _TITLE_IN + _TEXT_LINE_IN * max(title.count("\n") for title in titles)
        line_height = title_in + sum(width_in * height + gap_in for height in rows.values()) + _TICKS_IN
        self._height = top + _BARS_IN + lines * line_height

        self.figure = Figure(figsize=(self._width, self._height))
        FigureCanvasAgg(self.figure)
        self._write("\n".join(heading), _MARGIN_IN, va="top", weight="bold")
        self._write("\n".join(paragraph), _MARGIN_IN + _TEXT_LINE_IN * len(heading), va="top")
        for index, scale in enumerate(scales):
            self._add_bar(scale, _MARGIN_IN + 0.1 + index * _BAR_PITCH_IN, top)
        self.rows: list[list[Axes]] = [[] for _ in rows]
        for index, title in enumerate(titles):
            line, column = divmod(index, per_line)
            at = top + _BARS_IN + line * line_height + title_in
            for row, (label, height) in enumerate(rows.items()):
                panel = self._add_axes(left + column * pitch, at, width_in, width_in * height)
                if row == 0:
                    panel.set_title(title, fontsize=_TEXT_PT, pad=4)
                if column == 0:
                    self._write(label, at + width_in * height / 2, va="center")
                self.rows[row].append(panel)
                at += width_in * height + gap_in

    def show(self, row: int, column: int, matrix: Tensor, scale: Scale) -> Axes:
        """Draw a matrix [rows, columns] as an image into a panel, which is returned; what is NaN stays white."""
        panel = self.rows[row][column]
        panel.imshow(matrix.numpy(), norm=scale.norm, cmap=scale.colours, interpolation="nearest")
        panel.set(xticks=[], yticks=[])
        return panel

    def _write(self, text: str, top_in: float, **options: Any) -> None:
        transform = self.figure.dpi_scale_trans
        self.figure.text(_MARGIN_IN, self._height - top_in, text, fontsize=_TEXT_PT, transform=transform, **options)

    def _add_axes(self, left_in: float, top_in: float, width_in: float, height_in: float) -> Axes:
        left, bottom = left_in / self._width, 1 - (top_in + height_in) / self._height
        axes = self.figure.add_axes((left, bottom, width_in / self._width, height_in / self._height))
        axes.tick_params(labelsize=_SMALL_PT, length=0, pad=1)
        axes.spines[:].set_visible(False)
        return axes

    def _add_bar(self, scale: Scale, left_in: float, top_in: float) -> None:
        axes = self._add_axes(left_in, top_in + 0.18, _BAR_IN, 0.1)
        colours = ScalarMappable(scale.norm, scale.colours)
        bar = self.figure.colorbar(colours, cax=axes, orientation="horizontal", ticks=MaxNLocator(4))
        bar.outline.set_visible(False)
        axes.set_title(scale.label, fontsize=_TEXT_PT, loc="left", pad=3)
        axes.tick_params(labelsize=_SMALL_PT, length=2, pad=1)


def _width_in(texts: Iterable[str]) -> float:
    return _CHARACTER_IN * max(len(line) for text in texts for line in text.splitlines())


def encode_png(figure: Figure) -> bytes:
    """Make the file of a figure: a PNG. Where the disk is full, Pillow would say `encoder error -2`."""
    encoded = io.BytesIO()
    figure.savefig(encoded, format="png", dpi=_DPI)
    return encoded.getvalue()
