"""The device that a user asks for."""

import torch

from headmix_vision.errors import InputError


def open_device(name: str) -> torch.device:
    """Checks that a device is there and computes.

    Args:
        name: As torch writes it: `cpu`, `cuda`, `cuda:1`.

    Raises:
        InputError: If torch does not know the device, or cannot use it on this machine.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    # each backend has its own way to say that it is missing; `meta` computes nothing
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"device {name!r} cannot be used here: {reason}") from None
    return device
