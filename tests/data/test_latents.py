"""Latents from images to training samples, with a tiny autoencoder made on the spot."""

import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderDC, AutoencoderKL
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from headmix_vision.cli import cache_latents
from headmix_vision.data.cache_request import CacheRequest
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.data.datasets.derived import Derived
from headmix_vision.data.datasets.digits import Digits
from headmix_vision.data.datasets.folders import open_class_folders
from headmix_vision.data.datasets.latents import MANIFEST, LatentShards, open_latents, shard_name
from headmix_vision.data.datasets.moving_digits import MovingDigits
from headmix_vision.data.fitting import center_crop
from headmix_vision.data.latent_cache import write_cache
from headmix_vision.data.seeding import derive_seed
from headmix_vision.errors import InputError
from headmix_vision.files import reading
from headmix_vision.files.tensors import header_of
from headmix_vision.files.writing import hold_lock
from headmix_vision.models.autoencoders import Autoencoder, LatentScale, load_autoencoder
from headmix_vision.processes import Processes

from .helpers import write_image

REQUEST = SplitRequest("folder", "train", (3,), "caching")


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


def asked(out: Path, **options: Any) -> CacheRequest:
    return CacheRequest(vae="none", out=out, workers=0, **options)


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


def test_moments_of_a_mirrored_image_are_its_own(images: Path, vae: Path, tmp_path: Path) -> None:
    cache(images, vae, tmp_path / "out", "--flip", "--dtype", "float32")
    autoencoder = load_autoencoder(str(vae))
    for probability, image in ((0.0, pixels(images, 2)), (1.0, pixels(images, 2).flip(-1))):
        generator = torch.Generator().manual_seed(derive_seed(0, 5, 2))
        torch.rand((), generator=generator)  # decides which of the two is taken
        mean, std = autoencoder.moments(image)
        expected = autoencoder.scale.apply(mean + std * torch.randn(std.shape, generator=generator))[0]
        latent, _ = LatentShards(tmp_path / "out", flip=probability).read(2, draw=5)
        torch.testing.assert_close(latent, expected)


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
    autoencoder, source = load_autoencoder(str(vae)), open_class_folders(images, REQUEST)
    request = asked(tmp_path / "out", image_size=12, shard_size=4)
    assert write_cache(source, autoencoder, request, "here") == 3
    (tmp_path / "out" / "shard-00001.safetensors").unlink()
    assert write_cache(source, autoencoder, request, "here") == 1
    assert write_cache(source, autoencoder, request, "here") == 0


class Interrupted(Derived):
    """A source whose workers get Ctrl-C with every image."""

    def read(self, index: int) -> tuple[Any, int]:
        if torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGINT)
        return self.source.read(index)


def test_a_signal_to_its_workers_does_not_end_caching(images: Path, tmp_path: Path) -> None:
    source, request = Interrupted(open_class_folders(images, REQUEST)), asked(tmp_path / "out", image_size=12)
    assert write_cache(source, load_autoencoder("none"), replace(request, workers=1), "here") == 1
    assert len(LatentShards(tmp_path / "out")) == 12


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


def test_latents_of_images_are_stills_where_clips_are_taken(images: Path, tmp_path: Path) -> None:
    plain = cache(images, "none", tmp_path / "out")
    stills = open_latents(SplitRequest("latents", "train", (3, 1, 12, 12), "generation", root=str(tmp_path / "out")))
    assert torch.equal(stills[4][0], plain[4][0][:, None])


def test_decoding_inverts_the_scale(vae: Path) -> None:
    autoencoder = load_autoencoder(str(vae))
    assert not any(parameter.requires_grad for parameter in autoencoder.module.parameters())
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

    assert "13x13 is not a multiple of 2" in message(size=13)
    assert "is not a folder, a hub id" in message("--vae", tmp_path / "absent")
    assert "neither config.json nor vae/config.json" in message("--vae", images)
    assert "is not a folder" in message("--images", tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "--images" in (line := message("--images", tmp_path / "empty")) and "has no image" in line
    assert "workers must be a whole number of at least 0, got -1" in message("--workers", -1)
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


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    capsys.readouterr()
    assert run(*args) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if not line.startswith("caching: "))
    assert line.startswith("error: ")
    return line


def pixel_arguments(images: Path, out: Path, *args: object) -> tuple[object, ...]:
    common = ("--images", images, "--vae", "none", "--out", out, "--image-size", 12, "--workers", 0)
    return (*common, "--shard-size", 5, "--device", "cpu", *args)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_cache_knows_its_images(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(*pixel_arguments(images, out)) == 0
    before = contents(out)

    moved = tmp_path / "elsewhere" / "train"
    shutil.copytree(images, moved)
    assert run(*pixel_arguments(moved, out)) == 0 and contents(out) == before
    (moved / "bee" / "bee1.png").rename(moved / "bee" / "bee9.png")
    line = refused(capsys, *pixel_arguments(moved, out))
    assert f"{out} holds latents of other images than {moved}: names or sizes differ (first in shard-00001" in line
    (moved / "bee" / "bee9.png").rename(moved / "bee" / "bee1.png")
    write_image(moved / "cat" / "cat3.png", seed=7, size=(21, 16))
    assert "first in shard-00002" in refused(capsys, *pixel_arguments(moved, out))
    assert contents(out) == before

    # a picture that could not be read is replaced, and the rest goes on
    (out / "shard-00002.safetensors").unlink()
    assert run(*pixel_arguments(moved, out)) == 0
    assert (
        len(LatentShards(out)) == 12 and contents(out)["shard-00000.safetensors"] == before["shard-00000.safetensors"]
    )
    assert "first in shard-00002" in refused(capsys, *pixel_arguments(images, out))
    manifest = json.loads((out / "latents.json").read_text())
    del manifest["sha256"]
    (out / "latents.json").write_text(json.dumps(manifest | {"source": manifest["source"] + ["x"]}))
    assert "latents.json is damaged: it has 4 hashes of images for 3 shards" in refused(
        capsys, *pixel_arguments(images, out)
    )


def test_a_cache_of_an_earlier_version_goes_on(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(*pixel_arguments(images, out)) == 0
    manifest = json.loads((out / MANIFEST).read_text())
    del manifest["source"], manifest["sha256"]
    (out / MANIFEST).write_text(json.dumps(manifest))
    (out / "shard-00001.safetensors").unlink()
    with pytest.warns(UserWarning, match="earlier version, which did not record its images"):
        assert run(*pixel_arguments(images, out)) == 0
    assert len(LatentShards(out)) == 12


@pytest.mark.parametrize(("kind", "batch_size", "shard_size"), [("images", 32, 4096), ("clips", 4, 256)])
def test_batches_and_shards_have_sizes_of_their_own(
    kind: str, batch_size: int, shard_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source: Any = Digits("validation") if kind == "images" else MovingDigits("train", (2, 16, 16), length=9)
    size, clip = (8, None) if kind == "images" else (16, {"frames": 2, "frame_rate": 8.0})
    autoencoder = Autoencoder(None)
    autoencoder.image_channels = 1
    call = (source, autoencoder, asked(tmp_path / "out", image_size=size), "digits", clip)
    left = 4 * batch_size * size**2 * (2 if clip else 1) - 1
    monkeypatch.setattr(reading, "_SMALL_BYTES", 0)
    monkeypatch.setattr(reading, "memory_left", lambda: left)
    with pytest.raises(InputError, match=f"a batch of {batch_size} of {size} pixels needs"):
        write_cache(*call)
    left += 1
    write_cache(*call)
    assert json.loads((tmp_path / "out" / "latents.json").read_text())["shard_size"] == shard_size


@pytest.mark.timeout(120)
def test_killed_processes_lose_and_double_nothing(tmp_path: Path) -> None:
    """Killed at any moment, restarted as another number of processes; 360 digits in 120 shards."""
    out, source = tmp_path / "out", Digits("validation")
    autoencoder = Autoencoder(None)
    autoencoder.image_channels = 1
    moments, context = random.Random(0), multiprocessing.get_context("fork")

    def start(world_size: int, dead: int | None = None) -> list[Any]:
        request = asked(out, image_size=8, shard_size=3)
        given = (source, autoencoder, request, "digits", None)
        processes = [
            context.Process(target=write_cache, args=(*given, Processes(rank, world_size)))
            for rank in range(world_size)
            if rank != dead
        ]
        for process in processes:
            process.start()
        return processes

    def written() -> list[int]:
        return sorted(int(path.stem[-5:]) for path in out.glob("shard-*.safetensors"))

    for world_size in (3, 2, 4):
        goal = min(len(written()) + moments.randrange(1, 16), 120)
        processes = start(world_size)
        while len(written()) < goal:
            time.sleep(moments.uniform(0, 0.005))
        for process in processes:
            process.kill()
            process.join()
    (out / shard_name(1)).unlink(missing_ok=True)
    for process in start(3, dead=1):
        process.join()
    missing = {*range(120)} - {*written()}
    assert {number % 3 for number in missing} == {1}
    with pytest.raises(InputError, match=rf"lacks {len(missing)} of 120 shards, first"):
        LatentShards(out)
    for process in start(2):
        process.join()
    shards = LatentShards(out)
    latents = torch.stack([shards[index][0] for index in range(360)])
    torch.testing.assert_close(latents, source.images * 2 - 1, rtol=0, atol=0.004)
    assert shards.labels().tolist() == [int(target) for target in source.targets]
    left = {path.name for path in out.iterdir() if path.suffix != ".lock"}  # a killed process leaves its lock behind
    assert left == {MANIFEST, *map(shard_name, range(120))}


def test_one_process_at_a_time_writes_a_share(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with hold_lock(out / ".process-0.lock", "a cache"):
        assert f"cache {out} is in use by process" in refused(capsys, *pixel_arguments(images, out))
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        (out / ".shard-00000.safetensors.77.tmp").touch()  # of the other process, which lives
        (out / ".shard-00001.safetensors.78.tmp").touch()  # of a killed one
        assert run(*pixel_arguments(images, out)) == 0
    left = {".shard-00000.safetensors.77.tmp", MANIFEST, "shard-00001.safetensors"}
    assert {path.name for path in out.iterdir()} == left


def test_a_dry_run_writes_nothing(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(*pixel_arguments(images, out, "--dry-run")) == 0
    assert capsys.readouterr().out == f"{out}: would write 3 shards\n" and not out.exists()
    assert run(*pixel_arguments(images, out)) == 0
    (out / "shard-00001.safetensors").unlink()
    before = contents(out)
    assert run(*pixel_arguments(images, out, "--dry-run")) == 0
    assert "would write 1 shards" in capsys.readouterr().out and contents(out) == before
    assert "flip False" in refused(capsys, *pixel_arguments(images, out, "--dry-run", "--flip"))


def test_options_that_contradict_each_other(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"

    def message(*args: object) -> str:
        line = refused(capsys, *pixel_arguments(images, out, *args))
        assert not out.exists()
        return line

    for option in ("--dataset", "--root", "--split"):
        assert f"leave out {option}" in message(option, "digits")
    assert "--gray goes with --vae none alone" in message("--gray", "--vae", images)
    assert "applies to autoencoders, --vae is none" in message("--encoder-dtype", "bfloat16")
    assert "device 'gpu' cannot be used here" in message("--device", "gpu")
    assert "image_size must be a whole number of at least 1, got 0" in message("--image-size", 0)
    assert "a batch of 12 of 100000000 pixels needs" in message("--image-size", 10**8)
    assert "Not a directory" in message("--out", images / "ant" / "ant0.png" / "out")
    assert "is a file, --out must be a directory" in message("--out", images / "ant" / "ant0.png")
    assert "--images is an empty text" in message("--images", "")
    assert "did you mean --shard-size?" in message("--shard-sise", 3)
    neither = refused(capsys, "--vae", "none", "--out", out)
    assert "neither --images nor --videos nor --dataset" in neither and not out.exists()
    first = min(images.rglob("*.png"))
    first.write_bytes(b"")
    assert f"{first} cannot be read" in message()


def test_latents_that_are_not_finite_are_not_written(vae: Path, images: Path, tmp_path: Path) -> None:
    autoencoder, source = load_autoencoder(str(vae)), open_class_folders(images, REQUEST)
    autoencoder.module.quant_conv.weight.data *= 1e6  # beyond float16
    request = asked(tmp_path / "out", image_size=12, shard_size=4, batch_size=2)
    with pytest.raises(
        InputError, match=r"mean of the latents of .*ant0\.png to .*ant1\.png is not finite: encode and"
    ):
        write_cache(source, autoencoder, request, "here")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [MANIFEST]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of 12 images in 3 shards."""
    root = tmp_path_factory.mktemp("finished")
    for i in range(12):
        write_image(root / "images" / "abc"[i // 4] / f"{i:02d}.png", seed=i)
    assert run(*pixel_arguments(root / "images", root / "out")) == 0
    return root / "out"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": "x"}, "entry 'count' is 'x'"),
        ({"count": 0}, "entry 'count' is 0, it must be at least 1"),
        ({"count": 14}, "shard-00000.safetensors is of another cache: its count is not that of latents.json"),
        ({"shard_size": 0}, "entry 'shard_size' is 0"),
        ({"shape": None}, "entry 'shape' is None"),
        ({"shape": [3, 8, 8]}, r"mean is \[5, 3, 12, 12\], it must be \[5, 3, 8, 8\]"),
        ({"store": "x"}, "it must be one of moments, means"),
        ({"store": "moments"}, "does not contain tensor std"),
        ({"flip": True}, "does not contain tensor mean_flipped"),
        ({"class_names": None}, "entry 'class_names' is None"),
        ({"class_names": ["a"]}, "shard-00000.safetensors: labels are 0 to 1, there are 1 classes"),
        ({"autoencoder": None}, "entry 'autoencoder' is None"),
        ({"autoencoder": {"scale": "x", "shift": 0}}, "entry 'scale' is 'x'"),
        ({"format": 7}, "is of format 7, this version reads 1"),
        ({"format": "1"}, "entry 'format' is '1'"),
    ],
)
def test_forged_manifests(change: dict[str, Any], message: str, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "out")
    manifest = json.loads((finished / MANIFEST).read_text())
    del manifest["sha256"]
    (tmp_path / "out" / MANIFEST).write_text(json.dumps({**manifest, **change}))
    with pytest.raises(InputError, match=message):
        LatentShards(tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_damaged_manifests(content: bytes, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(InputError, match=r"latents\.json is"):
        LatentShards(tmp_path)


def test_damaged_shards_are_found_when_the_cache_is_opened(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    shard = out / "shard-00001.safetensors"
    tensors = {name: value for name, value in load_file(shard).items() if not name.endswith(".crc32")}
    for changed, message in (
        ({"labels": tensors["labels"]}, "does not contain tensor mean"),
        ({**tensors, "labels": tensors["labels"] + 2}, "labels are 3 to 4, there are 3 classes"),
        ({name: value[:3] for name, value in tensors.items()}, r"labels is \[3\], it must be \[5\]"),
    ):
        save_file(changed, shard)
        with pytest.raises(InputError, match=rf"shard-00001\.safetensors.*{message}"):
            LatentShards(out)
    header = json.loads(header_of(finished / shard.name)["latents"])
    for entry, value in (("image_size", 24), ("autoencoder", {**header["autoencoder"], "sha256": "0"})):
        save_file(tensors, shard, {"latents": json.dumps({**header, entry: value})})
        with pytest.raises(InputError, match=rf"shard-00001\.safetensors is of another cache: its {entry} is not that"):
            LatentShards(out)
    shard.write_bytes((finished / shard.name).read_bytes()[:-9])
    with pytest.raises(InputError, match=r"shard-00001\.safetensors is truncated"):
        LatentShards(out)


@pytest.mark.parametrize("file", ["shard-00001.safetensors", MANIFEST])
def test_a_flipped_byte_is_noticed_when_a_latent_is_read(file: str, finished: Path, tmp_path: Path) -> None:
    def read() -> list[Any]:
        shards = LatentShards(out)
        return [(latent.tolist(), label) for latent, label in shards] + shards.labels().tolist()

    out = tmp_path / "out"
    shutil.copytree(finished, out)
    whole, content, flips, refused = read(), (out / file).read_bytes(), random.Random(0), 0
    for _ in range(200):
        place = flips.randrange(len(content))
        flipped = bytes([content[place] ^ flips.randrange(1, 256)])
        (out / file).write_bytes(content[:place] + flipped + content[place + 1 :])
        try:
            assert read() == whole
        except InputError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > (140 if file != MANIFEST else 180)


def test_a_cache_of_an_earlier_version_has_no_sums(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "out")
    for shard in (tmp_path / "out").glob("*.safetensors"):
        tensors = {name: value for name, value in load_file(shard).items() if not name.endswith(".crc32")}
        save_file(tensors, shard, dict(header_of(shard)))
    for (latent, label), (same, equal) in zip(LatentShards(finished), LatentShards(tmp_path / "out"), strict=True):
        assert torch.equal(latent, same) and label == equal
