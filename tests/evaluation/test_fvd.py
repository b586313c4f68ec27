"""The Fréchet video distance, its neighbours and controls, with a network that is called as I3D is."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric
from torchvision.transforms.functional import pil_to_tensor

from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.errors import InputError
from headmix_vision.evaluation.clip_features import (
    I3D_FILE,
    FrameExtractor,
    I3DExtractor,
    of_frames,
    open_clip_extractor,
)
from headmix_vision.evaluation.clip_scores import draw_halves, freeze, fvd, loop_closure, shuffle
from headmix_vision.evaluation.extractors import FeatureExtractor, open_extractor
from headmix_vision.evaluation.sample_sets import ClipSampling, SampleSet, open_samples
from headmix_vision.evaluation.sample_sources import TensorSamples
from headmix_vision.evaluation.scores import Scorer
from headmix_vision.files.pictures import write_png
from headmix_vision.files.tensors import file_sha256

from .clip_helpers import moving, vouched, write_network, write_samples
from .helpers import refused, run


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_network(tmp_path_factory.mktemp("network") / "i3d.pt")


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two npz files of 64 clips of 12 frames."""
    root = tmp_path_factory.mktemp("clips")
    for seed, name in enumerate(("real", "fake")):
        clips, labels = moving(64, seed=seed)
        np.savez(root / f"{name}.npz", arr_0=clips, labels=labels)
    return root / "real.npz", root / "fake.npz"


def score(tmp_path: Path, *args: object) -> dict[str, Any]:
    out = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
    assert run("fvd", *args, "--out", out) == 0
    return json.loads(out.read_text())


def features(network: Path, clips: np.ndarray) -> torch.Tensor:
    pixels = torch.from_numpy(clips).movedim(-1, 1).expand(-1, 3, -1, -1, -1)
    return I3DExtractor(network, sha256=file_sha256(network))(pixels)["features"].double()


def test_scores_are_those_of_torch_fidelity_on_the_same_features(
    network: Path, sides: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = score(tmp_path, "--real", sides[0], "--fake", sides[1], *vouched(network), "--frames", 12)
    first, second = (features(network, np.load(side)["arr_0"]) for side in sides)
    expected = fid_statistics_to_metric(*map(fid_features_to_statistics, (first, second)), verbose=False)
    assert result["scores"]["fvd"] == pytest.approx(expected["frechet_inception_distance"], rel=1e-4)
    settings = {"kid_subsets": 100, "kid_subset_size": 64, "rng_seed": 2020, "verbose": False}
    kernel = kid_features_to_metric(first, second, **settings)
    assert result["scores"]["kvd_mean"] == pytest.approx(kernel["kernel_inception_distance_mean"])
    assert result["controls"]["fvd"]["frozen"] > 5 * result["controls"]["fvd"]["halves"]
    assert result["controls"]["fvd"]["shuffled"] > 5 * result["controls"]["fvd"]["halves"]
    assert result["controls"]["blind_to_motion"] is False and result["controls"]["clips_of_a_side"] == 32
    out = capsys.readouterr().out
    assert "controls, fvd of 32 real clips a side: halves" in out and "blind" not in out


def test_both_sides_are_described(network: Path, sides: tuple[Path, Path], tmp_path: Path) -> None:
    common = ("--real", sides[0], "--fake", sides[1], *vouched(network), "--frames", 10, "--count", 60, "--seed", 3)
    result = score(tmp_path, *common, "--mirror-real", "--real-offset", "random")
    sampled = {"frames": 10, "stride": 1, "choice": "first", "seed": 3, "available": 64, "skipped_short": 0}
    sampled |= {"frames_of_files": [12, 12], "frame_rate": None, "size": [10, 16, 16], "crop": None, "kind": "npz"}
    assert result["real"].items() >= {**sampled, "offset": "random", "mirror": True, "count": 120}.items()
    assert result["fake"].items() >= {**sampled, "offset": "first", "mirror": False, "count": 60}.items()
    assert len(result["extractor"]["sha256"]) == 64
    assert result["protocol"]["name"] == "stylegan-v"
    changed = {"real frames": 10, "real count": 60, "real mirror": True, "fake frames": 10, "fake count": 60}
    assert result["protocol"]["changed"] == changed
    assert result["warnings"] == []
    again = score(tmp_path, *common, "--mirror-real", "--batch-size", 7)
    assert again["scores"] == pytest.approx(result["scores"]) and again["controls"] == result["controls"]


@pytest.mark.parametrize("count", [64, 63])
def test_a_clip_and_its_mirror_image_are_in_one_half(count: int, sides: tuple[Path, Path]) -> None:
    for mirror in (False, True):
        clips = open_samples(str(sides[0]), "L", sampling=ClipSampling(frames=12, count=count, mirror=mirror))
        kept, changed = (half.tolist() for half in draw_halves(clips, seed=5))
        assert len(kept) == len(changed) == len({*kept, *changed}) / 2 == count // 2 * (1 + mirror)
        names = [{name.removesuffix(", mirrored") for name, _ in clips.read(half)} for half in (kept, changed)]
        assert not names[0] & names[1] and len(names[0]) == count // 2


def test_latte_takes_every_third_frame_of_real_clips(network: Path, sides: tuple[Path, Path], tmp_path: Path) -> None:
    clips, _ = moving(20, frames=32)
    np.savez(tmp_path / "long.npz", arr_0=clips)
    common = ("--real", tmp_path / "long.npz", "--fake", sides[1], *vouched(network), "--frames", 10)
    result = score(tmp_path, *common, "--protocol", "latte", "--real-offset", "first")
    assert (result["real"]["stride"], result["fake"]["stride"]) == (3, 1)
    assert (result["real"]["choice"], result["fake"]["choice"]) == ("random", "random")
    assert "20 real and 64 fake clips, 2048 were asked for" in result["warnings"]
    np.savez(tmp_path / "third.npz", arr_0=clips[:, :30:3])
    expected = score(tmp_path, "--real", tmp_path / "third.npz", *common[2:])
    assert result["scores"] == pytest.approx(expected["scores"])


def test_the_seed_draws_the_controls(network: Path, sides: tuple[Path, Path], tmp_path: Path) -> None:
    common = ("--real", sides[0], "--fake", sides[1], *vouched(network), "--frames", 12)
    first, again, other = (score(tmp_path, *common, "--seed", seed) for seed in (1, 1, 2))
    assert first["controls"] == again["controls"] != other["controls"]
    assert first["scores"]["fvd"] == other["scores"]["fvd"]


def test_features_that_do_not_see_motion_say_so(
    sides: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blind = write_network(tmp_path / "blind.pt", moves=False)
    result = score(tmp_path, "--real", sides[0], "--fake", sides[1], *vouched(blind), "--frames", 12)
    assert result["controls"]["frozen_to_halves"] == pytest.approx(1)
    assert "blind to motion: freezing the real clips makes 1 times" in capsys.readouterr().out


def test_few_clips_and_other_lengths_and_rates_are_warned_of(network: Path, tmp_path: Path) -> None:
    clips, labels = moving(6)
    longer = [*clips[:5], np.concatenate([clips[5], clips[5, -2:]])]
    for name, some, rate in (("real", clips, 8.0), ("fake", longer, 4.0)):
        write_samples(tmp_path / name, some, labels, rate)
    common = ("--real", tmp_path / "real", "--fake", tmp_path / "fake", *vouched(network), "--frames", 12)
    result = score(tmp_path, *common)
    for text in (
        "6 real and 6 fake clips, 2048 were asked for",
        "fake clips have 12 to 14 frames, 12 of each are scored",
        "real clips are scored at 8 frames a second, fake ones at 4",
        "6 clips for 8 features: the covariance is singular",
    ):
        assert sum(warning.startswith(text) for warning in result["warnings"]) == 1, text
    assert result["scores"]["fvd"] == pytest.approx(0, abs=1e-6)


def test_a_classifier_sees_pictures_and_their_change(classifier: Path, sides: tuple[Path, Path]) -> None:
    extractor = open_clip_extractor(str(classifier))
    assert isinstance(extractor, FrameExtractor) and extractor.num_features == 128
    clips = torch.from_numpy(np.load(sides[0])["arr_0"][:4]).movedim(-1, 1)
    found = extractor(clips)
    frames = torch.stack([open_extractor(str(classifier))(clips[:, :, t])["features"] for t in range(12)], 1)
    torch.testing.assert_close(found["frames"], frames.flatten(0, 1))
    expected = torch.cat([frames.mean(1), (frames[:, 1:] - frames[:, :-1]).abs().mean(1)], 1)
    torch.testing.assert_close(found["features"], expected)
    assert extractor(freeze(clips, range(4), 0))["features"][:, 64:].abs().max() < 1e-6


def test_features_of_digits_see_the_digit_and_its_motion(classifier: Path, sides: tuple[Path, Path]) -> None:
    extractor = open_clip_extractor(f"digits:{classifier}")
    clips = torch.from_numpy(np.load(sides[0])["arr_0"][:6]).movedim(-1, 1)
    found, still = extractor(clips)["features"], extractor(freeze(clips, range(6), 0))["features"]
    torch.testing.assert_close(still[:, :64], found[:, :64], rtol=0.05, atol=0.02)  # the same digit, cut out
    assert still[:, 64:].abs().max() < 1e-6 and found[:, 64:].mean() > 1e-4
    assert "of the digit cut out of each frame" in extractor.description["features"]


def test_loops_close_and_other_clips_do_not() -> None:
    turn = torch.tensor([0, 40, 80, 40], dtype=torch.uint8)  # back where it was with the next step
    ways = (turn, 40 * torch.arange(4, dtype=torch.uint8), torch.full((4,), 7, dtype=torch.uint8))
    clips = [way[None, None, :, None, None].expand(2, 3, -1, 8, 8) for way in ways]
    assert [loop_closure(SampleSet(TensorSamples(clip), "RGB")) for clip in clips] == [1, 3, 1]


def test_a_classifier_of_sheets_sees_clips_as_it_saw_them_in_training(classifier: Path, tmp_path: Path) -> None:
    clips, _ = moving(2, seed=0)
    for number, clip in enumerate(clips):
        write_png(tmp_path / "train" / "a" / f"{number}.png", clip)
    sheets = open_source(SplitRequest("sheets", "train", (1, 8, 8), "classification", root=str(tmp_path)))
    extractor = open_clip_extractor(f"sheets:{classifier}")
    found = extractor(torch.from_numpy(clips).movedim(-1, 1))
    expected = open_extractor(str(classifier))(torch.stack([pil_to_tensor(sheets.read(i)[0]) for i in range(2)]))
    assert torch.equal(found["features"], expected["features"]) and torch.equal(found["logits"], expected["logits"])
    assert extractor.class_names == open_extractor(str(classifier)).class_names
    with pytest.raises(InputError, match="features are 'sheets', they must be sheets:PATH"):
        open_clip_extractor("sheets")


def test_frames_are_scored_beside_clips(network: Path, classifier: Path, sides: tuple[Path, Path]) -> None:
    real, fake = (open_samples(str(side), "L", sampling=ClipSampling(frames=12, count=8)) for side in sides)
    frames = fvd(Scorer(open_clip_extractor(str(classifier))), real, fake)["scores"]["frame_fid"]
    pixels = [torch.from_numpy(np.load(side)["arr_0"][:8]).flatten(0, 1).movedim(-1, 1) for side in sides]
    extracted = [open_extractor(str(classifier))(images)["features"].double() for images in pixels]
    expected = fid_statistics_to_metric(*map(fid_features_to_statistics, extracted), verbose=False)
    assert frames == pytest.approx(expected["frechet_inception_distance"], rel=1e-3)


def test_controls_change_the_order_of_frames_alone() -> None:
    clips = torch.arange(2 * 3 * 7).reshape(2, 3, 7, 1, 1)
    frozen, shuffled = freeze(clips, [4, 9], 0), shuffle(clips, [4, 9], 0)
    assert torch.equal(frozen, clips[:, :, :1].repeat(1, 1, 7, 1, 1))
    assert torch.equal(shuffled.sort(dim=2).values, clips) and not torch.equal(shuffled, clips)
    assert torch.equal(shuffle(clips[1:], [9], 0), shuffled[1:])  # whatever the batch
    assert torch.equal(shuffled[:, 0] - shuffled[:, 1], clips[:, 0] - clips[:, 1])  # channels stay together


def test_refusals(
    network: Path,
    classifier: Path,
    sides: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def line(*args: object, real: object = sides[0], fake: object = sides[1], features: object = network) -> str:
        return refused(capsys, "fvd", "--real", real, "--fake", fake, *vouched(features), *args)

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    missing = line(features="i3d")
    assert f"no I3D network at {tmp_path}/hub/checkpoints/{I3D_FILE}: get {I3D_FILE}" in missing and "http" in missing
    assert "--frames is 9, i3d needs clips of at least 10 frames" in line("--frames", 9)
    assert "fake.npz[0] has 12 frames, 16 need 16; 64 of 64 clips are too short" in line()
    assert "needs clips of at least 2 frames" in line("--frames", 1, features=classifier)
    (tmp_path / "damaged.pt").write_bytes(network.read_bytes()[:500])
    assert "damaged.pt is damaged or no TorchScript file" in line(features=tmp_path / "damaged.pt")
    torch.jit.script(torch.nn.Identity()).save(str(tmp_path / "other.pt"))
    unknown = refused(capsys, "fvd", "--real", sides[0], "--fake", sides[1], "--features", network)
    assert "is a program" in unknown and f"sha256sum {network}" in unknown
    assert "not 00 of --features-sha256: it was not opened" in line("--features-sha256", "00")
    assert "applies only to TorchScript files" in line("--features-sha256", "00", features=classifier)
    assert "other.pt cannot be called as I3D is" in line("--frames", 12, features=tmp_path / "other.pt")
    assert "invalid choice: 'lattte'" in line("--protocol", "lattte")
    assert "kid subset size is 65" in line("--frames", 12, "--subset-size", 65)
    assert "has 3 clips, two halves need at least 4" in line("--frames", 12, "--count", 3)
    assert "takes images of mode L, --features" in line("--frames", 12, "--frame-features", classifier)
    assert "--root is here, but no side is a data set" in line("--frames", 12, "--root", "here")
    larger, _ = moving(4, size=32)
    np.savez(tmp_path / "larger.npz", arr_0=larger)
    sizes = line("--frames", 12, fake=tmp_path / "larger.npz")
    assert "real samples are 12 frames of 16x16 pixels, fake ones 12 frames of 32x32" in sizes
    out = tmp_path / "mine.json"
    out.write_text("mine")
    assert "already exists" in line("--frames", 12, "--out", out)
    assert out.read_text() == "mine"


def test_a_dry_run_scores_nothing(network: Path, sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--real", sides[0], "--fake", "moving_digits[:5]", *vouched(network), "--frames", 12)
    assert run("fvd", *common, "--image-size", 16, "--dry-run") == 0
    captured = capsys.readouterr()
    assert f"would score real {sides[0]} (64 clips) and fake moving_digits[:5] (5 clips) by i3d on" in captured.out
    assert "scoring:" not in captured.err


def test_frames_that_are_equal_are_put_through_once() -> None:
    class Recorder(FeatureExtractor):
        mode, description = "L", {"name": "means", "features": "mean"}

        def extract(self, samples: torch.Tensor) -> dict[str, torch.Tensor]:
            seen.append(len(samples))
            return {"features": samples.float().mean((1, 2, 3))[:, None]}

    seen: list[int] = []
    clips = torch.from_numpy(moving(3, seed=1)[0]).movedim(-1, 1)
    expected = clips.float().mean((1, 3, 4))[..., None]
    assert torch.equal(of_frames(Recorder(), clips), expected)
    assert torch.equal(of_frames(Recorder(), freeze(clips, range(3), 0)), expected[:, :1].expand_as(expected))
    assert seen[0] > 3 and seen[1] == 3
