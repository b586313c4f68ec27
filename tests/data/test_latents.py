"""Latents from images to training samples, with a tiny autoencoder made on the spot."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderDC, AutoencoderKL
from PIL import Image
from torch import Tensor

from headmix_vision.data import cache_latents
from headmix_vision.data.center_crop import center_crop
from headmix_vision.data.datasets.folders import open_class_folders
from headmix_vision.data.datasets.latents import MANIFEST, LatentShards
from headmix_vision.models.autoencoders import Autoencoder, LatentScale, load_autoencoder

from .helpers import write_image


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an AutoencoderKL that halves the size, with scale and shift."""
    torch.manual_seed(0)
    module = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        scaling_factor=0.5,
        shift_factor=0.25,
    )
    path = tmp_path_factory.mktemp("vae")
    module.save_pretrained(path)
    return path


@pytest.fixture
def images(image_root: Path) -> Path:
    """12 images in 3 class folders."""
    return image_root / "train"


def run(*args: object) -> int:
    try:
        cache_latents.main([str(arg) for arg in args])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def cache(images: Path, vae: object, out: Path, *args: object) -> LatentShards:
    common = ("--images", images, "--vae", vae, "--out", out, "--image-size", 12, "--workers", 0, "--device", "cpu")
    assert run(*common, "--shard-size", 5, "--batch-size", 2, *args) == 0
    return LatentShards(out)


def pixels(images: Path, index: int) -> Tensor:
    path = sorted(images.rglob("*.png"))[index]
    with Image.open(path) as image:
        return torch.from_numpy(np.array(center_crop(image, 12))).permute(2, 0, 1)[None].float() / 255


def test_moments_are_sampled_and_scaled(images: Path, vae: Path, tmp_path: Path) -> None:
    shards = cache(images, vae, tmp_path / "out", "--dtype", "float32")
    assert len(shards) == 12 and shards.shape == (4, 6, 6)
    assert shards.class_names == ["ant", "bee", "cat"]
    assert shards.labels().tolist() == [0] * 4 + [1] * 4 + [2] * 4
    module = AutoencoderKL.from_pretrained(vae).eval()
    for index in (0, 7, 11):
        with torch.inference_mode():
            distribution = module.encode(pixels(images, index) * 2 - 1).latent_dist
        draws = torch.stack([shards.read(index, draw)[0] for draw in range(400)])
        mean, std = (distribution.mean[0] - 0.25) * 0.5, distribution.std[0] * 0.5
        # the mean of 400 draws lies within 5 standard errors, their deviation within 25 %
        assert ((draws.mean(0) - mean).abs() / std).max() < 5 / 400**0.5
        assert ((draws.std(0) / std).log().abs()).max() < 0.25
        assert shards[index][1] == index // 4


def test_samples_depend_on_seed_draw_and_index_alone(images: Path, vae: Path, tmp_path: Path) -> None:
    first = cache(images, vae, tmp_path / "out", "--flip")
    again = pickle.loads(pickle.dumps(LatentShards(tmp_path / "out")))
    for index in (9, 0, 5):
        assert torch.equal(first[index][0], again[index][0])
    other = LatentShards(tmp_path / "out", seed=1)
    samples = [first[3][0], first[4][0], other[3][0], first.read(3, draw=1)[0]]
    assert len({sample.numpy().tobytes() for sample in samples}) == 4
    assert all(sample.dtype == torch.float32 for sample in samples)
    loader = torch.utils.data.DataLoader(first, batch_size=5, num_workers=1)
    assert torch.equal(torch.cat([latents for latents, _ in loader]), torch.stack([first[i][0] for i in range(12)]))


def test_means_and_mirrored_images(images: Path, vae: Path, tmp_path: Path) -> None:
    shards = cache(images, vae, tmp_path / "out", "--store", "means", "--flip", "--dtype", "float32")
    autoencoder = load_autoencoder(str(vae))
    for probability, image in ((0.0, pixels(images, 2)), (1.0, pixels(images, 2).flip(-1))):
        expected = autoencoder.scale.apply(autoencoder.moments(image)[0])[0]
        latent, _ = LatentShards(tmp_path / "out", flip=probability)[2]
        torch.testing.assert_close(latent, expected)
    taken = {shards.read(2, draw)[0].numpy().tobytes() for draw in range(20)}
    assert len(taken) == 2
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["autoencoder"]["scale"] == 0.5 and manifest["autoencoder"]["shift"] == 0.25
    assert manifest["autoencoder"]["source"] == str(vae) and len(manifest["autoencoder"]["sha256"]) == 64
    assert manifest["crop"] == "adm_center" and manifest["image_size"] == 12 and manifest["flip"] is True


def test_interrupted_and_shared_runs_give_the_same_files(
    images: Path, vae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files(out: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(out.glob("*.safetensors"))}

    cache(images, vae, tmp_path / "whole")
    whole = files(tmp_path / "whole")
    assert len(whole) == 3
    for name in ("shard-00000.safetensors", "shard-00002.safetensors"):
        (tmp_path / "whole" / name).unlink()
    damaged = tmp_path / "whole" / "shard-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"lacks 2 of 3 shards, first shard-00000.*again to finish"):
        LatentShards(tmp_path / "whole")
    cache(images, vae, tmp_path / "whole")
    assert files(tmp_path / "whole") == whole

    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = ("--images", images, "--vae", vae, "--out", tmp_path / "shared", "--image-size", 12, "--workers", 0)
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        assert run(*arguments, "--shard-size", 5, "--batch-size", 2, "--device", "cpu") == 0
    assert files(tmp_path / "shared") == whole


def test_finished_shards_are_not_encoded_again(images: Path, vae: Path, tmp_path: Path) -> None:
    autoencoder, source = load_autoencoder(str(vae)), open_class_folders(images, "RGB")
    options = {"image_size": 12, "origin": "here", "shard_size": 4}
    assert cache_latents.write_cache(source, autoencoder, tmp_path / "out", **options) == 3
    (tmp_path / "out" / "shard-00001.safetensors").unlink()
    assert cache_latents.write_cache(source, autoencoder, tmp_path / "out", **options) == 1
    assert cache_latents.write_cache(source, autoencoder, tmp_path / "out", **options) == 0


def test_pixels(images: Path, tmp_path: Path) -> None:
    shards = cache(images, "none", tmp_path / "out")
    latent, label = shards[6]
    assert label == 1
    torch.testing.assert_close(latent, pixels(images, 6)[0] * 2 - 1)
    decoded = load_autoencoder("none").decode(latent[None])
    torch.testing.assert_close(decoded, pixels(images, 6))
    flat = tmp_path / "flat"
    for i in range(3):
        write_image(flat / f"{i}.png", seed=i)
    gray = cache(flat, "none", tmp_path / "gray", "--gray")
    assert gray.shape == (1, 12, 12) and gray.num_classes == 0 and gray.labels().tolist() == [0, 0, 0]


def test_digits_of_a_data_set(tmp_path: Path) -> None:
    arguments = ("--dataset", "digits", "--split", "validation", "--vae", "none", "--gray", "--image-size", 8)
    assert run(*arguments, "--out", tmp_path / "out", "--workers", 0) == 0
    shards = LatentShards(tmp_path / "out")
    assert len(shards) == 360 and shards.shape == (1, 8, 8) and shards.num_classes == 10


def test_decoding_inverts_the_scale(vae: Path) -> None:
    autoencoder = load_autoencoder(str(vae))
    mean, _ = autoencoder.moments(torch.rand(2, 3, 12, 12))
    module = AutoencoderKL.from_pretrained(vae).eval()
    with torch.inference_mode():
        expected = (module.decode(mean).sample / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(autoencoder.decode(autoencoder.scale.apply(mean)), expected)
    scale = LatentScale([2.0, 4.0], [1.0, -1.0])
    latents = torch.randn(3, 2, 5, 5)
    torch.testing.assert_close(scale.undo(scale.apply(latents)), latents)
    torch.testing.assert_close(scale.apply(latents)[:, 1], (latents[:, 1] + 1) * 4)


def test_autoencoder_without_moments(tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = {"encoder": "ResBlock", "decoder": "ResBlock"}
    module = AutoencoderDC(
        latent_channels=8,
        **{f"{side}_block_types": kind for side, kind in options.items()},
        **{f"{side}_block_out_channels": (8, 16) for side in options},
        **{f"{side}_layers_per_block": (1, 1) for side in options},
        **{f"{side}_qkv_multiscales": ((), ()) for side in options},
        scaling_factor=0.4,
    )
    module.save_pretrained(tmp_path / "pipeline" / "vae")
    autoencoder = load_autoencoder(str(tmp_path / "pipeline"))
    mean, std = autoencoder.moments(torch.rand(1, 3, 16, 16))
    assert std is None and mean.shape == (1, 8, 8, 8)
    assert autoencoder.downsampling == 2 and autoencoder.scale.scale == 0.4
    assert autoencoder.decode(mean).shape == (1, 3, 16, 16)


def test_scale_per_channel_of_a_configuration() -> None:
    module = AutoencoderKL(
        block_out_channels=(4,), norm_num_groups=2, scaling_factor=0.5, latents_mean=[1.0] * 4, latents_std=[2.0] * 4
    )
    assert Autoencoder(module).scale == LatentScale([0.25] * 4, [1.0] * 4)


def test_refusals(images: Path, vae: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def message(*args: object, out: Path = tmp_path / "new", size: int = 12) -> str:
        capsys.readouterr()
        defaults = ("--images", images, "--vae", vae, "--image-size", size, "--out", out, "--workers", 0)
        assert run(*defaults, "--device", "cpu", *args) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        return line

    assert "13x13 is no multiple of 2" in message(size=13)
    assert "is no directory, no hub id" in message("--vae", tmp_path / "absent")
    assert "neither config.json nor vae/config.json" in message("--vae", images)
    assert "is no folder" in message("--images", tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "--images" in (line := message("--images", tmp_path / "empty")) and "has no image" in line
    assert "workers is -1" in message("--workers", -1)
    assert not (tmp_path / "new").exists()

    assert "is not empty and holds no latents" in message(out=images)
    cache(images, vae, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert "was begun with store moments" in message("--shard-size", 5, "--store", "means", out=tmp_path / "out")
    assert "was begun with shape [4, 6, 6], now it is [3, 6, 6]" in message(
        "--shard-size", 5, "--vae", "none", out=tmp_path / "out", size=6
    )
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before

    broken = sorted(images.rglob("*.png"))[7]
    broken.write_bytes(broken.read_bytes()[:100])
    assert f"{broken} cannot be read" in message()
    with pytest.raises(ValueError, match=r"flip is 0.5, it must be 0, the cache has no mirrored images"):
        LatentShards(tmp_path / "out", flip=0.5)
    with pytest.raises(ValueError, match=r"has no latents.json"):
        LatentShards(images)
    with pytest.raises(IndexError):
        LatentShards(tmp_path / "out")[12]
