"""`torch/NAME`: data sets of torchvision, opened by timm."""

from collections.abc import Sequence
from typing import Any

from headmix_vision.data.datasets.base import Pictures, RawImage, Source, SplitRequest
from headmix_vision.data.datasets.timm_readers import create_timm_dataset
from headmix_vision.data.labels import MOST_CLASSES, LabelRule, check_label, number_labels
from headmix_vision.files.pictures import Decoding


def open_torchvision(request: SplitRequest) -> Source:
    """Open a split of a torchvision data set that lies under the root.

    Raises:
        InputError: No such data set, or an image without a valid label.
    """
    opened = create_timm_dataset(request.name, root=str(request.existing_root()), split=request.split)
    if hasattr(opened, "loader"):  # of files, of which torchvision's own forgets EXIF and transparency
        opened.loader = request.decoding.first_frame
    names, labels = getattr(opened, "classes", None), getattr(opened, "targets", None)
    names = names and [_class_name(name) for name in names]
    kept: Sequence[int] = range(len(opened))
    targets: Sequence[int] | None = None
    if labels is not None:
        kept, targets, names = number_labels(
            [label.item() if hasattr(label, "item") else label for label in labels],
            lambda number: _name(opened, number),
            request.name,
            request.label_rule,
            class_names=names,
        )
    return TorchvisionImages(opened, kept, targets, names or [], request.decoding, request.label_rule)


def _class_name(name: str | Sequence[str]) -> str:
    # torchvision's ImageNet has a tuple of synonyms per class
    return name if isinstance(name, str) else ", ".join(name)


def _name(data: Any, number: int) -> str:
    samples = getattr(data, "samples", None)
    return str(samples[number][0]) if samples else f"{type(data).__name__}[{number}]"


class TorchvisionImages(Pictures):
    """A torchvision data set of (PIL image, target) pairs.

    Args:
        data: The data set.
        kept: Which of its images are read.
        targets: Their labels; None where the data set does not list them.
        class_names: One name per label.
        decoding: The pixels that they become.
        rule: What is done with an image that has no valid label.
    """

    def __init__(
        self,
        data: Any,
        kept: Sequence[int],
        targets: Sequence[int] | None,
        class_names: list[str],
        decoding: Decoding,
        rule: LabelRule,
    ) -> None:
        super().__init__(data, class_names, decoding)
        self.kept, self.targets, self.rule = kept, targets, rule

    def __len__(self) -> int:
        return len(self.kept)

    def read(self, index: int) -> tuple[RawImage, int]:
        image, target = self.data[self.kept[index]]
        if self.rule.needed:
            target = check_label(target, self.name(index), len(self.class_names) or MOST_CLASSES)
        return self.decoding.convert(image), int(target)

    def keys(self) -> list[str] | None:
        """Numbers and labels."""
        if self.targets is None:
            return None
        return [f"{number} {target}" for number, target in zip(self.kept, self.targets, strict=True)]

    def name(self, index: int) -> str:
        return _name(self.data, self.kept[index])
