"""Sizes of a cache: what an option names, and the size that is nearest to a file's shape."""

import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headmix_vision.data.cache_request import CacheRequest
from headmix_vision.data.datasets.base import ClipSource, Source, to_picture
from headmix_vision.errors import InputError
from headmix_vision.files.pictures import readable
from headmix_vision.files.video import probe_clip

_PROBE_THREADS = 8


def cache_sizes(request: CacheRequest) -> list[tuple[int, int]]:
    """Heights and widths to cache at, in pixels."""
    if not request.sizes:
        return [(request.image_size, request.image_size)]
    found = []
    for size in request.sizes:
        match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", size)
        if match is None:
            raise InputError(f"--sizes {size}: a size is height x width in pixels, as 480x832")
        found.append((int(match[1]), int(match[2])))
    if len({*found}) < len(found):
        raise InputError(f"--sizes {' '.join(request.sizes)} has a size twice")
    return found


def deal_to_sizes(source: Source, sizes: list[tuple[int, int]]) -> list[list[int]]:
    """Deal each sample to the size with the aspect ratio nearest to its file's."""
    if len(sizes) == 1:
        return [list(range(len(source)))]

    def nearest(index: int) -> int:
        height, width = _file_size(source, index)
        return min(range(len(sizes)), key=lambda i: abs(math.log(sizes[i][1] * height / (sizes[i][0] * width))))

    with ThreadPoolExecutor(_PROBE_THREADS) as pool:
        chosen = list(pool.map(nearest, range(len(source))))
    return [[index for index, size in enumerate(chosen) if size == number] for number in range(len(sizes))]


def _file_size(source: Source, index: int) -> tuple[int, int]:
    """Height and width of a picture or video as it is shown."""
    with readable(source.name(index)):
        if source.what == ClipSource.what:  # also of a source derived from one
            return probe_clip(Path(source.name(index))).size
        image = to_picture(source.read(index)[0])
    return image.height, image.width
