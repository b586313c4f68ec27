"""Feed images and labels to training: `datasets` holds the data sets, the other modules make batches of them."""

from importlib import import_module
from typing import TYPE_CHECKING

from headmix_vision.errors import require_extra

if TYPE_CHECKING:
    from headmix_vision.data.augmentation import Augmentation
    from headmix_vision.data.classification import ClassificationData
    from headmix_vision.data.generation import GenerationData
    from headmix_vision.data.seeding import derive_seed, seeded

__all__ = ["Augmentation", "ClassificationData", "GenerationData", "derive_seed", "seeded"]

# Imported on demand, so that whoever seeds or opens a data set does not import Lightning, and a help not even torch.
_HOMES = {"Augmentation": "augmentation", "ClassificationData": "classification", "GenerationData": "generation"}
_HOMES |= {"derive_seed": "seeding", "seeded": "seeding"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOMES[name] != "seeding":
        require_extra("train", name)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
