"""The public entry of the MHLA op: it validates the arguments and chooses the implementation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from headmix_vision.ops.dispatch import select, why_not_triton
from headmix_vision.ops.mhla.reference import mhla_reference
from headmix_vision.ops.mhla.settings import REGIMES, Settings
from headmix_vision.ops.mhla.torch_impl import mhla_torch
from headmix_vision.ops.mhla.validation import validate_mhla
from headmix_vision.ops.runtime import NO_KERNELS, is_amd
from headmix_vision.ops.token_blocks import TokenBlocks

IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {"reference": mhla_reference, "torch": mhla_torch}
if NO_KERNELS is None:
    from headmix_vision.ops.mhla.triton_impl import mhla_triton

    IMPLEMENTATIONS["triton"] = mhla_triton
    IMPLEMENTATIONS["auto"] = partial(mhla_triton, fallback=True)
    IMPLEMENTATIONS |= {f"triton_{regime}": partial(mhla_triton, regime=regime) for regime in REGIMES}


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
    causal: bool = False,
    impl: str = "auto",
) -> Tensor:
    r"""Compute multi-head linear attention: linear attention whose block memories are mixed by a learned matrix.

    With feature-mapped queries and keys, for a query in block ``i`` (equations 4 and 5 of arXiv 2601.07832)::

        o = sum_t m[i, b(t)] (q . k_t) v_t / sum_t m[i, b(t)] (q . k_t)

    Sums run in float32 (float64 for float64 inputs) whatever the input type, also under autocast.

    Args:
        q: [B, N, H, D], queries in raster order, prefix tokens first; any floating type, any strides.
        k: [B, N, H, D], keys, as ``q``.
        v: [B, N, H, Dv], values, as ``q``.
        mixing: [M, M], shared by the heads, or [H, M, M]; row: query block, column: key block; non-negative for the
            positive feature maps. Floating type.
        blocks: partition of the N tokens into M blocks. Where ranks share the tokens (``blocks.of_rank``), q, k and v
            are those of this rank and N counts them; the mixing is of all blocks, and every rank gets its gradient
            divided by the number of ranks.
        normalizer: ``"paper"`` divides by the denominator above. ``"source_block"`` divides by the denominator of the
            released code, ``sum_b m[i, b] (q_b . z_b) + eps``, where ``q_b`` is the query at the same place of block
            ``b`` (a block without that place adds nothing) and ``z_b`` the sum of its keys. ``None`` does not divide.
        feature_map: ``"relu"``: relu(x) + eps, ``"elu1"``: elu(x) + 1 + eps, ``"identity"``: x.
        eps: see ``feature_map`` and ``normalizer``.
        causal: count only tokens up to and with the query itself, in the order of :meth:`TokenBlocks.order` (Appendix
            C): all blocks before, and of the query's own block the tokens before. So do the sums of the normalizers:
            ``z_b`` of the query's own block ends with the query. Prefix tokens, the first block, see prefix tokens up
            to themselves. Weights ``m[i, b]`` with ``b > i`` are not read and get no gradient.
        impl: ``"auto"``: Triton on CUDA where the kernels can run, else torch. ``"triton"``: kernels for bfloat16,
            float16 and float32 and head dims up to 128, differentiable once; a cost model picks one of two algorithms,
            ``"triton_pairwise"`` and ``"triton_summary"`` name it. ``"torch"``: linear in N, any device.
            ``"reference"``: the N x N form, a specification.

    Returns:
        [B, N, H, Dv] of ``v``'s type, in raster order.

    Raises:
        InputError: naming the argument, if shapes, types, devices or options do not fit, or ``impl`` cannot run them.
    """
    settings = Settings(blocks, normalizer, feature_map, eps, causal=causal)
    validate_mhla(q, k, v, mixing, settings, impl)
    run = select(impl, IMPLEMENTATIONS, q.is_cuda, lambda: why_not_triton(q, v) or _why_not_causal(q, v, causal))
    return run(q, k, v, mixing, settings)


def _why_not_causal(q: Tensor, v: Tensor, causal: bool) -> str | None:
    if causal and q.dtype == torch.float32 and max(q.shape[-1], v.shape[-1]) > 64 and is_amd(q.device):
        return "q is float32 of more than 64 head dims on an AMD GPU: causal kernels need 80 KB of shared memory there"
    return None
