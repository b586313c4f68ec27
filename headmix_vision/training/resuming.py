"""Compare a checkpoint with the run that is to go on from it, before Lightning restores any of it.

`read_checkpoint` has checked what the entries are. Their inner form depends on the trainer: its loops, callbacks and
optimizers say here what they write themselves. Options may differ; the differences are listed.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from headmix_vision.errors import InputError, is_whole
from headmix_vision.files.reading import check_fields, parse_yaml, read_text
from headmix_vision.runs.checkpoints import check_finite, check_state
from headmix_vision.runs.directory import CHECKPOINTS, CONFIG

_LOOPS = {
    TrainerFn.FITTING: "fit_loop",
    TrainerFn.VALIDATING: "validate_loop",
    TrainerFn.TESTING: "test_loop",
    TrainerFn.PREDICTING: "predict_loop",
    None: None,
}
_OPTIMIZATION = "epoch_loop.automatic_optimization.optim_progress"
_ADAM = ("step", "exp_avg", "exp_avg_sq")
_AS_PARAMETER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
_FROM_HERE = ("lightning", "headmix_vision")
_MOST = 2**53

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
_FREE = ("model.model_args", "model.optimizer.args")  # whose keys are not options of ours
_UNSET = "unset"


def check_progress(trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Check the state of loops, callbacks, data and weight average; see `check_optimizers` for the rest.

    Args:
        trainer: The trainer, in its setup.
        module: Its module.
        checkpoint: As `read_checkpoint` returned it, with what Lightning needs (`check_entries`).

    Raises:
        InputError: If something has another form than this trainer writes.
    """
    loop, training = _LOOPS[trainer.state.fn], trainer.state.fn == "fit"
    if loop is None:
        return
    if "loops" in checkpoint:
        form = getattr(trainer, loop).state_dict()
        check_form("the entry 'loops'", checkpoint["loops"], {loop: form})
    data = type(trainer.datamodule).__qualname__  # type: ignore[attr-defined]
    if data in checkpoint:
        found = check_fields(f"the entry {data!r} of the checkpoint", checkpoint[data], {"class_names": list})
        _require(all(isinstance(name, str) for name in found["class_names"]), f"{data}/class_names", "texts", found)
    callbacks = checkpoint.get("callbacks") or {}
    check_form("the entry 'callbacks'", callbacks, {name: {} for name in callbacks})
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name, owner = callback.state_key, type(callback).__module__.partition(".")[0]
        if name in callbacks and owner in _FROM_HERE:
            check_form(f"the state of {type(callback).__name__}", callbacks[name], callback.state_dict())
    if not training:
        return
    _check_counts(checkpoint)
    _check_average(module, checkpoint)
    loaders = checkpoint["loops"][loop]["state_dict"].get("combined_loader", [])
    check_form("the state of the data loader", loaders, [{}])
    precision = type(trainer.precision_plugin).__qualname__
    if precision in checkpoint:
        check_form(f"the entry {precision!r}", checkpoint[precision], trainer.precision_plugin.state_dict())


def _check_counts(checkpoint: dict[str, Any]) -> None:
    fit = checkpoint["loops"]["fit_loop"]
    steps = fit[_OPTIMIZATION]["optimizer"]["step"]["total"]["completed"]
    epochs = fit["epoch_progress"]["current"]["completed"]
    for name, count in (("global_step", steps), ("epoch", epochs)):
        if checkpoint[name] != count:
            raise InputError(f"the checkpoint is damaged: its {name} is {checkpoint[name]}, its loops are at {count}")


def _check_average(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    entries = [name for name in ("current_model_state", "averaging_state") if name in checkpoint]
    if len(entries) == 1:
        raise InputError(f"the checkpoint is damaged: of its average and its trained weights it has {entries[0]} alone")
    if not entries:
        return
    check_state(checkpoint["current_model_state"], module.state_dict())
    check_finite(checkpoint["current_model_state"], "the checkpoint")
    check_form("the entry 'averaging_state'", checkpoint["averaging_state"], {"n_averaged": torch.tensor(0)})
    _require(len(checkpoint["averaging_state"]) == 1, "averaging_state", "n_averaged alone", entries)


def check_optimizers(optimizers: Iterable[Optimizer], states: list[Any]) -> None:
    """Check the states of optimizers against the optimizers of this run.

    Raises:
        InputError: If there are more or fewer, or one is not the state of such an optimizer with such parameters.
    """
    optimizers = list(optimizers)
    _require(len(states) == len(optimizers), "optimizer_states", f"{len(optimizers)} states", states)
    for optimizer, found in zip(optimizers, states, strict=True):
        where = "the state of the optimizer in the checkpoint"
        fields = check_fields(where, found, {"state": dict, "param_groups": list})
        groups = [check_fields(f"{where}, a group", group, {"params": list}) for group in fields["param_groups"]]
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        given = [len(group["params"]) for group in groups]
        _require(given == sizes, "optimizer_states/param_groups", f"groups of {sizes} parameters", given)
        numbers = [number for group in groups for number in group["params"]]
        _require(numbers == list(range(len(numbers))), "optimizer_states/params", "numbers in their order", numbers)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        _require(fields["state"].keys() <= set(numbers), "optimizer_states/state", "states by number", fields["state"])
        for number, state in fields["state"].items():
            _check_moments(f"optimizer_states/state/{number}", state, parameters[number], optimizer)


def _check_moments(where: str, state: Any, parameter: Tensor, optimizer: Optimizer) -> None:
    needed = _ADAM if isinstance(optimizer, torch.optim.Adam) else ()
    check_fields(f"{where} of the checkpoint", state, dict.fromkeys(needed, Tensor))
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        shape = parameter.shape if name in _AS_PARAMETER else torch.Size() if name == "step" else value.shape
        real = value.is_floating_point() or name == "step"
        if value.shape != shape or not real:
            raise InputError(
                f"the checkpoint is damaged: {where}/{name} is {value.dtype} of shape {list(value.shape)},"
                f" it must be real numbers of shape {list(shape)}"
            )


def check_sums(name: str, found: object, size: int) -> None:
    """Check sums of processes, each of `size` numbers.

    Raises:
        InputError: If they are something else.
    """
    whole = isinstance(found, Tensor) and found.is_floating_point() and found.numel() > 0 and found.numel() % size == 0
    _require(whole, name, f"sums of {size} numbers for each process", found)


def check_form(where: str, found: Any, form: Any) -> None:
    """Check that a value has the form of another one.

    A table must have at least the entries of `form`, a list entries that are all like its first one, a tensor its
    shape. Whole numbers must be counts. Where `form` has None, there may be any single value.

    Raises:
        InputError: If it has not.
    """
    if isinstance(form, dict):
        _require(isinstance(found, dict), where, "a table", found)
        for name, entry in form.items():
            _require(name in found, where, f"a table with {name!r}", found)
            check_form(f"{where}/{name}", found[name], entry)
    elif isinstance(form, list):
        _require(isinstance(found, list), where, "a list", found)
        for number, entry in enumerate(found if form else ()):
            check_form(f"{where}/{number}", entry, form[0])
    elif isinstance(form, Tensor):
        alike = isinstance(found, Tensor) and found.shape == form.shape
        _require(
            alike and found.is_floating_point() == form.is_floating_point(),
            where,
            f"{form.dtype} of shape {list(form.shape)}",
            found,
        )
    elif isinstance(form, bool | str):
        _require(isinstance(found, type(form)), where, type(form).__name__, found)
    elif isinstance(form, int):
        _require(is_whole(found) and 0 <= found < _MOST, where, f"a whole number from 0 to {_MOST - 1}", found)
    elif isinstance(form, float):
        _require(isinstance(found, int | float) and not isinstance(found, bool), where, "a number", found)
    else:
        single = isinstance(found, Tensor) and found.numel() == 1
        _require(found is None or single or isinstance(found, int | float | str), where, "a single value", found)


def _require(fits: bool, where: str, wanted: str, found: object) -> None:
    if not fits:
        raise InputError(f"the checkpoint is damaged: {where} must be {wanted}, got {found!r:.80}")


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
