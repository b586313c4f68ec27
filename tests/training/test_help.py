"""The help of the training commands: common options first, all on request."""

import re
from argparse import SUPPRESS

import pytest

from headmix_vision.cli import distill, train_cls, train_gen
from headmix_vision.cli.training import run_command_line
from headmix_vision.training.base_cli import RunCLI
from headmix_vision.training.classification_cli import ClassificationCLI
from headmix_vision.training.command_help import KINDS, asked_help, common_options
from headmix_vision.training.distillation_cli import ClassifierDistillationCLI, DistillationCLI
from headmix_vision.training.generation_cli import GenerationCLI

from . import gen_helpers, helpers

SUBCOMMANDS = [(helpers, name) for name in KINDS["classifier"][1]]
SUBCOMMANDS += [(gen_helpers, name) for name in KINDS["generator"][1]]
CLIS: dict[str, type[RunCLI]] = {
    "classifier": ClassificationCLI,
    "generator": GenerationCLI,
    "distilled": DistillationCLI,
    "distilled_classifier": ClassifierDistillationCLI,
}


class Parsed(BaseException):
    """Carries the parser out of a command."""


@pytest.mark.parametrize(("command", "subcommand"), SUBCOMMANDS)
def test_help_shows_the_common_options(
    command: object, subcommand: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", ["-c"])  # a name that puts `--help-all` at the end of a line, where it was broken
    assert command.run(subcommand, "--help") == 0  # type: ignore[attr-defined]
    text = capfd.readouterr().out
    assert len(text.splitlines()) <= 50
    for option in ("-c, --config", "--run-dir", "--ckpt-path", "--dry-run", "--data.dataset", "--help-all"):
        assert option in text
    assert "--trainer.sync_batchnorm" not in text
    assert asked_help("classifier" if command is helpers else "generator", [subcommand, "--help"]) == text


@pytest.mark.parametrize("command", CLIS)
def test_the_help_names_options_that_exist_and_their_defaults(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: object, parser: object, args: object) -> None:
        raise Parsed(parser)

    monkeypatch.setattr(RunCLI, "parse_arguments", stop)
    for subcommand in KINDS[command][1]:
        with pytest.raises(Parsed) as caught:
            run_command_line(CLIS[command], [subcommand])
        parser = caught.value.args[0]._subcommands_action.choices[subcommand]
        defaults = parser.get_defaults()
        for options in common_options(subcommand, command).values():
            for name, text in options.items():
                said = re.search(r" \(([^ ]*)\)$", text)
                default = defaults.get(parser._option_string_actions[f"--{name}"].dest)
                assert (said and said[1]) == (None if default in (None, False, 0, SUPPRESS) else str(default)), name


def test_the_help_of_a_command_lists_its_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    for main, words, command in (
        (train_cls.main, [], "classifier"),
        (train_gen.main, [], "generator"),
        (distill.main, [], "distilled"),
        (distill.main, ["generator"], "distilled"),
        (distill.main, ["classifier"], "distilled_classifier"),
    ):
        main([*words, "--help"])
        listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
        assert listed == [*KINDS[command][1]]


def test_all_options(capfd: pytest.CaptureFixture[str]) -> None:
    assert helpers.run("fit", "--help-all") == 0
    text = capfd.readouterr().out
    assert "--trainer.sync_batchnorm" in text and "--data.augmentation.auto_augment" in text


@pytest.mark.parametrize(
    ("words", "got"),
    [([], "nothing"), (["-c", "digits"], "'-c'"), (["--run-dir", "x"], "'--run-dir'"), (["fti"], "'fti'")],
)
def test_a_command_begins_with_what_is_to_be_done(
    words: list[str], got: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert helpers.run(*words) == 2
    assert capfd.readouterr().err == f"error: the first word must be fit, validate, test or predict, got {got}\n"
