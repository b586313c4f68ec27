"""Time the host's part of a call of each op, launched by itself, without a GPU.

    python -m benchmarks.bench_host

Triton runs up to the driver, whose compiled kernels are replaced by nothing, and tensors lie in the memory of the CPU.
Forward passes are without gradients. Before an op is timed, its second call must launch what the first launched: the
first goes through Triton's search for compiled kernels, later ones do not.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before the kernels are defined

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from headmix_lab.tables import markdown_table
from headmix_vision.ops import TokenBlocks, grid_conv, hardware, head_in_head, mhla, mix_heads
from headmix_vision.ops.runtime import forget_plans

HOPPER = hardware.Gpu("no GPU", (9, 0), 227 << 10, 132)


def is_tensor_or_address(argument: object) -> bool:
    """Return whether a launch gets a tensor: the first of a kernel gets tensors, later ones get their addresses."""
    return isinstance(argument, Tensor) or (type(argument) is int and argument >= 1 << 32)


class EmptyKernel(CompiledKernel):  # type: ignore[misc]
    """A compiled kernel that runs nothing, and records its launches where a list is given."""

    launches: list[tuple[object, ...]] | None = None

    def __init__(self, name: str) -> None:
        self.name, self.src, self.module, self.function, self.packed_metadata = name, None, self, None, None
        self._run = self.note

    def note(self, x: int, y: int, z: int, stream: Any, function: Any, *rest: Any) -> None:
        if EmptyKernel.launches is not None:
            arguments = ["tensor" if is_tensor_or_address(a) else a for a in rest[4:]]
            EmptyKernel.launches.append((self.name, id(self), x, y, z, *arguments))


def leave_out_the_gpu() -> None:
    """Let the ops take CPU tensors for a Hopper GPU's, and launch empty kernels, from now on."""

    def compile(kernel: JITFunction, key: Any, signature: Any, device: Any, *_: Any) -> EmptyKernel:
        compiled = kernel.device_caches[device][0][key] = EmptyKernel(kernel.__name__)
        return compiled

    target = GPUTarget("cuda", 90, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
        )
    )
    JITFunction._do_compile = compile
    hardware.find_gpu = lambda device: HOPPER


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def cases() -> Iterator[tuple[str, Callable[[], Sequence[Tensor]], list[Tensor]]]:
    """Yield ops at DeiT-S's heads: a name, a call, and what it has gradients of."""
    for grid in ((14, 14), (16, 16), (32, 32), (64, 32)):
        blocks = TokenBlocks.from_grid(grid, (4, 4))
        inputs = [empty(1, blocks.num_tokens, 6, 64) for _ in range(3)] + [empty(16, 16, dtype=torch.float32)]
        yield f"mhla, {blocks.num_tokens} tokens", lambda x=inputs, b=blocks: [mhla(*x, b, impl="triton")], inputs
    sizes = (1, 256, 6)
    inputs = [*(empty(*sizes, 64) for _ in range(3)), empty(*sizes), empty(*sizes), empty(6, 4, 4)]
    yield "head_in_head, r = 4", lambda x=inputs: [head_in_head(*x, impl="triton")[0]], inputs
    inputs = [*(empty(1, 196, 6, 64) for _ in range(3)), empty(3, 12, 6, dtype=torch.float32)]
    yield "mix_heads, 6 to 12", lambda x=inputs: mix_heads(x[:3], x[3], impl="triton"), inputs
    inputs = [empty(1, 196, 384), *(empty(*sizes, dtype=torch.float32) for sizes in ((384, 1, 3, 3), (384,)))]
    yield "grid_conv, 14x14", lambda x=inputs: [grid_conv(*x, grid=(14, 14), residual=True, impl="triton")], inputs


def launches_of(call: Callable[[], object]) -> list[tuple[object, ...]]:
    EmptyKernel.launches = []
    call()
    launches, EmptyKernel.launches = EmptyKernel.launches, None
    return launches


def median_us(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=300)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    rows = []
    leave_out_the_gpu()
    for name, forward, inputs in cases():
        gradients = [torch.zeros_like(x) for x in forward()]

        def both(forward: Any = forward, inputs: Any = inputs, gradients: Any = gradients) -> None:
            torch.autograd.grad(forward(), inputs, gradients)

        forget_plans()
        first, second = launches_of(both), launches_of(both)
        if not first or first != second:
            raise SystemExit(f"error: {name} does not launch the second time what it launched the first")
        with torch.no_grad():
            forward_us = median_us(forward, repeats)
        rows.append([name, str(len(first)), f"{forward_us:.0f}", f"{median_us(both, repeats):.0f}"])
    print(markdown_table(["op", "launches", "forward, us", "forward and backward, us"], rows))


if __name__ == "__main__":
    main()
