"""Swapped layers in timm's NaFlexVit: pictures of several grids in one batch, with padding."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_transforms import Patchify

import headmix_vision
from headmix_vision.layers.swapped_attention import SwappedAttention
from headmix_vision.models.swap import swap_attention

SIZES = [(16, 16), (8, 28), (20, 12), (4, 24), (16, 16)]  # pixels, of patches of 4
LENGTH = 18
ROPES = {
    "none": {},
    "axial": {"rope_type": "axial"},
    "mixed": {"rope_type": "mixed"},
    "dinov3": {"rope_type": "dinov3", "rope_rotate_half": True},
}
OPTIONS = {"hih": {"core_args": {"num_sub_heads": 2, "scans": "cross"}}}


def make(**options):
    """Build a small model in evaluation mode whose weights are far from those of the start."""
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "depth": 3, "num_heads": 2, "patch_size": 4, "pos_embed_grid_size": (4, 4)}
    model = timm.create_model("naflexvit_base_patch16_gap", num_classes=5, init_values=None, **{**sizes, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double().eval()


def swapped(core="mhla", softmax_every=0, **options):
    model = make(**options)
    swap_attention(model, core, block_grid=(2, 2), softmax_every=softmax_every, **OPTIONS.get(core, {}))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "core.mixing" in name:
                parameter.uniform_(0.1, 0.9)
    return model


def pictures(sizes=SIZES):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(3, *size, generator=generator) for size in sizes]


def collate(images, length=LENGTH):
    batch, _ = NaFlexCollator(length)([(Patchify(4)(image), 0) for image in images])
    batch["patches"] = batch["patches"].double()
    batch["patches"][~batch["patch_valid"]] = 100
    return batch


def alone(image):
    return collate([image], image.shape[1] * image.shape[2] // 16)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("core", ["softmax", "linear", "mhla", "hih"])
def test_a_batch_gives_each_picture_what_it_has_alone(core, rope):
    """Outputs and gradients of all weights, with register tokens."""
    model, images = swapped(core, **ROPES[rope]), pictures()
    expected, out = torch.cat([model(alone(image)) for image in images]), model(collate(images))
    torch.testing.assert_close(out, expected)
    assert (expected[0] - expected[-1]).abs().max() > 1e-2
    weight = torch.randn_like(out)
    names, parameters = zip(*model.named_parameters(), strict=True)
    of_batch = torch.autograd.grad((weight * out).sum(), parameters)
    of_pictures = torch.autograd.grad((weight * expected).sum(), parameters)
    for name, found, wanted in zip(names, of_batch, of_pictures, strict=True):
        torch.testing.assert_close(found, wanted, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "options",
    [{"class_token": True, "global_pool": "token"}, {"global_pool": "map", "reg_tokens": 0}, {"qk_norm": True}],
)
def test_other_prefix_tokens_and_heads_with_softmax_between(options):
    model, images = swapped("mhla", softmax_every=2, **options), pictures()
    kinds = [isinstance(block.attn, SwappedAttention) for block in model.blocks]
    assert kinds == [False, True, False]
    torch.testing.assert_close(model(collate(images)), torch.cat([model(alone(image)) for image in images]))


@pytest.mark.parametrize("rope", ["none", "axial", "mixed"])
def test_swapped_softmax_is_the_original_with_patch_dropout_too(rope):
    """In batches of one grid and of several, in evaluation and in training with dropped patches."""
    model = make(patch_drop_rate=0.4, **ROPES[rope])
    new = copy.deepcopy(model)
    swap_attention(new, "softmax", block_grid=(2, 2))
    one_size = torch.randn(3, 3, 16, 24, dtype=torch.float64)
    batches = [collate(pictures()), one_size] if rope != "mixed" else [collate(pictures())]
    for training in (False, True):
        for batch in batches:
            outs = []
            for either in (model, new):
                torch.manual_seed(3)
                outs.append(either.train(training)(batch))
            torch.testing.assert_close(*outs)


@pytest.mark.parametrize("core", ["mhla", "hih"])
def test_images_of_one_size_are_as_with_coordinates(core):
    model, images = swapped(core), torch.stack(pictures([(12, 20)] * 2))
    torch.testing.assert_close(model(images.double()), model(collate(list(images), 15)))
    torch.testing.assert_close(model(images.double()), model(collate(list(images), 20)))


def test_features_and_intermediates_take_batches_of_several_grids():
    model, batch = swapped(), collate(pictures())
    one = alone(pictures()[3])
    given = {name: batch[name] for name in ("patches", "patch_coord", "patch_valid")}
    features = model.forward_features(**given)["patches"]
    final, layers = model.forward_intermediates(batch, output_fmt="NLC")
    _, of_one = model.forward_intermediates(one, output_fmt="NLC")
    torch.testing.assert_close(final, features)
    for together, apart in zip(layers, of_one, strict=True):
        torch.testing.assert_close(together[3, : apart.shape[1]], apart[0])


def test_checkpointing_threads_copies_and_pickles_see_the_grids_of_their_call():
    model, images = swapped(), pictures()
    batches = [collate(images[:3]), collate(images[2:], 24)] * 4
    expected = [model(batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for found, wanted in zip(pool.map(model, batches), expected, strict=True):
            torch.testing.assert_close(found, wanted)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(again(batches[0]), expected[0])
    wanted = torch.autograd.grad(expected[0].square().sum(), list(model.parameters()))
    model.set_grad_checkpointing()
    out = model(batches[0])
    model(batches[1])  # another call before the backward pass of the first
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), list(model.parameters())), wanted)


def test_a_saved_model_takes_batches_of_several_grids(tmp_path):
    model, batch = swapped().float(), collate(pictures())
    batch["patches"] = batch["patches"].float()
    headmix_vision.save_pretrained(model, tmp_path)
    again = headmix_vision.from_pretrained(tmp_path)
    torch.testing.assert_close(again(batch), model(batch))


def test_low_precision_keeps_the_result():
    model, batch = swapped(rope_type="axial").float(), collate(pictures())
    batch["patches"] = batch["patches"].float()
    expected = model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(batch).float(), expected, rtol=0.1, atol=0.1)


def test_a_compiled_model_compiles_once_for_batches_of_other_grids():
    model, frames = swapped(depth=1), []

    def count(module, inputs):
        frames.append(module)
        return module.forward

    compiled, counts = torch.compile(model, backend=count), []
    for sizes in (SIZES, SIZES[::-1], [(8, 8), (12, 24), (4, 16), (16, 16), (24, 12)]):
        batch = collate(pictures(sizes))
        with torch.no_grad():
            torch.testing.assert_close(compiled(batch), model(batch))
        counts.append(len(frames))
    assert counts[0] > 0 and counts == counts[:1] * 3


@pytest.mark.parametrize("name", ["vit_mhla_tiny", "vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_masks_of_keys_leave_padding_out_of_other_models_too(name):
    model = timm.create_model(name, img_size=56, patch_size=14, depth=2).eval()
    if "mhla" not in name:
        swap_attention(model, "hih", block_grid=(2, 2))
    images, mask = torch.randn(2, 3, 56, 56), torch.ones(2, 1, 1, model.num_prefix_tokens + 16, dtype=torch.bool)
    mask[1, ..., -4:] = False  # the last row of patches
    before = model.forward_features(images, attn_mask=mask)
    images[1, :, 42:] = 7
    after = model.forward_features(images, attn_mask=mask)
    torch.testing.assert_close(after[1, :-4], before[1, :-4])
    assert (after[1, -4:] - before[1, -4:]).abs().max() > 1


def test_what_the_swapped_layers_cannot_take_is_refused():
    model, batch = swapped(), collate(pictures())
    masked = batch | {"attn_mask": torch.zeros(5, 1, 1, 4 + LENGTH)}
    with pytest.raises(ValueError, match="swapped layers take padding from patch_valid: give no attn_mask"):
        model(masked)
    empty = batch | {"patch_valid": batch["patch_valid"] & (torch.arange(5) != 1)[:, None]}
    with pytest.raises(ValueError, match="sample 1 of the batch has no token"):
        model(empty)
    model.blocks[1].register_forward_pre_hook(
        lambda block, inputs, given: (inputs, given | {"attn_mask": given["attn_mask"].clone()}), with_kwargs=True
    )
    with pytest.raises(ValueError, match="the grids of the pictures did not reach a swapped layer"):
        model(batch)
