"""Recipes by name: what `--config` finds, and what it says when it finds nothing."""

from pathlib import Path

import pytest

from headmix_vision.errors import InputError
from headmix_vision.recipes import FOLDER, find_config, recipe_names, with_config_paths


@pytest.mark.parametrize(
    "name", ["imagenet", "models/deit_small_softmax_iha_local.yaml", "overlays/gpu8", "configs/cls/imagenet.yaml"]
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
        ("deit_small_softmax_iha", "gen", "the shipped ones are"),
        ("models/dit_xl2", "gen", "models/dit_xl_2"),
        ("runs/gone/config.yaml", "cls", "the shipped ones are 384px, canvas"),
        ("ddpm", "cls", "the shipped ones are"),  # of the other command
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, group: str, hint: str):
    with pytest.raises(InputError, match=f"--config {name} is neither a file nor a shipped recipe; .*{hint}") as error:
        find_config(name, group)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "group", "options"),
    [
        (
            "models/deit_small_hih_iha",
            "cls",
            "--model.name deit_hih_iha_small_patch16_224 --model.model_args.cpe false",
        ),
        ("deit_tiny_mhla_cpe.yaml", "cls", "--model.name deit_mhla_tiny_patch16_224 --model.model_args.cpe true"),
        (
            "configs/cls/imagenet/deit_tiny_hih_384.yaml",
            "cls",
            "-c imagenet -c 384px --model.name deit_hih_tiny_patch16_224 --model.model_args.cpe false",
        ),
        ("configs/gen/models/dit_linear_s_2.yaml", "gen", "--model.name dit_linear_s_2"),
        ("overlays/fsdp", "cls", "-c overlays/gpu8 --trainer.strategy fsdp2"),
        ("models/dit_video_hih_xl_2", "gen", "-c models/dit_video_xl_2 --model.name dit_video_hih_xl_2"),
        (
            "models/dit_mhla_cpe_gate_xl_2",
            "gen",
            "-c models/dit_xl_2 --model.name dit_mhla_xl_2"
            " --model.model_args.cpe true --model.model_args.output_gate true",
        ),
    ],
)
def test_files_of_earlier_versions_are_answered_with_their_options(name: str, group: str, options: str):
    with pytest.raises(InputError) as error:
        find_config(name, group)
    assert str(error.value) == f"--config {name}: options replace this file. Write {options}"


def test_command_lines():
    digits, gpu8 = (str(FOLDER / "gen" / f"{name}.yaml") for name in ("digits", "overlays/gpu8"))
    assert with_config_paths(["fit"], "gen", "digits") == ["fit", "--config", digits]
    assert with_config_paths(["fit"], "gen") == ["fit"]
    assert with_config_paths(["validate"], "gen", "digits") == ["validate"]
    given = ["fit", "-c", "digits", "--config=overlays/gpu8", "--data.root", "digits"]
    assert with_config_paths(given, "gen", "ddpm") == [
        *("fit", "-c", digits, f"--config={gpu8}", "--data.root", "digits")
    ]
    assert set(recipe_names("gen")) >= {"digits", "ddpm", "models/dit_xl_2", "overlays/gpu8"}
