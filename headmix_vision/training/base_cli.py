"""Defines the command line under `train_cls.py` and `train_gen.py`: Lightning's, with a run directory around it."""

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from headmix_vision.errors import InputError, one_line_errors
from headmix_vision.recipes import with_config_paths
from headmix_vision.runs.checkpoints import check_description, read_checkpoint
from headmix_vision.runs.directory import find_checkpoint
from headmix_vision.training import run_directory
from headmix_vision.training.callbacks.ema import EmaWithWarmup
from headmix_vision.training.callbacks.graceful_interrupt import GracefulInterrupt
from headmix_vision.training.callbacks.last_checkpoint import LastCheckpoint
from headmix_vision.training.callbacks.non_finite import NonFiniteError, StopOnNonFinite
from headmix_vision.training.callbacks.progress import ImagesPerSecondBar
from headmix_vision.training.callbacks.throughput import ImagesPerSecond
from headmix_vision.training.checkpoint_io import AtomicCheckpointIO
from headmix_vision.training.metrics_csv import MetricsCSV
from headmix_vision.training.options import EmaConfig
from headmix_vision.training.signals import InterruptRequest

_NOT_SAVED = ("config", "ckpt_path", "weights_only", "overwrite")


class SaveRunConfig(SaveConfigCallback):
    """Writes `config.yaml` of a training run, without the options that concern this start of it only."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Writes the file at the start of `fit`."""
        if stage != "fit":
            return
        config = self.config.clone()
        for name in _NOT_SAVED:
            config.pop(name, None)
        path = Path(config.run_dir) / run_directory.CONFIG
        path.parent.mkdir(parents=True, exist_ok=True)
        self.parser.save(config, str(path), skip_none=False, skip_validation=True, overwrite=True, multifile=False)


class RunCLI(LightningCLI):
    """Puts a run directory around Lightning's command line; a subclass names module, data and recipes.

    Args:
        request: Handler of SIGINT and SIGTERM.
        args: Command line, without the program's name.
    """

    module_class: ClassVar[type[LightningModule]]
    data_class: ClassVar[type[LightningDataModule]]
    recipes: ClassVar[str]
    runs_folder: ClassVar[str] = "runs"

    def __init__(self, request: InterruptRequest, args: Sequence[str]) -> None:
        self.request = request
        self.checkpoint: dict[str, Any] | None = None
        super().__init__(
            self.module_class,
            self.data_class,
            save_config_callback=SaveRunConfig,
            save_config_kwargs={"overwrite": True, "save_to_log_dir": False},
            trainer_defaults={"use_distributed_sampler": False},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=list(args),
        )

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the seed, a number, so that two runs of one command are equal."""
        parser.add_argument("--seed_everything", type=int, default=0, help="Seed of everything that is random.")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the options of the run directory and of the moving average."""
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help=f"Run directory (default: {self.runs_folder}/<names of the config files>).",
        )
        parser.add_argument("--overwrite", type=bool, default=False, help="Delete an earlier run in the run directory.")
        parser.add_argument(
            "--checkpoint_every_n_steps",
            type=int | None,
            default=None,
            help="Also write last.ckpt every so many optimizer steps, not only around each validation.",
        )
        parser.add_class_arguments(EmaConfig, "ema")
        parser.link_arguments("seed_everything", "model.seed")
        parser.link_arguments("seed_everything", "data.seed")

    @property
    def options(self) -> Any:
        """The parsed options of the subcommand."""
        return self.config[self.config.subcommand]

    def default_run_name(self) -> str:
        """Joins the names of all config files but overlays, which change how a run is done and not what it does."""
        paths = [Path(str(path)) for path in self.options.get("config") or []]
        stems = [path.stem for path in paths if path.parent.name != "overlays"]
        return "-".join(stems) or self.options.model.name

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses, then settles run directory and checkpoint, so that errors in them are raised before any work."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            super().parse_arguments(parser, args)
        options = self.options
        if options.run_dir is None:
            options.run_dir = f"{self.runs_folder}/{self.default_run_name()}"
        if options.ckpt_path is not None:
            options.ckpt_path = str(find_checkpoint(options.run_dir, options.ckpt_path))
            self.checkpoint = read_checkpoint(options.ckpt_path)
            check_description(self.checkpoint, options.model.name, options.model.num_classes)
        elif self.config.subcommand != "fit":
            raise InputError(f"{self.config.subcommand} needs weights: --ckpt_path best, last or a file")
        writes = self.config.subcommand == "fit" and not options.trainer.fast_dev_run
        if writes and getattr(rank_zero_only, "rank", 0) == 0:
            run_directory.prepare_run_directory(
                Path(options.run_dir), resuming=self.checkpoint is not None, overwrite=options.overwrite
            )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Makes the trainer with the loggers, callbacks and file formats of the run directory."""
        options = self.options
        run_dir = Path(options.run_dir)
        trainer_options = self.config_init[self.config.subcommand].trainer
        if self.config.subcommand == "fit":
            resume_step = self.checkpoint["global_step"] if self.checkpoint is not None else None
            metrics = MetricsCSV(run_dir / run_directory.METRICS, resume_step)
            kwargs["logger"] = [metrics, TensorBoardLogger(run_dir, name="", version=run_directory.TENSORBOARD)]
            callbacks = self._fit_callbacks(run_dir, metrics)
        else:
            kwargs["logger"] = False
            callbacks = [GracefulInterrupt(self.request)]
            callbacks += self.evaluation_callbacks(run_dir)
        if trainer_options.enable_progress_bar is not False:
            callbacks.append(ImagesPerSecondBar())
        given = trainer_options.callbacks or []
        kwargs["callbacks"] = [*(given if isinstance(given, list) else [given]), *callbacks]
        plugins = trainer_options.plugins or []
        kwargs["plugins"] = [*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpointIO()]
        kwargs["default_root_dir"] = str(run_dir)
        return super().instantiate_trainer(**kwargs)

    def _fit_callbacks(self, run_dir: Path, metrics: MetricsCSV) -> list[Callback]:
        options = self.options
        self.last = LastCheckpoint(run_dir / run_directory.CHECKPOINTS / "last.ckpt", options.checkpoint_every_n_steps)
        self.metrics = metrics
        average = [EmaWithWarmup(options.ema.decay)] if options.ema.decay is not None else []
        before, after = self.fit_callbacks(run_dir, average[0] if average else None)
        # the order matters: average, save, stop
        return [
            *average,
            StopOnNonFinite(),
            *before,
            ImagesPerSecond(),
            self.last,
            GracefulInterrupt(self.request, self.last, run_directory.resume_command(run_dir)),
            *after,
        ]

    def fit_callbacks(self, run_dir: Path, average: EmaWithWarmup | None) -> tuple[list[Callback], list[Callback]]:
        """Returns the callbacks of training that run before `last.ckpt` is written, and those that run after."""
        return [], []

    def evaluation_callbacks(self, run_dir: Path) -> list[Callback]:
        """Returns the callbacks of the other subcommands."""
        return []


def _silence_what_does_not_apply() -> None:
    for message in (
        ".*your dataloader is not resumable",  # the data module continues within the epoch
        "Be aware that when using `ckpt_path`, callbacks used to create",  # evaluation needs no training callbacks
        "Checkpoint directory .* exists and is not empty",  # settled by prepare_run_directory
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # between Lightning and torch
    ):
        warnings.filterwarnings("ignore", message=message)
    advertised = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    advertised.addFilter(lambda record: "litlogger" not in record.getMessage())


def run_command_line(cli: type[RunCLI], args: Sequence[str] | None = None, default_config: str | None = None) -> None:
    """Runs a command line.

    Wrong input ends the process with one line and exit status 2, non-finite numbers with one line and exit status 1;
    every other exception is a defect and keeps its traceback.

    Args:
        cli: The command line.
        args: Its arguments, without the program's name; those of the process when None.
        default_config: Config of `fit` when there is none among the arguments: a file or a shipped recipe.
    """
    request = InterruptRequest()
    request.install()
    _silence_what_does_not_apply()
    with one_line_errors():
        try:
            given = sys.argv[1:] if args is None else args
            cli(request, with_config_paths(given, cli.recipes, default_config))
        except NonFiniteError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)
