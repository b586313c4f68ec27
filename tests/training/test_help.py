"""The help of the training commands: common options first, all on request."""

import pytest

from . import gen_helpers, helpers

COMMANDS = [(helpers, name) for name in ("fit", "validate", "test", "predict")]
COMMANDS += [(gen_helpers, name) for name in ("fit", "validate")]


@pytest.mark.parametrize(("command", "subcommand"), COMMANDS)
def test_help_shows_the_common_options(
    command: object, subcommand: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", ["-c"])  # a name that puts `--help-all` at the end of a line, where it was broken
    assert command.run(subcommand, "--help") == 0  # type: ignore[attr-defined]
    text = capfd.readouterr().out
    assert len(text.splitlines()) <= 50
    for option in ("-c, --config", "--run_dir", "--ckpt_path", "--dry_run", "--data.dataset", "--help-all"):
        assert option in text
    assert "--trainer.sync_batchnorm" not in text


def test_all_options(capfd: pytest.CaptureFixture[str]) -> None:
    assert helpers.run("fit", "--help-all") == 0
    text = capfd.readouterr().out
    assert "--trainer.sync_batchnorm" in text and "--data.augmentation.auto_augment" in text
