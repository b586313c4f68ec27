"""Which of torchrun's processes this one is."""

import os
from typing import NamedTuple

from headmix_vision.errors import InputError


class ProcessNumbers(NamedTuple):
    """The place of a process among those that share the work.

    Args:
        rank: Its number among all.
        world_size: Number of all processes.
        local_rank: Its number among those of its machine.
    """

    rank: int
    world_size: int
    local_rank: int


def process_numbers() -> ProcessNumbers:
    """Reads the numbers from the environment; without torchrun there is one process.

    Raises:
        InputError: If they are no numbers, or the rank is not below the number of processes.
    """
    found = []
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        text = os.environ.get(name, default)
        if not text.isdecimal():
            raise InputError(f"{name} in the environment must be a number, got {text!r}")
        found.append(int(text))
    numbers = ProcessNumbers(*found)
    if numbers.rank >= numbers.world_size:
        raise InputError(f"RANK in the environment is {numbers.rank}, but WORLD_SIZE is {numbers.world_size}")
    return numbers
