"""Every shipped classifier recipe, alone and in the combinations that its comments name."""

from itertools import product
from pathlib import Path

import pytest
import timm
import timm.data
import torch
import yaml
from lightning.pytorch import Trainer

from headmix_vision.layers import CORES, HEAD_MIXES
from headmix_vision.training.classification_cli import ClassificationCLI

from .helpers import run

CONFIGS = Path(__file__).parents[2] / "configs" / "cls"
RECIPES = [CONFIGS / f"{name}.yaml" for name in ("digits", "canvas", "fashion_mnist", "emoji", "imagenet")]
*_, EMOJI, IMAGENET = RECIPES
LOCAL = CONFIGS / "models" / "deit_small_softmax_iha_local.yaml"
PLAIN = ("--model.model_args.cpe", "false")
SHALLOW = ("--model.model_args.depth", 2)
ATTENTIONS = list(product(CORES, (None, *HEAD_MIXES)))
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


def _name(core: str, mix: str | None, size: str = "tiny", pixels: int = 224) -> str:
    return f"deit_{core}_{'' if mix is None else f'{mix}_'}{size}_patch16_{pixels}"


def test_no_recipe_is_forgotten():
    assert {*RECIPES, LOCAL, *OVERLAYS, LARGE, SUBGROUPS, LITE0} == set(CONFIGS.rglob("*.yaml"))


def test_recipe_of_the_paper_trains_the_papers_model():
    """Its Appendix E: position encoding by convolution, and mean pooling, which the name has."""
    model = yaml.safe_load(IMAGENET.read_text())["model"]
    assert model["model_args"]["cpe"] is True and model["name"] == "deit_mhla_small_patch16_224"
    assert yaml.safe_load(IMAGENET.read_text())["trainer"]["max_epochs"] == 300


@pytest.mark.parametrize(
    ("paths", "options"),
    [
        *(pytest.param([recipe], (), id=recipe.stem) for recipe in RECIPES),
        pytest.param([EMOJI, SUBGROUPS], (), id="subgroups"),
        pytest.param([IMAGENET, LOCAL], (), id="local"),
        *(
            pytest.param([IMAGENET], ("--model.name", _name(core, mix), *more), id=_name(core, mix))
            for core, mix, *more in [
                *((core, None, *PLAIN) for core in CORES),
                ("mhla", "iha", *PLAIN),
                ("linear", "mea"),
            ]
        ),
    ],
)
def test_recipe_trains_one_batch(
    paths: list[Path], options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of 12 blocks where neither the recipe states a depth nor its overlay names blocks by number."""
    if paths == [IMAGENET]:
        options += SHALLOW
    if paths[0].stem == "digits":
        options = ("--data.augmentation.auto_augment", "null")
    seen = []
    monkeypatch.setattr(ClassificationCLI, "after_fit", lambda cli: seen.append(cli))
    assert run("fit", *files(*paths), "--run_dir", tmp_path / "run", *ONE_BATCH, *options) == 0
    assert seen[0].trainer.global_step == 1
    assert len(seen[0].model.net.blocks) == 2 or SHALLOW[0] not in options
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
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
    ("core", "mix", "size", "pixels", "cpe", "local"),
    [
        *((*attention, "tiny", 224, attention[1] is None, False) for attention in ATTENTIONS),
        ("mhla", None, "small", 384, False, False),
        ("softmax", "iha", "small", 224, False, True),
        *(pytest.param(*attention, "small", 384, True, False, marks=pytest.mark.slow) for attention in ATTENTIONS),
    ],
)
def test_family_is_built_at_its_true_size(
    core: str,
    mix: str | None,
    size: str,
    pixels: int,
    cpe: bool,
    local: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Everything but the training itself, with weights that take no memory."""
    paths = [IMAGENET, *([LOCAL] if local else []), *([LARGE] if pixels == 384 else [])]
    named = () if local else ("--model.name", _name(core, mix, size))
    seen = []
    monkeypatch.setattr(ClassificationCLI, "_run_subcommand", lambda cli, name: seen.append(cli))
    monkeypatch.chdir(tmp_path)
    with torch.device("meta"):
        assert run("fit", *files(*paths), *named, *(() if cpe or local else PLAIN), "--trainer.accelerator", "cpu") == 0
        namesake = timm.create_model(_name(core, mix, size, pixels))
    (cli,) = seen
    net, config = cli.model.net, cli.config.fit
    assert config.model.name == _name(core, mix, size)
    assert (net.embed_dim, net.num_classes) == ({"tiny": 192, "small": 384}[size], 1000)
    assert net.patch_embed.img_size == namesake.patch_embed.img_size == (pixels, pixels)
    ours, theirs = (
        timm.data.resolve_input_data_config(made, {"crop_pct": crop})
        for made, crop in ((net, config.data.crop_pct), (namesake, None))
    )
    assert ours == theirs and ours["input_size"] == (3, pixels, pixels)
    assert (net.blocks[0].attn.cpe is not None) == cpe
    mixes = [
        next((mix for mix in HEAD_MIXES if isinstance(b.attn.head_mix, HEAD_MIXES[mix])), None) for b in net.blocks
    ]
    whole = [4, 9] if local else []
    assert mixes == [None if index in whole else mix for index in range(12)]
    assert all(isinstance(block.attn.core, CORES[core]) for block in net.blocks)
    windows = [getattr(block.attn.core, "window", None) for block in net.blocks]
    assert windows == [(5, 5) if local and index not in whole else None for index in range(12)]
    assert net.blocks[-1].drop_path1.drop_prob == pytest.approx(0.1)
    assert config.data.batch_size * cli.trainer.accumulate_grad_batches == 1024
    assert (cli.trainer.max_epochs, cli.model.optimizer_config.lr) == (300, 1e-3)
    assert config.run_dir == "-".join(["runs/imagenet", *(path.stem for path in paths[1:]), *named[1:]])


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_overlay_keeps_the_global_batch(overlay: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(ClassificationCLI, "instantiate_classes", lambda cli: seen.append(cli))
    monkeypatch.setattr(ClassificationCLI, "_run_subcommand", lambda cli, name: None)
    monkeypatch.setattr(ClassificationCLI, "trainer", Trainer(accelerator="cpu", logger=False), raising=False)
    monkeypatch.chdir(tmp_path)
    assert run("fit", *files(IMAGENET, LOCAL, overlay)) == 0
    options = seen.pop().config.fit
    trainer = options.trainer
    processes = trainer.devices * trainer.num_nodes
    assert options.data.batch_size * processes * trainer.accumulate_grad_batches == 1024
    assert options.model.model_args["drop_path_rate"] == 0.1
    assert options.run_dir == f"runs/imagenet-{LOCAL.stem}"


@pytest.mark.parametrize(
    ("names", "run_dir"),
    [
        ([], "runs"),
        (["digits"], "runs/digits"),
        (["digits", "overlays/gpu8"], "runs/digits"),
        (["digits", "wide", "overlays/gpu8", "long"], "runs/digits-wide-long"),
    ],
    ids=["none", "one", "overlay", "several"],
)
def test_run_is_named_after_its_files_but_overlays_and_a_given_model(
    names: list[str], run_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(ClassificationCLI, "instantiate_classes", lambda cli: seen.append(cli))
    monkeypatch.setattr(ClassificationCLI, "_run_subcommand", lambda cli, name: None)
    monkeypatch.setattr(ClassificationCLI, "trainer", Trainer(accelerator="cpu", logger=False), raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "overlays").mkdir()
    for name in names:
        (tmp_path / f"{name}.yaml").write_text("model:\n  name: deit_mhla_digits\n")
    given = [*files(*(Path(f"{name}.yaml") for name in names)), "-c", "{seed_everything: 1}"]
    if names:
        assert run("fit", *given) == 0
        assert seen.pop().config.fit.run_dir == run_dir
    assert run("fit", *given, "--model.name", "deit_hih_digits") == 0
    assert seen.pop().config.fit.run_dir == f"{run_dir}{'-' if names else '/'}deit_hih_digits"


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
