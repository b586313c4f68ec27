"""The memory that files and options ask for: what suffices is enough, a byte less is refused before the work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inputs import photo, write_film

from headmix_vision.data.datasets.canvas import CanvasDigits
from headmix_vision.data.datasets.derived import InMemory
from headmix_vision.data.datasets.digits import Digits
from headmix_vision.data.datasets.image_tables import read_table
from headmix_vision.data.datasets.moving_digits import MovingDigits
from headmix_vision.data.fitting import center_crop
from headmix_vision.evaluation.sample_sets import open_samples
from headmix_vision.evaluation.sample_sources import NpzSamples, npz_array
from headmix_vision.files import reading
from headmix_vision.files.pictures import Decoding, read_png, write_png
from headmix_vision.files.tensors import load_plain, read_tensors, write_tensors
from headmix_vision.files.video import ClipInfo, probe, read_frames

CLIP = np.random.default_rng(0).integers(0, 256, (5, 16, 24, 3), dtype=np.uint8)
FRAME = 16 * 24


def samples(folder: Path) -> Any:
    return next(open_samples(str(folder / "pictures"), "RGB").batches(3))


CASES: dict[str, tuple[Callable[[Path], Any], int | Callable[[Path], int]]] = {
    "canvases": (lambda folder: CanvasDigits("train", 64, length=1000), 1000 * (2 * 6 * 6 + 1)),
    "moving digits": (lambda folder: MovingDigits("train", length=1000), 1000 * 5 * 8),
    "pictures that are enlarged": (lambda folder: center_crop(photo(size=(12, 16)), (24, 24)), 8 * 24 * 32),
    "a picture": (lambda folder: Decoding("RGB").item(folder / "pictures" / "0.png"), 16 * FRAME),
    "a clip": (lambda folder: read_png(folder / "clip.png"), 4 * 5 * FRAME),
    "frames of a video": (lambda folder: read_frames(folder / "film.mp4", range(5)), 6 * 5 * FRAME),
    "a video": (lambda folder: probe(folder / "film.mp4"), 16 * FRAME),
    "times of frames": (lambda folder: ClipInfo(5, (16, 24), 8.0).frames_at(100.0), 62 * (3 * FRAME + 64)),
    "tensors": (lambda folder: read_tensors(folder / "a.safetensors"), lambda folder: size(folder / "a.safetensors")),
    "a checkpoint": (lambda folder: load_plain(folder / "a.pt"), lambda folder: size(folder / "a.pt")),
    "a table": (lambda folder: read_table(folder / "a.csv"), lambda folder: 8 * size(folder / "a.csv")),
    "an array": (lambda folder: npz_array(folder / "a.npz", "arr_0"), 2 * CLIP.size),
    "samples of an array": (lambda folder: NpzSamples(folder / "a.npz"), 2 * CLIP[0].size),
    "samples": (samples, 3 * 16 * FRAME),
    "samples of another size": (
        lambda folder: open_samples(str(folder / "pictures"), "RGB", image_size=100),
        16 * 100 * 100,
    ),
    "pictures kept in memory": (lambda folder: InMemory(Digits("validation")), 2 * 360 * 64),
}


def size(path: Path) -> int:
    return path.stat().st_size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "pictures").mkdir()
    for number in range(4):
        photo(number, (16, 24)).save(folder / "pictures" / f"{number}.png")
    write_png(folder / "clip.png", CLIP)
    write_film(folder / "film.mp4", list(CLIP), rate=8)
    np.savez(folder / "a.npz", arr_0=CLIP)
    write_tensors(folder / "a.safetensors", {"a": torch.ones(100)}, {})
    torch.save({"a": torch.ones(100)}, folder / "a.pt")
    (folder / "a.csv").write_text("file,label\na.png,b\n")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_memory_that_suffices_is_enough_and_a_byte_less_is_refused(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, needed = CASES[name]
    left = needed if isinstance(needed, int) else needed(folder)
    monkeypatch.setattr(reading, "_SMALL_BYTES", 0)
    monkeypatch.setattr(reading, "memory_left", lambda: left)
    call(folder)
    left -= 1
    with pytest.raises((ValueError, OSError), match="of memory"):
        call(folder)
