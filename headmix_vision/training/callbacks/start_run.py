"""Write the first files of a training run, when nothing stands in the way of its first step."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

from headmix_vision.files.writing import atomic_path
from headmix_vision.runs.directory import CONFIG, TENSORBOARD
from headmix_vision.training.run_directory import RunDirectory


def _leave_to_main(args: threading.ExceptHookArgs) -> None:
    """Print what ends a thread, but no error of the thread that writes for TensorBoard, which raises it once more."""
    if not (issubclass(args.exc_type, OSError) and type(args.thread).__name__ == "_AsyncWriterThread"):
        threading.__excepthook__(args)


class _TensorBoard(TensorBoardLogger):
    """Write the file of TensorBoard in a run directory, and note if that fails.

    Args:
        path: The run directory.
        run: The same; None in processes other than the first, which write nothing.
    """

    def __init__(self, path: Path, run: RunDirectory | None) -> None:
        super().__init__(path, name="", version=TENSORBOARD)
        self.run = run
        threading.excepthook = _leave_to_main

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            cause = (
                error if isinstance(error, OSError) else error.__cause__
            )  # Lightning covers it with words of its own
            if self.run is None or not isinstance(cause, OSError):
                raise
            self.run.note(cause)

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        with self._noting():
            super().log_metrics(*args, **kwargs)

    def save(self) -> None:
        with self._noting():
            super().save()

    def finalize(self, status: str) -> None:
        with self._noting():
            super().finalize(status)


class StartRun(SaveConfigCallback):
    """Take the run directory over when training begins: `config.yaml`, and TensorBoard's file.

    Until then a mistake in the options, the model or the data may still end the run, which leaves the directory as it
    was. That is also why TensorBoard's logger, which opens its file in the setup, joins the others here. It comes
    before callbacks that write to the directory, and leaves them when it is done.

    Args:
        *args: As for Lightning's `SaveConfigCallback`.
        run: The run directory; None in processes other than the first.
        not_saved: Options that concern this start of the run only.
        **kwargs: As for Lightning's `SaveConfigCallback`.
    """

    def __init__(
        self,
        *args: Any,
        run: RunDirectory | None,
        not_saved: Sequence[str],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.run = run
        self.not_saved = not_saved

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write nothing yet."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Write the first files."""
        self._start(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the first files of a run that goes on with a validation."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._start(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tidy up where no batch was left to train."""
        if self.run is not None:
            self.run.begin()

    def _start(self, trainer: Trainer) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        trainer.callbacks = [one for one in trainer.callbacks if one is not self]  # type: ignore[attr-defined]
        run_dir = Path(self.config.run_dir)
        if self.run is not None:
            self.run.begin()
            self._save_config(run_dir / CONFIG)
        trainer.loggers = [*trainer.loggers, _TensorBoard(run_dir, self.run)]

    def _save_config(self, path: Path) -> None:
        config = self.config.clone()
        for name in self.not_saved:
            config.pop(name, None)
        with atomic_path(path) as temporary:
            self.parser.save(config, str(temporary), skip_none=False, skip_validation=True, multifile=False)
