"""Every shipped recipe trains one batch of fake data of its true shape."""

from pathlib import Path

import pytest
import yaml

from headmix_vision.training.classification_cli import ClassificationCLI

from .helpers import run

CONFIGS = Path(__file__).parents[2] / "configs" / "cls"
RECIPES = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "overlays")
OVERLAYS = sorted((CONFIGS / "overlays").glob("*.yaml"))
ONE_BATCH = (
    *("--data.dataset", "fake", "--data.root", "null", "--data.batch_size", 2, "--data.eval_batch_size", 2),
    *("--data.num_workers", 0, "--trainer.precision", "32-true", "--trainer.accelerator", "cpu"),
    *("--trainer.devices", 1, "--trainer.strategy", "auto", "--trainer.fast_dev_run", 1),
    *("--trainer.accumulate_grad_batches", 1, "--trainer.enable_progress_bar", "false"),
)


@pytest.mark.parametrize("recipe", RECIPES, ids=[path.stem for path in RECIPES])
def test_recipe_trains_one_batch(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (
        (*ONE_BATCH, "--data.augmentation.auto_augment", "null") if recipe.stem.startswith("digits") else ONE_BATCH
    )
    seen = []
    monkeypatch.setattr(ClassificationCLI, "after_fit", lambda cli: seen.append(cli))
    assert run("fit", "-c", recipe, "--run_dir", tmp_path / "run", *arguments) == 0
    (cli,) = seen
    assert cli.trainer.global_step == 1
    assert not (tmp_path / "run").exists()
    if recipe.parent.name == "imagenet":
        options = cli.config["fit"]
        size, core, *_, pixels = recipe.stem.removeprefix("deit_").split("_")
        assert options.model.name == f"deit_{core}_{size}_patch16_{pixels}"
        assert bool(options.model.model_args.get("cpe")) == ("cpe" in recipe.stem)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=[path.stem for path in OVERLAYS])
def test_overlays_keep_the_global_batch(overlay: Path) -> None:
    change = yaml.safe_load(overlay.read_text())
    for recipe in (CONFIGS / "imagenet").glob("*.yaml"):
        base = yaml.safe_load(recipe.read_text())
        trainer, data = {**base["trainer"], **change["trainer"]}, {**base["data"], **change["data"]}
        assert data["batch_size"] * trainer.get("devices", 1) * trainer["accumulate_grad_batches"] == 1024


def test_overlay_wins_over_the_recipe_and_the_command_line_over_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("data:\n  batch_size: 4\n  eval_batch_size: 6\nmodel:\n  optimizer:\n    lr: 0.5\n")
    seen = []
    monkeypatch.setattr(ClassificationCLI, "fit", lambda cli, **_: seen.append(cli), raising=False)
    monkeypatch.setattr(ClassificationCLI, "after_fit", lambda cli: None)
    args = ("--data.eval_batch_size", 7, "--run_dir", tmp_path / "run", "--trainer.accelerator", "cpu")
    assert run("fit", "-c", CONFIGS / "digits.yaml", "-c", overlay, *args) == 0
    options = seen[0].config["fit"]
    base = yaml.safe_load((CONFIGS / "digits.yaml").read_text())
    assert (options.data.batch_size, options.data.eval_batch_size) == (4, 7)
    assert options.model.optimizer.lr == 0.5
    assert options.model.optimizer.weight_decay == base["model"]["optimizer"]["weight_decay"]
