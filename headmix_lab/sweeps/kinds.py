"""Sweeps: their networks and figures. A new sweep is an entry in `SWEEPS`."""

from dataclasses import dataclass, field
from typing import Any

ACCURACY = "accuracy"
SIDES = (16, 32, 64)  # of the token grids of `length`: 256, 1,024 and 4,096 tokens


@dataclass(frozen=True)
class Variant:
    """One network of a sweep.

    Args:
        name: What it is called, in tables and in names of folders.
        line: The line of the figure on which it lies.
        x: Its place along the axis of the figure.
        core: The core of all its layers.
        side_tokens: Tokens along height and width, to which images are resized; the recipe's when None.
        model_args: Further arguments of the model.
    """

    name: str
    line: str
    x: float = 0.0
    core: str = "mhla"
    side_tokens: int | None = None
    model_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """A comparison of networks.

    Args:
        about: What is varied, in one line.
        variants: The networks; in a figure they form five lines at most.
        draw: The kind of figure: `curves` over epochs, `lines` over `x`, or a `dot` for each network.
        numbers: What is drawn, a panel for each: a column of the table, `ACCURACY` being that of the accuracy which
            runs are chosen by; of curves the end of the names of metrics.
        axis: What `x` is.
        options: Further options of the training.
    """

    about: str
    variants: tuple[Variant, ...]
    draw: str
    numbers: tuple[str, ...]
    axis: str = ""
    options: tuple[str, ...] = ()


CORES = {"softmax": "softmax", "linear": "linear", "mhla": "MHLA"}
_ALL_CORES = (*CORES, "hih")
_MODULES = {
    "plain": {"cpe": False, "output_gate": False},
    "CPE": {"cpe": True, "output_gate": False},
    "gate": {"cpe": False, "output_gate": True},
    "CPE+gate": {"cpe": True, "output_gate": True},
}


def _mixing(init: str, trainable: bool) -> dict[str, Any]:
    return {"core_args": {"mixing_init": init, "mixing_trainable": trainable}}


def _rank_every(epochs: int) -> tuple[str, ...]:
    """Return the options that log the rank every `epochs` epochs at little cost.

    A run ends 20 epochs after its best, so the last value belongs to weights that hardly improve. One image and
    a part of the queries bound the time of a decomposition: two seconds of a CPU core for a head at 4,096 tokens.
    """
    return ("--analysis.every_n_epochs", str(epochs), "--analysis.images", "1", "--analysis.queries", "1024")


SWEEPS = {
    "cores": Sweep(
        "the core, each with and without convolutional positions (CPE), and Head-in-Head without its convolution",
        (
            *(
                Variant(f"{core}{'+CPE' if cpe else ''}", core, core=core, model_args={"cpe": cpe})
                for cpe in (False, True)
                for core in _ALL_CORES
            ),
            Variant("hih-no-conv", "hih", core="hih", model_args={"cpe": False, "core_args": {"conv_size": 0}}),
        ),
        "dots",
        ("test_top1_percent", "test_balanced_percent", "images_per_s"),
    ),
    "rank_over_training": Sweep(
        "the rank of attention matrices in the course of the training, by core",
        tuple(Variant(core, label, core=core) for core, label in CORES.items()),
        "curves",
        ("rank",),
        options=("--analysis.every_n_epochs", "1"),
    ),
    "block_count": Sweep(
        "the number of token blocks of MHLA: accuracy, throughput and rank of the attention matrices",
        tuple(Variant(f"M={n * n}", "MHLA", n * n, model_args={"block_grid": n}) for n in (1, 2, 4, 8)),
        "lines",
        (ACCURACY, "images_per_s", "rank"),
        "token blocks M",
        _rank_every(5),
    ),
    "modules": Sweep(
        "MHLA with convolutional positions (CPE) and output gate, and the start of its block mixing, learned or kept",
        (
            *(Variant(name, name, model_args=arguments) for name, arguments in _MODULES.items()),
            *(
                Variant(name, name, model_args=_MODULES["plain"] | _mixing(init, trainable))
                for name, init, trainable in (
                    ("plain-uniform", "uniform", True),
                    ("plain-locality-kept", "locality", False),
                    ("plain-uniform-kept", "uniform", False),
                )
            ),
        ),
        "dots",
        (ACCURACY,),
    ),
    "length": Sweep(
        "the number of tokens, by core, images resized: accuracy, throughput and rank of the attention matrices",
        tuple(
            Variant(f"{core}-{side * side}", label, side * side, core, side)
            for core, label in CORES.items()
            for side in SIDES
        ),
        "lines",
        (ACCURACY, "images_per_s", "rank"),
        "tokens",
        _rank_every(10),
    ),
}
