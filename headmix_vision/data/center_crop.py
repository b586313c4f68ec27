"""The centre crop that ADM, DiT and SiT are trained and scored with."""

import math

from PIL import Image

from headmix_vision.files.reading import check_memory


def center_crop(image: Image.Image, size: int | tuple[int, int]) -> Image.Image:
    """Scale an image until it just covers `size`, and cut its centre out.

    Halved by box averaging while both sides are at least twice too long, then bicubic: the order of ADM's data loader,
    which decides what "ImageNet at 256 pixels" means.

    Args:
        image: Any PIL image.
        size: Height and width of the result in pixels, or one number for a square.
    """
    height, width = (size, size) if isinstance(size, int) else size
    while image.width >= 2 * width and image.height >= 2 * height:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = max(width / image.width, height / image.height)
    enlarged = round(image.width * scale), round(image.height * scale)
    check_memory(8 * math.prod(enlarged), f"a picture of {image.width}x{image.height} pixels, as {width}x{height},")
    image = image.resize(enlarged, Image.Resampling.BICUBIC)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
