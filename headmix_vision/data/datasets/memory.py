"""Pictures that are decoded once and kept in memory."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from headmix_vision.data.datasets.base import BatchSource, RawImage, Source, to_picture
from headmix_vision.errors import InputError
from headmix_vision.files.pictures import readable
from headmix_vision.files.reading import check_memory

_THREADS = 8


class InMemory(BatchSource):
    """Pictures of another source, all of one size, decoded and kept as uint8.

    Worker processes that are forked share them.

    Args:
        source: The pictures.

    Raises:
        InputError: A picture that cannot be read, or is of another size than the first.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.class_names, self.what = source.class_names, source.what
        if len(source):
            first, _ = self._decode(0)
            check_memory(
                2 * len(source) * first.numel(),
                f"in_memory: {len(source)} pictures of {first.shape[-2]}x{first.shape[-1]} pixels",
            )
        with ThreadPoolExecutor(_THREADS) as pool:
            pixels, targets = zip(*pool.map(self._decode, range(len(source))), strict=True)
        self.shape = tuple(pixels[0].shape)
        for index, picture in enumerate(pixels):
            if picture.shape != pixels[0].shape:
                sizes = " and ".join("x".join(map(str, one.shape[:0:-1])) for one in (pixels[0], picture))
                raise InputError(f"in_memory takes pictures of one size, {self.name(index)} is not: {sizes} pixels")
        # [N, C, H, W], laid out as Pillow wants pictures, channels last
        self._pixels = torch.stack([picture.movedim(0, -1) for picture in pixels]).movedim(-1, 1)
        self._targets = torch.tensor(targets, dtype=torch.int64)

    def _decode(self, index: int) -> tuple[Tensor, int]:
        with readable(self.name(index)):
            image, target = self.source.read(index)
        return pil_to_tensor(to_picture(image)), target

    def keys(self) -> list[str] | None:
        return self.source.keys()

    def __len__(self) -> int:
        return len(self._targets)

    def read(self, index: int) -> tuple[RawImage, int]:  # type: ignore[override]  # transforms take it as from a file
        """Picture as the source reads it, and target."""
        pixels = self._pixels.numpy()[index]
        return Image.fromarray(pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels[0]), int(self._targets[index])

    def read_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        images = self._pixels[indices].to(torch.float32, memory_format=torch.contiguous_format).div_(255)
        return images, self._targets[indices]

    def name(self, index: int) -> str:
        return self.source.name(index)
