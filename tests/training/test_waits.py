"""Training steps read nothing that a device computes: on a CPU, where nothing is waited for, reads are counted."""

import inspect
import signal
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headmix_vision.models import dit_blocks
from headmix_vision.training.callbacks.checkpointing import LastCheckpoint
from headmix_vision.training.callbacks.non_finite import Later, Latest
from headmix_vision.training.classifier import ImageClassifier
from headmix_vision.training.generator import ImageGenerator
from headmix_vision.training.signals import InterruptRequest

from . import gen_helpers, helpers

READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)
DDPM = {"kind": "ddpm", "learned_variance": True}
CASES = {
    "classifier": (helpers, ImageClassifier, {}),
    "bf16": (helpers, ImageClassifier, {"trainer__precision": "bf16-mixed", "trainer__accumulate_grad_batches": 1}),
    "flow": (gen_helpers, ImageGenerator, {}),
    "ddpm": (gen_helpers, ImageGenerator, {"model__objective": DDPM}),
    "clips": (gen_helpers, ImageGenerator, gen_helpers.VIDEO),
}


class HostReads(TorchDispatchMode):
    """Takes weights, batches and all that is computed of them for tensors of a device, and notes where they are read.

    Attributes:
        batch: Number of the batch in training.
        found: Number of the batch and line of code of each read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batch = -1
        self.found: list[tuple[int, str]] = []
        self._storages: set[StorageWeakRef] = set()
        self._on_device = False

    @contextmanager
    def on_device(self, *tensors: torch.Tensor) -> Any:
        """Tensors that lie on the device; new ones are made there inside the block."""
        self._storages |= {StorageWeakRef(x.untyped_storage()) for x in tensors}
        self._on_device = True
        yield
        self._on_device = False

    def note(self, tensors: list[torch.Tensor]) -> bool:
        """Notes a read if one of the tensors lies on the device; says whether."""
        read = any(StorageWeakRef(x.untyped_storage()) in self._storages for x in tensors)
        if read:
            lines = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
            self.found.append((self.batch, f"{lines[-1].filename}:{lines[-1].lineno} {lines[-1].line}"))
        return read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        reads = READING & set(func.tags)
        if func in INDEXING:  # tagged as masks are
            reads = {x for x in given[1:] if x.dtype == torch.bool}
        if reads:
            self.note(given)
        result = func(*args, **(kwargs or {}))
        if self._on_device or any(StorageWeakRef(x.untyped_storage()) in self._storages for x in given):
            made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            self._storages |= {StorageWeakRef(x.untyped_storage()) for x in made}
        return result


def reads_of(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[tuple[int, str]]:
    """Trains an epoch of 6 batches; returns the reads from the second batch to the one before the last."""
    helper, module, overrides = CASES[case]
    reads, tolist, training_step = HostReads(), torch.Tensor.tolist, module.training_step
    send, get = Later.__init__, Later.get

    def watched_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        reads.batch = batch_idx
        with reads.on_device(*self.parameters(), *batch):
            return training_step(self, batch, batch_idx)

    def watched_list(tensor: torch.Tensor) -> Any:
        reads.note([tensor])
        return tolist(tensor)

    def watched_send(self: Any, tensor: torch.Tensor) -> None:
        send(self, tensor)
        self.batch = reads.batch

    def watched_get(self: Any) -> torch.Tensor:
        if self.batch == reads.batch:
            reads.note([self._copy])
        return torch.tensor(tolist(get(self)))  # which is no longer on the device

    monkeypatch.setattr(module, "training_step", watched_step)
    monkeypatch.setattr(torch.Tensor, "tolist", watched_list)
    monkeypatch.setattr(dit_blocks, "check_labels", lambda *_: None)  # reads the labels, of a CPU alone
    for name, watched in (("__init__", watched_send), ("get", watched_get), ("is_here", False)):
        monkeypatch.setattr(Later, name, watched)
    once = {"trainer__max_epochs": 1, "trainer__limit_val_batches": 0, **options}
    config = helper.write_config(tmp_path / "tiny.yaml", **overrides, **once)
    no_samples = () if helper is helpers else ("--samples.every_n_steps", "null")
    with reads:
        assert helper.run("fit", "-c", config, "--run_dir", tmp_path / "run", *no_samples) == 0
    assert reads.batch == 5
    return [read for read in reads.found if 1 <= read[0] < 5]


@pytest.mark.parametrize("case", CASES)
def test_steps_read_nothing_of_the_device(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reads_of(case, tmp_path, monkeypatch, trainer__log_every_n_steps=100) == []


def test_logging_reads_the_loss_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = reads_of("bf16", tmp_path, monkeypatch, trainer__log_every_n_steps=2)
    assert [batch for batch, _ in found] == [1, 3]
    assert all("float(self.step_loss)" in line for _, line in found)


def test_lightning_does_not_ask_for_its_own_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes would read the answer from the device at every step."""

    def ask(*_: Any, **__: Any) -> None:
        raise AssertionError

    trainer: Any = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    LastCheckpoint(Path("last.ckpt"), InterruptRequest()).on_train_start(trainer, lightning.LightningModule())
    loop: Callable[[], None] = trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor
    assert "_broadcast_sigterm_tensor" in inspect.getsource(type(trainer.fit_loop.epoch_loop).advance), "renamed"
    monkeypatch.setattr(torch, "tensor", ask)
    loop()


def test_signals_wait_for_a_step_while_there_are_steps() -> None:
    trainer: Any = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    request, module = InterruptRequest(), lightning.LightningModule()
    interrupt = LastCheckpoint(Path("last.ckpt"), request)
    with request.installed():
        interrupt.on_train_start(trainer, module)
        signal.raise_signal(signal.SIGINT)
        assert request.signum == signal.SIGINT
        interrupt.on_train_end(trainer, module)
        assert not request.deferred  # else the second signal ends this process
        with pytest.raises(SystemExit, match=str(128 + signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)


def test_what_is_shown_of_a_device_is_from_the_time_before(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [torch.tensor(float(number)) for number in range(3)]
    latest = Latest()
    assert [latest.read(value) for value in values] == values
    monkeypatch.setattr(Later, "is_here", False)
    latest = Latest()
    assert [latest.read(value) for value in values] == [None, *values[:2]]
