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
    assert not convert_state_dict(source.state_dict(), create("vit_mhla_tiny")).state_dict["pos_embed"][:, 0].any()


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


def positions(model):
    """Parts of the position embedding of a model with a class token and registers, or of one without either."""
    counts = [1 if model.has_class_token else 0, model.num_reg_tokens]
    if model.no_embed_class:
        counts = [0, 0]
    return model.pos_embed.detach().split([*counts, model.pos_embed.shape[1] - sum(counts)], dim=1)


def converted(source, model):
    model.load_state_dict(convert_state_dict(source.state_dict(), model).state_dict)
    return model


def test_registers_do_not_take_the_position_of_the_class_token():
    source = create("vit_tiny_patch16_224")
    model = create("vit_mhla_tiny", class_token=False, reg_tokens=1, global_pool="avg")
    _, before, _ = positions(model)
    _, registers, grid = positions(converted(source, model))
    assert torch.equal(registers, before) and not torch.equal(registers, source.pos_embed[:, :1])
    assert torch.equal(grid, source.pos_embed[:, 1:])


def test_prefix_tokens_are_told_apart_by_kind():
    source = create("vit_tiny_patch16_224", reg_tokens=2)
    classes, registers, grid = positions(source)
    both = positions(converted(source, create("vit_mhla_tiny", reg_tokens=2)))
    assert all(torch.equal(a, b) for a, b in zip(both, (classes, registers, grid), strict=True))
    alone = converted(source, create("vit_mhla_tiny", reg_tokens=2, class_token=False, global_pool="avg"))
    assert torch.equal(positions(alone)[1], registers) and torch.equal(alone.reg_token, source.reg_token)
    distilled = create("deit_tiny_distilled_patch16_224")
    model = converted(distilled, create("vit_mhla_tiny", reg_tokens=1))
    assert torch.equal(positions(model)[0], distilled.pos_embed[:, :1])
    assert not torch.equal(positions(model)[1], distilled.pos_embed[:, 1:2])


@pytest.mark.parametrize("reg_tokens", [0, 2])
@pytest.mark.parametrize(("source", "target"), [(True, True), (True, False), (False, True), (False, False)])
def test_positions_of_prefix_tokens_move_with_them(source, target, reg_tokens):
    """`no_embed_class` on either side: the softmax model computes what the source does."""
    source = create("vit_tiny_patch16_224", no_embed_class=source, reg_tokens=reg_tokens).eval()
    for token in (source.cls_token, source.reg_token):
        if token is not None:
            torch.nn.init.normal_(token)
    model = converted(source, create("vit_softmax_tiny", no_embed_class=target, reg_tokens=reg_tokens).eval())
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(images), source(images))


def test_positions_of_a_grid_that_is_no_square():
    source = create("vit_tiny_patch16_224", img_size=(64, 112)).eval()
    images = torch.randn(1, 3, 64, 112)
    model = converted(source, create("vit_softmax_tiny", img_size=(64, 112)).eval())
    torch.testing.assert_close(model(images), source(images))
    with pytest.raises(ValueError, match="29 positions holds neither a square grid nor the model's 16 patches"):
        convert_state_dict(source.state_dict(), create("vit_mhla_tiny"))
    with pytest.raises(ValueError, match="28 stored positions are no square grid"):
        create("vit_softmax_tiny").load_state_dict(source.state_dict())
