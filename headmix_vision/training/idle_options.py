"""Refuse options on the command line that have no effect beside the others, and empty texts."""

import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_file
from headmix_vision.training.command_help import spelled
from headmix_vision.training.options import require


@dataclass(frozen=True)
class Idle:
    """Options that have no effect beside others.

    Args:
        names: The options; a name that ends with a dot stands for its group.
        cause: What leaves them without effect, for the message.
        applies: Whether they have no effect, from the parsed options.
        but: Options of the groups which this rule is not about.
    """

    names: tuple[str, ...]
    cause: str
    applies: Callable[[Any], bool] = lambda options: True
    but: tuple[str, ...] = ()

    def concerns(self, name: str) -> bool:
        """Return whether the rule is about an option."""
        of_group = name.startswith(tuple(part for part in self.names if part.endswith(".")))
        return (of_group and name.rpartition(".")[2] not in self.but) or name in self.names


def _entry(options: Any, *names: str) -> Any:
    for name in names:
        options = options.get(name) if options is not None else None
    return options


def _of_group(group: str, switch: str) -> Idle:
    """Make the rule that a group of options has no effect while one of them is null."""
    return Idle(
        (f"{group}.",), f"{group}.{switch} is null", lambda options: _entry(options, group, switch) is None, (switch,)
    )


_OF_RUN_DIRECTORY = tuple(
    f"trainer.{name}" for name in ("logger", "default_root_dir", "enable_checkpointing", "model_registry")
)
_IDLE_IN_TRAINING = (
    _of_group("samples", "every_n_steps"),
    _of_group("fid", "every_n_epochs"),
    _of_group("analysis", "every_n_epochs"),
    _of_group("early_stopping", "patience"),
    Idle(
        ("model.mixup.switch_prob",),
        "it is for mixup and CutMix together, and one of model.mixup.mixup_alpha and model.mixup.cutmix_alpha is 0",
        lambda o: not (o.model.mixup.mixup_alpha and o.model.mixup.cutmix_alpha),
    ),
    Idle(
        ("model.mixup.prob", "model.mixup.mode"),
        "model.mixup.mixup_alpha and model.mixup.cutmix_alpha are 0",
        lambda o: not (o.model.mixup.mixup_alpha or o.model.mixup.cutmix_alpha),
    ),
    Idle(
        ("model.lora.alpha", "model.lora.targets"),
        "model.lora.rank is 0",
        lambda o: not _entry(o, "model", "lora", "rank"),
    ),
    Idle(
        ("model.schedule.warmup_lr",),
        "model.schedule.warmup_epochs is 0",
        lambda o: not o.model.schedule.warmup_epochs,
    ),
    Idle(
        ("model.schedule.min_lr",),
        "model.schedule.sched is constant",
        lambda o: o.model.schedule.sched == "constant",
    ),
    Idle(
        ("model.optimizer.lr", "trainer.max_steps", "trainer.max_epochs", "trainer.min_steps", "trainer.min_epochs"),
        "each stage has its own: --model.attention.steps and --model.attention.lr, likewise features and labels",
        lambda o: _entry(o, "model", "attention") is not None,
    ),
    Idle(
        ("model.checkpoint", "model.new_head"),
        "weights come from --ckpt-path",
        lambda o: o.ckpt_path is not None,
    ),
    Idle(
        ("trainer.gradient_clip_algorithm",),
        "trainer.gradient_clip_val is null",
        lambda o: o.trainer.gradient_clip_val is None,
    ),
    Idle(
        ("data.val_split",),
        "validation runs on the samples of data.holdout_every",
        lambda o: _entry(o, "data", "holdout_every") is not None,
    ),
    Idle(("data.stills.split",), "data.stills.share is 0", lambda o: not _entry(o, "data", "stills", "share")),
    Idle(
        ("data.augmentation.remode", "data.augmentation.recount"),
        "data.augmentation.reprob is 0",
        lambda o: not o.data.augmentation.reprob,
    ),
    Idle((*_OF_RUN_DIRECTORY, "weights_only"), "a run directory has its own files"),
)
_IDLE_IN_EVALUATION = (
    Idle(
        (
            *("overwrite", "data_changed", "checkpoint_every_n_steps", "weights_only"),
            *("ema.", "early_stopping.", "analysis.", "samples.", "fid."),
            *("model.optimizer.", "model.schedule.", "model.mixup.", "data.augmentation.", "data.shuffle_shards"),
            *(f"trainer.{name}" for name in ("max_epochs", "max_steps", "min_epochs", "min_steps", "max_time")),
            *(f"trainer.{name}" for name in ("accumulate_grad_batches", "gradient_clip_val", "limit_train_batches")),
            *("trainer.val_check_interval", "trainer.check_val_every_n_epoch", "trainer.log_every_n_steps"),
        ),
        "it is for fit",
    ),
    Idle(("model.checkpoint", "model.new_head"), "weights come from the run, or from --ckpt-path"),
    Idle(_OF_RUN_DIRECTORY, "a run directory has its own files"),
)


def given_options(arguments: Sequence[str]) -> list[str]:
    """List the names of the options on a command line, without dashes in front."""
    return [argument[2:].partition("=")[0].replace("-", "_") for argument in arguments if argument.startswith("--")]


def is_shortened(given: Sequence[str]) -> bool:
    """Return whether a command line sets the length of the run, but not that of the warm-up."""
    lengths = {"trainer.max_epochs", "trainer.max_steps", "trainer.limit_train_batches"}
    return bool(lengths & {*given}) and "model.schedule.warmup_epochs" not in given


def check_given(given: Sequence[str], options: Any, subcommand: str) -> None:
    """Raise `InputError` for options on the command line that have no effect; recipes may hold such options.

    Args:
        given: Their names.
        options: What was parsed of it.
        subcommand: `fit`, `validate`, `test` or `predict`.
    """
    for rule in _IDLE_IN_TRAINING if subcommand == "fit" else _IDLE_IN_EVALUATION:
        for name in given:
            if rule.concerns(name):
                require(not rule.applies(options), f"{spelled(f'--{name}')} has no effect: {rule.cause}; remove it")


def check_values(arguments: Sequence[str]) -> None:
    """Raise `InputError` for a FIFO or device on a command line: jsonargparse opens whatever exists, and would wait."""
    for argument in arguments:
        value = argument.partition("=")[2] if argument.startswith("--") else argument
        if os.path.exists(value) and not os.path.isdir(value):
            check_file(value)


def check_groups(given: Any, defaults: Namespace, name: str = "") -> None:
    """Raise `InputError` for a group of options, such as `model.loss`, that is not a mapping of names to values."""
    for key, default in vars(defaults).items():
        if isinstance(default, Namespace) and key in given:
            place, value = f"{name}.{key}" if name else key, given[key]
            if not isinstance(value, Mapping | Namespace):
                raise InputError(f"{place} must be a mapping of options to values, got {str(value)[:60]!r}")
            check_groups(value, default, place)


def check_texts(options: Any, name: str = "") -> None:
    """Raise `InputError` for an option that is an empty text, such as a path or the name of a split."""
    if isinstance(options, Mapping | Namespace):
        for key, value in vars(options).items() if isinstance(options, Namespace) else options.items():
            check_texts(value, f"{name}.{key}" if name else str(key))
    require(options != "", f"{name} is an empty text: give a value, or null for none")
