"""Commands and imports of all documents: each command line is one that its parser takes."""

import argparse
import ast
import builtins
import importlib
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headmix_vision.cli import COMMANDS
from headmix_vision.errors import InputError
from headmix_vision.recipes import DEFAULT, FOLDER, with_config_paths
from headmix_vision.runs.directory import CONFIG
from headmix_vision.training.base_cli import RunCLI, with_config_of_run, with_underscores

ROOT = Path(__file__).parents[1]
PLACES = ("*.md", "docs/*.md", "benchmarks/*.md", "experiments/**/*.md", "headmix_vision/ops/*/*.md")
DOCUMENTS = sorted(path for place in PLACES for path in ROOT.glob(place))
FOLDERS = ("headmix_*", "tests", "benchmarks", "experiments", "examples", "configs")
OTHERS = {
    "train.py",
    "validate.py",
    "config.yaml",
    "train_cls.py",
    "train_gen.py",
    "sample.py",
}  # timm's, a run's, ours
# Names in blocks that are the reader's own.
READERS = {
    "analysis.md": "images network",
    "evaluation.md": "samples",
    "faq.md": "state",
    "scale.md": "model objective t x y",
    "using_models.md": "beta k log_decay mask mixing q v",
    "video.md": "noise step t times x y",
    "wan.md": "latents original text timestep",
}
TRAINING = {"train-cls": "cls", "train-gen": "gen", "distill": "gen", "distill classifier": "distill"}
# Bash expands a block as it stands, and finds none of its programs: each comes back as its words.
PRINTED = "command_not_found_handle() { printf '%s\\x1f' \"$@\"; echo; }\n"


class Parsed(BaseException):
    """Carries what was parsed out of a command."""


class Block(NamedTuple):
    """A fenced block of a document: its language, its text, and the line of its fence."""

    language: str
    text: str
    line: int


def all_blocks(path: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a document, indented ones too."""
    text = path.read_text()
    for found in re.finditer(r"(?ms)^ *```(\w+)\n(.*?)^ *```$", text):
        yield Block(found[1], textwrap.dedent(found[2]), text.count("\n", 0, found.start()) + 1)


def blocks(path: Path, language: str) -> list[str]:
    return [block.text for block in all_blocks(path) if block.language == language]


def expanded(text: str, folder: Path) -> Iterator[list[str]]:
    """Yield the words of each command of a block, without the words of torchrun and sbatch before it."""
    text = re.sub(r"\[(--[\w-]+) ([^]|]+)[^]]*\]", r"\1 \2", text)  # [--features A|B] becomes --features A
    bash = [str(shutil.which("bash")), "-c", PRINTED + text]
    printed = subprocess.run(bash, cwd=folder, env={"PATH": str(folder)}, capture_output=True, text=True)
    for line in printed.stdout.splitlines():
        words = line.rstrip("\x1f").split("\x1f")
        starts = [index for index, word in enumerate(words) if re.match(r"headmix(-|$)", word)]
        launched = words[0] in ("torchrun", "sbatch")
        if not {"...", "…"} & {*words}:  # else shortened for its reader
            yield words[starts[0] :] if launched else words


def command_lines(path: Path, folder: Path) -> Iterator[list[str]]:
    """Yield the words of each command of a document."""
    for block in blocks(path, "bash"):
        yield from expanded(block, folder)


@cache
def training_parser(command: str, subcommand: str) -> Any:
    def capture(_: Any, parser: Any, __: Any) -> None:
        raise Parsed(parser)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed) as parsed:
        patch.setattr(RunCLI, "parse_arguments", capture)
        name, *kind = command.split()
        COMMANDS[name]([*kind, subcommand])
    return parsed.value.args[0]


def parse(words: list[str]) -> None:
    """Parse a command line as its command does.

    Raises:
        SystemExit: The command refuses it.
        InputError: A recipe that is not there.
    """
    program, *args = words
    if program.startswith("headmix"):
        name = program.removeprefix("headmix").removeprefix("-") or args.pop(0)
        if name == "distill" and args[0] == "classifier":
            name += f" {args.pop(0)}"
        if name in TRAINING and args != ["--help"]:
            given = with_config_of_run([with_underscores(word) for word in args])
            default = None if name == "distill" else DEFAULT
            training_parser(name, args[0]).parse_args(with_config_paths(given, TRAINING[name], default))
            return
        main: Any = COMMANDS[name]
    elif program == "python" and args[0] == "-m":
        main = importlib.import_module(args[1]).main
    elif program == "make":
        assert re.search(rf"(?m)^([\w-]+ )*{args[0]}[ :]", (ROOT / "Makefile").read_text()), f"make {args[0]}"
        return
    else:
        raise AssertionError(f"a document names the program {program}")
    parsing = argparse.ArgumentParser.parse_args

    def parsed(self: Any, *given: Any) -> None:
        parsing(self, *given)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        patch.setattr("headmix_vision.console.OneLineParser.parse_args", parsed)
        patch.setattr("sys.argv", words[2:])
        main() if program == "python" else main(args)


def is_ours(words: list[str]) -> bool:
    """Whether a command is part of the repository: pip, npm and scripts of timm and of examples are not."""
    return words[0] not in ("pip", "npm") and not any(word.endswith(".py") for word in words[1:4])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_of_documents_are_accepted(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(FOLDER / "gen" / "digits.yaml", tmp_path / "RECIPE")
    for run in ("digits", "emoji", "pictures"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        shutil.copy(FOLDER / "cls" / "digits.yaml", tmp_path / "runs" / run / CONFIG)
    (tmp_path / "my_recipe.yaml").touch()
    monkeypatch.chdir(tmp_path)
    for words in filter(is_ours, command_lines(path, tmp_path)):
        try:
            parse(words)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{' '.join(words)}\n{error!r}\n{capsys.readouterr().err}")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_of_documents_exist(path: Path) -> None:
    for block in blocks(path, "python"):
        for line in ast.parse(block).body:
            if isinstance(line, ast.Import | ast.ImportFrom):
                exec(ast.unparse(line), {})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_import_what_they_use_or_a_block_before_them_does(path: Path) -> None:
    bound = {*dir(builtins), *READERS.get(path.name, "").split()}
    for block in blocks(path, "python"):
        nodes = [*ast.walk(ast.parse(block))]
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        names = [node for node in nodes if isinstance(node, ast.Name)]
        bound |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
        assert not {node.id for node in names} - bound


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_named_in_documents_exist(path: Path) -> None:
    files = {f"/{file.relative_to(ROOT).as_posix()}" for place in FOLDERS for file in ROOT.glob(f"{place}/**/*.*")}
    for name in re.findall(r"`([\w./-]+\.(?:py|yaml|sh))`", path.read_text()):
        assert name in OTHERS or any(file.endswith(f"/{name}") for file in files), name


def test_a_wrong_command_is_noticed() -> None:
    for words in ("headmix sample images --modell x", "headmix-train-cls fit -c digits --model.nme x", "make demos"):
        with pytest.raises((SystemExit, InputError, AssertionError)):
            parse(words.split())
