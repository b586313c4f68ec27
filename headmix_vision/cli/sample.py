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

from headmix_vision.console.terminal import OneLineParser, importing
from headmix_vision.errors import InputError, let_signals_end, literals, one_line_errors

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
    parser = OneLineParser(prog="headmix sample", description="Draw samples from a trained generator.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("images", "videos"):
        command = kinds.add_parser(
            kind,
            help=f"{kind} of given classes",
            description=f"Draw {kind} into a folder. Sample i depends on the seed and on i alone. The same command"
            " again continues a half-finished folder.",
        )
        _add_options(command, kind)
        if kind == "videos":
            _add_clip_options(command)
    return parser


def _add_options(parser: argparse.ArgumentParser, kind: str) -> None:
    from headmix_vision.sampling.sample_request import DEFAULT_GUIDANCE, SCHEDULERS, SampleRequest

    add = parser.add_argument
    add("--model", required=True, help="run directory, .ckpt file or directory of an exported pipeline")
    add("--checkpoint", help="checkpoint of a run directory: last, or a file (last)")
    add("--raw", action="store_true", help="the weights being trained, not their EMA")
    add("--num", type=int, default=64, help=f"number of {kind} (%(default)s)")
    add("--classes", help="labels that take turns, such as 0,3,7, or balanced: all of them (balanced)")
    add("--steps", type=int, default=50, help="sampling steps (%(default)s)")
    add("--scheduler", help=f"{', '.join(SCHEDULERS)} (the scheduler of the model)")
    spacings = literals(SampleRequest, "spacing")
    add("--spacing", choices=spacings, help="timesteps of ddim and ddpm (ddim: trailing; ddpm: linspace, as DiT's)")
    add("--guidance", type=float, help=f"scale, 1 for none ({DEFAULT_GUIDANCE}, or 1 if the model has no choice)")
    about = "noise levels within which guidance acts, 0 is data, 1 noise (%(default)s)"
    add("--guidance-interval", default="0,1", help=about)
    channels = literals(SampleRequest, "guidance_channels")
    add("--guidance-channels", choices=channels, default="all", help="channels that are guided (%(default)s)")
    add("--size", help="height,width in pixels, or one number (the size in training)")
    add("--seed", type=int, default=0, help="seed of all samples (%(default)s)")
    at_once = 64 if kind == "images" else 8
    add("--batch-size", type=int, default=at_once, help=f"{kind} at a time and process (%(default)s)")
    add("--out", help="folder to write, or to go on with (samples/<name of the run>)")
    add("--npz", action="store_true", help="also write samples.npz, as ADM's evaluation takes it")
    add("--vae", help="another autoencoder than the recorded one: directory or hub id")
    add("--dry-run", action="store_true", help="open and check everything, say what would be drawn, and write nothing")
    add("--device", help="for example cuda:1 (a GPU if there is one)")
    types = literals(SampleRequest, "dtype")
    add("--dtype", choices=types, default="float32", help="type of the network's weights (%(default)s)")


def _add_clip_options(parser: argparse.ArgumentParser) -> None:
    from headmix_vision.sampling.sample_request import EXTEND_SAMPLES, SampleRequest

    add = parser.add_argument
    add("--frames", type=int, help="frames of a video (as in training); positions go on beyond the length of training")
    add("--frame-rate", "--fps", type=float, help="frames a second (as in training)")
    add("--first-frame", metavar="IMAGE", help="the first frame of all videos")
    add(
        "--extend",
        nargs="?",
        const=EXTEND_SAMPLES,
        metavar="CLIP",
        help="draw window by window until --frames, each going on from the last frames before it; from a clip if given",
    )
    add("--overlap", type=int, help="frames of a window that come from the window before it (half of the window)")
    about = "guidance of windows that go on from frames, 0 to leave out the class (as --guidance)"
    add("--extend-guidance", type=float, help=about)
    formats = literals(SampleRequest, "format")
    add("--format", choices=formats, default="mp4", help="files to watch, besides the lossless ones (%(default)s)")


def _request(options: dict[str, Any]) -> "SampleRequest":
    """Make the request that the words ask for.

    Raises:
        InputError: Words that stand for no numbers.
    """
    from headmix_vision.sampling.sample_request import SampleRequest

    interval, size = options.pop("guidance_interval"), options.pop("size")
    return SampleRequest(
        **options | {"classes": _classes(options["classes"])},
        guidance_interval=_pair(interval, float, "--guidance-interval"),
        size=None if size is None else _pair(size if "," in size else f"{size},{size}", int, "--size"),
    )


def _classes(text: str | None) -> Any:
    if text is None or text == "balanced":
        return text
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"-?[0-9]+", part) for part in parts):
        raise InputError(f"--classes must be 'balanced' or numbers such as 0,3,7, got {text!r}")
    return tuple(map(int, parts))


def _pair(text: str, kind: Callable[[str], T], option: str) -> tuple[T, T]:
    try:
        first, second = map(kind, text.split(","))
    except ValueError:
        raise InputError(f"{option} must be two numbers with a comma, got {text!r}") from None
    return first, second
