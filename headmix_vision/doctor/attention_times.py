"""Times of MHLA and of PyTorch's softmax attention on one GPU, at the same shapes and types.

B batch, N tokens, H heads, D head dim, M token blocks.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headmix_vision.ops import TokenBlocks, mhla

PARTS = ("forward_ms", "both_ms")
HEADS, HEAD_DIM = 6, 64
MHLA = "mhla"
SOFTMAX = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
# Side of a square grid of tokens, and of the grid of their blocks, as the models have them.
GRIDS = {196: (14, 4), 1_024: (32, 4), 4_096: (64, 8), 16_384: (128, 8)}
_TOKENS_OF_PROCESSOR = 512  # of all samples together: they fill the card
_BUDGET_MS = 60.0  # for the repetitions of one measurement
_LEAST_REPLAY_MS = 1.0  # a replay this long hides its own launch
_MOST_CALLS = 20  # in one graph


class Times(NamedTuple):
    """Median times of one attention.

    Attributes:
        forward_ms: forward pass without saved state.
        both_ms: forward and backward pass, gradients of all inputs.
        graph: whether both are CUDA graph replays; else they include the launches from Python.
        warnings: what the implementation warned of, as a fallback.
    """

    forward_ms: float
    both_ms: float
    graph: bool
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenTimes:
    """Times at one number of tokens.

    Attributes:
        tokens: N.
        batch: B.
        dtype: type of the inputs.
        left_out: columns for which time or memory did not suffice.
        mhla: times of MHLA.
        softmax: times of softmax attention by backend of PyTorch; a backend without kernels for the GPU is absent.
        failed: why MHLA failed.
    """

    tokens: int
    batch: int
    dtype: str
    left_out: tuple[str, ...] = ()
    mhla: Times | None = None
    softmax: dict[str, Times] = field(default_factory=dict)
    failed: str | None = None

    def best_softmax(self, part: str) -> tuple[str, float] | None:
        """Return backend and time of the fastest softmax; ``part`` is one of `PARTS`."""
        times = {name: getattr(found, part) for name, found in self.softmax.items()}
        return min(times.items(), key=lambda item: item[1]) if times else None

    def speed(self, part: str) -> float | None:
        """Return the speed of MHLA as a multiple of the best softmax's; None unless all columns were timed."""
        best = self.best_softmax(part)
        return None if best is None or self.mhla is None or self.left_out else best[1] / getattr(self.mhla, part)


def batch_of(tokens: int, processors: int) -> int:
    """Return the batch that fills a card of so many multiprocessors."""
    return max(1, round(processors * _TOKENS_OF_PROCESSOR / tokens))


def compile_attention(tokens: int, batch: int, device: torch.device, dtype: torch.dtype) -> None:
    """Run MHLA once, forward and backward: its kernels are in Triton's cache from then on."""
    forward, both = attention_calls(MHLA, tokens, batch, device, dtype)
    forward()
    both()
    torch.cuda.synchronize()


def time_attention(column: str, tokens: int, batch: int, device: torch.device, dtype: torch.dtype) -> Times | None:
    """Time one column, `MHLA` or one of `SOFTMAX`; None if PyTorch has no such backend for this GPU."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        forward, both = attention_calls(column, tokens, batch, device, dtype)
        if column != MHLA:
            try:
                both()
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                return None
        (forward_ms, graph), (both_ms, graph_of_both) = _time(forward), _time(both)
    said = tuple(dict.fromkeys(str(warning.message) for warning in warned)) if column == MHLA else ()
    return Times(forward_ms, both_ms, graph and graph_of_both, said)


def attention_calls(
    column: str, tokens: int, batch: int, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a forward pass, and a forward and backward pass; q, k and v are views of one projection, as in a model."""
    generator = torch.Generator(device).manual_seed(tokens)
    packed = torch.randn(batch, tokens, 3, HEADS, HEAD_DIM, device=device, dtype=dtype, generator=generator)
    grad = torch.randn(batch, tokens, HEADS, HEAD_DIM, device=device, dtype=dtype, generator=generator)
    leaves = [x.detach().requires_grad_() for x in packed.unbind(2)]
    if column == MHLA:
        side, blocks_of_side = GRIDS[tokens]
        blocks = TokenBlocks.from_grid((side, side), (blocks_of_side, blocks_of_side))
        mixing = torch.rand(blocks.num_blocks, blocks.num_blocks, device=device, generator=generator)
        leaves.append(mixing.add_(0.1).requires_grad_())

        def attend(q: Tensor, k: Tensor, v: Tensor, *mixings: Tensor) -> Tensor:
            return mhla(q, k, v, mixings[0], blocks)
    else:
        backend = getattr(SDPBackend, column)

        def attend(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            return out.transpose(1, 2)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*leaves)

    def both() -> Sequence[Tensor]:
        return torch.autograd.grad(attend(*leaves), leaves, grad)

    return forward, both


def _time(call: Callable[[], object]) -> tuple[float, bool]:
    """Return the median time of a call in ms, and whether a CUDA graph was replayed."""
    for _ in range(3):
        call()
    calls = 1
    try:
        replay = _capture(call, 1)
        calls = max(1, min(_MOST_CALLS, math.ceil(_LEAST_REPLAY_MS / _event_times(replay, 1)[0])))
        replay = _capture(call, calls) if calls > 1 else replay
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # an operation refuses capture
        torch.cuda.synchronize()
        replay, calls = call, 1
    (replay_ms,) = _event_times(replay, 1)
    repeats = max(3, min(50, int(_BUDGET_MS / replay_ms)))
    return statistics.median(_event_times(replay, repeats)) / calls, replay is not call


def _capture(call: Callable[[], object], calls: int) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    return graph.replay


def _event_times(call: Callable[[], object], repeats: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]
