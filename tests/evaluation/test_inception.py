"""Inception features with random weights of the true shapes: torch-fidelity's own numbers, and sFID."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

from headmix_vision.evaluation.extractors import INCEPTION_FILE, InceptionExtractor

from .helpers import refused, run


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as torch-fidelity publishes it."""

    class Untrained(FeatureExtractorInceptionV3):
        def load_state_dict(self, *_: object, **__: object) -> None:  # type: ignore[override]
            """Keep the random weights."""

    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save({}, path)
    torch.manual_seed(0)
    torch.save(Untrained("untrained", ["2048"], feature_extractor_weights_path=str(path)).state_dict(), path)
    return path


def test_features_are_those_of_torch_fidelity(weights: Path) -> None:
    extractor = InceptionExtractor(weights)
    images = torch.randint(0, 256, (2, 3, 20, 30), dtype=torch.uint8)
    result = extractor(images)
    reference = FeatureExtractorInceptionV3("x", ["2048", "logits"], feature_extractor_weights_path=str(weights))
    features, logits = reference(images)
    torch.testing.assert_close(result["features"], features)
    torch.testing.assert_close(result["logits"] + reference.fc.bias, logits)
    # 7 channels of 17 x 17 places, channels last as in TensorFlow
    assert result["spatial"].shape == (2, 2023)
    assert extractor.description["official"] is False


@pytest.mark.slow
def test_sfid_beside_fid(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, name in enumerate(("real", "fake")):
        pixels = np.random.default_rng(seed).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
        np.savez(tmp_path / f"{name}.npz", arr_0=pixels)
    sides = ("--real", tmp_path / "real.npz", "--fake", tmp_path / "fake.npz")
    assert run("fid", *sides, "--features", weights, "--out", tmp_path / "out.json") == 0
    printed = capsys.readouterr()
    assert "not the official file" in printed.err and "3 images for 2048 features" in printed.err
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["scores"]["fid"] > 0 and result["scores"]["sfid"] > 0
    assert len(result["warnings"]) == 3


def test_missing_and_foreign_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    message = refused(capsys, "fid", "--real", "digits", "--fake", "digits")
    assert f"{tmp_path}/torch/hub/checkpoints/{INCEPTION_FILE}" in message and "https://" in message
    assert not (tmp_path / "torch").exists()
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pth")
    message = refused(capsys, "fid", "--real", "digits", "--fake", "digits", "--features", tmp_path / "other.pth")
    assert "holds no Inception weights" in message
    torch.save(Path("a pickled object"), tmp_path / "pickle.pth")
    message = refused(capsys, "fid", "--real", "digits", "--fake", "digits", "--features", tmp_path / "pickle.pth")
    assert "nothing was loaded" in message
