"""The options of training under `headmix train-cls` and `headmix train-gen`: Lightning's, with a run directory."""

import atexit
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from headmix_vision.console import command_words, is_terminal, say
from headmix_vision.errors import InputError
from headmix_vision.files.reading import read_text
from headmix_vision.processes import end_without_others, leave_group
from headmix_vision.recipes import with_config_paths
from headmix_vision.runs.checkpoints import (
    DESCRIPTION_KEY,
    check_description,
    check_entries,
    find_checkpoint,
    find_standing_checkpoint,
    read_checkpoint,
)
from headmix_vision.runs.directory import BEST, CHECKPOINTS, LAST, METRICS, check_links, standing_file
from headmix_vision.training.callbacks.attention_numbers import AttentionNumbers
from headmix_vision.training.callbacks.checkpointing import EarlyStop, LastCheckpoint, TakeSignals
from headmix_vision.training.callbacks.dry_run import DryRun
from headmix_vision.training.callbacks.ema import EmaWithWarmup, ValidateWhole
from headmix_vision.training.callbacks.non_finite import StopOnNonFinite
from headmix_vision.training.callbacks.progress_display import (
    EpochLines,
    EvaluationLines,
    ImagesPerSecondBar,
    ModelSize,
)
from headmix_vision.training.callbacks.start_run import StartRun
from headmix_vision.training.checkpoint_io import AtomicCheckpointIO
from headmix_vision.training.command_help import GENERATORS, KINDS, RECIPES, subcommand_help
from headmix_vision.training.idle_options import (
    check_given,
    check_groups,
    check_texts,
    check_values,
    given_options,
    is_shortened,
)
from headmix_vision.training.metrics_csv import MetricsCSV
from headmix_vision.training.options import (
    AnalysisConfig,
    EarlyStoppingConfig,
    EmaConfig,
    check_trainer_options,
    require,
)
from headmix_vision.training.parser import OptionParser, load_yaml, with_config_of_run, with_underscores
from headmix_vision.training.resuming import OPTIONS, list_changes, stored_options
from headmix_vision.training.run_directory import RunDirectory, resume_command
from headmix_vision.training.sharding import NOT_ON_SHARDS, ShardedStrategy
from headmix_vision.training.signals import InterruptRequest
from headmix_vision.training.trust import Trust, configs_of

_NOT_SAVED = ("config", "ckpt_path", "weights_only", "overwrite", "dry_run", "trust_config", "data_changed")


class RunCLI(LightningCLI):
    """Put a run directory around Lightning's command line; a subclass names module, data and recipes.

    Args:
        request: Handler of SIGINT and SIGTERM.
        resources: Keeps the run directory claimed until the process is done with it.
        args: Command line, without the program's name.
    """

    module_class: ClassVar[type[LightningModule]]
    data_class: ClassVar[type[LightningDataModule]]
    kind: ClassVar[str]  # a name in `command_help.KINDS`
    runs_folder: ClassVar[str] = "runs"
    summary: str = ""

    def __init__(self, request: InterruptRequest, resources: ExitStack, args: Sequence[str]) -> None:
        self.request = request
        self.resources = resources
        resources.push(self._end)  # first, so that it comes last: after this nothing is cleaned up
        self.run_directory: RunDirectory | None = None
        self.checkpoint: dict[str, Any] | None = None
        self.words = args
        self.trust = Trust(args)
        self.trust.restrict_imports()
        super().__init__(
            self.module_class,
            self.data_class,
            save_config_callback=StartRun,
            trainer_defaults={"use_distributed_sampler": False},
            parser_class=OptionParser,
            parser_kwargs={
                "prog": " ".join(command_words()),
                "description": (self.__doc__ or "").partition("\n")[0],
            },
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=list(args),
        )

    def _end(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and (trainer := getattr(self, "trainer", None)) is not None:
            end_without_others(error, getattr(trainer.strategy.launcher, "procs", ()))

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the subcommand that the command line begins with, as each parser takes time to make; else all."""
        offered = {name: LightningCLI.subcommands()[name] for name in KINDS[self.kind][1]}
        return {word: offered[word] for word in self.words[:1] if word in offered} or offered

    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        """Make the parser of the subcommand, whose `--help` shows the common options."""
        super().setup_parser(*args, **kwargs)
        for subcommand, parser in self._subcommand_parsers.items():
            assert isinstance(parser, OptionParser)
            parser.show_common(partial(subcommand_help, subcommand, self.kind))

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the seed, a number, so that two runs of one command are equal."""
        parser.add_argument("--seed_everything", type=int, default=0, help="Seed of everything that is random.")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of the run directory, the EMA, early stopping and the attention matrices."""
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help=f"Run directory (default: {self.runs_folder}/<names of the config files and of --model.name>).",
        )
        parser.add_argument(
            "--dry_run",
            action="store_true",
            help="Open everything, put one batch through, say what would be done, and write nothing.",
        )
        parser.add_argument(
            "--trust_config",
            action="store_true",
            help="Let the configs name any class, address and folder: they can then run code.",
        )
        parser.add_argument(
            "--overwrite",
            type=bool,
            nargs="?",
            const=True,
            default=False,
            help="Replace an earlier run in the run directory.",
        )
        parser.add_argument(
            "--data_changed",
            action="store_true",
            help="Go on with a run although its training data have changed.",
        )
        parser.add_argument(
            "--checkpoint_every_n_steps",
            type=int | None,
            default=None,
            help="Also write last.ckpt every so many optimizer steps, not only around each validation.",
        )
        parser.add_class_arguments(EmaConfig, "ema")
        parser.add_class_arguments(EarlyStoppingConfig, "early_stopping")
        parser.add_class_arguments(AnalysisConfig, "analysis")
        parser.link_arguments("seed_everything", "model.seed")
        parser.link_arguments("seed_everything", "data.seed")

    @property
    def monitor(self) -> str:
        """Metric that selects the best checkpoint, and is watched by early stopping, by default."""
        return "val/loss"

    @property
    def options(self) -> Any:
        """The parsed options of the subcommand."""
        return self.config[self.config.subcommand]

    def default_run_name(self) -> str:
        """Join the names of the config files and of a model on the command line."""
        stems = self.config_names()
        if not stems or "model.name" in self.given:
            stems.append(self.options.model.name)
        return "-".join(stems)

    def config_names(self) -> list[str]:
        """Return the names of the config files; overlays change no result."""
        paths = [Path(str(path)) for path in self.options.get("config") or [] if path is not None]  # None: written out
        return [path.stem for path in paths if path.parent.name != "overlays"]

    def complete_options(self) -> None:
        """Set the options that follow from others."""

    def check_model(self, checkpoint: dict[str, Any]) -> None:
        """Raise InputError if a checkpoint belongs to another model than the options name."""
        check_description(checkpoint, self.options.model.name, self.options.model.num_classes)

    def early_stop(self, config: EarlyStoppingConfig) -> EarlyStop:
        """Return the rule that ends a run early."""
        return EarlyStop(config, self.monitor)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, then settle run directory and checkpoint, so that errors in them are raised before any work."""
        check_values(args)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            try:
                super().parse_arguments(parser, args)
            except UnicodeDecodeError as error:
                raise InputError(f"a config file is not text: {error}") from error
            except InputError:
                raise
            except (ValueError, TypeError, AttributeError, KeyError) as error:  # of jsonargparse, for values in files
                raise InputError(f"a config or an option cannot be read: {error}") from error
        options = self.options
        self.given = given_options(args)
        defaults = self._parser(self.config.subcommand).get_defaults()
        configs = [load_yaml(read_text(one) if os.path.isfile(one) else one) for one in configs_of(args)]
        for given in (options, *configs):
            check_groups(given, defaults)  # which jsonargparse leaves out, or takes as they are
        self.trust.check(options, training=self.config.subcommand == "fit")
        check_texts(options)
        check_trainer_options(options.trainer, self.config.subcommand)
        self.complete_options()
        require(
            0 <= options.seed_everything < 2**32,
            f"seed_everything must be in [0, 2**32), got {options.seed_everything}",
        )
        if options.run_dir is None:
            options.run_dir = f"{self.runs_folder}/{self.default_run_name()}"
        require(
            not options.data_changed or options.ckpt_path is not None,
            "--data-changed applies only to a run that goes on: give --ckpt-path, or remove it",
        )
        if options.ckpt_path == "auto" and self.config.subcommand == "fit":
            options.ckpt_path = "last" if standing_file(Path(options.run_dir), LAST).is_file() else None
        if not self.trust.is_whole:
            check_links(Path(options.run_dir))
        check_given(self.given, options, self.config.subcommand)
        writes = self.config.subcommand == "fit" and not options.trainer.fast_dev_run
        if writes and getattr(rank_zero_only, "rank", 0) == 0:
            self._claim_run_directory()
        self._open_checkpoint()

    def _claim_run_directory(self) -> None:
        options = self.options
        claimed = RunDirectory(Path(options.run_dir), options.ckpt_path, overwrite=options.overwrite)
        if options.dry_run:
            claimed.check()
            return
        self.resources.enter_context(claimed.claimed())
        self.run_directory = claimed

    def _open_checkpoint(self) -> None:
        options, training = self.options, self.config.subcommand == "fit"
        if options.ckpt_path is None and training:
            return
        if options.ckpt_path is None and not (Path(options.run_dir) / CHECKPOINTS).is_dir():
            raise InputError(
                f"{self.config.subcommand} needs weights, and there is no run in {options.run_dir}:"
                " give the run by --run-dir, or a file by --ckpt-path"
            )
        if training:
            options.ckpt_path = str(find_standing_checkpoint(Path(options.run_dir), options.ckpt_path))
        else:
            options.ckpt_path = str(find_checkpoint(options.run_dir, options.ckpt_path))
        self.checkpoint = read_checkpoint(options.ckpt_path, sharded=(), values=False)
        check_entries(self.checkpoint, options.ckpt_path, resuming=training)
        self.check_model(self.checkpoint)
        if training:
            self._check_best()
        if training and getattr(rank_zero_only, "rank", 0) == 0:
            before = stored_options(self.checkpoint, Path(options.ckpt_path))
            if changes := list_changes(before, self._plain_options()):
                say("\n  ".join(["options that differ from the checkpoint's:", *changes]))
        if not training and getattr(rank_zero_only, "rank", 0) == 0:
            top1 = self.checkpoint[DESCRIPTION_KEY].get("top1")
            accuracy = "" if top1 is None else f", top-1 {100 * top1:.2f} % when it was saved"
            weights = "EMA" if "current_model_state" in self.checkpoint else "trained weights"
            print(f"checkpoint {options.ckpt_path} ({weights} of step {self.checkpoint['global_step']}{accuracy})")

    def _check_best(self) -> None:
        """Refuse to go on beside a best checkpoint that cannot be opened; its tensors are not read."""
        best = standing_file(Path(self.options.run_dir), BEST)
        try:
            if best.is_file():
                read_checkpoint(best, sharded=(), values=False)
        except InputError as error:
            raise InputError(
                f"the best checkpoint of the run cannot be opened: {error}. Put it back, or delete {best} to go on"
                " without it"
            ) from None

    def _plain_options(self) -> dict[str, Any]:
        """Return the options that belong to the run, as plain values."""
        options = self.options.clone()
        for name in _NOT_SAVED:
            options.pop(name, None)
        dumped = self._parser(self.config.subcommand).dump(
            options, format="json", skip_none=False, skip_validation=True
        )
        return cast(dict[str, Any], json.loads(dumped))

    def _parse_ckpt_path(self) -> None:
        """Leave the options as they are: no checkpoint of this package holds options."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the trainer with the loggers, callbacks and file formats of the run directory.

        Raises:
            InputError: If Lightning refuses an option, or the optimizer cannot compute on shards.
        """
        options = self.options
        trainer_options = self.config_init[self.config.subcommand].trainer
        training, run_dir = self.config.subcommand == "fit", Path(options.run_dir)
        metrics: list[Logger] = []
        if training:
            resume_step = self.checkpoint["global_step"] if self.checkpoint is not None else None
            existing = standing_file(run_dir, METRICS)
            resume_step = None if options.dry_run else resume_step
            self.metrics = MetricsCSV(run_dir / METRICS, resume_step, existing, self.run_directory)
            metrics, callbacks = [self.metrics], self._fit_callbacks(run_dir)
        else:
            callbacks = [TakeSignals(self.request), *self.evaluation_callbacks(run_dir), *self._progress()]
        # ModelSize says more than Lightning's summary: one line for the whole network, with FLOPs that are 0
        kwargs["enable_model_summary"] = False
        given = trainer_options.callbacks or []
        callbacks = [*(given if isinstance(given, list) else [given]), *callbacks]
        kwargs["enable_progress_bar"] = any(isinstance(callback, ProgressBar) for callback in callbacks)
        self.save_config_kwargs = {
            "run": self.run_directory,
            "not_saved": _NOT_SAVED,
        }
        if options.dry_run:
            metrics, self.save_config_callback = [], None
            callbacks.insert(0, DryRun(run_dir, options.ckpt_path))
        plugins = trainer_options.plugins or []
        after_save = None if self.run_directory is None else self.run_directory.discard_replaced
        kwargs["callbacks"], kwargs["logger"] = callbacks, metrics
        kwargs["plugins"] = [
            *(plugins if isinstance(plugins, list) else [plugins]),
            AtomicCheckpointIO(after_save, self.run_directory, {OPTIONS: self._plain_options()}),
        ]
        kwargs["default_root_dir"] = str(run_dir)
        # else Lightning adds a checkpoint of its own
        kwargs["enable_checkpointing"] = any(isinstance(callback, Checkpoint) for callback in callbacks)
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError, TypeError, ImportError) as error:  # as Lightning refuses options
            raise InputError(f"trainer: {error}") from error
        trainer.callbacks.sort(key=lambda callback: not isinstance(callback, StartRun))  # type: ignore[attr-defined]
        if isinstance(trainer.strategy, DDPStrategy):  # else gradients are kept twice, and copied
            trainer.strategy._ddp_kwargs.setdefault("gradient_as_bucket_view", True)
        _check_nodes(trainer)
        opt = options.model.optimizer.opt
        require(
            not isinstance(trainer.strategy, ShardedStrategy) or not any(name in opt.lower() for name in NOT_ON_SHARDS),
            f"model.optimizer.opt={opt} cannot compute on shards of weights: choose another, or trainer.strategy=ddp",
        )
        return trainer

    def before_fit(self) -> None:
        """Tell the data module whether other data are accepted, and the module whether a recipe was made shorter."""
        self.datamodule.data_changed = self.options.data_changed
        self.model.may_end_in_warmup = self.options.ckpt_path is not None or is_shortened(self.given)

    def _progress(self) -> list[Callback]:
        """Make what shows the progress: a bar on a terminal, else lines."""
        trainer, training = self.options.trainer, self.config.subcommand == "fit"
        shown: list[Callback] = []
        if self.options.dry_run:
            return shown
        if trainer.enable_model_summary is not False:
            shown.append(ModelSize())
        if trainer.enable_progress_bar is not False and is_terminal(sys.stdout):
            shown.append(ImagesPerSecondBar())
        elif trainer.enable_progress_bar is not False:
            shown.append(EpochLines() if training else EvaluationLines())
        return shown

    def _fit_callbacks(self, run_dir: Path) -> list[Callback]:
        options = self.options
        self.last = LastCheckpoint(
            run_dir / LAST,
            self.request,
            " ".join([resume_command(run_dir), *self.trust.needed_to_resume(options)]),
            self.run_directory,
            options.checkpoint_every_n_steps,
        )
        average = EmaWithWarmup(options.ema.decay) if options.ema.decay is not None else None
        stopping = self.config_init[self.config.subcommand].early_stopping
        analysis = self.config_init[self.config.subcommand].analysis
        numbers = [AttentionNumbers(analysis)] if analysis.every_n_epochs is not None else []
        stop = [self.early_stop(stopping)] if stopping.patience is not None else []
        # the order matters: average, show, save; Lightning puts the best checkpoint last
        return [
            average or ValidateWhole(),
            StopOnNonFinite(),
            *self.fit_callbacks(run_dir, average),
            *numbers,
            *self._progress(),
            *stop,
            self.last,
        ]

    def fit_callbacks(self, run_dir: Path, average: EmaWithWarmup | None) -> list[Callback]:
        """Return further callbacks of training."""
        return []

    def evaluation_callbacks(self, run_dir: Path) -> list[Callback]:
        """Return the callbacks of the other subcommands."""
        return []


def _check_nodes(trainer: Trainer) -> None:
    """Refuse several nodes where nothing tells which of them this is: the process would wait for the others."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    known = not isinstance(environment, LightningEnvironment) or {"NODE_RANK", "GROUP_RANK"} & os.environ.keys()
    require(
        trainer.num_nodes == 1 or bool(known),
        f"trainer.num_nodes={trainer.num_nodes}, but no launcher has started this process: start the command on each"
        " node by torchrun or SLURM, set MASTER_ADDR, MASTER_PORT and NODE_RANK there, or set trainer.num_nodes=1",
    )


def _silence_what_does_not_apply() -> None:
    for message in (
        ".*your dataloader is not resumable",  # the data module continues within the epoch
        "Be aware that when using `ckpt_path`, callbacks used to create",  # evaluation needs no training callbacks
        "Checkpoint directory .* exists and is not empty",  # settled by RunDirectory
        "The AccumulateGrad node's stream does not match",  # Lightning sets up DDP on a stream of its own
        "It is recommended to use `self.log.*sync_dist",  # torchmetrics has added up the processes
        "Total length of `list` across ranks is zero",  # a run without a validation split
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # between Lightning and torch
    ):
        warnings.filterwarnings("ignore", message=message)
    advertised = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    advertised.addFilter(
        lambda record: not any(name in record.getMessage() for name in ("litlogger", "litmodels", "TPU available"))
    )


def run_words(
    cli: type[RunCLI],
    words: Sequence[str],
    default_config: str | None = None,
    ending: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> RunCLI:
    """Run what the words of a command line ask for.

    Args:
        cli: The command line.
        words: Subcommand and options, which may be spelled with hyphens.
        default_config: Config of `fit` when there is none among the words: a file or a shipped recipe.
        ending: Makes the context that handles errors. It is left before the run directory is.

    Raises:
        InputError: Wrong input, or a batch too large for the device.
    """
    request = InterruptRequest()
    atexit.register(leave_group)  # Lightning leaves that of NCCL alone
    _silence_what_does_not_apply()
    with ExitStack() as resources, request.installed(), ending():
        try:
            given = with_config_of_run([with_underscores(word) for word in words], generates=cli.kind in GENERATORS)
            return cli(request, resources, with_config_paths(given, RECIPES[cli.kind], default_config))
        except MisconfigurationException as error:
            raise InputError(str(error)) from error
        except torch.OutOfMemoryError as error:
            reason = str(error).partition(". GPU")[0]
            raise InputError(f"{reason}; lower data.batch_size or data.eval_batch_size") from error
    raise AssertionError("the context of errors has kept one")
