"""Compile every kernel that the ops can choose for GPUs that need not be there, and read what it needs of them.

    python -m benchmarks.compile_kernels                            # a part that takes a minute or two for each GPU
    python -m benchmarks.compile_kernels --quick                    # a few for three GPUs: a minute of two cores
    python -m benchmarks.compile_kernels --all --csv needs.csv      # every type, head dim and regime: hours of a core
    python -m benchmarks.compile_kernels --all --gpu 8.9 gfx942 --match resident

The ops run on CPU tensors as they would on the GPU. Their launches are recorded and compiled instead of run. The exit
status is 1 if a kernel does not compile, needs more shared memory than a program may have, or got wrong machine code.
It is also 1 if nothing was compiled, or if the ops left out a kernel that is written for the GPU. Another Triton, first
on PYTHONPATH, compiles the same kernels.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "0"
os.environ["HEADMIX_VISION_UNTESTED_GPUS"] = "1"  # to compile for a GPU is not to trust it

import argparse
import importlib
import itertools
import math
import multiprocessing
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from headmix_lab.machine_code import amd_resource_usage, disassemble, resource_usage, unwritten_registers
from headmix_lab.measuring import write_csv
from headmix_vision.errors import InputError
from headmix_vision.ops import TokenBlocks, TokenScan, dispatch, grid_conv, hardware, head_in_head, mhla, mix_heads
from headmix_vision.ops.mhla.triton_tuning import head_parts
from headmix_vision.ops.runtime import forget_plans

# NVIDIA GPUs by compute capability, AMD GPUs by architecture, with the bytes of shared memory that a program may have.
# Sources: "Compute Capabilities" in the CUDA programming guide, getAddressableLocalMemorySize in LLVM. A program on
# gfx950 may have 160 KB, but the ops hold themselves to what all AMD GPUs have.
GPUS = {
    "8.0": hardware.Gpu("A100", (8, 0), 163 << 10),
    "8.6": hardware.Gpu("RTX 3090", (8, 6), 99 << 10),
    "8.9": hardware.Gpu("RTX 4090", (8, 9), 99 << 10),
    "9.0": hardware.Gpu("H100", (9, 0), 227 << 10),
    "10.0": hardware.Gpu("B200", (10, 0), 227 << 10),
    "10.3": hardware.Gpu("B300", (10, 3), 227 << 10),
    "11.0": hardware.Gpu("Thor", (11, 0), 227 << 10),
    "12.0": hardware.Gpu("RTX 5090", (12, 0), 99 << 10),
    "12.1": hardware.Gpu("DGX Spark", (12, 1), 99 << 10),
    "gfx942": hardware.Gpu("MI300X", (9, 4), hardware.AMD_SHARED_MEMORY, amd="gfx942"),
    "gfx950": hardware.Gpu("MI350X", (9, 5), hardware.AMD_SHARED_MEMORY, amd="gfx950"),
    "gfx1100": hardware.Gpu("RX 7900 XTX", (11, 0), hardware.AMD_SHARED_MEMORY, amd="gfx1100"),
}
QUICK_GPUS = ("9.0", "10.0", "gfx942")
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Two head dims for each way in which kernels cut them: the largest multiple of 8 that is padded, and the largest. The
# former also serve as value dims beside all others: tiles that take turns in shared memory have led ptxas astray.
CUTS = [list(dims) for _, dims in itertools.groupby(range(1, dispatch.MAX_DIM + 1), head_parts)]
VALUE_DIMS = tuple(max(dim for dim in dims[:-1] or dims if dim % 8 == 0) for dims in CUTS)
HEAD_DIMS = tuple(sorted({*VALUE_DIMS, *(dims[-1] for dims in CUTS)}))
HIH_HEAD_DIMS = (16, 24, 64, 72, 128)
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
            torch.int32: "*i32", torch.int64: "*i64"}  # fmt: skip


class Case(NamedTuple):
    """A call of an op with its gradients."""

    name: str
    call: Any  # takes a type, makes inputs of it and runs the op
    dtype: str
    dim: int


class Launch(NamedTuple):
    """A launch of a kernel, so far as its compilation depends on it."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, int], ...]


class Need(NamedTuple):
    """Resources of a compiled kernel, or the reason why it does not compile or run."""

    shared: int = 0  # bytes of a program
    registers: int = 0  # of a thread
    stack: int = 0  # bytes of a thread
    error: str = ""


def mhla_case(name: str, dtype: str, dim: int, grid: tuple[int, ...], block_grid: tuple[int, ...], regime: str,
              prefix: int = 0, value_dim: int | None = None, **options: Any) -> Case:  # fmt: skip
    def call() -> None:
        blocks = TokenBlocks.from_grid(grid, block_grid, prefix)
        leaves = [torch.empty(1, blocks.num_tokens, 2, d, dtype=TYPES[dtype]) for d in (dim, dim, value_dim or dim)]
        leaves.append(torch.empty(blocks.num_blocks, blocks.num_blocks))
        out = mhla(*(x.requires_grad_() for x in leaves), blocks, impl=f"triton_{regime}", **options)
        out.backward(torch.empty_like(out))

    return Case(f"mhla {name}", call, dtype, dim)


def hih_case(name: str, dtype: str, dim: int, r: int, heads: int = 1, *, tokens: int = 256, per_token: bool = False,
             ordered: bool = False, states: bool = False, value_dim: int | None = None) -> Case:  # fmt: skip
    def call() -> None:
        empty = partial(torch.empty, dtype=TYPES[dtype])
        sizes = (1, tokens, heads)  # four chunks at least, so that scans keep their loop
        leaves = [empty(*sizes, dim), empty(*sizes, dim), empty(*sizes, value_dim or dim)]
        leaves += [empty(*sizes).zero_(), empty(*sizes).zero_(), empty(*(sizes[:2] if per_token else ()), heads, r, r)]
        initial = empty(1, heads, dim, value_dim or dim).requires_grad_() if states else None
        scan = TokenScan.from_grid((tokens // 16, 16), "column_major") if ordered else None
        out, final = head_in_head(*(x.requires_grad_() for x in leaves), initial_state=initial, scan=scan,
                                  output_final_state=states, impl="triton")  # fmt: skip
        outputs = [out, final] if states else [out]
        torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])

    return Case(f"head_in_head r={r} {name}", call, dtype, dim)


def mhla_cases(dtype: str, dim: int, everything: bool) -> Iterator[Case]:
    """Yield calls that reach each kernel and each form of its tiles, and with two head dims each option."""
    case = partial(mhla_case, dtype=dtype, dim=dim)
    yield case("pairwise, 197 tokens", grid=(14, 14), block_grid=(4, 4), prefix=1, regime="pairwise")
    yield case("pairwise, 1024 tokens", grid=(32, 32), block_grid=(4, 4), regime="pairwise")
    yield case("summary, 16 blocks of 16", grid=(16, 16), block_grid=(4, 4), regime="summary")
    yield case("summary, 64 blocks of 256", grid=(128, 128), block_grid=(8, 8), regime="summary")
    yield case(
        "causal pairwise, 197 tokens", grid=(14, 14), block_grid=(4, 4), prefix=1, regime="pairwise", causal=True
    )
    yield case("causal summary, 16 blocks of 256", grid=(64, 64), block_grid=(4, 4), regime="summary", causal=True)
    yield case(
        "causal summary, values of 40", grid=(9, 11), block_grid=(4, 3), regime="summary", causal=True, value_dim=40
    )
    if not everything:
        return
    for value_dim in VALUE_DIMS if dim in VALUE_DIMS else ():
        for regime, causal in itertools.product(("pairwise", "summary"), (False, True)):
            name = f"{'causal ' * causal}{regime}, values of {value_dim}"
            yield case(name, grid=(9, 11), block_grid=(4, 3), regime=regime, causal=causal, value_dim=value_dim)
    yield case("pairwise, 256 tokens", grid=(16, 16), block_grid=(4, 4), regime="pairwise")
    if dim not in (64, 72, 128):
        return
    yield case("pairwise, 144 tokens", grid=(12, 12), block_grid=(4, 4), regime="pairwise")
    yield case("pairwise, 128 tokens", grid=(8, 16), block_grid=(2, 4), regime="pairwise")
    yield case("pairwise, 64 tokens", grid=(8, 8), block_grid=(2, 2), regime="pairwise")
    yield case("summary, 25 blocks of 25", grid=(25, 25), block_grid=(5, 5), regime="summary")
    if dim == 72:
        return
    yield case("pairwise, blocks of 1", grid=(8, 15), block_grid=(8, 15), regime="pairwise")
    yield case("summary, 100 blocks", grid=(30, 30), block_grid=(10, 10), regime="summary")
    yield case("summary, 576 blocks", grid=(24, 24), block_grid=(24, 24), regime="summary")
    yield case("summary, blocks in parts", grid=(64, 64), block_grid=(2, 2), regime="summary")
    for regime in ("pairwise", "summary"):
        on = partial(case, grid=(32, 32), block_grid=(4, 4), regime=regime)
        for normalizer, feature_map in itertools.product(("paper", "source_block", None), ("relu", "elu1", "identity")):
            if (normalizer == "paper") != (feature_map == "relu"):
                for causal in (False, True):
                    name = f"{'causal ' * causal}{regime}, {normalizer}, {feature_map}"
                    yield on(name, normalizer=normalizer, feature_map=feature_map, causal=causal)


def hih_cases(dtype: str, dim: int, everything: bool) -> Iterator[Case]:
    if dim not in HIH_HEAD_DIMS:
        return
    for r in (1, 2, 4, 8) if everything else (1, 4):
        for tokens in (256, 16384) if dtype == "bfloat16" else (256,):  # as one and, on Hopper, in segments
            yield hih_case(f"{tokens} tokens", dtype, dim, r, tokens=tokens)
        if everything and r == 1:
            yield hih_case("many heads", dtype, dim, r, heads=1024)
        if everything and dim in (64, 128):
            yield hih_case("every option", dtype, dim, r, per_token=True, ordered=True, states=True)
            for value_dim in (16, 32, 192 - dim):
                yield hih_case(f"values of {value_dim}", dtype, dim, r, value_dim=value_dim)


def mix_heads_case(dtype: str, dim: int, heads: int, out_heads: int, tokens: int, count: int = 3) -> Case:
    def call() -> None:
        packed = torch.empty(1, tokens, count, heads, dim, dtype=TYPES[dtype])
        leaves = [x.requires_grad_() for x in packed.unbind(2)]
        outs = mix_heads(leaves, torch.empty(count, out_heads, heads).requires_grad_(), impl="triton")
        torch.autograd.backward(outs, [torch.empty_like(x) for x in outs])

    return Case(f"mix_heads {heads} to {out_heads} heads", call, dtype, dim)


def mix_heads_cases(dtype: str, dim: int, everything: bool) -> Iterator[Case]:
    """Yield what interleaved and explicit head attention need, and with two head dims each form of the tiles."""
    case = partial(mix_heads_case, dtype, dim, tokens=197)
    yield case(6, 12)
    yield case(24, 6, count=1)
    if not everything or dim not in (64, 72):
        return
    for heads, out_heads in ((1, 2), (3, 6), (6, 6), (12, 48), (16, 32), (16, 64), (32, 64), (32, 256)):
        yield case(heads, out_heads)
        yield case(out_heads, heads, count=1)


def grid_conv_case(dtype: str, channels: int, grid: tuple[int, ...], extent: int, **options: bool) -> Case:
    def call() -> None:
        tokens = torch.empty(1, math.prod(grid), 3 * channels, dtype=TYPES[dtype])[..., channels : 2 * channels]
        leaves = [tokens, torch.empty(channels, 1, *[extent] * len(grid)), torch.empty(channels)]
        out = grid_conv(*(x.requires_grad_() for x in leaves), grid=grid, impl="triton", **options)
        out.backward(torch.empty_like(out))

    form = " ".join(("", *options))
    return Case(f"grid_conv {'x'.join(map(str, grid))}, extent {extent}{form}", call, dtype, channels)


def grid_conv_cases(dtype: str, dim: int, everything: bool) -> Iterator[Case]:
    """Yield images and clips, in widths that are and are not whole tiles of channels."""
    case = partial(grid_conv_case, dtype, 3 * dim)
    yield case((14, 14), 3, residual=True)
    yield case((8, 8, 8), 3, silu=True)
    if not everything or dim not in (64, 72):
        return
    for grid in ((197,), (14, 14), (32, 32), (8, 8, 8), (21, 30, 52)):
        for extent in (3, 5):
            yield case(grid, extent, silu=True)
            yield case(grid, extent, residual=True)


PART = (("bfloat16", 64), ("float32", 128))


def short_cases(dtype: str, dim: int) -> Iterator[Case]:
    """Yield sequences for which Hopper has kernels of its own: 64, 128 or 256 rows."""
    for grid, block_grid, prefix in (((8, 8), (2, 2), 0), ((8, 15), (4, 4), 1), ((14, 14), (4, 4), 0)):
        name = f"pairwise, {math.prod(grid) + prefix} tokens"
        yield mhla_case(name, dtype, dim, grid, block_grid, "pairwise", prefix)


def quick_cases(gpu_name: str) -> Iterator[Case]:
    """Yield the kernels that only Hopper has, and some that every GPU has."""
    for dim in (64, 72) if gpu_name == "9.0" else ():
        yield from short_cases("bfloat16", dim)
    yield mhla_case("pairwise, 512 tokens", "float32", 88, (16, 32), (4, 4), "pairwise")
    yield mhla_case("summary, 64 blocks of 16", "bfloat16", 72, (32, 32), (8, 8), "summary")
    for r in (1, 4):
        yield hih_case("", "bfloat16", 64, r)


def all_cases(part: str, gpu_name: str) -> Iterator[Case]:
    """Yield the calls of a part: "quick", "all", or "" for those that need most of a GPU."""
    if part == "quick":
        yield from quick_cases(gpu_name)
        return
    everything = part == "all"
    for dtype, dim in itertools.product(TYPES, HEAD_DIMS) if everything else PART:
        yield from mhla_cases(dtype, dim, everything)
        yield from hih_cases(dtype, dim, everything)
        yield from mix_heads_cases(dtype, dim, everything)
        yield from grid_conv_cases(dtype, dim, everything)


@contextmanager
def recorded(gpu: hardware.Gpu) -> Iterator[dict[Launch, JITFunction]]:
    """Let the ops take CPU tensors for GPU tensors, and record what they launch there."""
    launches: dict[Launch, JITFunction] = {}

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = describe(kernel, args, kwargs)
        launches[launch] = kernel

    forget_plans()  # those for another GPU
    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(hardware, "find_gpu", lambda device: gpu._replace(processors=64)),
        mock.patch.object(torch.version, "hip", gpu.amd or None),
    ):
        yield launches
    forget_plans()


def describe(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """Write down types, constants and alignments as Triton's launcher specialises them."""
    given = dict(zip(kernel.arg_names, args, strict=False))
    given |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    signature, constants, aligned = [], [], []
    for parameter in kernel.params:
        name, value = parameter.name, given[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature.append((name, "constexpr"))
            constants.append((name, value))
            continue
        if isinstance(value, Tensor):
            kind, multiple = POINTERS[value.dtype], value.data_ptr() % 16 == 0
        elif isinstance(value, bool):
            kind, multiple = "u1", False
        elif isinstance(value, int):
            kind, multiple = "i32" if -(2**31) <= value < 2**31 else "i64", value % 16 == 0
        else:
            kind, multiple = "fp32", False
        signature.append((name, kind))
        if multiple:
            aligned.append(name)
    return Launch(kernel.__name__, tuple(signature), tuple(constants), tuple(aligned), tuple(sorted(options.items())))


def target_of(gpu: hardware.Gpu) -> GPUTarget:
    """Return Triton's name of a GPU; waves of AMD's CDNA (gfx9) have 64 threads, of RDNA 32."""
    if gpu.amd:
        return GPUTarget("hip", gpu.amd, 64 if gpu.amd.startswith("gfx9") else 32)
    return GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], 32)


def first_cause(error: BaseException) -> str:
    """Describe in a line what an error comes from: Triton adds the source code of each caller."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 200 else '... ' + text[-200:]}"


def compile_launch(launch: Launch, kernel: JITFunction, target: GPUTarget) -> Need:
    names = kernel.arg_names
    constants = {(names.index(name),): value for name, value in launch.constants}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned}
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, dict(launch.signature), constants, attributes)
    options = dict(launch.options)
    if unknown := options.keys() - vars(make_backend(target).parse_options(options)):
        return Need(error=f"unknown options, which a launch refuses: {', '.join(sorted(unknown))}")
    try:
        with hardware.right_assembler() if target.arch == 90 else nullcontext():
            compiled = triton.compile(source, target=target, options=options)
    except Exception as error:  # whatever a compiler raises is the finding
        return Need(error=first_cause(error))
    if target.backend == "hip":
        return Need(compiled.metadata.shared, *amd_resource_usage(compiled.asm["amdgcn"]))
    cubin = compiled.asm["cubin"]
    wrong = unwritten_registers(disassemble(cubin)) if target.arch == 90 else []
    return Need(
        compiled.metadata.shared, *resource_usage(cubin), f"reads a register never written: {wrong[0]}" if wrong else ""
    )


def compile_apart(launch: Launch, kernel: JITFunction, target: GPUTarget) -> Need:
    """Compile in a process of its own: some errors end it, and the reason is often on its standard error alone."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    with tempfile.TemporaryFile() as messages:

        def work() -> None:
            os.dup2(messages.fileno(), sys.stderr.fileno())
            sender.send(compile_launch(launch, kernel, target))

        process = fork.Process(target=work)
        process.start()
        sender.close()
        try:
            need = receiver.recv()
        except EOFError:
            need = Need(error="the compiler ended the process")
        process.join()
        messages.seek(0)
        reason = re.search(r"error: (.*)|Assertion (.*) failed", messages.read().decode(errors="replace"))
    return need._replace(error=f"{need.error}; {reason[0][:200]}") if need.error and reason else need


def launches_of(
    gpu: hardware.Gpu, cases: Iterable[Case], match: str
) -> tuple[dict[Launch, tuple[JITFunction, Case]], list[str]]:
    """Collect what the cases launch on a GPU, each launch once, and what the ops refuse there."""
    found: dict[Launch, tuple[JITFunction, Case]] = {}
    refused = []
    for case in cases:
        try:
            with recorded(gpu) as launches:
                case.call()
        except InputError as error:
            refused.append(f"{case.name}, {case.dtype}, head dim {case.dim}: {error}")
            continue
        for launch, kernel in launches.items():
            if match in f"{launch.kernel} {case.name}":
                found.setdefault(launch, (kernel, case))
    return found, refused


def missing_hopper_kernels(launched: set[str]) -> list[str]:
    """Name the kernels that are written for Hopper alone and were not launched, with the reason if it is known."""
    missing = []
    for path in sorted(Path(hardware.__file__).parent.glob("*/hopper/*.py")):
        module = f"headmix_vision.ops.{path.parts[-3]}.hopper.{path.stem}"
        try:
            names = [name for name in vars(importlib.import_module(module)) if name.endswith("_kernel")]
        except Exception as error:  # as an op sees it, which then takes other kernels
            missing.append(f"{module} cannot be imported: {error}")
            continue
        missing += [f"{name} is never launched" for name in names if name not in launched]
    return missing


class Report(NamedTuple):
    """Outcome of the launches on a GPU: a row for each, refused calls, and kernels that were left out."""

    rows: list[dict[str, Any]]
    refused: list[str]
    missing: list[str]


def check(gpu_name: str, part: str, match: str, share: int, shares: int) -> Report:
    """Compile a share of all launches on a GPU."""
    gpu, rows = GPUS[gpu_name], []
    torch.set_num_threads(1)
    launches, refused = launches_of(gpu, all_cases(part, gpu_name), match)
    complete = gpu_name == "9.0" and part and not match
    missing = missing_hopper_kernels({launch.kernel for launch in launches}) if complete else []
    for launch, (kernel, case) in list(launches.items())[share::shares]:
        need = compile_apart(launch, kernel, target_of(gpu))
        fits = not need.error and need.shared <= gpu.shared_memory
        rows.append(
            {"gpu": gpu_name, "kernel": launch.kernel, "type": case.dtype, "head_dim": case.dim, "case": case.name}
            | need._asdict() | {"limit": gpu.shared_memory, "fits": fits}
        )  # fmt: skip
    return Report(rows, refused, missing)


def default_gpus() -> list[str]:
    """Name the GPUs for which this Triton compiles all kernels, and rightly."""
    new = hardware.triton_release() >= hardware.RIGHT_ON_TENSOR_MEMORY
    return [name for name, gpu in GPUS.items() if new or not (gpu.amd or gpu.has_tensor_memory)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--all", dest="part", action="store_const", const="all", default="",
                       help="every type, head dim, regime and option")  # fmt: skip
    parts.add_argument("--quick", dest="part", action="store_const", const="quick",
                       help="the kernels of Hopper and a few others")  # fmt: skip
    parser.add_argument("--gpu", nargs="+", choices=tuple(GPUS), default=default_gpus(),
                        help="compute capabilities, AMD architectures; default: %(default)s")  # fmt: skip
    parser.add_argument("--match", default="", help="only launches whose kernel or case has this in its name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    options = parser.parse_args()
    table: list[dict[str, Any]] = []
    failed = False
    print(f"triton {triton.__version__}", flush=True)
    with ProcessPoolExecutor(options.jobs) as pool:
        for gpu in options.gpu:
            if options.part == "quick" and gpu not in QUICK_GPUS:
                continue
            # each share records all launches again, which is quick beside their compilation
            shares = range(options.jobs)
            futures = [pool.submit(check, gpu, options.part, options.match, i, options.jobs) for i in shares]
            reports = [future.result() for future in futures]
            whole = reports[0]._replace(rows=[row for of_share in reports for row in of_share.rows])
            failed |= not print_report(gpu, whole)
            table += whole.rows
    if options.csv:
        write_csv(options.csv, table)
    return int(failed)


def print_report(gpu: str, report: Report) -> bool:
    """Print how many kernels run on a GPU, those that do not, and what the ops refuse; return whether all is well."""
    rows, refused, missing = report
    if not rows:
        print(f"{gpu}: nothing was compiled: no launch matches, or the ops refuse all calls ({len(refused)})")
    else:
        largest, limit = max(row["shared"] for row in rows), GPUS[gpu].shared_memory
        failed = [row for row in rows if not row["fits"]]
        print(f"{gpu}: {len(rows)} kernels, the largest needs {largest / 1024:.1f} of {limit >> 10} KB;"
              f" {len(failed)} do not run, {len(refused)} calls refused by name")  # fmt: skip
    for row in rows:
        if not row["fits"]:
            reason = row["error"] or f"needs {row['shared'] / 1024:.1f} KB"
            print(f"  {row['kernel']}, {row['type']}, head dim {row['head_dim']} ({row['case']}): {reason}")
    for line in missing:
        print(f"  missing: {line}")
    for line in refused:
        print(f"  refused: {line}", flush=True)
    return bool(rows) and not missing and all(row["fits"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
