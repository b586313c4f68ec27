"""Limits of memory for networks whose sizes come from a file or an option."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headmix_vision.errors import InputError, is_whole
from headmix_vision.files.reading import check_memory, memory_left

MAX_DEPTH = 1000
MAX_TENSORS = 30_000
_WEIGHT_BYTES = 4


@contextmanager
def building(what: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Refuse a network that exceeds the memory: at once where its arguments tell, otherwise while it is built.

    Args:
        what: Its name, for messages.
        arguments: Arguments of its constructor, as far as they are known.

    Raises:
        InputError: It is deeper than `MAX_DEPTH`, has more than `MAX_TENSORS` tensors, or has more weights than memory
            is left for.
    """
    depth = arguments.get("depth")
    if is_whole(depth) and depth > MAX_DEPTH:
        raise InputError(f"the depth of {what} is {depth}, it must be at most {MAX_DEPTH}")
    check_memory(_WEIGHT_BYTES * _least_weights(arguments), f"{what} with {_sizes(arguments)}")
    with _Counting(what):
        yield


def _least_weights(arguments: Mapping[str, Any]) -> int:
    """Count weights that a transformer of these arguments has at least: of MLPs, positions, patches and classes."""
    width, depth, classes = (_product(arguments.get(name, 1)) for name in ("embed_dim", "depth", "num_classes"))
    ratio = arguments.get("mlp_ratio", 4)
    hidden = ratio * width if isinstance(ratio, int | float) and 0 < ratio < math.inf else width
    return int(width * (2 * hidden * depth + classes)) if "embed_dim" in arguments else 0


def _product(value: Any) -> int:
    values = value if isinstance(value, list | tuple) else [value]
    return math.prod(number for number in values if is_whole(number) and number > 0)


def _sizes(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in arguments.items() if is_whole(value))


class _Counting(TorchDispatchMode):
    """Count of the tensors that are made by their shape, before they are made.

    Args:
        what: The network that they belong to.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.left_bytes = what, memory_left()
        self.tensors = self.size_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shape = args[0] if args and isinstance(args[0], list | tuple) else ()
        if shape and all(map(is_whole, shape)) and str(kwargs.get("device") or "cpu") == "cpu":
            self.tensors += 1
            self.size_bytes += math.prod(shape) * (kwargs.get("dtype") or torch.get_default_dtype()).itemsize
            if self.tensors > MAX_TENSORS:
                raise InputError(f"{self.what} has more than {MAX_TENSORS} tensors")
            if self.size_bytes > self.left_bytes:
                raise InputError(
                    f"{self.what} needs more than {self.left_bytes / 1e9:.3g} GB of memory, which is all that is left"
                )
        return func(*args, **kwargs)
