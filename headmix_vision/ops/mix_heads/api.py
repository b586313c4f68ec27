"""The public entry of the head mixing op: it validates the arguments and chooses the implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from headmix_vision.ops.dispatch import select, why_not_triton
from headmix_vision.ops.mix_heads.reference import mix_heads_reference
from headmix_vision.ops.mix_heads.torch_impl import mix_heads_torch
from headmix_vision.ops.mix_heads.validation import validate_mix_heads
from headmix_vision.ops.runtime import NO_KERNELS

IMPLEMENTATIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "reference": mix_heads_reference,
    "torch": mix_heads_torch,
}
if NO_KERNELS is None:
    from headmix_vision.ops.mix_heads.triton_impl import mix_heads_triton

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
    validate_mix_heads(inputs, weights, impl)
    run = select(impl, IMPLEMENTATIONS, inputs[0].is_cuda, lambda: _why_not_triton(inputs[0]))
    return run(tuple(inputs), weights)


def _why_not_triton(x: Tensor) -> str | None:
    return why_not_triton(x, x, ("inputs[0]", "inputs[0]"))
