"""Checks the arguments of the MHLA op, in the same way for every implementation."""

from __future__ import annotations

from torch import Tensor

from headmix_vision.checks import check_flags, check_numbers
from headmix_vision.errors import InputError
from headmix_vision.ops.dispatch import check_tensors, check_types
from headmix_vision.ops.mhla.settings import FEATURE_MAPS, NORMALIZERS, REGIMES, Settings
from headmix_vision.ops.token_blocks import BlocksOfRank, TokenBlocks

IMPL_NAMES = ("auto", "reference", "torch", "triton", *(f"triton_{regime}" for regime in REGIMES))


def check_options(normalizer: str | None, feature_map: str, impl: str) -> None:
    """Raise InputError, naming the option, for a name that ``mhla`` does not know."""
    for name, value, allowed in (
        ("normalizer", normalizer, NORMALIZERS),
        ("feature_map", feature_map, tuple(FEATURE_MAPS)),
        ("impl", impl, IMPL_NAMES),
    ):
        if value not in allowed:
            raise InputError(f"{name} must be one of {allowed}, got {value!r}.")


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
    if q.ndim != 4:
        raise InputError(f"q must be [B, N, H, D], got shape {tuple(q.shape)}.")
    if k.shape != q.shape:
        raise InputError(f"k must have the shape of q, {tuple(q.shape)}, got {tuple(k.shape)}.")
    if v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise InputError(f"v must be [B, N, H, Dv] with q's {tuple(q.shape[:3])}, got shape {tuple(v.shape)}.")
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] < 1:
            raise InputError(f"{name} must have a head dim of at least 1, got shape {tuple(x.shape)}.")
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
