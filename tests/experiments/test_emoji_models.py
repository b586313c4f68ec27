"""Models that draw emoji: differences of runs, recorded rows, choice of guidance, stopping in time, a small run."""

import csv
import shlex
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from experiments.emoji import report
from experiments.emoji import run as comparison
from experiments.emoji.runs import REAL, Case
from headmix_lab.scripts import RunFailed, TimeOver
from headmix_vision.cli import cache_latents, train_cls, train_gen
from headmix_vision.errors import InputError
from headmix_vision.files.pictures import write_png
from headmix_vision.layers import CORES
from headmix_vision.training.base_cli import RunCLI

REPOSITORY = Path(__file__).parents[2]
SMALL = shlex.split(
    "--size 16 --dim 16 --depth 1 --heads 2 --batch 8 --epochs 2 --interval 1 --samples 14 --sampling-steps 1"
    " --guidance 1 2 --seeds 0 '--options=--trainer.precision 32-true --data.num_workers 0'"
)

OF_CLIPS = shlex.split("--size 16 --depth 3 --dim 16 --heads 2 --frames 4 --blocks 2 2 2")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of 16 pixels of two styles and two groups, more of one group than of the other."""
    folder, draw = tmp_path_factory.mktemp("emoji"), np.random.default_rng(0)
    rows = ["path,split,style,group"]
    for split, style in ((split, style) for split in ("train", "validation", "test") for style in ("flat", "round")):
        for number in range(12):
            rows.append(f"{split}-{style}-{number}.png,{split},{style},{'food' if number < 3 else 'people'}")
            pixels = draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{split}-{style}-{number}.png")
    (folder / "images.csv").write_text("\n".join(rows) + "\n")
    return folder


def given(root: Path, out: Path, *more: object) -> list[str]:
    return [*map(str, ["--root", root, "--features", f"lite0:{root}", "--judge", root, "--out", out, *more])]


def test_models_differ_in_their_attention_alone(root: Path, tmp_path: Path, monkeypatch):
    seen = list[Any]()
    runs = comparison.Runs(comparison.parse_arguments(given(root, tmp_path / "x.csv", "--samples", 8)), 0)
    assert runs.labels == {"validation": [0, 1, 1, 1, 2, 3, 3, 3], "test": [0, 1, 1, 1, 2, 3, 3, 3]}
    monkeypatch.setattr(RunCLI, "_run_subcommand", lambda cli, name: seen.append(cli))
    configs = []
    for row in ("softmax", "hih", "mhla-cpe"):
        arguments = ["-c", "emoji", "--run_dir", tmp_path / "run", *runs.options(row, 1)]
        train_gen.main(["fit", *map(str, arguments), "--model.num_classes", "4", "--data.root", str(root)], None)
        cli = seen.pop()
        attention = cli.model.net.blocks[0].attn
        assert isinstance(attention.core, CORES[row.partition("-")[0]]) and attention.gate is None
        assert (attention.cpe is not None) == row.endswith("-cpe") and cli.model.net.num_classes == 4
        assert sum(parameter.numel() for parameter in cli.model.net.parameters()) == runs.parameters(row)
        config = cli.config["fit"].as_dict()
        config["model"].pop("name"), config["model"]["model_args"].pop("cpe")
        configs.append(config)
    assert configs[0] == configs[1] == configs[2]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of 16 pixels of two classes, whose squares move right or down."""
    folder, draw = tmp_path_factory.mktemp("clips"), np.random.default_rng(0)
    for split, label, number in product(("train", "validation", "test"), ("down", "right"), range(8)):
        pixels = np.full((4, 16, 16, 3), 255, np.uint8)
        for frame, place in product(range(4), [draw.integers(4)]):
            along, across = slice(place + 3 * frame, place + 3 * frame + 4), slice(number, number + 4)
            pixels[frame][(along, across) if label == "down" else (across, along)] = draw.integers(0, 200)
        write_png(folder / split / label / f"{number}.png", pixels)
    return folder


def test_models_of_clips_differ_in_their_attention_alone(clips: Path, tmp_path: Path, monkeypatch):
    seen = list[Any]()
    options = ["--task", "animated_emoji", *OF_CLIPS, "--samples", 4]
    runs = comparison.Runs(comparison.parse_arguments(given(clips, tmp_path / "x.csv", *options)), 0)
    assert runs.labels == {"validation": [0, 0, 1, 1], "test": [0, 0, 1, 1]} and runs.class_names == ["down", "right"]
    monkeypatch.setattr(RunCLI, "_run_subcommand", lambda cli, name: seen.append(cli))
    for row in ("softmax", "hybrid"):
        arguments = ["-c", "animated_emoji", "--run_dir", tmp_path / "run", *runs.options(row, 1)]
        train_gen.main(["fit", *map(str, arguments), "--model.num_classes", "2", "--data.root", str(clips)], None)
        net = seen.pop().model.net
        cores = [CORES[name] for name in (["softmax"] * 3 if row == "softmax" else ["softmax", "mhla", "mhla"])]
        assert [type(block.attn.core) for block in net.blocks] == cores and net.input_size == (4, 16, 16)
        assert sum(parameter.numel() for parameter in net.parameters()) == runs.parameters(row)


@pytest.fixture(scope="module")
def latents(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latents of the clips by an autoencoder with new weights, mirrored ones of the training split too."""
    folder = tmp_path_factory.mktemp("latents")
    torch.manual_seed(0)
    levels = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = AutoencoderKL(**levels, block_out_channels=(8, 8), norm_num_groups=4, latent_channels=2)
    vae.save_pretrained(folder / "vae")
    for split in ("train", "validation"):
        options = ["--dataset", "videos", "--root", clips, "--split", split, "--vae", folder / "vae", "--frames", 4]
        options += ["--stride", 1, "--image-size", 16, "--workers", 0, "--out", folder / split]
        cache_latents.main([*map(str, options), *(["--flip"] if split == "train" else [])])
    return folder


def test_models_of_clips_are_trained_on_latents(clips: Path, latents: Path, tmp_path: Path, monkeypatch):
    seen = list[Any]()
    options = ["--task", "animated_emoji", *OF_CLIPS, "--patch", 2]
    on_latents, in_pixels = (
        comparison.Runs(comparison.parse_arguments(given(clips, tmp_path / "x.csv", *options, *more)), 0)
        for more in (["--latents", latents], [])
    )
    monkeypatch.setattr(RunCLI, "_run_subcommand", lambda cli, name: seen.append(cli))
    monkeypatch.setattr(comparison.Runs, "train_once", lambda runs, run, script, recipe, options: options())
    arguments = ["-c", "animated_emoji", "--run_dir", tmp_path / "run", *on_latents.train("mhla-cpe", 0)]
    train_gen.main(["fit", *map(str, arguments)], None)
    cli = seen.pop()
    assert cli.model.net.input_size == (4, 8, 8) and cli.model.net.in_channels == 2 and cli.model.net.num_classes == 2
    assert sum(parameter.numel() for parameter in cli.model.net.parameters()) == on_latents.parameters("mhla-cpe")
    assert cli.config["fit"].model.vae == str(latents / "vae") and cli.datamodule.root == str(latents)
    assert on_latents.labels == in_pixels.labels and on_latents.directory("mhla", 0) != in_pixels.directory("mhla", 0)
    drawn, real = (Case(row, 0, "test", scale) for row, scale in (("mhla", "2"), (REAL, "")))
    assert on_latents.recipe(drawn) != in_pixels.recipe(drawn) and on_latents.recipe(real) == in_pixels.recipe(real)
    for more, message in (
        (["--size", 32], "train: pixels of a side 16, it must be 32"),
        (["--frames", 3], "train: frames 4, it must be 3"),
        (["--latents", clips], "train has no latents.json"),
    ):
        with pytest.raises(InputError, match=message):
            wrong = given(clips, tmp_path / "x.csv", *options, "--latents", latents, *more)
            comparison.Runs(comparison.parse_arguments(wrong), 0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("where", ["pixels", "latents"])
def test_models_of_clips_are_trained_drawn_and_scored(where: str, clips: Path, latents: Path, tmp_path: Path, capsys):
    out, judge = tmp_path / "x.csv", tmp_path / "judge"
    model = '{"patch_size": 32, "embed_dim": 16, "depth": 1, "num_heads": 1}'
    recipe = ["-c", "emoji", "--data.root", clips, "--data.dataset", "sheets", "--model.num_classes", 2]
    recipe += ["--model.img_size", 128, "--model.model_args", model, "--trainer.max_epochs", 1, "--data.batch_size", 8]
    train_cls.main(["fit", *map(str, recipe), "--data.num_workers", "0", "--run_dir", str(judge)], None)
    arguments = ["--features", judge, "--judge", judge, "--runs", tmp_path / "runs", "--pictures", tmp_path]
    arguments += ["--latents", latents, "--patch", 2] if where == "latents" else []
    comparison.main(given(clips, out, "--task", "animated_emoji", *arguments, "--rows", "hybrid", *SMALL, *OF_CLIPS))
    *_, drawn, real = csv.DictReader(out.read_text().splitlines())
    assert (drawn["row"], real["row"]) == ("hybrid", "validation pictures")
    assert all(float(row[name]) >= 0 for row in (drawn, real) for name in ("fvd", "frame_fid", "sheets_fvd", "loop"))
    assert float(real["loop"]) > 1.2 and real["fvd_frozen"] and not drawn["fvd_frozen"]
    assert "| hybrid |" in capsys.readouterr().out
    assert all((tmp_path / f"animated_emoji{name}.webp").stat().st_size > 500 for name in ("", "_cores", "_neighbours"))
    assert ">test split</text>" in (tmp_path / "animated_emoji_distances.svg").read_text()


def test_guidance_is_chosen_on_validation_and_the_test_split_comes_then(root, tmp_path, monkeypatch, capsys):
    asked, out = [], tmp_path / "x.csv"

    def score(runs, case):
        asked.append(case)
        if case.row == "linear":
            raise TimeOver
        if case.row == "hih":
            raise RunFailed("no memory")
        fid = {"1": 30.0, "2": 20.0, "4": 25.0, "": 10.0}[case.guidance] + case.seed
        more = {} if case.row.startswith("validation") else {"steps": 7, "flat": "no", "parameters": 9e6}
        return {"fid": fid, "copied_percent": 1.0, "recipe": runs.recipe(case), **more}

    monkeypatch.setattr("headmix_lab.drawing_tasks.Scores.check", lambda scores: None)
    monkeypatch.setattr(comparison.Runs, "score", score)
    monkeypatch.setattr(comparison.Runs, "train", lambda runs, row, seed: asked.append((row, seed)))
    arguments = given(root, out, "--guidance", 1, 2, 4, "--seeds", 0, 1, "--rows", "softmax")
    comparison.main(arguments)
    assert asked[:2] == [("softmax", 0), ("softmax", 1)]
    cases = [tuple(case) for case in asked[2:]]
    assert cases[:3] == [("softmax", 0, "validation", scale) for scale in ("1", "2", "4")]
    assert sorted(cases[3:]) == [*(("softmax", seed, "test", "2") for seed in (0, 1)), (cases[3][0], 0, "test", "")]
    printed = capsys.readouterr().out
    assert "| softmax | 9.00 M | 7 (not flat) | 2 | 20.50 ± 0.71 | – |" in printed
    assert "| validation pictures | – | – | – | 10.00 | – |" in printed

    known, written = len(asked), out.read_text()
    comparison.main(arguments)
    assert len(asked) == known, "nothing is repeated"
    for row, status, message in (("linear", "75", "before 3 rows: repeat the command"), ("hih", "1", "no memory")):
        with pytest.raises(SystemExit, match=status):
            comparison.main([*arguments, row])
        assert message in capsys.readouterr().err and out.read_text() == written
    with pytest.raises(SystemExit, match="--guidance names one twice"):
        comparison.main([*arguments, "--guidance", "2", "2"])
    with pytest.raises(SystemExit, match="--features lite0:none: there is no none"):
        comparison.main([*arguments, "--features", "lite0:none"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("results", "--rows softmax linear mhla --options '--model.compile true --data.num_workers 1'"),
        (
            "large",
            "--rows mhla-cpe --dim 384 --depth 12 --heads 6 --patch 2 --epochs 160 --interval 25 --guidance 1 1.5 2 3"
            " --options '--model.compile graphs --data.num_workers 4'",
        ),
    ],
)
def test_recorded_rows_have_the_recipes_of_their_command(name: str, options: str):
    table = report.open_table(report.FOLDER / f"{name}.csv")
    arguments = comparison.parse_arguments([*given(Path("x"), table.path), *shlex.split(options)])
    runs = comparison.Runs(arguments, 0)
    cases = [Case(row, int(seed), split, guidance) for row, seed, split, guidance in table.rows]
    assert cases and all(table.row(case, runs.recipe(case)) for case in cases)


def test_paths_of_classifiers_are_those_of_the_working_directory(tmp_path: Path, monkeypatch) -> None:
    find = comparison.find_features
    (tmp_path / "runs" / "judge").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find("features", "lite0:runs/judge") == f"lite0:{tmp_path}/runs/judge"
    assert find("judge", "runs/judge") == f"{tmp_path}/runs/judge" and find("features", "inception") == "inception"


def test_a_judge_of_other_classes_is_refused_before_the_training(root: Path, tmp_path: Path):
    digits = REPOSITORY / "headmix_vision" / "models" / "weights" / "deit_mhla_digits.safetensors"
    arguments = given(root, tmp_path / "x.csv", "--features", digits, "--judge", digits, "--runs", tmp_path / "runs")
    with pytest.raises(SystemExit, match="has 4 classes, deit_mhla_digits was trained on 10"):
        comparison.main(arguments)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_models_are_trained_drawn_and_scored(root: Path, tmp_path: Path, capsys):
    out, judge = tmp_path / "x.csv", tmp_path / "judge"
    model = '{"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 1}'
    recipe = ["-c", "emoji", "--data.root", root, "--data.dataset", "table/style+group", "--model.num_classes", 4]
    recipe += ["--model.img_size", 16, "--model.model_args", model, "--trainer.max_epochs", 1, "--data.batch_size", 8]
    train_cls.main(["fit", *map(str, recipe), "--data.num_workers", "0", "--run_dir", str(judge)], None)
    arguments = ["--features", judge, "--judge", judge, "--runs", tmp_path / "runs", "--pictures", tmp_path]
    arguments = given(root, out, *arguments, "--rows", "mhla", *SMALL)
    with pytest.raises(SystemExit, match="75"):
        comparison.main([*arguments, "--minutes", "0.05"])
    comparison.main(arguments)
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [(row["row"], row["split"]) for row in rows] == [
        *[("mhla", "validation")] * 2,
        ("mhla", "test"),
        ("validation pictures", "test"),
    ]
    assert all(0 <= float(rows[2][name]) <= 100 for name in rows[2] if name.endswith("_percent"))
    assert rows[2]["guidance"] == min(rows[:2], key=lambda row: float(row["fid"]))["guidance"]
    assert all((tmp_path / f"emoji{name}.png").stat().st_size > 500 for name in ("", "_cores", "_neighbours"))
    assert ">mhla</text>" in (tmp_path / "emoji_guidance.svg").read_text()
