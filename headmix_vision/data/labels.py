"""One rule for labels: a label is a whole number from 0, or a name; samples without one are refused or left out."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, NamedTuple

from headmix_vision.console import say_once
from headmix_vision.errors import InputError

MOST_CLASSES = 1_000_000
DIGITS = 6
"""Most digits of a class's number in a text; longer ones are names."""
_MISSING = ("", "None", "null", "<NA>")
_HINT = "mend them, or leave them out by --skip-unlabelled (in training --data.skip_unlabelled true)"


class LabelRule(NamedTuple):
    """Treatment of samples without a valid label.

    Args:
        needed: Whether labels are needed at all; where they are not, a sample without one has class 0.
        skip: Leave samples without a valid label out, and count them, instead of refusing them.
    """

    needed: bool = True
    skip: bool = False


class Labels(NamedTuple):
    """The labels of the samples that stay.

    Args:
        kept: Their numbers among all samples.
        targets: The class of each, a number.
        class_names: The names of all classes, in the order of their numbers.
    """

    kept: list[int]
    targets: list[int]
    class_names: list[str]


def fault_of(label: object, num_classes: int = MOST_CLASSES) -> str | None:
    """Return the fault of a label; None for a valid one.

    Args:
        label: A number or a text, of whatever type a file has it. A text is a name unless it reads as a number.
        num_classes: Numbers must be below.
    """
    if isinstance(label, str):
        label = _read(label)
        if isinstance(label, str):
            return None
    if label is None or (isinstance(label, Real) and math.isnan(label)):
        return "has no label"
    if not isinstance(label, Integral):
        return f"has the label {label}, which is neither a whole number nor a name"
    if label < 0:
        return f"has the label {label}, which is below 0"
    return None if label < num_classes else f"has the label {label}, which is above {num_classes - 1}"


@lru_cache(maxsize=4096)
def _read(text: str) -> str | float | None:
    """Return the name or number that a text is, None where it says that there is none."""
    text = text.strip()
    if text in _MISSING:
        return None
    try:
        number = float(text)
    except ValueError:
        return text
    if not text.lstrip("-").isdecimal():
        return number
    return text if text.isdecimal() and len(text) > DIGITS else int(text)


def check_label(label: Any, name: str, num_classes: int = MOST_CLASSES) -> int:
    """Return a label that is a number; InputError, with the sample's name, for one that is not valid."""
    fault = fault_of(label, num_classes)
    if fault is not None:
        raise InputError(f"{name} {fault}")
    return int(label)


def keep_labelled(
    labels: Sequence[object], name: Callable[[int], str], place: object, what: str, skip: bool, most: int = MOST_CLASSES
) -> list[int]:
    """Number the samples whose label is valid; say how many others are left out.

    Args:
        labels: The label of each sample.
        name: Names a sample by its number.
        place: Where they lie, for messages.
        what: What to call a sample.
        skip: As in `LabelRule`.
        most: Numbers must be below.

    Raises:
        InputError: A sample without a valid label that is not to be left out, or none with one.
    """
    faults = {number: fault for number, label in enumerate(labels) if (fault := fault_of(label, most))}
    if faults and not (skip and len(faults) < len(labels)):
        number, fault = next(iter(faults.items()))
        hint = "" if skip else f": {_HINT}"
        count = f"{len(faults)} of {len(labels)} {what}s of {place} have no valid label"
        raise InputError(f"{name(number)} {fault}; {count}{hint}")
    if faults:
        counted = Counter(fault.removeprefix("has ").partition(",")[0] for fault in faults.values())
        kinds = ", ".join(f"{kind} {count}" for kind, count in counted.most_common(3))
        say_once(f"{place}: {len(labels) - len(faults)} {what}s, {len(faults)} without a valid label left out: {kinds}")
    return [number for number in range(len(labels)) if number not in faults]


def number_labels(
    labels: Sequence[Any],
    name: Callable[[int], str],
    place: object,
    rule: LabelRule,
    what: str = "image",
    class_names: Sequence[str] | None = None,
) -> Labels:
    """Number the classes of samples.

    Args:
        labels: The label of each sample: numbers of classes, or names.
        name: Names a sample by its number.
        place: Where they lie, for messages.
        rule: What is done with samples that have no valid label.
        what: What to call a sample.
        class_names: The names of all classes; the labels' names in natural order when None.

    Raises:
        InputError: As `keep_labelled`.
    """
    are_names = any(isinstance(label, str) for label in labels)
    most = MOST_CLASSES if are_names or class_names is None else len(class_names)
    if rule.needed:
        kept = keep_labelled(labels, name, place, what, rule.skip, most)
        valid = [labels[number] for number in kept]
    else:
        kept = list(range(len(labels)))
        valid = [None if fault_of(label, most) else label for label in labels]
    if class_names is None:
        found: set[Any] = {*valid} - {None}
        class_names = sorted(found, key=natural_order) if are_names else number_names(found)
    numbers = {label: number for number, label in enumerate(class_names)} if are_names else {}
    return Labels(kept, [0 if label is None else int(numbers.get(label, label)) for label in valid], list(class_names))


def number_names(targets: Iterable[int]) -> list[str]:
    """Class names `0`, `1`, ... up to the largest target."""
    return [str(number) for number in range(max((int(target) for target in targets), default=-1) + 1)]


def natural_order(label: str) -> tuple[int, int | str]:
    """Put numbers in the order of numbers, and before other labels."""
    return (0, int(label)) if label.isdecimal() else (1, label)
