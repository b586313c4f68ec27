"""The diffusion transformers: what users of timm and of diffusers call, and the official key names."""

import argparse
import math
import os
from pathlib import Path

import numpy as np
import pytest
import timm
import timm.optim
import torch

from headmix_vision.diffusion import HeadMixDiTPipeline, ObjectiveConfig, create_scheduler
from headmix_vision.layers import CORES as REGISTERED
from headmix_vision.models import HeadMixDiT
from headmix_vision.models.convert_dit import convert_dit_state_dict, read_dit_weights
from headmix_vision.models.dit_blocks import sincos_positions
from headmix_vision.models.names import FAMILIES

SMALL = {"input_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
CORES = ("softmax", "linear", "mhla", "hih")
ATTENTIONS = (*CORES, *(f"{core}_{mix}" for core in CORES for mix in ("iha", "mea")))
# A model is the same block many times: one is enough to try a name.
DEPTHS = [pytest.param({"depth": 1}, id="block"), pytest.param({}, id="whole", marks=pytest.mark.slow)]


def create(name="dit_mhla_s_2", filled=True, **kwargs):
    """A small model; `filled` replaces the zeros of adaLN-Zero, with which the output would be zero."""
    torch.manual_seed(0)
    options = {**SMALL, "block_grid": (2, 2), **kwargs}
    model = timm.create_model(name, **options)
    if filled:
        for parameter in model.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def batch(size=(8, 8), count=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, *size, generator=generator), torch.tensor([1.0, 500.0, 999.0]), torch.tensor([0, 4, 5])


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", sorted(FAMILIES["dit"]))
def test_every_registered_name(name, depth):
    with torch.device("meta"):
        model = timm.create_model(name, **depth)
        x = torch.empty(2, *model.pretrained_cfg["input_size"])
        out = model(x, torch.zeros(2), torch.zeros(2, dtype=torch.long))
    assert out.shape == x.shape
    words = name.split("_")
    assert timm.is_model(name) and model.config.core == (words[1] if words[1] in REGISTERED else "softmax")
    assert model.config.head_mix == next((mix for mix in ("iha", "mea") if mix in words), None)
    assert model.config.output_norm == ("mea" in words or "hih" in words)


def test_sizes_are_the_official_ones():
    """Parameters of DiT-S/2 to DiT-XL/2 in millions (arXiv 2212.09748, table 4), fixed positions not counted."""
    for size, expected in {"s": 33, "b": 130, "l": 458, "xl": 675}.items():
        with torch.device("meta"):
            model = timm.create_model(f"dit_softmax_{size}_2", learned_variance=True)
        assert round(sum(p.numel() for p in model.parameters()) / 1e6) == expected


@pytest.mark.parametrize("core", ATTENTIONS)
@pytest.mark.parametrize("options", [{}, {"cpe": True, "output_gate": True, "output_norm": True, "qk_norm": True}])
def test_every_parameter_receives_a_gradient(core, options):
    model = create(f"dit_{core}_s_2", **options)
    for name, parameter in model.named_parameters():
        if name.endswith(".shares"):  # inside their bounds, where every gradient passes
            torch.nn.init.uniform_(parameter)
    x, t, y = batch()
    model(x, t, y).square().sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]


def test_starts_as_zero_and_every_block_as_the_identity():
    model = create(filled=False)
    x, t, y = batch()
    assert not model(x, t, y).any()
    tokens, condition = torch.randn(2, 16, 32), torch.randn(2, 32)
    assert torch.equal(model.blocks[0](tokens, condition, (4, 4)), tokens)


def test_learned_variance_doubles_the_channels_and_the_null_class_is_optional():
    x, t, y = batch()
    assert create(learned_variance=True)(x, t, y).shape == (3, 8, 8, 8)
    unconditional = create(num_classes=0)
    assert unconditional(x, t).shape == x.shape and not unconditional.has_null_class
    without = create(class_dropout=0.0)
    assert not without.has_null_class
    with pytest.raises(ValueError, match="label 5 is out of range: the model takes 0 to 4"):
        without(x, t, y)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_label_dropout_acts_in_training_only(share):
    model = create(class_dropout=share)
    table = model.y_embedder.embedding_table.weight
    labels = torch.zeros(4000, dtype=torch.long)
    dropped = (model.y_embedder(labels) == table[5]).all(1).float().mean()
    assert abs(dropped - share) < 5 * math.sqrt(0.25 / 4000)
    assert torch.equal(model.eval().y_embedder(labels), table[labels])


def test_initial_scales():
    model = create(filled=False, embed_dim=96, num_classes=200)
    for name in ("x_embedder.proj", "blocks.1.attn.qkv", "blocks.0.attn.proj", "blocks.0.mlp.fc1"):
        layer = model.get_submodule(name)
        weight = layer.weight.flatten(1)  # a patch is one input, of all its pixels
        bound = math.sqrt(6 / sum(weight.shape))
        assert 0.9 * bound < weight.abs().max() <= bound and not layer.bias.any()
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    for name in ("t_embedder.mlp.0", "t_embedder.mlp.2", "y_embedder.embedding_table"):
        assert model.get_submodule(name).weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not any(p.any() for block in model.blocks for p in block.adaLN_modulation.parameters())


@pytest.mark.parametrize(
    ("core", "matrices"),
    [
        ("mhla", ["core.mixing.weight"]),
        ("hih", ["core.mask.weight"]),
        ("hih_iha", ["core.mask.weight", "core.shares", "head_mix.mix", "head_mix.collapse"]),
        ("mhla_mea", ["core.mixing.weight", "head_mix.mix"]),
    ],
)
def test_mixing_masks_labels_and_biases_are_not_decayed(core, matrices):
    model = create(f"dit_{core}_s_2")
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1.0, weight_decay=0.05)
    names = {p: n for n, p in model.named_parameters()}
    decayed = {names[p] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    own = {f"blocks.{i}.attn.{matrix}" for i in range(2) for matrix in matrices} | {"y_embedder.embedding_table.weight"}
    assert own <= set(names.values())
    assert decayed == {n for p, n in names.items() if p.ndim > 1} - own


def official_positions(dim, side):
    """The published definition, by another route: outer products per axis, column first."""
    frequencies = np.array([1 / 10000 ** (i / (dim / 4)) for i in range(dim // 4)])
    rows = []
    for row in range(side):
        for column in range(side):
            parts = [f(place * frequencies) for place in (column, row) for f in (np.sin, np.cos)]
            rows.append(np.concatenate(parts))
    return torch.tensor(np.array(rows), dtype=torch.float32)


def test_positions():
    like = torch.empty(0)
    torch.testing.assert_close(sincos_positions(48, (4, 4), (4, 4), like), official_positions(48, 4), rtol=0, atol=1e-6)
    wide = sincos_positions(48, (2, 4), (2, 4), like).view(2, 4, 48)
    assert torch.equal(wide[0, :, :24], wide[1, :, :24]) and torch.equal(wide[:, 0, 24:], wide[:, 3, 24:])
    # twice the resolution: the mean place of two neighbours is the coarse token's, so its slow waves are between
    fine = sincos_positions(8, (8, 8), (4, 4), like).view(8, 8, 8)
    coarse = sincos_positions(8, (4, 4), (4, 4), like).view(4, 4, 8)
    assert fine[0, 2, 1] < coarse[0, 1, 1] < fine[0, 3, 1]


def test_rotary_positions_tell_the_places_of_an_image():
    """Attention without positions would give rolled patches the rolled output."""
    model = create("dit_softmax_s_2", positions="rope").eval()
    for size in ((8, 8), (8, 16)):
        x, t, y = batch(size)
        for axis in (2, 3):
            assert not torch.allclose(model(x.roll(4, axis), t, y), model(x, t, y).roll(4, axis), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("core", ATTENTIONS)
def test_other_resolutions_in_one_model(core):
    model = create(f"dit_{core}_s_2", cpe=True).eval()
    for size in ((8, 8), (8, 16), (24, 8), (16, 16), (8, 8)):
        x, t, y = batch(size)
        out = model(x, t, y)
        assert out.shape == x.shape
        other = create(f"dit_{core}_s_2", cpe=True, input_size=size).eval()
        other.load_state_dict(model.state_dict())
        other.base_grid = model.base_grid
        torch.testing.assert_close(out, other(x, t, y))


@pytest.mark.parametrize("core", [*CORES, "mhla_iha", "hih_mea"])
def test_gradient_checkpointing_computes_blocks_twice_and_changes_nothing(core):
    model = create(f"dit_{core}_s_2", class_dropout=0.0)
    calls = []
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(lambda module, args: calls.append(module))
    x, t, y = batch()
    gradients = []
    for enable in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enable)
        assert model.is_gradient_checkpointing == enable
        calls.clear()
        model(x, t, y.clamp(max=4)).square().sum().backward()
        assert len(calls) == (4 if enable else 2)
        gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_save_and_load_as_a_diffusers_model(tmp_path):
    model = create(
        core_args={"feature_map": "elu1"}, output_gate=True, input_size=(8, 16), learned_variance=True
    ).eval()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").is_file() and (tmp_path / "diffusion_pytorch_model.safetensors").is_file()
    loaded = HeadMixDiT.from_pretrained(tmp_path, low_cpu_mem_usage=False)
    x, t, y = batch((8, 16))
    assert torch.equal(loaded(x, t, y), model(x, t, y))
    assert loaded.config.core_args == {"feature_map": "elu1"} and not loaded.training


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dit_iha_s_2", {"head_mix_args": {"pseudo_heads": 3}, "core_args": {"window": (3, 1)}, "global_every": 2}),
        ("dit_mhla_mea_s_2", {"head_mix_args": {"component_heads": 1}, "global_every": 2}),
        ("dit_hih_iha_s_2", {"head_mix_args": {"collapse": "across_heads"}}),
    ],
)
def test_mixed_heads_come_back_with_the_pipeline(name, options, tmp_path):
    """With their options and their schedule, of which the configuration tells."""
    model = create(name, **options).eval()
    HeadMixDiTPipeline(model, create_scheduler(None, ObjectiveConfig())).save_pretrained(tmp_path)
    loaded = HeadMixDiTPipeline.from_pretrained(tmp_path).transformer
    x, t, y = batch()
    assert torch.equal(loaded(x, t, y), model(x, t, y))
    given = {**options, "core_args": options.get("core_args") and {"window": [3, 1]}}
    assert all(loaded.config[name] == value for name, value in given.items())
    assert HeadMixDiT(**loaded.architecture).state_dict().keys() == model.state_dict().keys()
    plain = [block.attn.head_mix is None for block in loaded.blocks]
    assert plain == [False, "global_every" in options]


@pytest.mark.parametrize("core", CORES)
def test_models_of_interleaved_heads_start_as_those_of_their_core_alone(core):
    plain, mixed = create(f"dit_{core}_s_2", cpe=True).eval(), create(f"dit_{core}_iha_s_2", cpe=True).eval()
    missing, unexpected = mixed.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and all(".head_mix." in key or key.endswith(".core.shares") for key in missing)
    for size in ((8, 8), (8, 16)):
        x, t, y = batch(size)
        torch.testing.assert_close(mixed(x, t, y), plain(x, t, y), rtol=1e-4, atol=1e-5)


def test_another_block_grid_is_stored():
    model = create().eval()
    model.set_block_grid((4, 4))
    assert tuple(model.config.block_grid) == (4, 4) and model.blocks[1].attn.core.mixing().shape == (16, 16)
    again = create(block_grid=(4, 4)).eval()
    again.load_state_dict(create().state_dict())
    x, t, y = batch()
    torch.testing.assert_close(model(x, t, y), again(x, t, y))
    with pytest.raises(ValueError, match="SoftmaxCore has no token blocks"):
        create("dit_softmax_s_2").set_block_grid((2, 2))


def test_embedded_patches_are_contiguous():
    """The channels-first strides of a convolution would last through all blocks; a batch of one has a stride, too."""
    for count in (1, 3):
        tokens = create().x_embedder(batch(count=count)[0])
        assert tokens.stride() == (tokens[0].numel(), tokens.shape[2], 1)


@pytest.mark.parametrize("core", ["mhla", pytest.param("hih", marks=pytest.mark.slow), "linear_iha", "softmax_mea"])
def test_compiles_as_one_graph(core):
    model = create(f"dit_{core}_s_2", depth=1, cpe=True, output_gate=True).eval()
    x, t, y = batch()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x, t, y), model(x, t, y))


def official_shapes(dim, depth, tokens, in_channels=4, patch=2, classes=1000, mlp=4):
    """Names and shapes of an official checkpoint, written out from the published model."""
    shapes = {
        "pos_embed": (1, tokens, dim),
        "x_embedder.proj.weight": (dim, in_channels, patch, patch),
        "x_embedder.proj.bias": (dim,),
        "t_embedder.mlp.0.weight": (dim, 256),
        "t_embedder.mlp.0.bias": (dim,),
        "t_embedder.mlp.2.weight": (dim, dim),
        "t_embedder.mlp.2.bias": (dim,),
        "y_embedder.embedding_table.weight": (classes + 1, dim),
        "final_layer.linear.weight": (patch * patch * in_channels * 2, dim),
        "final_layer.linear.bias": (patch * patch * in_channels * 2,),
        "final_layer.adaLN_modulation.1.weight": (2 * dim, dim),
        "final_layer.adaLN_modulation.1.bias": (2 * dim,),
    }
    for i in range(depth):
        linears = {
            "attn.qkv": (3 * dim, dim),
            "attn.proj": (dim, dim),
            "mlp.fc1": (mlp * dim, dim),
            "mlp.fc2": (dim, mlp * dim),
            "adaLN_modulation.1": (6 * dim, dim),
        }
        for name, shape in linears.items():
            shapes |= {f"blocks.{i}.{name}.weight": shape, f"blocks.{i}.{name}.bias": shape[:1]}
    return shapes


def test_official_xl_2_has_our_names_and_shapes():
    """At the true size, on the meta device: every weight is used, and only mixing matrices are new."""
    source = {name: torch.empty(shape, device="meta") for name, shape in official_shapes(1152, 28, 256).items()}
    with torch.device("meta"):
        softmax = timm.create_model("dit_softmax_xl_2", learned_variance=True)
        mhla = timm.create_model("dit_mhla_xl_2", learned_variance=True, cpe=True)
    converted = convert_dit_state_dict(source, softmax)
    assert (converted.new_parameters, converted.unused) == ([], [])
    assert {name: value.shape for name, value in converted.state_dict.items()} == {
        name: torch.Size(value.shape) for name, value in source.items() if name != "pos_embed"
    }
    converted = convert_dit_state_dict(source, mhla)
    new = [f"blocks.{i}.attn.{name}" for i in range(28) for name in ("cpe.proj.weight", "cpe.proj.bias")]
    assert sorted(converted.new_parameters) == sorted(new + [f"blocks.{i}.attn.core.mixing.weight" for i in range(28)])
    assert converted.unused == []


def random_official(dim=32, depth=2, side=4):
    generator = torch.Generator().manual_seed(2)
    shapes = official_shapes(dim, depth, side**2, classes=5)
    state = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**state, "pos_embed": official_positions(dim, side)[None]}


def official_forward(w, x, t, y, heads, depth, patch=2):
    """The published computation with plain functions on an official state dict."""
    from torch.nn.functional import conv2d, gelu, layer_norm, linear, scaled_dot_product_attention, silu

    def dense(name, value):
        return linear(value, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(value, shift, scale):
        return layer_norm(value, value.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]

    tokens = conv2d(x, w["x_embedder.proj.weight"], w["x_embedder.proj.bias"], stride=patch)
    side = tokens.shape[-1]
    tokens = tokens.flatten(2).mT + w["pos_embed"]
    angles = t[:, None] * torch.exp(-math.log(10000) * torch.arange(128) / 128)
    c = dense("t_embedder.mlp.2", silu(dense("t_embedder.mlp.0", torch.cat([angles.cos(), angles.sin()], 1))))
    c = c + w["y_embedder.embedding_table.weight"][y]
    for i in range(depth):
        b = f"blocks.{i}"
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = dense(f"{b}.adaLN_modulation.1", silu(c)).chunk(6, 1)
        qkv = dense(f"{b}.attn.qkv", norm(tokens, shift_a, scale_a)).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2)
        tokens = tokens + gate_a[:, None] * dense(f"{b}.attn.proj", attended)
        hidden = gelu(dense(f"{b}.mlp.fc1", norm(tokens, shift_m, scale_m)), approximate="tanh")
        tokens = tokens + gate_m[:, None] * dense(f"{b}.mlp.fc2", hidden)
    shift, scale = dense("final_layer.adaLN_modulation.1", silu(c)).chunk(2, 1)
    out = dense("final_layer.linear", norm(tokens, shift, scale)).view(len(x), side, side, patch, patch, -1)
    return torch.einsum("nhwpqc->nchpwq", out).reshape(len(x), -1, side * patch, side * patch)


def test_softmax_computes_what_the_official_model_computes():
    source = random_official()
    model = create("dit_softmax_s_2", learned_variance=True).eval()
    model.load_state_dict(convert_dit_state_dict(source, model).state_dict)
    x, t, y = batch()
    torch.testing.assert_close(model(x, t, y), official_forward(source, x, t, y, 2, 2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrapped", [False, True])
def test_reading_a_local_checkpoint(tmp_path, wrapped):
    source = random_official()
    path = tmp_path / "DiT.pt"
    torch.save({"ema": source, "model": {}, "args": argparse.Namespace(lr=1e-4)} if wrapped else source, path)
    loaded = read_dit_weights(path)
    assert loaded.keys() == source.keys()
    model = create("dit_mhla_s_2", learned_variance=True)
    converted = convert_dit_state_dict(loaded, model)
    assert converted.new_parameters == [f"blocks.{i}.attn.core.mixing.weight" for i in range(2)]
    model.load_state_dict(converted.state_dict)
    assert torch.equal(model.blocks[1].mlp.fc1.weight, source["blocks.1.mlp.fc1.weight"])


class Bomb:
    """Makes a folder when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_nothing_but_weights_is_unpickled(tmp_path):
    torch.save({"ema": random_official(), "optimizer": Bomb(tmp_path / "executed")}, tmp_path / "DiT.pt")
    with pytest.raises(ValueError, match="is not a file of weights; nothing was loaded"):
        read_dit_weights(tmp_path / "DiT.pt")
    assert not (tmp_path / "executed").exists()


def test_checkpoints_that_do_not_fit(tmp_path):
    source, model = random_official(), create("dit_mhla_s_2", learned_variance=True)
    with pytest.raises(ValueError, match="learned_variance=True"):
        convert_dit_state_dict(source, create("dit_mhla_s_2"))
    with pytest.raises(ValueError, match="has 2 blocks, the model 3"):
        convert_dit_state_dict(source, create("dit_mhla_s_2", depth=3))
    with pytest.raises(ValueError, match="one more row for the null class"):
        convert_dit_state_dict(source, create("dit_mhla_s_2", learned_variance=True, num_classes=6))
    with pytest.raises(ValueError, match="not the fixed sine-cosine"):
        convert_dit_state_dict({**source, "pos_embed": torch.randn(1, 16, 32)}, model)
    with pytest.raises(ValueError, match="not a DiT"):
        convert_dit_state_dict({"weight": torch.ones(1)}, model)
    with pytest.raises(ValueError, match=r"no checkpoint at .*facebookresearch/DiT"):
        read_dit_weights(tmp_path / "absent.pt")
    (tmp_path / "text.pt").write_text("no weights")
    with pytest.raises(ValueError, match="is not a file of weights; nothing was loaded"):
        read_dit_weights(tmp_path / "text.pt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_size": 9}, "latent size 9x9 is not a multiple of the patch size 2x2"),
        ({"num_classes": 2.5}, "num_classes must be a whole number of at least 0, got 2.5"),
        ({"num_classes": -1}, "num_classes must be a whole number of at least 0, got -1"),
        ({"class_dropout": -0.5}, r"class_dropout must be a finite number from 0 to 1, got -0\.5"),
        ({"mlp_ratio": -0.5}, "mlp_ratio must be"),
        ({"class_dropout": 1.0}, "class_dropout must be below 1"),
        ({"class_dropout": float("nan")}, "class_dropout must be a finite number from 0 to 1, got nan"),
        ({"num_heads": 0}, "num_heads must be a whole number of at least 1, got 0"),
        ({"mlp_ratio": 0}, "leaves the MLP no width"),
        ({"input_size": (8,)}, "input_size must be one whole number or two"),
        ({"frame_rate": 8.0}, r"frame_rate=8\.0 applies only to clips"),
        ({"positions": "rope", "embed_dim": 4}, "even head dim of at least 4, got 2"),
        ({"core_args": {"conv_size": 3}}, "core_args of 'mhla' has no 'conv_size'"),
        ({"coreargs": {}}, "dit_mhla_s_2 has no 'coreargs'; did you mean core_args"),
        ({"block_grid": (5, 4)}, "larger than the token grid"),
        ({"core": "none"}, "core must be one of"),
        ({"embed_dim": 34}, "multiple of 4"),
        ({"head_mix_args": {"pseudo_heads": 2}}, "head_mix_args=.* needs a head_mix"),
        (
            {"head_mix": "iha", "head_mix_args": {"pseudo_heads": True}},
            "pseudo_heads must be a whole number of at least 1",
        ),
        ({"head_mix": "iha", "head_mix_args": {"collapse": "sum"}}, "collapse must be one of"),
        ({"head_mix": "mea", "head_mix_args": {"component_heads": 3}}, "component_heads must be from 1 to 2"),
        ({"core": "softmax", "core_args": {"window": 5}}, r"window \(5, 5\) is larger than the token grid \(4, 4\)"),
        ({"head_mix": "iha", "global_every": 1}, "global_every must be 0, or at least 2, got 1"),
        ({"head_mix": "iha", "global_every": 2.0}, "global_every must be a whole number of at least 0, got 2.0"),
        ({"global_every": 5}, "global_every=5 needs a head_mix or a window"),
        ({"in_chans": 4}, "takes in_channels, not in_chans"),
        ({"features_only": True}, "features_only"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        create(**arguments)


def test_wrong_inputs_are_refused():
    model = create()
    x, t, y = batch()
    for wrong, message in (
        ((x[:, :3], t, y), r"x must be \[B, 4, H, W\]"),
        ((x[:, :, :7], t, y), "latent size 7x8 is not a multiple of the patch size 2x2"),
        ((x, t, None), "needs labels"),
        ((x, t, y + 1), "label 6 is out of range: the model takes 0 to 5"),
        ((x, t, y - 1), "label -1 is out of range"),
        ((x, t, y.float()), "labels must be int64"),
        ((x, t, y, 4.0), r"frame_rate=4\.0 applies only to clips"),
    ):
        with pytest.raises(ValueError, match=message):
            model(*wrong)
    with pytest.raises(ValueError, match="unconditional"):
        create(num_classes=0)(x, t, y)


def test_images_are_not_taken_in_pieces():
    with pytest.raises(ValueError, match="stream applies only to clips"):
        create(core_args={"causal": "rows"}).stream(*batch())


def test_wrong_calls_name_what_is_allowed():
    model = create()
    x, t, y = batch()
    for arguments, message in (
        ((x[..., :2, :2], t, y), "larger than the token grid"),
        ((x, t[:2], y), r"t must be one number or \[B\] with B = 3, got shape \(2,\)"),
        ((x, t, y[:2]), r"labels y must be \[B\] with B = 3, got shape \(2,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            model(*arguments)


@pytest.mark.parametrize("core", ["mhla", "hih", "hih_iha", "mhla_mea"])
def test_device_and_type_are_no_part_of_the_configuration(core):
    model = create(f"dit_{core}_s_2", dtype=torch.bfloat16, device="cpu", cpe=True, output_gate=True)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    x, t, y = batch()
    assert model(x.bfloat16(), t, y).isfinite().all()
    assert not {"device", "dtype"} & model.architecture.keys()
    empty = create(f"dit_{core}_s_2", device="meta", filled=False)
    assert all(p.is_meta for p in empty.parameters())
