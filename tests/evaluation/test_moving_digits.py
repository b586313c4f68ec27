"""The judge of moving digits: right on real clips, and on clips that do what they should not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from headmix_vision.data.datasets.digits import Digits
from headmix_vision.data.datasets.moving_digits import MovingDigits
from headmix_vision.evaluation.clip_features import digit_size, find_digits
from headmix_vision.evaluation.clip_scores import DigitJudge, judge, judge_motion
from headmix_vision.evaluation.extractors import FeatureExtractor
from headmix_vision.evaluation.sample_sets import ClipSampling, open_samples
from headmix_vision.evaluation.score_request import CLIP_METRICS
from headmix_vision.evaluation.scores import Scorer

from .clip_helpers import moving, write_samples
from .helpers import refused, run


class Nearest(FeatureExtractor):
    """The digit whose handwriting is nearest."""

    mode, num_classes = "L", 10

    def __init__(self) -> None:
        self.description = {"name": "nearest", "sha256": "0"}
        known = Digits("all")
        self.known, self.targets = known.images.flatten(1), torch.tensor(known.targets)

    def extract(self, samples: Tensor) -> dict[str, Tensor]:
        small = interpolate(samples.float() / 255, (8, 8), mode="bilinear", antialias=True).flatten(1)
        nearest = torch.cdist(small, self.known).argmin(1)
        return {"logits": torch.nn.functional.one_hot(self.targets[nearest], 10).float()}


def drawn(count: int, frames: int, size: int, frame_rate: float = 8.0) -> tuple[Tensor, Tensor, Tensor]:
    """Real clips uint8 [N, 1, T, H, W], classes, and true places [N, T, 2]."""
    source = MovingDigits("validation", (frames, size, size), length=count, frame_rate=frame_rate)
    clips, labels = source.read_batch(range(count))
    places = np.stack(source.places(np.arange(count)), 2)
    return (clips * 255).round().to(torch.uint8), labels, torch.from_numpy(places).float()


@pytest.mark.parametrize(("size", "frames", "rate"), [(32, 16, 8), (16, 16, 8), (32, 40, 16)])
def test_real_clips_are_right(size: int, frames: int, rate: float) -> None:
    clips, labels, places = drawn(24, frames, size, rate)
    tracks = find_digits(clips)
    # a digit stands beside the middle of its square, by the same amount in every frame
    assert (tracks.places - places).std(1).max() < 1e-4
    free = size - digit_size(size, size)
    starts, keeps = judge_motion(tracks.places, labels % 4, (free, free), rate)
    assert starts.float().mean() >= (0.95 if size == 16 else 1) and keeps.float().mean() == 1


def test_clips_that_move_otherwise_are_wrong() -> None:
    clips, labels, _ = drawn(40, 16, 32)

    def right(clips: Tensor, labels: Tensor = labels) -> float:
        starts, keeps = judge_motion(find_digits(clips).places, labels % 4, (16, 16), 8)
        return float((starts & keeps).float().mean())

    still = clips[:, :, :1].expand_as(clips)
    generator = torch.Generator().manual_seed(0)
    assert right(clips) == 1
    assert right(still) == 0
    for turn in (1, 2, 3):
        assert right(clips, labels + turn) == 0
    assert right(clips[:, :, torch.randperm(16, generator=generator)]) < 0.3
    assert right(torch.cat([clips[:, :, :8], clips.roll(1, 0)[:, :, 8:]], 2)) < 0.3  # jumps
    assert right(torch.cat([clips[:, :, :8], clips[:, :, 7:8].expand(-1, -1, 8, -1, -1)], 2)) < 0.1  # stops
    noise = torch.randint(0, 40, clips.shape, dtype=torch.uint8, generator=generator)
    assert right(clips // 2 + noise) > 0.9


def test_digits_of_another_kind_are_wrong(tmp_path: Path) -> None:
    clips, labels = moving(24, size=32)
    np.savez(tmp_path / "clips.npz", arr_0=clips)
    opened = open_samples(str(tmp_path / "clips.npz"), "L", sampling=ClipSampling(frames=None))
    scorer, targets = Scorer(DigitJudge(Nearest())), torch.tensor(labels)
    right = judge(scorer, opened, targets)
    assert right["digit"] > 0.95 and right["motion"] == right["direction"] == right["course"] == 1
    other = judge(scorer, opened, (targets + 4) % 40)
    assert other["digit"] < 0.1 and other["motion"] == 1
    assert judge(scorer, opened, targets // 4 * 4 + (targets + 1) % 4)["digit"] == right["digit"]


def test_the_command_prints_the_ceiling(classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clips, labels = moving(6, size=32)
    write_samples(tmp_path / "samples", clips, labels)
    np.savez(tmp_path / "clips.npz", arr_0=clips, labels=labels)
    results: list[dict[str, Any]] = []
    for name in ("samples", "clips.npz"):
        out = tmp_path / f"{name}.json"
        assert run("moving-digits", "--fake", tmp_path / name, "--features", classifier, "--out", out) == 0
        results.append(json.loads(out.read_text()))
        assert "the same of real clips, the judge's ceiling: digit" in capsys.readouterr().out
    assert results[0]["scores"] == results[1]["scores"] and results[0]["ceiling"] == results[1]["ceiling"]
    assert results[0]["scores"]["motion"] == results[0]["ceiling"]["motion"] == 1
    assert results[0]["ceiling"]["digit"] != results[0]["scores"]["digit"]
    assert results[0]["real"]["count"] == 6 and results[0]["real"]["size"] == [12, 32, 32]


def test_clips_are_judged_at_the_rate_they_were_drawn_at(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_samples(tmp_path / "samples", *moving(4, size=32, frame_rate=4.0), frame_rate=4.0)
    out = tmp_path / "scores.json"
    assert run("moving-digits", "--fake", tmp_path / "samples", "--features", classifier, "--out", out) == 0
    result = json.loads(out.read_text())
    assert result["frame_rate"] == 4 and result["scores"]["motion"] == result["ceiling"]["motion"] == 1
    common = ("moving-digits", "--fake", tmp_path / "samples", "--features", classifier)
    assert run(*common, "--frame-rate", 8, "--out", out, "--overwrite") == 0
    result = json.loads(out.read_text())
    assert result["frame_rate"] == 8 and result["scores"]["course"] < result["ceiling"]["course"] == 1
    capsys.readouterr()
    assert run(*common, "--dry-run") == 0
    assert "(4 clips) and real moving_digits (4 clips) by" in capsys.readouterr().out
    assert "--frame-rate must be a finite number from 0.01 to 10000, got 0" in refused(
        capsys, *common, "--frame-rate", 0
    )


def test_refusals(classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clips, labels = moving(4)

    def line(*args: object, clips: np.ndarray = clips, **arrays: Any) -> str:
        np.savez(tmp_path / "clips.npz", arr_0=clips, **arrays)
        return refused(capsys, "moving-digits", "--fake", tmp_path / "clips.npz", "--features", classifier, *args)

    assert "has no labels or arr_1" in line()
    assert "labels are 0 to 40, moving digits have 0 to 39" in line(labels=[0, 1, 2, 40])
    assert "clips have 3 frames, their motion is judged from 4 on" in line(clips=clips[:, :3], labels=labels)
    small = line("--real", tmp_path / "clips.npz", clips=clips[:, :, :8, :8], labels=labels)
    assert "clips are 8x8 pixels, moving digits need at least 16" in small
    write_samples(tmp_path / "unlabelled", clips)
    common = ("moving-digits", "--features", classifier, "--fake")
    assert "does not tell the classes" in refused(capsys, *common, tmp_path / "unlabelled")
    assert "has no labels: it is neither a folder" in refused(capsys, *common, tmp_path / "unlabelled" / "..")
    nine = Nearest()
    nine.num_classes = 9
    with pytest.raises(ValueError, match="nearest knows 9 classes, the judge needs ten digits"):
        DigitJudge(nine)
    assert set(CLIP_METRICS) == {"fvd", "moving-digits"}
