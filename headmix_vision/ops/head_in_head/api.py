"""The public entries of the Head-in-Head ops: they validate the arguments and choose the implementation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from headmix_vision.errors import InputError, check_choice
from headmix_vision.ops.dispatch import (
    Bound,
    check_features,
    check_tensors,
    check_types,
    is_plain,
    kept,
    select,
    values_are_at_hand,
    why_not_triton,
)
from headmix_vision.ops.hardware import NO_KERNELS
from headmix_vision.ops.head_in_head.reference import head_in_head_reference, head_in_head_rwkv7_reference
from headmix_vision.ops.head_in_head.torch_impl import Inputs, RWKV7Inputs, head_in_head_rwkv7_torch, head_in_head_torch
from headmix_vision.ops.runtime import keep_for_graphs
from headmix_vision.ops.token_scan import ScanTables, TokenScan

IMPL_NAMES = ("auto", "reference", "torch", "triton")
RWKV7_IMPL_NAMES = IMPL_NAMES[:3]


def validate_head_in_head(inputs: Inputs, scan: TokenScan | Tensor | None, impl: str) -> None:
    """Raise InputError, naming the argument, unless ``head_in_head`` can run on these arguments."""
    check_choice("impl", impl, IMPL_NAMES)
    q, k, v, beta, log_decay, mask, initial_state = inputs
    check_tensors(q=q, k=k, v=v, beta=beta, log_decay=log_decay, mask=mask)
    _check_features(q, k, v)
    for name, x in (("beta", beta), ("log_decay", log_decay)):
        if x.shape != q.shape[:3]:
            raise InputError(f"{name} must be [B, N, H] = {tuple(q.shape[:3])}, got shape {tuple(x.shape)}.")
    check_types({"q": q, "k": k, "v": v}, {"beta": beta, "log_decay": log_decay})
    _check_common(q, v, mask, initial_state, scan)


def validate_head_in_head_rwkv7(inputs: RWKV7Inputs, scan: TokenScan | Tensor | None, impl: str) -> None:
    """Raise InputError, naming the argument, unless ``head_in_head_rwkv7`` can run on these arguments."""
    check_choice("impl", impl, RWKV7_IMPL_NAMES)
    q, k, v, a, b, log_decay, mask, initial_state = inputs
    check_tensors(q=q, k=k, v=v, a=a, b=b, log_decay=log_decay, mask=mask)
    _check_features(q, k, v)
    for name, x in (("a", a), ("b", b), ("log_decay", log_decay)):
        if x.shape != q.shape:
            raise InputError(f"{name} must have the shape of q, {tuple(q.shape)}, got {tuple(x.shape)}.")
    check_types({"q": q, "k": k, "v": v, "a": a, "b": b}, {"log_decay": log_decay})
    _check_common(q, v, mask, initial_state, scan)


def _check_features(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_features(q, k, v, "Dk")
    if q.shape[1] < 1:
        raise InputError(f"q must have at least one token, got shape {tuple(q.shape)}.")


def _check_common(
    q: Tensor,
    v: Tensor,
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


def _check_decay(log_decay: Tensor) -> None:
    if values_are_at_hand(log_decay) and (log_decay > 0).any():
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


State = tuple[Tensor, Tensor]  # output and final state
IMPLEMENTATIONS: dict[str, Callable[..., State]] = {"reference": head_in_head_reference, "torch": head_in_head_torch}
RWKV7_IMPLEMENTATIONS: dict[str, Callable[..., State]] = {
    "reference": head_in_head_rwkv7_reference,
    "torch": head_in_head_rwkv7_torch,
}
if NO_KERNELS is None:
    from headmix_vision.ops.head_in_head.triton_op import head_in_head_triton

    IMPLEMENTATIONS |= {"triton": head_in_head_triton, "auto": partial(head_in_head_triton, fallback=True)}
SUB_HEADS = (1, 2, 4, 8)  # values of r that the kernels take


class HeadInHeadOutput(NamedTuple):
    """The result of a Head-in-Head op.

    Attributes:
        out: [B, N, H, Dv] of the type of the values.
        final_state: [B, H, Dk, Dv] in float32 or float64, or None.
    """

    out: Tensor
    final_state: Tensor | None


@kept
def bind_head_in_head(scan: TokenScan | None, impl: str) -> Bound:
    """Fix the scan and implementation of :func:`head_in_head`; the returned call takes its seven tensors.

    It returns the output and the final state, and does not check that ``log_decay`` is at most 0.
    """

    def plan(*tensors: Any) -> Callable[..., State]:
        run = plan_head_in_head(Inputs(*tensors), scan, impl)
        return lambda *tensors: run(Inputs(*tensors))

    return Bound(plan)


def plan_head_in_head(inputs: Inputs, scan: TokenScan | Tensor | None, impl: str) -> Callable[[Inputs], State]:
    """Check the tensors of a call, and return what computes all calls with tensors of their kinds."""
    validate_head_in_head(inputs, scan, impl)
    q, _, v, _, _, mask, _ = inputs
    name = select(impl, q.is_cuda, lambda: _why_not_triton(q, v, mask))
    form, tables = IMPLEMENTATIONS[name], _tables(scan, q)
    if tables is None or not q.is_cuda:
        return partial(form, scan=tables)
    return lambda inputs: form(inputs, _tables(scan, inputs.q))  # found and held in a CUDA graph


def _why_not_triton(q: Tensor, v: Tensor, mask: Tensor) -> str | None:
    if mask.shape[-1] not in SUB_HEADS:
        return f"mask has r = {mask.shape[-1]} sub-heads: the kernels take {SUB_HEADS}"
    return why_not_triton(q, v)


def head_in_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    mask: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    scan: TokenScan | Tensor | None = None,
    impl: str = "auto",
) -> HeadInHeadOutput:
    r"""Compute Head-in-Head: the gated delta rule whose sub-heads correct each other through an r x r mask.

    With the key dims of a head cut into r contiguous sub-heads and E(M) the mask with every entry repeated over
    Dk / r x Dk / r places, the state S (Dk x Dv) and output of each head are::

        S_t = exp(log_decay_t) (I - beta_t (k_t k_t^T * E(M_t))) S_{t-1} + beta_t k_t v_t^T
        o_t = Dk^-0.5 q_t^T S_t

    ``r = 1`` with a mask of one is the gated delta rule. A symmetric positive semidefinite mask with unit diagonal and
    keys of norm at most 1 make the transition a contraction for beta in [0, 2]. Sums run in float32 (float64 for
    float64 inputs) whatever the input type, also under autocast.

    A token with beta and log-decay 0 leaves the state as it is: give both to padding.

    >>> scan = TokenScan.from_grid((4, 4), "column_major")
    >>> q, k, v = torch.nn.functional.normalize(torch.rand(3, 2, 16, 3, 8), dim=-1)
    >>> beta, log_decay, mask = torch.rand(2, 16, 3), -torch.rand(2, 16, 3), torch.ones(3, 4, 4)
    >>> out, state = head_in_head(q, k, v, beta, log_decay, mask, output_final_state=True, scan=scan)
    >>> out.shape, state.shape
    (torch.Size([2, 16, 3, 8]), torch.Size([2, 3, 8, 8]))

    Args:
        q: [B, N, H, Dk], queries in raster order, prefix tokens first; any floating type, any strides. Neither q nor k
            is normalised here.
        k: [B, N, H, Dk], keys, as ``q``.
        v: [B, N, H, Dv], values, as ``q``.
        beta: [B, N, H], strength of a write. Floating type.
        log_decay: [B, N, H], at most 0, minus infinity forgets everything. Floating type.
        mask: [H, r, r], or [B, N, H, r, r], one for each token; r divides Dk. Floating type.
        initial_state: [B, H, Dk, Dv], zeros if None. Floating type.
        output_final_state: return the state after the last token of the scan.
        scan: order in which tokens are read: a :class:`~headmix_vision.ops.TokenScan`, or any permutation as int64 [N];
            raster order if None. Inputs and output stay in raster order.
        impl: ``"auto"``: Triton on CUDA where the kernels can run, else torch. ``"triton"``: kernels for bfloat16,
            float16 and float32, r of 1, 2, 4 or 8 and head dims up to 128; differentiable once, not by torch.func,
            where "auto" takes torch; decays below exp(-50) are taken as 0. ``"torch"``: chunk by chunk, any device.
            ``"reference"``: the loop, a specification.

    Returns:
        ``out``, [B, N, H, Dv] of ``v``'s type, and ``final_state``, [B, H, Dk, Dv] in float32 or float64, or None.

    Raises:
        InputError: naming the argument, if shapes, types, devices or options do not fit, if ``impl`` cannot run them,
            and, outside a tracer, if ``scan`` is not a permutation or, on the CPU only, ``log_decay`` above 0:
            elsewhere reading it would hold up every call.
    """
    inputs = Inputs(q, k, v, beta, log_decay, mask, initial_state)
    if isinstance(scan, Tensor):  # its values are read: each call has a plan of its own
        run = partial(plan_head_in_head(inputs, scan, impl), inputs)
    else:
        run = partial(bind_head_in_head(scan, impl).planned(*inputs), *inputs)
    _check_decay(log_decay)
    out, state = run()
    return HeadInHeadOutput(out, state if output_final_state else None)


def head_in_head_rwkv7(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    mask: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    scan: TokenScan | Tensor | None = None,
    impl: str = "auto",
) -> HeadInHeadOutput:
    r"""Compute Head-in-Head with the transition of RWKV-7: a decay for each channel and two vectors for corrections::

        S_t = (diag(exp(log_decay_t)) + (b_t a_t^T) * E(M_t)) S_{t-1} + k_t v_t^T
        o_t = Dk^-0.5 q_t^T S_t

    Args:
        q, k, v, mask, initial_state, output_final_state, scan, impl: as in :func:`head_in_head`, but without kernels.
        a: [B, N, H, Dk], the vectors by which corrections read the state, as ``q``.
        b: [B, N, H, Dk], the vectors by which corrections are written to the state, as ``q``.
        log_decay: [B, N, H, Dk], at most 0. Floating type.

    Returns:
        As :func:`head_in_head`.

    Raises:
        InputError: as :func:`head_in_head`.
    """
    inputs = RWKV7Inputs(q, k, v, a, b, log_decay, mask, initial_state)
    validate_head_in_head_rwkv7(inputs, scan, impl)
    _check_decay(log_decay)
    name = select(impl, on_gpu=False, why_not=lambda: None)
    out, state = RWKV7_IMPLEMENTATIONS[name](inputs, _tables(scan, q))
    return HeadInHeadOutput(out, state if output_final_state else None)


def _tables(scan: TokenScan | Tensor | None, like: Tensor) -> ScanTables | None:
    if isinstance(scan, TokenScan):
        return None if scan.is_raster else scan.tables(like)
    if scan is None:
        return None
    order = scan.contiguous()
    if is_plain(order):  # a graph of torch.compile must not hold what it makes beyond its run
        keep_for_graphs([order])
    return ScanTables(order)
