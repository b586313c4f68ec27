"""Checks the arguments of the Head-in-Head ops, in the same way for every implementation.

B batch, N tokens, H heads, Dk and Dv head dims, r sub-heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from headmix_vision.errors import InputError
from headmix_vision.ops.dispatch import check_tensors, check_types, is_plain
from headmix_vision.ops.token_scan import TokenScan

IMPL_NAMES = ("auto", "reference", "torch", "triton")
RWKV7_IMPL_NAMES = IMPL_NAMES[:3]


def validate_head_in_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    mask: Tensor,
    initial_state: Tensor | None,
    scan: TokenScan | Tensor | None,
    impl: str,
) -> None:
    """Raise InputError, naming the argument, unless ``head_in_head`` can run on these arguments."""
    check_impl(impl)
    check_tensors(q=q, k=k, v=v, beta=beta, log_decay=log_decay, mask=mask)
    _check_features(q, k, v)
    for name, x in (("beta", beta), ("log_decay", log_decay)):
        if x.shape != q.shape[:3]:
            raise InputError(f"{name} must be [B, N, H] = {tuple(q.shape[:3])}, got shape {tuple(x.shape)}.")
    check_types({"q": q, "k": k, "v": v}, {"beta": beta, "log_decay": log_decay})
    _check_common(q, v, log_decay, mask, initial_state, scan)


def validate_head_in_head_rwkv7(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    mask: Tensor,
    initial_state: Tensor | None,
    scan: TokenScan | Tensor | None,
    impl: str,
) -> None:
    """Raise InputError, naming the argument, unless ``head_in_head_rwkv7`` can run on these arguments."""
    check_impl(impl, RWKV7_IMPL_NAMES)
    check_tensors(q=q, k=k, v=v, a=a, b=b, log_decay=log_decay, mask=mask)
    _check_features(q, k, v)
    for name, x in (("a", a), ("b", b), ("log_decay", log_decay)):
        if x.shape != q.shape:
            raise InputError(f"{name} must have the shape of q, {tuple(q.shape)}, got {tuple(x.shape)}.")
    check_types({"q": q, "k": k, "v": v, "a": a, "b": b}, {"log_decay": log_decay})
    _check_common(q, v, log_decay, mask, initial_state, scan)


def check_impl(impl: str, names: tuple[str, ...] = IMPL_NAMES) -> None:
    """Raise InputError for the name of an implementation that the op does not have."""
    if impl not in names:
        raise InputError(f"impl must be one of {names}, got {impl!r}.")


def _check_features(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.ndim != 4:
        raise InputError(f"q must be [B, N, H, Dk], got shape {tuple(q.shape)}.")
    if k.shape != q.shape:
        raise InputError(f"k must have the shape of q, {tuple(q.shape)}, got {tuple(k.shape)}.")
    if v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise InputError(f"v must be [B, N, H, Dv] with q's {tuple(q.shape[:3])}, got shape {tuple(v.shape)}.")
    if q.shape[1] < 1:
        raise InputError(f"q must have at least one token, got shape {tuple(q.shape)}.")
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] < 1:
            raise InputError(f"{name} must have a head dim of at least 1, got shape {tuple(x.shape)}.")


def _check_common(
    q: Tensor,
    v: Tensor,
    log_decay: Tensor,
    mask: Tensor,
    initial_state: Tensor | None,
    scan: TokenScan | Tensor | None,
) -> None:
    _check_mask(mask, q)
    check_types({"q": q}, {"mask": mask})
    if initial_state is not None:
        check_tensors(initial_state=initial_state)
        expected = (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        if initial_state.shape != expected:
            raise InputError(
                f"initial_state must be [B, H, Dk, Dv] = {expected}, got shape {tuple(initial_state.shape)}."
            )
        check_types({"q": q}, {"initial_state": initial_state})
    _check_scan(scan, q)
    if _values_are_at_hand(log_decay) and (log_decay > 0).any():
        raise InputError(f"log_decay must not be above 0, got {log_decay.max().item():.4g}: the state would grow.")


def _check_mask(mask: Tensor, q: Tensor) -> None:
    r = mask.shape[-1] if mask.ndim else 0
    heads, head_dim = q.shape[2:]
    # The shape is compared within one rank only: comparing a batch with a number of heads would bind a symbolic batch.
    expected = (heads, r, r) if mask.ndim == 3 else (*q.shape[:3], r, r)
    if r < 1 or mask.ndim not in (3, 5) or mask.shape != expected:
        raise InputError(
            f"mask must be [H, r, r] or [B, N, H, r, r] with B, N, H = {tuple(q.shape[:3])}, "
            f"got shape {tuple(mask.shape)}."
        )
    if head_dim % r:
        raise InputError(f"mask has r = {r} sub-heads, which does not divide the head dim of q, {head_dim}.")


def _check_scan(scan: TokenScan | Tensor | None, q: Tensor) -> None:
    tokens = q.shape[1]
    if isinstance(scan, TokenScan):
        if scan.num_tokens != tokens:
            raise InputError(f"scan orders {scan.num_tokens} tokens, q has {tokens}.")
    elif scan is not None:
        check_tensors(**{"scan, if no TokenScan,": scan})
        if scan.dtype != torch.long or scan.shape != (tokens,):
            raise InputError(
                f"scan must be int64 [N] with N = {tokens}, got {scan.dtype} of shape {tuple(scan.shape)}."
            )
        if scan.device != q.device:
            raise InputError(f"scan is on {scan.device}, q on {q.device}: all inputs must share one device.")
        _check_permutation(scan)


# Versions of index tensors that were found to be permutations: an accelerator has to wait for the first check only.
_permutations = WeakIdKeyDictionary()


def _check_permutation(scan: Tensor) -> None:
    if not is_plain(scan) or _is_capturing(scan):
        return
    version = None if scan.is_inference() else scan._version  # inference tensors count no versions
    if version is not None and _permutations.get(scan) == version:
        return
    if not torch.equal(scan.sort().values, torch.arange(len(scan), device=scan.device)):
        raise InputError(f"scan must be a permutation of 0 to {len(scan) - 1}: some token is missing or repeated.")
    _permutations[scan] = version


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _values_are_at_hand(x: Tensor) -> bool:
    """Tell whether reading values is free; an accelerator would have to wait."""
    return x.device.type == "cpu" and is_plain(x)
