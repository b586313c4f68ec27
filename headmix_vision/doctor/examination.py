"""The examination of a machine: each kernel family against float64, times against softmax, and a verdict."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from headmix_vision.console import available_memory
from headmix_vision.doctor.attention_times import (
    GRIDS,
    MHLA,
    SOFTMAX,
    Times,
    TokenTimes,
    batch_of,
    compile_attention,
    time_attention,
)
from headmix_vision.doctor.cases import CASES_OF_A_KERNEL, FAMILIES, Case, check, draw
from headmix_vision.doctor.judging import Error
from headmix_vision.doctor.lines import judge_findings
from headmix_vision.doctor.machine import Machine, read_machine
from headmix_vision.doctor.report import FamilyFinding, Report, WrongCase
from headmix_vision.doctor.workers import Failure, Task, Workers
from headmix_vision.files.reading import num_cores

_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_TORCH_TYPES = (torch.float32,)
_NUMBERS_PER_HEAD_DIM = 3 * CASES_OF_A_KERNEL  # of cases, see `draw`
_SHARE_OF_CHECKS = 0.65  # of the time, if the kernels are timed as well
_PROCESS_BYTES = 3 << 29  # memory of a process with a GPU, on the host and on the GPU
_MOST_PROCESSES = 16


@dataclass(frozen=True)
class Request:
    """Request for an examination.

    Attributes:
        device: the device.
        seed: which cases are drawn.
        cases: number of cases of each family.
        limit_s: time of the whole examination.
        started_s: when it began, on the clock of `time.monotonic`.
    """

    device: torch.device
    seed: int = 0
    cases: int = 10
    limit_s: float = 55.0
    started_s: float | None = None


Finding: TypeAlias = Machine | FamilyFinding | TokenTimes


def examine(request: Request, found: Callable[[Finding], object] = lambda finding: None) -> Report:
    """Examine a device.

    Args:
        request: what to examine.
        found: called with each finding as soon as it is there.
    """
    started_s = time.monotonic() if request.started_s is None else request.started_s
    machine = read_machine(request.device)
    found(machine)
    checked_s = started_s + request.limit_s * (1 if machine.gpu is None else _SHARE_OF_CHECKS)
    families: list[FamilyFinding] = []
    times: list[TokenTimes] = []
    with Workers(_number_of_processes(request.device), request.device) as workers:
        for family in _check_families(request, machine, workers, checked_s):
            families.append(family)
            found(family)
        right = not any(family.wrong for family in families if family.family.startswith(MHLA))
        if machine.gpu is not None and right:
            for at in _time_attention(request.device, machine, workers, started_s + request.limit_s):
                times.append(at)
                found(at)
    verdict, wrong = judge_findings(machine, families, times)
    seconds = round(time.monotonic() - started_s, 1)
    return Report(machine, request.seed, tuple(families), tuple(times), verdict, wrong, seconds)


def _number_of_processes(device: torch.device) -> int:
    """Return how many processes check cases side by side; each compiles kernels on a core of its own."""
    if device.type == "cpu":
        return 0
    rooms = (available_memory(place) // _PROCESS_BYTES for place in (device, torch.device("cpu")))
    return max(1, min(_MOST_PROCESSES, num_cores(), *rooms))


def _check_families(request: Request, machine: Machine, workers: Workers, deadline_s: float) -> Iterator[FamilyFinding]:
    """Check cases of all families in turn until a time, and yield each family when its cases are done."""
    kernels = machine.why_no_kernels is None
    impl, types = ("triton", _KERNEL_TYPES) if kernels else ("torch", _TORCH_TYPES)
    first = request.seed * request.cases
    # Numbers this far apart draw head dims of another range each.
    drawn = [
        draw(family, i * _NUMBERS_PER_HEAD_DIM, types[i % len(types)], small=not kernels)
        for i in range(first, first + request.cases)
        for family in FAMILIES
    ]
    # Compiled first, as there is one chain of them for each number of tokens.
    tasks = [*_compile_tasks(request.device, machine)] if kernels else []
    tasks += [Task(check, (case, request.device, impl)) for case in drawn]
    outcomes: dict[str, dict[str, Any]] = {family: {} for family in FAMILIES}

    def finding(family: str) -> FamilyFinding:
        cases = [case for case in drawn if case.family == family]
        return _summarise(family, impl, [(case, outcomes[family].get(case.line)) for case in cases])

    told = []
    for task, outcome in workers.run(tasks, deadline_s):
        if task.function is check:
            case = task.arguments[0]
            outcomes[case.family][case.line] = outcome
            if len(outcomes[case.family]) == request.cases:
                told.append(case.family)
                yield finding(case.family)
    yield from (finding(family) for family in FAMILIES if family not in told)


def _summarise(family: str, impl: str, results: Sequence[tuple[Case, Any]]) -> FamilyFinding:
    """Summarise cases with their errors, their `Failure`, or None where they did not end in time."""
    errors, wrong, left_out = [], [], 0
    for case, outcome in results:
        if outcome is None or (isinstance(outcome, Failure) and outcome.lacks_memory):
            left_out += 1
        elif isinstance(outcome, Failure):
            wrong.append(WrongCase(case.line, str(case), failure=outcome.reason))
        else:
            errors += outcome
            bad = tuple(error for error in outcome if error.bad)
            wrong += [WrongCase(case.line, str(case), bad)] if bad else []
    types = tuple(dict.fromkeys(str(case.dtype).removeprefix("torch.") for case, _ in results))
    worst = max(errors, key=_share, default=None)
    return FamilyFinding(family, impl, types, len(results) - left_out, left_out, worst, tuple(wrong))


def _share(error: Error) -> float:
    return math.inf if math.isnan(error.error) else error.error / error.budget


def _compile_tasks(device: torch.device, machine: Machine) -> Iterator[Task]:
    for tokens, batch in _batches(machine).items():
        yield Task(compile_attention, (tokens, batch, device, _timed_type(device)))


def _batches(machine: Machine) -> dict[int, int]:
    assert machine.gpu is not None
    return {tokens: batch_of(tokens, machine.gpu.processors) for tokens in GRIDS}


def _timed_type(device: torch.device) -> torch.dtype:
    with torch.cuda.device(device):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def _time_attention(
    device: torch.device, machine: Machine, workers: Workers, deadline_s: float
) -> Iterator[TokenTimes]:
    """Time all columns one by one until a time, and yield each number of tokens when its columns are done."""
    columns, dtype = (MHLA, *SOFTMAX), _timed_type(device)
    found = {
        tokens: TokenTimes(tokens, batch, str(dtype).removeprefix("torch."), columns)
        for tokens, batch in _batches(machine).items()
    }
    tasks = [
        Task(time_attention, (column, at.tokens, at.batch, device, dtype))
        for at in found.values()
        for column in columns
    ]
    for task, outcome in workers.run(tasks, deadline_s, most=1):
        column, tokens, *_ = task.arguments
        found[tokens] = _with_column(found[tokens], column, outcome)
        if column == columns[-1]:
            yield found.pop(tokens)
    yield from found.values()


def _with_column(at: TokenTimes, column: str, outcome: Times | Failure | None) -> TokenTimes:
    """Add the times of a column; None means that PyTorch has no such backend here."""
    if isinstance(outcome, Failure) and (outcome.lacks_memory or column != MHLA):
        return at
    at = replace(at, left_out=tuple(name for name in at.left_out if name != column))
    if isinstance(outcome, Failure):
        return replace(at, failed=outcome.reason)
    if column == MHLA:
        return replace(at, mhla=outcome)
    return at if outcome is None else replace(at, softmax={**at.softmax, column: outcome})
