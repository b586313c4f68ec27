"""What bench_mhla.py prints and draws from its rows (the rows of the CSV)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from columns import Column, Row
from matplotlib.figure import Figure
from measuring import format_table
from mhla_cases import COLUMNS

from headmix_vision.files.atomic import atomic_path


def print_tables(rows: Sequence[Row], columns: Sequence[Column]) -> None:
    """Times in ms with their ratio to the floor, peak memory, and how many times slower each column is than ours."""
    names = [c.name for c in columns]
    cells = {(row["shape"], row["column"]): row for row in rows}
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    for title, key in (("forward", "forward"), ("forward with backward", "forward_backward")):
        table = []
        for shape in shapes:
            some = next(row for row in rows if row["shape"] == shape)
            floor = some[f"{key}_floor_ms"]
            times = [cells.get((shape, name), {}).get(f"{key}_ms") for name in names]
            table.append([shape, f"{floor:.4f}", *("-" if t is None else f"{t:.3f} {t / floor:6.2f}x" for t in times)])
        print(f"\n{title}: ms and ratio to the floor\n{format_table(['shape', 'floor', *names], table)}")

    peaks = [[cells.get((shape, name), {}).get("peak_mib") for name in names] for shape in shapes]
    table = [[s, *("-" if x is None else f"{x:.0f}" for x in row)] for s, row in zip(shapes, peaks, strict=True)]
    print(f"\npeak memory of forward with backward beyond the inputs: MiB\n{format_table(['shape', *names], table)}")

    first = next((c.name for c in columns if c.ours), None)
    if first is None:
        return
    others = [name for name in names if name != first]
    table = [[s, *(_ratios(cells.get((s, name), {}), cells.get((s, first), {})) for name in others)] for s in shapes]
    print(f"\ntimes slower than {first}: forward / forward with backward\n{format_table(['shape', *others], table)}")


def _ratios(row: Row, ours: Row) -> str:
    pairs = [(row.get(key), ours.get(key)) for key in ("forward_ms", "forward_backward_ms")]
    return " / ".join("-" if x is None or y is None else f"{x / y:.2f}" for x, y in pairs)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Time against the number of tokens at a fixed number of tokens in the batch, log-log, with the floor."""
    rows = sorted((row for row in rows if row["group"] == "sweep"), key=lambda row: row["tokens"])
    some = rows[-1]
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, key, title in zip(
        axes, ("forward", "forward_backward"), ("forward", "forward with backward"), strict=True
    ):
        for name in dict.fromkeys(row["column"] for row in rows):
            points = [(r["tokens"], r[f"{key}_ms"]) for r in rows if r["column"] == name and r[f"{key}_ms"] is not None]
            ours = COLUMNS[name].ours
            if points:
                axis.plot(
                    *zip(*points, strict=True),
                    marker="o",
                    markersize=3,
                    linewidth={"auto": 5.0}.get(name, 2.0 if ours else 1.3),
                    alpha=0.4 if name == "auto" else 1.0,
                    label=f"mhla {name}" if ours else name,
                )
        tokens = sorted({row["tokens"] for row in rows})
        floors = [next(r[f"{key}_floor_ms"] for r in rows if r["tokens"] == n) for n in tokens]
        axis.plot(tokens, floors, color="black", linestyle="--", linewidth=1, label="copy floor")
        axis.set(yscale="log", xlabel="tokens N", title=title)
        axis.set_xscale("log", base=2)
        axis.set_xticks(tokens[::2], [f"{n:,}" for n in tokens[::2]])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    total = some["batch"] * some["tokens"]
    figure.suptitle(
        f"{some['device']}: {total:,} tokens in all, {some['heads']} heads of {some['head_dim']}, bf16, 16 blocks"
    )
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
