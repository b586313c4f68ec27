"""Calls that no picture comes of are refused in a line, and samples that are no numbers never become pixels."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file

from headmix_vision.diffusion import Guidance, HeadMixDiTPipeline, ObjectiveConfig, create_scheduler
from headmix_vision.diffusion.denoising import NonFiniteSamplesError
from headmix_vision.errors import InputError

NAN, INF = float("nan"), float("inf")


def make_pipeline(kind: str = "flow", **options: Any) -> HeadMixDiTPipeline:
    torch.manual_seed(0)
    model = timm.create_model("dit_linear_digits", depth=1, embed_dim=16, num_heads=2, **options).eval()
    torch.nn.init.normal_(model.final_layer.linear.weight, std=0.1)
    objective = ObjectiveConfig(kind=kind)
    pipeline = HeadMixDiTPipeline(model, create_scheduler(None, objective, clip=True), objective=asdict(objective))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def pipeline() -> HeadMixDiTPipeline:
    return make_pipeline()


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"class_labels": labels}
            for labels in (
                1.5,
                [1.5],
                [1, 2.0],
                [True],
                [1, False],
                "3",
                ["3"],
                [None],
                [[1, 2]],
                {1, 2},
                [2**70],
                [-1],
                11,
                torch.tensor([1.0]),
                torch.tensor([True]),
                torch.tensor([[1, 2]]),
                torch.tensor([250], dtype=torch.uint8),
                np.array([NAN]),
            )
        ),
        *({"num_images": number} for number in (0, -1, 1.0, True, 2, "1")),
        *({"num_inference_steps": number} for number in (0, -5, 2.5, NAN, INF, 1001, 10**6, "50", None, True)),
        *({"guidance_scale": scale} for scale in (INF, -INF, NAN, -0.5, 1e4, 1e39, "2", None, True, torch.tensor(2.0))),
        *(
            {"guidance_interval": interval}
            for interval in (0.5, (0.5,), (0, 1, 2), (NAN, 1), (0, INF), (-0.1, 1), (0.8, 0.2), ("0", "1"), None, "01")
        ),
        *({"guidance_channels": channels} for channels in ("two", None, 3, "first_three")),
        *({"height": size} for size in (0, -8, 7, 8.0, NAN, "8", True, 10**9)),
        {"width": 2.5},
        *({"generator": generator} for generator in (0, [0], "cpu", [torch.Generator()] * 2)),
        *(
            {"latents": latents}
            for latents in (torch.zeros(1, 1, 4, 4), torch.full((1, 1, 8, 8), NAN), np.zeros((1, 1, 8, 8)), [0])
        ),
        *({"output_type": kind} for kind in ("jpg", None, 3)),
        {"callback_on_step_end_tensor_inputs": ("noise",)},
        {"callback_on_step_end": lambda pipe, *_: setattr(pipe, "_guidance_scale", 3.0)},
        *({"callback_on_step_end": lambda *_, it=it: it} for it in ({"latents": torch.zeros(2, 2)}, torch.zeros(1))),
    ],
    ids=" ".join,
)
def test_calls(pipeline: HeadMixDiTPipeline, options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        pipeline(**{"class_labels": [1], "num_inference_steps": 2, **options})
    assert len(str(caught.value).splitlines()) == 1


def test_whole_numbers_of_every_kind_are_labels(pipeline: HeadMixDiTPipeline) -> None:
    guidance = Guidance()
    for labels in (7, [7], (np.int64(7),), np.array([7], np.uint8), torch.tensor(7), [torch.tensor(7)], range(7, 8)):
        assert pipeline.check_labels(labels, None, guidance).tolist() == [7]  # type: ignore[arg-type]


def test_a_sample_that_is_no_number_is_named_with_its_step(pipeline: HeadMixDiTPipeline) -> None:
    def spoil(pipe: Any, step: int, t: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        latents = tensors["latents"].clone()
        if step == 2:
            latents[1] = NAN
        return {"latents": latents}

    for output_type in ("pil", "np", "pt", "latent"):
        with pytest.raises(NonFiniteSamplesError, match=r"sample 1 .* in step 3 of 5") as caught:
            pipeline([0, 1, 2], num_inference_steps=5, callback_on_step_end=spoil, output_type=output_type)
        assert caught.value.samples == [1]


def test_clipping_does_not_hide_infinite_predictions() -> None:
    """DDPM's clipping makes a finite sample of an infinite prediction, of which one number is enough."""
    pipeline = make_pipeline("ddpm")
    bias = pipeline.transformer.final_layer.linear.bias
    with torch.no_grad():
        bias[0] = INF
    with pytest.raises(NonFiniteSamplesError, match="in step 1 of 3"):
        pipeline([1], num_inference_steps=3)


def test_the_autoencoder_is_watched(tmp_path: Path) -> None:
    blocks = {"block_out_channels": (8,), "norm_num_groups": 4, "layers_per_block": 1}
    model = timm.create_model("dit_linear_s_8", input_size=8, depth=1, embed_dim=16, num_heads=2).eval()
    with pytest.raises(InputError, match="latents have 3 channels, those of the network 4"):
        HeadMixDiTPipeline(model, create_scheduler(None, ObjectiveConfig()), AutoencoderKL(latent_channels=3, **blocks))
    vae = AutoencoderKL(latent_channels=4, **blocks)
    torch.nn.init.constant_(vae.decoder.conv_out.bias, NAN)
    pipeline = HeadMixDiTPipeline(model, create_scheduler(None, ObjectiveConfig()), vae)
    pipeline.set_progress_bar_config(disable=True)
    with pytest.raises(NonFiniteSamplesError, match="in the autoencoder"):
        pipeline([1], num_inference_steps=1)


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "x"},
        {"bogus": 1},
        *({"shift": value} for value in (0, -1, INF, NAN, "3", True, None)),
        *({"logit_mean": value} for value in (INF, NAN)),
        {"beta_end": NAN},
    ],
    ids=str,
)
def test_objectives(values: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        ObjectiveConfig.from_dict(values)


def test_parts_of_a_pipeline(pipeline: HeadMixDiTPipeline) -> None:
    for options in ({"class_names": "abc"}, {"class_names": [1]}, {"objective": {"kind": "x"}}):
        with pytest.raises(InputError):
            HeadMixDiTPipeline(pipeline.transformer, pipeline.scheduler, **options)  # type: ignore[arg-type]


def test_missing_weights_are_not_drawn_at_random(
    pipeline: HeadMixDiTPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.save_pretrained(tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    weights = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    state, notes = load_file(weights), logging.Handler()
    monkeypatch.setattr(notes, "emit", lambda record: pytest.fail(record.getMessage()))
    monkeypatch.setattr(logging.getLogger("diffusers.models.modeling_utils"), "handlers", [notes])
    for problem, changed in (
        ("lacks weights, first x_embedder.proj.bias", {k: v for k, v in state.items() if k != "x_embedder.proj.bias"}),
        ("has unknown weights, first bogus", state | {"bogus": torch.zeros(1)}),
    ):
        save_file(changed, weights)
        with pytest.raises(InputError, match=problem):
            HeadMixDiTPipeline.from_pretrained(tmp_path)
    save_file(state, weights)
    HeadMixDiTPipeline.from_pretrained(tmp_path)
