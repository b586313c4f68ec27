"""Every shipped generator recipe, alone and in the combinations that its comments name."""

from itertools import product
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from headmix_vision.layers import CORES, HEAD_MIXES
from headmix_vision.training.generation_cli import GenerationCLI

from .gen_helpers import run

CONFIGS = Path(__file__).parents[2] / "configs" / "gen"
XL, VIDEO_XL = (CONFIGS / "models" / f"dit_{name}.yaml" for name in ("xl_2", "video_xl_2"))
DDPM = CONFIGS / "ddpm.yaml"
PAPER = ("--model.model_args", "{cpe: true, output_gate: true}")
OVERLAYS = sorted((CONFIGS / "overlays").glob("*.yaml"))
IMAGENET = [CONFIGS / f"imagenet{pixels}.yaml" for pixels in (256, 512)]
VIDEOS = [CONFIGS / f"{name}.yaml" for name in ("ucf101", "skytimelapse")]  # after IMAGENET[0]
ALONE = [
    CONFIGS / f"{name}.yaml"
    for name in ("digits", "canvas", "fashion_mnist", "emoji", "animated_emoji", "folder", "moving_digits")
]
PROMPTED = CONFIGS / "prompted.yaml"  # tested in test_prompted.py
CAUSAL = [CONFIGS / "moving_digits.yaml", CONFIGS / "moving_digits_causal.yaml"]
ONE_BATCH = (
    *("--data.dataset", "fake", "--data.root", "null", "--data.batch_size", 2, "--data.val_split", "null"),
    *("--data.num_workers", 0, "--trainer.precision", "32-true", "--trainer.accelerator", "cpu", "--data.hflip", 0),
    *("--trainer.devices", 1, "--trainer.strategy", "auto", "--trainer.fast_dev_run", 1, "--model.vae", "null"),
    *("--trainer.accumulate_grad_batches", 1, "--trainer.enable_progress_bar", "false"),
)


def files(*paths: Path) -> list[object]:
    return [part for path in paths for part in ("-c", path)]


def test_no_recipe_is_forgotten():
    assert {XL, VIDEO_XL, *OVERLAYS, *IMAGENET, *VIDEOS, *ALONE, *CAUSAL, DDPM, PROMPTED} == set(
        CONFIGS.rglob("*.yaml")
    )


@pytest.mark.parametrize("recipes", [*([path] for path in (*ALONE, IMAGENET[0])), CAUSAL], ids=lambda v: v[-1].stem)
def test_recipe_trains_one_batch(recipes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(GenerationCLI, "after_fit", lambda cli: seen.append(cli))
    muon = recipes[-1].stem.endswith("emoji")  # whose products in bfloat16 take minutes on many CPUs at the true size
    small = ("--model.model_args.depth", 1, "--model.model_args.embed_dim", 96) if muon else ()
    assert run("fit", *files(*recipes), "--run_dir", tmp_path / "run", *ONE_BATCH, *small) == 0
    assert seen[0].trainer.global_step == 1


@pytest.mark.parametrize(
    ("core", "mix", "size", "recipe", "ddpm"),
    [
        # each attention and size, in one of four combinations
        pytest.param(*case, marks=() if i % 4 == i // 4 % 4 else pytest.mark.slow)
        for i, case in enumerate(product(CORES, (None, *HEAD_MIXES), ("s", "xl"), IMAGENET, (False, True)))
    ],
    ids=lambda v: getattr(v, "stem", str(v)),
)
def test_family_is_built_at_its_true_size(
    core: str,
    mix: str | None,
    size: str,
    recipe: Path,
    ddpm: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Everything but the training itself, with weights that take no memory."""
    seen = []
    monkeypatch.setattr(GenerationCLI, "_run_subcommand", lambda cli, name: seen.append(cli))
    monkeypatch.chdir(tmp_path)
    name = "_".join(["dit", core, *([] if mix is None else [mix]), size, "2"])
    paths = [recipe, *([XL] if size == "xl" else []), *([DDPM] if ddpm else [])]
    with torch.device("meta"):
        assert run("fit", *files(*paths), "--model.name", name, *PAPER, "--trainer.accelerator", "cpu") == 0
    (cli,) = seen
    trainer, module = cli.trainer, cli.model
    config = module.net.config
    assert (config.core, config.head_mix, config.patch_size, config.num_classes) == (core, mix, 2, 1000)
    assert config.embed_dim == {"s": 384, "xl": 1152}[size] and config.input_size == int(recipe.stem[8:]) // 8
    assert config.cpe and config.output_gate
    assert module.net.out_channels == (8 if ddpm else 4)
    assert cli.config.fit.data.batch_size * trainer.accumulate_grad_batches == 256
    assert (trainer.max_steps, module.optimizer_config.lr, module.optimizer_config.weight_decay) == (400000, 1e-4, 0)
    assert cli.config.fit.run_dir == "runs/gen/" + "-".join([*(path.stem for path in paths), name])


@pytest.mark.parametrize(
    ("core", "size", "data", "ddpm"),
    [
        pytest.param(*case, marks=() if i % 4 in (0, 3) else pytest.mark.slow)
        for i, case in enumerate(product(CORES, ("s", "xl"), VIDEOS, (False, True)))
    ],
    ids=lambda v: getattr(v, "stem", str(v)),
)
def test_video_family_is_built_at_its_true_size(
    core: str, size: str, data: Path, ddpm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(GenerationCLI, "_run_subcommand", lambda cli, name: seen.append(cli))
    monkeypatch.chdir(tmp_path)
    paths = [IMAGENET[0], data, *([VIDEO_XL] if size == "xl" else []), *([DDPM] if ddpm else [])]
    with torch.device("meta"):
        named = ("--model.name", f"dit_video_{core}_{size}_2")
        assert run("fit", *files(*paths), *named, "--trainer.accelerator", "cpu") == 0
    (cli,) = seen
    module, options = cli.model, cli.config.fit
    config = module.net.config
    assert (config.core, config.embed_dim, tuple(config.patch_size)) == (core, {"s": 384, "xl": 1152}[size], (1, 2, 2))
    assert module.net.input_size == (16, 32, 32) and module.net.frame_rate == pytest.approx(25 / 3, rel=1e-4)
    assert module.num_classes == (101 if data.stem == "ucf101" else 0)
    assert module.net.out_channels == (8 if ddpm else 4)
    assert module.objective_config.clean_prefix == (0 if ddpm else 0.1)
    assert options.data.batch_size * cli.trainer.accumulate_grad_batches == 32
    assert cli.trainer.max_steps == 200000 and options.data.root == f"latents/{data.stem}"


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_overlay_keeps_the_global_batch(overlay: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(GenerationCLI, "instantiate_classes", lambda cli: seen.append(cli))
    monkeypatch.setattr(GenerationCLI, "_run_subcommand", lambda cli, name: None)
    monkeypatch.setattr(GenerationCLI, "trainer", Trainer(accelerator="cpu", logger=False), raising=False)
    monkeypatch.chdir(tmp_path)
    for paths in ([IMAGENET[0]], [IMAGENET[1], XL, DDPM]):
        assert run("fit", *files(*paths, overlay)) == 0
        options = seen.pop().config.fit
        trainer = options.trainer
        processes = trainer.devices * trainer.num_nodes
        assert options.data.batch_size * processes * trainer.accumulate_grad_batches == 256
        assert options.model.objective.kind == ("ddpm" if DDPM in paths else "flow")
        assert options.run_dir == "runs/gen/" + "-".join(path.stem for path in paths)
