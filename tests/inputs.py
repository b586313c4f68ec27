"""Pictures, videos and folders as users have them, made on the spot."""

import gzip
import io
import os
import struct
import tarfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, features

ENDINGS = ("png", "jpg", "JPG", "jpeg", "jfif", "webp", "WEBP", "tif", "tiff", "bmp", "gif")
ATTACHED = 1024  # disposition of a cover picture
OTHERS = {"notes.txt": b"no picture", "list.TXT": b"no picture", "a.xmp": b"<x/>"}


def photo(seed: int = 0, size: tuple[int, int] = (24, 32)) -> Image.Image:
    """An RGB picture of smooth colours, which JPEG hardly changes, of a height and width."""
    corners = np.random.default_rng(seed).integers(40, 216, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(corners).resize(size[::-1], Image.Resampling.BICUBIC)


def write_mixed(folder: Path, count: int, seed: int = 0, size: tuple[int, int] = (32, 32)) -> Path:
    """A folder of pictures of every ending in turn, with other files among them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        photo(seed + number, size).save(folder / f"{number:03d}.{ENDINGS[number % len(ENDINGS)]}")
    for name, data in OTHERS.items():
        (folder / name).write_bytes(data)
    return folder


def companion(path: Path) -> Path:
    """Write beside a file what macOS does on foreign disks."""
    other = path.with_name(f"._{path.name}")
    other.write_bytes(b"\0\5\26\7\0\2\0\0Mac OS X")
    return other


def write_tar(path: Path, files: list[tuple[str, bytes]], mac: bool = False) -> Path:
    """A tar of files, each behind its companion as macOS' own `tar` writes it if `mac`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in files:
            folder, base = os.path.split(name)
            pair = [(os.path.join(folder, f"._{base}"), b"\0\5\26\7Mac OS X")] if mac else []
            for inner, content in (*pair, (name, data)):
                member = tarfile.TarInfo(inner)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def encode(image: Image.Image, file_format: str = "png", **options: Any) -> bytes:
    """The bytes of a picture's file."""
    encoded = io.BytesIO()
    image.save(encoded, file_format, **options)
    return encoded.getvalue()


def turned(image: Image.Image, orientation: int) -> bytes:
    """A JPEG of a camera that was held otherwise: its pixels lie as the sensor saw them, EXIF says how."""
    lying = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Pillow's transpositions, the inverse of what EXIF asks for
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = image.transpose(Image.Transpose(lying[orientation])) if orientation in lying else image
    return encode(pixels, "jpeg", quality=100, subsampling=0, exif=exif.tobytes())


def cut_out(image: Image.Image, hidden: tuple[int, int, int] = (255, 0, 255)) -> Image.Image:
    """An RGBA picture, transparent in its left half, where the colours are garbage."""
    pixels = np.asarray(image.convert("RGBA")).copy()
    pixels[:, : pixels.shape[1] // 2] = (*hidden, 0)
    return Image.fromarray(pixels)


def kinds() -> dict[str, bytes]:
    """A picture in every kind of file, by name."""
    image, half, gray = photo(), cut_out(photo()), photo().convert("L")
    deep = np.asarray(gray).astype(np.uint16) * 256 + 255
    palette = image.quantize(64)
    others = [photo(seed) for seed in (1, 2)]
    files = {f"{number}.jpg": turned(image, number) for number in (1, 3, 6, 8)}
    files |= {
        "plain.png": encode(image),
        "rgba.png": encode(half),
        "rgba.webp": encode(half, "webp", lossless=True, exact=True),
        "rgba.tif": encode(half, "tiff"),
        "la.png": encode(half.convert("LA")),
        "palette.png": encode(palette),
        "key.png": encode(palette, transparency=3),
        "deep.png": encode(Image.fromarray(deep)),
        "deep.tif": encode(Image.fromarray(deep), "tiff"),
        "cmyk.jpg": encode(image.convert("CMYK"), "jpeg", quality=100),
        "gray.bmp": encode(gray, "bmp"),
        "bits.png": encode(image.convert("1")),
        "moving.gif": encode(palette, "gif", save_all=True, append_images=others),
        "moving.webp": encode(half, "webp", lossless=True, save_all=True, append_images=others),
    }
    if features.check("avif"):
        files["photo.avif"] = encode(image, "avif")
    return files


def write_film(
    path: Path,
    frames: Sequence[np.ndarray],
    durations: Sequence[int] = (),
    rate: int = 24,
    colours: dict[str, int] | None = None,
    cover: np.ndarray | None = None,
    codec: str = "libx264",
) -> Path:
    """A film of frames, uint8 [H, W, 3], each shown for so many ticks of 1 / rate, with a cover picture if given."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        if cover is not None:
            picture = container.add_stream("mjpeg", rate=1, width=cover.shape[1], height=cover.shape[0])
            picture.pix_fmt, picture.disposition = "yuvj420p", ATTACHED
        stream = container.add_stream(codec, rate=rate, width=frames[0].shape[1], height=frames[0].shape[0])
        stream.pix_fmt, stream.options = "yuv420p", {"crf": "4", "g": "12"} if codec == "libx264" else {}
        for name, value in (colours or {}).items():
            setattr(stream.codec_context, name, value)
        if cover is not None:
            container.mux(picture.encode(av.VideoFrame.from_ndarray(cover, format="rgb24")))
            container.mux(picture.encode())
        shown = 0
        for image, duration in zip(frames, durations or [1] * len(frames), strict=True):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            if colours is not None:
                matrix = {1: 1, 6: 5}[colours["colorspace"]]
                frame = frame.reformat(format="yuv420p", dst_colorspace=matrix, dst_color_range=colours["color_range"])
            frame.pts, frame.time_base = shown, Fraction(1, rate)
            container.mux(stream.encode(frame))
            shown += duration
        container.mux(stream.encode())
    return path


def show_turned(path: Path, right: tuple[int, int], down: tuple[int, int]) -> None:
    """Set the display matrix of an mp4: where steps to the right and down in its pictures go, as (x, y)."""
    data = path.read_bytes()
    place = data.index(b"tkhd") + 44
    matrix = struct.pack(">9i", right[0] << 16, right[1] << 16, 0, down[0] << 16, down[1] << 16, 0, 0, 0, 1 << 30)
    path.write_bytes(data[:place] + matrix + data[place + len(matrix) :])


def write_idx(path: Path, numbers: np.ndarray, packed: bool = True) -> None:
    """Write an idx file of bytes."""
    data = struct.pack(f">I{numbers.ndim}I", 0x800 | numbers.ndim, *numbers.shape) + numbers.astype(np.uint8).tobytes()
    path.with_name(f"{path.name}.gz" if packed else path.name).write_bytes(gzip.compress(data) if packed else data)


def write_fashion_mnist(folder: Path, train: int, test: int) -> Path:
    """Write the files of Fashion-MNIST with pictures whose pixels are their number, the training ones packed."""
    for prefix, count in (("train", train), ("t10k", test)):
        pixels = np.arange(count)[:, None, None] + np.zeros((1, 28, 28))
        write_idx(folder / f"{prefix}-images-idx3-ubyte", pixels, packed=prefix == "train")
        write_idx(folder / f"{prefix}-labels-idx1-ubyte", np.arange(count) % 10, packed=prefix == "train")
    return folder
