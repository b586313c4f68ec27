"""The machine that is examined: versions, the compiler of the kernels, the GPU, and the evidence for such GPUs."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

import headmix_vision
from headmix_vision.ops.dispatch import why_no_kernel_takes
from headmix_vision.ops.hardware import default_assembler, find_assembler

LOCAL = "local"  # marks fields that a report leaves out
_PROGRAM_LIMIT_S = 5
# Settings of the environment that change which kernels run, or how they are compiled.
_SETTINGS = (
    "DISABLE_MMA_V5",
    "DISABLE_PTXAS_OPT",
    "HEADMIX_VISION_COMPILED",
    "HEADMIX_VISION_REPLAY",
    "HEADMIX_VISION_UNTESTED_GPUS",
    "PTXAS_OPTIONS",
    "TRITON_INTERPRET",
    "TRITON_PTXAS_BLACKWELL_PATH",
    "TRITON_PTXAS_PATH",
)


MEASURED = "measured"
COMPILED = "compiled, not run"
UNKNOWN = "unknown"


class KnownGpu(NamedTuple):
    """Evidence for one architecture.

    Attributes:
        status: `MEASURED`, `COMPILED` or `UNKNOWN`.
        cards: GPUs of this architecture.
    """

    status: str
    cards: str


KNOWN_GPUS = {
    "9.0": KnownGpu(MEASURED, "H100, H200"),
    "8.0": KnownGpu(COMPILED, "A100"),
    "8.6": KnownGpu(COMPILED, "RTX 30"),
    "8.9": KnownGpu(COMPILED, "RTX 40, L40S"),
    "10.0": KnownGpu(COMPILED, "B200"),
    "10.3": KnownGpu(COMPILED, "B300"),
    "11.0": KnownGpu(COMPILED, "Thor"),
    "12.0": KnownGpu(COMPILED, "RTX 50"),
    "12.1": KnownGpu(COMPILED, "DGX Spark"),
    "gfx942": KnownGpu(COMPILED, "MI300"),
    "gfx950": KnownGpu(COMPILED, "MI350"),
    "gfx1100": KnownGpu(COMPILED, "RX 7900"),
}
MEANINGS = {
    MEASURED: "the kernels are tested and timed on such a GPU",
    COMPILED: "the kernels compile for such a GPU, and nobody has reported a run",
    UNKNOWN: "the kernels have neither been run on nor compiled for such a GPU",
}


def known_gpu(architecture: str) -> KnownGpu:
    """Return what is known of an architecture, as "9.0" or "gfx942"."""
    return KNOWN_GPUS.get(architecture, KnownGpu(UNKNOWN, ""))


@dataclass(frozen=True)
class Ptxas:
    """The assembler of the kernels for the GPU.

    Attributes:
        path: the program.
        version: its full version, as "12.8.93".
        bundled: whether it is the one that Triton brings.
    """

    path: str = field(metadata={LOCAL: True})
    version: str
    bundled: bool


@dataclass(frozen=True)
class Gpu:
    """The GPU.

    Attributes:
        name: its name.
        architecture: compute capability, as "9.0", or AMD's name, as "gfx942".
        shared_memory_kib: largest shared memory of a program, where PyTorch tells it.
        processors: number of multiprocessors.
        memory_gib: memory of the device.
        status: what is known of the kernels on such GPUs, see `KNOWN_GPUS`.
        cards: GPUs of the same architecture.
    """

    name: str
    architecture: str
    shared_memory_kib: int | None
    processors: int
    memory_gib: float
    status: str
    cards: str


@dataclass(frozen=True)
class Machine:
    """Versions and devices.

    Attributes:
        versions: version of each part by name, None for what is absent.
        settings: environment variables that change the kernels, paths left out.
        ptxas: assembler of the GPU; None without a GPU of NVIDIA or without Triton.
        gpu: the GPU; None on a CPU.
        why_no_gpu: why PyTorch has no GPU, where none was found.
        why_no_kernels: why the kernels cannot run on the device; None where they can.
    """

    versions: dict[str, str | None]
    settings: dict[str, str]
    ptxas: Ptxas | None
    gpu: Gpu | None
    why_no_gpu: str | None
    why_no_kernels: str | None


def read_machine(device: torch.device) -> Machine:
    """Read what the results on a device depend on."""
    gpu = _read_gpu(device) if device.type == "cuda" else None
    settings = {name: os.environ[name] for name in _SETTINGS if os.environ.get(name)}
    return Machine(
        versions=_versions(),
        settings={name: "a path" if os.sep in value else value for name, value in settings.items()},
        ptxas=find_ptxas(gpu.architecture) if gpu is not None and torch.version.hip is None else None,
        gpu=gpu,
        why_no_gpu=None if torch.cuda.is_available() else _why_no_gpu(),
        why_no_kernels=_why_no_kernels(device),
    )


def _versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "headmix_vision": headmix_vision.__version__,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": _cudnn_version(),
        "driver": _driver_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _triton_version() -> str | None:
    try:
        import triton
    except Exception:  # it is absent, or does not fit the system
        return None
    return triton.__version__


def _cudnn_version() -> str | None:
    number = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    if number is None or torch.version.hip is not None:
        return None
    large = 10_000 if number >= 90_000 else 1_000
    return f"{number // large}.{number % large // 100}.{number % 100}"


def _driver_version() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    said = _output_of([program, "--query-gpu=driver_version", "--format=csv,noheader"])
    found = re.search(r"^\d+\.[\d.]+", said)
    return found[0] if found else None


def _output_of(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_PROGRAM_LIMIT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _why_no_gpu() -> str:
    try:
        torch.cuda.init()
    except Exception as error:  # each build of PyTorch has its own way to say it
        return str(error).partition("\n")[0].strip() or type(error).__name__
    return "PyTorch finds none"


def _why_no_kernels(device: torch.device) -> str | None:
    if device.type == "cpu":  # on which Triton's interpreter could run them, which is not a test of numerics
        return "the kernels need a GPU"
    return why_no_kernel_takes(torch.empty(0, device=device), "a tensor")


def _read_gpu(device: torch.device) -> Gpu:
    about: Any = torch.cuda.get_device_properties(device)
    amd = getattr(about, "gcnArchName", "").partition(":")[0] if torch.version.hip is not None else ""
    architecture = amd or f"{about.major}.{about.minor}"
    shared_memory = getattr(about, "shared_memory_per_block_optin", None)
    known = known_gpu(architecture)
    return Gpu(
        name=about.name,
        architecture=architecture,
        shared_memory_kib=None if shared_memory is None else shared_memory >> 10,
        processors=about.multi_processor_count,
        memory_gib=round(about.total_memory / 2**30, 1),
        status=known.status,
        cards=known.cards,
    )


def find_ptxas(architecture: str) -> Ptxas | None:
    """Find the assembler of the kernels for a compute capability, as "9.0"."""
    major, minor = map(int, architecture.split("."))
    try:
        import triton

        default = default_assembler((major, minor))
        found = find_assembler() if (major, minor) == (9, 0) else default
    except Exception:  # no Triton, or none of its programs runs
        return None
    path = (found or default).path
    version = re.search(r"\bV(\d[\d.]*)", _output_of([path, "--version"]))
    bundled = Path(path).resolve().is_relative_to(Path(triton.__file__).resolve().parent)
    return Ptxas(path, version[1] if version else "unknown", bundled)
