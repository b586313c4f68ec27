"""The public entry of the head mixing op: it validates the arguments and chooses the implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from headmix_vision.errors import InputError, check_choice
from headmix_vision.ops.dispatch import Bound, check_tensors, check_types, kept, select, why_not_triton
from headmix_vision.ops.hardware import NO_KERNELS
from headmix_vision.ops.mix_heads.reference import mix_heads_reference
from headmix_vision.ops.mix_heads.torch_impl import mix_heads_torch

IMPL_NAMES = ("auto", "reference", "torch", "triton")


def validate_mix_heads(inputs: Sequence[Tensor], weights: Tensor, impl: str) -> None:
    """Raise InputError, naming the argument, unless ``mix_heads`` can run on these arguments."""
    check_choice("impl", impl, IMPL_NAMES)
    named = {f"inputs[{c}]": x for c, x in enumerate(inputs)}
    check_tensors(**named, weights=weights)
    first = inputs[0]
    if first.ndim != 4 or first.shape[2] < 1 or first.shape[3] < 1:
        raise InputError(
            f"inputs[0] must be [B, N, H, D] with at least one head and a head dim of at least 1, "
            f"got shape {tuple(first.shape)}."
        )
    for name, x in named.items():
        if x.shape != first.shape:
            raise InputError(f"{name} must have the shape of inputs[0], {tuple(first.shape)}, got {tuple(x.shape)}.")
    C, H = len(inputs), first.shape[2]
    if weights.ndim != 3 or weights.shape[0] != C or weights.shape[1] < 1 or weights.shape[2] != H:
        raise InputError(
            f"weights must be [C, G, H] with C = {C} inputs and H = {H} heads, got shape {tuple(weights.shape)}."
        )

    check_types(named, {"weights": weights})


IMPLEMENTATIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "reference": mix_heads_reference,
    "torch": mix_heads_torch,
}
if NO_KERNELS is None:
    from headmix_vision.ops.mix_heads.triton_op import mix_heads_triton

    IMPLEMENTATIONS |= {"triton": mix_heads_triton, "auto": partial(mix_heads_triton, fallback=True)}


def mix_heads(inputs: Sequence[Tensor], weights: Tensor, *, impl: str = "auto") -> tuple[Tensor, ...]:
    r"""Mix the heads of C tensors, each with weights of its own::

        out_c[b, n, g] = sum_h weights[c, g, h] inputs_c[b, n, h]

    This makes the pseudo-heads of interleaved head attention (C = 3: queries, keys and values; arXiv 2602.21371), and
    collapses them (C = 1); it composes the keys and values of multi-head explicit attention (C = 2; arXiv 2601.19611).
    Sums run in float32 (float64 for float64 inputs) whatever the input type, also under autocast.

    Args:
        inputs: C tensors [B, N, H, D] of one shape; any floating type, any strides.
        weights: [C, G, H]; floating type, not necessarily that of the inputs.
        impl: ``"auto"``: Triton on CUDA where the kernels can run, else torch. ``"triton"``: one kernel for all C
            tensors and one for all gradients, for bfloat16, float16 and float32 and head dims up to 128, differentiable
            once. ``"torch"``: batched products, any device. ``"reference"``: a specification.

    Returns:
        C contiguous tensors [B, N, G, D] of the inputs' type.

    Raises:
        InputError: naming the argument, if shapes, types or devices do not fit, or ``impl`` cannot run them.
    """
    if not isinstance(inputs, (tuple, list)) or len(inputs) == 0:
        given = "none" if isinstance(inputs, (tuple, list)) else type(inputs).__name__
        raise InputError(f"inputs must be a tuple of at least one tensor, got {given}.")
    mixed: tuple[Tensor, ...] = bind_mix_heads(impl)(*inputs, weights)
    return mixed


@kept
def bind_mix_heads(impl: str) -> Bound:
    """Fix the implementation of :func:`mix_heads`; the returned call takes the inputs, one by one, and the weights."""

    def plan(*tensors: Tensor) -> Callable[..., tuple[Tensor, ...]]:
        *inputs, weights = tensors
        validate_mix_heads(inputs, weights, impl)
        x, names = inputs[0], ("inputs[0]", "inputs[0]")
        return IMPLEMENTATIONS[select(impl, x.is_cuda, lambda: why_not_triton(x, x, names))]

    return Bound(plan)
