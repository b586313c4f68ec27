"""`torch/NAME`: data sets of torchvision, opened by timm."""

from collections.abc import Sequence

from headmix_vision.data.datasets.base import Pictures, RawImage, Source, SplitRequest, number_names
from headmix_vision.data.datasets.timm_readers import create_timm_dataset


def open_torchvision(request: SplitRequest) -> Source:
    """Open a split of a torchvision data set that lies under the root."""
    opened = create_timm_dataset(request.name, root=str(request.existing_root()), split=request.split)
    if hasattr(opened, "loader"):  # of files, of which torchvision's own forgets EXIF and transparency
        opened.loader = request.decoding.first_frame
    names = getattr(opened, "classes", None) or number_names(getattr(opened, "targets", []))
    return TorchvisionImages(opened, [_class_name(name) for name in names], request.decoding)


def _class_name(name: str | Sequence[str]) -> str:
    # torchvision's ImageNet has a tuple of synonyms per class
    return name if isinstance(name, str) else ", ".join(name)


class TorchvisionImages(Pictures):
    """A torchvision data set of (PIL image, target) pairs."""

    def read(self, index: int) -> tuple[RawImage, int]:
        image, target = self.data[index]
        return self.decoding.convert(image), int(target)

    def name(self, index: int) -> str:
        samples = getattr(self.data, "samples", None)
        return str(samples[index][0]) if samples else f"{type(self.data).__name__}[{index}]"
