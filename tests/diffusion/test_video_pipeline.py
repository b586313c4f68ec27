"""The pipeline of videos: its output, frame rates, known first frames, autoencoders, saving, refusals."""

import subprocess
import sys
from dataclasses import asdict
from typing import Any

import diffusers
import numpy as np
import pytest
import timm
import torch

from headmix_vision.diffusion import HeadMixDiTPipeline, HeadMixVideoDiTPipeline, ObjectiveConfig, create_scheduler
from headmix_vision.diffusion.denoising import Guidance, NonFiniteSamplesError, denoise


def make_pipeline(kind: str = "flow", vae: Any = None, **options: Any) -> HeadMixVideoDiTPipeline:
    """A small model whose weights are drawn at random, all of them, for clips of 4 frames."""
    torch.manual_seed(0)
    dims = {"depth": 1, "embed_dim": 24, "num_heads": 2, "num_classes": 3, "input_size": (4, 8, 8), **options}
    model = timm.create_model("dit_video_mhla_digits", **dims).eval()
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    objective = ObjectiveConfig(kind=kind)
    pipeline = HeadMixVideoDiTPipeline(
        model, create_scheduler(None, objective), vae, asdict(objective), [f"class {i}" for i in range(3)]
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def pipeline() -> HeadMixVideoDiTPipeline:
    return make_pipeline()


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def draw(pipeline: HeadMixVideoDiTPipeline, labels: Any = (0, 1), **options: Any) -> Any:
    defaults = {"num_inference_steps": 2, "generator": generators(*range(len(labels))), "output_type": "np"}
    return pipeline(list(labels), **(defaults | options)).frames


def test_frames_are_as_diffusers_gives_them(pipeline: HeadMixVideoDiTPipeline) -> None:
    array = draw(pipeline)
    assert array.shape == (2, 4, 8, 8, 1) and array.min() >= 0 and array.max() <= 1 and array.std() > 0.05
    tensor = draw(pipeline, output_type="pt")
    assert torch.equal(tensor, torch.from_numpy(array).movedim(-1, 2))
    pictures = draw(pipeline, output_type="pil")
    assert [len(video) for video in pictures] == [4, 4] and pictures[0][0].size == (8, 8)
    assert draw(pipeline, output_type="latent").shape == (2, 1, 4, 8, 8)
    (frames,) = pipeline([2], num_frames=6, height=16, num_inference_steps=1, output_type="pt", return_dict=False)
    assert frames.shape == (1, 6, 1, 16, 8)
    guided = draw(pipeline, guidance_scale=2.0)
    assert guided.shape == array.shape and not np.allclose(guided, array, atol=1e-2)
    np.testing.assert_allclose(draw(pipeline, [1], generator=generators(1)), array[1:], atol=1e-5)


def test_the_frame_rate_reaches_the_network(pipeline: HeadMixVideoDiTPipeline) -> None:
    usual = draw(pipeline)
    assert np.array_equal(draw(pipeline, frame_rate=8.0), usual)
    assert not np.allclose(draw(pipeline, frame_rate=2.0), usual, atol=1e-3)
    assert pipeline.check_frame_rate(None) == 8.0 and pipeline.clip_size() == (4, 8, 8)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_known_first_frames_stay_and_are_gone_on_from(pipeline: HeadMixVideoDiTPipeline, guidance: float) -> None:
    known = draw(pipeline, num_inference_steps=1)[:, :2]
    frames = draw(pipeline, prefix=known, guidance_scale=guidance)
    np.testing.assert_allclose(frames[:, :2], known, atol=1e-6)
    assert np.array_equal(
        draw(pipeline, prefix=torch.from_numpy(known).movedim(-1, 2), guidance_scale=guidance), frames
    )
    other = draw(pipeline, prefix=1 - known, guidance_scale=guidance)
    assert np.abs(other[:, 2:] - frames[:, 2:]).max() > 1e-2
    shared = draw(pipeline, prefix=known[:1], guidance_scale=guidance)
    np.testing.assert_allclose(shared[0], frames[0], atol=1e-6)
    assert np.abs(shared[1] - frames[1]).max() > 1e-2


def image_autoencoder() -> Any:
    torch.manual_seed(1)
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        scaling_factor=0.5,
        shift_factor=0.1,
    ).eval()


def video_autoencoder() -> Any:
    torch.manual_seed(1)
    return diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    ).eval()


def test_an_autoencoder_of_images_takes_frame_by_frame() -> None:
    vae = image_autoencoder()
    pipeline = make_pipeline(vae=vae, in_channels=4)
    assert pipeline.clip_size() == (4, 16, 16) and pipeline.image_channels == 3
    latents, frames = draw(pipeline, [1], output_type="latent"), draw(pipeline, [1], output_type="pt")
    with torch.no_grad():
        for number in range(4):
            decoded = vae.decode(latents[:, :, number] / 0.5 + 0.1).sample / 2 + 0.5
            torch.testing.assert_close(frames[:, number], decoded.clamp(0, 1), rtol=0, atol=1e-5)
        known = frames[:, :2]
        clean = draw(pipeline, [1], output_type="latent", prefix=known)[:, :, :2]
        for number in range(2):
            mean = vae.encode(known[:, number] * 2 - 1).latent_dist.mean
            torch.testing.assert_close(clean[:, :, number], (mean - 0.1) * 0.5, rtol=0, atol=1e-5)


def test_an_autoencoder_of_videos(tmp_path: Any) -> None:
    pipeline = make_pipeline(vae=video_autoencoder(), in_channels=16, input_size=(4, 4, 4), patch_size=(1, 2, 2))
    assert pipeline.clip_size(9, 48, 16) == (9, 48, 16) and pipeline.image_size(48) == (48, 32)
    assert pipeline.clip_size() == (13, 32, 32) and pipeline.check_frame_rate(None) == 32.0
    frames = draw(pipeline, [1], num_inference_steps=1)
    assert frames.shape == (1, 13, 32, 32, 3)
    assert pipeline.most_frames(12) == 9 and pipeline.most_frames(4) == 1 and pipeline.most_frames(0) == 0
    longer = draw(pipeline, [1], num_inference_steps=1, prefix=frames[:, :5], num_frames=9, output_type="latent")
    assert longer.shape == (1, 16, 3, 4, 4)
    for options, message in (
        ({"num_frames": 16}, r"num_frames must be 4n \+ 1, .* and the autoencoder; got 16, nearest: 13 or 17"),
        ({"prefix": frames[:, :4]}, "the frames of the prefix must be .* got 4, nearest: 1 or 5"),
        ({"height": 36}, "height must be a multiple of 16 pixels"),
    ):
        with pytest.raises(ValueError, match=message):
            draw(pipeline, [1], **options)
    pipeline.save_pretrained(tmp_path)
    loaded = HeadMixVideoDiTPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert np.array_equal(draw(loaded, [1], num_inference_steps=1), frames)
    with torch.no_grad():
        next(loaded.vae.decoder.parameters()).fill_(float("nan"))
    with pytest.raises(NonFiniteSamplesError, match="in the autoencoder"):
        draw(loaded, [1])


def test_tubelets_of_several_frames() -> None:
    pipeline = make_pipeline(patch_size=(2, 4, 4), block_grid=(2, 2, 2))
    assert draw(pipeline, num_frames=6).shape[1] == 6
    known = np.zeros((1, 2, 8, 8, 1), np.float32)
    assert np.allclose(draw(pipeline, prefix=known)[:, :2], 0, atol=1e-6)
    for options, message in (
        ({"num_frames": 5}, "num_frames must be a multiple of 2, for tubelets of 2; got 5, nearest: 4 or 6"),
        ({"num_frames": 1}, "got 1, nearest: 2"),
        ({"prefix": known[:, :1]}, "the frames of the prefix must be a multiple of 2, .* got 1, nearest: 2"),
    ):
        with pytest.raises(ValueError, match=message):
            draw(pipeline, **options)


BLOCKS = {"core_args": {"causal": "rows"}, "block_grid": (2, 2, 2), "cpe": False, "positions": "rope"}


def recompute(
    pipeline: HeadMixVideoDiTPipeline, noise: torch.Tensor, known: torch.Tensor, scales: list[float], steps: int
) -> torch.Tensor:
    """Draws blocks of two frames of class 1 without a state: every step runs all clean frames again."""
    clips, rate = known, pipeline.transformer.frame_rate
    for block, scale in zip(noise[:, :, known.shape[2] :].split(2, dim=2), scales, strict=True):

        def predict(x: torch.Tensor, t: torch.Tensor, y: torch.Tensor, before: torch.Tensor = clips) -> torch.Tensor:
            clean = before.repeat(len(y) // len(before), 1, 1, 1, 1)
            times = torch.cat([torch.zeros(len(y), before.shape[2]), t[:, None].expand(-1, 2)], dim=1)
            return pipeline.transformer(torch.cat([clean, x], dim=2).double(), times, y, rate)[:, :, -2:]

        labels = torch.full((len(noise),), 1)
        options = {"labels": labels, "null_label": 3, "guidance": Guidance(scale, (0.2, 0.9))}
        clips = torch.cat([clips, denoise(predict, block, pipeline.scheduler, steps, **options)], dim=2)
    return clips


@pytest.mark.parametrize("known", [0, 4])
@pytest.mark.parametrize(("scale", "later"), [(1.0, 1.0), (2.0, 0.0), (0.0, 2.0), (2.0, 2.0)])
def test_blocks_are_drawn_as_if_all_before_were_computed_again(
    scale: float, later: float, known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten frames of a model of four, in float64, to which predictions are rounded instead of float32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    pipeline = make_pipeline(**BLOCKS)
    pipeline.transformer.double()
    noise = torch.randn(2, 1, 10, 8, 8, generator=torch.Generator().manual_seed(0))
    prefix = torch.rand(2, known, 1, 8, 8) if known else None
    options = {"guidance_scale": scale, "later_guidance_scale": later, "guidance_interval": (0.2, 0.9)}
    drawn = draw(pipeline, [1, 1], num_frames=10, prefix=prefix, latents=noise, output_type="latent", **options)
    clean = noise[:, :, :0] if prefix is None else prefix.transpose(1, 2) * 2 - 1
    expected = recompute(pipeline, noise, clean, [scale, scale, later, later, later][known // 2 :], 2)
    torch.testing.assert_close(drawn, expected, rtol=1e-10, atol=1e-10)


def test_noise_is_drawn_on_the_device_of_the_model_in_single_precision() -> None:
    pipeline = make_pipeline().to("meta", torch.bfloat16)
    drawn = pipeline._start_noise((1, 1, 4, 8, 8), None, None)
    given = pipeline._start_noise((1, 1, 4, 8, 8), None, torch.ones(1, 1, 4, 8, 8, dtype=torch.float64))
    assert [(x.device.type, x.dtype) for x in (drawn, given)] == [("meta", torch.float32)] * 2


def test_what_blocks_cannot_be() -> None:
    pipeline = make_pipeline(**BLOCKS)
    assert (pipeline.most_frames(7), pipeline.count_blocks(8, 4), pipeline.count_blocks(8)) == (6, 2, 4)
    for options, message in (
        ({"num_frames": 5}, "num_frames must be a multiple of 2, for blocks of 2; got 5, nearest: 4 or 6"),
        ({"prefix": np.zeros((1, 1, 8, 8, 1), np.float32)}, "prefix must be a multiple of 2, .* got 1, nearest: 2"),
        ({"later_guidance_scale": -1.0}, "guidance scale must be"),
    ):
        with pytest.raises(ValueError, match=message):
            draw(pipeline, **options)
    with pytest.raises(ValueError, match="later_guidance_scale needs a network that draws block by block"):
        draw(make_pipeline(), later_guidance_scale=0.0)
    with pytest.raises(ValueError, match="block by block needs a model trained by flow matching"):
        draw(make_pipeline("ddpm", **BLOCKS))


def test_save_and_load(pipeline: HeadMixVideoDiTPipeline, tmp_path: Any) -> None:
    pipeline.save_pretrained(tmp_path)
    loaded = HeadMixVideoDiTPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert loaded.objective == ObjectiveConfig() and loaded.config.class_names == ["class 0", "class 1", "class 2"]
    assert np.array_equal(draw(loaded), draw(pipeline))


LOAD = """
import sys
from headmix_vision.diffusion import HeadMixDiTPipeline, HeadMixVideoDiTPipeline
HeadMixVideoDiTPipeline.from_pretrained(sys.argv[1])
HeadMixDiTPipeline.from_pretrained(sys.argv[2])
"""


@pytest.mark.slow
def test_a_new_process_loads_pipelines(pipeline: HeadMixVideoDiTPipeline, tmp_path: Any) -> None:
    pipeline.save_pretrained(tmp_path / "videos")
    network = timm.create_model("dit_mhla_digits", depth=1, embed_dim=24, num_heads=2)
    HeadMixDiTPipeline(network, create_scheduler(None, ObjectiveConfig())).save_pretrained(tmp_path / "images")
    command = [sys.executable, "-c", LOAD, tmp_path / "videos", tmp_path / "images"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_labels": [3, 4]}, "class label 4 is out of range: the model takes 0 to 2"),
        ({"class_labels": None}, "class_labels are missing: a label from 0 to 2 for each video"),
        ({"num_videos": 3}, "2 class_labels, but num_videos is 3"),
        *(({"num_frames": n}, "num_frames must be a whole number of at least 1") for n in (0, -1, 2.5, True, "4")),
        ({"num_frames": 10**9, "height": 16}, "2 videos of 1000000000 frames of 16x8 pixels at a time need more than"),
        *(({"frame_rate": n}, "frame_rate must be a finite number") for n in (0, 0.001, -8.0, float("nan"), "8", True)),
        ({"height": 10}, "height must be a multiple of 4 pixels, got 10"),
        ({"generator": generators(0)}, "1 generators for 2 videos"),
        ({"latents": torch.zeros(2, 1, 3, 8, 8)}, r"latents must be of shape \[2, 1, 4, 8, 8\]"),
        ({"output_type": "gif"}, "output_type must be one of"),
        ({"prefix": np.zeros((2, 4, 8, 8, 1), np.float32)}, "num_frames is 4, the prefix alone has 4"),
        ({"prefix": np.zeros((2, 1, 8, 6, 1), np.float32)}, "prefix is of 2 clips of 1 channels and 8x6 pixels, the"),
        ({"prefix": np.zeros((3, 1, 8, 8, 1), np.float32)}, "prefix is of 3 clips"),
        ({"prefix": np.zeros((2, 1, 8, 8, 3), np.float32)}, "clips of 3 channels"),
        ({"prefix": np.full((2, 1, 8, 8, 1), 1.5)}, r"prefix must hold finite numbers in \[0, 1\]"),
        ({"prefix": np.full((2, 1, 8, 8, 1), np.nan)}, r"prefix must hold finite numbers in \[0, 1\]"),
        ({"prefix": np.zeros((2, 1, 8, 8, 1), np.uint8)}, "prefix must hold numbers"),
        ({"prefix": np.zeros((1, 8, 8, 1))}, "prefix must hold numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # a generator is named by its address
)
def test_wrong_calls(options: dict[str, Any], message: str, pipeline: HeadMixVideoDiTPipeline) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline(**{"class_labels": [0, 1], "num_inference_steps": 1, **options})


def test_what_does_not_go_together(pipeline: HeadMixVideoDiTPipeline) -> None:
    with pytest.raises(ValueError, match="a prefix needs a model trained by flow matching"):
        draw(make_pipeline("ddpm"), prefix=np.zeros((1, 1, 8, 8, 1), np.float32))
    with pytest.raises(ValueError, match="latents have 4 channels, those of the network 1"):
        make_pipeline(vae=image_autoencoder())
    with pytest.raises(ValueError, match="num_images does not apply to a network of videos"):
        draw(pipeline, num_images=2)
    images = HeadMixDiTPipeline(timm.create_model("dit_linear_digits", depth=1), pipeline.scheduler)
    for option in ({"num_videos": 2}, {"num_frames": 1}, {"frame_rate": 8.0}, {"later_guidance_scale": 1.0}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} does not apply to a network of images"):
            images([0, 1], **option)
