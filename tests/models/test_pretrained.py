"""Weights that come with the package, and models that have none."""

import pytest
import timm
import timm.data
import torch

from headmix_vision.data.datasets.digits import Digits
from headmix_vision.errors import InputError
from headmix_vision.models.names import CORRECT, FOLDER, HELD_OUT


def test_each_file_has_a_card_and_is_small():
    files = {path.stem: path for path in FOLDER.iterdir()}
    assert set(files) == set(CORRECT)
    assert set(timm.list_models("*_digits", pretrained=True)) == {f"{name}.digits" for name in CORRECT}
    assert all(path.stat().st_size <= 2**20 for path in files.values())


@pytest.mark.parametrize("name", CORRECT)
def test_accuracy_is_that_of_the_card(name: str):
    model = timm.create_model(name, pretrained=True).eval()
    config = timm.data.resolve_model_data_config(model)
    digits = Digits("validation")
    with torch.inference_mode():
        scores = model((digits.images - config["mean"][0]) / config["std"][0])
    correct = int((scores.argmax(1) == torch.tensor(digits.targets)).sum())
    assert (correct, len(digits)) == (CORRECT[name], HELD_OUT)
    assert f"{correct / len(digits):.2%}" in model.pretrained_cfg["description"]
    assert model.pretrained_cfg["license"] == "apache-2.0"


def test_another_number_of_classes_gets_a_new_head_alone():
    model, whole = (timm.create_model("deit_mhla_digits", pretrained=True, num_classes=n) for n in (3, 10))
    assert model.head.out_features == 3
    ours, theirs = model.state_dict(), whole.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours if not key.startswith("head."))


@pytest.mark.parametrize(
    ("name", "module"), [("deit_mhla_small", "convert"), ("vit_hih_base", "convert"), ("dit_mhla_xl_2", "convert_dit")]
)
def test_other_models_say_that_they_have_none(name: str, module: str):
    with pytest.raises(
        InputError, match=rf"no weights come with {name}, only with .*headmix_vision\.models\.{module}$"
    ):
        timm.create_model(name, pretrained=True)


def test_weights_of_a_user_are_taken_all_the_same():
    state = timm.create_model("deit_linear_tiny", img_size=32, depth=1).state_dict()
    overlay = {"state_dict": state}
    model = timm.create_model("deit_linear_tiny", pretrained=True, pretrained_cfg_overlay=overlay, img_size=32, depth=1)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
