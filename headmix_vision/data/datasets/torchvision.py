"""`torch/NAME`: data sets of torchvision, opened by timm."""

from collections.abc import Sequence
from typing import Any

from headmix_vision.data.datasets.base import RawImage, Selection, Source, SplitRequest
from headmix_vision.data.datasets.timm_readers import create_timm_dataset
from headmix_vision.data.labels import MOST_CLASSES, LabelRule, check_label, number_labels


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
            lambda number: _name(opened, request.split, number),
            request.name,
            request.label_rule,
            class_names=names,
        )
    return TorchvisionImages(request.split, request.label_rule, opened, kept, targets, names or [], request.decoding)


def _class_name(name: str | Sequence[str]) -> str:
    # torchvision's ImageNet has a tuple of synonyms per class
    return name if isinstance(name, str) else ", ".join(name)


def _name(data: Any, split: str, number: int) -> str:
    samples = getattr(data, "samples", None)
    return str(samples[number][0]) if samples else f"{type(data).__name__} {split}[{number}]"


class TorchvisionImages(Selection):
    """A torchvision data set of (PIL image, target) pairs.

    Args:
        split: What messages call the split.
        rule: What is done with an image that has no valid label.
        selection: As for `Selection`.
    """

    def __init__(self, split: str, rule: LabelRule, *selection: Any) -> None:
        super().__init__(*selection)
        self.split, self.rule = split, rule

    def read(self, index: int) -> tuple[RawImage, int]:
        image, target = self.data[self.kept[index]]
        if self.rule.needed:
            target = check_label(target, self.name(index), len(self.class_names) or MOST_CLASSES)
        return self.decoding.convert(image), int(target)

    def name(self, index: int) -> str:
        return _name(self.data, self.split, self.kept[index])
