"""Random cases of every op: draw one by its number, and check outputs and gradients against float64.

case = draw("mhla pairwise", seed=7, dtype=torch.float32)
wrong = [error for error in check(case, torch.device("cuda")) if error.bad]
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headmix_vision.doctor.drawing import HEAD_DIMS, Numbers, Options, Problem
from headmix_vision.doctor.families import (
    draw_grid_conv,
    draw_head_in_head,
    draw_mhla,
    draw_mix_heads,
    pose_grid_conv,
    pose_head_in_head,
    pose_mhla,
    pose_mix_heads,
)
from headmix_vision.doctor.judging import LIMITS, Error, judge
from headmix_vision.errors import InputError, check_choice

_FAMILIES: dict[str, tuple[Callable[..., Options], Callable[..., Problem]]] = {
    "mhla pairwise": (partial(draw_mhla, causal=False, regimes=("pairwise",)), pose_mhla),
    "mhla summary": (partial(draw_mhla, causal=False, regimes=("summary",)), pose_mhla),
    "mhla causal": (partial(draw_mhla, causal=True, regimes=("pairwise", "summary")), pose_mhla),
    "head_in_head": (draw_head_in_head, pose_head_in_head),
    "grid_conv": (draw_grid_conv, pose_grid_conv),
    "mix_heads": (draw_mix_heads, pose_mix_heads),
}
FAMILIES = tuple(_FAMILIES)
DTYPES = tuple(LIMITS)
# So many cases one after the other share what a kernel is compiled for (type, head dims, options): that takes most of
# the time of a case. They differ in sizes, numbers and the memory layout of gradients.
CASES_OF_A_KERNEL = 8
# Families of each 13 kernels; 13 is prime, so that each of several processes, which take turns, gets all of them.
_MIXTURE = (*FAMILIES[:4], *FAMILIES, "mhla pairwise", "mhla causal", "mhla pairwise")


@dataclass(frozen=True)
class Case:
    """A call of an op, without its numbers.

    Attributes:
        family: op and form, one of `FAMILIES`.
        seed: number of the case, and seed of its tensors.
        dtype: type of the inputs.
        options: shapes, settings and memory layouts by name.
        small: whether sizes are small, see `draw`.
    """

    family: str
    seed: int
    dtype: torch.dtype
    options: Mapping[str, Any]
    small: bool = False

    @property
    def line(self) -> str:
        """The name from which `read` draws the case again."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.family}:{dtype}:{self.seed}{':small' * self.small}"

    def __str__(self) -> str:
        settings = (f"{name}={value}".replace(" ", "") for name, value in self.options.items())
        return f"{self.line} {' '.join(settings)}"


def draw(family: str, seed: int, dtype: torch.dtype | None = None, *, small: bool = False) -> Case:
    """Draw a case; equal arguments draw equal cases.

    Every `CASES_OF_A_KERNEL` seeds come the next type, if none is given, and in turn the next range of head dims.

    Args:
        family: one of `FAMILIES`.
        seed: number of the case, at least 0.
        dtype: type of the inputs: bfloat16, float16 or float32.
        small: draw at most 300 tokens and few heads, for checks within seconds.

    Raises:
        InputError: for an unknown family or type.
    """
    check_choice("family", family, FAMILIES)
    number = seed // CASES_OF_A_KERNEL
    dtype = dtype or DTYPES[number % len(DTYPES)]
    check_choice("dtype", dtype, DTYPES)
    rng, kernel = random.Random(f"{family} {seed} {small}"), random.Random(f"{family} kernel {number} {small}")
    options = _FAMILIES[family][0](rng, kernel, number // len(DTYPES) % len(HEAD_DIMS), small)
    return Case(family, seed, dtype, options, small)


def numbered(index: int, dtype: torch.dtype | None = None, *, small: bool = False) -> Case:
    """Draw a case of a mixture of all families, which covers each type with each range of head dims."""
    return draw(_MIXTURE[index // CASES_OF_A_KERNEL % len(_MIXTURE)], index, dtype, small=small)


def read(line: str) -> Case:
    """Draw the case that `Case.line` names, as "mhla pairwise:float32:1234".

    Raises:
        InputError: if the line names no case.
    """
    family, dtype, seed, *small = [*line.split(":"), "", ""][: max(3, line.count(":") + 1)]
    types = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    if dtype not in types or not seed.isdecimal() or small not in ([], ["small"]):
        raise InputError(
            f"a case is FAMILY:TYPE:NUMBER or FAMILY:TYPE:NUMBER:small with a type of {', '.join(types)}, got {line!r}."
        )
    return draw(family, int(seed), types[dtype], small=bool(small))


def check(case: Case, device: torch.device, impl: str = "triton") -> list[Error]:
    """Compute a case by its op and in float64, and judge outputs and gradients.

    Args:
        case: the case.
        device: where both are computed.
        impl: implementation of the op; ``"triton"`` takes the form of the family.

    Raises:
        InputError: if the implementation cannot run the case on the device.
    """
    problem = _FAMILIES[case.family][1](case.options, Numbers(case.seed, case.dtype, device))
    inputs = list(problem.inputs.values())
    with torch.backends.cudnn.flags(
        enabled=True, allow_tf32=False
    ):  # the PyTorch implementation of a convolution may run
        found = _results(lambda leaves: problem.run(leaves, impl), inputs, problem.gradients)
    names = [*problem.outputs, *(f"d{name}" for name in problem.inputs)]
    expected = partial(_results, problem.expect, [x.double() for x in inputs], problem.gradients)
    return judge(names, found, expected, case.dtype, device)


def _results(
    function: Callable[[Sequence[Tensor]], Sequence[Tensor]], inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> list[Tensor]:
    """Compute the outputs of a function and the gradients of its inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outs = function(leaves)
    d_outs = [d.to(out.dtype) for d, out in zip(gradients, outs, strict=True)]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, d_outs)]
