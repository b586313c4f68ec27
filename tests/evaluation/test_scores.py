"""The command line on digits: every source, every score, against torch-fidelity on the same features."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_isc import isc_features_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric
from torch_fidelity.metric_prc import prc_features_to_metric

from headmix_vision.data.datasets.digits import Digits
from headmix_vision.data.fitting import center_crop
from headmix_vision.evaluation.extractors import (
    ClassifierExtractor,
    FeatureExtractor,
    open_extractor,
    open_weights,
)
from headmix_vision.evaluation.sample_sets import SampleSet, open_samples
from headmix_vision.evaluation.sample_sources import TensorSamples
from headmix_vision.evaluation.score_request import METRICS, Metric
from headmix_vision.evaluation.scores import Scorer, inception_score, kid, precision_recall

from .helpers import digit_pixels, refused, run, write_digits, write_run


def score(tmp_path: Path, *args: object) -> dict[str, Any]:
    out = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
    assert run(*args, "--out", out) == 0
    return json.loads(out.read_text())


def outputs(classifier: Path, folder: Path) -> dict[str, torch.Tensor]:
    (batch,) = open_samples(str(folder), "L").batches(1000)
    return {name: value.double() for name, value in open_weights(classifier)(batch).items()}


def test_fid_of_folders(classifier: Path, folders: tuple[Path, Path], tmp_path: Path) -> None:
    real, fake = (outputs(classifier, folder)["features"] for folder in folders)
    expected = fid_statistics_to_metric(*map(fid_features_to_statistics, (real, fake)), verbose=False)
    arguments = ("fid", "--real", folders[0], "--fake", folders[1], "--features", classifier)
    result = score(tmp_path, *arguments, "--batch-size", 7)
    assert result["scores"]["fid"] == pytest.approx(expected["frechet_inception_distance"], rel=1e-5)
    assert "sfid" not in result["scores"]
    assert result["real"] == {
        "source": str(folders[0]),
        "kind": "folder",
        "count": 90,
        "size": [8, 8],
        "crop": None,
        "background": "white",
        "left_out": {},
    }
    assert result["extractor"]["name"] == "deit_mhla_digits"
    assert len(result["extractor"]["sha256"]) == 64
    assert result["warnings"] == []


def test_kid_is_and_prc_are_those_of_torch_fidelity(
    classifier: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    real, fake = (outputs(classifier, folder) for folder in folders)
    common = ("--real", folders[0], "--fake", folders[1], "--features", classifier)

    kid = score(tmp_path, "kid", *common, "--subsets", 5)["scores"]
    settings = {"kid_subsets": 5, "kid_subset_size": 80, "verbose": False}
    expected = kid_features_to_metric(real["features"], fake["features"], **settings)
    assert kid["kid_mean"] == pytest.approx(expected["kernel_inception_distance_mean"], rel=1e-3)
    assert kid["kid_subset_size"] == 80

    inception = score(tmp_path, "is", "--fake", folders[1], "--features", classifier, "--splits", 4)["scores"]
    expected = isc_features_to_metric(fake["logits"], 4)
    assert inception["is_mean"] == pytest.approx(expected["inception_score_mean"], rel=1e-6)
    assert 1 < inception["is_mean"] < 10

    prc = score(tmp_path, "prc", *common)["scores"]
    expected = prc_features_to_metric(fake["features"], real["features"], verbose=False)
    assert prc["precision"] == pytest.approx(expected["precision"])
    assert prc["recall"] == pytest.approx(expected["recall"])


class Recorded(FeatureExtractor):
    """Random features and logits, one row per image, whatever the pixels."""

    mode = "L"

    def __init__(self) -> None:
        self.description = {"name": "random", "sha256": "0"}
        self.numbers = torch.Generator().manual_seed(0)

    def extract(self, samples: torch.Tensor) -> dict[str, torch.Tensor]:
        draw = torch.randn(len(samples), 14, generator=self.numbers)
        return {"features": draw[:, :4], "logits": draw[:, 4:]}


def test_scores_without_options_are_those_of_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    """KID of 100 subsets of 1,000, inception score of 10 parts, 3 neighbours."""
    images = SampleSet(TensorSamples(torch.zeros(1200, 1, 8, 8, dtype=torch.uint8)), "L")
    settings: dict[str, Any] = {}

    def few(real: torch.Tensor, fake: torch.Tensor, **options: Any) -> dict[str, float]:
        settings.update(options)
        return kid_features_to_metric(real, fake, **{**options, "kid_subsets": 2})  # a hundred take half a minute

    monkeypatch.setattr("torch_fidelity.metric_kid.kid_features_to_metric", few)
    found = kid(Scorer(Recorded()), images, images)
    assert (found["kid_subsets"], found["kid_subset_size"]) == (100, 1000)
    assert (settings["kid_subsets"], settings["kid_subset_size"]) == (100, 1000)

    logits = torch.cat([Recorded()(batch)["logits"] for batch in images.batches(1200)]).double()
    found = inception_score(Scorer(Recorded(), batch_size=1200), images)
    assert found["is_splits"] == 10
    assert found["is_mean"] == pytest.approx(isc_features_to_metric(logits, 10)["inception_score_mean"], rel=1e-9)

    few_images = SampleSet(TensorSamples(torch.zeros(100, 1, 8, 8, dtype=torch.uint8)), "L")
    extractor = Recorded()
    fake, real = (next(extractor(batch)["features"] for batch in few_images.batches(100)).double() for _ in range(2))
    expected = prc_features_to_metric(fake, real, prc_neighborhood=3, verbose=False)
    found = precision_recall(Scorer(Recorded(), batch_size=100), few_images, few_images)
    assert (found["precision"], found["prc_neighbours"]) == (pytest.approx(expected["precision"]), 3)


def test_a_classifier_scales_images_with_antialiasing(classifier: Path) -> None:
    """Stripes in a picture of four times the size become an even grey; without antialiasing the dark ones are lost."""
    extractor = open_weights(classifier)
    stripes = torch.zeros(1, 1, 32, 32, dtype=torch.uint8)
    stripes[..., 1::4] = stripes[..., 2::4] = 200
    inside = torch.nn.functional.interpolate(stripes.float(), (8, 8), mode="bilinear", antialias=True)
    assert (inside[..., 1:-1] - 100).abs().max() < 1
    expected = extractor(inside.round().to(torch.uint8))["features"]
    torch.testing.assert_close(extractor(stripes)["features"], expected, rtol=0.05, atol=0.02)
    plain = torch.nn.functional.interpolate(stripes.float(), (8, 8), mode="bilinear").to(torch.uint8)
    assert (plain == 200).all()
    assert (extractor(plain)["features"] - expected).abs().max() > 0.2


def test_precision_and_recall_are_not_swapped(classifier: Path, folders: tuple[Path, Path], tmp_path: Path) -> None:
    copies = tmp_path / "copies.npz"
    np.savez(copies, arr_0=np.repeat(digit_pixels([5]), 8, 0))
    arguments = ("--real", folders[0], "--fake", copies, "--features", classifier)
    result = score(tmp_path, "prc", *arguments)["scores"]
    assert result["precision"] == 1
    assert result["recall"] < 0.1


def test_all_sources_of_the_same_images_score_the_same(
    classifier: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    statistics, images, reference = tmp_path / "s.safetensors", tmp_path / "images.npz", tmp_path / "reference.npz"
    assert run("stats", "--real", folders[0], "--features", classifier, "--out", statistics) == 0
    pixels = digit_pixels(range(90))
    np.savez(images, arr_0=np.repeat(pixels[..., None], 3, -1), arr_1=np.zeros(90, np.int64))
    moments = load_file(statistics)
    np.savez(reference, mu=moments["mu"].numpy(), sigma=moments["sigma"].numpy())

    def fid(real: object) -> float:
        arguments = ("fid", "--real", real, "--fake", folders[1], "--features", classifier)
        return float(score(tmp_path, *arguments)["scores"]["fid"])

    expected = fid(folders[0])
    both = tmp_path / "both.npz"
    np.savez(both, arr_0=pixels[:5], mu=moments["mu"].numpy(), sigma=moments["sigma"].numpy())
    assert score(tmp_path, "is", "--fake", both, "--features", classifier, "--splits", 1)["fake"]["count"] == 5
    for real in (statistics, images, reference, both, "digits:train[:90]"):
        assert fid(real) == pytest.approx(expected, rel=1e-9), real


def test_compressed_npz_is_read_piece_by_piece(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (70, 5, 6, 3), dtype=np.uint8)
    np.savez_compressed(tmp_path / "images.npz", arr_0=pixels)
    images = open_samples(str(tmp_path / "images.npz"), "RGB")
    assert images.size == (5, 6)
    assert np.array_equal(torch.cat(list(images.batches(32))).permute(0, 2, 3, 1), pixels)


def test_accuracy_of_labelled_samples(classifier: Path, tmp_path: Path) -> None:
    pixels = digit_pixels(range(40))
    predicted = open_weights(classifier)(torch.from_numpy(pixels)[:, None])["logits"].argmax(1).numpy()
    wrong = np.where(np.arange(40) < 10, (predicted + 1) % 10, predicted)
    for name in ("labels", "arr_1"):
        path = tmp_path / f"{name}.npz"
        np.savez(path, arr_0=pixels[..., None], **{name: wrong})
        result = score(tmp_path, "accuracy", "--fake", path, "--features", classifier)
        shares = [(predicted == wrong)[wrong == label].mean() for label in set(wrong)]
        assert result["scores"] == {"top1": 0.75, "balanced": pytest.approx(np.mean(shares))}
    np.savez(tmp_path / "real.npz", arr_0=pixels, labels=Digits("train").targets[:40])
    scored = [
        score(tmp_path, "accuracy", "--fake", fake, "--features", classifier)["scores"]
        for fake in (tmp_path / "real.npz", "digits:train[:40]")
    ]
    assert scored[0] == scored[1]


def test_a_hidden_label_is_refused_where_labels_are_scored_and_nowhere_else(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_digits(tmp_path / "images", range(11))
    files = sorted((tmp_path / "images").iterdir())
    lines = [f"images/{file.name},{label}" for file, label in zip(files, [*range(10), -1], strict=True)]
    (tmp_path / "images.csv").write_text("\n".join(["path,digit", *lines]))
    common = ("--fake", "table/digit:train", "--root", tmp_path, "--features", classifier)
    line = refused(capsys, "accuracy", *common)
    assert "images.csv, line 12 has the label -1, which is below 0; 1 of 11 images of" in line
    assert score(tmp_path, "accuracy", *common, "--skip-unlabelled")["fake"]["count"] == 10
    assert score(tmp_path, "fid", *common, "--real", tmp_path / "images")["fake"]["count"] == 11


def test_neighbours_tell_copies_from_held_out_images(classifier: Path, tmp_path: Path) -> None:
    def told(fake: object) -> dict[str, float]:
        given = ("--real", "digits:train[:200]", "--fake", fake, "--held-out", "digits:train[200:300]")
        return score(tmp_path, "neighbours", *given, "--features", classifier)["scores"]

    alike = told("digits:train[200:300]")
    assert (alike["nearer"], alike["copied"]) == (0.5, 0.01) and alike["distance"] == alike["held_out_distance"] > 0
    copies = told("digits:train[50:100]")
    assert (copies["nearer"], copies["copied"], copies["distance"]) == (1, 1, pytest.approx(0, abs=1e-6))
    mixed = np.concatenate([digit_pixels(range(10)), digit_pixels(range(200, 300))])
    np.savez(tmp_path / "mixed.npz", arr_0=mixed)
    assert told(tmp_path / "mixed.npz")["copied"] == pytest.approx(11 / 110)


def test_a_folder_of_samples_is_scored_without_its_grid(folders: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(folders[0], tmp_path / "images")
    Image.new("RGB", (100, 50)).save(tmp_path / "grid.png")
    assert len(open_samples(str(tmp_path), "L")) == 91
    (tmp_path / "metadata.json").write_text("{}")
    images = open_samples(str(tmp_path), "L")
    assert len(images) == 90 and images.size == (8, 8)


def test_images_in_memory(folders: tuple[Path, Path]) -> None:
    for mode, channels in (("L", 1), ("RGB", 3)):
        (expected,) = open_samples(str(folders[0]), mode).batches(100)
        pixels = torch.from_numpy(digit_pixels(range(90)))[:, None].expand(-1, channels, -1, -1)
        images = SampleSet(TensorSamples(pixels), mode)
        assert torch.equal(torch.cat(list(images.batches(32))), expected)
    for wrong in (pixels.float(), pixels[0]):
        with pytest.raises(ValueError, match=r"they must be uint8 \[N, 1 or 3, H, W\]"):
            TensorSamples(wrong)


def test_digits_are_all_of_them_and_slices_part_them() -> None:
    assert len(open_samples("digits", "L")) == 1797
    assert len(open_samples("digits:validation", "L")) == 360
    even, odd = (torch.cat(list(open_samples(f"digits[{i}::2]", "L").batches(512))) for i in range(2))
    assert (len(even), len(odd)) == (899, 898)
    (first,) = open_samples("digits:train[:4]", "L").batches(4)
    assert torch.equal(first, torch.stack([even[0], odd[0], even[1], odd[1]]))


def test_images_are_cropped_as_asked_for(tmp_path: Path) -> None:
    for i, size in enumerate([(40, 20), (21, 33)]):
        Image.fromarray(np.full((*size, 3), 100, np.uint8)).save(tmp_path / f"{i}.png")
    images = open_samples(str(tmp_path), "RGB", image_size=10)
    (batch,) = images.batches(2)
    assert batch.shape == (2, 3, 10, 10)
    assert images.description["crop"] == "adm_center"
    ramp = Image.fromarray(np.tile(np.arange(0, 200, 5, dtype=np.uint8), (20, 1)))
    assert np.array_equal(np.asarray(center_crop(ramp, 20))[0], np.arange(50, 150, 5))


def test_run_directory_and_its_export_are_one_extractor(classifier: Path, tmp_path: Path) -> None:
    checkpoint = write_run(tmp_path / "run", load_file(classifier), num_classes=10, img_size=None, model_args={})
    extractors = [open_extractor(str(path)) for path in (classifier, tmp_path / "run", checkpoint)]
    assert len({extractor.description["sha256"] for extractor in extractors}) == 1
    images = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    first, second, third = (extractor(images)["features"] for extractor in extractors)
    assert torch.equal(first, second) and torch.equal(first, third)


def test_a_classifier_of_canvases_takes_images_of_its_own_size(tmp_path: Path) -> None:
    arguments = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    network = timm.create_model("deit_mhla_digits", num_classes=9, img_size=64, **arguments).eval()
    write_run(tmp_path / "run", network.state_dict(), num_classes=9, img_size=64, model_args=arguments)
    extractor = open_extractor(str(tmp_path / "run"))
    (images,) = open_samples("canvas[:4]", extractor.mode).batches(4)
    mean, std = network.pretrained_cfg["mean"][0], network.pretrained_cfg["std"][0]
    torch.testing.assert_close(extractor(images)["logits"], network((images / 255 - mean) / std).detach())
    result = score(
        *(tmp_path, "fid", "--features", tmp_path / "run"),
        *("--real", "canvas[:40]", "--fake", "canvas:train[:40]"),
    )
    assert result["real"]["size"] == [64, 64] and result["scores"]["fid"] > 0


def test_digits_features_come_from_the_default_run(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no digits classifier in runs/digits or runs/demo: train one with .* fit"):
        open_extractor("digits")
    test_run_directory_and_its_export_are_one_extractor(classifier, tmp_path / "runs")
    (tmp_path / "runs" / "run").rename(tmp_path / "runs" / "digits")
    assert open_extractor("digits").description == open_weights(classifier).description


def test_classifier_extractor_resizes_and_gives_probabilities(classifier: Path) -> None:
    extractor = open_weights(classifier)
    assert isinstance(extractor, ClassifierExtractor)
    small = torch.from_numpy(digit_pixels(range(4)))[:, None]
    large = small.repeat_interleave(4, 2).repeat_interleave(4, 3)
    torch.testing.assert_close(extractor(large)["features"], extractor(small)["features"], rtol=0.2, atol=0.3)
    result = extractor(small)
    assert result["features"].shape == (4, 64) and result["logits"].shape == (4, 10)
    expected = extractor.network((small / 255 - extractor.mean) / extractor.std)
    torch.testing.assert_close(result["logits"], expected)


def test_a_metric_is_a_function_and_an_entry(
    classifier: Path, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gap(scorer: Scorer, real: SampleSet, fake: SampleSet, power: int) -> dict[str, float]:
        means = [scorer.collect(side).mean(0) for side in (real, fake)]
        return {"gap": float((means[0] - means[1]).abs().pow(power).sum())}

    monkeypatch.setitem(METRICS, "gap", Metric(gap, "distance of the means", options={"power": (1, "exponent")}))
    common = (tmp_path, "gap", "--real", folders[0], "--features", classifier)
    assert score(*common, "--fake", folders[0])["scores"] == {"gap": 0.0}
    first, second = (score(*common, "--fake", folders[1], "--power", power)["scores"]["gap"] for power in (1, 2))
    assert first > 0 and second > 0 and first != second
