"""Public entry of the MHLA op: validation and choice of implementation."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.ops.mhla.reference import mhla_reference
from headmix_vision.ops.mhla.torch_impl import mhla_torch
from headmix_vision.ops.mhla.validation import validate_mhla
from headmix_vision.ops.selection import NO_KERNELS
from headmix_vision.ops.token_blocks import TokenBlocks

IMPLEMENTATIONS = {"reference": mhla_reference, "torch": mhla_torch}
TRITON_IMPLS = ("triton", "triton_pairwise", "triton_summary")

if NO_KERNELS is None:
    from headmix_vision.ops.mhla.triton_impl import mhla_triton
    from headmix_vision.ops.triton_inputs import why_not_triton

    IMPLEMENTATIONS |= {
        "triton": mhla_triton,
        "triton_pairwise": partial(mhla_triton, regime="pairwise"),
        "triton_summary": partial(mhla_triton, regime="summary"),
    }
else:

    def why_not_triton(q: Tensor, v: Tensor) -> str | None:
        return NO_KERNELS


def _select(impl: str, q: Tensor, v: Tensor) -> str:
    """The implementation to run: "auto" takes the Triton kernels on CUDA wherever they can run."""
    if impl == "auto":
        return "triton" if q.is_cuda and why_not_triton(q, v) is None else "torch"
    if impl in TRITON_IMPLS and (reason := why_not_triton(q, v)):
        raise InputError(f"{reason}; impl={impl!r} was asked for.")
    return impl


def mhla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    blocks: TokenBlocks,
    *,
    normalizer: str | None = "paper",
    feature_map: str = "relu",
    eps: float = 1e-6,
    impl: str = "auto",
) -> Tensor:
    r"""Multi-head linear attention: linear attention whose block memories are mixed by a learned matrix.

    With feature-mapped queries and keys, for a query in block ``i`` (equations 4 and 5 of arXiv 2601.07832)::

        o = sum_t m[i, b(t)] (q . k_t) v_t / sum_t m[i, b(t)] (q . k_t)

    Sums run in float32 (float64 for float64 inputs) whatever the input type, also under autocast.

    Args:
        q: [B, N, H, D], queries in raster order, prefix tokens first; any floating type, any strides.
        k: [B, N, H, D], keys, as ``q``.
        v: [B, N, H, Dv], values, as ``q``.
        mixing: [M, M], shared by the heads, or [H, M, M]; row: query block, column: key block; non-negative for the
            positive feature maps. Floating type.
        blocks: partition of the N tokens into M blocks.
        normalizer: ``"paper"`` divides by the denominator above. ``"source_block"`` divides by the denominator of the
            released code, ``sum_b m[i, b] (q_b . z_b) + eps``, where ``q_b`` is the query at the same place of block
            ``b`` (a block without that place adds nothing) and ``z_b`` the sum of its keys. ``None`` does not divide.
        feature_map: ``"relu"``: relu(x) + eps, ``"elu1"``: elu(x) + 1 + eps, ``"identity"``: x.
        eps: see ``feature_map`` and ``normalizer``.
        impl: ``"auto"``: Triton on CUDA where the kernels can run, else torch. ``"triton"``: kernels for bfloat16,
            float16 and float32 and head dims up to 128, whose cost model picks an algorithm; ``"triton_pairwise"`` and
            ``"triton_summary"`` are the two; differentiable once. ``"torch"``: linear in N, any device.
            ``"reference"``: the N x N form, a specification.

    Returns:
        [B, N, H, Dv] of ``v``'s type, in raster order.

    Raises:
        InputError: naming the argument, if shapes, types, devices or options do not fit, or ``impl`` cannot run them.
    """
    impls = ("auto", *dict.fromkeys((*IMPLEMENTATIONS, *TRITON_IMPLS)))
    validate_mhla(q, k, v, mixing, blocks, normalizer, feature_map, impl, impls)
    return IMPLEMENTATIONS[_select(impl, q, v)](q, k, v, mixing, blocks, normalizer, feature_map, eps)
