"""Pairs of torch and Triton: the form of MHLA that serves up to 256 tokens on Hopper, and how that is known."""

from typing import NamedTuple


class Pair(NamedTuple):
    """A release of torch with the Triton that it brings.

    Attributes:
        hopper: the form of MHLA for short sequences on Hopper; all other kernels run with every pair but the first.
        known: how the kernels were checked.
    """

    torch: str
    triton: str
    hopper: str
    known: str


PAIRS = (
    Pair("2.9", "3.5", "PyTorch form; portable kernels with `TRITON_PTXAS_PATH`", "compiled"),
    Pair("2.10", "3.6", "Gluon kernels", "compiled"),
    Pair("2.11", "3.6", "Gluon kernels", "run on H100 and H200"),
    Pair("2.12, 2.13", "3.7", "Gluon kernels", "compiled"),
    Pair("2.14", "3.8", "Gluon kernels", "compiled"),
    Pair("2.15", "3.9", "Gluon kernels", "run on H100 beside torch 2.11"),
)
