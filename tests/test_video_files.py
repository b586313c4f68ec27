"""Video files: frames by their numbers, in every container, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from headmix_vision.errors import InputError
from headmix_vision.files.video import VideoInfo, probe, read_frames, read_video, write_video

COUNT = 24


@pytest.fixture(scope="module")
def frames() -> np.ndarray:
    """A picture that moves by a pixel a frame, with a corner that counts in steps of 10; uint8 [24, 31, 45, 3]."""
    picture = np.kron(np.random.default_rng(0).integers(0, 200, (4, 6, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    clip = np.stack([np.roll(picture, shift, 1)[:31, :45] for shift in range(COUNT)])
    clip[:, :8, :8] = 10 * np.arange(COUNT)[:, None, None, None]
    return clip


def counted(pixels: np.ndarray) -> list[int]:
    """Numbers of frames, as their corners tell them."""
    return (pixels[:, 2:6, 2:6].mean((1, 2, 3)) / 10).round().astype(int).tolist()


def encode(path: Path, frames: np.ndarray, codec: str, options: dict[str, str]) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width, stream.pix_fmt, stream.bit_rate = 32, 46, "yuv420p", 2_000_000
        stream.options = options
        for image in np.pad(frames, ((0, 0), (0, 1), (0, 1), (0, 0))):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("a.mp4", "libx264", {"g": "10"}),
        ("b.mp4", "libx264", {"x264-params": "open-gop=1:keyint=8:bframes=3"}),
        ("c.avi", "mpeg4", {"bf": "2"}),  # whose frames have no times of display
        ("d.mkv", "mpeg4", {"g": "10"}),
        ("e.mpg", "mpeg2video", {"bf": "2"}),
    ],
)
def test_a_frame_is_the_same_however_it_is_reached(
    name: str, codec: str, options: dict[str, str], frames: np.ndarray, tmp_path: Path
) -> None:
    encode(tmp_path / name, frames, codec, options)
    whole, rate = read_video(tmp_path / name)
    assert whole.shape == (COUNT, 32, 46, 3) and rate == 25 and counted(whole) == [*range(COUNT)]
    for start in range(0, COUNT - 7, 3):
        indices = [start + 7, start, start + 3, start]
        assert np.array_equal(read_frames(tmp_path / name, indices), whole[indices])


def test_mp4_repeats_the_last_row_and_column_of_an_odd_size(frames: np.ndarray, tmp_path: Path) -> None:
    write_video(tmp_path / "new" / "a.mp4", frames, 30000 / 1001)
    assert probe(tmp_path / "new" / "a.mp4") == VideoInfo(COUNT, 30000 / 1001, 32, 46)
    pixels, _ = read_video(tmp_path / "new" / "a.mp4")
    error = np.abs(pixels.astype(int) - np.pad(frames, ((0, 0), (0, 1), (0, 1), (0, 0)), mode="edge"))
    assert error.mean() < 8 and counted(pixels) == [*range(COUNT)]
    assert error[:, -1].mean() < 8 and error[:, :, -1].mean() < 8
    gray = frames[:5, :8, :8, :1]
    write_video(tmp_path / "b.mp4", gray, 8)
    assert np.abs(read_video(tmp_path / "b.mp4")[0].astype(int) - gray).max() <= 2


def test_gif_keeps_gray_frames_and_the_length_of_the_clip(frames: np.ndarray, tmp_path: Path) -> None:
    write_video(tmp_path / "a.gif", frames[..., :1], 8)
    pixels, rate = read_video(tmp_path / "a.gif")
    assert np.array_equal(pixels[..., :1], frames[..., :1]) and abs(rate - 8) < 0.02
    still = np.repeat(frames[:1], 6, axis=0)
    write_video(tmp_path / "b.gif", still, 8)
    assert probe(tmp_path / "b.gif").num_frames == 1


def test_refusals(frames: np.ndarray, tmp_path: Path) -> None:
    good = tmp_path / "good.mp4"
    write_video(good, frames, 8)
    for content in (b"", b"nonsense" * 50, good.read_bytes()[:1000]):
        (tmp_path / "bad.mp4").write_bytes(content)
        with pytest.raises(InputError, match=r"bad\.mp4 cannot be read as a video"):
            probe(tmp_path / "bad.mp4")
    damaged = bytearray(good.read_bytes())
    damaged[2000:4000] = bytes(2000)
    (tmp_path / "bad.mp4").write_bytes(damaged)
    with pytest.raises(InputError, match=r"bad\.mp4"):
        read_video(tmp_path / "bad.mp4")
    with pytest.raises(FileNotFoundError):
        probe(tmp_path / "absent.mp4")
    with pytest.raises(InputError, match="has 24 frames, there is no frame 24"):
        read_frames(good, [3, 24])
    for name, rate, message in (
        ("a.webm", 8, r"a\.webm must end on one of \.mp4, \.gif"),
        ("a.mp4", 0, "frame_rate must be a finite number above 0, got 0"),
        ("a.gif", float("nan"), "frame_rate must be a finite number above 0, got nan"),
    ):
        with pytest.raises(InputError, match=message):
            write_video(tmp_path / name, frames, rate)
        assert not (tmp_path / name).exists()
