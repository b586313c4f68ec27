"""`fashion_mnist`: 70,000 pictures of clothes, 28 x 28 grey pixels, from the idx files of Xiao et al. (2017).

N pictures, C channels.
"""

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headmix_vision.data.datasets.base import BatchSource, SplitRequest, canonical_split
from headmix_vision.data.seeding import derive_seed
from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_file, check_memory

DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"
DEBIAN_PACKAGE = "dataset-fashion-mnist"
CLASS_NAMES = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SIZE = 28
SPLIT_SEED = 0
HELD_OUT = 12  # one of so many training pictures is for validation: 5,000 of 60,000
_UINT8 = 0x08  # type of the numbers in an idx file
_COPIES = 5  # a byte of a picture and its number in a batch
_SPLITS = ("train", "validation", "all", "test")


def open_fashion_mnist(request: SplitRequest) -> "FashionMnist":
    """Open a split of the folder under `root`; without root the folder of the Debian package."""
    if request.root is None and not Path(DEBIAN_FOLDER).is_dir():
        raise InputError(
            f"dataset {request.name!r} is not installed: apt install {DEBIAN_PACKAGE}, or give the folder of its four"
            " idx files as root"
        )
    root = Path(DEBIAN_FOLDER) if request.root is None else request.existing_root()
    return FashionMnist(root, request.split, request.channels)


class FashionMnist(BatchSource):
    """One split of Fashion-MNIST: float32 [C, 28, 28], the official 0..255 divided by 255.

    The files hold 60,000 pictures for training and 10,000 for testing. A twelfth of those for training, 5,000 by a
    permutation of a fixed seed, is the split `validation`.

    Args:
        root: Folder of the four idx files, packed (`.gz`) or not.
        split: `train` (55,000), `validation` (5,000), a synonym of either, `all` (both, in the order of the file), or
            `test` (10,000).
        channels: C: 1, or 3 equal ones.

    Raises:
        InputError: Another split or number of channels, or files that are missing, damaged or of other data.
    """

    in_memory = True

    def __init__(self, root: Path, split: str, channels: int = 1) -> None:
        if channels not in (1, 3):
            raise InputError(f"fashion_mnist holds images of 1 or 3 channels, asked for {channels}")
        self.split = split if split in ("all", "test") else _training_split(split)
        prefix = "t10k" if split == "test" else "train"
        pixels = read_idx(root, f"{prefix}-images-idx3-ubyte", axes=3)
        labels = read_idx(root, f"{prefix}-labels-idx1-ubyte", axes=1)
        if pixels.shape[1:] != (SIZE, SIZE) or len(labels) != len(pixels) or len(pixels) < HELD_OUT:
            sizes = " and ".join("x".join(map(str, part.shape)) for part in (pixels, labels))
            raise InputError(f"{root} has {sizes} pixels and labels of {prefix}, they must be Nx{SIZE}x{SIZE} and N")
        if labels.max() >= len(CLASS_NAMES):
            raise InputError(f"a label of {prefix} in {root} is {labels.max()}, there are {len(CLASS_NAMES)} classes")
        generator = torch.Generator().manual_seed(derive_seed(SPLIT_SEED))
        order = torch.randperm(len(labels), generator=generator)
        parts = {"validation": order[: len(order) // HELD_OUT], "train": order[len(order) // HELD_OUT :]}
        self.indices = parts[self.split].sort().values if self.split in parts else torch.arange(len(labels))
        self.shape = (channels, SIZE, SIZE)
        self.class_names = list(CLASS_NAMES)
        self._pixels = torch.from_numpy(pixels)[self.indices, None]
        self._targets = torch.from_numpy(labels)[self.indices].long()
        self._file = "test" if split == "test" else "training"

    def __len__(self) -> int:
        return len(self._targets)

    def read_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        images = self._pixels[chosen].float().div_(255)
        return images.expand(-1, self.shape[0], -1, -1), self._targets[chosen]

    def name(self, index: int) -> str:
        return f"fashion_mnist, {self._file} picture {int(self.indices[index])}"

    def keys(self) -> list[str] | None:
        """Numbers in the file, and labels."""
        return [f"{n} {target}" for n, target in zip(self.indices.tolist(), self._targets.tolist(), strict=True)]


def _training_split(split: str) -> str:
    try:
        return canonical_split(split)
    except InputError:
        raise InputError(f"split {split!r} does not exist, fashion_mnist has {', '.join(_SPLITS)}") from None


def read_idx(root: Path, name: str, axes: int) -> np.ndarray:
    """Read an idx file of bytes, packed by gzip or not.

    Args:
        root: Its folder.
        name: Its name without `.gz`.
        axes: Number of axes that it must have.

    Returns:
        The numbers, uint8, with so many axes.

    Raises:
        InputError: No such file, or one that is damaged or of another kind.
    """
    path = next((path for path in (root / name, root / f"{name}.gz") if path.is_file()), None)
    if path is None:
        raise InputError(f"{root} has neither {name} nor {name}.gz")
    check_file(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            start = file.read(4 * (1 + axes))
            header = np.frombuffer(start[: len(start) // 4 * 4], ">u4")
            if len(header) < 1 + axes or header[0] != _UINT8 << 8 | axes:
                raise InputError(f"{path} is not an idx file of bytes with {axes} axes")
            shape = [*map(int, header[1:])]
            size = math.prod(shape)
            check_memory(_COPIES * size, f"{path} with {'x'.join(map(str, shape))} numbers")
            numbers = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if len(numbers) != size:
        held = "more" if len(numbers) > size else len(numbers)
        raise InputError(f"{path} is damaged: its header states {size} numbers, it holds {held}")
    return np.frombuffer(bytearray(numbers), np.uint8).reshape(shape)
