"""What stays in the folder of samples when something ends a call, and what a later call finds there."""

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from headmix_vision.cli.sample import main
from headmix_vision.diffusion import HeadMixDiTPipeline, ObjectiveConfig, create_scheduler
from headmix_vision.sampling.folder import SampleFolder
from headmix_vision.sampling.planning import run_name

RUN = Path(__file__).parents[1] / "fixtures" / "v0_1_0" / "generator"
PIPELINE = RUN / "pipeline"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


def run(out: Path, *arguments: object, num: int = 6, model: Path = PIPELINE) -> int:
    options = ("--model", model, "--num", num, "--steps", 2, "--batch-size", 2, "--out", out, *arguments)
    try:
        main(["images", *map(str, options)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("whole") / "out"
    assert run(out, "--npz") == 0
    return out


def assert_same_images(a: Path, b: Path) -> None:
    for path in (a / "images").iterdir():
        assert path.read_bytes() == (b / "images" / path.name).read_bytes(), path.name


def test_the_default_folder_is_named_by_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_name(Path("runs/gen/digits")) == "digits"
    assert run_name(Path("runs/gen/digits/")) == "digits"
    assert run_name(Path("runs/gen/digits/checkpoints/last.ckpt")) == "digits"
    assert run_name(Path("weights/mine.ckpt")) == "mine"
    monkeypatch.chdir(tmp_path)
    assert run_name(Path(".")) == tmp_path.name
    main(["images", "--model", str(RUN / "checkpoints" / "last.ckpt"), "--num", "1", "--steps", "1"])
    assert (tmp_path / "samples" / "generator" / "grid.png").is_file()


def test_a_second_sampler_is_refused_and_removes_nothing(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / "images" / "000001.png").unlink()
    half = out / "images" / ".000001.png.77.tmp"
    half.write_bytes(b"half")
    with SampleFolder(out).lock():
        assert run(out) == 2
        assert f"--out {out} is in use by process {os.getpid()}" in capfd.readouterr().err
        assert half.read_bytes() == b"half" and not (out / "images" / "000001.png").exists()
    assert run(out) == 0
    assert not half.exists() and not (out / ".lock").exists()
    assert_same_images(whole, out)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_whole_files_and_the_same_command_continues(
    signum: int,
    status: int,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out, write = tmp_path / "out", os.replace
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    before = signal.getsignal(signum)

    def interrupted(source: os.PathLike[str], target: os.PathLike[str]) -> None:
        if Path(target).name == "000003.png":
            os.kill(os.getpid(), signum)
        write(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        assert run(out) == status
    assert capfd.readouterr().err.endswith("interrupted; the same command continues\n")
    # a second Ctrl-C ends the process at once
    assert signal.getsignal(signum) == (signal.SIG_DFL if signum == signal.SIGINT else before)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert names(out) == [*(f"{i:06d}.png" for i in range(4)), "metadata.json"], "the batch that was being written"
    assert json.loads((out / "metadata.json").read_text())["complete"] is False
    assert run(out) == 0
    assert_same_images(whole, out)


def test_a_full_disk_is_a_line_that_names_the_file(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, limits = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    capfd.readouterr()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        status = run(out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 2
    assert capfd.readouterr().err.splitlines()[-1] == f"error: File too large: {out / 'grid.png'}"
    assert not [name for name in names(out) if name.startswith(".")]
    assert run(out) == 0
    assert_same_images(whole, out)


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(PIPELINE, folder)
    state = load_file(folder / WEIGHTS)
    change(state)
    save_file(state, folder / WEIGHTS)
    return folder


def test_settings_whose_first_batch_fails_leave_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    model = edit_weights(
        tmp_path / "model", lambda state: state.update({"final_layer.linear.bias": torch.full((4,), 3e38)})
    )
    assert run(out, "--guidance", 900, model=model) == 2
    assert "error: sample 0 became infinite or not a number in step 2 of 2" in capfd.readouterr().err
    assert not out.exists()


def test_a_later_sample_that_is_no_number_is_named_and_nothing_is_complete(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Class 3 alone is broken, by an embedding that overflows."""

    def spoil(state: dict[str, torch.Tensor]) -> None:
        state["y_embedder.embedding_table.weight"][3] = 3e38

    out, model = tmp_path / "out", edit_weights(tmp_path / "model", spoil)
    assert run(out, model=model) == 2
    assert "error: sample 3 became infinite or not a number in step 1 of 2" in capfd.readouterr().err
    assert names(out) == ["000000.png", "000001.png", "metadata.json"]
    assert json.loads((out / "metadata.json").read_text())["complete"] is False


def test_damaged_samples_are_drawn_again(whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[50] ^= 255
        path.write_bytes(content)

    damages: list[Callable[[Path], object]] = [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"hello"),
        lambda path: os.truncate(path, 60),
        flip,
        lambda path: Image.new("L", (16, 16)).save(path),
        lambda path: Image.new("RGB", (8, 8)).save(path),
    ]
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    for index, damage in enumerate(damages):
        damage(out / "images" / f"{index:06d}.png")
    assert run(out) == 0
    stdout, stderr = capfd.readouterr()
    assert stderr.count("is damaged and is drawn again") == len(damages) and "drew 6 images" in stdout
    assert_same_images(whole, out)


def test_a_dry_run_writes_nothing(whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "out", "--dry-run") == 0
    assert f"would draw 6 images of 8x8 pixels, 10 classes, into {tmp_path / 'out'}" in capfd.readouterr().out
    assert not list(tmp_path.iterdir())
    before = {path: path.stat().st_mtime_ns for path in [whole, *whole.rglob("*")]}
    assert run(whole, "--dry-run", num=8) == 0
    assert "would draw 2 images" in capfd.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in [whole, *whole.rglob("*")]}


def test_a_complete_folder_keeps_its_record(whole: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()}
    assert run(whole, "--npz") == 0
    assert "drew 0 images, 6 were there" in capfd.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()}


def test_an_npz_file_holds_all_samples_of_its_folder(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    assert run(out, num=8) == 0
    with np.load(out / "samples.npz") as arrays:
        assert arrays["arr_0"].shape == (8, 8, 8, 1) and arrays["labels"].tolist() == [*range(8)]
        for index, image in enumerate(arrays["arr_0"]):
            assert np.array_equal(image[..., 0], np.asarray(Image.open(out / "images" / f"{index:06d}.png")))


def test_the_disk_must_have_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SampleFolder(tmp_path / "a" / "b")
    folder.check_space(10, 1000)
    with monkeypatch.context() as patch:
        disk = SimpleNamespace(f_frsize=10, f_bavail=100, f_files=60, f_favail=50)
        patch.setattr(os, "statvfs", lambda place: disk)
        folder.check_space(50, 500)
        for count, npz_bytes, message in ((50, 501, "0.000 GB left"), (51, 0, "room for 50 files, not for 51")):
            with pytest.raises(ValueError, match=message):
                folder.check_space(count, npz_bytes)
        disk.f_files = 0  # of a file system that does not count them
        folder.check_space(51, 0)
    for count, npz_bytes in ((10**12, 0), (1, 10**18)):
        with pytest.raises(ValueError, match=r"samples need at least \d+\.\d{3} GB, .* has \d+\.\d{3} GB left"):
            folder.check_space(count, npz_bytes)


def test_a_folder_holds_samples_of_one_decoder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of an exported pipeline too, wherever the decoder lies, and whatever else its pixels depend on."""
    blocks = {"block_out_channels": (8,), "norm_num_groups": 4, "layers_per_block": 1}
    for seed in (0, 1):
        torch.manual_seed(seed)
        diffusers.AutoencoderKL(latent_channels=4, **blocks).save_pretrained(tmp_path / f"vae{seed}")
    own = diffusers.AutoencoderKL.from_pretrained(tmp_path / "vae0", low_cpu_mem_usage=False)
    network = timm.create_model("dit_linear_s_8", input_size=8, depth=1, embed_dim=16, num_heads=2, num_classes=2)
    pipeline = HeadMixDiTPipeline(network, create_scheduler(None, ObjectiveConfig()), own)
    pipeline.save_pretrained(tmp_path / "model")
    shutil.copytree(tmp_path / "vae0", tmp_path / "elsewhere")

    model, out = tmp_path / "model", tmp_path / "out"
    assert run(out, num=2, model=model) == 0
    capfd.readouterr()
    assert run(out, "--vae", tmp_path / "vae1", num=4, model=model) == 2
    assert "holds samples with vae.sha256" in capfd.readouterr().err
    assert run(out, "--vae", tmp_path / "elsewhere", num=4, model=model) == 0
    assert json.loads((out / "metadata.json").read_text())["autoencoder"] == str(tmp_path / "elsewhere")

    for file, change, name in (
        ("scheduler/scheduler_config.json", {"shift": 3.0}, "scheduler_config.shift 1.0, asked for 3.0"),
        ("transformer/config.json", {"core_args": {"eps": 0.1}}, "architecture.core_args"),
        ("vae/config.json", {"scaling_factor": 0.5}, "vae.scale"),
    ):
        other = tmp_path / name.partition(" ")[0]
        shutil.copytree(model, other, ignore=shutil.ignore_patterns("SHA256SUMS"))
        (other / file).write_text(json.dumps(json.loads((other / file).read_text()) | change))
        assert run(out, num=6, model=other) == 2
        assert f"holds samples with {name}" in capfd.readouterr().err


def test_samples_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / ".000000.png.99.tmp").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "images").symlink_to(tmp_path / "others")
    assert run(tmp_path / "out") == 2
    assert [path.name for path in (tmp_path / "others").iterdir()] == [".000000.png.99.tmp"]
