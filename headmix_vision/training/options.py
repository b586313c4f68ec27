"""Define the groups of training options. The defaults follow the ImageNet recipe of MHLA (arXiv 2601.07832)."""

import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Timer
from timm.optim import list_optimizers
from torch.distributed import is_torchelastic_launched

from headmix_vision.errors import InputError, check_counts, check_numbers, check_positive, suggest
from headmix_vision.files.reading import check_workers

MAX_ROWS, MAX_FID_SAMPLES = 1000, 1_000_000


def require(condition: bool, message: str) -> None:
    """Raise `InputError(message)` unless the condition holds."""
    if not condition:
        raise InputError(message)


def _check_name(opt: str) -> None:
    known, asked = list(map(str, list_optimizers())), opt.lower().removeprefix("lookahead_")
    if asked not in known:
        hint = suggest(asked, known, "timm.optim.list_optimizers() lists the known ones")
        raise InputError(f"unknown optimizer.opt {opt!r}{hint}")


@dataclass
class OptimizerConfig:
    """Optimizer, made by `timm.optim.create_optimizer_v2`.

    Biases, norms and whatever the model lists in `no_weight_decay()` are not decayed.

    Args:
        opt: Name of the optimizer in timm, for example `adamw`, `lamb`, `sgd`.
        lr: Peak learning rate; it is not scaled by the batch size.
        weight_decay: Weight decay.
        layer_decay: Factor of the learning rate from each layer to the one below it; none when null.
        args: Further arguments of the optimizer, for example `{betas: [0.9, 0.95]}`.
    """

    opt: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    layer_decay: float | None = None
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_name(self.opt)
        require(0 < self.lr < math.inf, f"optimizer.lr must be positive and finite, got {self.lr}")
        check_numbers(0, **{"optimizer.weight_decay": self.weight_decay})
        decay = self.layer_decay
        require(decay is None or 0 < decay <= 1, f"optimizer.layer_decay must be null or in (0, 1], got {decay}")
        taken = sorted(self.args.keys() & {"opt", "lr", "weight_decay", "layer_decay"})
        require(not taken, f"optimizer.args must not hold {', '.join(taken)}, an option of optimizer itself")


@dataclass
class ScheduleConfig:
    """Learning rate over the optimizer steps of the run, made by `timm.scheduler.create_scheduler_v2`.

    Its length is that of the run (`trainer.max_epochs` or `trainer.max_steps`).

    Args:
        sched: `cosine`, `wsd` (constant, then a decay over the last fifth) or `constant`; all after the warm-up.
        warmup_epochs: Epochs of linear warm-up, part of the run; fractions are allowed.
        warmup_lr: Learning rate of the first step.
        min_lr: Learning rate at the end.
    """

    sched: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_epochs: float = 10.0
    warmup_lr: float = 1e-6
    min_lr: float = 1e-5

    def __post_init__(self) -> None:
        check_numbers(
            0, **{f"schedule.{name}": getattr(self, name) for name in ("warmup_epochs", "warmup_lr", "min_lr")}
        )


@dataclass
class LossConfig:
    """Training loss from `timm.loss`.

    Args:
        kind: `cross_entropy`, or `bce`: one binary cross entropy per class.
        smoothing: Label smoothing.
        bce_target_threshold: With `bce`, soft targets above this become 1 and the rest 0; kept soft when null.
    """

    kind: Literal["cross_entropy", "bce"] = "cross_entropy"
    smoothing: float = 0.1
    bce_target_threshold: float | None = None

    def __post_init__(self) -> None:
        require(0 <= self.smoothing < 1, f"loss.smoothing must be in [0, 1), got {self.smoothing}")
        require(
            self.bce_target_threshold is None or self.kind == "bce",
            f"loss.bce_target_threshold applies to loss.kind=bce only, got loss.kind={self.kind}",
        )
        threshold = self.bce_target_threshold
        require(
            threshold is None or 0 <= threshold < 1,
            f"loss.bce_target_threshold must be null or in [0, 1), got {threshold}",
        )


@dataclass
class MixupConfig:
    """Mixup and CutMix by `timm.data.Mixup`, applied to the batch on its device; off when both alphas are 0.

    Args:
        mixup_alpha: Beta distribution of mixup, from 1e-6 to 1e6; 0 turns it off.
        cutmix_alpha: Beta distribution of CutMix, likewise.
        prob: Probability of mixing a batch (or an image, by `mode`).
        switch_prob: Probability of CutMix instead of mixup when both are on.
        mode: Draw per `batch`, per `pair` of images or per image (`elem`).
    """

    mixup_alpha: float = 0.2
    cutmix_alpha: float = 1.0
    prob: float = 1.0
    switch_prob: float = 0.5
    mode: Literal["batch", "pair", "elem"] = "batch"

    def __post_init__(self) -> None:
        for name in ("mixup_alpha", "cutmix_alpha"):
            if getattr(self, name) != 0:  # NumPy draws NaN beyond
                check_numbers(1e-6, 1e6, **{f"mixup.{name}": getattr(self, name)})
        check_numbers(0, 1, **{f"mixup.{name}": getattr(self, name) for name in ("prob", "switch_prob")})

    @property
    def enabled(self) -> bool:
        """Whether batches are mixed at all."""
        return self.prob > 0 and (self.mixup_alpha > 0 or self.cutmix_alpha > 0)


@dataclass
class EmaConfig:
    """Exponential moving average of the weights, which is then what is validated and exported.

    Args:
        decay: Decay per optimizer step, reached by a warm-up min(decay, (1 + n) / (10 + n)); no average when null.
    """

    decay: float | None = 0.9996

    def __post_init__(self) -> None:
        require(self.decay is None or 0 <= self.decay < 1, f"ema.decay must be null or in [0, 1), got {self.decay}")


@dataclass
class SampleGridConfig:
    """Samples drawn during training from fixed noise and labels, as PNG files and in TensorBoard.

    Args:
        every_n_steps: Draw after every so many optimizer steps, and at the end; never when null.
        classes: Labels, one column each; the first ten when null.
        rows: Samples of each label.
        steps: Sampling steps.
        scheduler: Sampler, see `headmix sample`; the objective's own when null.
        guidance: Scale of classifier-free guidance, 1 for none.
    """

    every_n_steps: int | None = 1000
    classes: list[int] | None = None
    rows: int = 4
    steps: int = 25
    scheduler: str | None = None
    guidance: float = 1.0

    def __post_init__(self) -> None:
        for name in ("every_n_steps", "rows", "steps"):
            if getattr(self, name) is not None:
                most = MAX_ROWS if name == "rows" else math.inf
                check_counts(1, most, **{f"samples.{name}": getattr(self, name)})
        check_numbers(0, **{"samples.guidance": self.guidance})


@dataclass
class FidConfig:
    """Fréchet distance of samples during training, drawn with the averaged weights if there are any.

    A number to see progress by; for one to report, draw with `headmix sample` and score with `headmix evaluate`.

    Args:
        every_n_epochs: Score after every so many epochs; never when null.
        real: Real images or their statistics, as for `headmix evaluate`: a folder, an npz file, a data set such
            as `digits`, or a statistics file. Images are brought to the (square) size of those that the model makes.
        features: `inception`, `digits`, `lite0:PATH` or a path, as there.
        num: Number of samples, all classes in turn.
        steps: Sampling steps.
        scheduler: Sampler; the objective's own when null.
        guidance: Scale of classifier-free guidance, 1 for none.
        batch_size: Samples at a time in each process, at least 2.
    """

    every_n_epochs: int | None = None
    real: str = "digits"
    features: str = "digits"
    num: int = 500
    steps: int = 25
    scheduler: str | None = None
    guidance: float = 1.0
    batch_size: int = 100

    def __post_init__(self) -> None:
        for name, least in (("every_n_epochs", 1), ("num", 2), ("steps", 1), ("batch_size", 2)):
            if getattr(self, name) is not None:
                most = math.inf if name == "every_n_epochs" else MAX_FID_SAMPLES
                check_counts(least, most, **{f"fid.{name}": getattr(self, name)})
        check_numbers(0, **{"fid.guidance": self.guidance})


@dataclass
class AnalysisConfig:
    """Numbers of the attention matrices, logged in validation as `analysis/rank/layer3` and so on, means over heads.

    They are computed as by `headmix analyze rank` and `entropy`, of the validated weights. One process computes them,
    on its device in float64: a copy of the network runs on a few images, and each head has one singular value
    decomposition for each of them.

    Args:
        every_n_epochs: Compute in the validation of every so many epochs, and try before the training; never when null.
        images: So many first images of the validation split.
        queries: So many query tokens, drawn by a fixed seed; all when null.
    """

    every_n_epochs: int | None = None
    images: int = 2
    queries: int | None = 256

    def __post_init__(self) -> None:
        for name in ("every_n_epochs", "images", "queries"):
            if getattr(self, name) is not None:
                check_counts(1, **{f"analysis.{name}": getattr(self, name)})


def mode_of(monitor: str) -> Literal["min", "max"]:
    """Return `min` for a loss and `max` for every other metric of the validation."""
    return "min" if monitor.endswith(("loss", "error")) else "max"


@dataclass
class EarlyStoppingConfig:
    """End of a run when validation has stopped to improve, by Lightning's `EarlyStopping`; resuming changes nothing.

    The schedule does not know of it: `model.schedule.sched=constant` goes with it.

    Args:
        patience: End after so many validations in a row without a better one; run to the end when null.
        monitor: What validation logs, for example `val/loss`; losses are to fall, all else to rise. That of
            `best.monitor` when null, of generators `val/loss`.
        min_delta: By how much a better validation is better.
    """

    patience: int | None = None
    monitor: str | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.patience is not None:
            check_counts(1, **{"early_stopping.patience": self.patience})
        check_numbers(0, **{"early_stopping.min_delta": self.min_delta})


Monitored = Literal["val/top1", "val/balanced", "val/loss"]
MONITORED = {
    "val/top1": "top-1",
    "val/balanced": "balanced accuracy",
    "val/loss": "loss",
    "val/feature_cosine": "feature cosine",
    "val/attention_error": "attention error",
}
"""By what a checkpoint of a classifier is chosen, and what it is called."""


@dataclass
class BestConfig:
    """Choice of the checkpoint that is kept as `best.ckpt`, and tested.

    Args:
        monitor: What it is the best of; `val/balanced`, the mean of the accuracies of all classes, where some classes
            are much larger than others.
    """

    monitor: Monitored = "val/top1"


@dataclass
class DistilledBestConfig:
    """Choice of the checkpoint of a distillation that is kept as `best.ckpt`.

    Args:
        monitor: What it is the best of; accuracy and loss need labels.
    """

    monitor: Literal["val/feature_cosine", "val/attention_error", "val/top1", "val/balanced", "val/loss"] = (
        "val/feature_cosine"
    )


_MOST_STEPS = 100_000_000


@dataclass
class StageConfig:
    """A stage of a distillation: its length and its learning rate.

    Args:
        steps: Optimizer steps at most; the stage is left out when 0.
        lr: Peak learning rate.
        warmup_share: Share of the steps in which the rate rises linearly; then it falls by half a cosine.
    """

    steps: int = 0
    lr: float = 1e-4
    warmup_share: float = 0.05

    def __post_init__(self) -> None:
        name = type(self).__name__.removesuffix("Stage").lower()
        check_counts(0, _MOST_STEPS, **{f"model.{name}.steps": self.steps})
        check_positive(**{f"model.{name}.lr": self.lr})
        check_numbers(0, 1, **{f"model.{name}.warmup_share": self.warmup_share})


@dataclass
class AttentionStage(StageConfig):
    """First stage: each new attention layer learns the output of its original, on the teacher's activations.

    Only the new layers change.

    Args:
        steps: Optimizer steps at most; the stage is left out when 0.
        lr: Peak learning rate.
        warmup_share: Share of the steps in which the rate rises linearly; then it falls by half a cosine.
    """

    steps: int = 1000
    lr: float = 5e-4


@dataclass
class FeaturesStage(StageConfig):
    """Second stage: the student learns the last features of the teacher.

    Args:
        steps: Optimizer steps at most; the stage is left out when 0.
        lr: Peak learning rate.
        warmup_share: Share of the steps in which the rate rises linearly; then it falls by half a cosine.
        loss: 1 - cosine of each token, squared error over the teacher's mean square, or the sum of both.
        learn: What changes: all weights, or the new attention layers alone.
    """

    steps: int = 200
    lr: float = 2e-5
    loss: Literal["cosine", "mse", "both"] = "both"
    learn: Literal["all", "attention"] = "all"


@dataclass
class LabelsStage(StageConfig):
    """Third stage: the student learns labels, and the teacher's logits beside them, all weights.

    Args:
        steps: Optimizer steps at most; the stage is left out when 0.
        lr: Peak learning rate.
        warmup_share: Share of the steps in which the rate rises linearly; then it falls by half a cosine.
        distill_weight: Weight of the Kullback-Leibler divergence to the teacher, beside 1 for the labels.
        temperature: Temperature of that divergence.
    """

    steps: int = 0
    lr: float = 5e-5
    distill_weight: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(0, **{"model.labels.distill_weight": self.distill_weight})
        check_positive(**{"model.labels.temperature": self.temperature})


_MOST = 2**31 - 1
# Lightning takes these as they come, and divides by zero or trains nothing.
_LEAST_OF_TRAINER = {
    "max_epochs": (1, -1),
    "max_steps": (1, -1),
    "min_epochs": (1, None),
    "min_steps": (1, None),
    "reload_dataloaders_every_n_epochs": (0, None),
    "accumulate_grad_batches": (1, None),
    "check_val_every_n_epoch": (1, None),
    "log_every_n_steps": (1, None),
    "gradient_clip_val": (0, None),
    "num_sanity_val_steps": (-1, None),
}


def _count_devices(devices: Any) -> int | None:
    """Count the devices of `trainer.devices`; None where Lightning finds them."""
    if isinstance(devices, list):
        return len(devices)
    if isinstance(devices, str) and "," in devices:
        return len(devices.strip(",").split(","))
    return int(devices) if str(devices).isdecimal() else None


def _check_times(trainer: Any) -> None:
    interval = trainer.val_check_interval
    if isinstance(interval, int | float):
        require(interval > 0, f"trainer.val_check_interval must be above 0, got {interval}")
    if trainer.max_time is not None:
        try:
            length_s = Timer(trainer.max_time).time_remaining() or 0.0
        except (MisconfigurationException, TypeError, ValueError) as error:
            raise InputError(f"trainer.max_time={trainer.max_time}: {error}") from None
        require(length_s > 0, f"trainer.max_time must be a time above 0, got {trainer.max_time}")
    for name in ("epochs", "steps"):
        least, most = trainer[f"min_{name}"], trainer[f"max_{name}"]
        require(
            least is None or most in (None, -1) or least <= most,
            f"trainer.min_{name}={least} is above trainer.max_{name}={most}",
        )


def check_trainer_options(trainer: Any, subcommand: str) -> None:
    """Raise `InputError` for options that divide by zero, train nothing, or do not fit the processes of torchrun."""
    for name, (least, unlimited) in _LEAST_OF_TRAINER.items():
        value = trainer[name]
        if value is not None and value != unlimited and not value >= least:
            other = "" if unlimited is None else f", or {unlimited} for no limit"
            raise InputError(f"trainer.{name} must be at least {least}{other}, got {value}")
        if isinstance(value, int) and value > _MOST:
            raise InputError(f"trainer.{name} must be at most {_MOST}, got a number of {len(str(value))} digits")
    _check_times(trainer)
    require(
        str(trainer.strategy).lower() not in ("fsdp", "fsdp_cpu_offload"),
        f"trainer.strategy={trainer.strategy} is of FSDP1; networks are sharded by --trainer.strategy fsdp2",
    )
    if (devices := _count_devices(trainer.devices)) is not None:
        check_workers(**{"trainer.devices": devices})
    here, started = map(os.environ.get, ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    require(
        not any(word in str(trainer.strategy).lower() for word in ("spawn", "fork", "notebook")),
        f"trainer.strategy={trainer.strategy} copies a process: set it to ddp, which starts the command once more",
    )
    require(
        devices is None
        or not is_torchelastic_launched()
        or (str(devices), str(devices * trainer.num_nodes)) == (here, started),
        f"trainer.devices={trainer.devices} and trainer.num_nodes={trainer.num_nodes} do not make the {started}"
        f" processes, {here} of them here, that torchrun has started: set them to its --nproc-per-node and --nnodes",
    )
    limit = f"limit_{ {'fit': 'train', 'validate': 'val'}.get(subcommand, subcommand) }_batches"
    require(trainer[limit] != 0, f"trainer.{limit}=0 leaves nothing to {subcommand}")


DEFAULT_OPTIMIZER = OptimizerConfig()
DEFAULT_SCHEDULE = ScheduleConfig()
DEFAULT_LOSS = LossConfig()
DEFAULT_MIXUP = MixupConfig()
NO_MIXUP = MixupConfig(mixup_alpha=0.0, cutmix_alpha=0.0)
