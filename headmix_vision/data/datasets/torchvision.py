"""`torch/NAME`: data sets of torchvision, opened by timm."""

from collections.abc import Sequence
from typing import Any

from headmix_vision.data.datasets.base import RawImage, Source, SplitRequest, number_names
from headmix_vision.data.datasets.timm_readers import create_timm_dataset


def open_torchvision(request: SplitRequest) -> Source:
    """Open a split of a torchvision data set that lies under the root."""
    opened = create_timm_dataset(request.name, root=str(request.existing_root()), split=request.split)
    names = getattr(opened, "classes", None) or number_names(getattr(opened, "targets", []))
    return TorchvisionImages(opened, [_class_name(name) for name in names], request.mode)


def _class_name(name: str | Sequence[str]) -> str:
    # torchvision's ImageNet has a tuple of synonyms per class
    return name if isinstance(name, str) else ", ".join(name)


class TorchvisionImages(Source):
    """A torchvision data set of (PIL image, target) pairs.

    Args:
        dataset: The data set.
        class_names: One name per label.
        mode: PIL mode of the images, `L` or `RGB`.
    """

    def __init__(self, dataset: Any, class_names: list[str], mode: str) -> None:
        self.dataset = dataset
        self.class_names = class_names
        self.mode = mode

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> tuple[RawImage, int]:
        image, target = self.dataset[index]
        return image.convert(self.mode), int(target)

    def name(self, index: int) -> str:
        samples = getattr(self.dataset, "samples", None)
        return str(samples[index][0]) if samples else f"{type(self.dataset).__name__}[{index}]"
