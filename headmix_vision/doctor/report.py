"""Findings of an examination, and their form in JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from headmix_vision.doctor.attention_times import PARTS, TokenTimes
from headmix_vision.doctor.judging import Error
from headmix_vision.doctor.machine import LOCAL, Machine
from headmix_vision.doctor.workers import without_names

FORMAT = 1  # of the JSON


@dataclass(frozen=True)
class WrongCase:
    """A case with a result beyond its budget, or a case that failed.

    Attributes:
        line: name from which the case can be drawn again.
        settings: shapes, options and memory layouts.
        errors: results beyond their budgets.
        failure: why it failed.
    """

    line: str
    settings: str
    errors: tuple[Error, ...] = ()
    failure: str | None = None

    def __str__(self) -> str:
        return f"{self.line}: {self.failure or ', '.join(map(str, self.errors))}"


@dataclass(frozen=True)
class FamilyFinding:
    """The cases of one kernel family.

    Attributes:
        family: op and form.
        impl: implementation of the op: "triton" or "torch".
        types: types of the inputs.
        checked: number of cases that ran.
        left_out: number of cases for which time or memory did not suffice.
        worst: result with the largest error relative to its budget.
        wrong: cases that are wrong.
    """

    family: str
    impl: str
    types: tuple[str, ...]
    checked: int
    left_out: int
    worst: Error | None
    wrong: tuple[WrongCase, ...]


@dataclass(frozen=True)
class Report:
    """All findings.

    Attributes:
        machine: versions and devices.
        seed: which cases were drawn.
        families: findings by kernel family.
        times: times by number of tokens; empty where nothing was timed.
        verdict: what follows for the user, a sentence each.
        wrong: whether anything is wrong.
        seconds: how long it took.
    """

    machine: Machine
    seed: int
    families: tuple[FamilyFinding, ...]
    times: tuple[TokenTimes, ...]
    verdict: tuple[str, ...]
    wrong: bool
    seconds: float

    def to_json(self) -> str:
        """Write the findings without folders, and without the names of the user and the host."""
        found = _plain(self)
        for at, entry in zip(self.times, found["times"], strict=True):
            entry["speed_over_softmax"] = {part: at.speed(part) for part in PARTS}
        return json.dumps({"format": FORMAT, **found}, indent=1, allow_nan=False) + "\n"


def _plain(x: Any) -> Any:
    """Return what JSON can hold: mappings for dataclasses and named tuples, text for NaN and infinity."""
    if isinstance(x, str):
        return without_names(x)
    if is_dataclass(x):
        return {f.name: _plain(getattr(x, f.name)) for f in fields(x) if not f.metadata.get(LOCAL)}
    if hasattr(x, "_asdict"):
        x = x._asdict()
    if isinstance(x, dict):
        return {name: _plain(value) for name, value in x.items()}
    if isinstance(x, (tuple, list)):
        return [_plain(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
