"""Folders of samples: scored when they are complete, or on request as far as they are there."""

import json
import os
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from inputs import encode, photo
from PIL import Image

from headmix_vision.sampling.folder import SampleFolder

from .clip_helpers import moving, write_samples
from .helpers import digit_pixels, refused, run


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """Six images as `headmix sample` leaves them."""
    folder = SampleFolder(tmp_path / "drawn")
    for number, pixels in enumerate(digit_pixels(range(6))):
        folder.write_sample(number, pixels[..., None])
    folder.write_grid(digit_pixels([0])[0][..., None].repeat(3, -1))
    folder.write_npz(6, None)
    folder.write_metadata({"settings": {}, "num": 6, "complete": True})
    return folder.path


def test_an_incomplete_folder_is_scored_on_request_alone(
    drawn: Path, classifier: Path, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    common = ("fid", "--real", folders[0], "--features", classifier, "--out", out, "--fake")
    assert run(*common, drawn) == 0
    assert "not complete" not in out.read_text()
    out.unlink()
    metadata = json.loads((drawn / "metadata.json").read_text())
    (drawn / "images" / "000003.png").unlink()
    line = refused(capsys, *common, drawn)
    assert f"--fake {drawn} has 5 of 6 samples: draw the others" in line and "--incomplete" in line
    assert not out.exists()
    for part in ("images", "samples.npz"):  # also by the names of its parts
        assert "has 5 of 6 samples" in refused(capsys, *common, drawn / part)
    assert run(*common, drawn, "--incomplete") == 0
    written = json.loads(out.read_text())
    assert written["fake"]["count"] == 5
    assert f"--fake {drawn} has 5 of 6 samples: it is not complete" in written["warnings"]
    out.unlink()
    SampleFolder(drawn).write_sample(3, digit_pixels([3])[0][..., None])
    assert run(*common, drawn) == 0
    out.unlink()
    (drawn / "metadata.json").write_text(json.dumps({**metadata, "complete": False}))
    assert "has 6 of 6 samples so far: draw the others" in refused(capsys, *common, drawn)


def oversized() -> bytes:
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", 10**5, 10**5, 8, 0, 0, 0, 0)), (b"IDAT", b""), (b"IEND", b""))
    packed = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


@pytest.mark.parametrize("content", [b"", b"text", encode(photo(), "jpeg"), encode(photo())[:-9], oversized(), None])
def test_a_file_that_is_not_what_its_name_says_is_refused(
    content: bytes | None,
    drawn: Path,
    classifier: Path,
    folders: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = drawn / "images" / "000003.png"
    path.unlink()
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    common = ("fid", "--real", folders[0], "--features", classifier, "--fake")
    says = "files that are not whole PNGs, first" if content != oversized() else "cannot be read .*exceeds limit"
    says = "is a named pipe" if content is None else says
    for more in ((), ("--incomplete",)):
        line = refused(capsys, *common, drawn, *more)
        assert re.search(says, line) and str(path) in line
    assert SampleFolder(drawn).damaged(set(range(6)), (8, 8, 1)) == {3}


def test_what_is_made_of_samples_counts_only_if_it_is_whole(drawn: Path) -> None:
    folder = SampleFolder(drawn)
    assert folder.is_complete(6, npz=True)
    for name in ("grid.png", "samples.npz"):
        whole = (drawn / name).read_bytes()
        for content in (b"", whole[:-30], encode(photo(), "jpeg")):
            (drawn / name).write_bytes(content)
            assert not folder.is_complete(6, npz=True), name
        (drawn / name).write_bytes(whole)
    assert folder.is_complete(6, npz=True)


def test_incomplete_clips_are_scored_on_request_alone(
    tmp_path: Path, classifier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clips, _ = moving(4)
    for name in ("real", "fake"):
        write_samples(tmp_path / name, clips)
    metadata = tmp_path / "fake" / "metadata.json"
    metadata.write_text(json.dumps({"settings": {}, "num": 5, "complete": True}))
    sides = ("--real", tmp_path / "real", "--fake", tmp_path / "fake")
    options = ("--features", classifier, "--frames", 12, "--subset-size", 2)
    assert "--fake " in (line := refused(capsys, "fvd", *sides, *options)) and "has 4 of 5 samples" in line
    assert run("fvd", *sides, *options, "--incomplete", "--dry-run") == 0
    assert "4 of 5 samples: it is not complete" in capsys.readouterr().err


def test_a_folder_of_somebody_else_is_taken_as_it_is(
    classifier: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    (folder / "images").mkdir(parents=True)
    for number in range(3):
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(folder / "images" / f"{number}.png")
    for text in ("{}", "[1]"):
        (folder / "metadata.json").write_text(text)
        assert run("fid", "--real", folders[0], "--features", classifier, "--fake", folder, "--dry-run") == 0
