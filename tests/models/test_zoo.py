"""One suite over the registered models: what users of timm call."""

import copy
import inspect

import pytest
import timm
import timm.optim
import timm.utils
import torch
import torch.fx
from timm.layers import PatchEmbed

import headmix_vision
from headmix_vision.layers import CORES, HEAD_MIXES
from headmix_vision.models.names import FAMILIES

NAMES = sorted({**FAMILIES["deit"], **FAMILIES["vit"]})
# One of every family and core, and of every core and mix, small enough to run.
SMALL = [
    "deit_softmax_tiny",
    "deit_linear_tiny",
    "deit_mhla_tiny",
    "deit_hih_tiny",
    "vit_softmax_tiny",
    "vit_linear_tiny",
    "vit_mhla_tiny",
    "vit_hih_tiny",
    "deit_iha_tiny",
    "vit_mea_tiny",
    "vit_linear_iha_tiny",
    "deit_linear_mea_tiny",
    "vit_mhla_iha_tiny",
    "deit_mhla_mea_tiny",
    "deit_hih_iha_tiny",
    "vit_hih_mea_tiny",
]


slow = pytest.mark.slow
# A model is the same block many times: one is enough to try a name.
DEPTHS = [pytest.param({"depth": 1}, id="block"), pytest.param({}, id="whole", marks=pytest.mark.slow)]


def core_and_mix(name):
    """Read a core and a mix, or None, from a name of which a mix alone stands for that mix over softmax."""
    first, second = name.split("_")[1:3]
    if first in HEAD_MIXES:
        return "softmax", first
    return first, second if second in HEAD_MIXES else None


def create(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **{"img_size": 64, "depth": 2, "num_classes": 7, **kwargs})


def images(batch=2, size=(64, 64), chans=3):
    return torch.randn(batch, chans, *size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", NAMES)
def test_every_registered_name(name, depth):
    """Built and run at its true width and resolution, on the meta device."""
    with torch.device("meta"):
        model = timm.create_model(name, **depth)
    chans, height, width = model.pretrained_cfg["input_size"]
    out = model(torch.empty(2, chans, height, width, device="meta"))
    assert out.shape == (2, model.num_classes) == (2, model.pretrained_cfg["num_classes"])
    assert model.pretrained_cfg["architecture"] == name
    assert timm.is_model(name) and name in timm.list_models("*_" + name.split("_")[1] + "_*")
    assert {type(block.attn.core) for block in model.blocks} == {CORES[core_and_mix(name)[0]]}
    assert {type(block.attn.head_mix) for block in model.blocks} == {HEAD_MIXES.get(core_and_mix(name)[1], type(None))}
    assert timm.data.resolve_model_data_config(model)["input_size"] == (chans, height, width)


def test_names_of_the_zoo():
    for core in ("softmax", "linear", "mhla", "hih"):
        for family in ("deit", "vit"):
            for size in ("tiny", "small", "base", "large"):
                short = f"{family}_{core}_{size}"
                assert {short, f"{short}_patch16_224", f"{short}_patch16_384"} <= set(timm.list_models("*"))
                for mix in ("iha", "mea"):
                    assert f"{family}_{core}_{mix}_{size}" in timm.list_models(f"{family}_*_{mix}_*")
    assert FAMILIES["deit"]["deit_mhla_small"] == FAMILIES["deit"]["deit_mhla_small_patch16_224"]
    for family, variants in FAMILIES.items():  # a mix alone is short for that mix over softmax
        for mix in ("iha", "mea"):
            short, full = f"{family}_{mix}_", f"{family}_softmax_{mix}_"
            alone = {name: variant for name, variant in variants.items() if name.startswith(short)}
            assert len(alone) == len(variants) / (3 * len(CORES) + 2)
            assert all(variants[name.replace(short, full)] == variant for name, variant in alone.items())
    assert len(timm.list_models("deit_mhla_*_small")) == 2 and len(timm.list_models("*_hih_iha_tiny")) == 2
    assert "headmix_vit" in timm.list_modules()
    assert inspect.getmodule(timm.model_entrypoint("deit_mhla_small")) is headmix_vision.models.headmix_vit


def test_published_accuracies_are_those_of_models_without_a_mix():
    noted = {name for name in NAMES if timm.get_pretrained_cfg(name).notes}
    assert {core_and_mix(name)[1] for name in noted} == {None} and "deit_mhla_small" in noted


def test_sizes_are_the_official_ones():
    """Parameters of DeiT and ViT in millions (arXiv 2012.12877, 2010.11929)."""
    for size, expected in {"tiny": 6, "small": 22, "base": 87, "large": 304}.items():
        for family in ("deit", "vit"):
            with torch.device("meta"):
                model = timm.create_model(f"{family}_softmax_{size}")
            assert round(sum(p.numel() for p in model.parameters()) / 1e6) == expected


def test_softmax_models_are_timms_own():
    for ours, theirs in (("deit_softmax_tiny", "deit_tiny_patch16_224"), ("vit_softmax_tiny", "vit_tiny_patch16_224")):
        a, b = create(ours).eval(), create(theirs).eval()
        b.load_state_dict(a.state_dict())
        torch.testing.assert_close(a(images()), b(images()))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("options", [{}, {"cpe": True, "output_gate": True, "output_norm": True, "qk_norm": True}])
def test_every_parameter_receives_a_gradient(name, options):
    model = create(name, drop_path_rate=0.1, **options)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(".shares"):  # inside their bounds, where every gradient passes
            torch.nn.init.uniform_(parameter)
    torch.manual_seed(1)  # of drop path, which leaves out no layer in all images
    out = model(images())
    out.square().sum().backward()
    assert out.shape == (2, 7)
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not [n for n, p in model.named_parameters() if not p.grad.any()]


@pytest.mark.parametrize("name", SMALL)
def test_features(name):
    model = create(name).eval()
    x = images()
    final, intermediates = model.forward_intermediates(x, indices=[0, 1])
    assert [f.shape for f in intermediates] == [(2, 192, 4, 4)] * 2
    torch.testing.assert_close(model.forward_features(x), final)
    torch.testing.assert_close(model.forward_head(final), model(x))
    assert model.forward_head(final, pre_logits=True).shape == (2, model.num_features)

    backbone = create(name, features_only=True, out_indices=(0, 1)).eval()
    assert [f.shape for f in backbone(x)] == [
        (2, c, 64 // r, 64 // r)
        for c, r in zip(backbone.feature_info.channels(), backbone.feature_info.reduction(), strict=True)
    ]
    model.prune_intermediate_layers(indices=[0])
    assert len(model.blocks) == 1


@pytest.mark.parametrize("name", SMALL)
def test_classifier(name):
    model = create(name).eval()
    assert isinstance(model.get_classifier(), torch.nn.Linear)
    model.reset_classifier(3)
    assert model(images()).shape == (2, 3)
    model.reset_classifier(0)
    assert isinstance(model.get_classifier(), torch.nn.Identity)
    assert model(images()).shape == (2, 192)
    assert create(name, num_classes=0)(images()).shape == (2, 192)


@pytest.mark.parametrize("name", SMALL)
def test_input_channels_pooling_and_prefix_tokens(name):
    assert create(name, in_chans=1)(images(chans=1)).shape == (2, 7)
    for kwargs in (
        {"global_pool": "avg", "class_token": False},
        {"global_pool": "token", "class_token": True, "reg_tokens": 3},
        {"global_pool": "map"},
        {"global_pool": "avg", "class_token": True, "no_embed_class": True, "reg_tokens": 1},
    ):
        assert create(name, **kwargs)(images()).shape == (2, 7)


@pytest.mark.parametrize("name", SMALL)
def test_gradient_checkpointing_computes_blocks_twice_and_changes_nothing(name):
    model = create(name)
    calls = []
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(lambda module, args: calls.append(module))
    gradients = []
    for enable in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enable)
        calls.clear()
        model(images()).square().sum().backward()
        assert len(calls) == (4 if enable else 2)
        gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize(
    ("name", "matrices"),
    [
        ("deit_mhla_tiny", ["core.mixing.weight"]),
        ("vit_mhla_tiny", ["core.mixing.weight"]),
        ("deit_hih_tiny", ["core.mask.weight"]),
        ("deit_hih_iha_tiny", ["core.mask.weight", "core.shares", "head_mix.mix", "head_mix.collapse"]),
        ("vit_mhla_mea_tiny", ["core.mixing.weight", "head_mix.mix"]),
    ],
)
def test_weight_decay_and_layer_decay(name, matrices):
    model = create(name)
    skipped = model.no_weight_decay()
    assert {n for n in skipped if ".attn." in n} == {f"blocks.{i}.attn.{m}" for i in range(2) for m in matrices}
    assert "pos_embed" in skipped
    first = f"blocks.0.attn.{matrices[-1]}"
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1.0, weight_decay=0.05, layer_decay=0.5)
    names = {p: n for n, p in model.named_parameters()}
    decay, scale = {}, {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            decay[names[p]], scale[names[p]] = group["weight_decay"], group["lr_scale"]
    assert set(decay) == set(names.values())
    for n, p in model.named_parameters():
        assert (decay[n] == 0) == (p.ndim == 1 or n in skipped)
    assert scale["patch_embed.proj.weight"] < scale[first]
    assert scale[first] < scale["blocks.1.attn.qkv.weight"] < scale["head.weight"] == 1


@pytest.mark.parametrize("name", SMALL)
def test_resolution(name):
    model = create(name).eval()
    model.set_input_size((96, 160))
    assert model(images(size=(96, 160))).shape == (2, 7)
    assert create(name, img_size=(64, 96))(images(size=(64, 96))).shape == (2, 7)

    larger = create(name, img_size=96).eval()
    larger.load_state_dict(create(name).state_dict())
    resized = create(name).eval()
    resized.set_input_size((96, 96))
    torch.testing.assert_close(larger(images(size=(96, 96))), resized(images(size=(96, 96))))


@pytest.mark.parametrize("name", SMALL)
def test_dynamic_image_size(name):
    model, fixed = create(name, dynamic_img_size=True).eval(), create(name).eval()
    torch.testing.assert_close(model(images()), fixed(images()))
    for size in ((64, 160), (160, 64), (96, 96)):
        fixed = create(name).eval()
        fixed.set_input_size(size)
        torch.testing.assert_close(model(images(size=size)), fixed(images(size=size)))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_blocks_get_contiguous_tokens(dynamic, plain):
    """The channels-first strides of a plain convolution would last through all blocks."""
    model = create("deit_mhla_tiny", dynamic_img_size=dynamic, **({"embed_layer": PatchEmbed} if plain else {}))
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda block, args: seen.append(args[0]))
    model(images())
    assert seen[0].is_contiguous()


def test_loading_resamples_positions_and_mixing_to_another_block_grid():
    source = create("deit_mhla_tiny", block_grid=(2, 2))
    target = create("deit_mhla_tiny", img_size=128, block_grid=(4, 4))
    target.load_state_dict(source.state_dict())
    assert target.blocks[0].attn.core.mixing().shape == (16, 16)
    again = create("deit_mhla_tiny", block_grid=(2, 2))
    again.set_block_grid((4, 4))
    for a, b in zip(target.blocks, again.blocks, strict=True):
        torch.testing.assert_close(a.attn.core.mixing(), b.attn.core.mixing())
    with pytest.raises(ValueError, match="LinearCore has no token blocks"):
        create("deit_linear_tiny").set_block_grid((2, 2))


@pytest.mark.parametrize(
    "prefix",
    [
        {"class_token": True, "reg_tokens": 2},
        {"class_token": True, "reg_tokens": 2, "no_embed_class": True},
        {"class_token": False, "reg_tokens": 3, "global_pool": "avg"},
        {"class_token": False, "global_pool": "avg"},
    ],
    ids=["class-registers", "no-embed-class", "registers", "none"],
)
def test_positions_of_prefix_tokens_stay_when_the_grid_is_resampled(prefix):
    source = create("vit_mhla_tiny", **prefix)
    count = 0 if prefix.get("no_embed_class") else source.num_prefix_tokens
    assert source.pos_embed.shape[1] == count + 16
    with torch.no_grad():
        source.pos_embed[:, :count] = torch.arange(count).view(-1, 1).float()
        source.pos_embed[:, count:] = 7.0
    loaded = create("vit_mhla_tiny", img_size=96, **prefix)
    loaded.load_state_dict(source.state_dict())
    source.set_input_size((96, 96))
    for model in (loaded, source):
        assert model.pos_embed.shape[1] == count + 36
        assert torch.equal(model.pos_embed[0, :count, 0], torch.arange(count).float())
        torch.testing.assert_close(model.pos_embed[:, count:], torch.full((1, 36, 192), 7.0))


def test_attention_dropout_acts_in_training_only():
    model = create("deit_softmax_tiny", attn_drop_rate=0.5)
    plain = create("deit_softmax_tiny")
    plain.load_state_dict(model.state_dict())
    assert (model(images()) - plain(images())).abs().max() > 1e-4
    assert torch.equal(model.eval()(images()), plain.eval()(images()))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_checkpoint_path(tmp_path, suffix):
    import safetensors.torch

    model = create("deit_mhla_tiny").eval()
    path = str(tmp_path / f"model{suffix}")
    save = safetensors.torch.save_file if suffix == ".safetensors" else torch.save
    save(model.state_dict(), path)
    for size in (64, 96):
        overlay = {"input_size": (3, 64, 64)}  # of the weights
        loaded = create("deit_mhla_tiny", img_size=size, checkpoint_path=path, pretrained_cfg_overlay=overlay).eval()
        assert loaded(images(size=(size, size))).shape == (2, 7)
    torch.testing.assert_close(create("deit_mhla_tiny", checkpoint_path=path).eval()(images()), model(images()))


@pytest.mark.parametrize("name", SMALL)
def test_torch_fx(name):
    model = create(name, cpe=True, output_gate=True).eval()
    x = images()
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


@pytest.mark.parametrize(
    ("name", "core_args"),
    [
        *((name, {}) for name in SMALL[:4]),
        ("vit_mhla_iha_tiny", {}),
        *(pytest.param(name, {}, marks=slow) for name in SMALL[4:] if name != "vit_mhla_iha_tiny"),
        pytest.param("vit_hih_tiny", {"mask": "token", "scans": "cross"}, marks=slow),
        pytest.param("vit_softmax_iha_tiny", {"window": 3}, marks=slow),
    ],
)
def test_torch_export_with_a_dynamic_batch(name, core_args):
    model = create(name, depth=1, cpe=True, core_args=core_args).eval()
    exported = torch.export.export(model, (images(3),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for batch in (2, 5):
        torch.testing.assert_close(exported.module()(images(batch)), model(images(batch)))


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=slow) for name in [*SMALL[:3], *SMALL[8:]]),
        *("vit_mhla_tiny", "vit_hih_tiny", "deit_mhla_iha_tiny", "vit_softmax_mea_tiny"),
    ],
)
def test_torch_compile_as_one_graph(name):
    model = create(name, depth=1, cpe=True, output_gate=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = []
    for f in (model, compiled):
        model.zero_grad()
        out = f(images())
        out.square().sum().backward()
        gradients.append([out, *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@slow
def test_inductor_forward_and_backward():
    """The default compiler once: it generates code for what the other test only traces."""
    model = create("deit_mhla_tiny", depth=1)
    expected = torch.autograd.grad(model(images()).square().sum(), list(model.parameters()))
    compiled = torch.compile(model, fullgraph=True)
    for a, b in zip(
        torch.autograd.grad(compiled(images()).square().sum(), list(model.parameters())), expected, strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", SMALL)
def test_ema_copies_and_reinitialisation(name):
    model = create(name)
    ema = timm.utils.ModelEmaV3(model, decay=0.5)
    for p in model.parameters():
        p.data.add_(1.0)
    ema.update(model)
    torch.testing.assert_close(ema.module.pos_embed + 0.5, model.pos_embed)
    torch.testing.assert_close(copy.deepcopy(model).eval()(images()), model.eval()(images()))

    with torch.device("meta"):
        empty = create(name)
    empty.to_empty(device="cpu").init_weights(needs_reset=True)
    assert all(p.isfinite().all() for p in empty.parameters())
    if "mhla" in name:
        torch.testing.assert_close(empty.blocks[0].attn.core.mixing(), create(name).blocks[0].attn.core.mixing())
    if "iha" in name:
        torch.testing.assert_close(empty.blocks[0].attn.head_mix.collapse[:, 1], torch.zeros(3))
    if "mea" in name:
        assert torch.equal(empty.blocks[0].attn.head_mix.mix, torch.eye(3).expand(2, 3, 3))


def test_save_for_hub_and_local_dir(tmp_path):
    """timm's own directory form keeps the arguments of the model."""
    from timm.models import save_for_hf

    model = create("deit_mhla_tiny", cpe=True, core_args={"feature_map": "elu1"}).eval()
    save_for_hf(
        model, str(tmp_path), model_args={"img_size": 64, "depth": 2, "cpe": True, "core_args": {"feature_map": "elu1"}}
    )
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    torch.testing.assert_close(loaded(images()), model(images()))


def test_digits_model_needs_no_arguments():
    model = timm.create_model("deit_mhla_digits")
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    assert model.blocks[0].attn.core.mixing().shape == (16, 16)


@pytest.mark.parametrize(
    "core_args",
    [{"num_sub_heads": 1, "conv_size": 0}, {"mask": "token", "num_sub_heads": 8}, {"scans": "cross"}],
)
@pytest.mark.parametrize("name", ["deit_hih_digits", "deit_hih_tiny"])
def test_every_parameter_of_head_in_head_receives_a_gradient(name, core_args):
    model = timm.create_model(name, img_size=8, patch_size=1, in_chans=1, depth=2, core_args=core_args)
    model(images(chans=1, size=(8, 8))).square().sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]


def test_models_of_head_in_head_and_of_explicit_heads_normalise_the_output_of_heads():
    for name in SMALL:
        on = isinstance(create(name).blocks[0].attn.output_norm, torch.nn.RMSNorm)
        assert on is ("hih" in name or "mea" in name)
    for name in ("deit_hih_tiny", "deit_mhla_mea_tiny"):
        assert isinstance(create(name, output_norm=False).blocks[0].attn.output_norm, torch.nn.Identity)


@pytest.mark.parametrize("name", [name for name in SMALL if "iha" in name])
def test_models_of_interleaved_heads_start_as_those_of_their_core_alone(name):
    """With a class token and registers too, at another resolution, and with more pseudo-heads."""
    sizes = {"class_token": True, "reg_tokens": 1, "dynamic_img_size": True}
    args = {"pseudo_heads": 3, "collapse": "across_heads"}
    plain = create(f"{name.split('_')[0]}_{core_and_mix(name)[0]}_tiny", **sizes).eval()
    mixed = create(name, head_mix_args=args, **sizes).eval()
    missing, unexpected = mixed.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and all(".head_mix." in key or key.endswith(".core.shares") for key in missing)
    for size in ((64, 64), (96, 64)):
        torch.testing.assert_close(mixed(images(size=size)), plain(images(size=size)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_grid": (5, 4)}, "larger than the token grid"),
        ({"num_heads": 5}, "num_heads=5 does not divide"),
        ({"core": "none"}, "core must be one of"),
        ({"head_mix": "none"}, "head_mix must be"),
        ({"img_size": 70}, "not a multiple of the patch size"),
        ({"img_size": (64, 64, 64)}, "img_size must be one whole number or two"),
        ({"patch_size": 0}, "patch_size must be a whole number of at least 1, got 0"),
        ({"patch_drop_rate": 0.2}, "patch_drop_rate must be 0, got 0.2"),
        ({"embeddim": 192}, "has no 'embeddim'; did you mean embed_dim"),
        ({"attn_layer": "none"}, "has no 'attn_layer'"),
        ({"core_args": {"eps": float("nan")}}, "eps must be a finite number of at least 0, got nan"),
        ({"core_args": {"epsilon": 1.0}}, "core_args of 'mhla' has no 'epsilon'.*[iI]t takes .*eps, impl"),
        ({"core_args": "paper"}, "core_args of 'mhla' must be a mapping"),
        ({"block_grid": 2.5}, "block_grid must be a whole number of at least 1, got 2.5"),
        ({"block_grid": (4,)}, "block_grid must be one whole number or two"),
        ({"core": "linear", "block_grid": 0}, "block_grid must be a whole number"),
        ({"num_heads": 0}, "num_heads must be a whole number of at least 1, got 0"),
        ({"num_classes": -1}, "num_classes must be a whole number of at least 0, got -1"),
        ({"reg_tokens": -1}, "reg_tokens must be a whole number"),
        ({"drop_path_rate": float("nan")}, "drop_path_rate must be a finite number from 0 to 1, got nan"),
        ({"mlp_ratio": 0.0}, "leaves the MLP no width"),
        ({"mlp_ratio": -0.5}, "mlp_ratio must be a finite number of at least 0, got -0.5"),
        ({"global_pool": "token"}, "needs class_token=True"),
        ({"global_pool": "mean"}, "global_pool must be one of"),
        ({"weight_init": "none"}, "weight_init must be one of"),
        ({"act_layer": "none"}, "timm has no act_layer 'none'"),
        ({"attn_drop_rate": 0.2}, "needs the 'softmax' core"),
        (
            {"head_mix_args": {"pseudo_heads": 2}},
            r"head_mix_args=\{'pseudo_heads': 2\} needs a head_mix, one of .*'iha'",
        ),
        (
            {"head_mix": "iha", "head_mix_args": {"pseudo_heads": 0}},
            "pseudo_heads must be a whole number of at least 1",
        ),
        ({"head_mix": "iha", "head_mix_args": {"heads": 2}}, "head_mix_args of 'iha' has no 'heads'.*pseudo_heads"),
        ({"head_mix": "iha", "head_mix_args": "two"}, "head_mix_args of 'iha' must be a mapping"),
        ({"head_mix": "mea", "head_mix_args": {"component_heads": 4}}, "component_heads must be from 1 to 3"),
        ({"head_mix": "mea", "head_mix_args": {"key_value_heads": 2}}, "key_value_heads=2 does not divide the 3 heads"),
        ({"core_args": {"window": 3}}, "core_args of 'mhla' has no 'window'"),
        ({"core": "softmax", "core_args": {"window": 5}}, r"window \(5, 5\) is larger than the token grid \(4, 4\)"),
        ({"core": "softmax", "core_args": {"window": 2}}, r"window \(2, 2\) must be odd"),
        ({"globalevery": 2}, "has no 'globalevery'; did you mean global_every"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        create("deit_mhla_tiny", **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["deit_mhla_tiny", "dit_mhla_s_2", "dit_video_mhla_s_2"])
def test_an_unknown_keyword_is_a_type_error_too(name):
    for argument in ("not_a_model_arg", "img_size" if "dit_" in name[:4] else "input_size"):
        for error in (TypeError, ValueError):
            with pytest.raises(error, match=argument):
                timm.create_model(name, **{argument: 8})
    with pytest.raises(TypeError, match="core_args of 'mhla' has no 'epsilon'"):
        timm.create_model(name, core_args={"epsilon": 1.0})


def test_wrong_images_are_refused():
    model = create("deit_mhla_tiny")
    with pytest.raises(ValueError, match=r"images are 32x64 pixels, the model takes 64x64"):
        model(images(size=(32, 64)))
    for wrong in (images(chans=1), images()[0]):
        with pytest.raises(ValueError, match=r"images must be \[B, 3, H, W\], got shape"):
            model(wrong)
    with pytest.raises(ValueError, match=r"attn_mask must be \[N, N\] or .* = \(2, 3, 17\), got shape \(3, 3\)"):
        create("vit_softmax_tiny").forward_features(images(), attn_mask=torch.ones(3, 3))


def test_an_image_below_the_block_grid_is_refused_and_changes_nothing():
    with pytest.raises(ValueError, match=r"block_grid \(4, 4\) is larger than the token grid \(2, 4\)"):
        create("deit_mhla_tiny", dynamic_img_size=True)(images(size=(32, 64)))
    model = create("deit_mhla_tiny").eval()
    before = model(images())
    with pytest.raises(ValueError, match="larger than the token grid"):
        model.set_input_size((32, 64))
    assert torch.equal(model(images()), before)
    assert create("deit_hih_tiny", dynamic_img_size=True)(images(size=(16, 32))).shape == (2, 7)
