"""Decide what the file of a config may name: listed classes, its own folder, no address; the command line names all.

jsonargparse imports and instantiates whatever class a config names. Its import policy is set here to a list, which the
classes of the command line extend, and with `--trust-config` the classes of the configs.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from typing import Any

import yaml
from jsonargparse import set_parsing_settings

from headmix_vision.errors import InputError
from headmix_vision.files.reading import parse_yaml
from headmix_vision.recipes import FOLDER
from headmix_vision.runs.directory import is_run

OPTION = "--trust-config"
_FLAGS = (OPTION, "--trust_config")
_CONFIGS = ("-c", "--config")
# Classes that any config may name: none of them takes a path to write to, an address or a function by its name.
_LISTED = {
    "headmix_vision.training.sharding": ("ShardedStrategy",),
    "lightning.pytorch.accelerators": ("CPUAccelerator", "CUDAAccelerator"),
    "lightning.pytorch.callbacks": (
        *("BackboneFinetuning", "BatchSizeFinder", "DeviceStatsMonitor", "EMAWeightAveraging", "EarlyStopping"),
        *("GradientAccumulationScheduler", "LearningRateFinder", "LearningRateMonitor", "ModelPruning", "ModelSummary"),
        *("RichModelSummary", "RichProgressBar", "StochasticWeightAveraging", "TQDMProgressBar", "ThroughputMonitor"),
        *("Timer", "WeightAveraging"),
    ),
    "lightning.pytorch.callbacks.progress.rich_progress": ("RichProgressBarTheme",),
    "lightning.pytorch.loggers": (),
    "lightning.pytorch.plugins": (
        *("DoublePrecision", "FSDPPrecision", "HalfPrecision", "MixedPrecision", "Precision", "TorchCheckpointIO"),
        "TorchSyncBatchNorm",
    ),
    "lightning.pytorch.plugins.environments": (
        *("LightningEnvironment", "MPIEnvironment", "SLURMEnvironment", "TorchElasticEnvironment"),
    ),
    "lightning.pytorch.profilers": ("PassThroughProfiler",),
    "lightning.pytorch.strategies": ("DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", "SingleDeviceStrategy"),
}
_CLASS = re.compile(r"(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*")
_BETWEEN_WORDS = re.compile(r"[\s='\"\[\]{},]+|:(?=\s|$)")
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*:")
_FETCHED = ("hfds/", "hfids/", "tfds/")
_OF_ONE_START = ("run_dir", "overwrite", "ckpt_path")


class Trust:
    """Hold what a command line has named, and decide what its configs may therefore name.

    Args:
        args: The command line, with paths in the place of recipes' names.
    """

    def __init__(self, args: Sequence[str]) -> None:
        self.is_whole = any(arg in _FLAGS for arg in args)
        files = [Path(value) for value in configs_of(args) if os.path.isfile(value)]
        self._own = [path for path in files if not path.resolve().is_relative_to(FOLDER.resolve())]
        shipped = [path.read_text() for path in files if path not in self._own]
        self._words = {*args, *(arg.partition("=")[2] for arg in args)}
        self._words |= {word for text in (*args, *shipped) for word in _BETWEEN_WORDS.split(text)}
        self._named = [name for text in _class_options(args) for name in _class_names(text)]
        if self.is_whole:
            self._named += [name for path in self._own for name in _class_names(path.read_text(errors="replace"))]

    def restrict_imports(self) -> None:
        """Let jsonargparse import the listed classes, and the classes of the command line and of trusted configs."""
        set_parsing_settings(
            instantiate_subclass_spec_in_any=False,
            validate_subclass_spec_in_any=True,
            import_path_denylist=["*"],
            import_path_allowlist=sorted({place for name in (*_listed(), *self._named) for place in _places(name)}),
        )

    def knows(self, value: object) -> bool:
        """Return whether the command line or a shipped recipe names a value, or the configs are trusted."""
        return self.is_whole or str(value) in self._words

    def needed_to_resume(self, options: Any) -> list[str]:
        """Return the option without which the config that a run saves would be refused; none where it is not needed."""
        named = any(_places(name).isdisjoint(_listed()) for name in self._named)
        refused = any(key not in _OF_ONE_START for key, *_ in self._suspicious(options, training=True, words=()))
        return [OPTION] if self.is_whole or named or refused else []

    def check(self, options: Any, *, training: bool) -> None:
        """Check the parsed options of a command.

        Raises:
            InputError: If a file names something that only the command line may name.
        """
        if self.is_whole:
            return
        if options.trust_config:
            raise InputError(f"a config sets trust_config: give {OPTION} on the command line")
        where = " and ".join(map(str, self._own)) or "a config"
        for key, value, why in self._suspicious(options, training, self._words):
            raise InputError(
                f"{key}={value} in {where} {why}: give --{key} on the command line, or trust the whole file with"
                f" {OPTION}"
            )

    def _suspicious(self, options: Any, training: bool, words: Collection[str]) -> Iterator[tuple[str, object, str]]:
        """Yield what only the command line may name: key, value, and why."""
        for key in ("accelerator", "logger", "profiler", "strategy"):
            value = options.trainer.get(key)
            if isinstance(value, str) and _CLASS.fullmatch(value) and value not in words:
                yield f"trainer.{key}", value, "names a class"
        for key in ("overwrite", "ckpt_path") if training else ():
            if options.get(key) and not {f"--{key}", key} & {*words}:
                yield key, options[key], "changes a run"
        if training and options.run_dir is not None and options.run_dir not in words:
            folder = Path(options.run_dir).resolve()
            homes = [path.resolve().parent for path in self._own if is_run(path.parent)]
            if folder not in homes if homes else not folder.is_relative_to(Path.cwd()):
                yield "run_dir", options.run_dir, "is another folder than its own"
        for key in ("data.dataset", "fid.real"):
            value = options.get(key)
            if isinstance(value, str) and value.lower().startswith(_FETCHED) and value not in words:
                yield key, value, "is fetched from the network"
        root = options.get("data.root")
        if isinstance(root, str) and _ADDRESS.match(root) and root not in words:
            yield "data.root", root, "is an address"
        if not any(word.endswith("pretrained") for word in words):
            for key, value in _entries(options.model.get("model_args"), "model.model_args"):
                if key.endswith(".pretrained") and value:
                    yield key, value, "fetches weights"


def refusal(key: str, path: str) -> str:
    """Return the message that a config may not name a class."""
    return (
        f"{key} names {path}, which only the command line may name: give --{key} there, or trust the whole config with"
        f" {OPTION}"
    )


def _listed() -> Iterator[str]:
    return (f"{home}.{name}" for home, names in _LISTED.items() for name in names)


def configs_of(args: Sequence[str]) -> Iterator[str]:
    """Yield the configs of a command line: their paths, or their texts where they are written out."""
    for before, arg in zip(("", *args), args, strict=False):
        option, _, value = arg.partition("=")
        if before in _CONFIGS or (value and option in _CONFIGS):
            yield arg if before in _CONFIGS else value


def _class_options(args: Sequence[str]) -> Iterator[str]:
    """Yield the values of the options that take classes, and configs that are written out on the command line."""
    option = ""
    for arg in args:
        value = arg
        if arg.startswith("-"):
            option, _, value = arg.partition("=")
        if (option.startswith("--trainer") or option in _CONFIGS) and value and not os.path.isfile(value):
            yield value


def _class_names(text: str) -> Iterator[str]:
    """Yield the class paths in YAML; a bare name may be that of any class of Lightning."""
    with suppress(yaml.YAMLError):
        for _, value in _entries(parse_yaml(text)):
            if isinstance(value, str) and _CLASS.fullmatch(value):
                yield value
            elif isinstance(value, str) and value.isidentifier():
                yield from (path for home in _LISTED if locate(path := f"{home}.{value}") is not None)


def _places(name: str) -> set[str]:
    """Return the path of a class and that of its definition, which differ where a package exports it again."""
    try:
        found = locate(name)
    except ErrorDuringImport:  # which the parser says
        return {name}
    return {name, f"{found.__module__}.{found.__qualname__}"} if isinstance(found, type) else {name}


def _entries(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all plain values within lists and tables, once each, with the path of their keys."""
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [(key, value)]
    while todo:
        key, value = todo.pop()
        inner: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict):
            inner = value.items()
        elif isinstance(value, list | tuple):
            inner = (("", item) for item in value)
        else:
            yield key, value
            continue
        if id(value) not in seen:
            seen.add(id(value))
            todo += [(f"{key}.{name}" if name != "" else key, item) for name, item in inner]
