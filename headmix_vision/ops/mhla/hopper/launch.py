"""Launch the Gluon kernels of short sequences on Hopper GPUs, and say which inputs they take.

B batch, N tokens, H heads, M blocks, D and Dv head dims.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from headmix_vision.ops.dispatch import warn_once
from headmix_vision.ops.hardware import INTERPRETED, constant_in_graphs, gpu_behind
from headmix_vision.ops.mhla import triton_tuning as tuning
from headmix_vision.ops.mhla.torch_impl import Settings
from headmix_vision.ops.mhla.triton_launch import (
    Backward,
    Gradients,
    block_of_token,
    gradient,
    kernel_constants,
    mixing_strides,
    normalizer_name,
    sum_leading,
)
from headmix_vision.ops.runtime import KernelFailed, Launch, Layout, alignment, forget_plans, is_recording, planned


class Kernels(NamedTuple):
    forward: Any
    backward: Any
    wide_backward: Any


COST = "at 97 to 256 tokens the portable kernels take their place, with 0.7 to 1.0 of the speed"


@lru_cache
def _kernels() -> Kernels | None:
    """Return the kernels, or None with a warning for a Triton whose Gluon lacks what they use. Importing takes time."""
    try:
        from headmix_vision.ops.mhla.hopper.backward import gluon_backward_kernel
        from headmix_vision.ops.mhla.hopper.forward import gluon_forward_kernel
        from headmix_vision.ops.mhla.hopper.wide_backward import gluon_wide_backward_kernel
    except ImportError as error:
        import triton

        warn_once(f"MHLA's kernels for Hopper need triton 3.6 or newer, got {triton.__version__} ({error}): {COST}.")
        return None
    return Kernels(gluon_forward_kernel, gluon_backward_kernel, gluon_wide_backward_kernel)


_left_out = False


def leave_out(error: KernelFailed, settings: Settings) -> None:
    """Warn once that the portable kernels serve from now on, or raise where kernels were asked for by name."""
    global _left_out
    if not settings.fallback:
        raise error
    warn_once(f"{error}; {COST}.")
    _left_out = True
    forget_plans()


@constant_in_graphs
def serve(dtype: torch.dtype, device: torch.device, fallback: bool) -> bool:
    """Return whether the kernels run on a device with inputs of a type: bf16 on a Hopper GPU."""
    if INTERPRETED or (_left_out and fallback) or dtype != torch.bfloat16:
        return False
    gpu = gpu_behind(device)
    memory = tuning.HOPPER_KB << 10
    return gpu.capability == (9, 0) and gpu.shared_memory >= memory and _kernels() is not None


def _takes(settings: Settings, *rows: Layout) -> bool:
    """Return whether the kernels take such rows: of one type, in whole 16 bytes; they are not causal."""
    return (
        not is_recording()
        and not settings.causal
        and all(x.dtype == rows[0].dtype and x.strides[-1] == 1 for x in rows)
        and tuning.fits_hopper(settings.blocks, *(x.shape[-1] for x in rows))
        and alignment(*rows) == 8
        and serve(rows[0].dtype, rows[0].device, settings.fallback)
    )


def takes_forward(q: Layout, k: Layout, v: Layout, settings: Settings) -> bool:
    return _takes(settings, q, k, v) and _forward_programs(q, v, settings) > 0


def _forward_programs(q: Layout, v: Layout, settings: Settings) -> int:
    """Count the programs of a multiprocessor: 16 warps, or as many as there is shared memory for."""
    N, warps = q.shape[1], tuning.power_of_two(q.shape[1], 64) // 16
    needed = tuning.hopper_bytes(N, q.shape[-1], v.shape[-1], settings.blocks.num_blocks)
    return min(16 // warps, tuning.programs_that_fit(needed, q.gpu.shared_memory))


def forward_launch(q: Layout, k: Layout, v: Layout, mixing: Layout, settings: Settings) -> Launch:
    """Plan the forward pass: 16 queries a warp, and as many programs as a GPU holds at a time."""
    B, N, H, _ = q.shape
    M = settings.blocks.num_blocks
    strides = [stride // 8 for x in (q, k, v) for stride in (x.strides[0], x.strides[2])]
    numbers = (*strides, *mixing_strides(mixing.strides), B * H, H, settings.eps)
    warps = tuning.power_of_two(N, 64) // 16
    constants = dict(
        Q_N=q.strides[1], K_N=k.strides[1], V_N=v.strides[1], N=N, M=M, MB=tuning.power_of_two(M, 16),
        PER_HEAD=len(mixing.shape) == 3, num_warps=warps, maxnreg=128,
    ) | kernel_constants(q, v, settings, 8)  # fmt: skip
    for name in ("COMPUTE", "PRECISION", "ALIGN"):
        del constants[name]
    kernels = _kernels()
    assert kernels is not None
    programs = min(B * H, q.gpu.processors * _forward_programs(q, v, settings))
    return Launch(kernels.forward, (programs,), numbers, constants)


def takes_backward(q: Layout, k: Layout, v: Layout, out: Layout, d_out: Layout, settings: Settings) -> bool:
    rows = (q, k, v, out, d_out)
    return (
        q.shape[-1] == v.shape[-1]
        and (settings.feature_map != "relu" or settings.eps <= tuning.HOPPER_EPS)
        and all(x.strides[1] * tuning.RESIDENT_TOKENS < 2**31 and max(x.strides) // 8 < 2**31 for x in rows)
        and _takes(settings, *rows)
        and _backward_tiles(q, settings) is not None
    )


def _backward_tiles(q: Layout, settings: Settings) -> tuning.Tiles | None:
    """Choose the tiles of the backward kernel that takes heads of such dims, if there is one."""
    _, N, _, D = q.shape
    M, shared_memory = settings.blocks.num_blocks, q.gpu.shared_memory
    if D in tuning.HOPPER_WIDE_DIMS:
        return tuning.hopper_wide(N, M, shared_memory)
    if D == tuning.HOPPER_BACKWARD_DIM and (tiles := tuning.hopper_backward(N, M, shared_memory)):
        return {"KEYS": tuning.power_of_two(N, 64), "PREFIX": tuning.lone_prefix(settings.blocks), **tiles}
    return None


class BackwardPlan(NamedTuple):
    """The launch for all gradients, the block of each token, and shapes of float32 tensors.

    Attributes:
        parts: of the gradient of the mixing.
        scratch: for partial sums, if the kernel has any.
    """

    launch: Launch
    blocks: Tensor
    parts: tuple[int, ...]
    scratch: tuple[int, ...] | None = None


@planned
def plan_backward(
    q: Layout, k: Layout, v: Layout, out: Layout, d_out: Layout, mixing: Layout, pack: int, settings: Settings
) -> BackwardPlan | None:
    """Plan the backward pass, or return None where the kernel does not take the inputs."""
    if not takes_backward(q, k, v, out, d_out, settings):
        return None
    B, N, H, D = q.shape
    M, rows = settings.blocks.num_blocks, (q, k, v, out, d_out)
    num_blocks, per_head, wide = tuning.power_of_two(M, 16), len(mixing.shape) == 3, D in tuning.HOPPER_WIDE_DIMS
    tiles = dict(_backward_tiles(q, settings) or {})
    programs = min(B * H, q.gpu.processors * tiles.pop("programs"))
    strides = [stride // 8 for x in rows for stride in (x.strides[0], x.strides[2])]
    numbers = (*strides, *mixing_strides(mixing.strides), B, settings.eps)
    constants = dict(
        **{f"{name}_n": x.strides[1] // 8 for name, x in zip("qkvog", rows, strict=True)}, N=N, H=H, M=M, D=D,
        MB=num_blocks, PACK=pack, PER_HEAD=per_head, NORMALIZER=normalizer_name(settings),
        FEATURE_MAP=settings.feature_map, **tiles,
    )  # fmt: skip
    kernels = _kernels()
    assert kernels is not None
    launch = Launch(kernels.wide_backward if wide else kernels.backward, (programs,), numbers, constants)
    passes = triton.cdiv(N, tiles["KEYS"])
    parts = ((B if per_head else programs) * passes, *mixing.shape[:-2], num_blocks, num_blocks)
    scratch = (programs, passes * tiles["KEYS"], tuning.HOPPER_WIDE_COLUMNS + num_blocks) if wide else None
    blocks = block_of_token(settings.blocks, q.device, 1 if tiles.get("PREFIX") else 0)
    return BackwardPlan(launch, blocks, parts, scratch)


def run_backward(plan: BackwardPlan, call: Backward) -> Gradients:
    """Compute the gradients of all inputs; that of a denominator only for a given one."""
    d_out, q, k, v, mixing, out, (inverse, *_), packed, settings = call
    d_q, d_k, d_v = gradient(q, packed, 0), gradient(k, packed, 1), gradient(v, packed, 2)
    d_mixing, d_scale = q.new_empty(plan.parts, dtype=torch.float32), torch.empty_like(inverse)
    scratch = () if plan.scratch is None else (q.new_empty(plan.scratch, dtype=torch.float32),)
    plan.launch(q, k, v, mixing, out, inverse, d_out, d_q, d_k, d_v, d_mixing, d_scale, plan.blocks, *scratch)
    M = settings.blocks.num_blocks
    return Gradients(d_q, d_k, d_v, sum_leading(d_mixing, 1)[..., :M, :M].contiguous(), d_scale)
