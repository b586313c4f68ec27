"""Runs of `head_mixes` and `stable_rates`: networks, their FLOPs, data, options, and one run.

C width, N tokens.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from experiments.harness.graphed_training import Plateau, train_side_by_side
from headmix_vision.data.datasets import DATASETS
from headmix_vision.data.datasets.base import BatchSource, DatasetEntry, Source, SplitRequest
from headmix_vision.data.datasets.canvas import CanvasDigits
from headmix_vision.data.datasets.digits import Digits
from headmix_vision.data.datasets.parts import hold_out
from headmix_vision.runs.networks import create_network

CORES = ("softmax", "linear", "mhla", "hih")
MIXES = ("plain", "iha", "mea")
PSEUDO_HEADS = 2
FLOPS_TOLERANCE = 0.05
PARAMETER_TOLERANCE = 0.02
MLP_RATIO = 4.0
# Digits in patches of 2 x 2 pixels: with one token for each pixel a model without CPE is far from the end of its
# training after thirty epochs. Without CPE canvases are not learned.
SHAPES: dict[str, dict[str, Any]] = {
    "digits": {"patch_size": 2, "block_grid": 2, "embed_dim": 64, "depth": 4, "num_heads": 4, "cpe": False},
    # Boards of 60 pixels in patches of one cell, 36 tokens. Blocks of 3 x 3 tokens: regions are 2 x 2.
    "canvas": {"patch_size": 10, "block_grid": 2, "embed_dim": 64, "depth": 4, "num_heads": 4, "cpe": True},
}
CLASSES = {"digits": 10, "canvas": 9}
IMAGE_SIZES = {"digits": 8, "canvas": 60}
TUNING_SHARE = 5  # every fifth training image of digits is left out for tuning
STOPPING_SEED = 1
STOPPING_LENGTH = 1000
# With the 50,000 canvases of the recipe every network is right in more than 99 % of all cases; so few leave a gap.
TRAINING_BOARDS = 1000
VALIDATION_EPOCHS = 5
REPORTED = "reported"  # split of the canvases of other handwriting


class Network(NamedTuple):
    """A network of the comparison: its task, attention, and the width of its MLPs over C.

    `options` are further arguments of the model, as sorted pairs.
    """

    task: str
    core: str
    mix: str
    mlp_ratio: float = MLP_RATIO
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Name in timm."""
        attention = self.core if self.mix == "plain" else f"{self.core}_{self.mix}"
        return f"deit_{attention}_digits"

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the model."""
        mix = {"head_mix_args": {"pseudo_heads": PSEUDO_HEADS}} if self.mix == "iha" else {}
        return {**SHAPES[self.task], "mlp_ratio": self.mlp_ratio, **mix, **dict(self.options)}

    def build(self) -> nn.Module:
        """Create the module."""
        return create_network(self.name, CLASSES[self.task], IMAGE_SIZES[self.task], self.arguments)


class Size(NamedTuple):
    """Parameters, and operations of a forward pass of one image, multiply and add as two."""

    parameters: int
    flops: int


@cache
def size_of(network: Network) -> Size:
    """Count parameters and the operations of all matrix products."""
    with torch.device("meta"):
        module: Any = network.build()
    patches = module.patch_embed.num_patches
    tokens = patches + module.num_prefix_tokens
    flops = 2 * patches * module.patch_embed.proj.weight.numel() + 2 * module.head.weight.numel()
    for block in module.blocks:
        flops += block.attn.flops() + 2 * tokens * (block.mlp.fc1.weight.numel() + block.mlp.fc2.weight.numel())
    return Size(sum(parameter.numel() for parameter in module.parameters()), flops)


@cache
def of_equal_flops(network: Network) -> Network:
    """Narrow the MLPs of a network with a mix until it costs what its core costs without; itself if it does already."""
    wanted, given = size_of(network._replace(mix="plain")).flops, size_of(network).flops
    if abs(given / wanted - 1) <= FLOPS_TOLERANCE:
        return network
    hidden = round(network.mlp_ratio * SHAPES[network.task]["embed_dim"])
    per_unit = (given - size_of(network._replace(mlp_ratio=0.5 * network.mlp_ratio)).flops) / (hidden / 2)
    width = hidden - round((given - wanted) / per_unit)
    return network._replace(mlp_ratio=width / SHAPES[network.task]["embed_dim"])


def check_equal(network: Network, budget: str) -> None:
    """Hold a network to the budget of its core without a mix.

    Raises:
        AssertionError: Parameters differ by more than 2 %, or FLOPs by more than 5 %.
    """
    ours, plain = size_of(network), size_of(Network(network.task, network.core, "plain"))
    tolerance = {"parameters": PARAMETER_TOLERANCE, "flops": FLOPS_TOLERANCE}[budget]
    difference = getattr(ours, budget) / getattr(plain, budget) - 1
    assert abs(difference) <= tolerance, f"{network} differs in {budget} by {100 * difference:.1f} %"


def open_digits_for_tuning(request: SplitRequest) -> Source:
    """Four fifths of the training digits to train on, and the other fifth for validation."""
    return hold_out(Digits("train", request.channels), TUNING_SHARE, held=request.split != request.train_split)


def open_few_canvases(request: SplitRequest) -> BatchSource:
    """A few of the training canvases, for validation others of the same handwriting, for scores those of other."""
    if request.split == request.train_split:
        return CanvasDigits("train", IMAGE_SIZES["canvas"], channels=request.channels, length=TRAINING_BOARDS)
    if request.split == REPORTED:
        return CanvasDigits("validation", IMAGE_SIZES["canvas"], channels=request.channels)
    return CanvasDigits(
        "train", IMAGE_SIZES["canvas"], STOPPING_SEED, channels=request.channels, length=STOPPING_LENGTH
    )


# The data sets of tuning and of stopping rules: none of their images is one that a score is reported on.
DATASETS["digits-tuning"] = DatasetEntry(
    "experiments.harness.classifier_runs:open_digits_for_tuning", uses=("classification",), exact=True
)
DATASETS["canvas-few"] = DatasetEntry(
    "experiments.harness.classifier_runs:open_few_canvases", uses=("classification",), exact=True
)


class Run(NamedTuple):
    """One training run.

    Args:
        network: What is trained.
        dataset: Data set.
        rate: Peak learning rate.
        seed: Seed of everything.
        epochs: Epochs, at most.
        patience: Validations, one every fifth epoch, without a rise of the accuracy after which a run ends; 0 for a
            run of all epochs.
        options: Further options of `headmix-train-cls fit`.
    """

    network: Network
    dataset: str
    rate: float
    seed: int
    epochs: int
    patience: int = 0
    options: tuple[str, ...] = ()

    @property
    def kind(self) -> Run:
        """What runs that can be trained side by side share: the data and the number of steps."""
        anything = Network(self.network.task, "softmax", "plain")
        return self._replace(network=anything, rate=0.0, seed=0)

    def command(self) -> list[str]:
        """Options of `headmix-train-cls fit`."""
        network = self.network
        options: list[object] = ["-c", network.task, "--model.name", network.name]
        options += ["--model.model_args", json.dumps(network.arguments)]
        options += ["--model.num_classes", CLASSES[network.task], "--model.img_size", IMAGE_SIZES[network.task]]
        options += ["--data.dataset", self.dataset, "--model.optimizer.lr", self.rate, "--seed_everything", self.seed]
        options += ["--trainer.max_epochs", self.epochs]
        if network.task == "canvas":
            options += ["--data.test_split", REPORTED]
        return [*map(str, options), *self.options]


class Result(NamedTuple):
    """What a run came to; all nan if its numbers stopped being finite.

    Args:
        top1: Accuracy on the validation split of its data set after the last epoch, in percent.
        loss: Training loss of the last epoch.
        epochs: Epochs trained.
        test_top1: Accuracy on the canvases that are reported, in percent; equal to `top1` for digits.
    """

    top1: float
    loss: float
    epochs: int
    test_top1: float


def train_group(runs: list[Run], device: str) -> list[Result]:
    """Train and score runs of one kind side by side on a device."""
    patience, epochs = runs[0].patience, runs[0].epochs
    every = min(VALIDATION_EPOCHS, epochs) if patience else None
    trained = train_side_by_side(
        [run.command() for run in runs],
        torch.device(device),
        rules=[Plateau(patience, epochs // 3) for _ in runs],
        validate_every_n_epochs=every,
    )
    return [Result(100 * each.top1, each.loss, each.epochs, 100 * each.test_top1) for each in trained]
