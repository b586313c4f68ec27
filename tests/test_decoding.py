"""What pixels the file of a picture has, whoever reads it."""

import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inputs import encode, kinds, photo, turned, write_tar
from PIL import Image

from headmix_vision.cli import cache_latents
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.data.datasets.folders import ImageFiles, find_images
from headmix_vision.data.datasets.latents import LatentShards
from headmix_vision.data.shard_index import write_index
from headmix_vision.errors import InputError
from headmix_vision.evaluation.sample_sets import open_samples
from headmix_vision.files.pictures import Decoding, is_clip
from headmix_vision.files.video import probe_clip, read_clip
from headmix_vision.sampling.planning import _read_image

SIZE = 24
BACKGROUND = "#102030"


def pixels(file: Any, **options: str) -> np.ndarray:
    return np.asarray(Decoding(**options).first_frame(file))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["jpeg", "webp", "png", "tiff"])
def test_photos_are_upright(orientation: int, file_format: str) -> None:
    lying = Image.open(io.BytesIO(turned(photo(), orientation)))
    options = {"quality": 100} if file_format in ("jpeg", "webp") else {}
    file = encode(lying, file_format, exif=lying.getexif().tobytes(), **options)
    found = pixels(file)
    assert found.shape == (24, 32, 3) and np.abs(found.astype(int) - np.asarray(photo())).mean() < 4


def test_exif_that_cannot_be_read_says_nothing() -> None:
    whole = turned(photo(), 6)
    place = whole.index(b"Exif\0\0") + 6
    damaged = whole[:place] + b"\xff" * 8 + whole[place + 8 :]
    assert pixels(damaged).shape == (32, 24, 3)
    assert pixels(turned(photo(), 9)).shape == (24, 32, 3)
    xmp = b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/>'
    assert pixels(encode(photo(), "jpeg", xmp=xmp)).shape == (32, 24, 3)


@pytest.mark.parametrize("name", ["rgba.png", "rgba.webp", "rgba.tif", "la.png", "moving.webp"])
def test_transparent_pixels_show_the_background(name: str) -> None:
    half = np.asarray(photo().convert("L" if name == "la.png" else "RGB").convert("RGB"))[:, 16:]
    for background, colour in (("white", 255), ("black", 0), ("#102030", (16, 32, 48))):
        found = pixels(kinds()[name], background=background)
        assert (found[:, :16] == colour).all() and np.array_equal(found[:, 16:], half)
    gray = pixels(kinds()[name], mode="L")
    assert (gray[:, :16] == 255).all() and gray.shape == (24, 32)


def test_opaque_pixels_keep_their_colours_and_half_transparent_ones_are_mixed() -> None:
    ramp = np.arange(256, dtype=np.uint8)
    colours = np.stack([ramp, ramp[::-1], np.roll(ramp, 7)], -1)[None]
    image = Image.fromarray(colours)
    image.putalpha(255)
    assert np.array_equal(pixels(encode(image)), colours)
    image.putalpha(128)
    mixed = (colours * 128.0 + 255 * 127) / 255
    assert np.abs(pixels(encode(image)) - mixed).max() < 1
    keyed, palette = pixels(kinds()["key.png"]), pixels(kinds()["palette.png"])
    index = np.asarray(photo().quantize(64))
    assert (keyed[index == 3] == 255).all() and np.array_equal(keyed[index != 3], palette[index != 3])


@pytest.mark.parametrize("name", ["deep.png", "deep.tif", "deep.jp2", "deep.pgm"])
def test_the_upper_8_of_16_bits_are_taken(name: str) -> None:
    gray = np.asarray(photo().convert("L"))
    deep = (gray.astype(np.uint16) << 8) + np.arange(32, dtype=np.uint16) * 8
    formats = {"tif": "tiff", "jp2": "jpeg2000"}
    file = encode(Image.fromarray(deep), formats.get(name[-3:], "png"))
    if name.endswith("pgm"):
        file = b"P5 32 24 65535\n" + deep.astype(">u2").tobytes()
    assert np.array_equal(pixels(file, mode="L"), gray)
    colours = encode(Image.fromarray(np.float32(deep)), "tiff")
    with pytest.raises(ValueError, match="its pixels are of mode F, they must have 8 or 16 bits a channel"):
        pixels(colours)


def test_a_value_of_16_bits_can_be_transparent() -> None:
    deep = np.full((4, 4), 1000, np.uint16)
    deep[0] = 1001  # equal in the upper bits
    found = pixels(encode(Image.fromarray(deep), transparency=1001), mode="L")
    assert (found[0] == 255).all() and (found[1:] == 3).all()


def test_colours_of_print_and_animated_pictures() -> None:
    files = kinds()
    assert np.abs(pixels(files["cmyk.jpg"]).astype(int) - np.asarray(photo())).mean() < 6
    for name in ("moving.gif", "moving.webp"):
        first = pixels(files["palette.png" if name.endswith("gif") else "rgba.png"])
        assert np.array_equal(pixels(files[name]), first)
    frames = [np.asarray(frame) for frame in Decoding().frames(files["moving.webp"])]
    assert len(frames) == 3 and np.array_equal(frames[2], np.asarray(photo(2)))


def test_animated_pictures_are_clips_and_pages_are_not(tmp_path: Path) -> None:
    files = {name: kinds()[name] for name in ("moving.webp", "rgba.png")}
    for name, file_format in (("pages.tif", "tiff"), ("views.jpg", "mpo")):
        files[name] = encode(photo(), file_format, save_all=True, append_images=[photo(1)])
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert [is_clip(tmp_path / name) for name in files] == [True, False, False, False]
    assert probe_clip(tmp_path / "moving.webp").num_frames == 3
    frames = read_clip(tmp_path / "moving.webp", lambda count, *_: range(count)[::-1], Decoding())
    assert [np.array_equal(frame, photo(seed)) for frame, seed in zip(frames, (2, 1), strict=False)] == [True, True]
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / "0.jpg").write_bytes(turned(photo(), 6))
    assert probe_clip(tmp_path / "frames").size == (24, 32)


def readers(root: Path) -> dict[str, Callable[[], list[np.ndarray]]]:
    """Every way to the pictures of a folder, at their own size or cropped."""

    def source(name: str, place: Path) -> Callable[[], list[np.ndarray]]:
        def read() -> list[np.ndarray]:
            request = SplitRequest(name, "train", (3,), "scoring", root=str(place), background=BACKGROUND)
            opened = open_source(request)
            return [np.asarray(opened.read(index)[0]) for index in range(len(opened))]

        return read

    def predicted() -> list[np.ndarray]:
        files = ImageFiles(find_images(str(root / "folder" / "train"), "--images"), Decoding(background=BACKGROUND))
        return [np.asarray(files.read(index)[0]) for index in range(len(files))]

    def scored() -> list[np.ndarray]:
        pictures = open_samples(str(root / "folder" / "train"), "RGB", SIZE, background=BACKGROUND)
        return [np.asarray(item) for _, item in pictures.read(range(len(pictures)))]

    def first_frames() -> list[np.ndarray]:
        return [_read_image(str(path))[0] for path in sorted((root / "folder" / "train" / "a").iterdir())]

    found = {
        "folder": source("folder", root / "folder"),
        "tar": source("folder", root / "tar"),
        "table": source("table/kind", root / "table.csv"),
        "shards": source("shards", root / "shards"),
        "torchvision": source("torch/folder", root / "folder" / "train"),
        "predict": predicted,
        "scores": scored,
        "first frame": first_frames,
    }
    if importlib.util.find_spec("datasets") is not None:
        found["hfds"] = source("hfds", root / "hub")
    return found


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The kinds of pictures as a folder, a tar, a table, shards and a set of Hugging Face."""
    root = tmp_path_factory.mktemp("everywhere")
    # torchvision lists fewer endings, and both sort by name
    files = {name: data for name, data in sorted(kinds().items()) if not name.endswith((".gif", ".avif"))}
    folder = root / "folder" / "train" / "a"
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    write_tar(root / "tar" / "train.tar", [(f"a/{name}", data) for name, data in files.items()], mac=True)
    members = []
    for name, data in files.items():
        stem, _, suffix = name.partition(".")
        members += [(f"{stem}_{suffix}.{suffix}", data), (f"{stem}_{suffix}.cls", b"0")]
    write_tar(root / "shards" / "train" / "0.tar", members, mac=True)
    write_index(root / "shards" / "train")
    (root / "table.csv").write_text("path,kind\n" + "".join(f"folder/train/a/{name},a\n" for name in files))
    if importlib.util.find_spec("datasets") is not None:
        import datasets

        rows = {"image": [{"bytes": data, "path": None} for data in files.values()], "label": [0] * len(files)}
        columns = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a"])})
        datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, columns)}).save_to_disk(str(root / "hub"))
    return root, [*files]


def test_every_command_reads_the_same_pixels(everywhere: tuple[Path, list[str]], tmp_path: Path) -> None:
    root, names = everywhere
    files = [(root / "folder/train/a" / name).read_bytes() for name in names]
    expected = {
        background: [pixels(data, background=background) for data in files] for background in ("white", BACKGROUND)
    }
    for reader, read in readers(root).items():
        background = "white" if reader == "first frame" else BACKGROUND
        for name, found, picture in zip(names, read(), expected[background], strict=True):
            assert np.array_equal(found, picture), (reader, name)
    arguments = ("--images", root / "folder" / "train", "--vae", "none", "--image-size", SIZE, "--out", tmp_path / "x")
    options = ("--background", BACKGROUND, "--workers", 0, "--device", "cpu")
    cache_latents.main([str(argument) for argument in (*arguments, *options)])
    cached = LatentShards(tmp_path / "x")
    assert cached.manifest["background"] == BACKGROUND
    scored = torch.cat([*open_samples(str(root / "folder" / "train"), "RGB", SIZE, background=BACKGROUND).batches(4)])
    latents = torch.stack([cached[index][0] for index in range(len(cached))])
    assert torch.equal(((latents + 1) / 2 * 255).round().to(torch.uint8), scored)


def test_a_changed_byte_of_a_png_changes_no_pixel_unnoticed() -> None:
    file = encode(photo().convert("L").resize((8, 8)), "png")
    right, noticed = pixels(file), 0
    for place in range(len(file)):
        changed = bytearray(file)
        changed[place] ^= 0x80
        try:
            found = pixels(bytes(changed))
        except Exception:  # as Pillow raises
            noticed += 1
        else:
            assert np.array_equal(found, right), place
    assert noticed > 0.9 * len(file)


def test_what_is_not_a_picture_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    with pytest.raises(ValueError, match="it is not a picture that Pillow reads"):
        pixels(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"a.png cannot be read \(it is not a picture that Pillow reads\)"):
        probe_clip(tmp_path / "a.png")
    for wrong in ("clear", "#12345678", 3):
        with pytest.raises(InputError, match="it must be a colour such as white, black or #rrggbb"):
            Decoding(background=wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(importlib.util.find_spec("pillow_heif") is None, reason="needs pillow-heif")
def test_heic_is_read_where_its_plug_in_is_installed(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Decoding().first_frame(encode(photo()))  # registers the plug-in
    lying = photo().transpose(Image.Transpose.ROTATE_90)
    (tmp_path / "a.HEIC").write_bytes(encode(lying, "heif", quality=100, exif=exif.tobytes()))
    (path,) = find_images(str(tmp_path), "--images")
    assert np.abs(pixels(path).astype(int) - np.asarray(photo())).mean() < 4
