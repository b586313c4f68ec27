"""Probes of frozen features: known answers, the command on models of each kind, and wrong input."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from timm.models import save_for_hf

from headmix_vision.evaluation import ProbeRequest, evaluate
from headmix_vision.evaluation.extractors import BackboneExtractor, open_backbone
from headmix_vision.evaluation.probes import Labelled, linear_probe, nearest_neighbours

from .helpers import refused, run

SIDES = ("--train", "digits:train[:200]", "--test", "digits:validation[:100]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ViT with a class token, as timm saves it."""
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "in_chans": 1}
    network = timm.create_model("vit_tiny_patch16_224", num_classes=0, **sizes)
    network.pretrained_cfg.update(input_size=(1, 16, 16), mean=(0.5,), std=(0.5,))
    path = tmp_path_factory.mktemp("timm") / "small"
    save_for_hf(network, path, model_args=sizes, safe_serialization=True)
    return path


def labelled(rng: np.random.Generator, count: int, gap: float) -> Labelled:
    labels = np.arange(count) % 3
    centres = gap * np.eye(3, 8)
    return Labelled((centres[labels] + rng.normal(size=(count, 8))).astype(np.float32), labels)


@pytest.mark.parametrize("probe", [nearest_neighbours, linear_probe])
def test_probe_knows_what_features_know_and_no_more(probe) -> None:
    rng = np.random.default_rng(0)
    apart, alike = ((labelled(rng, 300, gap), labelled(rng, 600, gap)) for gap in (12, 0))
    assert probe(*apart).top1 == probe(*apart).balanced == 1
    found = probe(*alike)
    assert abs(found.top1 - 1 / 3) < 5 * (2 / 9 / 600) ** 0.5


def test_settings_are_chosen_without_the_test_images() -> None:
    rng = np.random.default_rng(0)
    train, test = labelled(rng, 300, 2), labelled(rng, 90, 2)
    wrong = Labelled(test.features, (test.labels + 1) % 3)
    for probe in (nearest_neighbours, linear_probe):
        found, other = probe(train, test), probe(train, wrong)
        assert (found.chosen, found.tuning) == (other.chosen, other.tuning)
        assert found.top1 + other.top1 <= 1


def test_balanced_accuracy_is_the_mean_over_classes() -> None:
    rng = np.random.default_rng(0)
    train = labelled(rng, 300, 12)
    two = labelled(rng, 6, 12)
    wrong = Labelled(two.features[[0, 3, 1, 4]], np.array([0, 0, 0, 1]))  # the third is of class 1
    found = linear_probe(train, wrong)
    assert found.top1 == 0.75 and found.balanced == pytest.approx((2 / 3 + 1) / 2)
    uneven = Labelled(two.features[[0, 3, 1, 4, 2, 2]], np.array([0, 0, 0, 1, 2, 2]))
    assert linear_probe(train, uneven).balanced == pytest.approx((2 / 3 + 1 + 1) / 3)


def test_command_probes_a_model_of_the_package_and_a_folder_of_timm(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.json"
    options = ("--model", "deit_mhla_digits", *SIDES, "--out", out, "--device", "cpu")
    assert run("probe", *options, "--dry-run") == 0 and not out.exists()
    told = f"would probe deit_mhla_digits on 200 and 100 images on cpu, write {out}\n"
    assert told in capsys.readouterr().out
    assert run("probe", *options) == 0
    known = json.loads(out.read_text())
    assert set(known["scores"]) == {
        *("knn_patch_mean", "knn_patch_mean_balanced", "linear_patch_mean", "linear_patch_mean_balanced", "commonest")
    }
    assert known["scores"]["linear_patch_mean"] > 0.95 and known["scores"]["knn_patch_mean"] > 0.95
    assert known["chosen"]["knn_patch_mean"]["chosen"] in (5, 10, 20, 50)

    source = f"local-dir:{folder}"
    request = ProbeRequest(model=source, teacher=source, train=SIDES[1], test=SIDES[3], input_size=24, device="cpu")
    scored = evaluate(request)
    assert scored is not None and scored.about["extractor"]["resize"].startswith("24x24 bicubic")
    for name in ("class_token", "patch_mean", "patches"):
        assert scored.scores[f"cosine_{name}"] == pytest.approx(1)
    assert scored.scores["knn_class_token"] > 2 * scored.scores["commonest"]


def test_features_are_those_of_the_network(folder: Path) -> None:
    extractor = open_backbone(f"local-dir:{folder}")
    pixels = torch.randint(0, 256, (3, 1, 16, 16), dtype=torch.uint8)
    found = extractor(pixels)
    hidden = extractor.network.forward_features(pixels / 127.5 - 1)
    torch.testing.assert_close(found["class_token"], hidden[:, 0])
    torch.testing.assert_close(found["patch_mean"], hidden[:, 1:].mean(1))
    assert found["patches"].shape == (3, 16, 24)


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "test_resnet"])
def test_places_of_feature_maps_are_patches(name: str) -> None:
    sizes = {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "img_size": 32, "window_size": 4}
    network = timm.create_model(name, num_classes=0, **(sizes if "swin" in name else {})).eval()
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    extractor = BackboneExtractor(network, name, input_size=32)
    found, hidden = extractor(pixels), extractor.last_features(pixels)
    channels_last = hidden if "swin" in name else hidden.movedim(1, -1)
    assert torch.equal(found["patches"], channels_last.reshape(2, -1, channels_last.shape[-1]))
    torch.testing.assert_close(found["patch_mean"], channels_last.mean((1, 2)))
    assert set(found) == {"patches", "patch_mean"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--train", "digits", "--test", "digits"), "test images must not be those trained on"),
        (("--train", "canvas:train[:20]", "--test", "digits"), "--train has 9 classes, --test has 10"),
        (("--train", "digits:train[:1]", "--test", "digits:validation"), "at least 2 samples are needed"),
        (("--train", "digits[:2]", "--test", "digits:validation"), "at least 2 classes besides each fifth"),
        ((*SIDES, "--input-size", "0"), "--input-size"),
        ((*SIDES, "--input-size", "1000000000000"), "an image of 1000000000000 pixels needs"),
        ((*SIDES, "--model", "local-dir:/nowhere"), "/nowhere has no config.json"),
        ((*SIDES, "--model", "vit_small_patch16_224"), "nor a model that comes with weights"),
        ((*SIDES, "--teacher", "missing"), "missing is neither a run directory"),
    ],
)
def test_wrong_input_is_refused_in_one_line(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = () if "--model" in options else ("--model", "deit_mhla_digits")
    assert message in refused(capsys, "probe", *model, *options, "--device", "cpu")


def test_input_size_holds_whole_patches(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", f"local-dir:{folder}", *SIDES, "--input-size", 18)
    assert "has patches of 4x4 pixels: the input size must be a multiple, got 18" in refused(capsys, "probe", *options)


def test_labels_come_from_data_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "images.npz", arr_0=np.zeros((4, 8, 8, 1), np.uint8), arr_1=np.arange(4))
    options = ("--model", "deit_mhla_digits", "--train", "digits", "--test", tmp_path / "images.npz")
    assert "--test must be a data set" in refused(capsys, "probe", *options)
