"""Sizes that files and options state, refused before memory or work is spent on them."""

import copy
import io
import os
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inputs import photo

from headmix_lab.tables import ResultTable
from headmix_vision.errors import InputError
from headmix_vision.evaluation.sample_sources import NpzSamples, npz_array, npz_arrays
from headmix_vision.files import reading
from headmix_vision.files.pictures import Decoding, picture_formats, read_png, write_png
from headmix_vision.files.reading import (
    check_disk,
    check_file,
    check_files,
    check_memory,
    check_nesting,
    check_workers,
    check_yaml,
    memory_left,
    num_cores,
    parse_json,
    parse_yaml,
    read_text,
)
from headmix_vision.files.tars import Member, list_members
from headmix_vision.files.tensors import file_sha256, open_tensors, read_tensors, read_weights, write_tensors
from headmix_vision.files.video import ClipInfo, is_whole_video, probe, probe_clip, read_clip, read_frames, write_video
from headmix_vision.runs.checkpoints import read_checkpoint


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has no memory left, so that whatever asks for some is refused, however small."""
    monkeypatch.setattr(reading, "_SMALL_BYTES", 0)
    monkeypatch.setattr(reading, "memory_left", lambda: 0)


def test_memory_is_the_least_of_machine_container_and_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    left = memory_left()
    assert 1 << 26 < left <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    used = 1024 * reading._numbers(Path("/proc/self/status"))["VmSize:"]
    monkeypatch.setattr(reading.resource, "getrlimit", lambda which: (used + 1_000_000, -1))
    assert memory_left() < 2_000_000
    monkeypatch.setattr(reading, "_rooms_in_groups", lambda: [-5])
    assert memory_left() == 0


@pytest.mark.parametrize("version", [0, 1])
def test_containers_limit_the_memory(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, usage, reclaimable = reading._VERSIONS[version]
    group = tmp_path / "a" / "b"
    group.mkdir(parents=True)
    for name, text in ((limit, "5000"), (usage, "4000"), ("memory.stat", f"x 1\n{reclaimable} 300\n")):
        (group / name).write_text(f"{text}\n")
    (tmp_path / limit).write_text("max\n")
    (tmp_path / usage).write_text("1\n")
    monkeypatch.setattr(reading, "_groups", lambda: [group, tmp_path])
    assert reading._rooms_in_groups() == [1300]


@pytest.mark.parametrize(
    ("said", "groups"),
    [
        ("0::/a/b\n", ["a/b", "a", ""]),
        ("0::/\n", [""]),
        ("3:cpu,memory:/a/b\n2:cpu:/c\nx:y\n", ["memory/a/b", "memory/a", "memory"]),
    ],
)
def test_containers_are_those_of_the_process_and_around_it(
    said: str, groups: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cgroup").write_text(said)
    monkeypatch.setattr(reading, "Path", lambda path: tmp_path / Path(path).name)
    monkeypatch.setattr(reading, "_CONTROL_GROUPS", tmp_path)
    assert [place.relative_to(tmp_path) for place in reading._groups()] == [Path(group) for group in groups]
    (tmp_path / "cgroup").unlink()
    assert reading._groups() == []


def test_memory_and_workers_beyond_the_machine_are_refused() -> None:
    check_memory(1 << 20, "a little")
    with pytest.raises(InputError, match=r"^x of 9 needs 1.0e\+18 bytes of memory, .* GB is left$"):
        check_memory(10**18, "x of 9")
    check_workers(**{"--workers": 16 * num_cores()})
    with pytest.raises(InputError, match=f"^--workers is 100000, it must be at most {16 * num_cores()}: "):
        check_workers(**{"--workers": 100_000})


SHARED_PART = [1] * 9  # ten values, of which a whole file may hold many copies


@pytest.mark.parametrize(
    "spend",
    [
        lambda count, place: check_memory(count, "x"),
        lambda count, place: check_disk(place / "absent", count, "x"),
        lambda count, place: ((place / "a").write_bytes(b"a" * count), read_text(place / "a")),
        lambda count, place: check_yaml("- 1\n" * (count - 1)),
        lambda count, place: check_nesting("x", [SHARED_PART] * 110 + [1] * (count - 1101)),
    ],
    ids=["memory", "disk", "text", "yaml", "values"],
)
def test_what_fills_a_limit_is_accepted(
    spend: Callable[[int, Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_memory: None
) -> None:
    monkeypatch.setattr(reading, "memory_left", lambda: 1200)
    monkeypatch.setattr(reading.shutil, "disk_usage", lambda place: reading.shutil._ntuple_diskusage(9, 9, 1200))
    for name in ("MAX_TEXT_BYTES", "MAX_YAML_VALUES", "MAX_VALUES"):
        monkeypatch.setattr(reading, name, 1200)
    spend(1200, tmp_path)
    with pytest.raises(InputError):
        spend(1201, tmp_path)


def special(folder: Path, name: str) -> Path:
    path = folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("x.png", lambda path: Decoding().first_frame(path)),
        ("x.gif", probe_clip),
        ("x.mp4", probe),
        ("x.png", read_png),
        ("x.tar", lambda path: [*list_members(path)]),
        ("x.npz", npz_arrays),
        ("x.json", read_text),
        ("x.safetensors", lambda path: open_tensors(path).__enter__()),
        ("x.safetensors", read_tensors),
        ("x.safetensors", file_sha256),
        ("x.safetensors", lambda path: check_files(path.parent)),
        ("x.csv", lambda path: ResultTable(path, ["a"], 1, str)),
    ],
)
def test_pipes_and_devices_are_not_opened(name: str, read: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a named pipe, it must be a regular file"):
        read(special(tmp_path, name))
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="is a device, it must be a regular file"):
        read(tmp_path / name)


def test_folders_and_absent_files_are_told_as_the_system_does(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        check_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        check_file(tmp_path / "absent")


def test_texts_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"a.json is damaged: it is not UTF-8 text"):
        read_text(path)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole
    with pytest.raises(InputError, match=r"a.json has more than 64 MiB"):
        read_text(path)


@pytest.mark.parametrize("text", ["[" * 200_000, "[" * 300 + "]" * 300, "{", "1" * 5000, b"\xff"])
def test_json_that_is_damaged_or_deep(text: str | bytes) -> None:
    with pytest.raises(InputError, match=r"^the header is damaged: "):
        parse_json(text, "the header")


LAUGHS = "a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "more than 100000 values"),
        ("[" * 100_000, "nested too deeply"),
        ("a: &a [*a]", "alias [*]a stands within its own anchor"),
        ("- 1\n" * 100_001, "more than 100000 values"),
    ],
)
def test_yaml_that_grows_is_refused_before_it_is_loaded(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_yaml(text)
    parse_yaml("a: &a {b: &b 1, c: [*b, *b]}\nd: *a\ne: {<<: *a}")


def test_aliases_of_yaml_count_as_what_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a: &a {b: &b 1, c: [*b, *b]}\nd: *a"  # keys and collections are values too: 2 + 7, and 1 + 7
    monkeypatch.setattr(reading, "MAX_YAML_VALUES", 17)
    check_yaml(text)
    monkeypatch.setattr(reading, "MAX_YAML_VALUES", 16)
    with pytest.raises(InputError, match="more than 16 values"):
        check_yaml(text)


def forge(path: Path, header: str, data: bytes = b"", name: str = "arr_0.npy", **details: Any) -> Path:
    """Write an npz file whose array states a header of its own."""
    text = header.encode().ljust(118) + b"\n"
    with zipfile.ZipFile(path, "w", **details) as archive:
        archive.writestr(name, b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + data)
    return path


def header(shape: str, descr: str = "'|u1'", fortran: bool = False) -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (header("(1000000000000, 8, 8, 3)"), "states uint8 .* which is 192000000000000 bytes, the archive holds 192"),
        (header("(-1, -8, 8, 3)"), "states uint8"),
        (header("(2, 8, 8, 3)"), "which is 384 bytes"),
        (header("(1, 8, 8, 3)", "'|O'"), "holds Python objects"),
        (header("(1, 8, 8, 3)", "'<U99999999'"), "the archive holds 192"),
        (header("(1, 8, 8, 3)", fortran=True), "it must be uint8"),
        ("(" * 5000, "damaged or no npz file"),
        ("{}", "damaged or no npz file"),
        (header("(1, 8, 8, 3)").ljust(60_000), "damaged or no npz file: Header info length"),
    ],
)
def test_arrays_that_are_forged(text: str, message: str, tmp_path: Path) -> None:
    path = forge(tmp_path / "a.npz", text, bytes(192))
    with pytest.raises(InputError, match=message):
        NpzSamples(path)
    if "fortran_order': True" not in text:
        with pytest.raises(InputError, match=message):
            npz_array(path, "arr_0")


def test_archives_that_are_forged(tmp_path: Path, no_memory: None) -> None:
    path = tmp_path / "a.npz"
    with pytest.raises(InputError, match=r"a.npz: arr_0 .* needs .* of memory"):
        npz_array(forge(path, header("(1, 8, 8, 3)"), bytes(192)), "arr_0")
    with pytest.raises(InputError, match=r"a.npz: a sample \[8, 8, 3\] needs .* of memory"):
        NpzSamples(path)
    with pytest.raises(InputError, match=r"holds ../arr_0.npy, arrays must lie in no folder"):
        npz_arrays(forge(path, header("(1, 8, 8, 3)"), bytes(192), "../arr_0.npy"))
    forge(path, header("(1, 8, 8, 3)"), bytes(192))
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("arr_0.npy", b"x")
    with pytest.raises(InputError, match=r"holds arr_0.npy 2 times"):
        npz_arrays(path)
    # the directory states other sizes than the file holds
    forge(path, header("(8, 8, 8, 3)"), bytes(1536), compression=zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    size, entry = struct.pack("<I", 128 + 1536 + 1), data.rindex(b"PK\1\2")
    assert data.index(size, entry) == entry + 24
    data[entry + 24 : entry + 28] = struct.pack("<I", 0xFFFFFFF0)
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"states 4294967280 bytes in \d+, which it cannot hold"):
        npz_arrays(path)


@pytest.mark.filterwarnings("ignore:IM image format")
def test_pictures_are_measured_before_they_are_decoded(no_memory: None, tmp_path: Path) -> None:
    tried = []
    for name in picture_formats():
        encoded = io.BytesIO()
        try:
            photo().convert("RGB").save(encoded, name)
        except (KeyError, ValueError, OSError):  # which Pillow does not write
            continue
        tried.append(name)
        with pytest.raises(ValueError, match=r"a picture of \d+x\d+ pixels needs"):
            Decoding().first_frame(encoded.getvalue())
        (tmp_path / "a.png").write_bytes(encoded.getvalue())
        with pytest.raises(InputError, match=r"a\.png cannot be read \(a picture of \d+x\d+ pixels needs"):
            probe_clip(tmp_path / "a.png")
    assert {"PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"} <= {*tried}


def png(width: int, height: int, *more: tuple[bytes, bytes]) -> bytes:
    """Write a PNG whose header states a size, with chunks in place of its pixels."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), *more, (b"IEND", b"")]
    packed = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (png(100_000, 100_000), "exceeds limit"),
        (png(8, 8, (b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 24)))), "too large"),
    ],
)
def test_pictures_that_grow(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(data)
    with pytest.raises(Exception, match=message):
        Decoding().first_frame(path)
    with pytest.raises(InputError, match=rf"a\.png is damaged.*{message}"):
        read_png(path)


def test_clips_are_measured_before_they_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, frames = tmp_path / "a.png", np.arange(3, dtype=np.uint8).repeat(192).reshape(3, 8, 8, 3)
    write_png(path, frames)
    data = bytearray(path.read_bytes())
    place = data.index(b"acTL")
    data[place + 4 : place + 8] = struct.pack(">I", 1 << 30)  # frames
    data[place + 12 : place + 16] = struct.pack(">I", zlib.crc32(data[place : place + 12]))
    path.write_bytes(data)
    assert probe_clip(path).num_frames == 1 << 30
    monkeypatch.setattr(reading, "memory_left", lambda: 1 << 30)
    with pytest.raises(
        InputError, match=r"a\.png cannot be read \(a clip of 1073741824 frames of 8x8 pixels needs 206 GB"
    ):
        read_clip(path, [0], Decoding())
    with pytest.raises(InputError, match="1073741824 x 8x8 pixels needs"):
        read_png(path)


def test_videos_are_measured_before_they_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.mp4"
    write_video(path, np.zeros((3, 16, 16, 3), np.uint8), 8)
    monkeypatch.setattr(reading, "_SMALL_BYTES", 0)
    monkeypatch.setattr(reading, "memory_left", lambda: 4000)
    with pytest.raises(InputError, match=r"a.mp4: a frame of 16x16 pixels needs"):
        probe(path)
    monkeypatch.setattr(reading, "memory_left", lambda: 4500)
    with pytest.raises(InputError, match=r"a.mp4: 3 frames of 16x16 pixels needs"):
        read_frames(path, range(3))
    assert read_frames(path, [1]).shape == (1, 16, 16, 3)
    with pytest.raises(InputError, match=r"a video of 1e\+15 s at 30 frames a second needs"):
        ClipInfo(2, (16, 16), 1.0, (0.0, 1.0, 1e15)).frames_at(30)


def test_tars_whose_members_state_other_sizes(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"

    def write(**forged: Any) -> Path:
        member = tarfile.TarInfo("a.png")
        for name, value in forged.items():
            setattr(member, name, value)
        path.write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(10240))
        return path

    with pytest.raises(InputError, match=r"a.tar is truncated or no tar file"):
        [*list_members(write(size=-5))]
    with pytest.raises(InputError, match=r"a.tar is truncated or no tar file"):
        [*list_members(write(size=1 << 60))]
    with pytest.raises(InputError, match=r"a.tar is truncated or no tar file"):
        [*list_members(write(type=tarfile.GNUTYPE_SPARSE))]
    with path.open("rb") as file, pytest.raises(ValueError, match=f"ends after 10240 of {1 << 50} bytes"):
        Member("x", 512, 1 << 50).read(file)
    headers = b"".join(
        tarfile.TarInfo("x").tobuf(tarfile.PAX_FORMAT)[:156] + b"x" + bytes(355) for _ in range(2000)
    )  # of extended headers, without a file
    path.write_bytes(headers + bytes(10240))
    with pytest.raises(InputError, match=r"a.tar is "):
        [*list_members(path)]


def test_weights_whose_header_states_other_sizes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for text in (
        '{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}',
        '{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}',
        "[" * 10_000,
    ):
        path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(4))
        with pytest.raises(InputError, match=r"a.safetensors is truncated or no safetensors file"), open_tensors(path):
            pass
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(InputError, match=r"a.safetensors is truncated or no safetensors file"), open_tensors(path):
        pass


def test_a_video_that_was_cut_off_is_not_whole(tmp_path: Path) -> None:
    for name in ("a.mp4", "a.gif"):
        path = tmp_path / name
        assert not is_whole_video(path)
        write_video(path, np.zeros((3, 16, 16, 3), np.uint8), 8)
        whole = path.read_bytes()
        assert is_whole_video(path)
        for content in (b"", b"text", whole[:-20], whole[:40], b"\0\0\0\1ftyp", b"\0\0\0\4moov"):
            path.write_bytes(content)
            assert not is_whole_video(path), content[:40]


def nested(value: Any, levels: int, copies: int = 1) -> Any:
    for _ in range(levels):
        value = [value] * copies
    return value


def itself() -> Any:
    table: dict[str, Any] = {}
    table["a"] = table
    return table


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (nested(1, 9, 10), "so often that the whole has 1111111112 values"),
        (nested(1, 300), "is nested too deeply"),
        ([shared := nested(1, 60), nested(shared, 60)], "is nested too deeply"),
        (itself(), "or holds itself"),
    ],
)
def test_tables_that_cannot_be_walked_are_refused(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^the file is damaged: .*{message}"):
        check_nesting("the file", {"a": value} if "so often" in message else value)
    check_nesting("the file", [nested(1, 5, 10), (1, {"a": {}})])
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {}, "headmix_vision": {}, "callbacks": value}, path)
    with pytest.raises(InputError, match=r"a\.ckpt is damaged: "):
        read_checkpoint(path)


def test_archives_of_weights_that_overlap_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data/0", bytes(1000))
        for number in range(1, 9):  # other names of the same bytes
            again = copy.copy(archive.filelist[0])
            again.filename = f"a/data/{number}"
            archive.filelist.append(again)
    with pytest.raises(InputError, match=r"a\.ckpt states 9000 bytes in 9000, which it cannot hold"):
        read_weights(path)


@pytest.mark.parametrize("name", ["a.safetensors", "a.pth"])
def test_weights_beyond_the_memory_are_refused(name: str, tmp_path: Path, no_memory: None) -> None:
    path = tmp_path / name
    if name == "a.pth":
        torch.save({"a": torch.zeros(1)}, path)
    else:
        write_tensors(path, {"a": torch.zeros(1)}, {})
    with pytest.raises(InputError, match=rf"the file .*{name} needs .* of memory"):
        read_weights(path)
