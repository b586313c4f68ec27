"""What bench_mhla.py prints and draws from its rows (the rows of the CSV)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.columns import Column, Row
from benchmarks.measuring import format_table
from headmix_vision.analysis.lines import BLACK, MHLA, OTHERS, SOFTMAX, label_ends, line_figure, save_svg


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


# What is drawn: a plot of more lines says less.
LINES = {
    "auto": ("MHLA", MHLA),
    "cudnn": ("cuDNN", SOFTMAX),
    "flash": ("FlashAttention 2", OTHERS[0]),
    "flash4": ("FlashAttention 4", OTHERS[1]),
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Time of forward and backward against the number of tokens, for as many in all, and the floor."""
    rows = sorted((row for row in rows if row["group"] == "sweep"), key=lambda row: int(row["tokens"]))
    some = rows[-1]
    figure, ((axes,),) = line_figure()
    for name, (label, colour) in LINES.items():
        points = [(int(row["tokens"]), float(time)) for row in rows if row["column"] == name
                  and (time := row["forward_backward_ms"])]  # fmt: skip
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=3 if name == "auto" else 2, label=label)
    floors = {int(row["tokens"]): float(row["forward_backward_floor_ms"]) for row in rows}
    axes.plot(list(floors), list(floors.values()), color=BLACK, linestyle="--", linewidth=1, label="memory's floor")
    axes.set(yscale="log", xlabel="tokens of an image", ylabel="forward and backward, ms")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(floors)[::3], [f"{n:,}" for n in list(floors)[::3]])
    axes.yaxis.set_major_formatter("{x:g}")
    total = int(some["batch"]) * int(some["tokens"])
    axes.set_title(f"{some['device']}: {total:,} tokens in all, {some['heads']} heads of {some['head_dim']}, bf16")
    label_ends(axes)
    save_svg(path, figure)
