"""Contact sheets: many samples with captions in one picture, for people to look at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_GAP, _MARGIN = 4, 8
_BACKGROUND, _INK = (255, 255, 255), (32, 32, 32)


def draw_grid(
    images: np.ndarray,
    captions: Sequence[str] | None = None,
    title: str = "",
    columns: int | None = None,
    min_side: int = 48,
) -> np.ndarray:
    """Draw images side by side with a caption below each and a title above all; clips play side by side.

    Args:
        images: uint8 [N, H, W, channels], 1 or 3 channels, or clips [N, T, H, W, channels].
        captions: one for each image.
        title: may have several lines.
        columns: images in a row; about the square root of N when None.
        min_side: smaller images are enlarged to about this many pixels, every pixel becoming a square.

    Returns:
        An RGB picture, uint8 [height, width, 3], or one for each frame, [T, height, width, 3].
    """
    if images.ndim == 5:
        return np.stack([draw_grid(frames, captions, title, columns, min_side) for frames in images.swapaxes(0, 1)])
    count, height, width, _ = images.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    scale = max(1, -(-min_side // max(height, width)))
    cell_width, cell_height = width * scale, height * scale
    font = ImageFont.load_default(size=12)
    caption_height = 16 if captions is not None else 0
    title_height = 18 * len(title.splitlines())
    grid_width = columns * (cell_width + _GAP) - _GAP
    title_width = max((math.ceil(font.getlength(line)) for line in title.splitlines()), default=0)
    size = (
        max(grid_width, title_width) + 2 * _MARGIN,
        title_height + rows * (cell_height + caption_height + _GAP) - _GAP + 2 * _MARGIN,
    )
    picture = Image.new("RGB", size, _BACKGROUND)
    pen = ImageDraw.Draw(picture)
    if title:
        pen.multiline_text((_MARGIN, _MARGIN - 2), title, fill=_INK, font=font, spacing=4)
    for i, pixels in enumerate(images):
        x = _MARGIN + i % columns * (cell_width + _GAP)
        y = _MARGIN + title_height + i // columns * (cell_height + caption_height + _GAP)
        image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).convert("RGB")
        picture.paste(image.resize((cell_width, cell_height), Image.Resampling.NEAREST), (x, y))
        if captions is not None:
            text = _shortened(captions[i], cell_width, font)
            pen.text((x + cell_width / 2, y + cell_height + 1), text, fill=_INK, font=font, anchor="ma")
    return np.array(picture)


def draw_strips(
    clips: np.ndarray, captions: Sequence[str] | None, title: str, frame_rate: float, frames: int = 8
) -> np.ndarray:
    """Draw clips one below the other, as frames at equal distances from the first to the last one.

    Args:
        clips: uint8 [N, T, H, W, channels].
        captions: one for each clip.
        title: may have several lines.
        frame_rate: frames a second; the captions of frames but the first are their times.
        frames: frames of a clip at most.

    Returns:
        An RGB picture, uint8 [height, width, 3].
    """
    shown = np.linspace(0, clips.shape[1] - 1, min(frames, clips.shape[1])).round().astype(int)
    times = [f"{number / frame_rate:.2f} s" for number in shown[1:]]
    texts = [text for i in range(len(clips)) for text in (captions[i] if captions is not None else "0 s", *times)]
    return draw_grid(clips[:, shown].reshape(-1, *clips.shape[2:]), texts, title, columns=len(shown))


def _shortened(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
