"""What images come from: one small interface over built-in, timm, torchvision and Hugging Face data sets."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image

from headmix_vision.data.seeding import derive_seed
from headmix_vision.errors import InputError

RawImage = Image.Image | torch.Tensor
"""A PIL image of the wanted mode, or a float32 tensor [C, H, W] with values in [0, 1]."""

DIGITS_SPLIT_SEED = 0
FAKE_SIZES = {"train": 4096, "validation": 512}
EVAL_SYNONYMS = ("validation", "val", "valid", "eval", "evaluation")
TRAIN_SYNONYMS = ("train", "training")


class Source(Protocol):
    """Random access to the images of one split. `read` may raise anything when an image is damaged."""

    class_names: list[str]

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[RawImage, int]:
        """Image and target of one sample."""
        ...

    def name(self, index: int) -> str:
        """What to call a sample in a message: its file, where there is one."""
        ...


def canonical_split(split: str) -> str:
    """The name `train` or `validation` of a built-in data set's split, from any of timm's synonyms."""
    if split in TRAIN_SYNONYMS:
        return "train"
    if split in EVAL_SYNONYMS:
        return "validation"
    raise InputError(f"split {split!r} does not exist, the data set has train and validation")


class Digits:
    """The 1797 handwritten digits (UCI, test part of "Optical Recognition") that scikit-learn carries with it.

    Values are the official 0..16 divided by 16: float32 [channels, 8, 8], exact. The stratified 80/20 split is fixed.
    """

    def __init__(self, split: str, channels: int = 1) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        images, targets = load_digits(return_X_y=True)
        parts = train_test_split(
            np.arange(len(targets)), test_size=0.2, stratify=targets, random_state=DIGITS_SPLIT_SEED
        )
        self.indices = np.sort(parts[0] if canonical_split(split) == "train" else parts[1])
        pixels = torch.from_numpy(images[self.indices]).to(torch.float32) / 16
        self.images = pixels.view(-1, 1, 8, 8).expand(-1, channels, -1, -1)
        self.targets = targets[self.indices].tolist()
        self.class_names = [str(digit) for digit in range(10)]

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, index: int) -> tuple[RawImage, int]:
        return self.images[index], self.targets[index]

    def name(self, index: int) -> str:
        return f"digits[{self.indices[index]}]"


class FakeImages:
    """Random pixels of the model's input size, to try a recipe without data; the target is index % num_classes."""

    def __init__(self, split: str, image_size: tuple[int, int], mode: str, num_classes: int) -> None:
        self.split = canonical_split(split)
        self.image_size = image_size
        self.mode = mode
        self.class_names = [str(i) for i in range(num_classes)]

    def __len__(self) -> int:
        return FAKE_SIZES[self.split]

    def read(self, index: int) -> tuple[RawImage, int]:
        shape = self.image_size if self.mode == "L" else (*self.image_size, 3)
        generator = np.random.default_rng(derive_seed(list(FAKE_SIZES).index(self.split), index))
        pixels = generator.integers(0, 256, shape, dtype=np.uint8)
        return Image.fromarray(pixels), index % len(self.class_names)

    def name(self, index: int) -> str:
        return f"fake {self.split}[{index}]"


class TimmReader:
    """A timm reader (folder, tar, Hugging Face) without the silent retries of timm's ImageDataset."""

    def __init__(self, reader: Any, class_names: list[str], mode: str) -> None:
        self.reader = reader
        self.class_names = class_names
        self.mode = mode

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, index: int) -> tuple[RawImage, int]:
        stream, target = self.reader[index]
        with stream, Image.open(stream) as image:
            return image.convert(self.mode), int(target)

    def name(self, index: int) -> str:
        return str(self.reader.filename(index, absolute=True) or f"image {index}")


class SavedImages:
    """One split written by Hugging Face's `save_to_disk`, which timm's reader cannot open.

    Args:
        dataset: A `datasets.Dataset` with the columns image (not decoded) and label.
        class_names: One name per label.
        mode: PIL mode of the images.
    """

    def __init__(self, dataset: Any, class_names: list[str], mode: str) -> None:
        self.dataset = dataset
        self.class_names = class_names
        self.mode = mode

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> tuple[RawImage, int]:
        item = self.dataset[index]
        stored = item["image"]
        with Image.open(io.BytesIO(stored["bytes"]) if stored["bytes"] else stored["path"]) as image:
            return image.convert(self.mode), int(item["label"])

    def name(self, index: int) -> str:
        return str(self.dataset[index]["image"]["path"] or f"image {index}")


class TorchvisionImages:
    """A torchvision data set of (PIL image, target) pairs."""

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


class ImageFiles:
    """Image files without targets, for prediction."""

    def __init__(self, paths: Sequence[Path], mode: str) -> None:
        self.paths = [str(path) for path in paths]
        self.mode = mode
        self.class_names: list[str] = []

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> tuple[RawImage, int]:
        with Image.open(self.paths[index]) as image:
            return image.convert(self.mode), -1

    def name(self, index: int) -> str:
        return self.paths[index]


def find_images(path: str) -> list[Path]:
    """An image file, or all image files below a folder in sorted order.

    Raises:
        InputError: Nothing there, or no image in the folder.
    """
    from timm.data.readers.img_extensions import get_img_extensions

    root = Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise InputError(f"predict_path {path!r} is neither a file nor a folder")
    extensions = get_img_extensions()
    files = sorted(file for file in root.rglob("*") if file.suffix.lower() in extensions and file.is_file())
    if not files:
        raise InputError(f"predict_path {path!r} has no image ({', '.join(extensions)})")
    return files
