"""The verdict: sentences that a user can act on, and whether anything is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headmix_vision.doctor.attention_times import TokenTimes
from headmix_vision.doctor.known_gpus import MEASURED
from headmix_vision.doctor.machine import Machine
from headmix_vision.doctor.report import FamilyFinding

SEND = "open an issue with the file that --json writes"


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
