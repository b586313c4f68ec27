"""The lines that a user reads of each finding."""

from __future__ import annotations

from collections.abc import Iterator

from headmix_vision.doctor.attention_times import HEAD_DIM, HEADS, PARTS, TokenTimes
from headmix_vision.doctor.known_gpus import MEANINGS
from headmix_vision.doctor.machine import Gpu, Machine
from headmix_vision.doctor.report import FamilyFinding

_SHOWN = 3  # wrong cases of a family
_TIMES = "{:>8}{:>7}{:>18}{:>18}{:>16}  {}"


def lines_of(finding: Machine | FamilyFinding | TokenTimes, first: bool) -> Iterator[str]:
    """Write a finding, with a title above the first of its kind."""
    if isinstance(finding, Machine):
        yield from _machine(finding)
    elif isinstance(finding, FamilyFinding):
        if first:
            yield from ("", f"{'Kernels' if finding.impl == 'triton' else 'PyTorch implementation'} against float64")
        yield from _family(finding)
    else:
        if first:
            heads = f"{HEADS} heads of {HEAD_DIM} dims"
            yield from ("", f"Times of attention, {finding.dtype}, {heads}: forward / forward with backward")
            yield _TIMES.format("tokens", "batch", "MHLA, ms", "softmax, ms", "speed of MHLA", "softmax by")
        yield _times(finding)


def _machine(machine: Machine) -> Iterator[str]:
    yield "Versions"
    for name, version in machine.versions.items():
        if version is not None:
            yield f"  {name:15} {version}"
    if machine.ptxas is not None:
        origin = "brought by Triton" if machine.ptxas.bundled else "chosen by the environment"
        yield f"  {'ptxas':15} {machine.ptxas.version}, {origin}: {machine.ptxas.path}"
    for name, value in machine.settings.items():
        yield f"  {name} = {value}"
    yield ""
    yield "GPU"
    if machine.gpu is not None:
        yield from _gpu(machine.gpu)
        yield (
            f"  The kernels do not run here: {machine.why_no_kernels}"
            if machine.why_no_kernels
            else "  The kernels run here."
        )
    else:
        yield f"  none: {machine.why_no_gpu}" if machine.why_no_gpu else "  not asked for: this examines the CPU"


def _gpu(gpu: Gpu) -> Iterator[str]:
    capability = gpu.architecture if gpu.architecture.startswith("gfx") else f"compute capability {gpu.architecture}"
    shared = "" if gpu.shared_memory_kib is None else f", {gpu.shared_memory_kib} KB of shared memory"
    yield f"  {gpu.name}, {capability}, {gpu.processors} multiprocessors{shared}, {gpu.memory_gib:g} GiB"
    yield f"  {gpu.cards or 'This architecture'}: {gpu.status} ({MEANINGS[gpu.status]})"


def _family(family: FamilyFinding) -> Iterator[str]:
    cases = f"{family.checked} of {family.checked + family.left_out} cases"
    state = "WRONG" if family.wrong else "right" if family.checked else "not checked"
    worst = family.worst
    largest = "" if worst is None else f"largest error {worst.error:.1e} ({worst.name}), budget {worst.budget:.0e}"
    yield f"  {family.family:14} {state:11} {cases:15} {largest:52} {', '.join(family.types)}".rstrip()
    yield from (f"    {case}" for case in family.wrong[:_SHOWN])
    if len(family.wrong) > _SHOWN:
        yield f"    and {len(family.wrong) - _SHOWN} more, which --json writes"


def _times(at: TokenTimes) -> str:
    if at.failed:
        return f"{at.tokens:>8,}{at.batch:>7}  MHLA failed: {at.failed}"
    best = [at.best_softmax(part) for part in PARTS]
    own = "-" if at.mhla is None else f"{at.mhla.forward_ms:.3f} / {at.mhla.both_ms:.3f}"
    softmax = " / ".join("-" if found is None else f"{found[1]:.3f}" for found in best)
    speed = " / ".join("-" if (x := at.speed(part)) is None else f"{x:.2f}x" for part in PARTS)
    names = " / ".join(
        dict.fromkeys(found[0].removesuffix("_ATTENTION").lower() for found in best if found is not None)
    )
    left_out = f", left out: {', '.join(at.left_out)}" if at.left_out else ""
    launched = "" if at.mhla is None or at.mhla.graph else ", MHLA without CUDA graphs"
    return _TIMES.format(f"{at.tokens:,}", at.batch, own, softmax, speed, f"{names}{left_out}{launched}")
