"""Images and labels for training: `ClassificationData` and what it is made of."""

from typing import TYPE_CHECKING

from headmix_vision.data.seeding import derive_seed, seeded

if TYPE_CHECKING:
    from headmix_vision.data.augmentation import Augmentation
    from headmix_vision.data.classification import ClassificationData

__all__ = ["Augmentation", "ClassificationData", "derive_seed", "seeded"]


def __getattr__(name: str) -> object:
    # On demand, so that the two seeding helpers do not import Lightning.
    if name == "Augmentation":
        from headmix_vision.data.augmentation import Augmentation

        return Augmentation
    if name == "ClassificationData":
        from headmix_vision.data.classification import ClassificationData

        return ClassificationData
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
