"""Checkpoints of a run, `last.ckpt`, also after SIGINT or SIGTERM, and `best.ckpt`, and its end by early stopping."""

import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_fields
from headmix_vision.training.callbacks.non_finite import Latest, sum_of_processes
from headmix_vision.training.options import EarlyStoppingConfig, mode_of
from headmix_vision.training.run_directory import RunDirectory
from headmix_vision.training.sharding import finish_saving
from headmix_vision.training.signals import InterruptRequest

_LOOK_EVERY_S = 1.0


class TakeSignals(Callback):
    """Install the signal handler whenever Lightning has put its own in place.

    Args:
        request: The signal handler.
    """

    def __init__(self, request: InterruptRequest) -> None:
        self.request = request

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the signals back from Lightning."""
        self.request.install()

    on_sanity_check_start = on_test_start = on_predict_start = on_validation_start


class LastCheckpoint(TakeSignals):
    """Keep `last.ckpt` current, and on a signal save it, print how to resume and exit with 128 + signal number.

    The checkpoint is written before and after each validation, after the first and the last epoch, and every so many
    steps. After another epoch without validation it is written if the one before is old enough: training waits while it
    is.

    The one before validation makes Lightning go straight back to that validation, so that neither a crash nor an
    interruption there costs an epoch. Nothing is written while a gradient is half accumulated or while the averaged
    weights stand in for the trained ones.

    A signal before the first step ends the process; checkpoints of an earlier run stay as they are. During training it
    ends the run after the optimizer step, during validation after the current batch: resuming repeats that validation.
    All ranks stop at the same step, whichever of them got the signal; on several devices they agree on it one step
    later, as none of them waits for its device to ask the others.

    Args:
        path: The file, usually `checkpoints/last.ckpt` of the run directory.
        request: The signal handler.
        resume_command: The command to print.
        run: The run directory; when it is lost, training is to stop as well, and saving ends the process.
        every_n_steps: Also write after every so many optimizer steps, the last one of an epoch included; not when None.
        min_interval_s: Age in seconds from which the one before is replaced after an epoch without validation.
    """

    def __init__(
        self,
        path: Path,
        request: InterruptRequest,
        resume_command: str = "",
        run: RunDirectory | None = None,
        every_n_steps: int | None = None,
        min_interval_s: float = 60.0,
    ) -> None:
        super().__init__(request)
        if every_n_steps is not None and every_n_steps < 1:
            raise InputError(f"checkpoint_every_n_steps must be null or at least 1, got {every_n_steps}")
        self.path = path
        self.resume_command = resume_command
        self.run = run
        self.every_n_steps = every_n_steps
        self.min_interval_s = min_interval_s
        self._last_step, self._validated, self._due, self._saved_at_s, self._looked_at_s = 0, False, False, 0.0, 0.0
        self._asked = Latest()

    def save(self, trainer: Trainer) -> None:
        """Write the checkpoint (not in a `fast_dev_run`); all ranks call it between two optimizer steps."""
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            trainer.save_checkpoint(self.path, weights_only=False)
            if not self.path.is_file():  # of a run with metrics behind its first checkpoint it is taken to exist
                finish_saving(trainer)
            self._saved_at_s, self._due = time.monotonic(), False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where this run starts, and signals from here on, to act upon them between two steps."""
        self._last_step, self._saved_at_s, self._asked = trainer.global_step, time.monotonic(), Latest()
        # Lightning's processes ask at every step whether its own handler has run, and wait for the device to answer
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        self.request.deferred = True
        self.request.install()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for a validation in this epoch."""
        self._validated = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after every `every_n_steps` optimizer steps; save and stop, if asked to, after a whole step."""
        stepped, self._last_step = trainer.global_step != self._last_step, trainer.global_step
        if not stepped:
            return
        requested = self._requested_lately(trainer)
        self._due |= self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0
        if (requested or self._due) and can_resume_after_batch(trainer):
            self.save(trainer)
            if requested:
                self._stop(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save with the validation marked as begun, which makes Lightning repeat it on resuming; stop, if asked to."""
        super().on_validation_start(trainer, pl_module)
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self._validated = True
        progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
        before = progress.state_dict()
        progress.increment_ready()
        progress.increment_started()
        try:
            self.save(trainer)
        finally:
            progress.load_state_dict(before)
        if self._requested(trainer):
            self._stop(trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Stop, if this process was asked to; ranks may have different numbers of batches and cannot agree here."""
        if self.request.signum is not None:
            launcher = trainer.strategy.launcher
            if launcher is not None:
                launcher.kill(self.request.signum)
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save an epoch with validation, the first and the last one, and after an old checkpoint; stop, if asked to."""
        requested, old = self._requested(trainer), time.monotonic() - self._saved_at_s >= self.min_interval_s
        due = requested or self._validated or self._due or is_last_epoch(trainer)
        # A run with results of two epochs and no checkpoint is taken for one whose checkpoint was deleted.
        if due or trainer.strategy.reduce_boolean_decision(old or not self.path.is_file(), all=False):
            self.save(trainer)
        if requested:
            self._stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let signals end the process at once again, as nothing is left to save."""
        self.request.deferred = False

    def _requested_lately(self, trainer: Trainer) -> bool:
        """Return whether any process was asked to stop, as far as it is known without waiting for the device."""
        if trainer.world_size == 1:
            return self._is_asked()
        asked = torch.full((), float(self._is_asked()), device=trainer.strategy.root_device)
        known = self._asked.read(sum_of_processes(trainer, asked))
        return known is not None and known.item() > 0

    def _is_asked(self) -> bool:
        """Return whether this process got a signal or, asked once in a second, has lost its run directory."""
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
        signum = self.request.signum or signal.SIGTERM
        name = signal.Signals(signum).name
        where = f"interrupted by {name} at step {trainer.global_step}; saved {self.path}"
        print(f"\n{where}; resume: {self.resume_command}", file=sys.stderr, flush=True)
        raise SystemExit(128 + signum)


class BestCheckpoint(ModelCheckpoint):
    """Keep `best.ckpt`, the checkpoint of the best validation, the earliest one if several are equal.

    Args:
        dirpath: Folder of `best.ckpt`.
        monitor: What it is the best of.
    """

    def __init__(self, dirpath: Path, monitor: str) -> None:
        super().__init__(
            dirpath,
            filename="best",
            monitor=monitor,
            mode=mode_of(monitor),
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse to go on with a run whose best checkpoint is the best of something else, and would be replaced.

        Raises:
            InputError: If it is.
        """
        for name, state in checkpoint["callbacks"].items():
            if name.startswith(type(self).__name__) and state.get("monitor") != self.monitor:
                raise InputError(
                    f"the best checkpoint of this run is that of {state.get('monitor')}, not of {self.monitor}:"
                    f" set best.monitor={state.get('monitor')}"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best score, also when the run directory has been moved; take no path from the checkpoint.

        Raises:
            InputError: If there is a best checkpoint without a score.
        """
        score = Tensor if state_dict["best_model_path"] else Tensor | None
        check_fields(f"the state of {type(self).__name__}", state_dict, {"best_model_score": score})
        path = self.format_checkpoint_name({}) if state_dict["best_model_path"] else ""
        moved = {"dirpath": self.dirpath, "best_model_path": path, "kth_best_model_path": path, "last_model_path": ""}
        best = {path: state_dict["best_model_score"]} if path else {}
        super().load_state_dict({**state_dict, **moved, "best_k_models": best})


class EarlyStop(EarlyStopping):
    """End a run after so many validations without a better one, also a run that is resumed after that.

    Args:
        config: The rule; its patience must be given.
        monitor: What is monitored where the rule does not say it.
    """

    def __init__(self, config: EarlyStoppingConfig, monitor: str) -> None:
        assert config.patience is not None
        monitor = config.monitor or monitor
        super().__init__(
            monitor,
            config.min_delta,
            config.patience,
            mode=mode_of(monitor),
            check_on_train_epoch_end=False,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best value and the count; the patience is that of the command line."""
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End a run at once that had been stopped: Lightning would train until the next validation.

        Raises:
            InputError: If there are no validations.
        """
        if not sum(trainer.num_val_batches):
            raise InputError("early_stopping.patience needs validation: set data.val_split")
        trainer.should_stop = self.wait_count >= self.patience

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the validation with the best one.

        Raises:
            InputError: If it does not log what is monitored; before the training already.
        """
        if self.monitor not in trainer.callback_metrics:
            known = ", ".join(name for name in trainer.callback_metrics if name.startswith("val/"))
            raise InputError(f"early_stopping.monitor must be one of {known}, got {self.monitor}")
        super().on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print why the run has ended."""
        if self.wait_count >= self.patience and trainer.is_global_zero:
            best = float(self.best_score)
            print(f"stopped: no better {self.monitor} than {best:.4f} in {self.wait_count} validations", flush=True)


class StageStop(EarlyStop):
    """End a stage of a distillation after so many validations without a better one, and the run with its last stage.

    Each stage is judged by its own metric of the validation, unless the rule names one.

    Args:
        config: The rule; its patience must be given.
        monitor: What is monitored before the first stage is known.
    """

    state_key = "StageStop"

    def __init__(self, config: EarlyStoppingConfig, monitor: str) -> None:
        super().__init__(config, monitor)
        self.asked, self.stage = config.monitor, -1

    def state_dict(self) -> dict[str, Any]:
        """Keep the stage, too."""
        return {**super().state_dict(), "stage": self.stage}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the stage, too."""
        super().load_state_dict(state_dict)
        self.stage = state_dict["stage"]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the validation with the best one of the stage; go on with the next stage where it is over."""
        module: Any = pl_module
        self.monitor = self.asked or module.figure
        self.mode = mode_of(self.monitor)
        self.min_delta = abs(self.min_delta) if self.mode == "max" else -abs(self.min_delta)  # as Lightning's has it
        if not trainer.sanity_checking and self.stage != module.stage_number:
            self.stage, self.wait_count = module.stage_number, 0
            self.best_score = torch.tensor(torch.inf if self.mode == "min" else -torch.inf)
        super().on_validation_end(trainer, pl_module)
        if self.wait_count >= self.patience and module.end_stage():
            trainer.should_stop, self.wait_count = False, 0


def can_resume_after_batch(trainer: Trainer) -> bool:
    """Return whether a checkpoint written in `on_train_batch_end` loses nothing.

    Lightning resumes from such a checkpoint with the next batch: it would skip a validation due after this one, and
    the hooks at the end of the epoch.
    """
    loop = trainer.fit_loop
    validation_is_due = loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # type: ignore[arg-type]
    return not (trainer.is_last_batch or validation_is_due)


def is_last_epoch(trainer: Trainer) -> bool:
    """Return at the end of an epoch whether training ends with it; `done` of Lightning's loop would also print."""
    epochs = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
    counts = (trainer.global_step, trainer.max_steps), (epochs, trainer.max_epochs or -1)
    return trainer.should_stop or any(-1 != limit <= count for count, limit in counts)
