"""No run is lost: by a mistake, by another run, or by the death of the run that takes its place."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from headmix_vision.errors import InputError
from headmix_vision.files.writing import hold_lock
from headmix_vision.runs.shards import remove_shards, shards_folder
from headmix_vision.training.classifier import ImageClassifier
from headmix_vision.training.run_directory import RunDirectory

from .helpers import assert_same_run, load, read_csv, run, write_config

OVERWRITE = ("--overwrite",)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Mode, time of the last change and contents, or target, of all that is in a folder, but of no lock."""
    found = {}
    for path in folder.rglob("*"):
        info = path.lstat()
        inside = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (info.st_mode, path.is_file() * info.st_mtime_ns, inside)
    return found


@pytest.fixture
def finished(reference_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished tiny run."""
    return shutil.copytree(reference_run, tmp_path / "run")


def run_killed(monkeypatch: pytest.MonkeyPatch, batch: int, *args: object) -> None:
    """Run the command line in a process that is killed in a training batch of the first epoch."""

    def die(self: ImageClassifier, samples: Any, batch_idx: int) -> Any:
        if batch_idx == batch:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, samples, batch_idx)

    original = ImageClassifier.training_step
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(ImageClassifier, "training_step", die)
        run(*args)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize(
    "mistake",
    [
        ("--model.name", "deit_mla_digits"),
        ("--model.num_classes", 7),
        ("--trainer.max_epochs", -1),
    ],
    ids=["model", "classes", "schedule"],
)
def test_a_mistake_leaves_the_run_to_be_replaced_as_it_was(mistake: tuple[object, ...], finished: Path) -> None:
    before = contents(finished)
    config = write_config(finished.parent / "tiny.yaml", seed_everything=4)
    assert run("fit", "-c", config, "--run_dir", finished, *OVERWRITE, *mistake) == 2
    assert contents(finished) == before


def test_a_mistake_in_resuming_leaves_the_run_as_it_was(finished: Path) -> None:
    before = contents(finished)
    wrong = ("--data.batch_size", 7, "--trainer.max_epochs", 4)
    assert run("fit", "-c", finished / "config.yaml", "--run_dir", finished, "--ckpt_path", "last", *wrong) == 2
    assert contents(finished) == before


def test_a_new_run_starts_without_a_trace_of_a_mistake(tmp_path: Path) -> None:
    config = write_config(tmp_path / "tiny.yaml", data__batch_size=7)
    assert run("fit", "-c", config, "--run_dir", tmp_path / "runs" / "run") == 2
    assert not (tmp_path / "runs").exists()


def test_replacement_killed_before_its_first_checkpoint(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(finished)
    config = write_config(finished.parent / "tiny.yaml", seed_everything=4)
    fit = ("fit", "-c", config, "--run_dir", finished)
    for _ in range(2):  # the second replacement removes the first one's files, not the run kept aside
        run_killed(monkeypatch, 3, *fit, *OVERWRITE)
        assert "seed_everything: 4" in (finished / "config.yaml").read_text()
        assert contents(finished / ".replaced") == before
    assert run("validate", "-c", config, "--run_dir", finished, "--ckpt_path", "last") == 2
    assert f"is a run directory still: {finished / '.replaced'}" in capfd.readouterr().err
    (finished / ".lock").unlink()  # of the killed run
    left = contents(finished)
    assert run(*fit) == 2
    assert "already holds a run: continue it with --ckpt-path last" in capfd.readouterr().err
    assert contents(finished) == left
    assert run(*fit, "--ckpt_path", "last") == 0  # nothing is left to train
    assert "put back the run" in capfd.readouterr().err
    assert contents(finished) == before


def test_failed_replacement_says_where_the_earlier_run_is(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def crash(*args: object) -> None:
        raise RuntimeError

    config = write_config(finished.parent / "tiny.yaml")
    with monkeypatch.context() as context:
        context.setattr(ImageClassifier, "training_step", crash)
        with pytest.raises(RuntimeError):
            run("fit", "-c", config, "--run_dir", finished, *OVERWRITE)
    assert f"the earlier run is kept in {finished / '.replaced'}" in capfd.readouterr().err
    assert run("fit", "-c", config, "--run_dir", finished, "--ckpt_path", "last") == 0
    assert load(finished / "checkpoints" / "last.ckpt")["global_step"] == 6


def test_run_killed_before_its_first_checkpoint_is_repeated_by_the_same_command(
    reference_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run_dir = write_config(tmp_path / "tiny.yaml"), tmp_path / "run"
    run_killed(monkeypatch, 4, "fit", "-c", config, "--run_dir", run_dir)
    assert {path.name for path in run_dir.iterdir()} == {".lock", "config.yaml", "metrics.csv", "tensorboard"}
    (run_dir / "checkpoints").mkdir()
    half_written = [run_dir / "checkpoints" / ".last.ckpt.99.tmp", run_dir / ".metrics.csv.99.tmp"]
    of_others = [run_dir / ".predictions.99.tmp", run_dir / "checkpoints" / ".mine.ckpt.99.tmp"]
    for path in half_written + of_others:
        path.touch()
    assert run("fit", "-c", config, "--run_dir", run_dir) == 0
    assert [path.exists() for path in half_written + of_others] == [False, False, True, True]
    assert len(list((run_dir / "tensorboard").glob("events*"))) == 1
    assert_same_run(run_dir, reference_run)


def test_the_command_that_starts_a_run_goes_on_with_it(
    reference_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run_dir = write_config(tmp_path / "tiny.yaml"), tmp_path / "run"
    command = ("fit", "-c", config, "--run_dir", run_dir, "--ckpt_path", "auto")
    run_killed(monkeypatch, 4, *command, "--checkpoint_every_n_steps", 1)
    assert load(run_dir / "checkpoints" / "last.ckpt")["global_step"] == 2
    for _ in range(2):  # the second time there is nothing left to do
        assert run(*command) == 0
        assert_same_run(run_dir, reference_run)
    (run_dir / "checkpoints" / "last.ckpt").unlink()
    assert run(*command) == 2


def test_second_training_is_refused_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, run_dir = write_config(tmp_path / "tiny.yaml"), tmp_path / "run"
    with hold_lock(run_dir / ".lock", "run"):
        for more in ((), OVERWRITE):
            assert run("fit", "-c", config, "--run_dir", run_dir, *more) == 2
            assert f"run directory {run_dir} is in use by process {os.getpid()} on" in capfd.readouterr().err
        assert [path.name for path in run_dir.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    "files",
    [
        {"checkpoints/epoch=1.ckpt": ""},
        {"config.yaml": "model: mine\n"},
        {"metrics.csv": "day,price\n1,2\n"},
        {"config.yaml": "\0", "checkpoints/last.ckpt": ""},
        {"samples/step_1_raw.png": ""},
    ],
    ids=["checkpoints", "config", "metrics", "binary", "samples"],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_files_that_no_run_wrote_are_left_alone(files: dict[str, str], overwrite: bool, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = contents(tmp_path)
    with pytest.raises(InputError, match="which no run wrote"):
        RunDirectory(tmp_path, None, overwrite=overwrite).claimed().__enter__()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["curves.svg", "metrics.csv", "checkpoints/best.ckpt"])
def test_a_folder_in_the_place_of_a_file_is_refused_before_the_training(name: str, finished: Path) -> None:
    (finished / name).unlink()
    (finished / name).mkdir()
    with pytest.raises(InputError, match=f"{name} is not a regular file, and a run writes one there"):
        RunDirectory(finished, "last", overwrite=False).check()


def test_a_users_own_files_among_those_of_a_run_stay(finished: Path) -> None:
    mine = ["notes.txt", "classes_mine.csv", "checkpoints/kept.ckpt", "samples/drawn/000000.png", "tensorboard/notes"]
    for name in mine:
        (finished / name).parent.mkdir(parents=True, exist_ok=True)
        (finished / name).write_text("mine")
    directory = RunDirectory(finished, None, overwrite=True)
    with directory.claimed():
        directory.begin()
        assert sorted(path for path in contents(finished) if not path.startswith(".")) == sorted(mine)
        (finished / "checkpoints" / "last.ckpt").touch()
        directory.discard_replaced()
        assert sorted(contents(finished)) == sorted([".lock", "checkpoints/last.ckpt", *mine])


def test_a_move_that_was_cut_short_is_undone(finished: Path) -> None:
    before = contents(finished)
    (finished / ".replacing" / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "checkpoints/last.ckpt"):
        (finished / name).rename(finished / ".replacing" / name)
    left = contents(finished)
    with pytest.raises(InputError, match="already holds a run: continue it with --ckpt-path last, choose"):
        RunDirectory(finished, None, overwrite=False).check()
    assert contents(finished) == left
    directory = RunDirectory(finished, "last", overwrite=False)
    directory.check()
    directory.begin()
    assert contents(finished) == before


def test_what_a_replacement_killed_after_its_first_checkpoint_left_goes(finished: Path) -> None:
    before = contents(finished)
    shutil.copytree(finished, finished / ".replaced")
    RunDirectory(finished, "last", overwrite=False).begin()
    assert contents(finished) == before


def test_a_run_without_its_checkpoints_is_still_a_run(finished: Path) -> None:
    shutil.rmtree(finished / "checkpoints")
    with (
        pytest.raises(InputError, match=r"already holds a run: it has no last\.ckpt, choose"),
        RunDirectory(finished, None, overwrite=False).claimed(),
    ):
        pass


def test_checkpoint_of_another_run(finished: Path, reference_run: Path) -> None:
    elsewhere = str(reference_run / "checkpoints" / "last.ckpt")
    with pytest.raises(InputError, match="is none of its checkpoints"):
        RunDirectory(finished, elsewhere, overwrite=False).claimed().__enter__()
    with RunDirectory(finished.parent / "new", elsewhere, overwrite=False).claimed():
        pass


def write_shards(checkpoint: Path, identity: int, *files: str) -> Path:
    folder = shards_folder(checkpoint, identity)
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    return folder


def test_shards_that_a_killed_run_was_writing_are_removed(finished: Path) -> None:
    last = finished / "checkpoints" / "last.ckpt"
    unfinished = write_shards(last, 1, "__0_0.distcp", ".metadata.tmp")
    whole = write_shards(last, 2, "__0_0.distcp", ".metadata")
    RunDirectory(finished, "last", overwrite=False).begin()
    assert whole.exists() and not unfinished.exists()


def test_shards_of_checkpoints_with_like_names_are_kept_apart(tmp_path: Path) -> None:
    names = ("loss=1.ckpt", "loss=1.5.ckpt", "loss=[1].ckpt")
    folders = [write_shards(tmp_path / name, 3, ".metadata") for name in names]
    remove_shards(tmp_path / names[0])
    assert [folder.exists() for folder in folders] == [False, True, True]
    remove_shards(tmp_path / names[2])
    assert [folder.exists() for folder in folders] == [False, True, False]


@pytest.mark.parametrize("state", ["whole", "replaced", "moved"])
def test_a_command_that_refuses_changes_nothing(state: str, finished: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "tiny.yaml")
    if state == "replaced":  # by a run that was killed before its first checkpoint
        shutil.copytree(finished, finished / ".replaced")
        shutil.rmtree(finished / "checkpoints")
    if state == "moved":
        (finished / ".replacing" / "checkpoints").mkdir(parents=True)
        (finished / "checkpoints" / "best.ckpt").rename(finished / ".replacing" / "checkpoints" / "best.ckpt")
    (finished / "checkpoints").mkdir(exist_ok=True)
    write_shards(finished / "checkpoints" / "last.ckpt", 1, "__0_0.distcp")
    for name in ("checkpoints/.last.ckpt.99.tmp", ".metrics.csv.99.tmp"):
        (finished / name).touch()
    go_on = ("--ckpt_path", "last", "--trainer.max_epochs", 3)
    before = snapshot(finished)
    for refused in (
        (),
        OVERWRITE + go_on,
        (*OVERWRITE, "--model.name", "deit_mla_digits"),
        (*OVERWRITE, "--model.num_classes", 7),
        (*OVERWRITE, "--data.root", "", "--data.dataset", "folder"),
        ("--ckpt_path", "absent.ckpt"),
        (*go_on, "--data.batch_size", 7),
        (*go_on, "--model.optimizer.opt", "lion"),
        (*go_on, "--model.model_args.depth", 3),
        (*go_on, "--early_stopping.patience", 1, "--trainer.limit_val_batches", 0),
    ):
        assert run("fit", "-c", config, "--run_dir", finished, *refused) == 2, refused
        assert snapshot(finished) == before, refused
    assert run("fit", "-c", config, "--run_dir", finished, *go_on) == 0
    assert load(finished / "checkpoints" / "last.ckpt")["global_step"] == 9
    assert not any(path.name.endswith(".tmp") or path.name.startswith(".re") for path in finished.rglob("*"))
    assert len(read_csv(finished / "metrics.csv")) == 9


@pytest.mark.parametrize("folder", ["checkpoints", "tensorboard", "samples", ".replaced", ".replacing", "shards"])
def test_no_link_out_of_the_run_is_followed(folder: str, finished: Path, tmp_path: Path) -> None:
    others = shutil.copytree(finished, tmp_path / "others") if folder.startswith(".") else tmp_path / "others"
    if folder == "shards":
        folder = "checkpoints/last.0123456789abcdef.shards"
    if (finished / folder).exists():
        (finished / folder).rename(others)
    others.mkdir(exist_ok=True)
    write_shards(others / "last.ckpt", 1, "__0_0.distcp")
    (others / ".last.ckpt.99.tmp").touch()
    (finished / folder).symlink_to(others)
    before = snapshot(tmp_path)
    for checkpoint, overwrite in ((None, False), (None, True), ("best", False)):
        with pytest.raises(InputError, match=r"is a link to .*: a run moves and deletes files"):
            RunDirectory(finished, checkpoint, overwrite=overwrite).claimed().__enter__()
    assert snapshot(tmp_path) == before


def test_a_link_in_the_place_of_the_lock_is_not_written_to(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (finished / ".lock").symlink_to(tmp_path / "mine.txt")
    config = write_config(tmp_path / "tiny.yaml")
    assert run("fit", "-c", config, "--run_dir", finished, *OVERWRITE) == 2
    assert (tmp_path / "mine.txt").read_text() == "mine"
