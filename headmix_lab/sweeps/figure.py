"""The figure of a sweep: legible on half the width of a page, with the names of lines beside them."""

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from headmix_lab.sweeps.kinds import ACCURACY, SWEEPS
from headmix_lab.sweeps.table import LABELS, lines_of, values
from headmix_lab.tables import Row
from headmix_vision.analysis.line_charts import LINEAR, MHLA, OKABE_ITO, SOFTMAX, label_ends, line_figure

_PANEL_IN, _DOT_IN, _AXIS_IN = 2.6, 0.4, 0.7  # heights of a panel of lines, of a line of dots, of what is around
_ATTENTIONS = {"softmax": SOFTMAX, "linear": LINEAR, "MHLA": MHLA}
_LOGARITHMIC = 20  # an axis is, where its largest number is so many times the smallest


def draw(
    kind: str, rows: Mapping[str, Sequence[Row]], accuracy: str, curves: Sequence[Row] = (), title: str = ""
) -> Figure | None:
    """Draw the numbers of a sweep, a panel for each: means and standard deviations over seeds.

    Args:
        kind: Name of the sweep.
        rows: By the name of a network, its runs that are compared.
        accuracy: The column of the accuracy that is drawn.
        curves: What is drawn by epoch, as `Runs.curves` reads it.
        title: Data and setting, above "means and standard deviations of seeds".

    Returns:
        The figure; None while there is nothing to draw.
    """
    return _Drawing(kind, rows, accuracy, curves).figure(title)


class _Drawing:
    def __init__(self, kind: str, rows: Mapping[str, Sequence[Row]], accuracy: str, curves: Sequence[Row]) -> None:
        self.sweep, self.rows, self.accuracy, self.curves = SWEEPS[kind], rows, accuracy, curves
        self.variants = [variant for variant in self.sweep.variants if rows.get(variant.name)]
        names = lines_of(self.sweep.variants)
        attentions = names.keys() <= _ATTENTIONS.keys()
        # part of a sweep has the numbers of the whole
        self.colours = _ATTENTIONS if attentions else dict(zip(names, OKABE_ITO, strict=False))

    def figure(self, title: str) -> Figure | None:
        panel = {"lines": self._lines, "dots": self._dots, "curves": self._curves}[self.sweep.draw]
        columns = [self.accuracy if number == ACCURACY else number for number in self.sweep.numbers]
        numbers = [number for number in columns if self._is_known(number)]
        if not numbers:
            return None
        dots_in = len(numbers) * (_DOT_IN * len(self.variants) + _AXIS_IN)
        height_in = dots_in if self.sweep.draw == "dots" else _PANEL_IN * len(numbers) + _AXIS_IN
        figure, panels = line_figure(len(numbers), height_in=height_in)
        figure.suptitle(f"{title}\nmeans and standard deviations of seeds".strip())
        drawn = [panel(axes, number) for axes, number in zip(panels[:, 0], numbers, strict=True)]
        label_ends(*figure.axes)
        return figure if all(drawn) else None

    def _is_known(self, number: str) -> bool:
        """Return whether a number has a panel: runs side by side have no speed, short runs no rank."""
        return self.sweep.draw == "curves" or any(self._values(one.name, number) for one in self.variants)

    def _values(self, name: str, number: str) -> list[float]:
        return values(self.rows[name], number)

    def _lines(self, axes: Axes, number: str) -> bool:
        drawn: list[float] = []
        for line, variants in lines_of(self.variants).items():
            found = [(variant.x, scores) for variant in variants if (scores := self._values(variant.name, number))]
            if found:
                means = [statistics.mean(scores) for _, scores in found]
                spread, places = [_deviation(scores) for _, scores in found], [x for x, _ in found]
                axes.plot(places, means, "o-", color=self.colours[line], label=line)
                axes.errorbar(places, means, spread, fmt="none", ecolor=self.colours[line], capsize=4)
                drawn += means
        axes.set_xscale("log", base=2)
        places = sorted({variant.x for variant in self.variants})
        axes.set_xticks(places, [f"{x:,.0f}" for x in places])
        axes.minorticks_off()
        axes.set(xlabel=self.sweep.axis, ylabel=LABELS[number])
        if drawn and max(drawn) > _LOGARITHMIC * min(drawn) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            axes.yaxis.set_minor_locator(NullLocator())
        elif number in ("images_per_s", "rank"):
            axes.set_ylim(0, 1.15 * max(drawn, default=1))
        return bool(drawn)

    def _dots(self, axes: Axes, number: str) -> bool:
        found = {one.name: scores for one in self.variants if (scores := self._values(one.name, number))}
        if not found:
            return False
        for place, scores in enumerate(found.values()):
            axes.plot(scores, [place] * len(scores), "o", color=OKABE_ITO[0], markerfacecolor="none", markersize=5)
            mean, deviation = statistics.mean(scores), _deviation(scores)
            axes.errorbar(mean, place, xerr=deviation, color=OKABE_ITO[0], marker="|", markersize=16, capsize=4)
        axes.set_yticks(range(len(found)), list(found))
        axes.set(xlabel=LABELS[number], ylim=(len(found) - 0.5, -0.5))
        return True

    def _curves(self, axes: Axes, number: str) -> bool:
        """Draw a number by epoch, up to the last epoch of all seeds of a network."""
        for variant in self.variants:
            curves = self._by_epoch(variant.name, number)
            if epochs := sorted(set.intersection(*map(set, curves))) if curves else []:
                scores = [[curve[epoch] for curve in curves] for epoch in epochs]
                pairs = [(statistics.mean(each), _deviation(each)) for each in scores]
                means, colour = [mean for mean, _ in pairs], self.colours[variant.line]
                axes.plot(epochs, means, color=colour, label=variant.line)
                low, high = [mean - spread for mean, spread in pairs], [mean + spread for mean, spread in pairs]
                axes.fill_between(epochs, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="epoch", ylabel=LABELS[number])
        axes.set_ylim(0)
        return bool(axes.lines)

    def _by_epoch(self, name: str, number: str) -> list[dict[int, float]]:
        """Group the curves of a network by seed."""
        curves: dict[str, dict[int, float]] = {}
        for row in self.curves:
            if row["variant"] == name:
                curves.setdefault(row["seed"], {})[int(row["epoch"])] = float(row[number])
        return list(curves.values())


def _deviation(scores: Sequence[float]) -> float:
    return statistics.stdev(scores) if len(scores) > 1 else 0.0
