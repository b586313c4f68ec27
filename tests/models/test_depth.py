"""Layers that differ in one model: the schedule of plain layers, and windows, at any resolution."""

import pytest
import timm
import torch

import headmix_vision  # noqa: F401  (registers the models with timm)


def create(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **{"img_size": 64, "depth": 2, "num_classes": 7, **kwargs})


def images(size=(64, 64)):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))


def layers(model):
    """The mix and the window of each layer; None for neither."""
    attentions = [block.attn for block in model.blocks]
    return [type(a.head_mix).__name__ if a.head_mix else getattr(a.core, "window", None) for a in attentions]


def test_every_kth_layer_is_plain():
    """The schedule of interleaved heads in their paper: four layers in a window, one with all tokens and no mix."""
    options = {"depth": 7, "global_every": 3, "img_size": 96, "head_mix_args": {"pseudo_heads": 3}}
    model = create("deit_iha_tiny", core_args={"window": 3}, **options)
    mixed, plain = "InterleavedHeads", None
    assert layers(model) == [mixed, mixed, plain, mixed, mixed, plain, mixed]
    assert [block.attn.core.window for block in model.blocks] == [(3, 3), (3, 3), None, (3, 3), (3, 3), None, (3, 3)]
    assert layers(create("deit_softmax_tiny", depth=4, core_args={"window": 1}, global_every=2)) == [(1, 1), None] * 2
    assert layers(create("vit_hih_mea_tiny", depth=3, global_every=3)) == ["ExplicitHeads"] * 2 + [None]
    assert layers(create("vit_mhla_iha_tiny", depth=3)) == [mixed] * 3
    model(images(size=(96, 96))).square().sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    undecayed = {n for n in model.no_weight_decay() if ".head_mix." in n}
    assert undecayed == {f"blocks.{i}.attn.head_mix.{n}" for i in (0, 1, 3, 4, 6) for n in ("mix", "collapse")}
    assert model.blocks[2].attn.flops() == create("deit_softmax_tiny", img_size=96).blocks[0].attn.flops()


def test_a_window_follows_the_resolution():
    options = {"core_args": {"window": 3}, "global_every": 2, "head_mix": "iha"}
    for size in ((96, 64), (64, 160)):
        fixed = create("deit_softmax_tiny", **options).eval()
        fixed.set_input_size(size)
        dynamic = create("deit_softmax_tiny", dynamic_img_size=True, **options).eval()
        torch.testing.assert_close(dynamic(images(size=size)), fixed(images(size=size)))


def test_an_image_below_the_window_is_refused_and_changes_nothing():
    options = {"core_args": {"window": 3}, "global_every": 2}
    model = create("deit_softmax_tiny", **options).eval()
    before = model(images())
    message = r"window \(3, 3\) is larger than the token grid \(2, 4\)"
    with pytest.raises(ValueError, match=message):
        model.set_input_size((32, 64))
    assert torch.equal(model(images()), before) and model.patch_embed.img_size == (64, 64)
    with pytest.raises(ValueError, match=message):
        create("deit_softmax_tiny", dynamic_img_size=True, **options)(images(size=(32, 64)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ({"head_mix": "iha", "global_every": k}, "global_every must be a whole number of at least 0, got")
            for k in (-1, 2.0, True, "2")
        ),
        ({"head_mix": "iha", "global_every": 1}, "global_every must be 0, or at least 2, got 1: no layer would have"),
        ({"head_mix": "iha", "global_every": 3, "depth": 2}, "global_every=3 is above the depth 2: no layer would be"),
        ({"global_every": 2}, "global_every=2 needs a head_mix or a window"),
        ({"core": "softmax", "global_every": 2, "core_args": {"window": None}}, "needs a head_mix or a window"),
        ({"head_mix": "iha", "global_every": 2, "core_args": ["window"]}, "core_args of 'mhla' must be a mapping"),
    ],
)
def test_wrong_schedules_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        create("deit_mhla_tiny", **arguments)
    assert "\n" not in str(error.value)
