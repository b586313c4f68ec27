"""`sample.py images`: the same pixels however they are drawn, what lies in the folder, refusals."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from headmix_vision.cli import export
from headmix_vision.cli.sample import main
from headmix_vision.data.batches import deal_batches
from headmix_vision.diffusion import Guidance, HeadMixDiTPipeline, ObjectiveConfig, create_scheduler
from headmix_vision.errors import InputError
from headmix_vision.files.writing import hold_lock
from headmix_vision.runs.pipelines import load_pipeline
from headmix_vision.sampling import sample_job
from headmix_vision.sampling.folder import draw_grid
from headmix_vision.sampling.planning import SamplingPlan, check_classes, sample_batch
from headmix_vision.sampling.sample_job import _memory_errors
from headmix_vision.sampling.sample_request import SampleRequest

ROOT = Path(__file__).parents[2]
FAST = ("--num", 12, "--steps", 3, "--batch-size", 4)


def save_pipeline(folder: Path, kind: str = "flow", **options: object) -> Path:
    torch.manual_seed(0)
    model = timm.create_model("dit_mhla_digits", depth=1, embed_dim=32, num_heads=2, **options).eval()
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    objective = ObjectiveConfig(kind=kind)
    names = [f"class {i}" for i in range(model.num_classes)]
    HeadMixDiTPipeline(
        model, create_scheduler(None, objective), objective=asdict(objective), class_names=names
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline(tmp_path_factory.mktemp("exported") / "model")


def run(*args: object) -> int:
    try:
        main(["images", *map(str, args)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def pixels(folder: Path) -> dict[str, np.ndarray]:
    return {path.name: np.asarray(Image.open(path)) for path in sorted((folder / "images").iterdir())}


def assert_same_pixels(a: Path, b: Path, names: slice = slice(None)) -> None:
    first, second = pixels(a), pixels(b)
    for name in list(first)[names]:
        assert np.array_equal(first[name], second[name]), name


@pytest.fixture(scope="session")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve samples in one go."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    torch.set_num_threads(1)
    assert run("--model", model, *FAST, "--npz", "--out", folder) == 0
    return folder


def test_what_lies_in_the_folder(whole: Path, model: Path) -> None:
    images = pixels(whole)
    assert list(images) == [f"{i:06d}.png" for i in range(12)]
    assert all(image.shape == (8, 8) and image.dtype == np.uint8 for image in images.values())
    assert len({image.tobytes() for image in images.values()}) == 12
    with np.load(whole / "samples.npz") as arrays:
        assert arrays["arr_0"].dtype == np.uint8 and arrays["arr_0"].shape == (12, 8, 8, 1)
        assert arrays["labels"].tolist() == [*range(10), 0, 1]
        assert all(np.array_equal(arrays["arr_0"][i, ..., 0], image) for i, image in enumerate(images.values()))
    metadata = json.loads((whole / "metadata.json").read_text())
    assert metadata["complete"] and metadata["num"] == 12 and metadata["weights"] == "exported"
    assert metadata["settings"]["guidance"] == {"scale": 1.5, "interval": [0.0, 1.0], "channels": "all"}
    assert (metadata["settings"]["scheduler"], metadata["settings"]["steps"], metadata["settings"]["seed"]) == (
        "euler",
        3,
        0,
    )
    assert len(metadata["settings"]["weights_sha256"]) == 64 and "torch" in metadata["versions"]
    with Image.open(whole / "grid.png") as grid:
        assert grid.mode == "RGB" and min(grid.size) > 60


def test_the_grid_shows_samples_above_their_classes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[Any, ...]] = []
    monkeypatch.setattr(sample_job, "draw_grid", lambda *sheet: shown.append(sheet) or draw_grid(*sheet))
    for classes, limit, most, count, columns in (
        ((3, 0, 7), "GRID_IMAGES", 100, 8, None),
        (range(10), "GRID_PIXELS", 7 * 64 - 1, 6, 10),
        ((3, 0, 7, 1), "GRID_IMAGES", 5, 5, 4),
    ):
        monkeypatch.setattr(sample_job, limit, most)
        out, listed = tmp_path / str(count), ",".join(map(str, classes))
        assert run("--model", model, "--num", 8, "--steps", 1, "--classes", listed, "--out", out) == 0
        images, captions, title, in_a_row = shown.pop()
        assert np.array_equal(images[..., 0], list(pixels(out).values())[:count]) and in_a_row == columns
        assert captions == [f"class {classes[i % len(classes)]}" for i in range(count)]
        assert title == f"{model}, exported weights\neuler, 1 steps, guidance 1.5, seed 0"


def test_batch_size_changes_nothing(whole: Path, model: Path, tmp_path: Path) -> None:
    for batch_size in (1, 5, 12):
        out = tmp_path / str(batch_size)
        assert run("--model", model, "--num", 12, "--steps", 3, "--batch-size", batch_size, "--out", out) == 0
        assert_same_pixels(whole, out)


def test_half_finished_folder_is_continued(whole: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    for index in (0, 5, 6, 11):
        (out / "images" / f"{index:06d}.png").unlink()
    (out / "images" / ".000005.png.77.tmp").write_bytes(b"half")
    kept = (out / "images" / "000003.png").stat().st_mtime_ns
    assert run("--model", model, *FAST, "--out", out) == 0
    assert_same_pixels(whole, out)
    assert (out / "images" / "000003.png").stat().st_mtime_ns == kept
    assert not list(out.rglob("*.tmp"))


def test_more_samples_continue_a_folder(whole: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    assert run("--model", model, "--num", 15, "--steps", 3, "--batch-size", 4, "--out", out, "--npz") == 0
    assert_same_pixels(whole, out)
    with np.load(out / "samples.npz") as arrays:
        assert arrays["labels"].tolist()[10:] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_two_processes_equal_one(whole: Path, model: Path, tmp_path: Path) -> None:
    # "--", since torchrun would take --num for an abbreviation of an option of its own
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--"]
    arguments = ["images", "--model", model, *FAST, "--out", tmp_path / "out", "--npz"]
    result = subprocess.run(
        [str(part) for part in (*command, ROOT / "sample.py", *arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert_same_pixels(whole, tmp_path / "out")
    assert result.stdout.count("drew 12 images") == 1
    assert json.loads((tmp_path / "out" / "metadata.json").read_text())["processes"] == 2


def test_options_reach_the_sampler(whole: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--classes", "3,7", "--scheduler", "unipc", "--guidance", 3, "--guidance-interval", "0.1,0.8")
    assert run("--model", model, *FAST, *options, "--seed", 4, "--size", "16,8", "--out", out) == 0
    settings = json.loads((out / "metadata.json").read_text())["settings"]
    assert settings["classes"] == [3, 7] and settings["guidance"]["interval"] == [0.1, 0.8]
    assert (settings["scheduler"], settings["seed"], settings["size"]) == ("unipc", 4, [16, 8])
    assert all(image.shape == (16, 8) for image in pixels(out).values())
    assert run("--model", model, "--num", 2, "--steps", 2, "--dtype", "bfloat16", "--out", tmp_path / "half") == 0


def test_the_spacing_of_timesteps_is_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ddpm, out = save_pipeline(tmp_path / "model", kind="ddpm"), tmp_path / "out"
    command = ("--model", ddpm, "--num", 2, "--steps", 3, "--scheduler", "ddim")
    assert run(*command, "--spacing", "linspace", "--out", out) == 0
    assert "sampling: 2/2 images, " in capfd.readouterr().err
    metadata = json.loads((out / "metadata.json").read_text())
    assert metadata["settings"]["spacing"] == metadata["settings"]["scheduler_config"]["timestep_spacing"] == "linspace"
    assert "holds samples with spacing 'linspace'" in refused(capfd, *command, "--spacing", "trailing", "--out", out)
    many = (*command[:4], "--steps", 128, "--spacing", "leading", "--scheduler", "ddim", "--out", tmp_path / "many")
    assert "--steps 128: timestep spacing 'leading' takes" in refused(capfd, *many)
    assert not (tmp_path / "many").exists()

    assert run(*command, "--out", tmp_path / "old") == 0
    assert not np.array_equal(pixels(out)["000000.png"], pixels(tmp_path / "old")["000000.png"])
    metadata = json.loads((tmp_path / "old" / "metadata.json").read_text())
    assert metadata["settings"].pop("spacing") is None  # folders of earlier versions do not hold it
    (tmp_path / "old" / "metadata.json").write_text(json.dumps(metadata))
    assert run(*command, "--num", 3, "--out", tmp_path / "old") == 0


def test_progress_counts_each_sample_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[float] = []

    @contextmanager
    def progress(what: str, total: int, unit: str, **options: Any) -> Iterator[Callable[[float], None]]:
        assert (what, total, unit) == ("sampling", 5, "images")
        yield done.append

    monkeypatch.setattr(sample_job, "progress", progress)
    assert run("--model", model, "--num", 5, "--steps", 3, "--batch-size", 2, "--out", tmp_path / "out") == 0
    assert len(done) == 9 and sum(done) == pytest.approx(5)


def test_another_seed_draws_other_samples(whole: Path, model: Path, tmp_path: Path) -> None:
    assert run("--model", model, "--num", 2, "--steps", 3, "--seed", 1, "--out", tmp_path / "out") == 0
    first, other = pixels(whole), pixels(tmp_path / "out")
    assert all(not np.array_equal(first[name], image) for name, image in other.items())


def test_unconditional_model(tmp_path: Path) -> None:
    folder, out = save_pipeline(tmp_path / "model", num_classes=0), tmp_path / "out"
    assert run("--model", folder, "--num", 3, "--steps", 2, "--out", out, "--npz") == 0
    with np.load(out / "samples.npz") as arrays:
        assert arrays.files == ["arr_0"]
    assert json.loads((out / "metadata.json").read_text())["settings"]["guidance"]["scale"] == 1


def refused(capfd: pytest.CaptureFixture[str], *args: object) -> str:
    capfd.readouterr()
    assert run(*args) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--classes", "3,11"), "class label 11 is out of range: the model takes 0 to 9"),
        (("--classes", "three"), "--classes must be 'balanced' or numbers"),
        (("--scheduler", "plms"), "unknown scheduler 'plms'; for this model: euler"),
        (("--scheduler", "ddim"), "does not fit a model trained with objective.kind=flow"),
        (("--spacing", "linspace"), "timestep spacing 'linspace' given, but scheduler 'euler' has none to choose"),
        (("--size", "9,8"), "height must be a multiple of 2 pixels, got 9"),
        (("--size", "large"), "--size must be one number, or height and width such as 256x384, got 'large'"),
        (("--size", "8x9"), "width must be a multiple of 2 pixels, got 9"),
        (("--guidance-interval", "0.8,0.2"), "low before high"),
        (("--guidance-interval", "0.8"), "--guidance-interval must be two numbers"),
        (("--guidance", "1", "--guidance-interval", "0.1,0.8"), "--guidance-interval has no effect"),
        (("--vae", ""), "--vae is an empty text"),
        (("--num", "0"), "--num must be a whole number from 1"),
        (("--batch-size", "0"), "--batch-size must be a whole number from 1"),
        (("--steps", "2000"), "--steps must be a whole number from 1 to 1000, got 2000"),
        (("--raw",), "leave out --raw"),
        (("--vae", "/nowhere"), "was trained on pixels"),
    ],
)
def test_wrong_options(
    options: tuple[str, ...], message: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capfd, "--model", model, "--steps", 2, "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_guidance_on_a_model_without_a_null_class(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    unconditional = save_pipeline(tmp_path / "none", num_classes=0)
    message = refused(capfd, "--model", unconditional, "--guidance", 2, "--out", tmp_path / "out")
    assert "needs a null class, but the model is unconditional" in message
    assert "unconditional" in refused(capfd, "--model", unconditional, "--classes", "3", "--out", tmp_path / "out")
    assert run("--model", unconditional, "--num", 70, "--out", tmp_path / "out", "--dry-run") == 0
    planned = capfd.readouterr().out
    assert (
        "would draw 70 images of 8x8 pixels, no classes, into" in planned and "in batches of 64, 2 for each" in planned
    )
    assert not (tmp_path / "out").exists()


def test_memory_that_does_not_suffice_is_told_by_the_option() -> None:
    for error in (torch.OutOfMemoryError("x"), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate")):
        message, request = (
            "the memory does not suffice for --batch-size 8: lower it",
            SampleRequest(model=Path("a"), kind="videos"),
        )
        with pytest.raises(InputError, match=message), _memory_errors(request):
            raise error
    with pytest.raises(RuntimeError, match="shapes"), _memory_errors(SampleRequest(model=Path("a"))):
        raise RuntimeError("shapes")


def test_folders_of_others(whole: Path, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "holiday.jpg").write_bytes(b"precious")
    assert "holds holiday.jpg" in refused(capfd, "--model", model, *FAST, "--out", foreign)
    assert [path.name for path in foreign.iterdir()] == ["holiday.jpg"]

    for change, message in (
        (("--seed", 1), "holds samples with seed 0, asked for 1"),
        (("--guidance", 2), "holds samples with guidance"),
        (("--num", 3), "holds sample 11 already, --num is 3"),
    ):
        before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
        assert message in refused(capfd, "--model", model, *FAST, "--out", whole, *change)
        assert before == {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}

    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    (copy / "images" / "notes.txt").write_text("mine")
    assert "images/notes.txt" in refused(capfd, "--model", model, *FAST, "--out", copy)
    (copy / "images" / "notes.txt").unlink()
    (copy / "metadata.json").unlink()
    assert "without metadata.json" in refused(capfd, "--model", model, *FAST, "--out", copy)
    other = save_pipeline(tmp_path / "other", mlp_ratio=2.0)
    assert "weights_sha256" in refused(capfd, "--model", other, *FAST, "--out", whole)


def test_what_is_no_generator(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "neither a run directory" in refused(capfd, "--model", tmp_path / "absent")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert "no checkpoint at" in refused(capfd, "--model", tmp_path / "run")
    classifier = ROOT / "tests" / "fixtures" / "v0_1_0" / "classifier"
    assert "is of the classifier deit_mhla_digits" in refused(capfd, "--model", classifier)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model_index.json").write_text("{}")
    assert "is not a pipeline" in refused(capfd, "--model", tmp_path / "broken")


def test_run_directory_checkpoint_and_export_are_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headmix_vision.cli.train_gen import main as train

    arguments = {
        "trainer.max_epochs": 1,
        "trainer.limit_train_batches": 3,
        "trainer.enable_progress_bar": "false",
        "trainer.accelerator": "cpu",
        "data.batch_size": 8,
        "model.name": "dit_linear_digits",
        "model.model_args.depth": 1,
        "samples.every_n_steps": "null",
    }
    run_dir = tmp_path / "run"
    options = [f"--{name}={value}" for name, value in arguments.items()]
    train(["fit", *options, "--run_dir", str(run_dir)], None)
    _, about = load_pipeline(run_dir)
    assert (about["weights"], about["step"], about["name"]) == ("ema", 3, "dit_linear_digits")
    _, raw = load_pipeline(run_dir, raw=True)
    assert raw["weights"] == "raw" and raw["weights_sha256"] != about["weights_sha256"]
    _, file = load_pipeline(run_dir / "checkpoints" / "last.ckpt")
    assert file["weights_sha256"] == about["weights_sha256"]

    drawing = ("--model", run_dir, "--out", tmp_path / "out", "--num", 1, "--steps", 1, "--dry-run")
    with hold_lock(run_dir / ".lock", "run"):
        assert run(*drawing) == 0
    assert f"is still training {run_dir}, the samples are of step 3\n" in capsys.readouterr().err
    assert run(*drawing) == 0 and not capsys.readouterr().err

    for option, weights in ((("--raw",), raw), ((), about)):
        out = tmp_path / weights["weights"]
        assert run("--model", run_dir, "--out", out, "--num", 1, "--steps", 1, *option) == 0
        metadata = json.loads((out / "metadata.json").read_text())
        assert metadata["weights"] == weights["weights"]
        assert metadata["settings"]["weights_sha256"] == weights["weights_sha256"]
    capsys.readouterr()

    export.main([str(run_dir), "--out", str(tmp_path / "exported")])
    assert "HeadMixDiTPipeline.from_pretrained" in capsys.readouterr().out
    exported, there = load_pipeline(tmp_path / "exported")
    assert there["weights_sha256"] == about["weights_sha256"]
    assert exported.config.class_names == [str(i) for i in range(10)]
    with pytest.raises(SystemExit) as end:
        export.main([str(run_dir), "--out", str(tmp_path / "exported")])
    assert end.value.code == 2 and "already exists" in capsys.readouterr().err


def test_pixels_are_the_nearest_levels(model: Path) -> None:
    pipeline, _ = load_pipeline(model)
    plan = SamplingPlan(0, (3, 7), 2, None, Guidance(2.0), None)
    options = {"num_inference_steps": 2, "guidance_scale": 2.0, "output_type": "np"}
    exact = pipeline([3, 7], generator=[plan.generator(i) for i in range(2)], **options).images
    assert np.abs(sample_batch(pipeline, plan, range(2)) - 255 * exact.astype(np.float64)).max() < 0.5 + 1e-4


def test_plan() -> None:
    assert check_classes(None, 3) == (0, 1, 2) == check_classes("balanced", 3)
    assert check_classes((2, 0), 3) == (2, 0) and check_classes(None, 0) is None
    shares = [deal_batches(list(range(11)), 3, rank, 2) for rank in (0, 1)]
    assert shares == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10]]]
