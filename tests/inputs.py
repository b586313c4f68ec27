"""Pictures, videos and folders as users have them, made on the spot."""

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ENDINGS = ("png", "jpg", "JPG", "jpeg", "jfif", "webp", "WEBP", "tif", "tiff", "bmp", "gif")
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
