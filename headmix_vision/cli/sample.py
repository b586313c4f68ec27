"""`headmix sample`: draw samples from a generator."""

import argparse
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from headmix_vision.console import OneLineParser, add_options, importing, let_signals_end, one_line_errors
from headmix_vision.errors import InputError

if TYPE_CHECKING:
    from headmix_vision.sampling.sample_request import SampleRequest

T = TypeVar("T")


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; wrong input ends the process with one line and exit status 2."""
    with one_line_errors():
        request = _request(vars(_parser().parse_args(args)))
    with importing("sample"):
        from headmix_vision.sampling.sample_job import sample
    with one_line_errors():
        try:
            with _termination_as_exception():
                sampled = sample(request)
        except (KeyboardInterrupt, Terminated) as end:
            let_signals_end()
            print("\ninterrupted; the same command continues", file=sys.stderr)
            sys.exit(128 + (signal.SIGINT if isinstance(end, KeyboardInterrupt) else signal.SIGTERM))
        if sampled is not None:
            print(sampled)


class Terminated(BaseException):
    """End of the process on SIGTERM, as on Ctrl-C, so that temporary files and the lock go."""


@contextmanager
def _termination_as_exception() -> Iterator[None]:
    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    from headmix_vision.sampling.sample_request import EXTEND_SAMPLES, OF_VIDEOS, SampleRequest

    parser = OneLineParser(prog="headmix sample", description="Draw samples from a trained generator.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("images", "videos"):
        command = kinds.add_parser(
            kind,
            help=f"{kind} of given classes",
            description=f"Draw {kind} into a folder. Sample i depends on the seed and on i alone. The same command"
            " again continues a half-finished folder.",
        )
        add_options(
            command,
            SampleRequest,
            leave_out=("kind", *(() if kind == "videos" else OF_VIDEOS)),
            **{name: {"nargs": None, "type": str} for name in ("classes", "guidance_interval", "size")},
            extend={"nargs": "?", "const": EXTEND_SAMPLES, "metavar": "CLIP"},
        )
    return parser


def _request(options: dict[str, Any]) -> "SampleRequest":
    """Make the request that the words ask for.

    Raises:
        InputError: Words that stand for no numbers.
    """
    from headmix_vision.sampling.sample_request import SampleRequest

    interval, size, classes = (options[name] for name in ("guidance_interval", "size", "classes"))
    if isinstance(interval, str):
        options["guidance_interval"] = _pair(interval, float, "--guidance-interval")
    if size is not None:
        options["size"] = _size(size)
    if classes not in (None, "balanced"):
        parts = [part.strip() for part in classes.split(",")]
        if not all(re.fullmatch(r"-?[0-9]+", part) for part in parts):
            raise InputError(f"--classes must be 'balanced' or numbers such as 0,3,7, got {classes!r}")
        options["classes"] = tuple(map(int, parts))
    return SampleRequest(**options)


def _pair(text: str, kind: Callable[[str], T], option: str) -> tuple[T, T]:
    try:
        first, second = map(kind, text.split(","))
    except ValueError:
        raise InputError(f"{option} must be two numbers with a comma, got {text!r}") from None
    return first, second


def _size(text: str) -> tuple[int, int]:
    """Read a side, or height and width, as 256,384 or 256x384."""
    sides = re.split("[,x]", text)
    if len(sides) > 2 or not all(re.fullmatch(r" *-?[0-9]+ *", side) for side in sides):
        raise InputError(f"--size must be one number, or height and width such as 256x384, got {text!r}")
    return int(sides[0]), int(sides[-1])
