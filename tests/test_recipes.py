"""Recipes by name: what `--config` finds, and what it says when it finds nothing."""

from pathlib import Path

import pytest

from headmix_vision.errors import InputError
from headmix_vision.recipes import FOLDER, find_config, recipe_names, with_config_paths


@pytest.mark.parametrize(
    "name", ["imagenet", "imagenet.yaml", "models/deit_small_mhla", "overlays/gpu8", "configs/cls/imagenet.yaml"]
)
def test_names_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imagenet").mkdir()  # such as the data set's folder
    path = Path(find_config(name, "cls"))
    assert path.is_file() and path.is_relative_to(FOLDER / "cls") and path.stem == Path(name).stem


def test_a_file_wins_over_a_recipe_and_text_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.yaml").touch()
    assert find_config("digits.yaml", "cls") == "digits.yaml"
    assert find_config("{trainer: {max_epochs: 1}}", "cls") == "{trainer: {max_epochs: 1}}"


@pytest.mark.parametrize(
    ("name", "group", "hint"),
    [
        ("imagenett", "cls", "did you mean imagenet?"),
        ("deit_small_mhla", "cls", "did you mean models/deit_small_mhla"),
        ("models/dit_mhla_s2", "gen", "models/dit_mhla_s_2"),
        ("runs/gone/config.yaml", "cls", "the shipped ones are 384px, canvas"),
        ("ddpm", "cls", "the shipped ones are"),  # of the other command
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, group: str, hint: str):
    with pytest.raises(InputError, match=f"--config {name} is neither a file nor a shipped recipe; .*{hint}") as error:
        find_config(name, group)
    assert "\n" not in str(error.value)


def test_command_lines():
    digits, gpu8 = (str(FOLDER / "gen" / f"{name}.yaml") for name in ("digits", "overlays/gpu8"))
    assert with_config_paths(["fit"], "gen", "digits") == ["fit", "--config", digits]
    assert with_config_paths(["fit"], "gen") == ["fit"]
    assert with_config_paths(["validate"], "gen", "digits") == ["validate"]
    given = ["fit", "-c", "digits", "--config=overlays/gpu8", "--data.root", "digits"]
    assert with_config_paths(given, "gen", "ddpm") == [
        *("fit", "-c", digits, f"--config={gpu8}", "--data.root", "digits")
    ]
    assert set(recipe_names("gen")) >= {"digits", "ddpm", "models/dit_mhla_s_2", "overlays/gpu8"}
