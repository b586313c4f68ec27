"""Distillation of classifiers and backbones by the command line, in stages."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from PIL import Image
from safetensors.torch import load_file, save_file

import headmix_vision
from headmix_vision.cli import distill, export
from headmix_vision.data.augmentation import input_config
from headmix_vision.errors import InputError
from headmix_vision.runs.networks import open_network
from headmix_vision.runs.teachers import make_student, open_teacher
from headmix_vision.training.distillation import DistilledClassifier
from headmix_vision.training.run_directory import resume_command
from headmix_vision.training.training_job import TrainingRequest, train

from .helpers import assert_same_run, load, read_csv
from .test_processes import TWO_RANKS, start
from .test_resume import interrupt_in

SIZES: dict[str, Any] = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 2, "num_heads": 2}
CONFIG: dict[str, Any] = {
    "seed_everything": 3,
    "trainer": {
        "accelerator": "cpu",
        "val_check_interval": 4,
        "check_val_every_n_epoch": None,
        "limit_val_batches": 1,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
    "model": {
        "core": "mhla",
        "swap_args": {"block_grid": [2, 2]},
        "attention": {"steps": 16, "lr": 1e-2},
        "features": {"steps": 16, "lr": 5e-4},
        "labels": {"steps": 0},
    },
    "ema": {"decay": None},
    "data": {"dataset": "digits", "batch_size": 32, "eval_batch_size": 64},
}


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ViT of timm with random weights, whose attention is far from uniform, in a folder of timm."""
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", **SIZES, in_chans=1, num_classes=10)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("teacher")
    headmix_vision.save_pretrained(network, folder)
    return f"local-dir:{folder}"


def write_config(path: Path, teacher: str, **overrides: Any) -> Path:
    config = yaml.safe_load(yaml.safe_dump(CONFIG))
    config["model"]["teacher"] = teacher
    for name, value in overrides.items():
        *sections, option = name.split("__")
        target = config
        for section in sections:
            target = target.setdefault(section, {})
        target[option] = value
    path.write_text(yaml.safe_dump(config))
    return path


def run(*args: object) -> int:
    try:
        distill.main(["classifier", *map(str, args)], None)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def logged(run_dir: Path, name: str) -> list[float]:
    return [float(row[name]) for row in read_csv(run_dir / "metrics.csv") if row[name]]


def test_stages_follow_each_other_and_the_run_opens_without_its_teacher(
    teacher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = {"model__labels": {"steps": 4, "lr": 1e-2}, "best__monitor": "val/top1"}
    config = write_config(tmp_path / "a.yaml", teacher, **labels)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 0
    assert "best top-1" in capsys.readouterr().out
    losses = logged(tmp_path / "run", "train/loss_step")
    attention, features, labels = losses[:16], losses[16:32], losses[32:]
    assert attention[-1] < 0.5 * attention[0] and features[-1] < 0.8 * features[0] and len(labels) == 4
    errors, cosines = (logged(tmp_path / "run", f"val/{name}") for name in ("attention_error", "feature_cosine"))
    assert errors[3] < errors[0] and cosines[7] > cosines[3] > cosines[0]
    rates = logged(tmp_path / "run", "lr")
    assert max(rates[:16]) > 9e-3 and 4e-4 < max(rates[16:32]) <= 5e-4 and rates[32] == 1e-2

    network, about = open_network(tmp_path / "run")
    assert about["name"] == "swapped" and type(network.blocks[1].attn.core).__name__ == "MHLACore"
    export.main([str(tmp_path / "run"), "--out", str(tmp_path / "a.safetensors")])
    exported, _ = open_network(tmp_path / "a.safetensors")
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(exported(images), network(images)) and network(images).shape == (2, 10)
    assert run("test", "--run_dir", tmp_path / "run") == 0
    assert "most often taken for" in capsys.readouterr().out


def test_the_first_stage_changes_attention_alone(teacher: str, tmp_path: Path) -> None:
    options = {"model__features": {"steps": 4, "learn": "attention", "loss": "cosine"}, "model__attention__steps": 4}
    config = write_config(tmp_path / "a.yaml", teacher, model__layers=[1], **options)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 0
    made = open_teacher(teacher)
    before = make_student(made, layers=[1], options={"block_grid": [2, 2]}).network.state_dict()
    after = open_network(tmp_path / "run")[0].state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("blocks.1.attn.") and "grid" not in name}


def test_a_stage_without_progress_ends_early_and_resumes_exactly(
    teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"early_stopping": {"patience": 1, "min_delta": 9.0}, "ema__decay": 0.9, "model__labels": {"steps": 4}}
    config = write_config(
        tmp_path / "a.yaml", teacher, model__attention__steps=20, model__features__steps=20, **options
    )
    assert run("fit", "-c", config, "--run_dir", tmp_path / "whole") == 0
    # two validations in each of the first stages; the last one has 4 steps and one validation
    assert load(tmp_path / "whole" / "checkpoints" / "last.ckpt")["global_step"] == 20
    with monkeypatch.context() as context:
        interrupt_in(context, "training_step", 0, 5, signal.SIGTERM, DistilledClassifier)
        assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 143
    with monkeypatch.context() as context:
        interrupt_in(context, "training_step", 0, 8, signal.SIGTERM, DistilledClassifier)
        assert run("fit", "--run_dir", tmp_path / "run", "--ckpt_path", "last") == 143
    with monkeypatch.context() as context:
        interrupt_in(context, "validation_step", 0, 0, signal.SIGTERM, DistilledClassifier)
        assert run("fit", "--run_dir", tmp_path / "run", "--ckpt_path", "last") == 143
    assert run("fit", "--run_dir", tmp_path / "run", "--ckpt_path", "last") == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert "stopped: no better val/feature_cosine than" not in capsys.readouterr().out


def test_pictures_without_classes_suffice(teacher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pictures" / "more").mkdir(parents=True)
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 256, (9, 9), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / ("more" if number % 3 else "") / f"{number}.png")
    data = {"dataset": "folder", "root": str(tmp_path / "pictures"), "batch_size": 4, "num_workers": 0}
    steps = {"model__attention__steps": 2, "model__features__steps": 0, "trainer__val_check_interval": 1}
    config = write_config(tmp_path / "a.yaml", teacher, data={**data, "holdout_every": 4}, **steps)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 0
    assert len(logged(tmp_path / "run", "val/feature_cosine")) == 2
    assert run("validate", "--run_dir", tmp_path / "run") == 0
    assert "attention error 0." in capsys.readouterr().out
    config = write_config(tmp_path / "b.yaml", teacher, data=data, **steps)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "other") == 2
    assert "has no validation split" in capsys.readouterr().err


def test_a_student_with_other_classes_learns_a_new_classifier(teacher: str, tmp_path: Path) -> None:
    folder = tmp_path / "backbone"
    made = open_teacher(teacher)
    backbone = timm.create_model("vit_tiny_patch16_224", **SIZES, in_chans=1, num_classes=0)
    backbone.load_state_dict(
        {name: value for name, value in made.network.state_dict().items() if not name.startswith("head.")}
    )
    headmix_vision.save_pretrained(backbone, folder)
    steps = {"model__attention__steps": 0, "model__features__steps": 0, "model__labels": {"steps": 12, "lr": 3e-3}}
    config = write_config(tmp_path / "a.yaml", f"local-dir:{folder}", model__num_classes=10, **steps)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 0
    losses = logged(tmp_path / "run", "train/loss_step")
    assert sum(losses[-3:]) < sum(losses[:3]) and open_network(tmp_path / "run")[0].num_classes == 10


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model__teacher": "none"}, "teacher none is neither a run directory"),
        ({"model__teacher": "vit_tiny_patch16_224"}, "needs weights: give a file by model.teacher_checkpoint"),
        ({"model__teacher": "local-dir:none"}, "none has no config.json"),
        ({"model__teacher_args": {"depth": 3}}, "model.teacher_args applies to the name of a model in timm"),
        ({"model__layers": [7]}, "the model has no layer 7 to swap"),
        ({"model__swap_args": {"blocks": 2}}, "swap_attention has no 'blocks'; did you mean block_grid?"),
        ({"model__core": "softmaxx"}, "core must be one of"),
        ({"model__attention__steps": 0, "model__features__steps": 0}, "no stage has steps"),
        ({"model__labels": {"temperature": 0}}, "model.labels.temperature must be a finite number above 0"),
        ({"model__attention__lr": 0}, "model.attention.lr must be a finite number above 0, got 0"),
        ({"model__labels__steps": 3, "model__labelled": False}, "model.labelled is false"),
        ({"model__num_classes": 1}, "model.num_classes must be a whole number of at least 2, got 1"),
        ({"model__num_classes": 9, "model__labelled": True}, "the model has 9 classes, the data 10"),
        ({"best__monitor": "val/fid"}, "best.monitor must be"),
        ({"trainer__strategy": "fsdp2"}, "set trainer.strategy=ddp"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    overrides: dict[str, Any], message: str, teacher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "a.yaml", teacher, **overrides)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert message in line and not (tmp_path / "run").exists()


def test_backbones_and_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    arguments = {**SIZES, "in_chans": 1, "num_classes": 0, "dynamic_img_size": True}
    headmix_vision.save_pretrained(timm.create_model("vit_tiny_patch16_224", **arguments), tmp_path)
    with pytest.raises(InputError, match=r"the teacher has no classifier: set model.num_classes"):
        DistilledClassifier(f"local-dir:{tmp_path}", labelled=True)
    with pytest.raises(InputError, match=r"model.img_size=9 must be a multiple of the patch size 2x2 of this model"):
        DistilledClassifier(f"local-dir:{tmp_path}", img_size=9)
    module = DistilledClassifier(f"local-dir:{tmp_path}", swap_args={"block_grid": 2})
    module.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(InputError, match="predict needs a classifier, and the student has none"):
        module.setup(TrainerFn.PREDICTING)


def test_options_of_the_command_line_that_the_stages_decide_are_refused(
    teacher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "a.yaml", teacher)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run", "--trainer.max_steps", 3) == 2
    assert "--trainer.max_steps has no effect: each stage has its own" in capsys.readouterr().err


def test_teachers_come_from_many_places(teacher: str, tmp_path: Path) -> None:
    folder = Path(teacher.removeprefix("local-dir:"))
    arguments = {**SIZES, "in_chans": 1, "num_classes": 10}
    named = open_teacher("vit_tiny_patch16_224", str(folder / "model.safetensors"), arguments)
    images = torch.randn(2, 1, 8, 8)
    expected = open_teacher(teacher).network(images)
    assert torch.equal(named.network(images), expected)
    large = open_teacher(teacher, img_size=12)
    assert large.network(torch.randn(2, 1, 12, 12)).shape == (2, 10)
    assert make_student(large).arguments["img_size"] == 12
    shipped = open_teacher("deit_softmax_digits")
    student = make_student(shipped, core="linear", layers=[0])
    assert student.arguments["architecture"] == "deit_softmax_digits"

    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"]["mean"] = [0.25]
    copied = tmp_path / "copied"
    copied.mkdir()
    (copied / "config.json").write_text(json.dumps(config))
    (copied / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    made = open_teacher(f"local-dir:{copied}")
    student = make_student(made)
    assert timm.create_model(student.name, **student.arguments).pretrained_cfg["mean"] == [0.25]


def test_a_naflexvit_is_distilled_at_the_size_that_it_was_saved_with(tmp_path: Path) -> None:
    sizes = {**SIZES, "init_values": None, "in_chans": 1, "num_classes": 10}
    headmix_vision.save_pretrained(timm.create_model("naflexvit_base_patch16_gap", **sizes), tmp_path / "teacher")
    stages = {"model__attention": {"steps": 6, "lr": 5e-4}, "model__features__steps": 0}
    config = write_config(tmp_path / "a.yaml", f"local-dir:{tmp_path / 'teacher'}", **stages)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 0
    losses = logged(tmp_path / "run", "train/loss_step")
    assert losses[-1] < 0.9 * losses[0]
    network = open_network(tmp_path / "run")[0]
    assert input_config(network)["input_size"] == (1, 8, 8) and network(torch.randn(2, 1, 8, 8)).shape == (2, 10)


def test_a_teacher_of_transformers_becomes_one_of_timm(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    theirs = transformers.Dinov2Model(transformers.Dinov2Config(**sizes)).eval()
    theirs.save_pretrained(tmp_path / "dinov2")
    made = open_teacher(f"local-dir:{tmp_path / 'dinov2'}")
    images = torch.randn(2, 3, 28, 28)
    wanted = theirs(images).last_hidden_state
    torch.testing.assert_close(made.network.forward_features(images), wanted, rtol=1e-4, atol=1e-4)
    assert make_student(made, options={"block_grid": 2}).name == "swapped"
    small = open_teacher(f"local-dir:{tmp_path / 'dinov2'}", img_size=42)
    assert small.network(torch.randn(1, 3, 42, 42)).shape == (1, 32)
    assert input_config(small.network)["input_size"] == (3, 42, 42)
    for wrong in ({"hidden_size": 0}, {"patch_size": "14"}, {"mlp_ratio": None}):
        config = json.loads((tmp_path / "dinov2" / "config.json").read_text())
        (tmp_path / "dinov2" / "config.json").write_text(json.dumps({**config, **wrong}))
        with pytest.raises(InputError, match=min(wrong)):
            open_teacher(f"local-dir:{tmp_path / 'dinov2'}")
        (tmp_path / "dinov2" / "config.json").write_text(json.dumps(config))
    transformers.BertConfig().save_pretrained(tmp_path / "dinov2")
    with pytest.raises(InputError, match="describes a 'bert' that cannot be a teacher"):
        open_teacher(f"local-dir:{tmp_path / 'dinov2'}")


def transformers_folder(name: str, folder: Path, **changed: int) -> Any:
    """Save a small DeiT, DINOv2 or DINOv3 with drawn weights, and return it."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 7}
    sizes |= changed
    if name.startswith("DeiT"):
        config = transformers.DeiTConfig(**sizes, intermediate_size=64, num_labels=5, layer_norm_eps=1e-6)
    elif name.startswith("DINOv3"):
        config = transformers.DINOv3ViTConfig(**sizes, intermediate_size=64, num_register_tokens=3)
    else:
        config = transformers.Dinov2WithRegistersConfig(**sizes, num_register_tokens=3, num_labels=5)
    theirs = getattr(transformers, name)(config).eval()
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("DeiTModel", 2),
        ("DeiTForImageClassification", 2),
        ("DeiTForImageClassificationWithTeacher", 2),
        ("Dinov2WithRegistersModel", 4),
        ("Dinov2WithRegistersForImageClassification", 4),
        ("DINOv3ViTModel", 4),
    ],
)
def test_teachers_of_transformers_keep_distillation_and_register_tokens(name: str, prefix: int, tmp_path: Path) -> None:
    theirs = transformers_folder(name, tmp_path / "theirs")
    made = open_teacher(f"local-dir:{tmp_path / 'theirs'}")
    network: Any = made.network
    images = torch.randn(2, 3, 28, 28)
    backbone = theirs if name.endswith("Model") else theirs.base_model
    wanted = backbone(images).last_hidden_state
    torch.testing.assert_close(network.forward_features(images), wanted, rtol=1e-4, atol=1e-4)
    assert network.num_prefix_tokens == prefix
    if name.startswith("DeiTFor"):
        torch.testing.assert_close(network(images), theirs(images).logits, rtol=1e-4, atol=1e-4)
    student: Any = make_student(made, options={"block_grid": 2})
    again: Any = timm.create_model(student.name, **student.arguments)
    again.load_state_dict(student.network.state_dict())
    torch.testing.assert_close(again.eval()(images), student.network(images))
    large = open_teacher(f"local-dir:{tmp_path / 'theirs'}", img_size=42)
    assert large.network(torch.randn(1, 3, 42, 42)).shape == network(images[:1]).shape


def test_a_deit_of_transformers_is_distilled_by_the_command(tmp_path: Path) -> None:
    digits = {"image_size": 8, "patch_size": 1, "num_channels": 1}
    transformers_folder("DeiTForImageClassificationWithTeacher", tmp_path / "theirs", **digits)
    stages = {"model__attention": {"steps": 2}, "model__features__steps": 2}
    config = write_config(tmp_path / "a.yaml", f"local-dir:{tmp_path / 'theirs'}", **stages)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "run") == 0
    assert logged(tmp_path / "run", "train/loss_step")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key_bias": True}, "no key_bias"),
        ({"num_register_tokens": 0}, "num_register_tokens"),
        ({"rope_theta": "100"}, "rope_theta"),
        ({"use_gated_mlp": True}, "cannot be a teacher"),
        ({"num_hidden_layers": 3}, "does not fit its config.json"),
    ],
)
def test_a_dinov3_that_timm_does_not_have_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    transformers_folder("DINOv3ViTModel", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(InputError, match=message):
        open_teacher(f"local-dir:{tmp_path}")


@pytest.mark.parametrize("lost", ["embeddings.position_embeddings", "embeddings.cls_token"])
def test_a_teacher_of_transformers_without_positions_or_class_token_is_refused(lost: str, tmp_path: Path) -> None:
    transformers_folder("Dinov2WithRegistersModel", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: value for name, value in weights.items() if name != lost}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="cls_token and the position embeddings of the weights do not fit each other"):
        open_teacher(f"local-dir:{tmp_path}")


@pytest.mark.parametrize("recipe", ["digits", "folder"])
def test_shipped_recipes_train(recipe: str, teacher: str, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(20):
        Image.new("L", (9, 9), 12 * number).save(pictures / f"{number}.png")
    options: dict[str, Any] = {"trainer.accelerator": "cpu", "trainer.val_check_interval": 1, "data.batch_size": 2}
    options |= {
        "model.attention.steps": 1,
        "model.features.steps": 1,
        "data.num_workers": 0,
        "data.eval_batch_size": 8,
        "trainer.limit_val_batches": 1,
        "early_stopping.patience": 3,
    }
    if recipe == "folder":
        options |= {"model.teacher": teacher, "data.root": str(pictures), "trainer.precision": "32-true"}
    request = TrainingRequest(kind="distilled_classifier", configs=[recipe], options=options, run_dir=tmp_path / "run")
    assert {"val/attention_error", "val/feature_cosine"} <= train(request).metrics.keys()


def test_the_command_that_resumes_names_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/headmix", "distill", "classifier", "fit"])
    assert resume_command(Path("a")) == "headmix distill classifier fit --run-dir a --ckpt-path last"
    monkeypatch.setattr("sys.argv", ["/bin/headmix-distill", "generator", "fit"])
    assert resume_command(Path("a")) == "headmix-distill generator fit --run-dir a --ckpt-path last"


@pytest.mark.slow
def test_two_processes_equal_one_with_twice_the_batch(teacher: str, tmp_path: Path) -> None:
    script = tmp_path / "distil.py"
    script.write_text("from headmix_vision.cli.distill import main\nmain()\n")
    data = {"dataset": "digits", "eval_batch_size": 64}
    steps = {"model__attention__steps": 4, "model__features__steps": 4}
    two = write_config(tmp_path / "two.yaml", teacher, data={**data, "batch_size": 16}, **steps)
    words = ("classifier", "fit", "-c", two, "--run_dir", tmp_path / "two", *TWO_RANKS)
    process = start(*words, script=str(script))
    one = write_config(tmp_path / "one.yaml", teacher, data={**data, "batch_size": 32}, **steps)
    assert run("fit", "-c", one, "--run_dir", tmp_path / "one") == 0
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    first, second = (load(tmp_path / name / "checkpoints" / "last.ckpt") for name in ("one", "two"))
    assert first["global_step"] == second["global_step"] == 8
    for name, value in first["state_dict"].items():
        torch.testing.assert_close(value, second["state_dict"][name], rtol=1e-3, atol=1e-4)
