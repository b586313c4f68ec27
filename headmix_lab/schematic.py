"""Draw softmax, linear attention, MHLA and Head-in-Head over one photograph, above attention maps of trained models.

    python -m headmix_lab.schematic --out attention.png
    python -m headmix_lab.schematic --model softmax=local-dir:models/dinov2_s14 mhla=runs/swap_mhla \\
        --caption "A DINOv2-derived ViT-S/14; MHLA trained after it" --out attention.png

The upper row is a sketch of how a query token, the white dot, reads the photograph of scikit-learn. The lower row shows
what the same token attends to in the last attention layer of each given model, mean over heads, as multiples of equal
weights.
"""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor

from headmix_vision.analysis.attention_matrices import attention_layers
from headmix_vision.analysis.figures import encode_png
from headmix_vision.analysis.line_charts import HEAD_IN_HEAD, LINEAR, MHLA, SOFTMAX
from headmix_vision.analysis.maps import attention_maps
from headmix_vision.console import OneLineParser, one_line_errors
from headmix_vision.data.augmentation import eval_config
from headmix_vision.errors import InputError
from headmix_vision.files.writing import atomic_path, check_place
from headmix_vision.models.swap import swap_attention
from headmix_vision.runs.networks import open_network

KINDS = {
    "softmax": ("Softmax", SOFTMAX, "Reads every token:\nN² pairs"),
    "linear": ("Linear attention", LINEAR, "Reads one summary\nof all tokens"),
    "mhla": ("MHLA", MHLA, "Reads one summary per block,\nin a learned mixture"),
    "hih": ("Head-in-Head", HEAD_IN_HEAD, "Scans the tokens, corrects\na memory of sub-heads"),
}
PHOTOGRAPHS = ("flower", "china")
_BLOCKS, _SUB_HEADS, _TOKENS, _MOST = 4, 4, 16, 6.0
_LINE = 132  # letters that fit across
_MEMORY = -0.42  # centre of what is read, above the photograph, whose sides are 1


def read_photograph(name: str, size: int) -> np.ndarray:
    """Return the middle square of a photograph of scikit-learn: uint8 [size, size, 3]."""
    from sklearn.datasets import load_sample_image

    pixels = load_sample_image(f"{name}.jpg")
    side = min(pixels.shape[:2])
    top, left = (pixels.shape[0] - side) // 2, (pixels.shape[1] - side) // 2
    square = Image.fromarray(pixels[top : top + side, left : left + side])
    return np.asarray(square.resize((size, size), Image.Resampling.BICUBIC))


def attention_of(source: str, pictures: np.ndarray, at: tuple[float, float]) -> Tensor:
    """Compute what the token at a place attends to: float64 [rows, columns], multiples of equal weights.

    Args:
        source: A model as `headmix analyze` takes it.
        pictures: uint8 [H, W, 3].
        at: Place of the query token, in parts of height and width.
    """
    network, _ = open_network(Path(source))
    net: Any = network
    if not attention_layers(net):
        swap_attention(net, "softmax")  # it computes the same
    if tuple(eval_config(net, False)["input_size"][1:]) != pictures.shape[:2] and hasattr(net, "set_input_size"):
        net.set_input_size(pictures.shape[:2])
    config = eval_config(net, False)
    mean, std = (torch.tensor(config[name]).view(3, 1, 1) for name in ("mean", "std"))
    image = (torch.from_numpy(pictures.copy()).movedim(-1, 0) / 255 - mean) / std
    with torch.inference_mode():
        net.eval()(image[None])  # the grid of swapped layers follows the last call
    side = pictures.shape[0] // net.patch_embed.patch_size[0]
    place = tuple(min(int(part * side), side - 1) for part in at)
    (found,) = attention_maps(source, net, (image[None],), [place], None)
    return found.shares.view(*found.grid) * found.shares.numel()


def draw(photograph: np.ndarray, at: tuple[float, float], maps: dict[str, Tensor], caption: str) -> Figure:
    """Draw the figure.

    Args:
        photograph: uint8 [H, W, 3], square.
        at: Place of the query token, in parts of height and width.
        maps: What the token attends to, by kind; without any the lower row is left out.
        caption: Names the models of the maps.
    """
    rows = 2 if maps else 1
    figure = Figure(figsize=(11, 4.9 if rows == 1 else 8.6), layout="constrained", facecolor="white")
    figure.suptitle("How one token (white dot) reads a photograph cut into token blocks", fontsize=16, weight="bold")
    panels = figure.subplots(rows, len(KINDS), squeeze=False, height_ratios=[1.55, 1][:rows])
    for column, (kind, (title, colour, text)) in enumerate(KINDS.items()):
        panel = panels[0, column]
        _draw_reading(panel, photograph, at, kind, colour)
        panel.set_title(title, fontsize=16, weight="bold", color=colour)
        panel.set_xlabel(text, fontsize=11.5)
        if maps:
            _draw_map(panels[1, column], photograph, at, maps.get(kind))
    if maps:
        bar = figure.colorbar(
            panels[1, list(KINDS).index(next(iter(maps)))].images[-1], ax=panels[1, :], shrink=0.85, extend="max"
        )
        bar.set_label("attention, multiples of\nequal weights", fontsize=12)
    lines = ["Above: a sketch; the shades of MHLA's blocks stand for learned weights."]
    if maps:
        lines += textwrap.wrap(f"Below: the token's attention after training. {caption}", _LINE)
    figure.supxlabel("\n".join(lines), fontsize=12)
    return figure


def _bare(panel: Axes) -> None:
    panel.set(xticks=[], yticks=[])
    panel.spines[:].set_visible(False)


def _draw_reading(panel: Axes, photograph: np.ndarray, at: tuple[float, float], kind: str, colour: str) -> None:
    """Draw the photograph in blocks, what is read above it, and the ways of reading."""
    panel.imshow(photograph, extent=(0, 1, 1, 0), alpha=0.75)
    _bare(panel)
    panel.set(xlim=(-0.02, 1.02), ylim=(1.02, -0.72), aspect="equal")
    for edge in np.linspace(0, 1, _BLOCKS + 1):
        panel.plot([edge, edge], [0, 1], color="white", linewidth=2.5)
        panel.plot([0, 1], [edge, edge], color="white", linewidth=2.5)
    y, x = at
    centres = (np.arange(_TOKENS) + 0.5) / _TOKENS
    if kind == "softmax":
        for to_y in centres[::2]:
            for to_x in centres[::2]:
                panel.plot([x, to_x], [y, to_y], color=colour, linewidth=0.9, alpha=0.8)
        panel.text(0.5, _MEMORY, "no summary", ha="center", va="center", fontsize=13, color="dimgray")
    elif kind == "linear":
        _box(panel, 0.5, _MEMORY, 0.3, colour)
        for from_x in centres[::2]:
            panel.plot([from_x, 0.5], [0.03, _MEMORY + 0.16], color=colour, linewidth=1, alpha=0.7)
        _arrow(panel, (0.5, _MEMORY + 0.16), (x, y), "black")
    elif kind == "mhla":
        own = min(int(y * _BLOCKS), _BLOCKS - 1), min(int(x * _BLOCKS), _BLOCKS - 1)
        for row in range(_BLOCKS):
            for column in range(_BLOCKS):
                near = np.exp(-0.8 * np.hypot(row - own[0], column - own[1]))
                left, top = 0.5 + (column - 1.5) * 0.15, _MEMORY + (row - 1.5) * 0.13
                _box(panel, left, top, 0.11, colour, alpha=0.2 + 0.8 * near)
        panel.add_patch(
            Rectangle((own[1] / 4, own[0] / 4), 0.25, 0.25, fill=False, edgecolor=colour, linewidth=3, zorder=4)
        )
        _arrow(panel, (0.5, _MEMORY + 0.27), (x, y), "black")
    else:
        xs, ys = [], []
        for place in np.linspace(0.5 / 8, 1 - 0.5 / 8, 8):
            xs += [0.04, 0.96]
            ys += [place, place]
        panel.plot(xs, ys, color=colour, linewidth=1.8)
        _arrow(panel, (xs[-2], ys[-1]), (0.98, ys[-1]), colour)
        for part in range(_SUB_HEADS):
            _box(panel, 0.5 + (part - 1.5) * 0.19, _MEMORY, 0.13, colour, alpha=0.4 + 0.2 * part)
            if part:
                middle = 0.5 + (part - 2) * 0.19
                style: Any = {"arrowstyle": "<->", "linewidth": 1.5}
                panel.annotate("", (middle + 0.05, _MEMORY), (middle - 0.05, _MEMORY), arrowprops=style)
        _arrow(panel, (0.5, _MEMORY + 0.09), (x, y), "black")
    panel.plot(x, y, "o", color="white", markeredgecolor="black", markersize=9, zorder=5)


def _box(panel: Axes, x: float, y: float, side: float, colour: str, alpha: float = 0.9) -> None:
    panel.add_patch(Rectangle((x - side / 2, y - side / 2), side, side, color=colour, alpha=alpha, linewidth=0))


def _arrow(panel: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    panel.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.8, "shrinkB": 4})


def _draw_map(panel: Axes, photograph: np.ndarray, at: tuple[float, float], shares: Tensor | None) -> None:
    _bare(panel)
    if shares is None:
        panel.text(0.5, 0.5, "not trained", ha="center", va="center", fontsize=12, color="dimgray")
        return
    grey = np.repeat(photograph.mean(-1, keepdims=True) / 255, 3, -1)
    panel.imshow(0.5 + 0.5 * grey, extent=(0, 1, 1, 0))
    over = np.clip(shares.numpy() / _MOST, 0, 1)
    panel.imshow(shares.numpy(), extent=(0, 1, 1, 0), cmap="plasma", vmin=0, vmax=_MOST, alpha=0.15 + 0.8 * over)
    panel.plot(at[1], at[0], "o", color="white", markeredgecolor="black", markersize=9)


def _pair(word: str) -> tuple[str, str]:
    kind, _, source = word.partition("=")
    if kind not in KINDS or not source:
        raise argparse.ArgumentTypeError(f"{word!r} must be KIND=MODEL, KIND one of {', '.join(KINDS)}")
    return kind, source


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; wrong input ends the process with one line and exit status 2."""
    parser = OneLineParser(
        prog="python -m headmix_lab.schematic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", nargs="+", type=_pair, default=[], metavar="KIND=MODEL", help=f"KIND: {', '.join(KINDS)}")
    add("--photograph", choices=PHOTOGRAPHS, default="flower", help="photograph of scikit-learn (%(default)s)")
    add("--size", type=int, default=224, help="side of the photograph in pixels (%(default)s)")
    add("--token", type=float, nargs=2, default=(0.45, 0.55), help="place of the query token, 0 to 1: down, right")
    add("--caption", default="", help="names the models below the maps")
    add("--out", type=Path, required=True, help="PNG file to write")
    given = parser.parse_args(args)
    with one_line_errors():
        if not all(0 <= part < 1 for part in given.token):
            raise InputError(f"--token must be two numbers from 0 to below 1, got {' '.join(map(str, given.token))}")
        if not 1 <= given.size <= 4096:
            raise InputError(f"--size must be from 1 to 4096, got {given.size}")
        check_place(given.out)
        photograph, at = read_photograph(given.photograph, given.size), tuple(given.token)
        maps = {kind: attention_of(source, photograph, at) for kind, source in given.model}
        with atomic_path(given.out) as temporary:
            temporary.write_bytes(encode_png(draw(photograph, at, maps, given.caption)))
        print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
