"""Files of weights with a flipped byte are refused, or hold the same network; their hashes are written by training."""

import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from headmix_vision.cli import export
from headmix_vision.diffusion import HeadMixDiTPipeline
from headmix_vision.errors import InputError
from headmix_vision.files.tensors import read_weights, state_sha256
from headmix_vision.runs.checkpoints import read_checkpoint
from headmix_vision.runs.networks import create_generator, create_network, open_network
from headmix_vision.runs.pipelines import load_pipeline
from headmix_vision.training.checkpoint_io import AtomicCheckpointIO

FLIPS = 200
SMALL = {"embed_dim": 16, "depth": 1, "num_heads": 2}
NAMES = [str(i) for i in range(10)]


def write_checkpoint(path: Path, name: str) -> Path:
    """Write a checkpoint as training does."""
    network = timm.create_model(name, **SMALL)
    about: dict[str, Any] = {"name": name, "class_names": NAMES}
    if name.startswith("dit_"):
        about |= {"kind": "generator", "architecture": network.architecture, "objective": {}, "vae": None}
    else:
        about |= {"num_classes": 10, "img_size": None, "model_args": SMALL, "top1": 0.5}
    state = {f"net.{weight}": value for weight, value in network.state_dict().items()}
    AtomicCheckpointIO().save_checkpoint({"state_dict": state, "headmix_vision": about, "global_step": 1}, path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with checkpoints of a classifier and a generator, and their exports."""
    made = tmp_path_factory.mktemp("damage")
    export.main([str(write_checkpoint(made / "a.ckpt", "deit_linear_digits")), "--out", str(made / "a.safetensors")])
    export.main([str(write_checkpoint(made / "b.ckpt", "dit_linear_digits")), "--out", str(made / "pipe")])
    return made


def opened(path: Path) -> tuple[str, Any]:
    """Open what a command would open; returns the hash of the weights and what the network computes."""
    network, about = open_network(path)
    return about["weights_sha256"], network(torch.linspace(-1, 1, 64).view(1, 1, 8, 8)).tolist()


def flip(path: Path, flips: random.Random) -> bytes:
    """Flip bits of one byte of a file; returns what the file held."""
    content = path.read_bytes()
    place = flips.randrange(len(content))
    path.write_bytes(content[:place] + bytes([content[place] ^ flips.randrange(1, 256)]) + content[place + 1 :])
    return content


def test_a_changed_number_is_refused_where_no_hash_of_the_values_is_kept(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "a.ckpt", "deit_linear_digits")
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["values_sha256"]
    torch.save(checkpoint, path)
    content, score = path.read_bytes(), struct.pack(">d", 0.5)
    assert read_checkpoint(path)["headmix_vision"]["top1"] == 0.5 and content.count(score) == 1
    path.write_bytes(content.replace(score, struct.pack(">d", 0.75)))
    with pytest.raises(InputError, match="Bad CRC-32"):
        read_checkpoint(path)


def count_refused(path: Path, file: Path, read: Callable[[Path], Any]) -> int:
    """Flip bytes of `file` and read `path`: an error of one line, or the same result."""
    whole, flips, refused = read(path), random.Random(0), 0
    for _ in range(FLIPS):
        content = flip(file, flips)
        try:
            assert read(path) == whole
        except InputError as error:
            assert "\n" not in str(error)
            refused += 1
        finally:
            file.write_bytes(content)
    assert read(path) == whole
    return refused


@pytest.mark.parametrize("name", ["a.ckpt", "a.safetensors"])
def test_a_flipped_byte_never_opens_another_network(name: str, folder: Path) -> None:
    assert count_refused(folder / name, folder / name, opened) > 0.7 * FLIPS


def test_a_flipped_byte_of_a_checkpoint_without_hash_never_opens_another_network(folder: Path, tmp_path: Path) -> None:
    stored = torch.load(folder / "a.ckpt", weights_only=True)
    del stored["tensors_sha256"], stored["values_sha256"]
    torch.save(stored, tmp_path / "a.ckpt")
    assert count_refused(tmp_path / "a.ckpt", tmp_path / "a.ckpt", opened) > 0.7 * FLIPS


def test_a_flipped_byte_never_starts_from_other_weights(tmp_path: Path) -> None:
    def start(path: Path) -> str:
        return state_sha256(create_network("deit_linear_digits", model_args=SMALL, checkpoint=str(path)).state_dict())

    torch.save(timm.create_model("deit_linear_digits", **SMALL).state_dict(), tmp_path / "a.pth")
    assert count_refused(tmp_path / "a.pth", tmp_path / "a.pth", start) > 0.7 * FLIPS


def test_a_flipped_byte_of_a_pipeline_is_noticed(folder: Path) -> None:
    files = sorted(path for path in (folder / "pipe").rglob("*") if path.is_file())
    assert [path.name for path in files if path.parent == folder / "pipe"] == ["SHA256SUMS", "model_index.json"]
    flips = random.Random(0)
    for _ in range(FLIPS):
        file = flips.choice(files)
        content = flip(file, flips)
        for load in (load_pipeline, open_network, HeadMixDiTPipeline.from_pretrained):
            with pytest.raises(InputError, match=r"pipe"):
                load(folder / "pipe")
        file.write_bytes(content)
    weights = next((folder / "pipe").glob("*/*.safetensors"))  # as start weights, by itself
    content = flip(weights, flips)
    with pytest.raises(InputError, match=r"its SHA-256 is not the one in .*pipe/SHA256SUMS"):
        create_generator("dit_linear_digits", model_args=SMALL, checkpoint=str(weights))
    weights.write_bytes(content)
    create_generator("dit_linear_digits", model_args=SMALL, checkpoint=str(weights))
    whole = load_pipeline(folder / "pipe")[1]["weights_sha256"]
    assert whole == load_pipeline(folder / "b.ckpt")[1]["weights_sha256"]
    (folder / "pipe" / "notes.txt").touch()
    (folder / "pipe" / "SHA256SUMS").unlink()  # as in exports of earlier versions
    assert load_pipeline(folder / "pipe")[1]["weights_sha256"] == whole


def test_swapped_members_of_a_checkpoint_are_noticed(folder: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(folder / "a.ckpt") as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    sizes: dict[int, str] = {}
    for name, content in members.items():
        other = sizes.setdefault(len(content), name)
        if "/data/" in name and members[other] != content:
            break
    members[name], members[other] = members[other], members[name]
    with zipfile.ZipFile(tmp_path / "swapped.ckpt", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(InputError, match="is damaged or was edited: its tensors do not have the SHA-256"):
        read_checkpoint(tmp_path / "swapped.ckpt")


def test_an_archive_of_several_disks_is_refused(folder: Path, tmp_path: Path) -> None:
    content = bytearray((folder / "a.ckpt").read_bytes())
    content[content.rindex(b"PK\x06\x07") + 16] = 2  # number of disks, at which zipfile raises while it looks
    for name, read in (("a.ckpt", read_checkpoint), ("a.pth", read_weights)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match="is truncated or damaged"):
            read(tmp_path / name)


def test_a_changed_value_of_a_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    stored = torch.load(folder / "a.ckpt", weights_only=True)
    stored["global_step"] += 1
    torch.save(stored, tmp_path / "a.ckpt")
    with pytest.raises(InputError, match="its values do not have the SHA-256 in its entry 'values_sha256'"):
        opened(tmp_path / "a.ckpt")
