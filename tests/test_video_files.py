"""Video files: frames by their numbers, in every container, and what is refused."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from inputs import ATTACHED, photo, show_turned, write_film
from PIL import Image

from headmix_vision.data.clip_frames import ClipConfig
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.errors import InputError
from headmix_vision.files.pictures import Decoding
from headmix_vision.files.video import ClipInfo, probe, read_clip, read_frames, read_video, write_video

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
    assert probe(tmp_path / "new" / "a.mp4") == ClipInfo(COUNT, (32, 46), 30000 / 1001)
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


@pytest.mark.parametrize("name", ["whole.gif", "whole.avi"])
def test_a_last_frame_of_which_a_part_is_missing_is_refused(name: str, frames: np.ndarray, tmp_path: Path) -> None:
    """FFmpeg fills it up and says nothing."""
    whole, cut = tmp_path / name, tmp_path / f"cut_{name}"
    if name.endswith(".gif"):
        write_video(whole, frames, 8)
    else:
        encode(whole, frames, "mpeg4", {"g": "12"})
    content = whole.read_bytes()
    for share in (0.6, 0.75, 0.9):
        cut.write_bytes(content[: int(share * len(content))])
        with pytest.raises(InputError, match=f"cut_{name} is truncated: its last frame is incomplete"):
            probe(cut)
    cut.write_bytes(content + bytes(10))  # of the disk behind it
    assert np.array_equal(read_video(cut)[0], read_video(whole)[0])
    if name.endswith(".gif"):
        cut.write_bytes(content[:-1])  # without the mark of the end, which some programs forget
        assert probe(cut).num_frames == probe(whole).num_frames


@pytest.mark.parametrize(
    ("codec", "options"), [("libx264", {"g": "10"}), ("mpeg2video", {"bf": "2"}), ("mpeg4", {"g": "10"})]
)
def test_a_cut_transport_stream_has_no_corrupt_frame(codec: str, options, frames: np.ndarray, tmp_path: Path) -> None:
    """Its packets do not tell that the last one lacks bytes, and FFmpeg fills up the frame."""
    whole, cut = tmp_path / "whole.ts", tmp_path / "cut.ts"
    encode(whole, frames // 2 + np.random.default_rng(0).integers(0, 50, frames.shape, dtype=np.uint8), codec, options)
    content, pictures = whole.read_bytes(), read_video(whole)[0]
    refused = 0
    for length in range(len(content) // 2, len(content), 7 * 188):
        cut.write_bytes(content[:length])
        try:
            found = read_video(cut)[0]
        except InputError as error:
            refused += 1
            assert "cut.ts is truncated or damaged: frame" in str(error)
            assert (read_frames(cut, [0, 5]) == pictures[[0, 5]]).all(), "whole frames before it are read"
        else:
            assert all((picture == pictures).all((1, 2, 3)).any() for picture in found)
    assert refused > 3


def test_damage_ends_at_the_next_key_frame(frames: np.ndarray, tmp_path: Path) -> None:
    path, damaged = tmp_path / "whole.ts", tmp_path / "damaged.ts"
    noise = np.random.default_rng(0).integers(0, 50, frames.shape, dtype=np.uint8)
    encode(path, frames // 2 + noise, "mpeg2video", {"g": "8"})
    content, pictures = path.read_bytes(), read_video(path)[0]
    place = len(content) // 188 // 2 * 188
    damaged.write_bytes(content[:place] + content[place + 4 * 188 :])
    readable = []
    for number in range(COUNT):
        try:
            (found,) = read_frames(damaged, [number])
        except InputError:
            continue
        readable.append(number)
        assert (found == pictures).all((1, 2, 3)).any()
    assert readable[0] == 0 and readable[-1] >= 20 and len(readable) < COUNT


def test_frames_are_chosen_by_their_times(tmp_path: Path) -> None:
    """One second of 24 frames, then three of 6."""
    levels = [np.full((32, 48, 3), 20 + 5 * number, np.uint8) for number in range(42)]
    shown = [*(number / 24 for number in range(24)), *(1 + number / 6 for number in range(18))]
    for name, codec in (("a.mp4", "libx264"), ("a.mkv", "libx264"), ("a.webm", "libvpx")):
        path = write_film(tmp_path / name, levels, [1] * 24 + [4] * 18, codec=codec)
        info = probe(path)
        assert info.times is not None and info.num_frames == 42 and abs(info.frame_rate - 41 / (4 - 1 / 6)) < 0.1
        assert np.abs(np.subtract(info.times[:-1], shown)).max() < 2e-3
        for place in (0.0, 0.5, 1.0):
            chosen = ClipConfig(8.0).frames(16, 42, info.frame_rate, place, info.times)
            wanted = shown[chosen[0]] + np.arange(16) / 8
            gaps = np.diff([*shown, 4.0])[chosen]
            assert (np.abs(np.take(shown, chosen) - wanted) <= gaps / 2 + 2e-3).all(), (name, place)
            found = read_frames(path, chosen)[:, 16, 24, 0]
            assert np.abs(found - (20.0 + 5 * np.array(chosen))).max() <= 3
        assert ClipConfig(8.0).frames(16, 42, info.frame_rate, 1.0, info.times)[-1] >= 40
        with pytest.raises(InputError, match=r"it lasts .* s, a clip needs 5 s"):
            ClipConfig(8.0).frames(40, 42, info.frame_rate, 0.0, info.times)
        assert ClipConfig(frame_stride=2).frames(3, 42, info.frame_rate, 0.0, info.times) == [0, 2, 4]
    assert ClipConfig(8.0).frames(4, 4, 8.0, 1.0, (0.0, 0.2, 0.3, 0.4, 0.5)) == [0, 1, 2, 3]
    assert ClipConfig(100.0).frames(3, 3, 99.0, 1.0) == [0, 1, 2]
    with pytest.raises(InputError, match="it states no frame rate: choose frames by a stride"):
        ClipConfig(100.0).frames(3, 3, None, 1.0)
    with pytest.raises(InputError, match=r"it has 98\.9 frames a second, fewer than the 100 of a clip"):
        ClipConfig(100.0).frames(3, 3, 98.9, 1.0)
        whole, rate = read_video(path, 12)
        assert rate == 12 and abs(len(whole) - 48) <= 2 and (whole[12:14, 16, 24, 0] == whole[12, 16, 24, 0]).all()
    gif = [levels[0]] * 6 + [levels[9]] * 2
    write_video(tmp_path / "a.gif", np.stack(gif), 8)
    assert np.array_equal(read_video(tmp_path / "a.gif", 8)[0][:, 0, 0, 0], [20] * 6 + [65] * 2)


def test_rounded_times_follow_each_other_evenly(frames: np.ndarray, tmp_path: Path) -> None:
    for name in ("a.mkv", "a.mp4", "a.ts", "a.flv"):
        path = write_film(tmp_path / name, list(np.pad(frames, ((0, 0), (0, 1), (0, 1), (0, 0)))), rate=30)
        assert probe(path) == ClipInfo(COUNT, (32, 46), 30)


STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("mirrored", [False, True])
def test_videos_are_turned_as_they_are_to_be_shown(turns: int, mirrored: bool, tmp_path: Path) -> None:
    image = np.asarray(photo(size=(32, 48)))
    path = write_film(tmp_path / "a.mp4", [image] * 3)
    right, down = STEPS[turns], STEPS[(turns + 1) % 4]
    show_turned(path, tuple(-step for step in right) if mirrored else right, down)  # type: ignore[arg-type]
    expected = np.rot90(image[:, ::-1] if mirrored else image, -turns)
    found = read_frames(path, [1])[0]
    assert found.shape == expected.shape and np.abs(found - expected.astype(int)).mean() < 6
    info = probe(path)
    assert info.size == expected.shape[:2]


def test_a_video_that_is_shown_askew_is_refused(tmp_path: Path) -> None:
    path = write_film(tmp_path / "a.mp4", [np.asarray(photo(size=(32, 48)))] * 3)
    show_turned(path, (1, 1), (-1, 1))
    for read in (probe, read_video):
        with pytest.raises(
            InputError, match=r"a\.mp4 cannot be read as a video \(it is to be shown turned by other than"
        ):
            read(path)


@pytest.mark.parametrize("colorspace", [1, 6])
@pytest.mark.parametrize("color_range", [1, 2])
def test_colours_follow_the_matrix_and_range_of_the_stream(colorspace: int, color_range: int, tmp_path: Path) -> None:
    image = np.full((32, 48, 3), (200, 60, 30), np.uint8)
    colours = {"colorspace": colorspace, "color_range": color_range}
    path = write_film(tmp_path / "a.mp4", [image] * 3, colours=colours)
    assert np.abs(read_frames(path, [0])[0] - image.astype(int)).max() <= 4


def test_what_we_write_names_its_colours(tmp_path: Path) -> None:
    import av

    image = np.full((3, 32, 48, 3), (200, 60, 30), np.uint8)
    write_video(tmp_path / "a.mp4", image, 8)
    with av.open(str(tmp_path / "a.mp4")) as container:
        context = container.streams.video[0].codec_context
        assert (context.colorspace, context.color_range) == (6, 1)
        assert (context.color_primaries, context.color_trc) == (1, 13)
    assert np.abs(read_video(tmp_path / "a.mp4")[0] - image.astype(int)).max() <= 4


def test_a_cover_picture_is_not_the_video(tmp_path: Path) -> None:
    import av

    film, cover = [np.full((32, 48, 3), 100, np.uint8)] * 3, np.full((16, 16, 3), 250, np.uint8)
    path = write_film(tmp_path / "a.mp4", film, cover=cover)
    assert probe(path) == ClipInfo(3, (32, 48), 24) and abs(int(read_frames(path, [0])[0, 0, 0, 0]) - 100) < 4
    with av.open(str(tmp_path / "song.mp4"), "w") as container:
        picture = container.add_stream("mjpeg", rate=1, width=16, height=16)
        picture.pix_fmt, picture.disposition = "yuvj420p", ATTACHED
        sound = container.add_stream("aac", rate=44100)
        container.mux(picture.encode(av.VideoFrame.from_ndarray(cover, format="rgb24")))
        container.mux(picture.encode())
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        silence.rate = 44100
        container.mux([*sound.encode(silence), *sound.encode()])
    with pytest.raises(InputError, match=r"song\.mp4 holds no video"):
        probe(tmp_path / "song.mp4")


def test_transparent_pixels_of_a_gif_show_the_background(tmp_path: Path) -> None:
    frames = [Image.new("P", (16, 16), index) for index in (0, 1)]
    for frame in frames:
        frame.putpalette([200, 0, 0, 0, 200, 0])
        frame.paste(2, (0, 0, 8, 16))
    frames[0].save(
        tmp_path / "a.gif", save_all=True, append_images=frames[1:], transparency=2, disposal=2, duration=100
    )
    (tmp_path / "frames").mkdir()
    still = Image.new("RGBA", (16, 16), (200, 0, 0))
    still.paste((0, 0, 0, 0), (0, 0, 8, 16))
    still.save(tmp_path / "frames" / "0.png")
    for background, level in (("white", 255), ("black", 0)):
        clips = [read_clip(tmp_path / name, [0], Decoding(background=background)) for name in ("a.gif", "frames")]
        for found in (read_frames(tmp_path / "a.gif", [0, 1], background), *map(np.stack, clips)):
            assert (found[:, :, :8] == level).all() and found[0, 0, 12].tolist() == [200, 0, 0]


def test_an_old_pyav_is_refused(frames: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(tmp_path / "a.mp4", frames, 8)
    monkeypatch.setattr("headmix_vision.files.video.version", lambda name: "16.1.0")
    with pytest.raises(InputError, match=r"reading a video needs PyAV 17 or later, 16\.1\.0 is installed"):
        probe(tmp_path / "a.mp4")
    with pytest.raises(InputError, match=r"writing a video needs PyAV 17 or later"):
        write_video(tmp_path / "b.mp4", frames, 8)
    with pytest.raises(InputError, match=r"^reading a video needs PyAV 17 or later"):  # before any is read
        open_source(SplitRequest("videos", "train", (3, 2, 8, 8), "generation", root=str(tmp_path)))


def test_reading_leaves_no_threads_to_processes_that_are_forked_later(frames: np.ndarray, tmp_path: Path) -> None:
    path = write_film(tmp_path / "a.mp4", [np.asarray(photo(size=(32, 48)))] * 3)
    show_turned(path, *STEPS[1:3])
    before = len(os.listdir("/proc/self/task"))
    gc.disable()  # which would end them in its own time
    try:
        for _ in range(3):
            probe(path), read_frames(path, [0, 2])
        assert len(os.listdir("/proc/self/task")) <= before
    finally:
        gc.enable()
