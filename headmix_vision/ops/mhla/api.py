"""Public entry of the MHLA op: validation and choice of implementation."""

from __future__ import annotations

from torch import Tensor

from headmix_vision.ops.mhla.reference import mhla_reference
from headmix_vision.ops.mhla.torch_impl import mhla_torch
from headmix_vision.ops.mhla.validation import validate_mhla
from headmix_vision.ops.token_blocks import TokenBlocks

# A further implementation is one entry here; "auto" chooses in `_select`.
IMPLEMENTATIONS = {"reference": mhla_reference, "torch": mhla_torch}


def _select(impl: str) -> str:
    return "torch" if impl == "auto" else impl


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
        impl: ``"auto"``, ``"torch"`` (linear in N, any device) or ``"reference"`` (the N x N form, a specification).

    Returns:
        [B, N, H, Dv] of ``v``'s type, in raster order.

    Raises:
        ValueError: naming the argument, if shapes, types, devices or options do not fit.
    """
    validate_mhla(q, k, v, mixing, blocks, normalizer, feature_map, impl, ("auto", *IMPLEMENTATIONS))
    return IMPLEMENTATIONS[_select(impl)](q, k, v, mixing, blocks, normalizer, feature_map, eps)
