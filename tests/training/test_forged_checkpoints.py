"""Checkpoints whose inner parts have another form: an error of one line, before Lightning restores any of them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn

from headmix_vision.cli.training import run_command_line
from headmix_vision.errors import InputError
from headmix_vision.runs.checkpoints import check_entries, read_checkpoint
from headmix_vision.training.classification_cli import ClassificationCLI
from headmix_vision.training.resuming import check_form, check_optimizers, check_sums

from .helpers import load

FIT = ("loops", "fit_loop")
OPTIMIZATION = (*FIT, "epoch_loop.automatic_optimization.optim_progress", "optimizer", "step", "total")
ABOUT = ("headmix_vision",)
STATE = ("optimizer_states", 0, "state")
GROUP = ("optimizer_states", 0, "param_groups", 0)
BEST = "BestCheckpoint{'monitor': 'val/top1', 'mode': 'max', 'every_n_train_steps': 0, 'every_n_epochs': 1,"
BEST += " 'train_time_interval': None}"
REMOVED = object()

# Path of an entry, what is put there, what is said.
FORMS: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "names too few": ((*ABOUT, "class_names"), ["a"], "'class_names' has 1 names for 10 classes"),
    "names of another type": ((*ABOUT, "class_names"), list(range(10)), "'class_names' must hold texts"),
    "a size of texts": ((*ABOUT, "img_size"), ["8", "8"], "'img_size' must be whole numbers"),
    "a size of nothing": ((*ABOUT, "img_size"), [], "'img_size' must be whole numbers"),
    "an accuracy above 1": ((*ABOUT, "top1"), 97.0, "'top1' must be from 0 to 1"),
    "an accuracy that is NaN": ((*ABOUT, "top1"), float("nan"), "'top1' must be from 0 to 1"),
    "classes below 0": ((*ABOUT, "num_classes"), -1, "'num_classes'"),
    "classes of true": ((*ABOUT, "num_classes"), True, "'num_classes' is True"),
    "numbered arguments": ((*ABOUT, "model_args", 3), 4, "have names that are not texts"),
    "a negative step": (("global_step",), -6, "'global_step' is -6"),
    "a huge step": (("global_step",), 2**60, "'global_step' is 1152921504606846976"),
    "a negative epoch": (("epoch",), -1, "'epoch' is -1"),
    "another step": (("global_step",), 5, "its global_step is 5, its loops are at 6"),
    "another epoch": (("epoch",), 7, "its epoch is 7, its loops are at 1"),
    "no version": (("pytorch-lightning_version",), "newest", "of version 'newest'"),
    "an old version": (("pytorch-lightning_version",), "1.9.0", "of version '1.9.0'"),
    "no loops": (("loops",), {}, "'loops' must be a table with 'fit_loop'"),
    "empty loops": (FIT, {}, "fit_loop must be a table with"),
    "a loop that is a list": (FIT, [1], "fit_loop must be a table"),
    "negative progress": ((*OPTIMIZATION, "completed"), -6, "completed must be a whole number"),
    "progress of texts": ((*OPTIMIZATION, "completed"), "6", "completed must be a whole number"),
    "a flag that is a number": ((*FIT, "epoch_loop.batch_progress", "is_last_batch"), 3, "is_last_batch must be bool"),
    "a loader that is a text": ((*FIT, "state_dict", "combined_loader"), ["x"], "combined_loader/0 must be a table"),
    "callbacks of numbers": (("callbacks", BEST), 3, "must be a table"),
    "a callback without its best": (("callbacks", BEST, "best_model_score"), "x", "best_model_score must be"),
    "a callback without a path": (("callbacks", BEST, "best_model_path"), REMOVED, "a table with 'best_model_path'"),
    "an average of text": (("averaging_state",), "x", "'averaging_state' must be a table"),
    "an average of another form": (("averaging_state", "n_averaged"), torch.ones(3), "n_averaged must be torch.int64"),
    "an average alone": (("current_model_state",), REMOVED, "it has averaging_state alone"),
    "trained weights of another shape": (
        ("current_model_state", "net.head.bias"),
        torch.ones(3),
        "have another shape, first net.head.bias",
    ),
    "whole numbers for weights": (
        ("state_dict", "net.head.bias"),
        torch.ones(10, dtype=torch.int64),
        "have another type, first net.head.bias",
    ),
    "complex weights": (("state_dict", "net.head.bias"), torch.ones(10) * 1j, "is complex64, strided"),
    "sparse weights": (("state_dict", "net.head.bias"), torch.ones(10).to_sparse(), "is float32, sparse_coo"),
    "quantized weights": (
        ("state_dict", "net.head.bias"),
        torch.quantize_per_tensor(torch.ones(10), 1.0, 0, torch.qint8),
        "is qint8, strided",
    ),
    "weights in 8 bits": (("state_dict", "net.head.bias"), torch.ones(10).to(torch.float8_e5m2), "is float8_e5m2"),
    "weights without values": (("state_dict", "net.head.bias"), torch.ones(10, device="meta"), "has no values"),
    "a huge weight in 4 bytes": (("state_dict", "net.head.bias"), torch.ones(1).expand(10**12), "repeats its values"),
    "data of numbers": (("ClassificationData",), 3, "'ClassificationData' of the checkpoint is 3"),
    "data without names": (("ClassificationData", "class_names"), [1], "class_names must be texts"),
    "schedulers": (("lr_schedulers",), [1], "holds schedulers of Lightning"),
    "a loss of whole numbers": (("train_loss",), torch.ones(1, 2, dtype=torch.int64), "train_loss must be sums"),
    "a loss of three numbers": (("train_loss",), torch.ones(3), "train_loss must be sums"),
    "a batch of texts": (("batch",), {"processes": "1", "size": 8}, "'processes' is '1'"),
    "two optimizers": (("optimizer_states",), [{}, {}], "optimizer_states must be 1 states"),
    "an optimizer of text": (("optimizer_states", 0), "x", "optimizer in the checkpoint is 'x'"),
    "no groups": (("optimizer_states", 0, "param_groups"), REMOVED, "'param_groups' is missing"),
    "groups of numbers": (("optimizer_states", 0, "param_groups"), [1, 2], "a group is 1"),
    "one group": (("optimizer_states", 0, "param_groups"), [], "must be groups of"),
    "a group of other parameters": ((*GROUP, "params"), [0, 1], "must be groups of"),
    "unordered parameters": ((*GROUP, "params", 0), 7, "numbers in their order"),
    "a state of another parameter": ((*STATE, 99), {}, "states by number"),
    "a state of text": ((*STATE, 0), "x", "state/0 of the checkpoint is 'x'"),
    "a state without a moment": ((*STATE, 0, "exp_avg"), REMOVED, "'exp_avg' is missing"),
    "a moment of another shape": ((*STATE, 0, "exp_avg"), torch.ones(2), r"exp_avg is torch.float32 of shape \[2\]"),
    "a moment of whole numbers": ((*STATE, 0, "exp_avg"), torch.ones(1, 1, 24).int(), "exp_avg is torch.int32"),
}


def forge(checkpoint: Any, path: tuple[Any, ...], value: Any) -> None:
    """Put a value into nested tables, or remove what is there."""
    *outer, last = path
    for name in outer:
        checkpoint = checkpoint[name]
    if value is REMOVED:
        del checkpoint[last]
    else:
        checkpoint[last] = value


@pytest.fixture(scope="module")
def resumed(reference_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What a run does with a checkpoint before it trains, with the trainer of a run that has ended."""
    copy, made = tmp_path_factory.mktemp("resumed") / "run", []
    shutil.copytree(reference_run, copy)

    class Kept(ClassificationCLI):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(self)
            super().__init__(*args, **kwargs)

    run_command_line(Kept, ["fit", "-c", str(copy / "config.yaml"), "--ckpt_path", "last", "--run_dir", str(copy)])
    trainer, module = made[0].trainer, made[0].model
    trainer.state.fn = TrainerFn.FITTING

    def resume(checkpoint: dict[str, Any], path: Path, averages: bool = True) -> dict[str, Any]:
        torch.save(checkpoint, path)
        trainer.checkpoint_callback.best_k_models.clear()  # as they are when a run starts
        read = read_checkpoint(path)
        check_entries(read, path, resuming=True)
        callbacks = trainer.callbacks
        trainer.callbacks = [one for one in callbacks if averages or not isinstance(one, WeightAveraging)]
        try:
            module.on_load_checkpoint(read)
        finally:
            trainer.callbacks = callbacks
        for callback in trainer.checkpoint_callbacks:
            if callback.state_key in read["callbacks"]:
                callback.load_state_dict(read["callbacks"][callback.state_key])
        check_optimizers(trainer.optimizers, read["optimizer_states"])
        return read

    return resume


@pytest.mark.parametrize("form", FORMS)
def test_a_part_of_another_form_is_refused(
    form: str, resumed: Callable[..., dict[str, Any]], reference_run: Path, tmp_path: Path
) -> None:
    path, value, message = FORMS[form]
    checkpoint = load(reference_run / "checkpoints" / "last.ckpt")
    del checkpoint["tensors_sha256"], checkpoint["values_sha256"]
    resumed(checkpoint, tmp_path / "a.ckpt")
    forge(checkpoint, path, value)
    with pytest.raises(InputError, match=message) as error:
        resumed(checkpoint, tmp_path / "a.ckpt")
    assert "\n" not in str(error.value)


def test_a_run_without_average_goes_on_from_the_trained_weights(
    resumed: Callable[..., dict[str, Any]], reference_run: Path, tmp_path: Path
) -> None:
    checkpoint = load(reference_run / "checkpoints" / "last.ckpt")
    for averages, name in ((True, "state_dict"), (False, "current_model_state")):
        restored = resumed(checkpoint, tmp_path / "a.ckpt", averages)["state_dict"]
        assert all(torch.equal(restored[weight], value) for weight, value in checkpoint[name].items())
    assert not torch.equal(
        checkpoint["state_dict"]["net.head.bias"], checkpoint["current_model_state"]["net.head.bias"]
    )


ENTRIES: list[tuple[object, list[object], list[object]]] = [
    ({"a": 1}, [{"a": 0}, {"a": 2**53 - 1, "b": None}], [[], {}, {"a": -1}, {"a": 2**53}, {"a": True}, {"a": 1.0}]),
    ([1], [[], [0, 5]], [{}, (1,), [1, -1], ["1"]]),
    ([], [[], [None, "x"]], [{}, None]),
    (torch.zeros(2), [torch.ones(2), torch.ones(2).half()], [torch.ones(3), torch.ones(2).long(), [0.0, 0.0]]),
    (True, [False], [1, None]),
    ("x", ["y"], [1, None]),
    (1.5, [2, 3.5, -1.0], [True, "1.5", None]),
    (None, [None, 3, 0.5, "x", torch.ones(1), torch.ones(1, 1)], [torch.ones(2), torch.ones(0), [], {}]),
]


@pytest.mark.parametrize(("form", "alike", "others"), ENTRIES)
def test_values_have_the_form_of_another(form: object, alike: list[object], others: list[object]) -> None:
    for found in alike:
        check_form("x", found, form)
    for found in others:
        with pytest.raises(InputError, match=r"damaged: x.* must be"):
            check_form("x", found, form)


def test_sums_are_so_many_numbers_of_each_process() -> None:
    for sums in (torch.ones(3), torch.ones(2, 3), torch.ones(6)):
        check_sums("x", sums, 3)
    for found in (torch.ones(4), torch.ones(0), torch.ones(3).long(), [1.0, 1.0, 1.0], None):
        with pytest.raises(InputError, match=r"damaged: x.* must be"):
            check_sums("x", found, 3)
