"""Weights of transformers' ViT and DINOv2 in timm's vision transformers."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from headmix_vision.errors import InputError
from headmix_vision.models.convert_transformers import transformers_to_timm

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
OURS = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 28, "patch_size": 14}


def random_weights(network: torch.nn.Module) -> None:
    torch.manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)


def test_a_vit_computes_the_same_logits(tmp_path: Path) -> None:
    config = transformers.ViTConfig(**SIZES, intermediate_size=128, num_labels=5, layer_norm_eps=1e-6)
    theirs = transformers.ViTForImageClassification(config).eval()
    random_weights(theirs)
    theirs.save_pretrained(tmp_path)
    ours = timm.create_model("vit_base_patch16_224", **OURS, num_classes=5).eval()
    ours.load_state_dict(transformers_to_timm(load_file(tmp_path / "model.safetensors")))
    x = torch.randn(2, 3, 28, 28)
    torch.testing.assert_close(ours(x), theirs(x).logits, rtol=1e-4, atol=1e-4)


def test_a_dinov2_computes_the_same_features(tmp_path: Path) -> None:
    theirs = transformers.Dinov2Model(transformers.Dinov2Config(**SIZES)).eval()
    random_weights(theirs)
    theirs.save_pretrained(tmp_path)
    ours = timm.create_model("vit_small_patch14_dinov2", **OURS, num_classes=0).eval()
    ours.load_state_dict(transformers_to_timm(load_file(tmp_path / "model.safetensors")))
    x = torch.randn(2, 3, 28, 28)
    torch.testing.assert_close(ours.forward_features(x), theirs(x).last_hidden_state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("encoder.layer.0.other.weight", "encoder.layer.0.other.weight has no place in timm's vision transformers"),
        ("encoder.layer.0.attention.attention.key.bias", r"the weights lack attention\.attention\.query\.bias"),
    ],
)
def test_other_weights_are_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        transformers_to_timm({name: torch.ones(2)})
