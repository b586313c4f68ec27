"""Parse the options of training: a short help first, and wrong options in one line that names the nearest one."""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any, NoReturn, cast

import yaml
from jsonargparse import get_loader, set_loader
from lightning.pytorch.cli import LightningArgumentParser

from headmix_vision.errors import InputError, keywords, suggest, unknown_keyword
from headmix_vision.files.reading import check_yaml, read_text
from headmix_vision.runs.directory import CONFIG, standing_file
from headmix_vision.training.command_help import spelled
from headmix_vision.training.trust import refusal

_load_yaml = get_loader("yaml")


def load_yaml(text: str) -> Any:
    """Load YAML by jsonargparse's rules; InputError where its aliases, written out, are too large."""
    check_yaml(text)
    return _load_yaml(text)


set_loader("yaml", load_yaml, exceptions=(yaml.YAMLError,))

_OPTION = re.compile(r"(?<=^unrecognized arguments: )--[\w.]+|(?<=^argument )--[\w.]+")
_ONLY_OF = {True: {"objective"}, False: {"loss", "mixup", "swap_args"}}  # options of the model, by `generates`
_UNKNOWN = re.compile(r"unrecognized arguments: (?P<argument>-\S+)|does not accept option '(?P<key>[^']+)'")


# jsonargparse's report of a value that none of the types of an option takes
_WRONG_TYPE = re.compile(
    r'Parser key "(?P<key>[^"]+)":.*?(?:Subtypes: \[(?P<types>[^\n]*)\]\n.*Given value: (?P<value>.*)'
    r"|Expected an? (?P<type>[^\n]*)\. Got value: ?(?P<got>[^\n]*))",
    re.DOTALL,
)
# what it says within of a class that was named, and of options behind a name that is of no class
_OF_CLASS = re.compile(
    r"^(?P<margin> *)- Problem with given class_path '(?P<path>[^']*)':\n(?P<problem>(?:(?P=margin)    .*(?:\n|$))+)",
    re.MULTILINE,
)
_NO_CLASS = re.compile(
    r"- Expected a dot import path string: (?P<name>\S+)$.*NestedArg\(key='(?P<option>\w+)'", re.S | re.M
)


# jsonargparse's report of a class that is not to be imported
_DENIED = re.compile(r"""^(?:Parser key ")?(?P<key>[\w.]*).*?Importing '(?P<path>[^']+)' is not allowed""", re.DOTALL)


def _imported(path: str) -> type:
    """Return a class that is imported already, such as the one whose arguments were refused."""
    module, _, name = path.rpartition(".")
    return cast(type, getattr(sys.modules.get(module), name, object))


def _shorten(message: str) -> str:
    """Bring a message of jsonargparse on one line, without names of Python's types."""
    if denied := _DENIED.search(message):
        return refusal(denied["key"] or "trainer", denied["path"])
    wrong = _WRONG_TYPE.fullmatch(message.strip())
    if wrong is None:
        return " ".join(message.split())
    key = wrong["key"]
    if of_class := _OF_CLASS.search(message):
        problem = dedent(of_class["problem"]).strip()
        if problem.startswith("Parser key"):
            return f"{key}.{_shorten(problem)}"
        if unknown := re.fullmatch(r"Option '(?P<name>.*)' is not accepted", problem):
            return unknown_keyword(key, unknown["name"], keywords(_imported(of_class["path"])))
        return f"{key}: {' '.join(problem.split())}"
    if no_class := _NO_CLASS.search(message):
        return f"{key}.{no_class['option']} goes with a class path as {key}, not with {no_class['name']}"
    types = re.sub(r"<class '([^']*)'>", r"\1", wrong["types"] or wrong["type"])
    types = re.sub(r"\b(?:[A-Za-z_]\w*\.)+(\w+)", r"\1", types)
    types = re.sub(r"Literal\[([^\]]*)\]", r"\1", types).replace("NoneType", "null")
    return (
        f"{key} must be {' or '.join(types.rsplit(', ', 1))}, got {wrong['value'] or wrong['got'] or 'an empty text'}"
    )


class OptionParser(LightningArgumentParser):
    """Show the common options on `--help` and all on `--help-all`, and raise wrong options as `InputError`.

    A parser inside another one (of a subclass, say) keeps jsonargparse's own errors, which the outer one handles.

    Attributes:
        common: Makes the text of `--help`; None shows all options.
    """

    common: Callable[[], str] | None = None

    def show_common(self, text: Callable[[], str]) -> None:
        """Make `--help` show this text, and add `--help-all`."""
        self.common = text
        self.add_argument("--help-all", action=_AllOptions, help="Show all options and exit.")

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Return the help of the common options, or of all where none are named as common."""
        return super().format_help(*args, **kwargs) if self.common is None else self.common()

    def format_all(self) -> str:
        """Return the help of all options."""
        return super().format_help()

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise `InputError` with the message on one line, and the nearest option if one is unknown."""
        if not self.exit_on_error:
            super().error(message, ex)
        said = _OPTION.sub(lambda option: spelled(option[0]), _shorten(message))
        raise InputError(said + self._hint(message)) from ex

    def _hint(self, message: str) -> str:
        if "arguments are required" in message:
            return "; give a recipe by -c, or the folder of a run by --run-dir"
        unknown = _UNKNOWN.search(message)
        if unknown is None:
            return ""
        asked = spelled(f"--{(unknown['argument'] or unknown['key']).lstrip('-').partition('=')[0]}")
        known = [spelled(option) for option in self._options() if option.startswith("--")]
        # `--lr` is far from `--model.optimizer.lr` by letters
        ending = [option for option in known if option.endswith(f".{asked[2:]}")][:3]
        return (
            f"; did you mean {' or '.join(ending)}?"
            if ending
            else suggest(asked, known, "--help-all shows all options")
        )

    def _options(self) -> list[str]:
        options = list(self._option_string_actions)
        if self._subcommands_action is not None:  # a YAML file's keys are looked up here
            options += [o for parser in self._subcommands_action.choices.values() for o in parser._options()]
        return list(dict.fromkeys(options))


class _AllOptions(argparse._HelpAction):
    """Print the help of all options, and end."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, OptionParser)
        print(parser.format_all(), end="")
        parser.exit()


def with_underscores(word: str) -> str:
    """Spell an option of a command line as the keys of YAML files: `--run-dir=runs/a` becomes `--run_dir=runs/a`."""
    option, sign, value = word.partition("=")
    is_key = option.startswith("--") and option != "--help-all"
    return f"--{option[2:].replace('-', '_')}{sign}{value}" if is_key else word


def with_config_of_run(args: list[str], *, generates: bool | None = None) -> list[str]:
    """Insert the config of the run in `--run_dir` if none is given and that run is read: evaluated or resumed.

    Args:
        args: Subcommand and options.
        generates: Whether the command trains generators; None to take any run.

    Raises:
        InputError: There is no such run, or it belongs to the other command.
    """
    subcommand, options = args[:1], args[1:]
    if not subcommand or any(arg.startswith("-c") or arg.split("=")[0] == "--config" for arg in options):
        return args
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--run_dir", nargs="?")
    finder.add_argument("--ckpt_path", nargs="?")
    given, _ = finder.parse_known_args(options)
    training = subcommand == ["fit"]
    if not given.run_dir or (training and not given.ckpt_path):
        return args
    run = Path(given.run_dir)
    config = standing_file(run, CONFIG) if training else run / CONFIG
    if config.is_file():
        settings = _settings(config)
        model = settings.get("model")
        if generates is not None and isinstance(model, dict) and not _ONLY_OF[not generates].isdisjoint(model):
            raise InputError(f"{given.run_dir} is a run of headmix {'train-cls' if generates else 'train-gen'}")
        return [*subcommand, "--config", str(config), *_rules_of_earlier_versions(settings), *options]
    if training:
        return args
    raise InputError(f"there is no run in {given.run_dir}: {config} does not exist")


def _settings(config: Path) -> dict[str, Any]:
    """Read the config of a run; a file that the parser will refuse holds nothing."""
    try:
        settings = load_yaml(read_text(config))
    except (yaml.YAMLError, InputError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _rules_of_earlier_versions(settings: dict[str, Any]) -> list[str]:
    """Return options by which a run is read as it was trained: tables left pictures out that had no label."""
    data = settings.get("data", {})
    is_table = isinstance(data, dict) and str(data.get("dataset", "")).startswith("table/")
    return ["--data.skip_unlabelled", "true"] if is_table and "skip_unlabelled" not in data else []
