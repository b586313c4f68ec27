"""The public entry of the MHLA op: it validates the arguments and chooses the implementation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from headmix_vision.errors import InputError, check_choice, check_flags, check_numbers
from headmix_vision.ops.dispatch import Bound, check_features, check_tensors, check_types, kept, select, why_not_triton
from headmix_vision.ops.hardware import NO_KERNELS, is_amd
from headmix_vision.ops.mhla.reference import mhla_reference
from headmix_vision.ops.mhla.torch_impl import FEATURE_MAPS, NORMALIZERS, REGIMES, Settings, mhla_torch
from headmix_vision.ops.token_blocks import BlocksOfRank, TokenBlocks

IMPL_NAMES = ("auto", "reference", "torch", "triton", *(f"triton_{regime}" for regime in REGIMES))


def check_options(normalizer: str | None, feature_map: str, impl: str) -> None:
    """Raise InputError, naming the option, for a name that ``mhla`` does not know."""
    check_choice("normalizer", normalizer, NORMALIZERS)
    check_choice("feature_map", feature_map, tuple(FEATURE_MAPS))
    check_choice("impl", impl, IMPL_NAMES)


def validate_mhla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    settings: Settings,
    impl: str,
    taken: int | None = None,
) -> None:
    """Raise InputError, naming the argument, unless ``mhla`` can run on these arguments.

    With ``taken`` q, k and v are some of the tokens after so many.
    """
    check_options(settings.normalizer, settings.feature_map, impl)
    check_numbers(0, eps=settings.eps)
    check_flags(causal=settings.causal)
    check_tensors(q=q, k=k, v=v, mixing=mixing)
    if not isinstance(settings.blocks, TokenBlocks):
        raise InputError(f"blocks must be a TokenBlocks, got {settings.blocks!r}.")
    check_features(q, k, v, "D")
    blocks = settings.blocks
    if taken is not None:
        left = blocks.num_tokens - taken
        if not 1 <= q.shape[1] <= left:
            raise InputError(f"q has {q.shape[1]} tokens, but of {blocks.grid} {left} are left: give 1 to {left}.")
    elif q.shape[1] != blocks.num_tokens:
        raise InputError(f"q has {q.shape[1]} tokens, but blocks divide {blocks.grid}: {blocks.num_tokens} tokens.")
    m = blocks.num_blocks
    if isinstance(blocks, BlocksOfRank):
        m = blocks.whole.num_blocks
        if settings.causal:
            raise InputError("causal attention needs all tokens on one rank.")
        if settings.normalizer == "source_block":
            raise InputError(
                "normalizer 'source_block' needs queries of all blocks: ranks that share tokens take others."
            )
        if impl in ("reference", "triton_pairwise"):
            raise InputError(
                f"impl={impl!r} needs all tokens: ranks that share them take 'auto', 'torch' and 'triton'."
            )
    if tuple(mixing.shape) not in ((m, m), (q.shape[2], m, m)):
        raise InputError(
            f"mixing must be [M, M] or [H, M, M] with M = {m} blocks and H = {q.shape[2]} heads, "
            f"got shape {tuple(mixing.shape)}."
        )

    check_types({"q": q, "k": k, "v": v}, {"mixing": mixing})


Run = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # takes q, k, v and the mixing


def plan_reference(q: Tensor, v: Tensor, settings: Settings) -> Run:
    """Return the call of the reference for all tensors of the kinds of ``q`` and ``v``."""
    return partial(mhla_reference, settings=settings)


def plan_torch(q: Tensor, v: Tensor, settings: Settings) -> Run:
    """Return the PyTorch implementation with its tables; a CUDA graph has to find and hold these in each call."""
    return partial(mhla_torch, settings=settings, tables=None if q.is_cuda else settings.blocks.tables(q))


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Settings], Run]] = {
    "reference": plan_reference,
    "torch": plan_torch,
}
if NO_KERNELS is None:
    from headmix_vision.ops.mhla.triton_op import plan_triton

    IMPLEMENTATIONS["triton"] = plan_triton
    IMPLEMENTATIONS["auto"] = partial(plan_triton, fallback=True)
    IMPLEMENTATIONS |= {f"triton_{regime}": partial(plan_triton, regime=regime) for regime in REGIMES}


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

    >>> blocks = TokenBlocks.from_grid((14, 14), (4, 4))
    >>> q, k, v = torch.rand(3, 2, 196, 6, 64)
    >>> mhla(q, k, v, torch.eye(blocks.num_blocks), blocks).shape
    torch.Size([2, 196, 6, 64])

    Args:
        q: [B, N, H, D], queries in raster order, prefix tokens first; any floating type, any strides.
        k: [B, N, H, D], keys, as ``q``.
        v: [B, N, H, Dv], values, as ``q``.
        mixing: [M, M], shared by the heads, or [H, M, M]; row: query block, column: key block; non-negative for the
            positive feature maps. Floating type.
        blocks: partition of the N tokens into M blocks. Under context parallelism (``blocks.of_rank``) q, k and v
            hold this rank's N tokens, the mixing covers all blocks, and each rank gets its gradient divided by the
            number of ranks.
        normalizer: ``"paper"`` divides by the denominator above. ``"source_block"`` divides by the denominator of the
            released code, ``sum_b m[i, b] (q_b . z_b) + eps``, where ``q_b`` is the query at the same position in
            block ``b`` (a block without it adds nothing) and ``z_b`` the sum of its keys. ``None`` does not divide.
        feature_map: ``"relu"``: relu(x) + eps, ``"elu1"``: elu(x) + 1 + eps, ``"identity"``: x. To leave
            padding out, apply the map before, set keys and values of padding to zero, and give ``"identity"``: the
            ``eps`` of the other maps would add padding again.
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
    call = bind_mhla(blocks, normalizer=normalizer, feature_map=feature_map, eps=eps, causal=causal, impl=impl)
    out: Tensor = call(q, k, v, mixing)
    return out


@kept
def bind_mhla(
    blocks: TokenBlocks, *, normalizer: str | None, feature_map: str, eps: float, impl: str, causal: bool = False
) -> Bound:
    """Fix all arguments of :func:`mhla` but its tensors, which the returned call takes."""
    settings = Settings(blocks, normalizer, feature_map, eps, causal=causal)

    def plan(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor) -> Run:
        validate_mhla(q, k, v, mixing, settings, impl)
        name = select(impl, q.is_cuda, lambda: why_not_triton(q, v) or _why_not_causal(q, v, causal))
        return IMPLEMENTATIONS[name](q, v, settings)

    return Bound(plan)


def _why_not_causal(q: Tensor, v: Tensor, causal: bool) -> str | None:
    if causal and q.dtype == torch.float32 and max(q.shape[-1], v.shape[-1]) > 64 and is_amd(q.device):
        return "q is float32 of more than 64 head dims on an AMD GPU: causal kernels need 80 KB of shared memory there"
    return None
