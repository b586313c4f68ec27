"""Which clips are found, and which of their frames are read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headmix_vision.errors import InputError
from headmix_vision.evaluation.sample_sets import ClipSampling, SampleSet, open_samples
from headmix_vision.evaluation.sample_sources import Samples
from headmix_vision.files.video import ClipInfo, write_video

from .clip_helpers import moving, write_samples


def pixels(source: Path | str, mode: str = "L", image_size: int | None = None, **sampling: Any) -> np.ndarray:
    """All scored clips, uint8 [N, T, H, W, C]."""
    clips = open_samples(str(source), mode, image_size, sampling=ClipSampling(**sampling))
    return torch.cat(list(clips.batches(3))).movedim(1, -1).numpy()


def write_frames(folder: Path, clip: np.ndarray) -> None:
    folder.mkdir(parents=True)
    for number, frame in enumerate(clip):
        Image.fromarray(frame[..., 0]).save(folder / f"{number:03d}.png")


class Counted(Samples):
    """Clips of one pixel whose value is the number of the frame."""

    source, kind = "counted", "folder"

    def __init__(self, *lengths: int) -> None:
        self.infos = [ClipInfo(length, (1, 1)) for length in lengths]

    def __len__(self) -> int:
        return len(self.infos)

    def name(self, number: int) -> str:
        return f"clip {number}"

    def read(self, wanted: Any) -> Any:
        for number, indices in wanted.items():
            yield self.name(number), [Image.new("L", (1, 1), index) for index in indices]


def numbers(*lengths: int, **sampling: Any) -> dict[str, list[int]]:
    """The frames of the chosen clips, by name."""
    clips = SampleSet(Counted(*lengths), "L", sampling=ClipSampling(**sampling))
    return {name: [frame.getpixel((0, 0)) for frame in item] for name, item in clips.read(range(len(clips)))}  # type: ignore[union-attr]


def test_a_clip_is_the_same_wherever_it_lies(tmp_path: Path) -> None:
    clips, _ = moving(5)
    np.savez(tmp_path / "clips.npz", arr_0=clips)
    write_samples(tmp_path / "samples", clips)
    for number, clip in enumerate(clips):
        write_frames(tmp_path / "frames" / f"class {number % 2}" / str(number // 2), clip)
    order = [0, 2, 4, 1, 3]  # by class
    for source, expected in (("clips.npz", clips), ("samples", clips), ("frames", clips[order])):
        assert np.array_equal(pixels(tmp_path / source, frames=12), expected), source
        assert np.array_equal(pixels(tmp_path / source, frames=4, stride=3), expected[:, ::3]), source
    assert pixels(tmp_path / "samples", "RGB", 8, frames=2).shape == (5, 2, 8, 8, 3)


def test_videos_by_class_and_rates(tmp_path: Path) -> None:
    clips, _ = moving(4, size=32)
    for number, clip in enumerate(clips):
        name = tmp_path / "videos" / "ab"[number % 2] / (f"{number}.gif" if number == 3 else f"{number}.mp4")
        name.parent.mkdir(parents=True, exist_ok=True)
        write_video(name, clip, 10)
    found = pixels(tmp_path / "videos", frames=12)
    assert np.abs(found.astype(float) - clips[[0, 2, 1, 3]]).mean() < 8
    opened = open_samples(str(tmp_path / "videos"), "L", sampling=ClipSampling(frames=6, stride=2))
    assert opened.description["frame_rate"] == [5, 5] and opened.description["frames_of_files"] == [12, 12]


def test_a_data_set_of_clips_gets_the_length_and_size_asked_for() -> None:
    clips = open_samples("moving_digits[:6]", "L", sampling=ClipSampling(frames=5), grid=(16, 24))
    assert len(clips) == 6 and clips.size == (5, 16, 24)
    assert clips.description["frame_rate"] == [8, 8]
    assert open_samples("moving_digits[:6]", "RGB", 16, sampling=ClipSampling(frames=5)).size == (5, 16, 16)
    assert open_samples("moving_digits[:6]", "L", sampling=ClipSampling(frames=5)).size == (5, 64, 64)
    assert open_samples("moving_digits[:6]", "L", 32, sampling=ClipSampling(frames=None)).size == (16, 32, 32)


def test_offsets_depend_on_the_seed_and_the_clip_alone() -> None:
    assert numbers(9, 20, frames=3, stride=3) == {"clip 0": [0, 3, 6], "clip 1": [0, 3, 6]}
    first = numbers(*[40] * 9, frames=3, stride=3, offset="random")
    assert numbers(*[40] * 9, 50, frames=3, stride=3, offset="random").items() >= first.items()
    assert numbers(*[40] * 9, frames=3, stride=3, offset="random", seed=1) != first
    starts = [frames[0] for frames in numbers(*[9] * 80, frames=3, stride=3, offset="random").values()]
    assert {*starts} == {0, 1, 2}  # 9 frames leave two over beyond those that are read


def test_choice_of_clips() -> None:
    assert [*numbers(*[2] * 9, frames=2, count=3)] == ["clip 0", "clip 1", "clip 2"]
    chosen = [numbers(*[2] * 9, frames=2, count=3, choice="random", seed=seed) for seed in range(2)]
    assert len(chosen[0]) == len(chosen[1]) == 3 and [*chosen[0]] != [*chosen[1]]
    assert [*numbers(2, 1, 2, frames=2, skip_short=True)] == ["clip 0", "clip 2"]
    mirrored = SampleSet(Counted(2, 2), "L", sampling=ClipSampling(frames=2, mirror=True))
    read = [(name, frames[0].tobytes()) for name, frames in mirrored.read(range(4))]  # type: ignore[union-attr, index]
    assert len(mirrored) == len(read) == 4
    some = [(name, frames[0].tobytes()) for name, frames in mirrored.read([1, 2])]  # type: ignore[union-attr, index]
    assert some == read[1:3]


@pytest.mark.parametrize(
    ("lengths", "sampling", "message"),
    [
        (
            (9, 8),
            {"frames": 3, "stride": 3},
            "clip 1 has 8 frames, 3 at stride 3 need 9; 1 of 2 clips are too short: -",
        ),
        ((2, 2), {"frames": 3, "skip_short": True}, "clip 0 has 2 frames, 3 need 3; 2 of 2 clips are too short$"),
        ((3, 4), {"frames": None}, "clip 1 has 4 frames, the clips before it have 3"),
        ((3,), {"frames": 0}, "frames must be a whole number of at least 1, got 0"),
    ],
)
def test_lengths_that_are_refused(lengths: tuple[int, ...], sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        numbers(*lengths, **sampling)


def test_folders_that_are_refused(tmp_path: Path) -> None:
    clips, _ = moving(3)

    def refused(source: object, message: str, **sampling: Any) -> None:
        with pytest.raises(InputError, match=message) as error:
            pixels(str(source), **sampling)
        assert "\n" not in str(error.value)

    refused(tmp_path, "has no clips: no videos")
    samples = write_samples(tmp_path / "samples", clips[:2])
    write_samples(samples, clips[:, :, :8, :8][:3][2:])  # the first one is now smaller
    refused(samples, r"000001\.png is 16x16 pixels, the clips before it are 8x8; --image-size N", frames=12)
    damaged = write_samples(tmp_path / "damaged", clips) / "images" / "000001.png"
    damaged.write_bytes(damaged.read_bytes()[:-60])
    refused(tmp_path / "damaged", r"000001\.png cannot be read", frames=12)
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "a.mp4").write_bytes(b"no video")
    refused(tmp_path / "videos", r"a\.mp4 cannot be read")
    np.savez(tmp_path / "images.npz", arr_0=clips[:, 0])
    refused(tmp_path / "images.npz", r"holds images \[3, 16, 16, 1\], clips are \[N, T, H, W, C\]")
    refused("digits", "digits: --image-size must say how large its clips shall be")
    refused("nowhere", "nowhere is neither a file, nor a folder, nor a data set to score")
