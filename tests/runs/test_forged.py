"""Checkpoints that are damaged, forged or useless, and exports that would lose something: an error of one line each."""

import math
import os
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch

from headmix_vision.cli import export
from headmix_vision.errors import InputError
from headmix_vision.files.writing import hold_lock
from headmix_vision.runs.checkpoints import read_checkpoint
from headmix_vision.runs.networks import create_generator, create_network, load_network, open_network

SMALL = {"embed_dim": 16, "depth": 1, "num_heads": 2}
CLASSIFIER = {"name": "deit_linear_digits", "num_classes": 10, "img_size": None, "model_args": SMALL}
CLASSIFIER |= {"class_names": [str(i) for i in range(10)], "top1": 0.5}


def save(path: Path, state: Any, about: Any, **entries: Any) -> Path:
    torch.save({"state_dict": state, "headmix_vision": about, "global_step": 1, **entries}, path)
    return path


def prefixed(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"net.{name}": value for name, value in network.state_dict().items()}


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return prefixed(timm.create_model("deit_linear_digits", **SMALL))


@pytest.fixture(scope="module")
def generator() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    network = timm.create_model("dit_linear_digits", **SMALL)
    about = {"name": "dit_linear_digits", "kind": "generator", "architecture": network.architecture, "objective": {}}
    return prefixed(network), about


def run(*args: object) -> int:
    try:
        export.main([str(arg) for arg in args])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    capsys.readouterr()
    assert run(*args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("about", "message"),
    [
        (None, "is None, it must be a table"),
        ([1], r"is \[1\], it must be a table"),
        ({}, "entry 'name' is missing"),
        ({**CLASSIFIER, "name": 3}, "entry 'name' is 3"),
        ({"name": "deit_linear_digits"}, "entry 'num_classes' is missing"),
        ({**CLASSIFIER, "num_classes": "x"}, "entry 'num_classes' is 'x'"),
        ({**CLASSIFIER, "model_args": [1]}, r"entry 'model_args' is \[1\]"),
        ({**CLASSIFIER, "img_size": "8"}, "entry 'img_size' is '8'"),
        ({**CLASSIFIER, "top1": "1"}, "entry 'top1' is '1'"),
        ({**CLASSIFIER, "class_names": "ab"}, "entry 'class_names' is 'ab'"),
        ({**CLASSIFIER, "class_names": [*"123456789", 0]}, "entry 'class_names' must hold texts"),
        ({**CLASSIFIER, "class_names": [*"123456789"]}, "entry 'class_names' has 9 names for 10 classes"),
        ({**CLASSIFIER, "num_classes": 1}, "entry 'class_names' has 10 names for 1 classes"),
        ({**CLASSIFIER, "num_classes": -1}, "entry 'num_classes' must be at least 0, got -1"),
        *(
            ({**CLASSIFIER, "img_size": size}, "entry 'img_size' must be whole numbers above 0")
            for size in (0, [], [8, 8, 8, 8], [8, 0], [8, "8"])
        ),
        *(({**CLASSIFIER, "top1": top1}, "entry 'top1' must be from 0 to 1") for top1 in (-1e-9, 1.001, math.nan)),
        ({"name": "dit_linear_digits", "kind": "generator"}, "entry 'architecture' is missing"),
        ({"name": "x", "kind": "generator", "architecture": {}, "objective": {}, "vae": 3}, "entry 'vae' is 3"),
    ],
)
def test_forged_descriptions(about: Any, message: str, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_checkpoint(save(tmp_path / "a.ckpt", weights, about))


@pytest.mark.parametrize(
    "change",
    [
        *({"top1": top1} for top1 in (0.0, 1.0, None)),
        *({"img_size": size} for size in (1, [1], [8, 8, 8])),
        {"num_classes": 0},
        {"num_classes": 1, "class_names": ["a"]},
        {"class_names": []},
        {"class_names": None},
    ],
)
def test_descriptions_at_their_bounds_are_read(
    change: dict[str, Any], weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = save(tmp_path / "a.ckpt", weights, {**CLASSIFIER, **change})
    assert read_checkpoint(path)["headmix_vision"].items() >= change.items()


@pytest.mark.parametrize("key", ["state_dict", "current_model_state"])
@pytest.mark.parametrize("state", [[1], "x", {1: torch.ones(1)}, {"net.a": 1}])
def test_forged_weights(key: str, state: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"entry '{key}' is not a table of weights by name"):
        read_checkpoint(save(tmp_path / "a.ckpt", {}, CLASSIFIER, **{key: state}))


def test_checkpoints_that_run_code_or_are_damaged(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="objects other than tensors and plain values; nothing was loaded"):
        read_checkpoint(save(tmp_path / "code.ckpt", weights, tmp_path))
    good = save(tmp_path / "good.ckpt", weights, CLASSIFIER)
    content = bytearray(good.read_bytes())
    for start in range(60, 120, 20):
        content[content.index(b"data.pkl") + start] ^= 0xFF
    damaged = tmp_path / "damaged.ckpt"
    damaged.write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"is truncated or damaged|objects other than"):
        read_checkpoint(damaged)


def test_entries_that_are_nested_without_end_are_refused(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(500):  # pickle itself goes no deeper
        deep = [[deep]]
    loop: dict[str, Any] = {}
    loop["again"] = loop
    for entries in ({"loops": loop}, {"callbacks": deep}):
        with pytest.raises(InputError, match=r"nested too deeply|truncated or damaged"):
            read_checkpoint(save_deep(tmp_path / "a.ckpt", weights, **entries))


def save_deep(path: Path, weights: dict[str, torch.Tensor], **entries: Any) -> Path:
    """Save a checkpoint whose entries pickle needs more stack for than it usually has."""
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(20000)
    try:
        return save(path, weights, CLASSIFIER, **entries)
    finally:
        sys.setrecursionlimit(usual)


def test_networks_that_cannot_be_made(
    weights: dict[str, torch.Tensor], generator: tuple[dict[str, torch.Tensor], dict[str, Any]], tmp_path: Path
) -> None:
    def load(state: dict[str, torch.Tensor], about: dict[str, Any], **entries: Any) -> None:
        load_network(
            read_checkpoint(save(tmp_path / "a.ckpt", state, about, **entries)), raw="current_model_state" in entries
        )

    spoilt = {name: value * float("nan") if name == "net.pos_embed" else value for name, value in weights.items()}
    with pytest.raises(InputError, match="weights of the checkpoint are not finite, first pos_embed"):
        load(spoilt, CLASSIFIER)
    with pytest.raises(InputError, match="not finite, first pos_embed"):
        load(weights, CLASSIFIER, current_model_state=spoilt)
    with pytest.raises(InputError, match="unknown model 'foo'"):
        load(weights, {**CLASSIFIER, "name": "foo"})
    state, about = generator
    for change in ({"foo": 1}, {"depth": "x"}, {"embed_dim": -4}):
        with pytest.raises(InputError, match="description makes no dit_linear_digits: "):
            load(state, {**about, "architecture": {**about["architecture"], **change}})
    for change in ({"embed_dim": 10**7}, {"depth": 10**9}):
        huge = {**CLASSIFIER, "model_args": {**SMALL, **change}}
        with pytest.raises(InputError, match=r"needs \S+ (GB|bytes) of memory|the depth of .* is 1000000000"):
            load(weights, huge)
        with pytest.raises(InputError, match=r"needs \S+ (GB|bytes) of memory|the depth of .* is 1000000000"):
            load(state, {**about, "architecture": {**about["architecture"], **change}})
    spoilt_file, other = tmp_path / "a.ckpt", tmp_path / "other.pth"
    save(spoilt_file, spoilt, CLASSIFIER)
    with pytest.raises(InputError, match=r"a\.ckpt are not finite, first pos_embed"):
        create_network("deit_linear_digits", model_args=SMALL, checkpoint=str(spoilt_file))
    save(spoilt_file, {name: value + float("inf") for name, value in state.items()}, about)
    with pytest.raises(InputError, match=r"a\.ckpt are not finite"):
        create_generator("dit_linear_digits", model_args=SMALL, checkpoint=str(spoilt_file))
    torch.save([1], other)
    with pytest.raises(InputError, match=r"other\.pth holds no"):
        create_network("deit_linear_digits", checkpoint=str(other))


@pytest.mark.parametrize("mix", ["iha", "mea"])
def test_a_generator_without_a_mix_refuses_weights_of_one(mix: str, tmp_path: Path) -> None:
    mixed, plain = f"dit_linear_{mix}_digits", "dit_linear_digits"
    weights = create_generator(mixed, model_args=SMALL).state_dict()
    start = str(tmp_path / "mixed.safetensors")
    safetensors.torch.save_file(weights, start)
    with pytest.raises(InputError, match=rf"mixes heads where {plain} does not, first blocks\.0\.attn\.head_mix\."):
        create_generator(plain, model_args=SMALL, checkpoint=start)
    loaded = create_generator(mixed, model_args=SMALL, checkpoint=start).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())

    weights = create_generator(plain, model_args=SMALL).state_dict()
    safetensors.torch.save_file(weights, start)
    loaded = create_generator(mixed, model_args=SMALL, checkpoint=start).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())


def test_an_export_of_a_classifier_loses_nothing(
    weights: dict[str, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, out = save(tmp_path / "a.ckpt", weights, CLASSIFIER), tmp_path / "new" / "model.safetensors"
    assert run(checkpoint, "--out", out, "--dry-run") == 0
    assert "would write" in capsys.readouterr().out and not out.parent.exists()
    assert run(checkpoint, "--out", out) == 0
    written = out.read_bytes()
    assert "already exists; choose another one, or replace it with --overwrite" in refused(
        capsys, checkpoint, "--out", out
    )
    out.write_text("mine")
    assert run(checkpoint, "--out", out, "--overwrite") == 0
    assert len(out.read_bytes()) == len(written)  # the order of the texts in its header is by chance
    written = out.read_bytes()
    assert stat.S_IMODE(out.stat().st_mode) == stat.S_IMODE(checkpoint.stat().st_mode)
    spoilt = {name: value * float("nan") for name, value in weights.items()}
    save(tmp_path / "spoilt.ckpt", spoilt, CLASSIFIER)
    assert "are not finite" in refused(capsys, tmp_path / "spoilt.ckpt", "--out", out, "--overwrite")
    save(tmp_path / "other.ckpt", weights, {**CLASSIFIER, "model_args": {**SMALL, "depth": 3}})
    assert "the checkpoint lacks" in refused(capsys, tmp_path / "other.ckpt", "--out", out, "--overwrite")
    assert out.read_bytes() == written
    (tmp_path / "d.safetensors").mkdir()
    assert "is a directory" in refused(capsys, checkpoint, "--out", tmp_path / "d.safetensors")
    assert "must end in .safetensors" in refused(capsys, checkpoint, "--out", tmp_path / "a.pth")
    assert "Not a directory" in refused(capsys, checkpoint, "--out", out / "a.safetensors")
    assert "is a checkpoint already" in refused(capsys, checkpoint, "--out", out, "--checkpoint", "best")
    assert "no checkpoint at" in refused(capsys, tmp_path, "--out", tmp_path / "b.safetensors")
    assert "did you mean --overwrite?" in refused(capsys, checkpoint, "--out", out, "--overwite")


def test_an_export_of_a_generator_loses_nothing(
    generator: tuple[dict[str, torch.Tensor], dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, out = save(tmp_path / "a.ckpt", *generator), tmp_path / "pipe"
    assert run(checkpoint, "--out", out, "--dry-run") == 0 and not out.exists()
    assert run(checkpoint, "--out", out) == 0
    modes = {stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*") if path.is_file()}
    assert modes == {stat.S_IMODE(checkpoint.stat().st_mode)}
    (out / "mine.txt").touch()
    assert "or replace it with --overwrite" in refused(capsys, checkpoint, "--out", out)
    assert (out / "mine.txt").exists()
    assert run(checkpoint, "--out", out, "--overwrite") == 0
    assert not (out / "mine.txt").exists() and (out / "model_index.json").is_file()
    (tmp_path / "notes").mkdir()
    assert "holds no pipeline" in refused(capsys, checkpoint, "--out", tmp_path / "notes", "--overwrite")
    assert "exported to a directory" in refused(capsys, checkpoint, "--out", tmp_path / "a.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "notes", "pipe"]


@pytest.mark.parametrize("kind", ["classifier", "generator"])
def test_one_process_at_a_time_writes_an_export(
    kind: str,
    weights: dict[str, torch.Tensor],
    generator: tuple[dict[str, torch.Tensor], dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Several start at once and some are killed: the target is absent or whole, and each says one line at most."""
    state, about = (weights, CLASSIFIER) if kind == "classifier" else generator
    checkpoint = save(tmp_path / "a.ckpt", state, about)
    out = tmp_path / ("model.safetensors" if kind == "classifier" else "pipe")
    with hold_lock(tmp_path / f".{out.name}.lock", f"{out}"):
        assert f"{out} is in use by process {os.getpid()} on " in refused(capsys, checkpoint, "--out", out)
    for round_number in range(4):
        children = []
        for number in range(3):
            child = os.fork()
            if not child:
                status = 1
                try:
                    status = run(checkpoint, "--out", out, "--overwrite")
                finally:
                    os._exit(status)
            children.append((child, number == 0))
        time.sleep(0.04 * round_number)
        for child, killed in children:
            if killed:
                os.kill(child, signal.SIGKILL)
        statuses = [os.waitpid(child, 0)[1] for child, _ in children]
        assert {os.waitstatus_to_exitcode(status) for status in statuses} <= {0, 2, -signal.SIGKILL}
        if out.exists():
            open_network(out)
        assert run(checkpoint, "--out", out, "--overwrite") == 0
        assert open_network(out)[1]["weights_sha256"]
        assert sorted(os.listdir(tmp_path)) == ["a.ckpt", out.name]
