"""The weights that come with the package, and what `pretrained=True` says where there are none.

Each file of `weights/` holds the averaged weights after the last epoch of the recipe `digits`, seed 0, on a CPU:

    OMP_NUM_THREADS=1 headmix train-cls fit -c digits --model.name NAME --run-dir RUN --trainer.accelerator cpu
    headmix export RUN --checkpoint last --out headmix_vision/models/weights/NAME.safetensors
"""

from pathlib import Path
from typing import Any

from headmix_vision.errors import InputError

FOLDER = Path(__file__).parent / "weights"
TAG = "digits"
# Right among the 360 held-out digits; the recipe chooses nothing by them.
CORRECT = {"deit_hih_digits": 357, "deit_linear_digits": 344, "deit_mhla_digits": 358, "deit_softmax_digits": 351}
HELD_OUT = 360


def weights_cfg(name: str) -> dict[str, Any]:
    """Collect what timm's configuration says about the weights of a model; nothing if it has none."""
    if name not in CORRECT:
        return {}
    return {
        "file": str(FOLDER / f"{name}.safetensors"),
        "description": f"Trained on 1,437 handwritten digits of 8 x 8 pixels (UCI, in scikit-learn) by the recipe"
        f" {TAG}, last epoch. Top-1 on the {HELD_OUT} held-out ones: {CORRECT[name] / HELD_OUT:.2%}.",
    }


def check_pretrained(name: str, arguments: dict[str, Any]) -> None:
    """Refuse `pretrained=True` for a model without weights, unless the arguments of timm bring some.

    Raises:
        InputError: There are none; with what there is instead.
    """
    if name in CORRECT or arguments.get("pretrained_cfg") or arguments.get("pretrained_cfg_overlay"):
        return
    source, module = ("an official DiT", "convert_dit") if name.startswith("dit_") else ("a softmax model", "convert")
    raise InputError(
        f"no weights come with {name}, only with {', '.join(CORRECT)}: leave out pretrained=True, or convert"
        f" {source} with headmix_vision.models.{module}"
    )
