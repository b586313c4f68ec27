"""`sample.py videos`: the same frames however they are drawn, what lies in the folder, windows, refusals."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from headmix_vision.cli.sample import main
from headmix_vision.diffusion import HeadMixDiTPipeline, HeadMixVideoDiTPipeline, ObjectiveConfig, create_scheduler
from headmix_vision.files.pictures import read_png, write_png
from headmix_vision.files.video import probe, read_video, write_video
from headmix_vision.sampling.folder import SampleFolder
from headmix_vision.sampling.planning import ClipPlan, _fitting, draw_clips

ROOT = Path(__file__).parents[2]
FAST = ("--num", 5, "--steps", 2, "--batch-size", 2)


def save_pipeline(folder: Path, objective: ObjectiveConfig | None = None, **options: Any) -> Path:
    """A small model of clips of 4 frames whose weights are drawn at random, all of them."""
    torch.manual_seed(0)
    objective = objective or ObjectiveConfig(clean_prefix=0.5)
    dims = {"depth": 1, "embed_dim": 24, "num_heads": 2, "num_classes": 3, "input_size": (4, 8, 8), **options}
    model = timm.create_model("dit_video_mhla_digits", **dims).eval()
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    names = [f"{i} left" for i in range(3)]
    scheduler = create_scheduler(None, objective)
    HeadMixVideoDiTPipeline(model, scheduler, objective=asdict(objective), class_names=names).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline(tmp_path_factory.mktemp("exported") / "model")


def run(*args: object) -> int:
    try:
        main(["videos", *map(str, args)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def clips(folder: Path) -> dict[str, np.ndarray]:
    return {path.name: read_png(path) for path in sorted((folder / "images").iterdir())}


def assert_same_clips(a: Path, b: Path) -> None:
    first, second = clips(a), clips(b)
    assert first.keys() == second.keys()
    for name, frames in first.items():
        assert np.array_equal(frames, second[name]), name


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five samples in one go."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    torch.set_num_threads(1)
    assert run("--model", model, *FAST, "--npz", "--out", folder) == 0
    return folder


def test_what_lies_in_the_folder(whole: Path) -> None:
    frames = clips(whole)
    assert list(frames) == [f"{i:06d}.png" for i in range(5)]
    assert all(clip.shape == (4, 8, 8, 1) for clip in frames.values())
    assert len({clip.tobytes() for clip in frames.values()}) == 5
    for index in range(5):
        info = probe(whole / "videos" / f"{index:06d}.mp4")
        assert (info.num_frames, info.frame_rate, info.size) == (4, 8.0, (8, 8))
    watched, _ = read_video(whole / "videos" / "000000.mp4")
    assert np.abs(watched[..., :1].astype(float) - frames["000000.png"]).mean() < 8
    with np.load(whole / "samples.npz") as arrays:
        assert arrays["arr_0"].shape == (5, 4, 8, 8, 1) and arrays["labels"].tolist() == [0, 1, 2, 0, 1]
    metadata = json.loads((whole / "metadata.json").read_text())
    assert metadata["complete"] and metadata["num"] == 5
    assert metadata["settings"]["clips"] == {
        "num_frames": 4,
        "frame_rate": 8.0,
        "start": None,
        "window": None,
        "overlap": 0,
        "guidance": None,
    }
    grid, info = Image.open(whole / "grid.png"), probe(whole / "grid.gif")
    assert getattr(grid, "n_frames", 1) == 1 and grid.width > 4 * 48 and grid.height > 5 * 48
    assert info.num_frames == 4 and info.frame_rate == pytest.approx(8, rel=0.05)


def test_batch_size_changes_nothing(whole: Path, model: Path, tmp_path: Path) -> None:
    assert run("--model", model, "--num", 5, "--steps", 2, "--batch-size", 5, "--out", tmp_path / "out") == 0
    assert_same_clips(whole, tmp_path / "out")


def test_half_finished_folder_is_continued(whole: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    for name in ("images/000001.png", "images/000004.png", "videos/000002.mp4"):
        (out / name).unlink()
    write_png(out / "images" / "000003.png", clips(whole)["000003.png"][:3])  # of fewer frames: damaged
    (out / "videos" / ".000002.mp4.77.tmp").write_bytes(b"half")
    kept = (out / "images" / "000002.png").stat().st_mtime_ns
    assert run("--model", model, *FAST, "--out", out) == 0
    assert_same_clips(whole, out)
    assert (out / "images" / "000002.png").stat().st_mtime_ns == kept and (out / "videos" / "000002.mp4").is_file()
    assert not list(out.rglob("*.tmp"))


def test_other_formats_of_the_same_samples(whole: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    before = {path: path.stat().st_mtime_ns for path in (out / "images").iterdir()}
    for form, place in (("gif", "videos/000004.gif"), ("frames", "frames/000004/000003.png"), ("png", "images")):
        assert run("--model", model, *FAST, "--format", form, "--out", out) == 0
        assert (out / place).exists()
    assert {path: path.stat().st_mtime_ns for path in (out / "images").iterdir()} == before
    assert np.array_equal(read_png(out / "frames/000004/000003.png"), clips(whole)["000004.png"][3])


@pytest.mark.slow
def test_two_processes_equal_one(whole: Path, model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--"]
    arguments = ["videos", "--model", model, *FAST, "--out", tmp_path / "out"]
    result = subprocess.run(
        [str(part) for part in (*command, ROOT / "sample.py", *arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert_same_clips(whole, tmp_path / "out")
    assert result.stdout.count("drew 5 videos") == 1


def test_more_frames_and_another_rate(model: Path, tmp_path: Path) -> None:
    assert run("--model", model, *FAST, "--frames", 7, "--fps", 4, "--size", "8,12", "--out", tmp_path / "out") == 0
    assert all(clip.shape == (7, 8, 12, 1) for clip in clips(tmp_path / "out").values())
    assert probe(tmp_path / "out" / "videos" / "000000.mp4").frame_rate == 4


def test_first_frame(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    gray = np.asarray(Image.fromarray(pixels).convert("L"))
    assert run("--model", model, *FAST, "--first-frame", tmp_path / "a.png", "--out", tmp_path / "out") == 0
    drawn = clips(tmp_path / "out")
    assert all(np.array_equal(clip[0, ..., 0], gray) for clip in drawn.values())
    assert len({clip[1:].tobytes() for clip in drawn.values()}) == 5
    assert "warning" not in capfd.readouterr().err
    settings = json.loads((tmp_path / "out" / "metadata.json").read_text())["settings"]
    assert settings["clips"]["start"]["frames"] == 1 and len(settings["clips"]["start"]["sha256"]) == 64


@pytest.mark.parametrize("channels", [1, 3])
def test_known_frames_get_the_channels_of_the_videos(channels: int) -> None:
    gray = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 1), dtype=np.uint8)
    for given in (gray, gray.repeat(3, -1)):
        fitting = _fitting(given, "a.png", SimpleNamespace(image_channels=channels), (8, 8))  # type: ignore[arg-type]
        assert np.array_equal(fitting, gray.repeat(channels, -1))


def test_clips_are_extended_by_windows(whole: Path, model: Path, tmp_path: Path) -> None:
    out, sample = tmp_path / "out", whole / "images" / "000001.png"
    options = ("--model", model, "--steps", 2, "--batch-size", 2)
    assert run(*options, "--num", 2, "--frames", 9, "--extend", "--out", out) == 0
    drawn = clips(out)
    assert all(clip.shape == (9, 8, 8, 1) for clip in drawn.values())
    for number in range(2):  # the first window is the sample that is drawn without
        assert np.array_equal(drawn[f"{number:06d}.png"][:4], clips(whole)[f"{number:06d}.png"])
    assert run(*options, "--num", 2, "--frames", 9, "--extend", sample, "--overlap", 3, "--out", tmp_path / "png") == 0
    assert all(np.array_equal(clip[:4], read_png(sample)) for clip in clips(tmp_path / "png").values())
    colours = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    pictures = [Image.fromarray(frame) for frame in colours]
    pictures[0].save(tmp_path / "clip.webp", save_all=True, append_images=pictures[1:], lossless=True)
    file = ("--extend", tmp_path / "clip.webp")
    assert run(*options, "--num", 1, "--frames", 8, *file, "--out", tmp_path / "webp") == 0
    (clip,) = clips(tmp_path / "webp").values()
    assert np.array_equal(clip[:6, ..., 0], np.stack([np.asarray(picture.convert("L")) for picture in pictures]))
    write_video(tmp_path / "clip.mp4", colours, 8)
    file = ("--extend", tmp_path / "clip.mp4")
    assert run(*options, "--num", 1, "--frames", 8, *file, "--out", tmp_path / "mp4") == 0
    (clip,) = clips(tmp_path / "mp4").values()
    expected, _ = read_video(tmp_path / "clip.mp4")
    assert clip.shape == (8, 8, 8, 1)
    assert np.array_equal(clip[0, ..., 0], np.asarray(Image.fromarray(expected[0]).convert("L")))


def test_files_to_watch_need_room_too(whole: Path, tmp_path: Path) -> None:
    shape = (4, 8, 8, 1)
    for form, new, other in (("mp4", 4, 0), ("gif", 4, 2), ("frames", 10, 8), ("png", 2, 0)):
        assert SampleFolder(tmp_path, 8, form).count_files([0, 1], 2, shape) == new
        assert SampleFolder(whole, 8, form).count_files([], 2, shape) == other


def test_windows_begin_with_the_frames_before_them(model: Path) -> None:
    pipeline = HeadMixVideoDiTPipeline.from_pretrained(model)
    pipeline.set_progress_bar_config(disable=True)
    calls: list[Any] = []

    class Recorder(HeadMixVideoDiTPipeline):
        def __call__(self, *args: Any, **options: Any) -> Any:
            calls.append(options["prefix"])
            return super().__call__(*args, **options)

    pipeline.__class__ = Recorder
    start = np.full((3, 8, 8, 1), 51, np.uint8)
    plan = ClipPlan(10, 8.0, start, window=4, overlap=2)
    options = {"class_labels": [0, 1], "num_inference_steps": 1}
    frames = draw_clips(pipeline, plan, 2, options)
    assert frames.shape == (2, 10, 8, 8, 1) and (frames[:, :3] == 51).all()
    assert plan.known_frames(pipeline) == [2, 2, 2, 2]
    for number, prefix in enumerate(calls):
        np.testing.assert_allclose(prefix * 255, frames[:, 1 + 2 * number : 3 + 2 * number], atol=1e-4)
    assert ClipPlan(9, window=4, overlap=1).known_frames(pipeline) == [0, 1, 1]
    assert ClipPlan(9, start=start[:1], window=4, overlap=2).known_frames(pipeline) == [1, 2, 2, 2]


def test_windows_that_go_on_have_a_guidance_of_their_own(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", model, "--num", 2, "--steps", 2, "--batch-size", 2, "--frames", 6, "--extend")
    interval = ("--guidance-interval", "0,0.1")  # 0 forgets the class outside of it, too

    def drawn(name: str, *more: object) -> np.ndarray:
        assert run(*options, *interval, *more, "--out", tmp_path / name) == 0
        return np.stack([*clips(tmp_path / name).values()])

    usual, alone = drawn("usual"), drawn("alone", "--extend-guidance", 0)
    assert np.array_equal(alone[:, :4], usual[:, :4]) and not np.array_equal(alone, usual)
    assert np.array_equal(drawn("usual", "--extend-guidance", 1.5), usual), "of the same settings"
    start = ("--extend", tmp_path / "alone" / "images" / "000000.png", "--frames", 10)
    continued = [
        drawn(name, "--extend-guidance", 0, *start, "--classes", classes)
        for name, classes in (("a", "0,1"), ("b", "2,0"))
    ]
    assert np.array_equal(*continued), "frames alone decide"
    capfd.readouterr()
    assert run(*options, "--extend-guidance", 0, "--dry-run", "--out", tmp_path / "alone", *interval) == 0
    assert "guidance 1.5 within (0.0, 0.1) and 0 where frames are known" in capfd.readouterr().out
    assert "clips.guidance 0.0, asked for None" in refused(capfd, *options, *interval, "--out", tmp_path / "alone")


def refused(capfd: pytest.CaptureFixture[str], *args: object) -> str:
    capfd.readouterr()
    assert run(*args) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures and clips to begin with, of which most do not fit."""
    folder = tmp_path_factory.mktemp("files")
    for name, size in (("good", (8, 8)), ("wide", (8, 12))):
        Image.fromarray(np.zeros(size, np.uint8)).save(folder / f"{name}.png")
    Image.fromarray(np.zeros((8, 8), np.float32)).save(folder / "deep.tif")
    (folder / "cut.png").write_bytes((folder / "good.png").read_bytes()[:44])
    (folder / "text.png").write_text("no picture")
    (folder / "text.mp4").write_text("no video")
    write_video(folder / "fast.mp4", np.zeros((4, 8, 8, 1), np.uint8), 25)
    write_video(folder / "slow.mp4", np.zeros((4, 8, 8, 1), np.uint8), 7.5)
    write_video(folder / "near.mp4", np.zeros((4, 8, 8, 1), np.uint8), 7.7)
    write_video(folder / "large.mp4", np.zeros((4, 16, 16, 1), np.uint8), 8)
    write_video(folder / "one.mp4", np.zeros((1, 8, 8, 1), np.uint8), 8)
    write_video(folder / "long.mp4", np.zeros((9, 8, 8, 1), np.uint8), 8)
    return folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--frames 0", "--frames must be a whole number from 1"),
        ("--frames x", "--frames"),
        ("--frames 100001", "--frames must be a whole number from 1 to 100000"),
        ("--fps 0", "--frame-rate 0.0: frame_rate must be a finite number"),
        ("--fps nan", "--frame-rate nan: frame_rate"),
        ("--size 9", "--size 9: height must be a multiple of 4 pixels, got 9"),
        ("--format avi", "--format"),
        ("--overlap 2", "--overlap 2 needs --extend"),
        ("--extend-guidance 0", "--extend-guidance 0.0 needs --extend"),
        ("--extend --frames 9 --extend-guidance -1", "--extend-guidance -1: guidance scale must be a finite number"),
        ("--extend", "--extend needs --frames"),
        ("--extend --frames 9 --overlap 4", "--overlap 4: it must be below 4, the frames of training"),
        ("--extend --frames 9 --overlap 0", "--overlap 0: the overlap must be a whole number of at least 1"),
        ("--first-frame nowhere.png", "--first-frame 'nowhere.png' is not a file"),
        ("--first-frame ''", "--first-frame is an empty text"),
        ("--first-frame text.png", "text.png cannot be read"),
        ("--first-frame cut.png", "cut.png cannot be read"),
        ("--first-frame deep.tif", "deep.tif cannot be read (its pixels are of mode F, they must have 8 or 16 bits"),
        ("--first-frame wide.png", "wide.png is 8x12 pixels, the videos are 8x8"),
        ("--first-frame good.png --frames 1", "--frames is 1, --first-frame"),
        ("--first-frame good.png --extend long.mp4 --frames 20", "give one of them"),
        ("--extend nowhere.mp4 --frames 9", "--extend 'nowhere.mp4' is not a file"),
        ("--extend . --frames 9", "--extend '.' is not a file"),
        ("--extend text.mp4 --frames 9", "text.mp4 cannot be read as a video"),
        ("--extend good.png --frames 9", "good.png is an image: give it as --first-frame"),
        ("--extend fast.mp4 --frames 9", "fast.mp4 has 25 frames a second, the videos 8: give --frame-rate 25"),
        ("--extend slow.mp4 --frames 9", "slow.mp4 has 7.5 frames a second, the videos 8: give --frame-rate 7.5"),
        ("--extend large.mp4 --frames 9", "large.mp4 is 16x16 pixels, the videos are 8x8"),
        ("--extend long.mp4 --frames 9", "long.mp4 alone has 9"),
    ],
)
def test_wrong_options(
    options: str,
    message: str,
    model: Path,
    files: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(files)
    assert message in refused(capfd, "--model", model, "--out", tmp_path / "out", *FAST, *shlex.split(options))
    assert not (tmp_path / "out").exists()


def test_a_clip_is_gone_on_from_if_its_frame_rate_is_nearly_that_of_the_videos(
    model: Path, files: Path, tmp_path: Path
) -> None:
    options = ("--model", model, "--num", 1, "--steps", 1, "--frames", 5, "--dry-run", "--out", tmp_path / "out")
    assert run(*options, "--extend", files / "near.mp4") == 0


def test_pixels_are_the_nearest_levels(model: Path) -> None:
    pipeline = HeadMixVideoDiTPipeline.from_pretrained(model)
    options = {"class_labels": [1], "num_inference_steps": 2, "height": 8, "width": 8}
    start = np.full((1, 8, 8, 1), 37, np.uint8)
    prefix, seeds = np.repeat(start[None] / np.float32(255), 1, 0), (torch.Generator().manual_seed(5) for _ in range(2))
    exact = pipeline(**options, num_frames=4, prefix=prefix, generator=next(seeds), output_type="np").frames
    drawn = draw_clips(pipeline, ClipPlan(4, start=start), 1, {**options, "generator": next(seeds)})
    assert np.abs(drawn - 255 * exact.astype(np.float64)).max() < 0.5 + 1e-4


def test_each_command_takes_models_of_its_kind(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["images", "--model", str(model), "--out", str(tmp_path / "out")])
    assert "makes videos, not images: use `headmix sample videos`" in capfd.readouterr().err
    images = tmp_path / "images"
    network = timm.create_model("dit_linear_digits", depth=1)
    HeadMixDiTPipeline(network, create_scheduler(None, ObjectiveConfig())).save_pretrained(images)
    assert "makes images, not videos: use `headmix sample images`" in refused(capfd, "--model", images)
    assert not (tmp_path / "out").exists()


def test_models_that_never_saw_known_frames(files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--num", 1, "--steps", 2, "--first-frame", files / "good.png", "--out", tmp_path / "out")
    ddpm = save_pipeline(tmp_path / "ddpm", ObjectiveConfig(kind="ddpm"))
    assert "--first-frame needs a model trained with objective.kind=flow" in refused(capfd, "--model", ddpm, *options)
    plain = save_pipeline(tmp_path / "plain", ObjectiveConfig())
    assert run("--model", plain, *options) == 0
    assert (
        "warning: the videos go on from known frames, but the model was trained with objective.clean_prefix=0"
        in capfd.readouterr().err
    )


def test_tubelets(files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = save_pipeline(
        tmp_path / "model", ObjectiveConfig(clean_prefix=0.5), patch_size=(2, 4, 4), block_grid=(2, 2, 2)
    )
    options = ("--model", model, "--num", 1, "--steps", 1, "--out", tmp_path / "out")
    assert "--frames must be a multiple of 2" in refused(capfd, *options, "--frames", 5)
    assert "nearest: 4 or 6" in refused(capfd, *options, "--frames", 5)
    assert "the frames of --first-frame must be a multiple of 2" in refused(
        capfd, *options, "--first-frame", files / "good.png"
    )
    assert run(*options, "--frames", 7, "--extend", files / "long.mp4") == 2
    assert run(*options, "--frames", 13, "--extend", files / "long.mp4", "--dry-run") == 0
    assert "would draw 1 videos of 13 frames of 8x8 pixels" in capfd.readouterr().out
    assert not (tmp_path / "out").exists()
    assert run(*options, "--frames", 13, "--extend", files / "long.mp4") == 0
    assert clips(tmp_path / "out")["000000.png"].shape == (13, 8, 8, 1)


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 4 frames that draws two at a time."""
    options = {"core_args": {"causal": "rows"}, "block_grid": (2, 2, 2), "cpe": False}
    return save_pipeline(tmp_path_factory.mktemp("causal") / "model", **options)


def test_a_causal_model_draws_block_by_block(
    causal: Path, files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", causal, *FAST, "--frames", 12)
    assert run(*options, "--out", tmp_path / "out") == 0
    drawn = clips(tmp_path / "out")
    assert all(clip.shape == (12, 8, 8, 1) for clip in drawn.values()) and "warning" not in capfd.readouterr().err
    settings = json.loads((tmp_path / "out" / "metadata.json").read_text())["settings"]["clips"]
    assert (settings["num_frames"], settings["window"], settings["block"]) == (12, None, 2)
    (tmp_path / "out" / "images" / "000003.png").unlink()
    assert run(*options, "--out", tmp_path / "out") == 0
    for name, frames in clips(tmp_path / "out").items():
        assert np.array_equal(frames, drawn[name])

    def later(name: str, *more: object) -> np.ndarray:
        assert run(*options, "--extend", *more, "--out", tmp_path / name) == 0
        return np.stack([*clips(tmp_path / name).values()])

    usual = np.stack([*drawn.values()])
    assert np.array_equal(later("usual"), usual)
    changed = later("changed", "--extend-guidance", 0)
    assert np.array_equal(changed[:, :4], usual[:, :4]) and not np.array_equal(changed[:, 4:], usual[:, 4:])
    continued = later("continued", files / "long.mp4")  # 9 frames, of which 8 are whole blocks
    start, _ = read_video(files / "long.mp4")
    assert (continued[:, :9] == start[..., :1]).all() and continued.shape[1] == 12
    settings = json.loads((tmp_path / "continued" / "metadata.json").read_text())["settings"]["clips"]
    assert (settings["overlap"], settings["window"]) == (8, 12)  # 8 known frames, and the 3 missing in whole blocks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--frames 7", "--frames must be a multiple of 2, for blocks of 2; got 7, nearest: 6 or 8"),
        (
            "--frames 8 --extend --overlap 2",
            "--overlap applies only to models that sample in windows",
        ),
        ("--first-frame good.png", "the frames of --first-frame must be a multiple of 2, for blocks of 2; got 1"),
        ("--frames 8 --extend one.mp4", "the 1 frames that are given are fewer than the model can go on from"),
    ],
)
def test_wrong_options_of_a_causal_model(
    options: str,
    message: str,
    causal: Path,
    files: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(files)
    given = ("--model", causal, "--out", tmp_path / "out", *FAST, *shlex.split(options))
    assert message in refused(capfd, *given)
    assert not (tmp_path / "out").exists()


def test_folders_of_others(whole: Path, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    assert "clips.num_frames 4, asked for 6" in refused(capfd, "--model", model, *FAST, "--frames", 6, "--out", copy)
    assert "clips.frame_rate 8.0, asked for 4.0" in refused(capfd, "--model", model, *FAST, "--fps", 4, "--out", copy)
    (copy / "videos" / "mine.mp4").write_text("precious")
    assert "videos/mine.mp4, which is not a sample" in refused(capfd, "--model", model, *FAST, "--out", copy)
