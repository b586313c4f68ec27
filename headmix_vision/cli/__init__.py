"""The commands of `headmix COMMAND`, one file each, also installed as `headmix-train-cls` and so on.

The file of a command turns words into a typed request and calls one function of the library. It is imported when its
command is called, and it imports the library when it has read the words: the list of commands and each help need
neither torch nor any other package.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from headmix_vision import __version__
from headmix_vision.console import one_line_errors
from headmix_vision.errors import InputError, suggest


class Command(NamedTuple):
    """A command.

    Args:
        name: Its name, and with underscores the name of its file.
        about: What it does.
    """

    name: str
    about: str

    def __call__(self, args: Sequence[str] | None = None) -> None:
        """Run the command with these arguments, or with the arguments of the process when None."""
        import_module(f"{__name__}.{self.name.replace('-', '_')}").main(args)


COMMANDS = {
    command.name: command
    for command in (
        Command("doctor", "Check the kernels on this machine, and time them against PyTorch's softmax."),
        Command("models", "List the models of the package."),
        Command("train-cls", "Train, validate, test and use classifiers."),
        Command("train-gen", "Train and validate generators."),
        Command("distill", "Swap the attention of a trained model and train it to match the original."),
        Command("sample", "Draw samples from a generator."),
        Command("evaluate", "Score generated images and clips, and features of classifiers."),
        Command("export", "Export the weights of a run."),
        Command("analyze", "Measure and draw the attention of trained networks."),
        Command("cache-latents", "Encode images or videos into latents."),
        Command("index-shards", "Make the index of a folder of tar shards."),
    )
}


def main(args: Sequence[str] | None = None) -> None:
    """Run `headmix COMMAND [ARGUMENTS ...]`."""
    name, *arguments = [*(sys.argv[1:] if args is None else args)] or [""]
    if not name:
        print(_help(), file=sys.stderr)
        sys.exit(2)
    if name in ("-h", "--help"):
        print(_help())
        return
    if name == "--version":
        print(f"headmix_vision {__version__}")
        return
    with one_line_errors():
        if name not in COMMANDS:
            hint = suggest(name, list(COMMANDS)) or "."
            raise InputError(f"no command is called {name!r}{hint} The commands are {', '.join(COMMANDS)}")
    COMMANDS[name](arguments)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {command.name:{width}}  {command.about}" for command in COMMANDS.values()]
    notes = (
        "headmix COMMAND --help shows the arguments of a command, headmix --version the version.",
        "python -m headmix_vision SCRIPT.py runs a script with the models registered with timm.",
    )
    return "\n".join(["usage: headmix COMMAND [ARGUMENTS ...]", "", *lines, "", *notes])
