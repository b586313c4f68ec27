"""Swapped attention in models of timm and transformers: what it computes, keeps, refuses, and saves."""

import copy
import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import Attention, AttentionRope, RotaryEmbeddingCat, apply_rot_embed_cat
from timm.models._manipulate import reinit_non_persistent_buffers
from timm.models.eva import EvaAttention
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn

import headmix_vision
from headmix_vision import from_pretrained, save_pretrained, swap_attention
from headmix_vision.analysis.attention_matrices import record_attention
from headmix_vision.errors import InputError
from headmix_vision.layers.swapped_attention import Names, SwappedAttention
from headmix_vision.models.attention_errors import attention_errors, attention_pairs, tell_grid
from headmix_vision.models.convert import convert_state_dict
from headmix_vision.ops import TokenGrid
from headmix_vision.runs.networks import create_network

SIZES = {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
FAMILIES: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {},
    "deit3_small_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "vit_small_patch14_reg4_dinov2": {"patch_size": 16},
    "vit_small_patch16_dinov3": {},
    "eva02_tiny_patch14_224": {"patch_size": 16},
    "beitv2_base_patch16_224": {},
    "vit_base_patch16_siglip_224": {},
    "vit_base_patch16_clip_224": {},
    "vit_small_patch16_rope_mixed_224": {},
    "vit_pe_core_tiny_patch16_384": {},
    "naflexvit_base_patch16_gap": {"img_size": None},
}
families = pytest.mark.parametrize("family", FAMILIES)


def create(family: str = "vit_tiny_patch16_224", **options: Any) -> Any:
    """Make a small model whose weights are large enough for each of its parts to matter."""
    torch.manual_seed(0)
    model = timm.create_model(family, **{**SIZES, **FAMILIES.get(family, {}), **options})
    return with_large_weights(model)


def with_large_weights(model: nn.Module) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return model.eval()


def images(*size: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, *(size or (64, 64)), generator=torch.Generator().manual_seed(1))


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.detach().abs().max()))


@families
def test_softmax_swapped_in_computes_what_the_model_computed(family):
    model = create(family)
    before = model(images())
    report = swap_attention(model, "softmax")
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name not in stored:
            buffer.fill_(7)
    reinit_non_persistent_buffers(model)  # as after loading into a model on the meta device
    close(model(images()), before)
    assert report.new == report.left_out == []


@families
@pytest.mark.parametrize("core", ["linear", "mhla", "hih"])
def test_weights_keep_their_names_and_all_get_gradients(family, core):
    model = create(family)
    before = {name: parameter for name, parameter in model.named_parameters()}
    report = swap_attention(model, core, block_grid=2)
    after = dict(model.named_parameters())
    assert report.layers == ["blocks.0.attn", "blocks.1.attn"]
    assert [name for name in after if name not in before] == report.new
    assert [name for name in before if name not in after] == report.left_out
    assert all(after[name] is parameter for name, parameter in before.items() if name in after)
    assert bool(report.left_out) == family.startswith("beit")
    model.train()(images()).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in after.values())


@families
def test_a_swapped_model_opens_as_it_was_saved(family, tmp_path):
    model = create(family)
    swap_attention(model, "mhla", [1], block_grid=2)
    save_pretrained(model, tmp_path)
    expected = model(images())
    assert torch.equal(from_pretrained(tmp_path)(images()), expected)
    opened = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(opened(images()), expected)
    assert [type(block.attn).__name__ for block in opened.blocks] == [
        type(block.attn).__name__ for block in model.blocks
    ]


@pytest.mark.parametrize("mix", ["iha", "mea"])
@pytest.mark.parametrize(
    "family", ["vit_tiny_patch16_224", "vit_small_patch16_dinov3", "vit_small_patch16_rope_mixed_224"]
)
def test_a_head_mix_starts_as_the_model(family, mix):
    model = create(family)
    before = model(images())
    swap_attention(model, "softmax", head_mix=mix, output_norm=False)
    close(model(images()), before)


def test_convolutions_start_as_the_model():
    model = create()
    before = model(images())
    report = swap_attention(model, "softmax", cpe=True, lepe=3)
    close(model(images()), before)
    assert {name.split(".attn.")[1] for name in report.new} == {
        f"{part}.proj.{leaf}" for part in ("cpe", "lepe") for leaf in ("weight", "bias")
    }


@pytest.mark.parametrize(
    "layer",
    [
        partial(Attention, attn_head_dim=24, qk_norm=True, scale_norm=True, gated=True, qkv_bias=True),
        partial(AttentionRope, qkv_fused=False, num_kv_heads=2, qk_norm=True, scale_norm=True, rotate_half=True),
        partial(AttentionRope, attn_head_dim=24, gated=True, proj_bias=False),
        partial(EvaAttention, qkv_fused=False, qk_norm=True, gated=True),
        partial(EvaAttention, qkv_bias_separate=True, rotate_half=True),
    ],
)
def test_all_parts_of_a_layer_stay(layer):
    original = with_large_weights(layer(64, num_heads=4, norm_layer=nn.LayerNorm))
    x, rope = torch.randn(2, 17, 64), {}
    if not isinstance(original, Attention):
        half = original.rotate_half
        table = RotaryEmbeddingCat(original.head_dim, in_pixels=False, feat_shape=(4, 4), rotate_half=half)
        rope = {"rope": table.get_embed()}
    grid = TokenGrid((4, 4), 1)
    swapped = SwappedAttention(original, Names(), grid, grid, core="softmax")
    close(swapped(x, **rope), original(x, **rope))
    assert swapped.state_dict().keys() == original.state_dict().keys()


def test_mhla_computes_what_a_converted_model_computes():
    source = create()
    named = timm.create_model("vit_mhla_tiny", **SIZES, block_grid=2).eval()
    named.load_state_dict(convert_state_dict(source.state_dict(), named).state_dict)
    swap_attention(source, "mhla", block_grid=2)
    close(source(images()), named(images()))


@pytest.mark.parametrize("family", ["vit_small_patch16_dinov3", "vit_small_patch16_rope_mixed_224"])
def test_linear_attention_rotates_the_numerator_and_not_the_denominator(family):
    model = create(family)
    original = copy.deepcopy(model.blocks[1].attn)
    swap_attention(model, "linear")
    rope, prefix = model.rope.get_embed(shape=(4, 4)), model.num_prefix_tokens
    rope = rope[1] if rope.ndim == 4 else rope  # of the layer, and of each of its heads
    x = torch.randn(2, prefix + 16, 32)
    q, k, v = original.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
    q, k = (y.relu() + 1e-6 for y in (q, k))
    turned_q, turned_k = (
        torch.cat([y[:, :, :prefix], apply_rot_embed_cat(y[:, :, prefix:], rope, half=original.rotate_half)], 2)
        for y in (q, k)
    )
    heads = (turned_q @ turned_k.mT) @ v / (q @ k.mT).sum(-1, keepdim=True)
    close(model.blocks[1].attn(x, rope=rope), original.proj(heads.transpose(1, 2).flatten(2)))


def test_trained_models_of_this_package_are_swapped_and_opened(tmp_path):
    model = timm.create_model("deit_softmax_digits", pretrained=True).eval()
    digits = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    expected = model(digits)
    same, linear = copy.deepcopy(model), copy.deepcopy(model)
    swap_attention(same, "softmax")
    assert torch.equal(same(digits), expected)
    report = swap_attention(linear, "mhla", softmax_every=2)
    assert report.new == [f"blocks.{index}.attn.core.mixing.weight" for index in (1, 3)]
    assert torch.equal(model(digits), expected) and not torch.equal(linear(digits), expected)
    save_pretrained(linear, tmp_path)
    assert torch.equal(from_pretrained(tmp_path)(digits), linear(digits))
    linear.set_block_grid((1, 4))
    assert linear.blocks[1].attn.core.mixing.weight.shape == (4, 4)
    save_pretrained(torch.compile(linear), tmp_path)
    assert torch.equal(from_pretrained(tmp_path)(digits), linear(digits))
    with pytest.raises(InputError, match=r"blocks.0.attn: cpe=True cannot be added to a layer of this package"):
        swap_attention(model, "linear", cpe=True)


def test_beit_keeps_its_bias_with_softmax_alone():
    model = create("beitv2_base_patch16_224", use_shared_rel_pos_bias=True, use_rel_pos_bias=False, depth=3)
    before = model(images())
    swap_attention(model, "softmax", [0])
    close(model(images()), before)
    assert swap_attention(model, "linear", [1]).left_out == []
    with pytest.raises(InputError, match=r"blocks.1.attn cannot be swapped: it has been swapped before"):
        swap_attention(model, "linear", [1])
    linear = create("beitv2_base_patch16_224", use_shared_rel_pos_bias=True, use_rel_pos_bias=False)
    assert swap_attention(linear, "linear").left_out == ["rel_pos_bias.relative_position_bias_table"]
    mixed = create("beitv2_base_patch16_224")
    assert len(swap_attention(mixed, "softmax", head_mix="iha").left_out) == 2
    mixed(images())


def test_beit_follows_another_size():
    model = create("beitv2_base_patch16_224")
    other, linear = copy.deepcopy(model), copy.deepcopy(model)
    swap_attention(model, "softmax")
    swap_attention(linear, "linear")
    for one in (model, other, linear):
        one.set_input_size((32, 96))
    close(model(images(32, 96)), other(images(32, 96)))
    assert linear(images(32, 96)).isfinite().all()


@pytest.mark.parametrize("family", ["vit_tiny_patch16_224", "vit_small_patch16_dinov3"])
def test_the_grid_follows_each_call(family):
    model = create(family, dynamic_img_size=True)
    softmax = copy.deepcopy(model)
    swap_attention(softmax, "softmax")
    close(softmax(images(96, 32)), model(images(96, 32)))
    swap_attention(model, "mhla", block_grid=2)
    other, expected = copy.deepcopy(model), model(images(96, 32))
    other(images())
    fixed = create(family, img_size=(96, 32))
    swap_attention(fixed, "mhla", block_grid=2)
    weights = {name: value for name, value in model.state_dict().items() if name != "pos_embed"}
    fixed.load_state_dict(weights, strict=False)
    layer = model.blocks[0].attn
    assert layer.grid_of_call.shape == (6, 2) and layer.flops() == layer.flops((6, 2)) < layer.flops((4, 4))
    if family == "vit_small_patch16_dinov3":
        close(fixed(images(96, 32)), expected)
    fixed.set_input_size((32, 64))
    assert fixed(images(32, 64)).isfinite().all()


@pytest.mark.parametrize("copied", ["patch_embed", "attn"])
def test_parts_that_peft_copies_follow_the_grid_of_each_call(copied):
    peft = pytest.importorskip("peft")
    model = create(dynamic_img_size=True)
    swap_attention(model, "mhla", block_grid=2)
    expected = model(images(96, 32))
    model(images())
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["fc1"], modules_to_save=[copied])).eval()
    close(adapted(images(96, 32)), expected)
    close(adapted.merge_and_unload()(images(96, 32)), expected)
    model.set_input_size((32, 64))
    assert model(images(32, 64)).isfinite().all()


def test_whole_numbers_of_numpy_are_saved(tmp_path):
    model = create(depth=1)
    swap_attention(model, "mhla", [np.int64(0)], block_grid=np.int64(2))
    save_pretrained(model, tmp_path)


def test_a_layer_in_several_places_is_swapped_in_all():
    model = create()
    model.blocks[1].attn = model.blocks[0].attn
    assert swap_attention(model, "linear").layers == ["blocks.0.attn"]
    assert model.blocks[1].attn is model.blocks[0].attn and isinstance(model.blocks[1].attn, SwappedAttention)


def test_timm_takes_features_from_a_saved_model(tmp_path):
    model = create("vit_small_patch14_reg4_dinov2")
    swap_attention(model, "mhla", block_grid=2)
    save_pretrained(model, tmp_path)
    features = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, features_only=True, out_indices=[0, 1])
    for found, expected in zip(
        features.eval()(images()), model.forward_intermediates(images(), intermediates_only=True), strict=True
    ):
        assert torch.equal(found, expected)
    larger = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=96, num_classes=3).eval()
    assert larger(images(96, 96)).shape == (2, 3)


def test_features_of_a_wrapped_model_can_be_swapped():
    model = create(features_only=True, out_indices=[0, 1])
    expected = model(images())
    assert swap_attention(model, "softmax").layers == ["model.blocks.0.attn", "model.blocks.1.attn"]
    for found, before in zip(model(images()), expected, strict=True):
        close(found, before)


def test_timm_makes_a_swapped_model_by_its_name(tmp_path):
    swaps = [{"core": "mhla", "layers": [0], "block_grid": 2}, {"core": "hih", "layers": ["blocks.1.attn"]}]
    model = timm.create_model("swapped", architecture="vit_tiny_patch16_224", swaps=swaps, **SIZES)
    assert [type(block.attn.core).__name__ for block in model.blocks] == ["MHLACore", "HeadInHeadCore"]
    save_pretrained(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architecture"] == "swapped" and config["model_args"]["swaps"] == swaps
    again = timm.create_model("swapped", architecture="vit_tiny_patch16_224", swaps="linear", **{**SIZES, "depth": 1})
    assert type(again.blocks[0].attn.core).__name__ == "LinearCore"
    request = {"architecture": "vit_tiny_patch16_224", "swaps": "linear", "depth": 1}  # as timm's scripts resolve it
    resolved = timm.models.resolve_model_input_args("swapped", {"img_size": 64}, **request)
    assert timm.create_model(**resolved).patch_embed.grid_size == (4, 4)
    resolved = timm.models.resolve_model_input_args(f"local-dir:{tmp_path}", {"img_size": 96})
    assert timm.create_model(pretrained=True, **resolved).patch_embed.grid_size == (6, 6)
    overlay = {"mean": (0.1, 0.2, 0.3)}
    opened = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, pretrained_cfg_overlay=overlay)
    assert opened.pretrained_cfg["mean"] == (0.1, 0.2, 0.3)
    overlay = {"file": str(tmp_path / "model.safetensors"), "num_classes": 5}
    request = {"architecture": "vit_tiny_patch16_224", "swaps": swaps, **SIZES}
    opened = timm.create_model("swapped", pretrained=True, pretrained_cfg_overlay=overlay, **request).eval()
    assert torch.equal(opened(images()), model.eval()(images()))


@pytest.mark.slow
def test_a_swapped_model_compiles_and_exports():
    model = create("vit_small_patch16_dinov3", dynamic_img_size=True, depth=1)
    swap_attention(model, "mhla", block_grid=2)
    expected = model(images())
    close(torch.compile(model, backend="aot_eager", fullgraph=True)(images()), expected)
    close(torch.export.export(model, (images(),)).module()(images()), expected)
    plain = create(depth=1)
    swap_attention(plain, "mhla", block_grid=2)
    close(torch.fx.symbolic_trace(plain)(images()), plain(images()))


def test_a_swapped_model_runs_under_autocast():
    model = create("eva02_tiny_patch14_224")
    swap_attention(model, "mhla", block_grid=2)
    expected = model(images())
    with torch.autocast("cpu", torch.bfloat16):
        found = model(images())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.05 * float(expected.detach().abs().max()))


def test_gradient_checkpointing_changes_nothing():
    model = create("vit_small_patch16_dinov3")
    swap_attention(model, "hih", block_grid=2)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.train().zero_grad()
        model(images()).square().sum().backward()
        gradients.append(model.blocks[0].attn.core.A_log.grad)
    close(*gradients)


def test_gradient_checkpointing_finds_the_grid_of_each_call():
    model = create(dynamic_img_size=True).train()
    swap_attention(model, "mhla", block_grid=2)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        loss = model(images(64, 64)).square().sum() + model(images(32, 32)).square().sum()
        with torch.no_grad():
            model(images(32, 128))
        loss.backward()
        gradients.append(model.blocks[0].attn.core.mixing.weight.grad)
    close(*gradients)
    loss = model(images(96, 32)).sum() + model(images(32, 96)).sum()
    with pytest.raises(InputError, match="gradient checkpointing cannot tell grids of 12 tokens apart"):
        loss.backward()
    model(images(96, 32)).sum().backward()


def test_mixing_matrices_are_not_decayed():
    model = create()
    swap_attention(model, "mhla", block_grid=2)
    undecayed = model.no_weight_decay()
    assert copy.deepcopy(model).no_weight_decay() == undecayed >= {"blocks.0.attn.core.mixing.weight", "pos_embed"}
    groups = param_groups_weight_decay(model, 0.1, no_weight_decay_list=undecayed)
    mixing = model.blocks[0].attn.core.mixing.weight
    assert [any(parameter is mixing for parameter in group["params"]) for group in groups] == [True, False]


def test_the_attention_of_swapped_layers_can_be_analysed():
    model = create("vit_small_patch14_reg4_dinov2")
    swap_attention(model, "linear")
    (first, _) = record_attention(model, images())
    matrices = first.matrices(0)
    assert matrices.shape == (2, 21, 21)
    torch.testing.assert_close(matrices.sum(-1), torch.ones(2, 21, dtype=torch.float64))


def test_layers_are_chosen_by_number_name_or_depth():
    chosen = {
        "numbers": ({"layers": [2, 0]}, [0, 2]),
        "names": ({"layers": ["blocks.1.attn"]}, [1]),
        "depth": ({"softmax_every": 2}, [1, 3]),
    }
    for options, expected in chosen.values():
        model = create(depth=4)
        report = swap_attention(model, "hih", **options)
        assert report.layers == [f"blocks.{index}.attn" for index in expected]
        assert set(report.kept) == {f"blocks.{index}.attn" for index in range(4) if index not in expected}
        assert all(reason == "asked to stay" for reason in report.kept.values())
    assert "swapped to hih (Attention): blocks.1.attn, blocks.3.attn" in str(report)


def test_models_keep_softmax_in_some_layers():
    model = timm.create_model("vit_mhla_tiny", **{**SIZES, "depth": 4}, block_grid=2, softmax_every=2)
    assert [type(block.attn.core).__name__ for block in model.blocks] == ["SoftmaxCore", "MHLACore"] * 2
    model.set_block_grid(4)
    assert model(images()).shape == (2, 5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cait_xxs24_224", "blocks.0.attn cannot be swapped: TalkingHeadAttn: it mixes the attention weights"),
        ("xcit_nano_12_p16_224", "blocks.0.attn cannot be swapped: XCA: it attends between channels"),
        ("swin_tiny_patch4_window7_224", "layers.0.blocks.0.attn cannot be swapped: WindowAttention: .* windowed"),
        ("vit_dwee_patch16_reg1_gap_256", "DiffAttention: it is the difference of two softmax attentions"),
        ("vit_base_patch16_xp_224", "blocks.0 cannot be swapped: ParallelScalingBlock: its attention and MLP"),
        ("vit_relpos_small_patch16_224", "RelPosAttention: relative positions bias its softmax"),
        ("pit_ti_224", "transformers.0.blocks.0.attn cannot be swapped: no module around it names a token grid"),
        ("sam2_hiera_tiny", "MultiScaleAttention: this class is unknown here; HeadMixAttention can take its place"),
        ("resnet10t", "It has no attention layer that is known here"),
    ],
)
def test_other_attention_is_refused_by_name(name, reason):
    with torch.device("meta"):
        model = timm.create_model(name)
    before = list(model.state_dict())
    with pytest.raises(InputError, match=f"nothing to swap.*{reason}"):
        swap_attention(model, "mhla")
    assert list(model.state_dict()) == before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"core": "mamba"}, "core must be one of"),
        ({"head_mix": "x"}, "head_mix must be None or one of"),
        ({"blocks": 4}, "swap_attention has no 'blocks'"),
        ({"block_grid": 9}, r"blocks.0.attn: block_grid \(9, 9\) is larger than the token grid"),
        ({"core_args": {"eps": -1}}, "blocks.0.attn: eps must be"),
        ({"core_args": {"normaliser": None}}, "has no 'normaliser'; did you mean normalizer"),
        ({"core": "linear", "head_mix": "mea", "head_mix_args": {"component_heads": 1}}, "leave component_heads out"),
        ({"lepe": 2}, "lepe must be 0, or odd"),
        ({"cpe": "yes"}, "cpe must be true or false"),
        ({"layers": []}, "layers is empty"),
        ({"layers": "every 3rd"}, "layers must list the layers .* softmax_every=3 keeps"),
        ({"layers": [2]}, "no layer 2 to swap: give numbers from 0 to 1, or names from blocks.0.attn to blocks.1.attn"),
        ({"layers": ["attn_pool"]}, "attn_pool cannot be swapped: AttentionPoolLatent: it pools by cross-attention"),
        ({"layers": [0], "softmax_every": 2}, "give layers or softmax_every, not both"),
        ({"softmax_every": 3}, "softmax_every must be 0, or from 2 to the 2 layers"),
        ({"layers": 1}, "layers must list the layers to swap by number or name, got 1"),
    ],
)
def test_wrong_options_are_refused_and_change_nothing(options, reason):
    model = create("vit_base_patch16_siglip_224")
    before = model(images())
    with pytest.raises(InputError, match=reason):
        swap_attention(model, **options)
    assert torch.equal(model(images()), before) and model.pretrained_cfg["architecture"] != "swapped"


def test_models_with_dropped_weights_patches_or_rotation_are_refused():
    with pytest.raises(InputError, match=r"attn_drop=0.1 needs the 'softmax' core"):
        swap_attention(create(attn_drop_rate=0.1), "mhla")
    with pytest.raises(InputError, match=r"patch_drop_rate must be 0, got 0.5"):
        swap_attention(create(patch_drop_rate=0.5), "mhla")
    rotary = create("vit_small_patch16_dinov3")
    with pytest.raises(InputError, match=r"blocks.0.attn: rotary positions need the normalizer"):
        swap_attention(rotary, "mhla", block_grid=2, core_args={"normalizer": "source_block"})
    swap_attention(rotary, "linear")
    with pytest.raises(InputError, match="attn_mask and is_causal need the 'softmax' core"):
        rotary(images(), is_causal=True)


def test_hooks_stay_and_wrappers_are_refused():
    with pytest.raises(InputError, match=r"model must be a torch.nn.Module, got 'vit_tiny_patch16_224'"):
        swap_attention("vit_tiny_patch16_224")
    model, calls = create(), []
    handle = model.blocks[0].attn.register_forward_hook(lambda *_: calls.append(1))
    swap_attention(model, "linear", [0])
    model(images())
    handle.remove()
    model(images())
    assert calls == [1]
    model.blocks[1].attn.forward = lambda x, **_: x
    with pytest.raises(InputError, match=r"blocks.1.attn: its forward was replaced"):
        swap_attention(model, "linear")
    compiled = create()
    compiled.blocks[0].attn = torch.compile(compiled.blocks[0].attn)
    with pytest.raises(InputError, match=r"it is compiled already: swap before torch.compile"):
        swap_attention(compiled, "linear")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(create())
        with pytest.raises(InputError, match="wrapped by DistributedDataParallel, which knows no new layers"):
            swap_attention(wrapped, "linear")
    finally:
        torch.distributed.destroy_process_group()


def saved(folder: Path) -> Path:
    model = create(depth=1)
    swap_attention(model, "mhla", block_grid=2)
    save_pretrained(model, folder)
    return folder


def test_models_that_cannot_be_opened_again_are_not_saved(tmp_path):
    model = timm.models.VisionTransformer(**SIZES)
    swap_attention(model, "linear")
    with pytest.raises(InputError, match=r"was not made by timm.create_model"):
        save_pretrained(model, tmp_path)
    wrapped = create(features_only=True, out_indices=[0, 1])
    swap_attention(wrapped, "linear")
    with pytest.raises(InputError, match="swap and save the model without features_only"):
        save_pretrained(wrapped, tmp_path)
    with pytest.raises(InputError, match=r"norm_layer.* is not serializable"):
        save_pretrained(create(norm_layer=nn.LayerNorm), tmp_path)
    with pytest.raises(InputError, match="HeadMixDiT cannot be saved"):
        save_pretrained(timm.create_model("dit_mhla_s_2", depth=1, embed_dim=32, num_heads=2), tmp_path)
    changed = create(depth=1)
    swap_attention(changed, "mhla", block_grid=2)
    changed.blocks[0].attn.set_block_grid((1, 4))  # the same number of blocks
    with pytest.raises(InputError, match=r"changed after .* of shape \(1, 4\) in the model and of shape \(2, 2\) as"):
        save_pretrained(changed, tmp_path)
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(create(depth=1), peft.LoraConfig(target_modules=["qkv"]))
    with pytest.raises(InputError, match=r"belongs to an adapter: save what merge_and_unload\(\) of peft returns"):
        save_pretrained(adapted, tmp_path)
    changed = create(depth=1)
    changed.head = nn.Linear(32, 3)
    with pytest.raises(InputError, match=r"changed after .*: head.bias is of shape \(3,\) in the model"):
        save_pretrained(changed, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architecture": "os.system"}, "timm cannot make: RuntimeError: Unknown model"),
        ({"architecture": 3}, "entry 'architecture' is 3, it must be of type str"),
        ({"model_args.architecture": "os.system"}, "architecture must be the name of a model of timm, got 'os.system'"),
        ({"model_args.architecture": "swapped"}, "architecture must be the name of a model of timm"),
        ({"model_args.swaps": []}, "swaps is empty"),
        ({"model_args.swaps": 3}, "swaps must be a core, arguments of swap_attention, or a list of such, got 3"),
        ({"model_args.swaps": [{"kernel": "x"}]}, "swaps has no 'kernel'"),
        ({"model_args.swaps": [{"core": ["mhla"]}]}, "core must be one of"),
        ({"model_args.swaps": [{"layers": [[0]]}]}, "the model has no layer"),
        ({"model_args.swaps": [{"core": "hih"}]}, "belongs to another model than .* describes"),
        ({"model_args.embed_dim": 64}, "belongs to another model than .* of shape"),
        ({"model_args.embed_dim": 10**9}, "memory"),
        ({"model_args.colour": "red"}, "timm cannot make: TypeError: .*colour"),
        ({"pretrained_cfg": None}, "entry 'pretrained_cfg'"),
    ],
)
def test_folders_of_other_people_are_refused_in_one_line(change, reason, tmp_path):
    path = saved(tmp_path) / "config.json"
    config = json.loads(path.read_text())
    for name, value in change.items():
        *outer, last = name.split(".")
        (config[outer[0]] if outer else config)[last] = value
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match=reason) as error:
        from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def test_damaged_weights_are_refused(tmp_path):
    weights = saved(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(InputError, match="truncated or no safetensors file"):
        from_pretrained(tmp_path)


def test_runs_start_from_weights_before_and_after_a_swap(tmp_path):
    sizes = {name: SIZES[name] for name in ("embed_dim", "depth", "num_heads")}
    arguments = {"architecture": "vit_tiny_patch16_224", "swaps": {"core": "hih"}, **sizes}
    source = create()
    save_file(source.state_dict(), tmp_path / "before.safetensors")
    before = create_network("swapped", 5, 64, arguments, str(tmp_path / "before.safetensors"))
    assert torch.equal(before.blocks[1].attn.qkv.weight, source.blocks[1].attn.qkv.weight)
    save_file(before.state_dict(), tmp_path / "after.safetensors")
    after = create_network("swapped", 5, 64, arguments, str(tmp_path / "after.safetensors"))
    assert torch.equal(after.eval()(images()), before.eval()(images()))
    assert create_network("swapped", 3, 64, arguments, str(tmp_path / "after.safetensors"), True).num_classes == 3


def test_the_refusal_of_a_folder_names_the_options_that_train_on_with_it(tmp_path):
    model = create(pretrained_cfg_overlay={"mean": (0.1, 0.2, 0.3)})
    swap_attention(model, "mhla", [1], block_grid=2)
    save_pretrained(model, tmp_path)
    with pytest.raises(InputError, match=r"must be a name of timm, not a folder: give --model.name swapped") as error:
        create_network(f"local-dir:{tmp_path}")
    words = shlex.split(str(error.value).partition("give ")[2])
    options = {name.removeprefix("--model."): value for name, value in zip(words[::2], words[1::2], strict=True)}
    plain = {name: value if name in ("name", "checkpoint") else json.loads(value) for name, value in options.items()}
    network = create_network(**plain).eval()
    assert torch.equal(network(images()), model(images())) and network.pretrained_cfg["mean"] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("kind", ["ViT", "DeiT", "Dinov2", "Dinov2WithRegisters", "DINOv3ViT"])
def test_models_of_transformers_compute_what_they_computed(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    registers = {"num_register_tokens": 3} if kind in ("Dinov2WithRegisters", "DINOv3ViT") else {}
    config = getattr(transformers, f"{kind}Config")(**sizes, **registers, image_size=64, patch_size=16)
    torch.manual_seed(0)
    model = with_large_weights(getattr(transformers, f"{kind}Model")(config))
    size = (96, 32) if kind.startswith("D") and kind != "DeiT" else (64, 64)
    before = model(images(*size)).last_hidden_state
    swapped = copy.deepcopy(model)
    swap_attention(swapped, "softmax")
    pairs = attention_pairs(model, swapped)
    tell_grid(pairs, images(*size))
    with attention_errors(pairs, learn=False) as errors:
        close(model(images(*size)).last_hidden_state, before)
    assert len(errors) == 2 and all(float(error.max()) < 1e-8 for error in errors)
    close(swapped(images(*size)).last_hidden_state, before)
    swap_attention(model, "mhla", block_grid=2)
    assert model(images(*size)).last_hidden_state.isfinite().all()
    with pytest.raises(InputError, match=r"was not made by timm.create_model"):
        headmix_vision.save_pretrained(model, "nowhere")


def small_dinov2() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64, "patch_size": 16}
    torch.manual_seed(0)
    return with_large_weights(transformers.Dinov2Model(transformers.Dinov2Config(**sizes)))


def test_models_of_transformers_take_padding():
    model, mask = small_dinov2(), torch.ones(2, 17, dtype=torch.long)
    mask[0, 9:] = 0
    softmax = copy.deepcopy(model)
    swap_attention(softmax, "softmax")
    close(
        softmax(images(), attention_mask=mask).last_hidden_state, model(images(), attention_mask=mask).last_hidden_state
    )
    swap_attention(model, "linear")
    masked, plain = model(images(), attention_mask=mask).last_hidden_state, model(images()).last_hidden_state
    close(masked[1], plain[1])
    assert not torch.allclose(masked[0], plain[0], atol=1e-3)
    with pytest.raises(InputError, match="attn_mask and is_causal need the 'softmax' core"):
        model(images(), attention_mask=torch.ones(2, 1, 17, 17, dtype=torch.bool).tril())


@pytest.mark.slow
def test_models_of_transformers_compile_and_export():
    model, mask = small_dinov2(), torch.ones(2, 17, dtype=torch.long)
    mask[0, 9:] = 0
    swap_attention(model, "mhla", block_grid=2)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    exported = torch.export.export(model, (images(),)).module()
    for called in (compiled, exported):
        close(called(images()).last_hidden_state, model(images()).last_hidden_state)
    close(
        compiled(images(), attention_mask=mask).last_hidden_state,
        model(images(), attention_mask=mask).last_hidden_state,
    )
