"""The token grid of stored position embeddings: 36 positions are 4 x 9 only where something says so."""

import copy

import pytest
import safetensors.torch
import timm
import torch
from timm.models import save_for_hf

from headmix_vision.files.tensors import write_tensors
from headmix_vision.models.convert import convert_state_dict
from headmix_vision.runs.networks import create_network

WIDE, SQUARE, SAME_COUNT = (64, 144), (128, 128), (96, 96)  # 4 x 9, 8 x 8 and 6 x 6 patches
OURS = "deit_mhla_tiny"


def create(name=OURS, img_size=WIDE, **kwargs):
    return timm.create_model(name, **{"img_size": img_size, "depth": 1, "num_classes": 7, **kwargs})


def waves(grid):
    """Smooth positions of a grid over the same extent: [1, H * W, 192]."""
    rows, columns = ((torch.arange(size) + 0.5) / size for size in grid)
    phases = torch.linspace(0, 3, 48)
    axes = [rows[:, None, None].expand(*grid, 1), columns[None, :, None].expand(*grid, 1)]
    channels = [f(1.5 * axis + phases) for axis in axes for f in (torch.sin, torch.cos)]
    return torch.cat(channels, -1).flatten(0, 1)[None]


def source(name=OURS, img_size=WIDE, **kwargs):
    """A model whose positions are those waves; prefix tokens have zeros."""
    model = create(name, img_size, **kwargs)
    first = model.num_prefix_tokens
    with torch.no_grad():
        model.pos_embed[:, :first] = 0
        model.pos_embed[:, first:] = waves(model.patch_embed.grid_size)
    return model


def check(model):
    first = model.num_prefix_tokens
    positions = waves(model.patch_embed.grid_size)
    assert (model.pos_embed.detach()[:, first:] - positions).abs().max() < 0.1
    assert not model.pos_embed[:, :first].any()


OVERLAY = {"input_size": (3, *WIDE)}


@pytest.mark.parametrize("size", [SQUARE, SAME_COUNT])
@pytest.mark.parametrize("name", [OURS, "vit_hih_tiny"])
def test_a_state_dict_of_ours_names_its_grid(name, size, tmp_path):
    weights = source(name).state_dict()
    torch.save(weights, tmp_path / "weights.pt")
    compiled = torch.compile(source(name), backend="eager").state_dict()
    for state in (weights, torch.load(tmp_path / "weights.pt"), copy.deepcopy(weights)):
        model = create(name, size)
        model.load_state_dict(state)
        check(model)
    for state in (weights, {"model": weights}, compiled):
        model = create(name, size)
        model.load_state_dict(convert_state_dict(state, model).state_dict)
        check(model)


@pytest.mark.parametrize("size", [SQUARE, SAME_COUNT])
def test_the_size_of_the_images_is_set_after_the_model_was_made(size):
    model = source()
    model.set_input_size(size)
    check(model)
    again = create(img_size=size)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.pos_embed, model.pos_embed)


@pytest.mark.parametrize("size", [SQUARE, SAME_COUNT])
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_checkpoint_path_takes_the_size_of_the_images_from_the_configuration(size, suffix, tmp_path):
    path = str(tmp_path / f"weights{suffix}")
    (safetensors.torch.save_file if suffix == ".safetensors" else torch.save)(source().state_dict(), path)
    check(create(img_size=size, checkpoint_path=path, pretrained_cfg_overlay=OVERLAY))
    check(create(img_size=WIDE, checkpoint_path=path))


def test_weights_of_the_model_itself_stay_as_they_are(tmp_path):
    """The given size belongs to the first weights; others with as many positions are the model's own."""
    path = str(tmp_path / "weights.safetensors")
    safetensors.torch.save_file(source().state_dict(), path)
    model = create(img_size=SAME_COUNT, checkpoint_path=path, pretrained_cfg_overlay=OVERLAY)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(own)
    check(model)
    save_for_hf(source(), str(tmp_path), model_args={"img_size": list(WIDE), "depth": 1, "num_classes": 7})
    again = timm.create_model(f"local-dir:{tmp_path}", img_size=SAME_COUNT)
    again.load_state_dict(own)
    check(again)


@pytest.mark.parametrize("size", [SQUARE, (112, 448)])
def test_an_export_of_the_usual_size(size, tmp_path):
    """14 x 14 patches of a name whose models have as many; without the header nothing tells which grid they are of."""
    weights, path = dict(source(img_size=224).state_dict()), str(tmp_path / "export.safetensors")
    write_tensors(tmp_path / "export.safetensors", weights, {"model_name": OURS, "model_args": '{"depth": 1}'})
    arguments = {"img_size": list(size), "model_args": {"depth": 1}}
    check(create_network(OURS, 7, checkpoint=path, **arguments))
    safetensors.torch.save_file(weights, path)
    if size == SQUARE:
        check(create_network(OURS, 7, checkpoint=path, **arguments))
    else:
        with pytest.raises(ValueError, match="hold 196 positions of patches, of a grid that nothing tells"):
            create_network(OURS, 7, checkpoint=path, **arguments)


def test_checkpoint_path_without_a_size_is_refused_and_never_square(tmp_path):
    path = str(tmp_path / "weights.safetensors")
    safetensors.torch.save_file(source().state_dict(), path)
    message = r"^the weights hold 36 positions .* the model has 8 x 8: .*source_grid=.*pretrained_cfg_overlay=.*\.$"
    with pytest.raises(ValueError, match=message):
        create(img_size=SQUARE, checkpoint_path=path)


@pytest.mark.parametrize("size", [SQUARE, SAME_COUNT])
def test_pretrained_takes_the_grid_of_its_configuration(size, tmp_path):
    save_for_hf(source(), str(tmp_path), model_args={"img_size": list(WIDE), "depth": 1, "num_classes": 7})
    folder = f"local-dir:{tmp_path}"
    check(timm.create_model(folder, pretrained=True, img_size=size))
    check(timm.create_model(folder, pretrained=True))
    overlay = {"state_dict": dict(source().state_dict())}
    check(create(img_size=size, pretrained=True, pretrained_cfg_overlay={**overlay, **OVERLAY}))
    check(create(img_size=WIDE, pretrained=True, pretrained_cfg_overlay=overlay))


def test_weights_of_a_name_have_its_usual_size(tmp_path):
    """224 x 224 pixels, 14 x 14 patches: also where the model's own grid has as many patches, but is another."""
    state = dict(source("vit_softmax_tiny", 224).state_dict())
    for size in (SQUARE, (112, 448)):
        check(
            create("vit_softmax_tiny", size, pretrained=True, pretrained_cfg_overlay={"file": _saved(state, tmp_path)})
        )
    model = create("vit_softmax_tiny", SQUARE)
    model.load_state_dict(convert_state_dict(state, model).state_dict)
    check(model)


def test_a_conversion_takes_as_many_positions_for_the_models_own():
    model = create("vit_softmax_tiny", (112, 448))
    state = dict(source("vit_softmax_tiny", (112, 448)).state_dict())
    model.load_state_dict(convert_state_dict(state, model).state_dict)
    check(model)


def _saved(state, folder):
    path = str(folder / "weights.safetensors")
    safetensors.torch.save_file(state, path)
    return path


@pytest.mark.parametrize("size", [SQUARE, SAME_COUNT])
@pytest.mark.parametrize("name", [OURS, "vit_softmax_tiny"])
def test_conversion_takes_the_grid_from_its_argument(name, size):
    state = source("vit_tiny_patch16_224").state_dict()
    model = create(name, size)
    model.load_state_dict(convert_state_dict(state, model, source_grid=(4, 9)).state_dict)
    check(model)
    with pytest.raises(ValueError, match="hold 36 positions of patches, not the 5 x 9 of source_grid"):
        convert_state_dict(state, model, source_grid=(5, 9))
    if size == SQUARE:
        with pytest.raises(ValueError, match="hold 36 positions of patches, of a grid that nothing tells"):
            convert_state_dict(state, model)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrappers_are_left_out(prefix):
    state = source("vit_tiny_patch16_224").state_dict()
    wrapped = {"state_dict": {f"{prefix}{name}": value for name, value in state.items()}}
    model = create()
    conversion = convert_state_dict(wrapped, model)
    assert conversion.unused == ["cls_token"] and conversion.new_parameters == ["blocks.0.attn.core.mixing.weight"]
    model.load_state_dict(conversion.state_dict)
    check(model)


def test_start_weights_of_an_export_say_of_what_size_they_are(tmp_path):
    header = {"model_name": OURS, "model_args": '{"depth": 1, "num_classes": 7, "img_size": [64, 144]}'}
    path = tmp_path / "export.safetensors"
    write_tensors(path, dict(source().state_dict()), header)
    for size in (SQUARE, SAME_COUNT, None):
        arguments = {"img_size": size and list(size), "model_args": {"depth": 1}}
        model = create_network(OURS, 7, checkpoint=str(path), **arguments)
        check(model)
        assert model.patch_embed.img_size == (size or (224, 224))
        assert model.pretrained_cfg["input_size"] == (3, 224, 224)
