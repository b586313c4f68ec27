"""SHA-256 of files and weights, for the record of what a result was made with."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from headmix_vision.files.limits import check_file


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    check_file(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def state_sha256(state: dict[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values of a state dict, whatever file it came from."""
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
