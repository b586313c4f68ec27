"""Pictures as files, photographs that scikit-learn brings along, and photographs cut into a data set.

    python -m headmix_lab.photographs --source FOLDER_OR_PICTURE ... --out data/photographs
    headmix evaluate probe --root data/photographs --train folder:train --test folder:val --model MODEL

A class is a photograph. Training pictures are squares of its left half, validation pictures of its right half: no pixel
is in both. A backbone that knows photographs finds the other half of each.
"""

import argparse
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from headmix_vision.console import OneLineParser, one_line_errors
from headmix_vision.errors import InputError, check_counts
from headmix_vision.files.pictures import Decoding, readable
from headmix_vision.files.writing import atomic_folder, atomic_path, check_place

SIZE = 224  # of a square, in pixels
SHARE = 0.7  # of the shorter side of a half that a square takes


def save_png(path: Path, picture: np.ndarray) -> None:
    """Write a picture, uint8 [H, W, 3], as a PNG file that is complete or absent."""
    with atomic_path(path) as temporary:
        Image.fromarray(picture).save(temporary, "png")


def save_picture(path: Path, picture: np.ndarray, frame_rate: float = 8.0) -> None:
    """Write a picture, uint8 [H, W, 3], as PNG, a clip, uint8 [T, H, W, 3], as lossy WebP; the path has no ending."""
    if picture.ndim == 3:
        save_png(path.with_name(f"{path.name}.png"), picture)
        return
    first, *others = map(Image.fromarray, picture)
    duration_ms = round(1000 / frame_rate)
    with atomic_path(path.with_name(f"{path.name}.webp")) as temporary:
        first.save(temporary, "webp", save_all=True, append_images=others, duration=duration_ms, loop=0, quality=80)


def write_photographs(folder: Path) -> None:
    """Write the photographs of scikit-learn, a temple and a flower, as PNG files."""
    from sklearn.datasets import load_sample_images

    found = load_sample_images()
    for name, pixels in zip(found.filenames, found.images, strict=True):
        save_png(folder / Path(name).with_suffix(".png").name, pixels)


def cut(photograph: Image.Image, count: int, rng: np.random.Generator) -> Iterator[tuple[str, Image.Image]]:
    """Yield squares of a photograph at random places, as many of the left half (`train`) as of the right (`val`)."""
    half, height = photograph.width // 2, photograph.height
    side = int(SHARE * min(half, height))
    for split, left in (("train", 0), ("val", photograph.width - half)):
        for _ in range(count):
            x, y = left + int(rng.integers(half - side + 1)), int(rng.integers(height - side + 1))
            square = photograph.crop((x, y, x + side, y + side))  # resizing with a box would read pixels around it
            yield split, square.resize((SIZE, SIZE), Image.Resampling.BICUBIC)


def build(sources: Sequence[Path], out: Path, count: int) -> int:
    """Write the squares of all photographs in files and folders; return the number of photographs.

    Raises:
        InputError: `out` exists, there is no photograph, two have one name, or one cannot be read or is too small.
    """
    check_counts(1, **{"--count": count})
    if os.path.lexists(out):
        raise InputError(f"--out {out} already exists; choose another one or remove it")
    check_place(out)
    files = [file for source in sources for file in (sorted(source.iterdir()) if source.is_dir() else [source])]
    names = Counter(file.stem for file in files)
    if not names:
        raise InputError("--source holds no files")
    if twice := [name for name, number in names.items() if number > 1]:
        raise InputError(f"--source has two photographs named {twice[0]}; names are classes: rename one")
    with atomic_folder(out) as folder:
        for file in files:
            with readable(file):
                photograph = Decoding().first_frame(file)
            if photograph.width < 4 or photograph.height < 2:
                raise InputError(f"{file} has {photograph.width}x{photograph.height} pixels, at least 4x2 are needed")
            for number, (split, square) in enumerate(cut(photograph, count, np.random.default_rng(0))):
                place = folder / split / file.stem
                place.mkdir(parents=True, exist_ok=True)
                save_png(place / f"{number}.png", np.asarray(square))
    return len(files)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; wrong input ends the process with one line and exit status 2."""
    form = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(prog="python -m headmix_lab.photographs", description=__doc__, formatter_class=form)
    parser.add_argument("--source", type=Path, nargs="+", required=True, help="pictures, or folders of pictures alone")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; it must not exist")
    parser.add_argument("--count", type=int, default=8, help="squares of each half (%(default)s)")
    options = parser.parse_args(args)
    with one_line_errors():
        print(f"wrote {options.out}: {build(options.source, options.out, options.count)} photographs")


if __name__ == "__main__":
    main()
