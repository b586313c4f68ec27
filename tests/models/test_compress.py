"""Compressing the key and value heads of trained models."""

import copy

import pytest
import timm
import torch

from headmix_vision.errors import InputError
from headmix_vision.layers import CORES
from headmix_vision.models import HeadMixDiT, compress_heads
from headmix_vision.models.convert import convert_state_dict
from headmix_vision.runs.networks import create_network

HEADS = 4
VIT = {"img_size": 64, "depth": 2, "embed_dim": 64, "num_heads": HEADS, "num_classes": 7}
DIT = {"input_size": 8, "depth": 2, "embed_dim": 64, "num_heads": HEADS, "num_classes": 5, "block_grid": (2, 2)}


def create(name, **kwargs):
    """A small model in float64, every parameter with a share of noise as if it were trained."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**(DIT if name.startswith("dit") else VIT), **kwargs}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.rand_like(parameter)
    return model


def inputs(model):
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, HeadMixDiT):
        latents = torch.randn(2, 4, 8, 8, generator=generator, dtype=torch.float64)
        return latents, torch.tensor([3.0, 800.0], dtype=torch.float64), torch.tensor([1, 4])
    return (torch.randn(2, 3, 64, 64, generator=generator, dtype=torch.float64),)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("name", ["deit_{}_small", "dit_{}_s_2"])
def test_all_heads_compute_what_the_model_computes(name, core):
    model = create(name.format(core), cpe=True, output_gate=True)
    compressed, errors = compress_heads(model, component_heads=HEADS)
    torch.testing.assert_close(compressed(*inputs(model)), model(*inputs(model)), rtol=1e-12, atol=1e-12)
    assert [error.layer for error in errors] == ["blocks.0.attn", "blocks.1.attn"]
    assert all(error.keys == error.values == 0 for error in errors)


@pytest.mark.parametrize("bias", [True, False])
def test_errors_are_the_singular_values_left_out(bias):
    model = create("vit_mhla_small", qkv_bias=bias)
    before, after = model.blocks[1].attn, None
    previous = None
    for count in range(1, HEADS + 1):
        compressed, errors = compress_heads(model, count)
        after = compressed.blocks[1].attn
        for index, reported in ((1, errors[1].keys), (2, errors[1].values)):
            trained = before.qkv.weight.unflatten(0, (3, HEADS, -1))[index].flatten(1)
            place = (HEADS + (index - 1) * count) * 16
            components = after.qkv.weight[place : place + count * 16].unflatten(0, (count, -1)).flatten(1)
            if bias:
                trained = torch.cat([trained, before.qkv.bias.unflatten(0, (3, HEADS, -1))[index]], 1)
                own = after.qkv.bias[place : place + count * 16].unflatten(0, (count, -1))
                components = torch.cat([components, own], 1)
            mix = after.head_mix.mix[index - 1]
            singular = torch.linalg.svdvals(trained)
            mass = (singular[count:].square().sum() / singular.square().sum()).sqrt()
            distance = (mix @ components - trained).norm() / trained.norm()
            torch.testing.assert_close(distance, mass, rtol=0, atol=1e-12)
            assert reported == pytest.approx(mass.item(), abs=1e-12)
            torch.testing.assert_close(mix.T @ mix, torch.eye(count, dtype=mix.dtype))
            assert (mix.gather(0, mix.abs().argmax(0, keepdim=True)) > 0).all()
        if previous is not None:
            assert errors[1].keys < previous
        previous = errors[1].keys
    assert torch.equal(before.qkv.weight[:64], after.qkv.weight[:64])


def test_the_compressed_model_is_that_of_its_name():
    """It fits the model that timm makes of the name, and nothing but keys and values differs from the source."""
    model = create("deit_mhla_small", cpe=True, output_norm=True)
    state = copy.deepcopy(model.state_dict())
    compressed = compress_heads(model, component_heads=2).model
    named = create("deit_mhla_mea_small", cpe=True, head_mix_args={"component_heads": 2})
    named.load_state_dict(compressed.state_dict())
    torch.testing.assert_close(named(*inputs(model)), compressed(*inputs(model)))
    assert compressed.blocks[0].attn.qkv.weight.shape == (64 + 2 * 32, 64)
    assert not compressed.training and named.no_weight_decay() == compressed.no_weight_decay()
    for name, value in state.items():
        assert torch.equal(model.state_dict()[name], value)
        if ".qkv." not in name:
            assert torch.equal(compressed.state_dict()[name], value)


def test_start_weights_of_training(tmp_path):
    """`--model.checkpoint` takes the saved weights."""
    from safetensors.torch import save_file

    compressed = compress_heads(timm.create_model("deit_softmax_digits", pretrained=True), component_heads=1).model
    save_file(compressed.state_dict(), tmp_path / "compressed.safetensors")
    arguments = {"head_mix_args": {"component_heads": 1}, "output_norm": False}
    network = create_network(
        "deit_softmax_mea_digits", model_args=arguments, checkpoint=str(tmp_path / "compressed.safetensors")
    )
    images = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(network.eval()(images), compressed.eval()(images))


def test_a_generator_is_saved_with_its_arguments(tmp_path):
    compressed = compress_heads(create("dit_hih_s_2"), component_heads=3).model
    compressed.save_pretrained(tmp_path)
    again = HeadMixDiT.from_pretrained(tmp_path, torch_dtype=torch.float64).eval()
    assert (again.config.head_mix, again.config.head_mix_args) == ("mea", {"component_heads": 3})
    torch.testing.assert_close(again(*inputs(compressed)), compressed(*inputs(compressed)))


def test_layers_without_a_window_among_windowed_ones_stay():
    model = create("deit_softmax_small", depth=4, core_args={"window": 3}, global_every=2)
    compressed, errors = compress_heads(model, component_heads=1)
    assert [error.layer for error in errors] == ["blocks.0.attn", "blocks.2.attn"]
    arguments = {"head_mix_args": {"component_heads": 1}, "core_args": {"window": 3}, "output_norm": False}
    named = create("deit_softmax_mea_small", depth=4, global_every=2, **arguments)
    named.load_state_dict(compressed.state_dict())
    torch.testing.assert_close(named(*inputs(model)), compressed(*inputs(model)))


def test_a_softmax_model_of_timm_is_converted_first():
    source = timm.create_model("deit_tiny_patch16_224", img_size=64, depth=1, num_classes=7).double().eval()
    with pytest.raises(ValueError, match="VisionTransformer holds no attention layers of headmix_vision"):
        compress_heads(source, component_heads=3)
    model = timm.create_model("deit_softmax_tiny", img_size=64, depth=1, num_classes=7).double().eval()
    model.load_state_dict(convert_state_dict(source.state_dict(), model).state_dict)
    compressed = compress_heads(model, component_heads=3).model
    torch.testing.assert_close(compressed(*inputs(model)), source(*inputs(source)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "heads", "message"),
    [
        ({}, 5, "component_heads must be a whole number from 1 to 4, got 5"),
        ({}, 0, "component_heads must be a whole number from 1 to 4, got 0"),
        ({}, 2.0, "component_heads must be a whole number from 1 to 4, got 2.0"),
        ({"head_mix": "iha"}, 2, r"blocks\.0\.attn has a head mix, InterleavedHeads: only plain heads"),
        ({"qk_norm": True}, 2, r"blocks\.0\.attn has qk_norm, a norm over all 4 key heads"),
    ],
)
def test_wrong_input_is_refused(options, heads, message):
    with pytest.raises(ValueError, match=message):
        compress_heads(create("deit_softmax_small", depth=1, **options), component_heads=heads)


def test_an_adapter_is_refused_not_lost():
    """An adapter has the weight of the projection that it changes, without its own part."""

    class Adapter(torch.nn.Linear):
        pass

    model = create("deit_softmax_small", depth=1)
    model.blocks[0].attn.qkv.__class__ = Adapter
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.qkv is a Adapter, no plain projection"):
        compress_heads(model, component_heads=2)


def test_what_is_no_model_is_refused():
    with pytest.raises(ValueError, match="str holds no attention layers"):
        compress_heads("deit_softmax_small", component_heads=1)


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_weights_that_are_not_finite_are_refused(kind):
    model = create("deit_softmax_small", depth=1)
    getattr(model.blocks[0].attn.qkv, kind).data.view(-1)[0] = torch.nan
    with pytest.raises(InputError, match=rf"blocks\.0\.attn\.qkv\.{kind} must hold finite numbers"):
        compress_heads(model, component_heads=2)
    with pytest.raises(InputError, match=r"blocks\.0\.attn\.qkv\.weight must hold finite numbers"):
        compress_heads(model.to("meta"), component_heads=2)
