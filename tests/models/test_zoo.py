"""One suite over the registered models: what users of timm call."""

import copy
import inspect

import pytest
import timm
import timm.optim
import timm.utils
import torch
import torch.fx

import headmix_vision
from headmix_vision.models.names import FAMILIES

NAMES = sorted({**FAMILIES["deit"], **FAMILIES["vit"]})
# One of every family and core, small enough to run.
SMALL = [
    "deit_softmax_tiny",
    "deit_linear_tiny",
    "deit_mhla_tiny",
    "deit_hih_tiny",
    "vit_softmax_tiny",
    "vit_linear_tiny",
    "vit_mhla_tiny",
    "vit_hih_tiny",
]


def create(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **{"img_size": 64, "depth": 2, "num_classes": 7, **kwargs})


def images(batch=2, size=(64, 64), chans=3):
    return torch.randn(batch, chans, *size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
def test_every_registered_name(name):
    """Built and run at its true size, on the meta device."""
    with torch.device("meta"):
        model = timm.create_model(name)
    chans, height, width = model.pretrained_cfg["input_size"]
    out = model(torch.empty(2, chans, height, width, device="meta"))
    assert out.shape == (2, model.num_classes) == (2, model.pretrained_cfg["num_classes"])
    assert model.pretrained_cfg["architecture"] == name
    assert timm.is_model(name) and name in timm.list_models("*_" + name.split("_")[1] + "_*")
    assert timm.data.resolve_model_data_config(model)["input_size"] == (chans, height, width)


def test_names_of_the_zoo():
    for core in ("softmax", "linear", "mhla", "hih"):
        for family in ("deit", "vit"):
            for size in ("tiny", "small", "base", "large"):
                short = f"{family}_{core}_{size}"
                assert {short, f"{short}_patch16_224", f"{short}_patch16_384"} <= set(timm.list_models("*"))
    assert FAMILIES["deit"]["deit_mhla_small"] == FAMILIES["deit"]["deit_mhla_small_patch16_224"]
    assert "headmix_vit" in timm.list_modules()
    assert inspect.getmodule(timm.model_entrypoint("deit_mhla_small")) is headmix_vision.models.headmix_vit


def test_softmax_models_are_timms_own():
    for ours, theirs in (("deit_softmax_tiny", "deit_tiny_patch16_224"), ("vit_softmax_tiny", "vit_tiny_patch16_224")):
        a, b = create(ours).eval(), create(theirs).eval()
        b.load_state_dict(a.state_dict())
        torch.testing.assert_close(a(images()), b(images()))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("options", [{}, {"cpe": True, "output_gate": True, "output_norm": True, "qk_norm": True}])
def test_every_parameter_receives_a_gradient(name, options):
    model = create(name, drop_path_rate=0.1, **options)
    out = model(images())
    out.square().sum().backward()
    assert out.shape == (2, 7)
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]


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
def test_gradient_checkpointing_changes_nothing(name):
    model = create(name)
    gradients = []
    for enable in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enable)
        model(images()).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize(
    ("name", "matrix"), [("deit_mhla_tiny", "mixing"), ("vit_mhla_tiny", "mixing"), ("deit_hih_tiny", "mask")]
)
def test_weight_decay_and_layer_decay(name, matrix):
    model = create(name)
    skipped = model.no_weight_decay()
    first, second = (f"blocks.{i}.attn.core.{matrix}.weight" for i in range(2))
    assert {"pos_embed", first, second} <= skipped
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


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_checkpoint_path(tmp_path, suffix):
    import safetensors.torch

    model = create("deit_mhla_tiny").eval()
    path = str(tmp_path / f"model{suffix}")
    save = safetensors.torch.save_file if suffix == ".safetensors" else torch.save
    save(model.state_dict(), path)
    for size in (64, 96):
        loaded = create("deit_mhla_tiny", img_size=size, checkpoint_path=path).eval()
        assert loaded(images(size=(size, size))).shape == (2, 7)
    torch.testing.assert_close(create("deit_mhla_tiny", checkpoint_path=path).eval()(images()), model(images()))


@pytest.mark.parametrize("name", SMALL)
def test_torch_fx(name):
    model = create(name, cpe=True, output_gate=True).eval()
    x = images()
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


@pytest.mark.parametrize(
    ("name", "core_args"), [*((name, {}) for name in SMALL), ("vit_hih_tiny", {"mask": "token", "scans": "cross"})]
)
def test_torch_export_with_a_dynamic_batch(name, core_args):
    model = create(name, cpe=True, core_args=core_args).eval()
    exported = torch.export.export(model, (images(3),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for batch in (2, 5):
        torch.testing.assert_close(exported.module()(images(batch)), model(images(batch)))


@pytest.mark.parametrize(
    "name", ["deit_softmax_tiny", "deit_linear_tiny", "deit_mhla_tiny", "vit_mhla_tiny", "vit_hih_tiny"]
)
def test_torch_compile_as_one_graph(name):
    model = create(name, cpe=True, output_gate=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = []
    for f in (model, compiled):
        model.zero_grad()
        out = f(images())
        out.square().sum().backward()
        gradients.append([out, *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


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


def test_head_in_head_models_normalise_the_output_of_heads():
    for name, on in (("deit_hih_tiny", True), ("deit_mhla_tiny", False)):
        assert isinstance(create(name).blocks[0].attn.output_norm, torch.nn.RMSNorm) is on
    assert isinstance(create("deit_hih_tiny", output_norm=False).blocks[0].attn.output_norm, torch.nn.Identity)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_grid": (5, 4)}, "larger than the token grid"),
        ({"num_heads": 5}, "num_heads=5 does not divide"),
        ({"core": "none"}, "core must be one of"),
        ({"head_mix": "none"}, "head_mix must be"),
        ({"img_size": 70}, "no multiple of the patch size"),
        ({"patch_drop_rate": 0.2}, "patch_drop_rate"),
        ({"attn_drop_rate": 0.2}, "needs the 'softmax' core"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        create("deit_mhla_tiny", **arguments)


def test_wrong_image_size_is_refused():
    with pytest.raises(ValueError, match=r"images are 32x64 pixels, the model takes 64x64"):
        create("deit_mhla_tiny")(images(size=(32, 64)))
