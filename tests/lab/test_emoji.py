"""Emoji pictures from small packages of the form of the real ones, and images of a table."""

import csv
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headmix_lab.emoji import SPLITS, STYLES, Picture, build, draw, main, split_things
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import Source, SplitRequest
from headmix_vision.errors import InputError

TONES = ("1F3FB", "1F3FF")


def encoded(seed: int, size: tuple[int, int] = (64, 64), kind: str = "png") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, lossless=True)
    return buffer.getvalue()


def entry(number: int, points: str, category: str, subcategory: str, tones: bool = False) -> dict[str, object]:
    head, *rest = points.split("-")
    forms = {tone: {"unified": "-".join([head, tone, *rest])} for tone in TONES}
    names = {"unified": points, "name": f"EMOJI {number}", "category": category, "subcategory": subcategory}
    return {**names, "sort_order": number, **({"skin_variations": forms} if tones else {})}


ENTRIES = [
    *(entry(i, f"1F6{i:02X}", "Travel & Places", "sky & weather") for i in range(10)),
    entry(10, "1F468-200D-1F373", "People & Body", "person-role", tones=True),  # man cook
    entry(11, "1F469-200D-1F373", "People & Body", "person-role", tones=True),  # woman cook
    entry(12, "1F3C3-200D-2642-FE0F", "People & Body", "person-sport"),  # man running
    entry(13, "1F3C3-200D-27A1-FE0F", "People & Body", "person-sport"),  # running, facing right
    entry(14, "0023-FE0F-20E3", "Symbols", "keycap"),
    entry(15, "1F1F3-1F1F4", "Flags", "country-flag"),  # Norway
    entry(16, "1F1F8-1F1EF", "Flags", "country-flag"),  # Svalbard, with the same flag
    entry(17, "1F3FB", "Component", "skin-tone"),
]


def write_packages(folder: Path, versions: dict[str, str] | None = None) -> list[Path]:
    """Archives as `npm pack` writes them."""
    codes = [
        form["unified"].lower()
        for item in ENTRIES
        for form in (item, *item.get("skin_variations", {}).values())  # type: ignore[attr-defined]
    ]
    paths = []
    for number, style in enumerate(STYLES):
        version = (versions or {}).get(style.name, style.version)
        files = {
            "package.json": json.dumps({"name": style.package, "version": version}).encode(),
            "README.md": b"licences",
            "img/sheets/64.png": b"a sheet, which is not read",
        }
        for i, code in enumerate(codes):
            seed = 100 * number + (codes.index("1f1f3-1f1f4") if code == "1f1f8-1f1ef" else i)
            if style.name == "fluent":
                files[f"{style.folder}/{code.replace('0023-fe0f', '23')}.webp"] = encoded(seed, (80, 88), "webp")
            else:
                files[f"{style.folder}/{code}.png"] = encoded(seed)
        if style.name != "fluent":
            files["emoji.json"] = json.dumps(ENTRIES[::-1]).encode()
        paths.append(folder / f"{style.name}.tgz")
        with tarfile.open(paths[-1], "w:gz") as archive:
            for name, data in files.items():
                member = tarfile.TarInfo(f"package/{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return paths


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Expects as many files as `write_packages` makes."""
    count = sum(1 + len(item.get("skin_variations", ())) for item in ENTRIES)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headmix_lab.emoji.STYLES", tuple(replace(style, files=count) for style in STYLES))
        yield


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_packages(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def emoji(sources: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "emoji"
    build(sources, folder)
    return folder


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "images.csv").open() as file:
        return list(csv.DictReader(file))


def test_things_are_whole_and_pictures_are_there_once(emoji: Path) -> None:
    table = rows(emoji)
    files = {str(path.relative_to(emoji)) for path in emoji.rglob("*.png")}
    assert {row["path"] for row in table} == files and len({row["sha256"] for row in table}) == len(table)
    splits = {thing: {row["split"] for row in table if row["thing"] == thing} for thing in {r["thing"] for r in table}}
    assert all(len(found) == 1 for found in splits.values())
    assert set.union(*splits.values()) == {"train", "validation", "test"}
    # 10 of the sky, cook in two sexes and three tones, runner twice, keycap: in three styles; one flag in two
    assert len(table) == 3 * (10 + 6 + 2 + 1) + 2
    assert {row["thing"] for row in table if row["group"] == "people-body"} == {"1f9d1-1f373", "1f3c3"}
    assert [(row["style"], row["code"]) for row in table if row["group"] == "flags"] == [
        ("google", "1f1f3-1f1f4"),
        ("twitter", "1f1f3-1f1f4"),
    ]
    assert sum(row["code"] == "23-20e3" for row in table) == 3
    assert (emoji / "licences" / "fluent" / "README.md").read_bytes() == b"licences"


def test_things_of_many_pictures_are_dealt_before_others() -> None:
    counts = {"a": 1, "b": 3, "c": 1, "d": 2, "e": 3, "f": 1}
    pictures: Any = [
        SimpleNamespace(emoji=SimpleNamespace(thing=thing, subgroup="other" if thing == "f" else "one"))
        for thing, count in counts.items()
        for _ in range(count)
    ]
    of_one = sorted("ac", key=lambda thing: hashlib.sha256(thing.encode()).hexdigest())
    of_three = sorted("be", key=lambda thing: hashlib.sha256(thing.encode()).hexdigest())
    expected = dict(zip([*of_three, "d", *of_one], SPLITS, strict=False)) | {"f": SPLITS[0]}
    assert split_things(pictures) == expected


def test_the_licences_of_the_pictures_stand_beside_them(emoji: Path) -> None:
    about = (emoji / "NOTICE.md").read_text().split("\n## ")[1:]
    for style, holder, licence in (
        ("google", "Google LLC", "Apache-2.0, https://www.apache.org/licenses/LICENSE-2.0"),
        ("twitter", "Twitter, Inc and other", "CC-BY-4.0, https://creativecommons.org/licenses/by/4.0/legalcode"),
        ("fluent", "Microsoft Corporation", "MIT, https://github.com/microsoft/fluentui-emoji/blob/main/LICENSE"),
    ):
        text = about.pop(0)
        assert text.startswith(f"`{style}`") and holder in text and f"licence of the pictures: {licence}" in text
        assert ("Cal Henderson, and does not cover the pictures" in text) == (style != "fluent")
    text = (emoji / "licences" / "fluent" / "LICENSE-PICTURES.txt").read_text()
    assert text.startswith("MIT License\n\nCopyright (c) Microsoft Corporation.\n\nPermission is hereby granted")
    assert text.endswith("SOFTWARE.\n")


def test_archives_and_installed_folders_give_the_same_data(
    emoji: Path, sources: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in sources:
        with tarfile.open(path) as archive:
            archive.extractall(tmp_path / path.stem, filter="data")
    main(["--source", *(str(tmp_path / path.stem / "package") for path in sources[::-1]), "--out", str(tmp_path / "a")])
    assert "classes: 4 by group, 0 by subgroup, 3 by style" in capsys.readouterr().out
    names = sorted(str(path.relative_to(emoji)) for path in emoji.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*.*"))
    assert all((emoji / name).read_bytes() == (tmp_path / "a" / name).read_bytes() for name in names)


def test_webp_holds_the_same_pixels(emoji: Path, sources: list[Path], tmp_path: Path) -> None:
    build(sources, tmp_path / "emoji", "webp")
    for one, other in zip(rows(emoji), rows(tmp_path / "emoji"), strict=True):
        assert other == {**one, "path": one["path"].replace(".png", ".webp")}
    png, webp = (table(folder, "table/group") for folder in (emoji, tmp_path / "emoji"))
    for index in range(len(png)):
        assert np.array_equal(np.asarray(png.read(index)[0]), np.asarray(webp.read(index)[0]))


def test_small_subgroups_are_no_classes(sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headmix_lab.emoji.LEAST_PICTURES", 30)
    build(sources, tmp_path / "emoji")
    assert {row["group"] for row in rows(tmp_path / "emoji") if row["subgroup"]} == {"travel-places"}
    splits = ("train", "validation", "test")
    subgroups = [table(tmp_path / "emoji", "table/subgroup", split, skip_unlabelled=True) for split in splits]
    assert [source.class_names for source in subgroups] == [["sky-weather"]] * 3
    assert [len(source) for source in subgroups] == [18, 6, 6]


def test_a_picture_lies_on_white_in_the_middle_of_a_square() -> None:
    pixels = np.zeros((128, 64, 4), dtype=np.uint8)
    pixels[:64, :, 3] = 255  # black above, transparent black below
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    drawn = np.asarray(draw(buffer.getvalue()))
    assert drawn.shape == (64, 64, 3)
    assert (drawn[4:28, 20:44] == 0).all() and (drawn[36:] == 255).all() and (drawn[:, :12] == 255).all()


def test_what_is_wrong_with_sources(sources: list[Path], tmp_path: Path) -> None:
    older = write_packages(tmp_path, {"twitter": "15.1.2"})
    torn = tmp_path / "torn.tgz"
    torn.write_bytes(sources[0].read_bytes()[:2000])
    (tmp_path / "empty").mkdir()
    (tmp_path / "lacking").mkdir()
    with tarfile.open(sources[0]) as archive:
        members = archive.getmembers()
        archive.extractall(tmp_path / "lacking", members[:-2] + members[-1:], filter="data")
        archive.extractall(tmp_path / "nameless", members, filter="data")
    (tmp_path / "nameless" / "package" / "emoji.json").write_text("{}")
    out = tmp_path / "deep" / "emoji"
    for given, message in (
        (
            sources[1:2],
            r"lacks 2 of 3 packages: npm pack emoji-datasource-google@16.0.0 @lobehub/fluent-emoji-3d@1.1.0",
        ),
        (older, r"twitter 15.1.2, it must be 16.0.0: npm pack emoji-datasource-twitter@16.0.0"),
        ([*sources, sources[0]], "which another --source is already"),
        ([torn], "torn.tgz cannot be read"),
        (
            [tmp_path / "lacking" / "package"],
            "has 21 files in img/google/64/, it must have 22: npm pack emoji-datasource-google@16.0.0",
        ),
        ([tmp_path / "nameless" / "package", *sources[1:]], r"emoji.json of .* cannot be read \(it names no emoji\)"),
        ([tmp_path / "empty"], "is not a package of npm"),
        ([tmp_path / "nothing"], "does not exist"),
    ):
        with pytest.raises(InputError, match=message):
            build(given, out)
    assert not out.parent.exists()
    out.mkdir(parents=True)
    (out.parent / "link").symlink_to("nowhere")
    for taken in (out, out.parent / "link"):
        with pytest.raises(InputError, match="already exists"):
            build(sources, taken)


def test_a_second_process_is_told_before_it_draws(
    sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw_all(packages: object) -> list[Picture]:
        with pytest.raises(InputError, match="emoji is in use by process"):
            build(sources, tmp_path / "emoji")
        raise InputError("the first was drawing")

    monkeypatch.setattr("headmix_lab.emoji.draw_all", draw_all)
    with pytest.raises(InputError, match="the first was drawing"):
        build(sources, tmp_path / "emoji")
    assert not list(tmp_path.iterdir())


def table(folder: Path, name: str, split: str = "train", skip_unlabelled: bool = False) -> Source:
    request = SplitRequest(name, split, (3,), "generation", root=str(folder), skip_unlabelled=skip_unlabelled)
    return open_source(request)


def test_columns_of_a_table_are_classes(emoji: Path) -> None:
    groups, pairs = table(emoji, "table/group"), table(emoji / "images.csv", "table/style+group", "val")
    assert groups.class_names == ["flags", "people-body", "symbols", "travel-places"]
    for source, split, columns in ((groups, "train", ["group"]), (pairs, "validation", ["style", "group"])):
        wanted = [row for row in rows(emoji) if row["split"] == split]
        assert len(source) == len(wanted)
        for index, row in enumerate(wanted):
            image, target = source.read(index)
            assert source.class_names[target] == " ".join(row[name] for name in columns)
            assert np.array_equal(np.asarray(image), np.asarray(Image.open(emoji / row["path"])))
    assert len(pairs.class_names) == len({(row["style"], row["group"]) for row in rows(emoji)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,split\na.png,train\n", "has the columns path, split, there is no 'kind'"),
        ("path,kind\n,cat\n", "line 2: path is missing"),
        ("path,split,kind\na.png,test,cat\n", "has no rows of the split 'train'"),
        ("path,kind\na.png,\n", "line 2 has no label; 1 of 1 images of .* have no valid label: mend them, or leave"),
        ("path,kind,kind\na.png,cat,x\n", "images.csv, line 1: there are two columns 'kind'"),
        ("path,kind\na.png,cat\nb.png,cat, black\n", "images.csv, line 3: 3 cells, there are 2 columns"),
    ],
    ids=["column", "path", "split", "label", "twice", "cells"],
)
def test_mistakes_in_a_table(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "images.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        table(tmp_path, "table/kind")


def test_a_table_without_splits_is_trained_on_and_rows_without_a_label_can_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "images.csv").write_text("path,kind\na.png,10\nb.png,\nc.png,9\n")
    source = table(tmp_path, "table/kind", skip_unlabelled=True)
    assert (len(source), source.class_names) == (2, ["9", "10"])
    assert [Path(source.name(index)).name for index in range(2)] == ["a.png", "c.png"]


def test_no_table(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must be a table .csv, or a folder with the table images.csv"):
        table(tmp_path, "table/kind")
