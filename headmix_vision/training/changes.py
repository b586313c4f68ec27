"""List the options in which a run that goes on differs from what its checkpoint was trained with."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from headmix_vision.errors import InputError
from headmix_vision.files.reading import parse_yaml, read_text
from headmix_vision.runs.directory import CHECKPOINTS, CONFIG

OPTIONS = "options"  # entry of a checkpoint
_OF_TRAINER = (
    *("max_epochs", "max_steps", "min_epochs", "min_steps", "precision", "accumulate_grad_batches"),
    *("gradient_clip_val", "gradient_clip_algorithm", "limit_train_batches", "overfit_batches"),
)
_COMPARED = (
    *("seed_everything", "model", "data", "ema", "early_stopping", "best"),
    *(f"trainer.{name}" for name in _OF_TRAINER),
)
# They change the place or the speed of the work, start a run, or are linked to another option.
_IRRELEVANT = {
    *(f"model.{name}" for name in ("checkpoint", "vae", "compile", "grad_checkpointing", "seed")),
    *(f"data.{name}" for name in ("root", "num_workers", "eval_batch_size", "max_unreadable", "in_memory", "seed")),
    *(f"data.{name}" for name in ("predict_path", "val_split", "test_split", "stills.root")),
}
_FREE = ("model.model_args", "model.optimizer.args")  # whose keys are no options of ours
_UNSET = "unset"


def stored_options(checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the options that a checkpoint was trained with; of an earlier version, those in its run's config.

    Args:
        checkpoint: As returned by `read_checkpoint`.
        path: Its file.
    """
    options = checkpoint.get(OPTIONS)
    config = path.parent.parent / CONFIG
    if options is None and path.parent.name == CHECKPOINTS and config.is_file():
        try:
            options = parse_yaml(read_text(config))
        except (yaml.YAMLError, InputError):
            options = None
    return options if isinstance(options, dict) else {}


def list_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List the options that change the mathematics of a training, as `model.optimizer.lr 0.001 -> 0.002`.

    An option that one of the versions does not know is not compared.
    """
    found = []
    for name in _COMPARED:
        first, second = (_entry(options, name) for options in (before, now))
        if _UNSET not in (first, second):
            found += [f"{at} {_short(old)} -> {_short(new)}" for at, old, new in _differences(first, second, name)]
    return found


def _entry(options: Any, name: str) -> Any:
    for part in name.split("."):
        options = options.get(part, _UNSET) if isinstance(options, dict) else _UNSET
    return options


def _differences(before: Any, now: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    if name in _FREE:
        before, now = before or {}, now or {}
    if name in _IRRELEVANT or before == now:
        return
    if not (isinstance(before, dict) and isinstance(now, dict)):
        yield name, before, now
        return
    within = name.startswith(_FREE)
    for key in {**before, **now}:
        if within or (key in before and key in now):
            yield from _differences(before.get(key, _UNSET), now.get(key, _UNSET), f"{name}.{key}")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
