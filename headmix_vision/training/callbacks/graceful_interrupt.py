"""Ends a run on SIGINT or SIGTERM so that it can be continued."""

import signal
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from headmix_vision.training.callbacks.last_checkpoint import LastCheckpoint, can_resume_after_batch
from headmix_vision.training.later import Latest, sum_of_processes
from headmix_vision.training.run_directory import RunDirectory
from headmix_vision.training.sharding import finish_saving
from headmix_vision.training.signals import InterruptRequest

_LOOK_EVERY_S = 1.0


class GracefulInterrupt(Callback):
    """Finishes the optimizer step, saves `last.ckpt`, says how to resume, and exits with status 128 + signal number.

    Before the first step the process simply ends; checkpoints of an earlier run stay as they are. During validation it
    ends after the current batch: `last.ckpt` was written when that validation began, and resuming repeats it. All
    ranks stop at the same step, whichever of them got the signal; on several devices they agree on it one step later,
    as none of them waits for its device to ask the others.

    Args:
        request: The signal handler, installed by this callback whenever Lightning has put its own in place.
        last: The callback which writes `last.ckpt`; None outside training.
        resume_command: The command to print.
        run: The run directory; when it is lost, training is to stop as well, and saving ends the process.
    """

    def __init__(
        self,
        request: InterruptRequest,
        last: LastCheckpoint | None = None,
        resume_command: str = "",
        run: RunDirectory | None = None,
    ) -> None:
        self.request = request
        self.last = last
        self.resume_command = resume_command
        self.run = run
        self._looked_at_s = 0.0
        self._last_step = 0
        self._asked = Latest()

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the signals back from Lightning."""
        self.request.install()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the signals back from Lightning."""
        self.request.install()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the signals back from Lightning."""
        self.request.install()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes signals from here on, to act upon them between two steps."""
        self._last_step, self._asked = trainer.global_step, Latest()
        # Lightning's processes ask at every step whether its own handler has run, and wait for the device to answer
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        self.request.deferred = True
        self.request.install()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves and stops, if asked to, after a whole optimizer step."""
        stepped, self._last_step = trainer.global_step != self._last_step, trainer.global_step
        if stepped and self._requested_lately(trainer) and can_resume_after_batch(trainer):
            assert self.last is not None
            self.last.save(trainer)
            self._stop(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops, if asked to; `LastCheckpoint`, which comes earlier in the list, has just saved."""
        self.request.install()
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self._requested(trainer):
            self._stop(trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Stops, if this process was asked to; ranks may have different numbers of batches and cannot agree here."""
        if self.request.signum is not None:
            launcher = trainer.strategy.launcher
            if launcher is not None:
                launcher.kill(self.request.signum)
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves, unless `LastCheckpoint`, which comes earlier in the list, has done so, and stops, if asked to."""
        if self._requested(trainer):
            assert self.last is not None
            self.last.save_epoch(trainer)
            self._stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets signals end the process at once again, as nothing is left to save."""
        self.request.deferred = False

    def _requested_lately(self, trainer: Trainer) -> bool:
        """Tells whether any process was asked to stop, as far as it is known without waiting for the device."""
        if trainer.world_size == 1:
            return self._is_asked()
        asked = torch.full((), float(self._is_asked()), device=trainer.strategy.root_device)
        known = self._asked.read(sum_of_processes(trainer, asked))
        return known is not None and known.item() > 0

    def _is_asked(self) -> bool:
        """Tells whether this process got a signal or, asked once in a second, has lost its run directory."""
        now_s = time.monotonic()
        if self.run is not None and now_s - self._looked_at_s >= _LOOK_EVERY_S:
            self._looked_at_s = now_s
            if self.run.lost() is not None:
                return True
        return self.request.signum is not None

    def _requested(self, trainer: Trainer) -> bool:
        return trainer.strategy.reduce_boolean_decision(self.request.signum is not None, all=False)

    def _stop(self, trainer: Trainer) -> None:
        self.request.deferred = False
        finish_saving(trainer)
        if not trainer.is_global_zero:
            raise SystemExit(0)
        assert self.last is not None
        signum = self.request.signum or signal.SIGTERM
        name = signal.Signals(signum).name
        where = f"interrupted by {name} at step {trainer.global_step}; saved {self.last.path}"
        print(f"\n{where}; resume: {self.resume_command}", file=sys.stderr, flush=True)
        raise SystemExit(128 + signum)
