import pytest
import timm
import torch

import headmix_vision  # noqa: F401
from headmix_vision.models.convert import convert_state_dict

SMALL = {"img_size": 64, "depth": 2, "num_classes": 7}


def create(name, **kwargs):
    return timm.create_model(name, **{**SMALL, **kwargs})


@pytest.mark.parametrize(
    ("source", "target", "unused"),
    [
        ("deit_tiny_patch16_224", "deit_mhla_tiny", ["cls_token"]),
        (
            "deit_tiny_distilled_patch16_224",
            "deit_mhla_tiny",
            ["cls_token", "dist_token", "head_dist.weight", "head_dist.bias"],
        ),
        ("vit_tiny_patch16_224", "vit_mhla_tiny", []),
        ("deit_tiny_patch16_224", "deit_linear_tiny", ["cls_token"]),
    ],
)
def test_shared_weights_are_taken_over_and_the_new_ones_named(source, target, unused):
    source, model = create(source), create(target)
    converted = convert_state_dict(source.state_dict(), model)
    mixing = [f"blocks.{i}.attn.core.mixing.weight" for i in range(2)]
    assert converted.new_parameters == (mixing if "mhla" in target else [])
    assert sorted(converted.unused) == sorted(unused)
    model.load_state_dict(converted.state_dict)
    for name in ("blocks.1.attn.qkv.weight", "blocks.0.mlp.fc1.bias", "patch_embed.proj.weight", "head.weight"):
        assert torch.equal(model.state_dict()[name], source.state_dict()[name])
    norm = model.fc_norm if model.global_pool == "avg" else model.norm
    assert torch.equal(norm.weight, source.norm.weight)
    assert torch.equal(model.pos_embed[:, -16:], source.pos_embed[:, -16:])


def test_softmax_target_computes_what_the_source_computes():
    source, model = create("deit_tiny_patch16_224").eval(), create("deit_softmax_tiny").eval()
    model.load_state_dict(convert_state_dict({"model": source.state_dict()}, model).state_dict)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(images), source(images))


def test_another_resolution_head_and_new_options():
    source, model = create("deit_tiny_patch16_224"), create("deit_mhla_tiny", img_size=96, num_classes=3, cpe=True)
    converted = convert_state_dict(source.state_dict(), model)
    model.load_state_dict(converted.state_dict)
    assert {"head.weight", "head.bias", "blocks.0.attn.cpe.proj.weight"} <= set(converted.new_parameters)
    assert {"head.weight", "head.bias", "cls_token"} == set(converted.unused)
    assert model(torch.randn(1, 3, 96, 96)).shape == (1, 3)


@pytest.mark.parametrize("img_size", [64, 96])
@pytest.mark.parametrize(
    ("source", "target", "prefix", "positions"),
    [
        ("deit_tiny_distilled_patch16_224", "deit_mhla_tiny", {}, []),
        ("deit_tiny_distilled_patch16_224", "vit_mhla_tiny", {}, [0.0]),
        ("deit_tiny_distilled_patch16_224", "vit_mhla_tiny", {"no_embed_class": True}, []),
        ("vit_tiny_patch16_224", "vit_mhla_tiny", {}, [0.0]),
        ("vit_tiny_patch16_224", "deit_mhla_tiny", {"no_embed_class": True, "reg_tokens": 2}, []),
    ],
)
def test_every_token_keeps_its_own_position(source, target, prefix, positions, img_size):
    source, model = create(source), create(target, img_size=img_size, **prefix)
    count = source.num_prefix_tokens
    with torch.no_grad():
        source.pos_embed[:, :count] = torch.arange(count).view(-1, 1).float()
        source.pos_embed[:, count:] = 7.0
    converted = convert_state_dict(source.state_dict(), model)
    model.load_state_dict(converted.state_dict)
    grid = [7.0] * (img_size // 16) ** 2
    torch.testing.assert_close(model.pos_embed[0, :, 0], torch.tensor([*positions, *grid]))


def test_a_source_whose_class_token_has_no_position():
    source, model = create("vit_tiny_patch16_224", no_embed_class=True), create("deit_mhla_tiny")
    model.load_state_dict(convert_state_dict(source.state_dict(), model).state_dict)
    assert torch.equal(model.pos_embed, source.pos_embed)
    with pytest.raises(ValueError, match="prefix positions"):
        convert_state_dict(source.state_dict(), create("vit_mhla_tiny"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"weight": torch.ones(1)}, "not a timm ViT"),
        ("deit_small_patch16_224", r"has shape .* the model needs"),
    ],
)
def test_foreign_weights_are_refused(source, message):
    state_dict = create(source).state_dict() if isinstance(source, str) else source
    with pytest.raises(ValueError, match=message):
        convert_state_dict(state_dict, create("deit_mhla_tiny"))


def test_depth_must_agree():
    with pytest.raises(ValueError, match="2 blocks, the model 3"):
        convert_state_dict(create("deit_tiny_patch16_224").state_dict(), create("deit_mhla_tiny", depth=3))
