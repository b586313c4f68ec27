"""Build a folder of colour pictures, emoji in three drawing styles, from packages that a user fetches.

    npm pack emoji-datasource-google@16.0.0 emoji-datasource-twitter@16.0.0 @lobehub/fluent-emoji-3d@1.1.0
    python -m headmix_lab.emoji --source *.tgz --out data/emoji

The folder is one of images for each split and group (`train/food-drink/...`, data set `folder`), of 64 x 64 pixels on
white, with a table `images.csv` (data set `table/NAME`) that names split, group, subgroup, style, thing and checksum of
each picture. The licences of the pictures are in `NOTICE.md`.

A thing is an emoji in all its styles, skin tones and sexes, and facing either way, together with what is drawn equally;
all of it is in one split. Of pictures that are equal to the bit, only the first is kept.
"""

import argparse
import csv
import hashlib
import os
import re
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from headmix_vision.console import OneLineParser, one_line_errors, progress
from headmix_vision.data.datasets.image_tables import TABLE
from headmix_vision.errors import InputError
from headmix_vision.files.pictures import Decoding, readable
from headmix_vision.files.reading import parse_json
from headmix_vision.files.writing import atomic_folder, check_place

SIZE = 64
SPLITS = ("train", "test", "validation", "train", "train")
"""Splits that take the things of a subgroup in turn, largest things first."""
LEAST_PICTURES = 60
"""Fewest pictures of a class: the column `subgroup` is empty for smaller subgroups."""

FORMATS: dict[str, dict[str, Any]] = {"png": {}, "webp": {"lossless": True, "quality": 100}}
"""Formats of the files, and how Pillow writes them."""

MIT = """MIT License

{holder}.

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
"""
MAX_PACKAGE_BYTES = 1 << 30  # unpacked
_DOCUMENTS = ("package.json", "emoji.json", "LICENSE", "README.md")
_LEFT_OUT = {"skin-tone"}  # subcategories: samples of colours
_MARKS = {"200d", "fe0f"}  # joiner, and the wish for a colour picture
_MODIFIERS = {"2640", "2642", "27a1"}  # woman, man, facing right
_SAME_THINGS = {
    **dict.fromkeys(("1f468", "1f469"), "1f9d1"),  # man, woman: person
    **dict.fromkeys(("1f466", "1f467"), "1f9d2"),  # boy, girl: child
    **dict.fromkeys(("1f474", "1f475"), "1f9d3"),  # old man, old woman: older person
    **dict.fromkeys(("1f478", "1f934"), "1fac5"),  # princess, prince: person with crown
    **dict.fromkeys(("1f930", "1fac3"), "1fac4"),  # pregnant woman, man: person
    **dict.fromkeys(("1f385", "1f936"), "1f9d1-1f384"),  # Father, Mother Christmas: Mx Claus
    **dict.fromkeys(("1f46b", "1f46c", "1f46d"), "1f9d1-1f91d-1f9d1"),  # couples holding hands
    "1f491": "1f9d1-2764-1f9d1",  # couple with heart
    "1f48f": "1f9d1-2764-1f48b-1f9d1",  # kiss
    "1f46a": "1f9d1-1f9d1-1f9d2",  # family
    "1f57a": "1f483",  # dancers
    **dict.fromkeys(("1f446", "1f447", "1f449"), "1f448"),  # pointing up, down, right: left
    "1f91c": "1f91b",  # fist to the right: to the left
    "1faf2": "1faf1",  # left hand: right hand
    "1faf8": "1faf7",  # pushing to the right: to the left
}


@dataclass(frozen=True)
class Style:
    """A drawing style.

    Args:
        name: The style.
        package: Name of the package in npm's registry.
        version: The version that is read.
        folder: Where the pictures lie in the package.
        work: Name and place of the pictures' own project.
        holder: Who holds the rights in the pictures.
        licence: SPDX name of the licence of the pictures, and where its text is.
        packager: Who made the package, and what the files copied from it are.
        files: Number of files in that folder.
        flags: Whether its flags are drawn in this style.
    """

    name: str
    package: str
    version: str
    folder: str
    work: str
    holder: str
    licence: tuple[str, str]
    packager: str
    files: int
    flags: bool = True

    @property
    def spec(self) -> str:
        """Argument of `npm pack`."""
        return f"{self.package}@{self.version}"


_HENDERSON = (
    "`LICENSE` is the MIT licence of the package emoji-data, Copyright (c) 2013 Cal Henderson, and does not cover the"
    " pictures; `README.md` names theirs"
)
STYLES = (
    Style(
        "google",
        "emoji-datasource-google",
        "16.0.0",
        "img/google/64",
        "Noto Emoji (https://github.com/googlefonts/noto-emoji)",
        "Copyright Google LLC",
        ("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0"),
        _HENDERSON,
        3786,
    ),
    Style(
        "twitter",
        "emoji-datasource-twitter",
        "16.0.0",
        "img/twitter/64",
        "Twemoji (https://github.com/jdecked/twemoji)",
        "Copyright Twitter, Inc and other contributors",
        ("CC-BY-4.0", "https://creativecommons.org/licenses/by/4.0/legalcode"),
        _HENDERSON,
        3786,
    ),
    Style(
        "fluent",
        "@lobehub/fluent-emoji-3d",
        "1.1.0",
        "assets",
        "Fluent Emoji (https://github.com/microsoft/fluentui-emoji)",
        "Copyright (c) Microsoft Corporation",
        ("MIT", "https://github.com/microsoft/fluentui-emoji/blob/main/LICENSE"),
        "`README.md` is of the package of LobeHub, and links to a licence which the package lacks;"
        " `LICENSE-PICTURES.txt` covers the pictures",
        3391,
        flags=False,
    ),
)


@dataclass(frozen=True)
class Emoji:
    """An emoji of Unicode, or one with a skin tone.

    Args:
        code: Its code points, in hexadecimal, without leading zeros, joiners and marks.
        name: Its name in English.
        group: Its category.
        subgroup: Its subcategory.
        thing: What it shows, whatever the skin tone, sex or direction.
    """

    code: str
    name: str
    group: str
    subgroup: str
    thing: str


@dataclass(frozen=True)
class Drawn:
    """A drawing of an emoji.

    Args:
        emoji: The emoji.
        sha256: Of the bytes of its pixels.
    """

    emoji: Emoji
    sha256: str


Drawing = TypeVar("Drawing", bound=Drawn)


@dataclass(frozen=True)
class Picture(Drawn):
    """An emoji in a style.

    Args:
        style: Name of the style.
        image: RGB, `SIZE` x `SIZE`.
    """

    style: str
    image: Image.Image

    @property
    def path(self) -> str:
        """Path in the folder of its split, without a suffix."""
        return f"{self.emoji.group}/{self.style}-{self.emoji.code}"


Files = dict[str, bytes]


def read_package(source: Path, styles: Sequence[Style]) -> Files:
    """Read pictures, table and documents of a package, by their names within it.

    Args:
        source: The archive that `npm pack` writes, or the folder into which npm installs the package.
        styles: Packages that it can be; their folders are read.

    Raises:
        InputError: It is neither.
    """
    folders = {style.folder for style in styles}
    if source.is_dir():
        paths = [source / name for name in _DOCUMENTS]
        paths += [path for folder in folders for path in (source / folder).glob("*")]
        files = {path.relative_to(source).as_posix(): path.read_bytes() for path in paths if path.is_file()}
    elif source.is_file():
        with readable(source), tarfile.open(source) as archive:
            members = {member.name.partition("/")[2]: member for member in _members(archive) if member.isfile()}
            files = {
                name: archive.extractfile(member).read()  # type: ignore[union-attr]
                for name, member in members.items()
                if name in _DOCUMENTS or name.rpartition("/")[0] in folders
            }
    else:
        raise InputError(f"--source {source} does not exist")
    if "package.json" not in files:
        raise InputError(f"--source {source} is not a package of npm: it has no package.json")
    return files


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive, which is compressed; ValueError before more is unpacked than a package has."""
    for member in archive:
        if member.offset_data + member.size > MAX_PACKAGE_BYTES:
            raise ValueError(f"it unpacks to more than {MAX_PACKAGE_BYTES >> 30} GiB")
        yield member


def read_packages(sources: Sequence[Path], styles: Sequence[Style]) -> dict[str, Files]:
    """Read the packages of all styles, by style.

    Args:
        sources: The packages, see `read_package`.
        styles: The styles, each of which has one package.

    Raises:
        InputError: A package that is missing, with the command that fetches it, of another version, unknown, given
            twice or damaged.
    """
    found: dict[str, Files] = {}
    for source in sources:
        files = read_package(source, styles)
        with readable(f"{source}, package.json"):
            about = parse_json(files["package.json"], "it")
            name, version = about["name"], about["version"]
        style = next((style for style in styles if style.package == name), None)
        if style is None:
            raise InputError(f"--source {source} is {name}, it must be {', '.join(style.package for style in styles)}")
        if version != style.version:
            raise InputError(
                f"--source {source} is {name} {version}, it must be {style.version}: npm pack {style.spec}"
            )
        if style.name in found:
            raise InputError(f"--source {source} is {name}, which another --source is already")
        count = sum(file.startswith(f"{style.folder}/") for file in files)
        if count != style.files:
            raise InputError(
                f"--source {source} has {count} files in {style.folder}/, it must have {style.files}:"
                f" npm pack {style.spec}"
            )
        found[style.name] = files
    missing = [style.spec for style in styles if style.name not in found]
    if missing:
        raise InputError(f"--source lacks {len(missing)} of {len(styles)} packages: npm pack {' '.join(missing)}")
    return found


def read_emoji(table: bytes) -> list[Emoji]:
    """Read the emoji of `emoji.json`, in the order of Unicode, each followed by its skin tones.

    Raises:
        ValueError: There are none.
    """
    found = []
    for entry in sorted(parse_json(table, "the table of emoji"), key=lambda entry: entry["sort_order"]):
        if entry["subcategory"] in _LEFT_OUT:
            continue
        group, subgroup = _slug(entry["category"]), _slug(entry["subcategory"])
        for form in (entry, *entry.get("skin_variations", {}).values()):
            code, thing = emoji_code(form["unified"]), _thing(emoji_code(entry["unified"]))
            found.append(Emoji(code, entry["name"].lower(), group, subgroup, thing))
    if not found:
        raise ValueError("it names no emoji")
    return found


def _slug(name: str) -> str:
    return "-".join(re.findall("[a-z0-9]+", name.lower()))


def emoji_code(points: str) -> str:
    """Normalise code points, which packages spell differently: `0023-FE0F-20E3` to `23-20e3`."""
    return "-".join(point.lstrip("0") for point in re.split("[-_]", points.lower()) if point not in _MARKS)


def _thing(code: str) -> str:
    first, *others = code.split("-")
    return "-".join(_SAME_THINGS.get(p, p) for p in (first, *(p for p in others if p not in _MODIFIERS)))


def draw(data: bytes) -> Image.Image:
    """Decode a picture and fit it into `SIZE` pixels."""
    return fit_square(Decoding().first_frame(data), SIZE)


def fit_square(shape: Image.Image, size: int) -> Image.Image:
    """Put a picture on a white square, and scale it to `size` pixels with Lanczos' filter."""
    side = max(shape.size)
    canvas = Image.new("RGB", (side, side), "white")
    canvas.paste(shape, ((side - shape.width) // 2, (side - shape.height) // 2))
    return canvas.resize((size, size), Image.Resampling.LANCZOS)


def draw_all(packages: dict[str, Files]) -> list[Picture]:
    """Draw every emoji in every style that has it, and join things with equal drawings.

    Raises:
        InputError: A file that is missing or damaged.
    """
    package = STYLES[0].package
    with readable(f"emoji.json of {package}"):
        emoji = read_emoji(packages[STYLES[0].name]["emoji.json"])
    jobs, pictures = list(_jobs(packages, emoji)), []
    with progress("drawing", len(jobs), "pictures") as advance:
        for one, style, name, data in jobs:
            with readable(f"{name} of {style.package}"):
                image = draw(data)
            pictures.append(Picture(one, hashlib.sha256(image.tobytes()).hexdigest(), style.name, image))
            advance(1)
    return keep_first(pictures)


def keep_first(drawings: Sequence[Drawing]) -> list[Drawing]:
    """Keep the first of equal drawings, and join the things that they show."""
    equal: dict[str, list[Drawing]] = defaultdict(list)
    for drawing in drawings:
        equal[drawing.sha256].append(drawing)
    things = {drawing.emoji.thing: drawing.emoji.thing for drawing in drawings}
    for twins in equal.values():
        joined = {things[drawing.emoji.thing] for drawing in twins}
        if len(joined) > 1:
            things = {name: min(joined) if thing in joined else thing for name, thing in things.items()}
    kept = (first for first, *_ in equal.values())
    return [replace(one, emoji=replace(one.emoji, thing=things[one.emoji.thing])) for one in kept]


def _jobs(packages: dict[str, Files], emoji: list[Emoji]) -> Iterator[tuple[Emoji, Style, str, bytes]]:
    for style in STYLES:
        # of two names for one emoji, the last one, which has all marks, counts
        by_code = {
            emoji_code(Path(name).stem): (name, data)
            for name, data in sorted(packages[style.name].items())
            if name.startswith(f"{style.folder}/")
        }
        for one in emoji:
            if one.code in by_code and (style.flags or one.group != "flags"):
                yield one, style, *by_code[one.code]


def split_things(pictures: Sequence[Drawing]) -> dict[str, str]:
    """Deal the things of each subgroup to `SPLITS`, things of equal size in the order of their hashes.

    Returns:
        The split of each thing.
    """
    sizes = Counter(picture.emoji.thing for picture in pictures)
    first = {picture.emoji.thing: picture.emoji.subgroup for picture in reversed(pictures)}
    members: dict[str, list[str]] = defaultdict(list)
    for thing in sorted(first, key=lambda thing: (-sizes[thing], hashlib.sha256(thing.encode()).digest())):
        members[first[thing]].append(thing)
    return {thing: SPLITS[i % len(SPLITS)] for things in members.values() for i, thing in enumerate(things)}


def build(sources: Sequence[Path], out: Path, file_format: str = "png") -> dict[str, Any]:
    """Write the folder; it is complete or absent.

    Args:
        sources: The packages, see `read_package`.
        out: The folder, which must not exist.
        file_format: `png` or `webp`, without loss either.

    Returns:
        `pictures` of each split, the number of `classes` by column, and `sha256` of the table.

    Raises:
        InputError: A package that is missing or wrong, or a folder that exists or that another process writes.
        OSError: The folder cannot be written.
    """
    if os.path.lexists(out):
        raise InputError(f"--out {out} already exists; choose another one or remove it")
    check_place(out)
    packages = read_packages(sources, STYLES)
    with atomic_folder(out) as complete:  # before anything is drawn: a second process ends at once
        return _fill(complete, packages, file_format)


def _fill(folder: Path, packages: dict[str, Files], file_format: str) -> dict[str, Any]:
    pictures = draw_all(packages)
    splits, sizes = split_things(pictures), Counter(picture.emoji.subgroup for picture in pictures)
    rows = [
        {
            "path": f"{splits[picture.emoji.thing]}/{picture.path}.{file_format}",
            "split": splits[picture.emoji.thing],
            "group": picture.emoji.group,
            "subgroup": picture.emoji.subgroup if sizes[picture.emoji.subgroup] >= LEAST_PICTURES else "",
            "style": picture.style,
            "thing": picture.emoji.thing,
            "code": picture.emoji.code,
            "name": picture.emoji.name,
            "sha256": picture.sha256,
        }
        for picture in pictures
    ]
    for row, picture in zip(rows, pictures, strict=True):
        path = folder / row["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.image.save(path, format=file_format, **FORMATS[file_format])
    digest = write_rows(folder / TABLE, rows)
    write_notices(folder, packages, STYLES, f"put on white, and scaled to {SIZE} x {SIZE} pixels")
    return {
        "pictures": Counter(row["split"] for row in rows),
        "classes": {name: len({row[name] for row in rows} - {""}) for name in ("group", "subgroup", "style")},
        "sha256": digest,
    }


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    """Write a table and return its SHA-256."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_notices(folder: Path, packages: dict[str, Files], styles: Sequence[Style], changes: str) -> None:
    """Write `NOTICE.md`, and the licences of all pictures, which were changed."""
    lines = ["# Pictures and their licences", "", f"All pictures were changed: {changes}."]
    for style in styles:
        name, url = style.licence
        lines += [
            *("", f"## `{style.name}`", ""),
            f"- pictures: {style.work}",
            f"- holder: {style.holder}",
            f"- licence of the pictures: {name}, {url}",
            f"- taken from: {style.spec}",
            f"- in `licences/{style.name}/`: {style.packager}",
        ]
    (folder / "NOTICE.md").write_text("\n".join(lines) + "\n")
    for style in styles:
        place = folder / "licences" / style.name
        place.mkdir(parents=True)
        if style.licence[0] == "MIT":  # which asks for its text beside what it covers
            (place / "LICENSE-PICTURES.txt").write_text(MIT.format(holder=style.holder))
        for name in ("LICENSE", "README.md"):
            if name in packages[style.name]:
                (place / name).write_bytes(packages[style.name][name])


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; wrong input ends the process with one line and exit status 2."""
    parser = OneLineParser(
        prog="python -m headmix_lab.emoji",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--source", type=Path, nargs="+", required=True, help="archives of npm pack, or folders of node_modules"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write; it must not exist")
    parser.add_argument(
        "--format", choices=FORMATS, default="png", help="of the files; webp is a quarter smaller, also lossless (png)"
    )
    options = parser.parse_args(args)
    with one_line_errors():
        built = build(options.source, options.out, options.format)
        counts = ", ".join(f"{count} {split}" for split, count in sorted(built["pictures"].items()))
        classes = ", ".join(f"{count} by {name}" for name, count in built["classes"].items())
        print(f"{options.out}: {counts}; classes: {classes}; {TABLE} sha256 {built['sha256']}")


if __name__ == "__main__":
    main()
