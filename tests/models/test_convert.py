import pytest
import timm
import torch

from headmix_vision.layers import CORES
from headmix_vision.models.convert import convert_state_dict
from headmix_vision.models.convert_dit import convert_dit_state_dict

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
    converted = convert_state_dict(source.state_dict(), model, source_grid=(4, 4))
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
    converted = convert_state_dict(source.state_dict(), model, source_grid=(4, 4))
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
    for load in (lambda model, state: convert_state_dict(state, model), torch.nn.Module.load_state_dict):
        with pytest.raises(ValueError, match=r"28 positions of patches, of a grid that nothing tells, .* has 4 x 4"):
            load(create("vit_softmax_tiny"), source.state_dict())


MIXES = [
    pytest.param("iha", {"pseudo_heads": pseudo_heads, "collapse": collapse}, id=f"iha{pseudo_heads}-{collapse}")
    for pseudo_heads in (2, 3)
    for collapse in ("per_head", "across_heads")
]
MIXES.append(pytest.param("mea", {}, id="mea"))
SMALL_DIT = {"input_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 5, "block_grid": (2, 2)}
OPTIONS = {"cpe": True, "output_gate": True, "qk_norm": True}


def trained(model):
    """Stands in for training: every parameter with a share of noise, so that none is at its start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def check_equal(model, source, *inputs):
    """Two models compute the same but for the rounding of weights, in float32, that cancel in a new mix."""
    inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    with torch.no_grad():
        out, expected = model.double()(*inputs), source.double()(*inputs)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


def parts_of_the_mix(core, mix, depth=2):
    """The parameters that a mix adds."""
    names = ["head_mix.mix"]
    if mix == "iha":
        names += ["head_mix.collapse", *(["core.shares"] if core == "hih" else [])]
    return {f"blocks.{i}.attn.{name}" for i in range(depth) for name in names}


@pytest.mark.parametrize(("mix", "mix_args"), MIXES)
@pytest.mark.parametrize("core", CORES)
def test_a_mix_starts_with_the_function_of_the_trained_model(core, mix, mix_args):
    source = trained(create(f"deit_{core}_tiny", **OPTIONS))
    norm = {"output_norm": core == "hih"}
    model = create(f"deit_{core}_{mix}_tiny", head_mix_args=mix_args, **norm, **OPTIONS).eval()
    conversion = convert_state_dict(source.state_dict(), model)
    model.load_state_dict(conversion.state_dict)
    assert set(conversion.new_parameters) == parts_of_the_mix(core, mix) and not conversion.unused
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    check_equal(model, source, images)


@pytest.mark.parametrize(("mix", "mix_args"), MIXES)
@pytest.mark.parametrize("core", CORES)
def test_a_mix_starts_with_the_function_of_the_trained_generator(core, mix, mix_args):
    def create(name, **kwargs):
        return timm.create_model(name, **SMALL_DIT, **OPTIONS, **kwargs)

    source = trained(create(f"dit_{core}_s_2"))
    norm = {"output_norm": core == "hih"}
    model = create(f"dit_{core}_{mix}_s_2", head_mix_args=mix_args, **norm).eval()
    conversion = convert_dit_state_dict(source.state_dict(), model)
    model.load_state_dict(conversion.state_dict)
    assert set(conversion.new_parameters) == parts_of_the_mix(core, mix) and not conversion.unused
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    check_equal(model, source, latents, torch.tensor([3.0, 800.0]), torch.tensor([1, 4]))


def test_timm_weights_start_a_mix():
    source = create("deit_tiny_patch16_224").eval()
    model = converted(source, create("deit_softmax_iha_tiny", global_every=2).eval())
    assert model.blocks[0].attn.head_mix is not None and model.blocks[1].attn.head_mix is None
    check_equal(model, source, torch.randn(2, 3, 64, 64))


def test_the_norm_of_explicit_heads_is_new():
    source, model = create("deit_mhla_tiny"), create("deit_mhla_mea_tiny")
    new = convert_state_dict(source.state_dict(), model).new_parameters
    assert set(new) == parts_of_the_mix("mhla", "mea") | {f"blocks.{i}.attn.output_norm.weight" for i in range(2)}


def test_fewer_heads_are_for_compression():
    arguments = {"head_mix_args": {"component_heads": 1}}
    message = r"attn\.qkv\.weight has shape .*: fewer component_heads are for headmix_vision\.models\.compress_heads"
    with pytest.raises(ValueError, match=message):
        convert_state_dict(create("deit_tiny_patch16_224").state_dict(), create("deit_softmax_mea_tiny", **arguments))
    source, model = (
        timm.create_model(name, **SMALL_DIT, **options)
        for name, options in (("dit_mhla_s_2", {}), ("dit_mhla_mea_s_2", arguments))
    )
    with pytest.raises(ValueError, match=message):
        convert_dit_state_dict(source.state_dict(), model)


def test_another_mix_is_refused():
    source, model = (create("deit_softmax_iha_tiny", head_mix_args={"pseudo_heads": p}) for p in (2, 3))
    with pytest.raises(ValueError, match=r"head_mix\.mix has shape .*: head_mix_args must agree"):
        convert_state_dict(source.state_dict(), model)
    source, model = create("deit_mhla_tiny", block_grid=(2, 2)), create("deit_mhla_iha_tiny")
    with pytest.raises(ValueError, match=r"mixing\.weight has shape .*: core_args and block_grid must agree"):
        convert_state_dict(source.state_dict(), model)
