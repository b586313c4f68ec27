"""Sizes that stand for several in a graph: torch.compile and torch.export trace image sizes as symbols.

A comparison of a symbol is a guard of the graph: torch.compile traces again where it fails, an exported program is
refused there. So code that shall hold for all sizes asks here first.

This file can be imported without Triton.
"""

from __future__ import annotations

from typing import Any

import torch

from headmix_vision.errors import InputError

MOST_DOUBLINGS = 20


def is_symbolic(size: Any) -> bool:
    """Return whether a size stands for several in the graph that is being traced."""
    if not torch.compiler.is_compiling() and not isinstance(size, torch.SymInt):
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(size)


def is_symbolic_in_export(size: Any) -> bool:
    """Return whether a size stands for several in an exported program, which cannot be traced again for others.

    Not where Dynamo traces, for which ``is_exporting`` holds in torch.compile, too: a strict export has guards instead.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling() and is_symbolic(size)


def larger(size: int, other: int) -> int:
    """Return the larger of two sizes, without a comparison of symbols."""
    return torch.sym_max(size, other) if is_symbolic(size) or is_symbolic(other) else max(size, other)


def count_chunks(tokens: int, length: int) -> tuple[int, int]:
    """Return the number and the length of the chunks that hold all tokens.

    Fewer tokens than ``length`` are one chunk of their own length. An exported program has two chunks or more, all of
    ``length``: 1 would be a guard.
    """
    if is_symbolic_in_export(tokens):
        return (tokens + length - 1) // length + 1, length
    length = min(tokens, length)
    return -(-tokens // length), length


def doublings(size: int) -> int:
    """Return how many doublings of 1 reach the largest number that a size stands for, at most ``MOST_DOUBLINGS``.

    Raises:
        InputError: if they do not, or the size has no upper bound.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    for count in range(MOST_DOUBLINGS + 1):
        if statically_known_true(size <= 2**count):
            return count
    raise InputError(
        "an exported program with Head-in-Head needs a largest image size: give max to the torch.export.Dim of height"
        " and width, or export a program for each size. The batch needs no max."
    )
