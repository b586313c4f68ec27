"""Start weights that are something else end in one line, for classifiers and generators alike."""

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from headmix_vision.data.augmentation import input_config
from headmix_vision.errors import InputError
from headmix_vision.runs.networks import create_generator, create_network

SMALL = {"embed_dim": 16, "depth": 1, "num_heads": 2}
CREATORS = {"deit_linear_digits": create_network, "dit_linear_digits": create_generator}
WEIGHT = "blocks.0.attn.qkv.weight"
QUANTIZED = torch.quantize_per_tensor(torch.ones(48, 16), 1.0, 0, torch.qint8)


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("notes.txt", "notes" * 100)


# Name of the file, how it is made, what is said.
FILES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "image": ("a.pth", lambda path: Image.new("L", (8, 8)).save(path, "PNG"), "is not a file of weights"),
    "text": ("a.pth", lambda path: path.write_text("hello\nworld"), "holds no readable weights"),
    "text as safetensors": ("a.safetensors", lambda path: path.write_text("hello world"), "no safetensors file"),
    "text as checkpoint": ("a.ckpt", lambda path: path.write_text("hello"), "is not a checkpoint"),
    "empty": ("a.pth", lambda path: path.touch(), "holds no readable weights"),
    "empty safetensors": ("a.safetensors", lambda path: path.touch(), "no safetensors file"),
    "pickle": ("a.pth", lambda path: path.write_bytes(pickle.dumps(Path())), "objects other than tensors"),
    "list": ("a.pth", lambda path: torch.save([torch.ones(1)], path), "holds no"),
    "tensor": ("a.pth", lambda path: torch.save(torch.ones(1), path), "holds no"),
    "numbered": ("a.pth", lambda path: torch.save({1: torch.ones(1)}, path), "holds no"),
    "numbers": ("a.pth", lambda path: torch.save({"a": 1}, path), "holds no weights by name"),
    "nothing": ("a.pth", lambda path: torch.save({"state_dict": {}}, path), "holds no weights by name: it is empty"),
    "zip": ("a.pth", zipped, "torch.save did not write it: notes.txt is compressed"),
    "zip as checkpoint": ("a.ckpt", zipped, "notes.txt is compressed"),
    "arrays": ("a.npz", lambda path: np.savez(path, a=np.ones(3)), "holds no readable weights"),
    "folder": ("a.pth", lambda path: path.mkdir(), "is a folder"),
    "folder as safetensors": ("a.safetensors", lambda path: path.mkdir(), "is a folder"),
    "pipe": ("a.pth", lambda path: os.mkfifo(path), "is not a regular file"),
    "nowhere": ("a.pth", lambda path: None, "no checkpoint at"),
    "another model": ("a.pth", lambda path: torch.save({"a": torch.ones(1)}, path), "does not fit model"),
    "program": (
        "a.pth",
        lambda path: torch.jit.trace(torch.nn.Identity(), torch.ones(1)).save(str(path)),
        "torch.save did not write it",
    ),
}
WEIGHTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "sparse": (lambda weight: weight.to_sparse(), "is float32, sparse_coo"),
    "complex": (lambda weight: weight * 1j, "is complex64"),
    "quantized": (lambda weight: QUANTIZED, "is qint8"),
    "of 8 bits": (lambda weight: weight.to(torch.float8_e4m3fn), "is float8_e4m3fn"),
    "of whole numbers": (lambda weight: weight.int(), "have another type, first"),
    "true or false": (lambda weight: weight > 0, "have another type, first"),
    "without values": (lambda weight: weight.to("meta"), "has no values"),
    "huge": (lambda weight: torch.ones(1).expand(10**9, 10**3), "repeats its values"),
    "of another shape": (lambda weight: weight[:5], "does not fit model"),
    "without axes": (lambda weight: torch.tensor(1.0), "does not fit model"),
    "not finite": (lambda weight: weight * torch.nan, "are not finite"),
}


@pytest.mark.parametrize("name", CREATORS)
@pytest.mark.parametrize("kind", FILES)
def test_a_file_of_something_else_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    file, make, message = FILES[kind]
    make(tmp_path / file)
    with pytest.raises(InputError, match=message) as error:
        CREATORS[name](name, model_args=SMALL, checkpoint=str(tmp_path / file))
    assert "\n" not in str(error.value) and file in str(error.value)


@pytest.mark.parametrize("name", CREATORS)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_weight_of_another_form_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    change, message = WEIGHTS[kind]
    state = timm.create_model(name, **SMALL).state_dict()
    torch.save({**state, WEIGHT: change(state[WEIGHT])}, tmp_path / "a.pth")
    with pytest.raises(InputError, match=message) as error:
        CREATORS[name](name, model_args=SMALL, checkpoint=str(tmp_path / "a.pth"))
    assert "\n" not in str(error.value) and "a.pth" in str(error.value)


def test_weights_of_other_strides_and_precision_are_taken(tmp_path: Path) -> None:
    for name, create in CREATORS.items():
        state = timm.create_model(name, **SMALL).state_dict()
        torch.save({**state, WEIGHT: state[WEIGHT].half().t().contiguous().t()}, tmp_path / "a.pth")
        loaded = create(name, model_args=SMALL, checkpoint=str(tmp_path / "a.pth")).state_dict()
        assert torch.equal(loaded[WEIGHT], state[WEIGHT].half().float())


@pytest.mark.parametrize(
    ("create", "name", "message"),
    [
        (create_network, "dit_linear_digits", "is a generator, which headmix train-gen trains"),
        (create_network, "dit_video_linear_digits", "is a generator, which headmix train-gen trains"),
        (create_generator, "deit_linear_digits", "is a classifier, which headmix train-cls trains"),
        (create_generator, "resnet18.tv_in1k", "is a classifier, which headmix train-cls trains"),
        (create_network, "deit_linear_small.x", "tag behind the dot is 'x', it must be left out with the dot"),
        (create_network, "deit_linear_digits.x", "tag behind the dot is 'x', it must be one of digits"),
        (create_network, "resnet18.x", "tag behind the dot is 'x', it must be one of a1_in1k,"),
        (create_network, "deit_linear_digits.", "tag behind the dot is '', it must be one of digits"),
        (create_generator, "dit_linear_digits.x", "tag behind the dot is 'x'"),
        (create_network, ".digits", "unknown model '.digits'"),
        (create_network, "", "unknown model ''"),
    ],
)
def test_names_of_the_other_family_and_unknown_tags_are_refused(create: Any, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        create(name)
    assert "\n" not in str(error.value)


def test_a_known_tag_names_the_same_model() -> None:
    tagged, plain = (
        create_network(name, model_args=SMALL) for name in ("deit_linear_digits.digits", "deit_linear_digits")
    )
    assert tagged.state_dict().keys() == plain.state_dict().keys()


def test_start_weights_of_the_other_family_are_refused(tmp_path: Path) -> None:
    for name, other in zip(CREATORS, reversed(CREATORS), strict=True):
        network = timm.create_model(name, **SMALL)
        about: dict[str, Any] = {"name": name, "num_classes": 10, "model_args": SMALL, "objective": {}}
        about |= {"kind": "generator", "architecture": network.architecture} if name.startswith("dit_") else {}
        state = {f"net.{weight}": value for weight, value in network.state_dict().items()}
        torch.save({"state_dict": state, "headmix_vision": about}, tmp_path / "a.ckpt")
        with pytest.raises(InputError, match=f"a.ckpt holds the (classifier|generator) {name}, "):
            CREATORS[other](other, model_args=SMALL, checkpoint=str(tmp_path / "a.ckpt"))


@pytest.mark.parametrize(
    ("name", "arguments"), [("naflexvit_base_patch16_gap", {**SMALL, "init_values": None}), ("maxvit_pico_rw_256", {})]
)
def test_data_have_the_image_size_that_a_network_is_made_for(name: str, arguments: dict[str, Any]) -> None:
    assert input_config(create_network(name, 5, [64, 64], arguments))["input_size"] == (3, 64, 64)
