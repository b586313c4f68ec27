"""Latents of clips, with tiny autoencoders of videos made on the spot."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLCogVideoX, AutoencoderKLLTXVideo, AutoencoderKLWan
from torch import Tensor

from headmix_vision.cli import cache_latents
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.data.datasets.latents import MANIFEST, LatentShards
from headmix_vision.data.datasets.moving_digits import MovingDigits
from headmix_vision.errors import InputError
from headmix_vision.files.video import read_frames, write_video
from headmix_vision.models.autoencoders import Autoencoder, LatentScale, load_autoencoder


def make_wan() -> AutoencoderKLWan:
    """Compresses 4 x 8 x 8."""
    return AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )


def make_ltx() -> AutoencoderKLLTXVideo:
    """Compresses 4 x 16 x 16, with means and deviations among its weights."""
    module = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        scaling_factor=0.5,
    )
    module.latents_mean.copy_(torch.arange(8.0))
    module.latents_std.copy_(torch.arange(8.0) + 1)
    return module


def make_cogvideox() -> AutoencoderKLCogVideoX:
    """Compresses 4 x 8 x 8."""
    return AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    )


def make_image() -> AutoencoderKL:
    """Halves the size of each frame."""
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        scaling_factor=0.5,
        shift_factor=0.25,
    )


def wan_scale(module: Any, latents: Tensor) -> Tensor:
    """Scales as diffusers' `WanPipeline` states it."""
    mean, std = (torch.tensor(module.config[name]).view(-1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    return (latents - mean) / std


def ltx_scale(module: Any, latents: Tensor) -> Tensor:
    """Scales as `LTXPipeline._normalize_latents`."""
    mean, std = module.latents_mean.view(-1, 1, 1, 1), module.latents_std.view(-1, 1, 1, 1)
    return (latents - mean) * 0.5 / std


@pytest.mark.parametrize(
    ("make", "factor", "shape", "scaled"),
    [
        (make_wan, 4, (16, 2, 2, 3), wan_scale),
        (make_ltx, 4, (8, 2, 1, 2), ltx_scale),
        (make_cogvideox, 4, (4, 2, 2, 3), lambda module, latents: latents * 1.15258426),
        (make_image, None, (4, 5, 8, 12), lambda module, latents: (latents - 0.25) * 0.5),
    ],
    ids=["wan", "ltx", "cogvideox", "image"],
)
def test_clips_are_encoded_scaled_and_decoded_as_in_diffusers(
    make: Any, factor: int | None, shape: tuple[int, ...], scaled: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = make().eval()
    module.save_pretrained(tmp_path)
    autoencoder = load_autoencoder(str(tmp_path))
    height, width = (16, 32) if make is make_ltx else (16, 24)
    clips = torch.rand(2, 3, 5, height, width)
    mean, std = autoencoder.moments(clips)
    assert autoencoder.time_downsampling == factor and mean.shape == std.shape == (2, *shape)
    assert autoencoder.latent_frames(5) == shape[1] and autoencoder.frames(shape[1]) == 5
    with torch.inference_mode():
        if factor is None:
            frames = [module.encode(clips[:, :, i] * 2 - 1).latent_dist for i in range(5)]
            expected_mean, expected_std = (
                torch.stack([getattr(frame, name) for frame in frames], 2) for name in ("mean", "std")
            )
            expected = torch.stack([module.decode(expected_mean[:, :, i]).sample for i in range(5)], 2)
        else:
            distribution = module.encode(clips * 2 - 1).latent_dist
            expected_mean, expected_std = distribution.mean, distribution.std
            expected = module.decode(expected_mean).sample
    torch.testing.assert_close(mean, expected_mean)
    torch.testing.assert_close(std, expected_std)
    latents = autoencoder.scale.apply(mean)
    torch.testing.assert_close(latents, scaled(module, expected_mean))
    torch.testing.assert_close(autoencoder.decode(latents), (expected / 2 + 0.5).clamp(0, 1))
    still, _ = autoencoder.moments(clips[:, :, 0])
    assert still.shape == (mean[:, :, 0] if factor is None else mean[:, :, :1]).shape
    if make is not make_cogvideox:  # whose norms look at the whole clip
        torch.testing.assert_close(still.view_as(mean[:, :, 0]), mean[:, :, 0])


@pytest.mark.parametrize("make", [make_image, make_ltx])
def test_pixels_and_latents_are_brought_to_the_type_and_device_of_the_module(make: Any) -> None:
    module = make()
    module.register_to_config(timestep_conditioning=make is make_ltx)
    half = Autoencoder(module, dtype=torch.bfloat16)
    mean, std = half.moments(torch.rand(1, 3, 1, 32, 32))
    assert std is not None and mean.dtype == std.dtype == half.decode(mean).dtype == torch.float32
    there = load_autoencoder("none", "meta", torch.bfloat16)
    assert there.dtype == torch.bfloat16
    assert (
        there.moments(torch.rand(1, 3, 8, 8))[0].device == there.decode(torch.rand(1, 3, 8, 8)).device == there.device
    )


def test_frame_counts_that_do_not_fit_are_refused_with_the_nearest() -> None:
    autoencoder = Autoencoder(make_wan())
    with pytest.raises(InputError, match=r"16 frames .* 4n \+ 1: the nearest are 13 and 17"):
        autoencoder.moments(torch.rand(1, 3, 16, 16, 16))
    with pytest.raises(InputError, match="17x16 is not a multiple of 8"):
        autoencoder.moments(torch.rand(1, 3, 5, 17, 16))
    scale = LatentScale([2.0, 4.0], [1.0, -1.0])
    latents = torch.randn(3, 2, 2, 2, 2)
    torch.testing.assert_close(scale.apply(latents)[:, 1], (latents[:, 1] + 1) * 4)


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("wan")
    make_wan().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of two videos, 20 frames of 40 x 32 pixels at 8 frames a second."""
    root = tmp_path_factory.mktemp("videos")
    frames = np.random.default_rng(0).integers(0, 255, (4, 20, 5, 4, 3), dtype=np.uint8).repeat(8, 2).repeat(8, 3)
    for number, clip in enumerate(frames):
        write_video(root / ("run", "walk")[number // 2] / f"{number}.mp4", clip, 8)
    return root


def run(*args: object) -> int:
    try:
        cache_latents.main([str(arg) for arg in args])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def common(videos: Path, vae: object, out: Path, *args: object) -> tuple[object, ...]:
    options = ("--videos", videos, "--vae", vae, "--out", out, "--image-size", 16, "--frames", 5, "--workers", 0)
    return (*options, "--device", "cpu", "--shard-size", 3, *args)


def test_videos_to_latents_that_a_network_of_clips_takes(videos: Path, wan: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--frame-rate", 4, "--clips-per-video", 2, "--dtype", "float32", "--store", "means", "--flip")
    assert run(*common(videos, wan, out, *options)) == 0
    manifest = json.loads((out / MANIFEST).read_text())
    assert manifest["clip"] == {"frames": 5, "frame_rate": 4.0, "frame_stride": None, "clips_per_video": 2}
    assert manifest["frame_rate"] == 1.0 and manifest["shape"] == [16, 2, 2, 2] and manifest["count"] == 8
    request = SplitRequest("latents", "train", (16, 2, 2, 2), "generation", root=str(out))
    shards = open_source(request)
    assert isinstance(shards, LatentShards) and shards.class_names == ["run", "walk"] and shards.frame_rate == 1.0
    assert shards.labels().tolist() == [0] * 4 + [1] * 4

    # clip 5 is the later one of the third video: 12 places to begin at, the clips begin at 3 and 9
    autoencoder = load_autoencoder(str(wan))
    frames = read_frames(videos / "walk" / "2.mp4", [9, 11, 13, 15, 17])[:, 4:36]
    pixels = torch.from_numpy(frames.reshape(5, 16, 2, 16, 2, 3).mean((2, 4))).permute(3, 0, 1, 2)[None].float() / 255
    latent, label = LatentShards(out, flip=0.0)[5]
    expected = autoencoder.scale.apply(autoencoder.moments(pixels)[0])[0]
    assert label == 1 and (latent - expected).abs().max() < 0.05 < expected.std()
    mirrored = autoencoder.scale.apply(autoencoder.moments(pixels.flip(-1))[0])[0]
    assert (LatentShards(out, flip=1.0)[5][0] - mirrored).abs().max() < 0.05

    stills = open_source(SplitRequest("latents", "train", (16, 1, 2, 2), "generation", root=str(out)))
    assert torch.equal(stills.read(5)[0], shards.read(5)[0][:, :1])
    with pytest.raises(InputError, match=r"of shape \[16, 2, 2, 2\], the network takes \[16, 3, 2, 2\]"):
        open_source(SplitRequest("latents", "train", (16, 3, 2, 2), "generation", root=str(out)))


def test_several_clips_of_a_video_go_to_the_size_that_is_nearest_to_it(videos: Path, tmp_path: Path) -> None:
    videos = Path(shutil.copytree(videos, tmp_path / "videos"))
    write_video(videos / "walk" / "wide.mp4", np.zeros((16, 16, 32, 3), np.uint8), 8)
    options = ("--frames", 5, "--sizes", "16x32", "32x16", "--clips-per-video", 2, "--workers", 0, "--device", "cpu")
    for rows in (16, 32):
        (tmp_path / "out" / f"{rows}x{48 - rows}").mkdir(parents=True)
        (tmp_path / "out" / f"{rows}x{48 - rows}" / ".latents.json.1.tmp").touch()  # as a killed process leaves it
    assert run("--videos", videos, "--vae", "none", "--out", tmp_path / "out", *options) == 0
    assert [len(LatentShards(tmp_path / "out" / size)) for size in ("16x32", "32x16")] == [2, 8]
    assert not [*tmp_path.rglob("*.tmp")]


def test_clips_frame_by_frame_in_pixels_resumed_and_shared(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files(out: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(out.glob("*.safetensors"))}

    assert run(*common(videos, "none", tmp_path / "whole", "--stride", 3)) == 0
    whole = files(tmp_path / "whole")
    assert len(whole) == 2
    (tmp_path / "whole" / "shard-00000.safetensors").unlink()
    assert run(*common(videos, "none", tmp_path / "whole", "--stride", 3)) == 0
    assert files(tmp_path / "whole") == whole
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        assert run(*common(videos, "none", tmp_path / "shared", "--stride", 3)) == 0
    assert files(tmp_path / "shared") == whole
    manifest = json.loads((tmp_path / "whole" / MANIFEST).read_text())
    assert manifest["frame_rate"] is None and manifest["shape"] == [3, 5, 16, 16]


def test_moving_digits_to_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headmix_vision.data.datasets.moving_digits.LENGTHS", {"train": 4, "validation": 2})
    options = ("--dataset", "moving_digits", "--split", "train", "--vae", "none", "--gray", "--image-size", 16)
    assert run(*options, "--frames", 3, "--frame-rate", 2, "--out", tmp_path / "out", "--workers", 0) == 0
    shards = LatentShards(tmp_path / "out")
    assert len(shards) == 4 and shards.frame_rate == 2 and shards.num_classes == 40
    clip, label = MovingDigits("train", (3, 16, 16), frame_rate=2)[1]
    assert shards[1][1] == label and (shards[1][0] - (clip * 2 - 1)).abs().max() < 0.005


def test_videos_that_are_too_short_are_left_out_on_request(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "videos"
    shutil.copytree(videos, root)
    write_video(root / "run" / "1.mp4", np.zeros((4, 16, 16, 3), np.uint8), 8)
    (root / "walk" / "2.mp4").write_bytes(b"nonsense")
    arguments = common(root, "none", tmp_path / "out")
    assert run(*arguments) == 2 and "it has 4 frames, a clip needs 5" in capsys.readouterr().err
    assert run(*common(root, "none", tmp_path / "new", "--skip-unusable")) == 0
    shards, lines = LatentShards(tmp_path / "new"), capsys.readouterr().err.splitlines()
    assert shards.labels().tolist() == [0, 1] and shards.class_names == ["run", "walk"]
    assert "run/1.mp4 (it has 4 frames, a clip needs 5), 1 of 4 videos" in lines[0]
    assert "2.mp4 cannot be read as a video" in lines[1] and lines[1].endswith("2 of 4 videos")


def test_refusals(
    videos: Path, wan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def message(*args: object, vae: object = "none") -> str:
        capsys.readouterr()
        assert run(*common(videos, vae, out, *args)) == 2 and not out.exists()
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        return line

    assert "6 frames do not fit" in (line := message("--frames", 6, vae=wan)) and "nearest are 5 and 9" in line
    assert "20x20 is not a multiple of 8" in message("--image-size", 20, vae=wan)
    assert "it has 20 frames, a clip needs 21" in (line := message("--stride", 5)) and "0.mp4 cannot be read" in line
    assert "it has 8 frames a second, fewer than the 16 of a clip" in message("--frame-rate", 16)
    assert "the frame rate is 4.0 and the stride is 2: set one of them" in message("--frame-rate", 4, "--stride", 2)
    assert "frames must be a whole number of at least 1, got 0" in message("--frames", 0)
    assert "the stride of frames must be a whole number" in message("--stride", 0)
    assert "--images and --videos are both given" in message("--images", videos)
    assert "--videos names the videos already, leave out --root" in message("--root", videos)
    images = ("--dataset", "digits", "--vae", "none", "--out", out)
    for args, expected in (
        ((*images, "--frames", 3), "--frames is for videos, there are images"),
        ((*images, "--clips-per-video", 2), "--clips-per-video is for videos"),
        (("--videos", videos, "--vae", "none", "--out", out), "--frames is not given"),
        (common(tmp_path / "absent", "none", out), "absent does not exist"),
        (("--dataset", "moving_digits", *images[2:], "--flip"), "--flip does not apply to moving_digits"),
        ((*images, "--gray"), "'digits' needs the package sklearn: pip install scikit-learn"),
    ):
        capsys.readouterr()
        monkeypatch.setitem(sys.modules, "sklearn", None)  # not installed
        assert run(*args) == 2 and expected in capsys.readouterr().err and not out.exists()
    assert run(*common(videos, "none", out, "--frame-rate", 4)) == 0
    assert run(*common(videos, "none", out, "--frame-rate", 2)) == 2
    assert "was begun with clip {'frames': 5, 'frame_rate': 4.0" in capsys.readouterr().err
