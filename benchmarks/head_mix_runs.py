"""The runs of `compare_head_mixes.py` and `stable_rates.py`: networks, their FLOPs, data, options, and one run.

C width, N tokens.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from training_runs import fit, read_metric

from headmix_vision.data.datasets import DATASETS
from headmix_vision.data.datasets.base import BatchSource, DatasetEntry, Source, SplitRequest
from headmix_vision.data.datasets.canvas import CanvasDigits
from headmix_vision.data.datasets.digits import Digits
from headmix_vision.runs.directory import LAST
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

    def build(self, checkpoint: str | None = None) -> nn.Module:
        """Create the module."""
        return create_network(self.name, CLASSES[self.task], IMAGE_SIZES[self.task], self.arguments, checkpoint)


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


class Part(Source):
    """Some samples of another source.

    Args:
        source: The other source.
        indices: Which of its samples.
    """

    in_memory = True

    def __init__(self, source: Source, indices: list[int]) -> None:
        self.source, self.indices, self.class_names = source, indices, source.class_names

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> tuple[Any, int]:
        return self.source.read(self.indices[index])


def open_digits_for_tuning(request: SplitRequest) -> Source:
    """Four fifths of the training digits to train on, and the other fifth for validation."""
    digits = Digits("train", request.channels)
    held_out = request.split != request.train_split
    return Part(digits, [i for i in range(len(digits)) if (i % TUNING_SHARE == 0) == held_out])


def open_few_canvases(request: SplitRequest) -> BatchSource:
    """A few of the training canvases, and for validation others of the same handwriting."""
    if request.split == request.train_split:
        return CanvasDigits("train", IMAGE_SIZES["canvas"], channels=request.channels, length=TRAINING_BOARDS)
    return CanvasDigits(
        "train", IMAGE_SIZES["canvas"], STOPPING_SEED, channels=request.channels, length=STOPPING_LENGTH
    )


# The data sets of tuning and of stopping rules: none of their images is one that a score is reported on.
DATASETS["digits-tuning"] = DatasetEntry("head_mix_runs:open_digits_for_tuning", uses=("classification",), exact=True)
DATASETS["canvas-few"] = DatasetEntry("head_mix_runs:open_few_canvases", uses=("classification",), exact=True)


class StopOnPlateau(Callback):
    """Ends training when the validation accuracy has not risen for some validations.

    Args:
        patience: Validations without a rise.
        min_epochs: Epochs that are trained in any case.
        rise: What counts as a rise of the highest accuracy so far, as a share.
    """

    def __init__(self, patience: int, min_epochs: int, rise: float = 0.005) -> None:
        self.patience, self.min_epochs, self.rise = patience, min_epochs, rise
        self.best, self.waited = 0.0, 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compares the accuracy of this validation."""
        if trainer.sanity_checking:
            return
        top1 = float(trainer.callback_metrics["val/top1"])
        self.waited = 0 if top1 >= self.best + self.rise else self.waited + 1
        self.best = max(self.best, top1) if not self.waited else self.best
        if self.waited >= self.patience and trainer.current_epoch + 1 >= self.min_epochs:
            trainer.should_stop = True


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

    def command(self, device: str) -> list[object]:
        """Options of `headmix-train-cls fit -c TASK`."""
        network = self.network
        options: list[object] = ["--model.name", network.name, "--model.model_args", json.dumps(network.arguments)]
        options += ["--model.num_classes", CLASSES[network.task], "--model.img_size", IMAGE_SIZES[network.task]]
        options += ["--data.dataset", self.dataset, "--model.optimizer.lr", self.rate, "--seed_everything", self.seed]
        options += ["--trainer.max_epochs", self.epochs, "--trainer.accelerator", device, "--trainer.devices", 1]
        options += ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
        if self.patience:
            rule = {"patience": self.patience, "min_epochs": self.epochs // 3}
            stop = [{"class_path": f"{__name__}.{StopOnPlateau.__name__}", "init_args": rule}]
            options += ["--trainer.callbacks", json.dumps(stop), "--trainer.check_val_every_n_epoch"]
            options += [min(VALIDATION_EPOCHS, self.epochs)]
        else:
            options += ["--trainer.check_val_every_n_epoch", self.epochs]
        return [*options, *self.options]


class Result(NamedTuple):
    """What a run came to.

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


def train(run: Run, directory: Path, device: str) -> Result:
    """Train and score; a run whose numbers stop being finite raises `RunFailed`."""
    fit(run.network.task, directory, run.command(device))
    (*_, top1), losses = read_metric(directory, "val/top1"), read_metric(directory, "train/loss")
    tested = score_canvas(run.network, directory) if run.network.task == "canvas" else top1
    return Result(100 * top1, losses[-1], len(losses), 100 * tested)


@torch.no_grad()
def score_canvas(network: Network, directory: Path, length: int | None = None) -> float:
    """Share of the validation canvases, of handwriting not trained on, that the averaged weights classify."""
    module: Any = network.build(str(directory / LAST)).eval()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module.to(device)
    canvases = CanvasDigits("validation", IMAGE_SIZES["canvas"], length=length)
    mean, std = module.pretrained_cfg["mean"][0], module.pretrained_cfg["std"][0]
    right = 0
    for indices in torch.arange(len(canvases)).split(500):
        images, labels = canvases.read_batch(indices.tolist())
        logits: Tensor = module(((images - mean) / std).to(device))
        right += int((logits.argmax(-1).cpu() == labels).sum())
    return right / len(canvases)
