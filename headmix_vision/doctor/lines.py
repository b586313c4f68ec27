"""The lines that a user reads: of each finding, and of the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headmix_vision.doctor.attention_times import HEAD_DIM, HEADS, PARTS, TokenTimes
from headmix_vision.doctor.machine import MEANINGS, MEASURED, Gpu, Machine
from headmix_vision.doctor.report import FamilyFinding

SEND = "open an issue with the file that --json writes"
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


def judge_findings(
    machine: Machine, families: Sequence[FamilyFinding], times: Sequence[TokenTimes]
) -> tuple[tuple[str, ...], bool]:
    """Return the verdict, a sentence each, and whether anything is wrong."""
    wrong = any(family.wrong for family in families) or any(at.failed for at in times)
    return (*_on_results(machine, families), *_on_time_left(families), *_on_times(machine, times)), wrong


def _on_results(machine: Machine, families: Sequence[FamilyFinding]) -> Iterator[str]:
    kernels = machine.why_no_kernels is None
    place = "on this CPU" if machine.gpu is None else "on this GPU"
    wrong = [family.family for family in families if family.wrong]
    right = [family.family for family in families if not family.wrong and family.checked]
    cases = sum(family.checked for family in families)
    if machine.gpu is not None and not kernels:
        yield f"The kernels do not run here: {machine.why_no_kernels}."
    if wrong and kernels:
        yield (
            f"The kernels of {', '.join(wrong)} are wrong {place}: do not use them. Set impl='torch' (in models"
            f" core_args={{'impl': 'torch'}}), and {SEND}."
        )
    elif wrong:
        yield f"The PyTorch implementation of {', '.join(wrong)} is wrong {place}: do not use it, and {SEND}."
    elif cases and kernels:
        yield f"The kernels are right {place}: {cases} cases of {len(right)} families, forward and backward."
    elif cases:
        subject = "No GPU: the" if machine.why_no_gpu is not None else "The"
        yield f"{subject} PyTorch implementation is used, and is right: {cases} cases of {len(right)} families."
    if machine.gpu is None and machine.why_no_gpu is not None and machine.versions["driver"] is not None:
        yield f"nvidia-smi finds a driver, but PyTorch cannot use the GPU: {machine.why_no_gpu}."
    if kernels and not wrong and machine.gpu is not None and machine.gpu.status != MEASURED:
        yield f"Nobody has reported a run on such a GPU yet: please {SEND}."


def _on_time_left(families: Sequence[FamilyFinding]) -> Iterator[str]:
    left_out = {family.family: family.left_out for family in families if family.left_out}
    if left_out:
        counts = ", ".join(f"{count} of {name}" for name, count in left_out.items())
        yield (
            f"Time or memory did not suffice for {sum(left_out.values())} cases ({counts}). Run the command again:"
            " compiled kernels are kept."
        )


def _on_times(machine: Machine, times: Sequence[TokenTimes]) -> Iterator[str]:
    for at in times:
        if at.failed:
            yield f"MHLA failed when it was timed at {at.tokens:,} tokens: {at.failed}; {SEND}."
    kernels = machine.why_no_kernels is None
    if kernels:
        warned = dict.fromkeys(text for at in times if at.mhla for text in at.mhla.warnings)
        yield from (f"MHLA warned when it was timed: {text}" for text in warned)
    timed = [at for at in times if at.speed("both_ms") is not None]
    if not timed:
        return
    form = "MHLA" if kernels else "the PyTorch implementation of MHLA"
    inference, training = _pays_from(timed, "forward_ms"), _pays_from(timed, "both_ms")
    found = {"inference": inference, "training": training}
    parts = [f"in {name} from {tokens:,} tokens" for name, tokens in found.items() if tokens is not None]
    never = [f"not in {name}" for name, tokens in found.items() if tokens is None]
    if not parts:
        what = "does not pay"
    elif inference == training:
        what = f"pays from {training:,} tokens"
    else:
        what = f"pays {' and '.join([*parts, *never])}"
    yield f"{form} {what} on this card. Timed: {', '.join(f'{at.tokens:,}' for at in timed)} tokens."


def _pays_from(timed: Sequence[TokenTimes], part: str) -> int | None:
    """Return the least number of tokens from which MHLA is the faster one at all numbers that were timed."""
    least = None
    for at in sorted(timed, key=lambda at: -at.tokens):
        if (at.speed(part) or 0.0) <= 1:
            break
        least = at.tokens
    return least
