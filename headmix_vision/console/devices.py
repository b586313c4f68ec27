"""The device that a user asks for."""

import torch

from headmix_vision.errors import InputError
from headmix_vision.files.reading import memory_left


def default_device() -> str:
    """Name the device that is taken when none is asked for: a GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def open_device(name: str, local_rank: int = 0) -> torch.device:
    """Check that a device is there and computes.

    Args:
        name: As torch writes it: `cpu`, `cuda:1`; `cuda` is the GPU of the process.
        local_rank: The number of the process on its machine; processes beyond the GPUs share them.

    Raises:
        InputError: If torch does not know the device, or cannot use it on this machine.
    """
    if name == "cuda" and torch.cuda.is_available():
        name = f"cuda:{local_rank % torch.cuda.device_count()}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    # each backend has its own way to say that it is missing; `meta` computes nothing
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"device {name!r} cannot be used here: {reason}") from None
    return device


def available_memory(device: torch.device) -> int:
    """Return the memory of a device, in bytes, that can still be taken; see `memory_left` for all but GPUs."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # kept by torch for later
        return torch.cuda.mem_get_info(device)[0] + unused
    return memory_left()
