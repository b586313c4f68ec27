"""The centre crop that ADM, DiT and SiT are trained and scored with."""

from PIL import Image


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """Scale the shorter side to `size` pixels and cut the centre square out.

    Halved by box averaging while the shorter side is at least twice too long, then bicubic: the order of ADM's data
    loader, which decides what "ImageNet at 256 pixels" means.

    Args:
        image: Any PIL image.
        size: Side of the result in pixels.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))
