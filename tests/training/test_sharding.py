"""Sharded training: two processes and four against one, checkpoints in shards, and what is refused."""

import atexit
import errno
import os
import random
import shutil
import signal
import subprocess
import time
import warnings
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from filelock import FileLock
from lightning.pytorch.plugins import MixedPrecision
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.checkpoint import CheckpointException, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from headmix_vision.cli.export import main as export
from headmix_vision.errors import InputError
from headmix_vision.processes import leave_group
from headmix_vision.runs.checkpoints import SHARDED, model_state, named_tensors, read_checkpoint
from headmix_vision.runs.networks import create_generator
from headmix_vision.runs.shards import check_shards, read_shards
from headmix_vision.training.base_module import _check_batch
from headmix_vision.training.callbacks.checkpointing import LastCheckpoint
from headmix_vision.training.callbacks.non_finite import StopOnNonFinite
from headmix_vision.training.checkpoint_io import AtomicCheckpointIO
from headmix_vision.training.sharding import ShardedStrategy, _Writer
from headmix_vision.training.signals import InterruptRequest

from . import gen_helpers
from .helpers import assert_equal, read_csv, run, write_config
from .test_full_disk import limit
from .test_processes import NO_RANDOMNESS, start

TWO_RANKS = ("--trainer.devices", "2", "--trainer.strategy", "fsdp2")
SHARE = {"class_path": "headmix_vision.training.sharding.ShardedStrategy"}
LONG = {"trainer__accumulate_grad_batches": 1, "trainer__limit_train_batches": 12}
KEEP_ALL: dict[str, Any] = {
    "trainer__callbacks": [
        {
            "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
            "init_args": {"dirpath": None, "filename": "{step}", "every_n_train_steps": 7, "save_top_k": -1},
        }
    ]
}


def write_run(folder: Path, batch_size: int, **options: Any) -> Path:
    """Write the config of a run whose global batch is 16 in so many processes."""
    KEEP_ALL["trainer__callbacks"][0]["init_args"]["dirpath"] = str(folder / "kept")
    return write_config(
        folder / f"batches_of_{batch_size}.yaml",
        **NO_RANDOMNESS,
        **LONG,
        **KEEP_ALL,
        **options,
        data__batch_size=batch_size,
        data__eval_batch_size=2 * batch_size,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a process that has to succeed; returns what it printed."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint with all its shards, which says nothing of processes that are not there."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="torch.distributed is disabled")
        return read_checkpoint(path, sharded=SHARDED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run of 24 steps in one process (`one`) and of two with shards (`two`), and `kept/` after step 7.

    One of the processes that share the tests makes it, each has a copy.
    """
    copy = tmp_path_factory.mktemp("sharding") / "copy"
    made = copy.parents[2 if "PYTEST_XDIST_WORKER" in os.environ else 1] / "sharding_made"
    with FileLock(f"{made}.lock"):
        if not made.exists():
            make_runs(made.with_suffix(".part")).rename(made)
    return shutil.copytree(made, copy)


def make_runs(folder: Path) -> Path:
    """Train what `folder` names."""
    folder.mkdir()
    process = start("fit", "-c", write_run(folder, 8), "--trust-config", "--run_dir", folder / "two", *TWO_RANKS)
    plain = write_config(folder / "one.yaml", **NO_RANDOMNESS, **LONG, data__batch_size=16, data__eval_batch_size=32)
    assert run("fit", "-c", plain, "--run_dir", folder / "one") == 0
    finish(process)
    return folder


def assert_close(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Compare weights, averages and optimizer of runs with sums of float32 in another order, magnified by Adam."""
    assert a["global_step"] == b["global_step"] == 24
    for key in ("state_dict", "current_model_state"):
        for name, value in a[key].items():
            torch.testing.assert_close(value, b[key][name], rtol=1e-4, atol=5e-5)
    for index, state in a["optimizer_states"][0]["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(value, b["optimizer_states"][0]["state"][index][name], rtol=1e-2, atol=1e-4)


def test_shards_train_as_one_process(folder: Path) -> None:
    assert_close(*(read(folder / name / "checkpoints" / "last.ckpt") for name in ("one", "two")))
    for a, b in zip(*(read_csv(folder / name / "metrics.csv") for name in ("one", "two")), strict=True):
        assert a["val/top1"] == b["val/top1"]
        for name in ("train/loss", "train/loss_step", "val/loss"):
            if a[name] and name != "train/loss_step":
                assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("what", [{}, gen_helpers.VIDEO], ids=["images", "clips"])
def test_generators_train_with_shards_as_with_copies(what: dict[str, Any], tmp_path: Path) -> None:
    config = gen_helpers.write_config(tmp_path / "tiny.yaml", **what, trainer__accumulate_grad_batches=1)
    for name in ("ddp", "fsdp2"):
        ranks = ("--trainer.devices", "2", "--trainer.strategy", name)
        finish(start("fit", "-c", config, "--run_dir", tmp_path / name, *ranks, script="train_gen.py"))
    copies, shards = (read(tmp_path / name / "checkpoints" / "last.ckpt") for name in ("ddp", "fsdp2"))
    assert copies["global_step"] == shards["global_step"] == 12
    for key in ("state_dict", "current_model_state"):
        torch.testing.assert_close(dict(copies[key]), dict(shards[key]), rtol=1e-4, atol=5e-5)
    drawn = [sorted(path.name for path in (tmp_path / name / "samples").iterdir()) for name in ("ddp", "fsdp2")]
    assert drawn[0] == drawn[1] != []


@pytest.mark.parametrize("kept", [False, True])
def test_gathered_weights_are_kept_until_the_backward_pass_if_asked(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []

    def look(callback: StopOnNonFinite, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        found.extend(not isinstance(parameter, DTensor) for parameter in module.net.blocks.parameters())

    monkeypatch.setattr(StopOnNonFinite, "on_before_backward", look)
    monkeypatch.setattr(StopOnNonFinite, "on_before_optimizer_step", lambda *_: None)
    register = Mock(wraps=atexit.register)
    monkeypatch.setattr("atexit.register", register)
    strategy = SHARE | {"init_args": {"reshard_after_forward": not kept}}
    config = write_config(tmp_path / "tiny.yaml", trainer__strategy=strategy, trainer__limit_train_batches=2)
    try:
        assert run("fit", "-c", config, "--run_dir", tmp_path / "run", "--trainer.devices", 1) == 0
    finally:
        leave_group()
    register.assert_any_call(leave_group)
    assert found and set(found) == {kept}


@pytest.mark.parametrize(("core", "dtype"), [("mhla", torch.bfloat16), ("hih", torch.float32)])
def test_blocks_compute_as_under_autocast(
    core: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = create_generator(f"dit_{core}_s_2", 3, 8, {"depth": 2, "embed_dim": 32, "num_heads": 2, "cpe": True}).eval()
    torch.manual_seed(0)
    for parameter in net.parameters():  # gates start with zeros
        torch.nn.init.normal_(parameter, std=0.2)
    sharded, gathered, entering = deepcopy(net), set(), []
    for network in (net, sharded):
        network.blocks[1].register_forward_pre_hook(lambda _, args: entering.append([x.dtype for x in args[:2]]))
    sharded.blocks[1].mlp.register_forward_pre_hook(lambda mlp, _: gathered.update(x.dtype for x in mlp.parameters()))
    monkeypatch.setattr(ShardedStrategy, "root_device", torch.device("cuda"))
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        strategy = ShardedStrategy()
        strategy.precision_plugin = MixedPrecision("bf16-mixed", "cpu")
        strategy._device_mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        strategy.shard(sharded)
        noise, times, labels = torch.randn(4, 4, 8, 8), torch.rand(4), torch.tensor([0, 1, 2, 3])
        for network in (net, sharded):
            with torch.autocast("cpu", torch.bfloat16):
                network(noise, times, labels).float().square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in sharded.named_parameters()}
    finally:
        destroy_process_group()
    assert gathered == {dtype} and entering[0] == entering[1]
    for name, parameter in net.named_parameters():
        found = gradients[name].full_tensor()
        assert found.dtype == torch.float32 and (found - parameter.grad).norm() <= 0.03 * parameter.grad.norm(), name


@pytest.mark.gpu
def test_classifiers_gather_blocks_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, whose norms take other types than their input has."""
    found: set[tuple[bool, torch.dtype]] = set()

    def look(callback: StopOnNonFinite, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        found.update(("blocks" in name, parameter.dtype) for name, parameter in module.net.named_parameters())

    monkeypatch.setattr(StopOnNonFinite, "on_before_backward", look)
    monkeypatch.setattr(StopOnNonFinite, "on_before_optimizer_step", lambda *_: None)
    options = {
        "trainer__accelerator": "gpu",
        "trainer__precision": "bf16-mixed",
        "trainer__strategy": SHARE | {"init_args": {"reshard_after_forward": False}},
    }
    config = write_config(tmp_path / "tiny.yaml", **options)
    try:
        assert run("fit", "-c", config, "--run_dir", tmp_path / "run", "--trainer.devices", 1) == 0
    finally:
        leave_group()
    assert found == {(True, torch.bfloat16), (False, torch.float32)}
    weights = read(tmp_path / "run" / "checkpoints" / "last.ckpt")["current_model_state"]
    assert {x.dtype for x in weights.values() if x.is_floating_point()} == {torch.float32}


def test_a_process_keeps_its_part_alone(folder: Path) -> None:
    shards = list((folder / "two" / "checkpoints").glob("last.*.shards"))
    assert len(shards) == 1  # shards of earlier checkpoints are gone
    first, second = (path.stat().st_size for path in sorted(shards[0].glob("*.distcp")))
    assert first == pytest.approx(second, rel=0.1)
    tensors = torch.load(folder / "two" / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(tensor.is_meta for tensor in tensors["state_dict"].values() if tensor.is_floating_point())
    assert str(folder) not in repr({name: value for name, value in tensors.items() if name != "callbacks"})


def test_shards_are_exported_as_one_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file

    moved = folder / "moved"
    shutil.copytree(folder / "two", moved)
    monkeypatch.setattr(
        "sys.argv", ["headmix-export", str(moved), "--checkpoint", "last", "--out", str(moved / "x.safetensors")]
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="torch.distributed")
        export()
    exported = load_file(moved / "x.safetensors")
    assert_equal(exported, {k: v for k, v in model_state(read(folder / "two/checkpoints/last.ckpt")).items()})


def test_a_run_in_shards_goes_on_in_one_process(folder: Path) -> None:
    kept = folder / "kept" / "step=7.ckpt"
    assert run("fit", "-c", folder / "one.yaml", "--run_dir", folder / "one_again", "--ckpt_path", kept) == 0
    assert_close(read(folder / "one/checkpoints/last.ckpt"), read(folder / "one_again/checkpoints/last.ckpt"))


@pytest.mark.slow
def test_a_run_in_shards_goes_on_bit_for_bit(folder: Path) -> None:
    options = ("--run_dir", folder / "two_again", "--ckpt_path", folder / "kept" / "step=7.ckpt")
    finish(start("fit", "-c", folder / "batches_of_8.yaml", "--trust-config", *options, *TWO_RANKS))
    first, second = (read(folder / name / "checkpoints" / "last.ckpt") for name in ("two", "two_again"))
    for key in ("epoch", "global_step", "averaging_state", *SHARDED):
        assert_equal(first[key], second[key], key)


def test_another_global_batch_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = folder / "kept" / "step=7.ckpt"
    options = ("--run_dir", tmp_path / "run", "--data.batch_size", 8, "--ckpt_path", kept)
    assert run("fit", "-c", folder / "one.yaml", *options) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "2 x 8 samples" in line and line.endswith("set data.batch_size=16")


def test_shards_are_evaluated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = folder / "two" / "checkpoints" / "last.ckpt"
    assert run("validate", "-c", folder / "one.yaml", "--run_dir", folder / "one", "--ckpt_path", checkpoint) == 0
    assert "step 24" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--trainer.strategy", "fsdp"), "are sharded by --trainer.strategy fsdp2"),
        (("--trainer.strategy", "fsdp2", "--model.optimizer.opt", "nadamuon"), "nadamuon cannot compute on shards"),
        ((f"--trainer.strategy={SHARE['class_path']}", "--trainer.strategy.shard_size=0"), "at least 1, got 0"),
    ],
    ids=["fsdp1", "optimizer", "shard_size"],
)
def test_what_does_not_shard_is_refused(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fit", "-c", write_config(tmp_path / "tiny.yaml"), "--run_dir", tmp_path / "run", *options) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("devices", "nodes"), [("4", 1), ("[0]", 1), ("0,1", 2), ("2", 2), ("1", 2)])
def test_devices_that_are_not_the_processes_of_torchrun_are_refused(
    devices: str, nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {"TORCHELASTIC_RUN_ID": "job", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    options = ("--trainer.devices", devices, "--trainer.num_nodes", nodes, "--trainer.strategy", "fsdp2")
    assert run("fit", "-c", write_config(tmp_path / "tiny.yaml"), "--run_dir", tmp_path / "run", *options) == 2
    assert "do not make the 2 processes, 2 of them here, that torchrun has started" in capsys.readouterr().err


def test_several_nodes_are_refused_where_nothing_tells_which_this_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    fit = ("fit", "-c", write_config(tmp_path / "tiny.yaml"), "--run_dir", tmp_path / "run")
    assert run(*fit, "--trainer.num_nodes", 2) == 2
    assert "trainer.num_nodes=2, but no launcher has started this process" in capsys.readouterr().err


def test_batches_of_another_size_are_refused_within_an_epoch() -> None:
    saved = {"processes": 2, "size": 8}
    _check_batch(saved, {"processes": 2, "size": 4}, within_epoch=False)
    _check_batch(saved, {"processes": 4, "size": 4}, within_epoch=True)
    with pytest.raises(InputError, match=r"not 2 x 4: it would lose its place in the data; set data\.batch_size=8"):
        _check_batch(saved, {"processes": 2, "size": 4}, within_epoch=True)
    with pytest.raises(InputError, match=r"set data\.batch_size=16"):
        _check_batch(saved, {"processes": 1, "size": 8}, within_epoch=False)


@pytest.mark.slow
def test_processes_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path / "tiny.yaml", trainer__strategy=SHARE | {"init_args": {"shard_size": 3}})
    process = start("fit", "-c", config, "--run_dir", tmp_path / "run", "--trainer.devices", 2)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    assert "error: trainer.strategy.shard_size=3 does not divide 2 processes" in output and "Traceback" not in output


@pytest.mark.slow
def test_a_killed_run_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    long = {"trainer__max_epochs": 50, "trainer__limit_train_batches": 40}
    config = write_config(tmp_path / "tiny.yaml", **long)
    run_dir = tmp_path / "run"
    process = start("fit", "-c", config, "--run_dir", run_dir, "--checkpoint_every_n_steps", 1, *TWO_RANKS)
    last, deadline = run_dir / "checkpoints" / "last.ckpt", time.monotonic() + 200
    while not last.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # into a step, or into the writing of a later checkpoint
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert read(last)["global_step"] > 0


def test_the_first_checkpoint_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else metrics could say that a run has had a checkpoint which is not there."""
    waited: list[Any] = []
    monkeypatch.setattr("headmix_vision.training.callbacks.checkpointing.finish_saving", waited.append)
    trainer: Any = SimpleNamespace(fast_dev_run=False, save_checkpoint=lambda *args, **kwargs: None)
    callback = LastCheckpoint(tmp_path / "last.ckpt", InterruptRequest())
    callback.save(trainer)
    assert waited == [trainer]
    callback.path.touch()
    callback.save(trainer)
    assert waited == [trainer]


@pytest.mark.parametrize("size_bytes", [1000, 50_000], ids=["system", "container"])
def test_a_full_disk_is_said_by_the_system(size_bytes: int, tmp_path: Path) -> None:
    with limit(size_bytes), pytest.raises(CheckpointException) as caught:
        save({"weights": torch.zeros(50_000)}, storage_writer=_Writer(tmp_path / "shards"), no_dist=True)
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, OSError) and error.errno == errno.EFBIG


@pytest.mark.slow
def test_a_full_disk_costs_no_checkpoint(tmp_path: Path) -> None:
    config, last = write_config(tmp_path / "tiny.yaml"), tmp_path / "run" / "checkpoints" / "last.ckpt"
    options = ("--run_dir", tmp_path / "run", "--ckpt_path", "auto", *TWO_RANKS)
    finish(start("fit", "-c", config, *options))
    before = sorted(last.parent.rglob("*"))
    with limit(100_000):  # more than all files but the shards
        process = start("fit", "-c", config, *options, "--trainer.max_epochs", "3")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    assert f"error: File too large: {last}" in output and "Traceback" not in output
    assert sorted(last.parent.rglob("*")) == before
    assert read(last)["global_step"] == 6


@pytest.mark.slow
def test_a_run_goes_on_in_four_processes_that_share_two_copies(folder: Path) -> None:
    two_copies = {"shard_size": 2, "reshard_after_forward": False}
    config = write_run(folder, 4, trainer__strategy=SHARE | {"init_args": two_copies}, trainer__devices=4)
    kept = folder / "kept" / "step=7.ckpt"
    finish(start("fit", "-c", config, "--trust-config", "--run_dir", folder / "four", "--ckpt_path", kept))
    assert_close(read(folder / "one/checkpoints/last.ckpt"), read(folder / "four/checkpoints/last.ckpt"))


@pytest.mark.slow
def test_checkpointed_blocks_and_a_run_without_shards_go_on_in_shards(folder: Path) -> None:
    config = write_run(folder, 8, trainer__max_epochs=3)
    options = ("--trust-config", "--ckpt_path", folder / "one" / "checkpoints" / "last.ckpt", *TWO_RANKS)
    finish(start("fit", "-c", config, "--run_dir", folder / "a", *options, "--model.grad_checkpointing", "true"))
    finish(start("fit", "-c", config, "--run_dir", folder / "b", *options))
    first, second = (read(folder / name / "checkpoints" / "last.ckpt") for name in ("a", "b"))
    assert first["global_step"] == 36
    for key in SHARDED:
        assert_equal(first[key], second[key], key)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda shards: shutil.rmtree(shards), "lacks the folder of its shards"),
        (lambda shards: (shards / "__1_0.distcp").unlink(), "__1_0.distcp of .* is missing"),
        (lambda shards: (shards / "__0_0.distcp").write_bytes(b"abc"), "is truncated"),
        (lambda shards: (shards / ".metadata").unlink(), "not a complete folder of shards"),
        (lambda shards: (shards / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR."), "damaged: it holds"),
    ],
    ids=["folder", "shard", "truncated", "index", "code"],
)
def test_damaged_shards_are_refused(damage: Any, message: str, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder / "kept", tmp_path / "kept")
    forget_hashes(copy / "step=7.ckpt")
    damage(next(copy.glob("step=7.*.shards")))
    with pytest.raises(InputError, match=message):
        read_checkpoint(copy / "step=7.ckpt", sharded=())


def test_a_run_does_not_go_on_beside_a_best_checkpoint_with_damaged_shards(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(folder / "two", tmp_path / "two")
    (shards,) = (copy / "checkpoints").glob("best.*.shards")
    (shards / ".metadata").unlink()
    assert run("fit", "-c", folder / "one.yaml", "--run_dir", copy, "--ckpt_path", "last") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "the best checkpoint of the run cannot be opened" in line and "it lacks .metadata" in line
    assert len([*shards.iterdir()]) == 2


def test_a_checkpoint_is_deleted_with_its_shards(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder / "kept", tmp_path / "kept")
    left = {path.name for path in copy.iterdir() if not path.name.startswith("step=7.")}
    AtomicCheckpointIO(lambda: None).remove_checkpoint(copy / "step=7.ckpt")
    assert {path.name for path in copy.iterdir()} == left


def widen(state: dict[str, torch.Tensor]) -> None:
    """Give the first tensor in the shards another shape."""
    name = next(name for name, tensor in state.items() if tensor.is_meta)
    state[name] = torch.empty(3, *state[name].shape, device="meta")


def forget_hashes(checkpoint: Path) -> None:
    """Make a checkpoint one of an earlier version, which had no hashes."""
    stored = torch.load(checkpoint, weights_only=True)
    assert len(stored["shards"].pop("sha256")) == 3 and stored.pop("tensors_sha256") and stored.pop("values_sha256")
    torch.save(stored, checkpoint)


def test_a_flipped_byte_of_a_shard_is_noticed(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder / "kept", tmp_path / "kept")
    flips, checkpoint = random.Random(0), read_checkpoint(copy / "step=7.ckpt", sharded=())
    tensors = {name: tensor for name, tensor in named_tensors(checkpoint) if tensor.is_meta}
    for file in next(copy.glob("step=7.*.shards")).iterdir():
        content = file.read_bytes()
        for _ in range(70):
            place = flips.randrange(len(content))
            file.write_bytes(content[:place] + bytes([content[place] ^ 1 << flips.randrange(8)]) + content[place + 1 :])
            with pytest.raises(InputError, match=f"{file.name} is damaged: it does not have the SHA-256"):
                check_shards(copy / "step=7.ckpt", checkpoint["shards"], tensors)
                read_shards(copy / "step=7.ckpt", checkpoint["shards"], tensors)
        file.write_bytes(content)
    assert read(copy / "step=7.ckpt")["global_step"] == 7


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (lambda checkpoint: checkpoint.pop("shards"), "has no values, and the entry 'shards' is missing"),
        (lambda checkpoint: checkpoint["shards"].update(processes=10**9), "is of 1000000000 processes, but .* of 2"),
        (lambda checkpoint: checkpoint["shards"].update(processes=-1), "is of -1 processes, but .* of 2"),
        (lambda checkpoint: widen(checkpoint["state_dict"]), r"is damaged: .* of shape \[3, .* is not in its shards"),
    ],
)
def test_forged_entries_of_shards_are_refused(forge: Any, message: str, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder / "kept", tmp_path / "kept")
    checkpoint = torch.load(copy / "step=7.ckpt", weights_only=True)
    del checkpoint["values_sha256"]
    forge(checkpoint)
    torch.save(checkpoint, copy / "step=7.ckpt")
    with pytest.raises(InputError, match=message):
        read(copy / "step=7.ckpt")


@pytest.mark.parametrize("hashed", [True, False])
def test_a_shard_of_another_checkpoint_is_refused(hashed: bool, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder / "kept", tmp_path / "kept")
    if not hashed:
        forget_hashes(copy / "step=7.ckpt")
    ours, other = (next(copy.glob(f"step={step}.*.shards")) for step in (7, 14))
    shutil.copy(other / "__1_0.distcp", ours / "__1_0.distcp")
    message = (
        "does not have the SHA-256 in its checkpoint" if hashed else "shard of process 1 .* is of another checkpoint"
    )
    with pytest.raises(InputError, match=message):
        read(copy / "step=7.ckpt")
