"""Seed random numbers by (seed, epoch, sample), never by the process or the order in which they are drawn."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_WORD = 0xFFFFFFFF


def derive_seed(seed: int, *indices: int) -> int:
    """Mix a base seed and any number of indices into one well spread seed.

    A pure function, equal on every platform and in every process. The number of indices counts:
    `derive_seed(0, 1)` and `derive_seed(0, 1, 0)` differ (they would not with NumPy's `SeedSequence`).

    Args:
        seed: Base seed, any integer.
        *indices: What the random numbers belong to, for example epoch and sample index.

    Returns:
        An integer in [0, 2**63).
    """
    message = ",".join(str(int(value)) for value in (seed, *indices)).encode()
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int) -> None:
    """Seed `random`, NumPy's legacy global generator and torch's CPU generator (timm's transforms use all three).

    Device generators are left alone, which also makes this safe in forked data loader workers.

    Args:
        seed: An integer in [0, 2**63), for example from `derive_seed`.
    """
    random.seed(seed)
    np.random.seed([seed & _WORD, seed >> 32])
    torch.default_generator.manual_seed(seed)


@contextmanager
def restored_generators() -> Iterator[None]:
    """Put the states of the generators that `seed_generators` seeds back after a `with` block.

    This takes several times as long as seeding them, so a block should hold a whole batch.
    """
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators inside a `with` block and put their previous states back afterwards.

    Args:
        seed: See `seed_generators`.
    """
    with restored_generators():
        seed_generators(seed)
        yield
