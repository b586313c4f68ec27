"""Every shipped generator recipe, alone and in the combinations that its comments name."""

from itertools import product
from pathlib import Path

import pytest
import torch

from headmix_vision.layers import HEAD_MIXES
from headmix_vision.training.generation_cli import GenerationCLI

from .gen_helpers import run

CONFIGS = Path(__file__).parents[2] / "headmix_vision" / "configs" / "gen"
VIDEO_MODELS = sorted((CONFIGS / "models").glob("dit_video_*.yaml"))
MODELS = sorted({*(CONFIGS / "models").glob("*.yaml")} - {*VIDEO_MODELS})
MIXED = [model for model in MODELS if set(HEAD_MIXES) & set(model.stem.split("_"))]
OVERLAYS = sorted((CONFIGS / "overlays").glob("*.yaml"))
IMAGENET = [CONFIGS / f"imagenet{pixels}.yaml" for pixels in (256, 512)]
VIDEOS = [CONFIGS / f"{name}.yaml" for name in ("ucf101", "skytimelapse")]  # after IMAGENET[0]
ALONE = [CONFIGS / f"{name}.yaml" for name in ("digits", "canvas", "emoji", "folder", "moving_digits")]
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
    known = {*MODELS, *VIDEO_MODELS, *OVERLAYS, *IMAGENET, *VIDEOS, *ALONE, *CAUSAL, CONFIGS / "ddpm.yaml"}
    assert known == set(CONFIGS.rglob("*.yaml"))
    assert len(MODELS) == 10 + len(MIXED) and len(VIDEO_MODELS) == 8


@pytest.mark.parametrize("recipes", [*([path] for path in (*ALONE, IMAGENET[0])), CAUSAL], ids=lambda v: v[-1].stem)
def test_recipe_trains_one_batch(recipes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(GenerationCLI, "after_fit", lambda cli: seen.append(cli))
    muon = recipes[-1].stem == "emoji"  # whose products in bfloat16 take minutes on many CPUs at the true size
    small = ("--model.model_args.depth", 1, "--model.model_args.embed_dim", 96) if muon else ()
    assert run("fit", *files(*recipes), "--run_dir", tmp_path / "run", *ONE_BATCH, *small) == 0
    assert seen[0].trainer.global_step == 1


@pytest.mark.parametrize(
    ("model", "recipe", "ddpm"),
    [
        # each file, in half of its combinations, or in one if it mixes heads
        pytest.param(*case, marks=() if i % 4 in ((0,) if case[0] in MIXED else (0, 3)) else pytest.mark.slow)
        for i, case in enumerate(product(MODELS, IMAGENET, (False, True)))
    ],
    ids=lambda v: getattr(v, "stem", str(v)),
)
def test_family_is_built_at_its_true_size(
    recipe: Path, model: Path, ddpm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but the training itself, with weights that take no memory."""
    seen = []
    monkeypatch.setattr(GenerationCLI, "_run_subcommand", lambda cli, name: seen.append(cli))
    monkeypatch.chdir(tmp_path)
    paths = [recipe, model, *([CONFIGS / "ddpm.yaml"] if ddpm else [])]
    with torch.device("meta"):
        assert run("fit", *files(*paths), "--trainer.accelerator", "cpu") == 0
    (cli,) = seen
    trainer, module = cli.trainer, cli.model
    core, *options, size, patch = model.stem.removeprefix("dit_").split("_")
    config = module.net.config
    assert (config.core, config.patch_size, config.num_classes) == (core, int(patch), 1000)
    mix = options[0] if model in MIXED else None
    assert config.head_mix == mix
    assert config.embed_dim == {"s": 384, "xl": 1152}[size] and config.input_size == int(recipe.stem[8:]) // 8
    assert (config.cpe, config.output_gate) == (("cpe" in options,) * 2)
    assert module.net.out_channels == (8 if ddpm else 4)
    assert cli.config.fit.data.batch_size * trainer.accumulate_grad_batches == 256
    assert (trainer.max_steps, module.optimizer_config.lr, module.optimizer_config.weight_decay) == (400000, 1e-4, 0)
    assert cli.config.fit.run_dir == "runs/gen/" + "-".join(path.stem for path in paths)


@pytest.mark.parametrize(
    ("model", "data", "ddpm"),
    [
        pytest.param(*case, marks=() if i % 4 in (0, 3) else pytest.mark.slow)
        for i, case in enumerate(product(VIDEO_MODELS, VIDEOS, (False, True)))
    ],
    ids=lambda v: getattr(v, "stem", str(v)),
)
def test_video_family_is_built_at_its_true_size(
    model: Path, data: Path, ddpm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(GenerationCLI, "_run_subcommand", lambda cli, name: seen.append(cli))
    monkeypatch.chdir(tmp_path)
    paths = [IMAGENET[0], data, model, *([CONFIGS / "ddpm.yaml"] if ddpm else [])]
    with torch.device("meta"):
        assert run("fit", *files(*paths), "--trainer.accelerator", "cpu") == 0
    (cli,) = seen
    module, options = cli.model, cli.config.fit
    core, size, _ = model.stem.removeprefix("dit_video_").split("_")
    config = module.net.config
    assert (config.core, config.embed_dim, tuple(config.patch_size)) == (core, {"s": 384, "xl": 1152}[size], (1, 2, 2))
    assert module.net.input_size == (16, 32, 32) and module.net.frame_rate == pytest.approx(25 / 3, rel=1e-4)
    assert module.num_classes == (101 if data.stem == "ucf101" else 0)
    assert module.net.out_channels == (8 if ddpm else 4)
    assert module.objective_config.clean_prefix == (0 if ddpm else 0.1)
    assert options.data.batch_size * cli.trainer.accumulate_grad_batches == 32
    assert cli.trainer.max_steps == 200000 and options.data.root == f"latents/{data.stem}"


@pytest.mark.slow
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_overlay_keeps_the_global_batch(overlay: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(GenerationCLI, "instantiate_classes", lambda cli: seen.append(cli))
    monkeypatch.setattr(GenerationCLI, "_run_subcommand", lambda cli, name: None)
    monkeypatch.chdir(tmp_path)
    for model, recipe, ddpm in [
        *product(MODELS, IMAGENET[:1], (False,)),
        *product(MODELS[:1], IMAGENET, (False, True)),
    ]:
        paths = [recipe, model, *([CONFIGS / "ddpm.yaml"] if ddpm else [])]
        assert run("fit", *files(*paths, overlay)) == 0
        options = seen.pop().config.fit
        trainer = options.trainer
        processes = trainer.devices * trainer.num_nodes
        assert options.data.batch_size * processes * trainer.accumulate_grad_batches == 256
        assert options.model.objective.kind == ("ddpm" if ddpm else "flow")
        assert options.run_dir == "runs/gen/" + "-".join(path.stem for path in paths)
