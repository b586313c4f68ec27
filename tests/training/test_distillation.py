"""Distillation of attention: our own diffusion transformers by the command line, Wan by the functions."""

import copy
import csv
from pathlib import Path

import pytest
import timm
import torch
from diffusers import SanaTransformer2DModel, WanTransformer3DModel

from headmix_vision.cli import distill
from headmix_vision.errors import InputError
from headmix_vision.models.attention_errors import feature_errors
from headmix_vision.models.convert import sana_to_mhla, wan_to_mhla
from headmix_vision.runs.networks import open_network
from headmix_vision.training.distillation import attention_errors, attention_pairs

from .gen_helpers import run, write_config

SIZES = {"embed_dim": 16, "depth": 2, "num_heads": 2}


def generator(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, **SIZES)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_only_layers_that_differ_learn_and_come_closer() -> None:
    teacher, student = generator("dit_softmax_digits"), generator("dit_mhla_digits")
    x, t, y = torch.randn(8, 1, 8, 8), torch.rand(8) * 1000, torch.arange(8)
    pairs = attention_pairs(teacher, student)
    assert [type(layer.core).__name__ for pair in pairs for layer in pair] == ["SoftmaxCore", "MHLACore"] * 2
    optimizer = torch.optim.Adam(student.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        with attention_errors(pairs) as errors, torch.no_grad():
            teacher(x, t, y)
        loss = torch.stack(errors).mean()
        assert [error.shape for error in errors] == [(8,)] * 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    learned = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
    assert learned == {name for name, _ in student.named_parameters() if ".attn." in name}
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert not any(layer._forward_hooks for layer, _ in pairs)


def test_equal_layers_have_no_error() -> None:
    teacher = generator("dit_softmax_digits")
    with attention_errors([(block.attn, copy.deepcopy(block.attn)) for block in teacher.blocks]) as errors:
        teacher(torch.randn(2, 1, 8, 8), 500.0, torch.arange(2))
    assert torch.stack(errors).tolist() == [[0.0, 0.0]] * 2


def test_features_are_compared_by_direction_and_relative_to_the_teacher() -> None:
    wanted = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[3.0, 4.0], [0.0, 0.0]]])
    found = torch.tensor([[[2.0, 0.0], [0.0, -1.0]], [[4.0, -3.0], [0.0, 0.0]]])
    cosines, squares = feature_errors(found.double(), wanted)
    assert cosines.dtype == squares.dtype == torch.float32
    assert cosines.tolist() == [1.0, 1.0] and squares.tolist() == [2.5, 2.0]


def test_a_hybrid_wan_is_distilled_in_its_new_layers() -> None:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "text_dim": 16, "ffn_dim": 32}
    wan = WanTransformer3DModel(in_channels=4, out_channels=4, **sizes)
    teacher, student = (wan_to_mhla(wan, (2, 2, 2), layers) for layers in ([], [1]))
    with attention_errors(attention_pairs(teacher, student)) as errors, torch.no_grad():
        teacher(torch.randn(2, 4, 3, 8, 8), torch.tensor([5, 900]), torch.randn(2, 7, 16))
    torch.stack(errors).mean().backward()
    learned = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
    assert learned == {name for name, _ in student.named_parameters() if name.startswith("blocks.1.attn1.")}


def test_layers_of_sana_are_given_the_grid_of_the_teacher() -> None:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_size": 8}
    cross = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16}
    sana = SanaTransformer2DModel(in_channels=4, out_channels=4, caption_channels=8, **sizes, **cross)
    teacher, student, other = (sana_to_mhla(sana, (2, 4), layers, "locality") for layers in ([], [0], [0]))
    text, times = torch.randn(2, 5, 8), torch.tensor([5, 900])
    x = torch.randn(2, 4, 16, 10)
    with torch.no_grad():
        student(x.reshape(2, 4, 5, 32), text, times)  # as many tokens on another grid
        expected = []
        for pair in ((teacher, student), (teacher, other)):
            with attention_errors(attention_pairs(*pair)) as errors:
                teacher(x, text, times)
            expected.append(errors[0])
    assert torch.equal(*expected)
    assert expected[0].min() > 0


def test_layers_that_cannot_be_paired_are_refused() -> None:
    teacher = generator("dit_softmax_digits")
    with pytest.raises(InputError, match="same kind of attention in all layers"):
        attention_pairs(teacher, generator("dit_softmax_digits"))
    with pytest.raises(InputError, match=r"one of them has no blocks\.2\.attn"):
        attention_pairs(teacher, timm.create_model("dit_mhla_digits", **{**SIZES, "depth": 3}))
    wan = WanTransformer3DModel(num_attention_heads=1, attention_head_dim=12, num_layers=1, ffn_dim=8)
    with pytest.raises(InputError, match=r"converted with layers=\[\], got WanTransformer3DModel"):
        attention_pairs(wan, wan_to_mhla(wan))


def test_the_command_trains_a_student_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, "accumulate_grad_batches": 1}
    options = {f"trainer__{name}": value for name, value in steps.items()}
    config = write_config(tmp_path / "tiny.yaml", model__name="dit_softmax_digits", **options)
    teacher, student = tmp_path / "teacher", tmp_path / "student"
    assert run("fit", "-c", config, "--run_dir", teacher) == 0

    def distil(*arguments: object) -> int:
        options = ["fit", "-c", config, "--run_dir", student, "--model.name", "dit_mhla_digits"]
        try:
            distill.main([str(argument) for argument in [*options, *arguments]], None)
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    assert distil("--model.teacher", tmp_path / "none") == 2
    assert f"(asked for best): {tmp_path / 'none'} does not exist" in capsys.readouterr().err
    assert distil("--model.teacher", teacher, "--trainer.strategy", "fsdp2") == 2
    assert "set trainer.strategy=ddp" in capsys.readouterr().err
    assert distil("--model.teacher", teacher, "--model.objective.kind", "ddpm") == 2
    assert "trained with objective.kind=flow, this run has ddpm" in capsys.readouterr().err
    assert not student.exists()
    assert distil("--model.teacher", teacher, "--model.distill_steps", 1) == 0
    with (student / "metrics.csv").open() as file:
        losses = [float(row["train/loss_step"]) for row in csv.DictReader(file) if row["train/loss_step"]]
    assert len(losses) == 2
    theirs, ours = (open_network(path)[0].state_dict() for path in (teacher, student))
    assert set(ours) > set(theirs)
    # attention learns in the first step, everything in the second
    assert all(not torch.equal(ours[name], theirs[name]) for name in theirs if ".mlp." in name)
    assert not any("teacher" in name for name in torch.load(student / "checkpoints/last.ckpt")["state_dict"])

    assert run("fit", "-c", config, "--run_dir", teacher, "--seed_everything", 1, "--overwrite", "true") == 0
    more = "--ckpt_path", "last", "--trainer.max_epochs", 2, "--model.teacher", teacher
    for options in (("--model.distill_steps", 3), ("--model.distill_steps", 1, "--model.teacher_weight", 0.5)):
        assert distil(*more, *options) == 2
        assert "the teacher has other weights" in capsys.readouterr().err
    assert distil(*more, "--model.distill_steps", 1) == 0
