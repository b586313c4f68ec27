"""Run a program on a Hopper GPU that stands in for an RTX 30, 40 or 50, or for an A100.

    python -m headmix_lab.stand_in headmix_lab.tiles pairwise_forward --tokens 196
    python -m headmix_lab.stand_in --card a100 headmix_lab.tiles resident_forward --tokens 196
    python -m headmix_lab.stand_in benchmarks.bench_mhla --shapes n196,deit --jobs 1

Triton kernels are chosen and compiled as for such a card: the portable ones, products by `mma.sync` and not by Hopper's
`wgmma`, and 99 KB of shared memory for a program (A100: 163). A multiprocessor holds as many programs as one of such a
card, with its 100 KB, 48 warps and, but for RTX 30, 24 programs (A100: 164 KB, 64 warps, 32 programs). Memory, clocks
and the rate of products are Hopper's, and kernels that are not Triton's stay as they are. Compare times with each
other: they do not predict the card's. The program must do all in one process; one that starts others by `torchrun` or
as commands would run those as on Hopper.
"""

import argparse
import multiprocessing.process
import os
import runpy
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from headmix_vision.console import OneLineParser, one_line_errors
from headmix_vision.errors import InputError
from headmix_vision.ops import hardware
from headmix_vision.ops.mhla.triton_tuning import HOPPER_KB, programs_that_fit


class Card(NamedTuple):
    """Limits of a card.

    Attributes:
        capability: CUDA compute capability.
        shared_memory: bytes that a program may have.
        programs, warps: that a multiprocessor holds at most.
    """

    capability: tuple[int, int]
    shared_memory: int
    programs: int
    warps: int


CARDS = {"rtx": Card((8, 9), 99 << 10, 24, 48), "a100": Card((8, 0), 163 << 10, 32, 64)}


def padded(shared: int, warps: int, card: Card) -> int:
    """Return the bytes of shared memory at which a Hopper multiprocessor holds as many programs as a card's.

    Args:
        shared: Bytes that the program needs, no more than the card has.
        warps: Warps of the program.
        card: The card.
    """
    programs = min(card.programs, card.warps // warps, programs_that_fit(shared, card.shared_memory))
    most = (HOPPER_KB + 1 << 10) // programs - 1024  # a multiprocessor keeps 1 KB for each program
    return max(shared, most // 128 * 128)


def stand_in(card: Card) -> None:
    """Choose and compile the kernels of this process as for the card.

    Raises:
        InputError: There is no Hopper GPU.
    """
    device = torch.device("cuda")
    here = hardware.find_gpu(device) if torch.cuda.is_available() else None
    if here is None or here.capability != (9, 0):
        raise InputError("a Hopper GPU can stand in for other cards, and there is none here")
    from triton.compiler import CompiledKernel
    from triton.compiler.compiler import make_backend
    from triton.runtime.errors import OutOfResources

    hardware.give_compilers_the_assembler()
    os.environ["DISABLE_MMA_V3"] = "1"  # a part of the key of Triton's cache
    name = f"{here.name} in place of a card"
    gpu = here._replace(name=name, capability=card.capability, shared_memory=card.shared_memory)
    hardware.find_gpu = lru_cache(lambda device: gpu if device.type == "cuda" else None)
    read = CompiledKernel.__init__

    def read_and_pad(kernel: Any, *args: Any, **options: Any) -> None:
        read(kernel, *args, **options)
        needed = kernel.metadata.shared
        if needed > card.shared_memory:
            raise OutOfResources(needed, card.shared_memory, "shared memory")
        kernel.metadata = kernel.metadata._replace(shared=padded(needed, kernel.metadata.num_warps, card))
        kernel.packed_metadata = make_backend(kernel.metadata.target).pack_metadata(kernel.metadata)

    CompiledKernel.__init__ = read_and_pad

    def refuse(process: Any) -> None:
        raise InputError("the program starts processes, which would not stand in for the card: give --jobs 1")

    processes: Any = multiprocessing.process.BaseProcess
    processes.start = refuse


def main(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", choices=CARDS, default="rtx", help="the card (%(default)s)")
    parser.add_argument("module", help="the program, a module of Python such as benchmarks.bench_hih")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args(argv)
    with one_line_errors():
        stand_in(CARDS[given.card])
        sys.argv = [given.module, *given.arguments]
        runpy.run_module(given.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
