"""Every shipped classifier recipe, alone and in the combinations that its comments name."""

from pathlib import Path

import pytest
import timm
import timm.data
import torch
import yaml

from headmix_vision.layers import CORES, HEAD_MIXES
from headmix_vision.training.classification_cli import ClassificationCLI

from .helpers import run

CONFIGS = Path(__file__).parents[2] / "headmix_vision" / "configs" / "cls"
RECIPES = [CONFIGS / f"{name}.yaml" for name in ("digits", "canvas", "emoji", "imagenet")]
*_, EMOJI, IMAGENET = RECIPES
MODELS = sorted((CONFIGS / "models").glob("*.yaml"))
MIXED = [model for model in MODELS if set(HEAD_MIXES) & set(model.stem.split("_"))]
TRAINED = [  # one batch of each core, of each mix and of the windows; the rest are built
    *(model for model in MODELS if model.stem.startswith("deit_tiny") and model not in MIXED),
    *(CONFIGS / "models" / f"deit_{name}.yaml" for name in ("tiny_mhla_iha", "tiny_linear_mea")),
    CONFIGS / "models" / "deit_small_softmax_iha_local.yaml",
]
LARGE, SUBGROUPS, LITE0 = (CONFIGS / f"{name}.yaml" for name in ("384px", "subgroups", "lite0"))
OVERLAYS = sorted((CONFIGS / "overlays").glob("*.yaml"))
ONE_BATCH = (
    *("--data.dataset", "fake", "--data.root", "null", "--data.batch_size", 2, "--data.eval_batch_size", 2),
    *("--data.num_workers", 0, "--trainer.precision", "32-true", "--trainer.accelerator", "cpu"),
    *("--trainer.devices", 1, "--trainer.strategy", "auto", "--trainer.fast_dev_run", 1),
    *("--trainer.accumulate_grad_batches", 1, "--trainer.enable_progress_bar", "false"),
)


def files(*paths: Path) -> list[object]:
    return [part for path in paths for part in ("-c", path)]


def _options(model: Path) -> list[str]:
    """What a file's name says after the core: a head mix, `cpe`, `local`."""
    return model.stem.split("_")[3:]


def _name(model: Path, pixels: int) -> str:
    """timm's name of the model that a file is for."""
    _, size, core, *options = model.stem.split("_")
    attention = "_".join([core, *(option for option in options if option in HEAD_MIXES)])
    return f"deit_{attention}_{size}_patch16_{pixels}"


def _arguments(model: Path) -> dict[str, object]:
    """Arguments of the model that a file is for."""
    arguments: dict[str, object] = {"drop_path_rate": 0.1}
    if "cpe" in _options(model):
        arguments["cpe"] = True
    if "local" in _options(model):
        arguments |= {"head_mix_args": {"pseudo_heads": 2}, "core_args": {"window": 5}, "global_every": 5}
    return arguments


def test_no_recipe_is_forgotten():
    assert {*RECIPES, *MODELS, *OVERLAYS, LARGE, SUBGROUPS, LITE0} == set(CONFIGS.rglob("*.yaml"))
    assert len(MODELS) == 10 + len(MIXED)


def test_recipe_of_the_paper_trains_the_papers_model():
    """Its Appendix E: position encoding by convolution, and mean pooling, which the name has."""
    model = yaml.safe_load(IMAGENET.read_text())["model"]
    assert model["model_args"]["cpe"] is True and model["name"] == "deit_mhla_small_patch16_224"
    assert yaml.safe_load(IMAGENET.read_text())["trainer"]["max_epochs"] == 300


@pytest.mark.parametrize(
    "paths",
    [*([recipe] for recipe in RECIPES), [EMOJI, SUBGROUPS], *([IMAGENET, model] for model in TRAINED)],
    ids=lambda paths: paths[-1].stem,
)
def test_recipe_trains_one_batch(paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ("--data.augmentation.auto_augment", "null") if paths[0].stem == "digits" else ()
    seen = []
    monkeypatch.setattr(ClassificationCLI, "after_fit", lambda cli: seen.append(cli))
    assert run("fit", *files(*paths), "--run_dir", tmp_path / "run", *ONE_BATCH, *plain) == 0
    assert seen[0].trainer.global_step == 1
    assert not (tmp_path / "run").exists()


def test_a_network_of_imagenet_is_fine_tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = timm.create_model("tf_efficientnet_lite0").state_dict()
    torch.save({f"_layer.{number}": value for number, value in enumerate(state.values())}, tmp_path / "lite0.pth")
    given = ("fit", *files(EMOJI, SUBGROUPS, LITE0), "--run_dir", tmp_path / "run", *ONE_BATCH)
    assert run(*given, "--model.checkpoint", tmp_path / "lite0.pth") == 0
    assert run(*given, "--model.checkpoint", tmp_path / "lite0.pth", "--model.new_head", "false") == 2
    assert "has 1000 classes, the model 37 (options model.num_classes, model.new_head)" in capsys.readouterr().err
    assert run(*given) == 2
    assert "model.new_head is true, it must be false without model.checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "pixels"),
    [
        pytest.param(model, pixels, id=f"{model.stem}-{pixels}", marks=marks)
        for model in MODELS
        for pixels, marks in (
            (224, ()),
            (384, () if "small" in model.stem and model not in MIXED else pytest.mark.slow),
        )
    ],
)
def test_family_is_built_at_its_true_size(
    model: Path, pixels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but the training itself, with weights that take no memory."""
    paths = [IMAGENET, model] if pixels == 224 else [IMAGENET, model, LARGE]
    seen = []
    monkeypatch.setattr(ClassificationCLI, "_run_subcommand", lambda cli, name: seen.append(cli))
    monkeypatch.chdir(tmp_path)
    with torch.device("meta"):
        assert run("fit", *files(*paths), "--trainer.accelerator", "cpu") == 0
        namesake = timm.create_model(_name(model, pixels))
    (cli,) = seen
    _, size, core, *options = model.stem.split("_")
    net, config = cli.model.net, cli.config.fit
    assert config.model.name == _name(model, 224)
    assert config.model.model_args == _arguments(model)
    assert (net.embed_dim, net.num_classes) == ({"tiny": 192, "small": 384}[size], 1000)
    assert net.patch_embed.img_size == namesake.patch_embed.img_size == (pixels, pixels)
    ours, theirs = (
        timm.data.resolve_input_data_config(made, {"crop_pct": crop})
        for made, crop in ((net, config.data.crop_pct), (namesake, None))
    )
    assert ours == theirs and ours["input_size"] == (3, pixels, pixels)
    assert (net.blocks[0].attn.cpe is not None) == ("cpe" in options)
    mixes = [
        next((mix for mix in HEAD_MIXES if isinstance(b.attn.head_mix, HEAD_MIXES[mix])), None) for b in net.blocks
    ]
    whole = [4, 9] if "local" in options else []
    named = next((mix for mix in HEAD_MIXES if mix in options), None)
    assert mixes == [None if index in whole else named for index in range(12)]
    assert all(isinstance(block.attn.core, CORES[core]) for block in net.blocks)
    windows = [getattr(block.attn.core, "window", None) for block in net.blocks]
    assert windows == [(5, 5) if "local" in options and index not in whole else None for index in range(12)]
    assert net.blocks[-1].drop_path1.drop_prob == pytest.approx(0.1)
    assert config.data.batch_size * cli.trainer.accumulate_grad_batches == 1024
    assert (cli.trainer.max_epochs, cli.model.optimizer_config.lr) == (300, 1e-3)
    assert config.run_dir == "-".join(["runs/imagenet", *(path.stem for path in paths[1:])])


@pytest.mark.slow
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_overlay_keeps_the_global_batch(overlay: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(ClassificationCLI, "instantiate_classes", lambda cli: seen.append(cli))
    monkeypatch.setattr(ClassificationCLI, "_run_subcommand", lambda cli, name: None)
    monkeypatch.chdir(tmp_path)
    for model in MODELS:
        assert run("fit", *files(IMAGENET, model, overlay)) == 0
        options = seen.pop().config.fit
        trainer = options.trainer
        processes = trainer.devices * trainer.num_nodes
        assert options.data.batch_size * processes * trainer.accumulate_grad_batches == 1024
        assert options.model.model_args["drop_path_rate"] == 0.1
        assert options.run_dir == f"runs/imagenet-{model.stem}"


@pytest.mark.parametrize(
    ("names", "run_dir"),
    [
        ([], "runs/deit_hih_digits"),
        (["digits"], "runs/digits"),
        (["digits", "overlays/gpu8"], "runs/digits"),
        (["digits", "wide", "overlays/gpu8", "long"], "runs/digits-wide-long"),
    ],
    ids=["none", "one", "overlay", "several"],
)
def test_run_is_named_after_its_files_but_overlays(
    names: list[str], run_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(ClassificationCLI, "instantiate_classes", lambda cli: seen.append(cli))
    monkeypatch.setattr(ClassificationCLI, "_run_subcommand", lambda cli, name: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "overlays").mkdir()
    for name in names:
        (tmp_path / f"{name}.yaml").write_text("seed_everything: 1\n")
    assert run("fit", *files(*(Path(f"{name}.yaml") for name in names)), "--model.name", "deit_hih_digits") == 0
    assert seen[0].config.fit.run_dir == run_dir


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
