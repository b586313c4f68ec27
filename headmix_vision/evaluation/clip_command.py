"""The commands that score clips: `headmix-evaluate fvd` and `headmix-evaluate moving-digits`."""

import argparse
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from headmix_vision.checks import check_counts, check_numbers
from headmix_vision.console.processes import Processes
from headmix_vision.data.clips import DEFAULT_CLIP, ClipConfig
from headmix_vision.data.datasets.moving_digits import FRAME_RATE
from headmix_vision.data.labels import LabelRule
from headmix_vision.errors import InputError
from headmix_vision.evaluation.clip_features import ClipExtractor, open_clip_extractor
from headmix_vision.evaluation.clips import ClipSampling, ClipSet, open_clips
from headmix_vision.evaluation.extractors import FeatureExtractor, open_extractor
from headmix_vision.evaluation.fvd import PROTOCOLS, SEES_MOTION, Protocol, check_clips, fvd
from headmix_vision.evaluation.moving_digits import DigitJudge, check_judged, check_labels, judge
from headmix_vision.evaluation.sample_folders import check_complete
from headmix_vision.evaluation.sample_sets import UNLABELLED, check_side_options
from headmix_vision.evaluation.scores import KID_SUBSETS, MAX_SUBSETS, Progress, Scorer, check_sizes, kid_subset_size

_OFFSETS = ("first", "random")


def add_fvd(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `fvd`."""
    add = parser.add_argument
    add("--real", required=True, help="real clips: a folder, an npz file or a data set")
    add("--fake", required=True, help="generated clips, likewise")
    add("--features", default="i3d", help="i3d, its TorchScript file (.pt), digits[:PATH], or an image extractor (i3d)")
    add("--features-sha256", metavar="HASH", help="SHA-256 of the TorchScript file, without which it is not opened")
    add("--frame-features", help="image extractor of frame_fid, as for images (that of --features)")
    add("--protocol", default="stylegan-v", choices=PROTOCOLS, help="how clips are sampled (stylegan-v)")
    add("--frames", type=int, default=16, help="frames of a clip (16)")
    add("--count", type=int, help="at most so many clips of a side (that of the protocol, 2048)")
    for side in ("real", "fake"):
        add(f"--{side}-stride", type=int, help=f"take every so manieth frame of {side} clips")
        add(f"--{side}-offset", choices=_OFFSETS, help=f"where {side} clips begin in their files")
    add("--mirror-real", action="store_true", help="score real clips a second time, mirrored")
    add("--skip-short", action="store_true", help="leave out, and count, clips of too few frames")
    add("--seed", type=int, default=0, help="of offsets, of the choice of clips and of the controls (0)")
    add("--subsets", type=int, default=KID_SUBSETS, help=f"random subsets of the kernel distance ({KID_SUBSETS})")
    add("--subset-size", type=int, help="clips in each (1000, or as many as there are)")


def add_moving_digits(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `moving-digits`."""
    add = parser.add_argument
    add("--fake", required=True, help="generated clips with labels: a folder of samples or an npz file")
    add("--real", default="moving_digits", help="real clips, for the judge's ceiling (moving_digits)")
    add("--features", default="digits", help="a classifier of the ten digits: digits, a run or a weights file")
    add("--count", type=int, help="at most so many clips of a side (as many as there are fake ones)")
    add("--fps", type=float, help=f"frames a second of the clips (those the samples were drawn at, or {FRAME_RATE:g})")


def run_fvd(options: argparse.Namespace, progress: Progress, processes: Processes) -> dict[str, Any]:
    """Scores clips as the options say; of a dry run, describes what would be scored."""
    extractor = open_clip_extractor(options.features, options.device, options.features_sha256)
    extractor.check_frames(options.frames)
    frame_extractor = None
    if options.frame_features is not None:
        frame_extractor = open_extractor(options.frame_features, options.device)
        if frame_extractor.mode != extractor.mode:
            raise InputError(
                f"--frame-features {options.frame_features} takes images of mode {frame_extractor.mode}, --features"
                f" {options.features} clips of mode {extractor.mode}"
            )
    check_counts(1, MAX_SUBSETS, **{"kid subsets": options.subsets})
    protocol, changes = _protocol(options)
    scorer = Scorer(extractor, options.batch_size, progress, processes)
    fake = _open(options, "fake", extractor, protocol.fake)
    real = _open(options, "real", extractor, protocol.real, fake)
    check_side_options(options.root, options.background, options.real, options.fake)
    check_clips(real, fake)
    kid_subset_size(min(len(real), len(fake)), options.subset_size)
    _warn(options, real, fake)
    described = {"real": real.description, "fake": fake.description}
    if options.dry_run:
        return {"dry_run": _plan(described, extractor, options)}
    result = fvd(
        scorer,
        real,
        fake,
        frame_extractor=frame_extractor,
        subsets=options.subsets,
        subset_size=options.subset_size,
        seed=options.seed,
    )
    return {
        **result,
        "protocol": {"name": options.protocol, "about": protocol.about, "changed": changes},
        **described,
        "extractor": extractor.description,
        **({} if frame_extractor is None else {"frame_extractor": frame_extractor.description}),
        "seed": options.seed,
        "printed": _controls(result["controls"]),
    }


def run_moving_digits(options: argparse.Namespace, progress: Progress, processes: Processes) -> dict[str, Any]:
    """Judges clips as the options say; of a dry run, describes what would be judged."""
    if options.fps is not None:
        check_numbers(0.01, 10_000, **{"--fps": options.fps})
    extractor = DigitJudge(open_extractor(options.features, options.device))
    scorer = Scorer(extractor, options.batch_size, progress, processes)
    sampling = ClipSampling(frames=None, count=options.count)
    fake = _open(options, "fake", extractor, sampling, labels=LabelRule())
    frame_rate = options.fps or (fake.description["frame_rate"] or [FRAME_RATE])[0]
    sampling = ClipSampling(frames=fake.size[0], count=len(fake))
    real = _open(options, "real", extractor, sampling, fake, ClipConfig(frame_rate), LabelRule())
    check_side_options(options.root, options.background, options.real, options.fake)
    check_sizes(real, fake)
    sides = {"fake": fake, "real": real}
    labels = {name: clips.clips.clips.labels(clips.clips.chosen) for name, clips in sides.items()}
    check_judged(fake.size, frame_rate)
    for name, clips in sides.items():
        check_labels(clips, labels[name])
    described = {name: clips.description for name, clips in sides.items()}
    if options.dry_run:
        return {"dry_run": _plan(described, extractor, options)}
    scores, ceiling = (judge(scorer, clips, labels[name], frame_rate) for name, clips in sides.items())
    shown = " · ".join(f"{name} {value:.6g}" for name, value in ceiling.items())
    return {
        "scores": scores,
        "ceiling": ceiling,
        **described,
        "extractor": extractor.description,
        "frame_rate": frame_rate,
        "printed": [f"the same of real clips, the judge's ceiling: {shown}"],
    }


def _protocol(options: argparse.Namespace) -> tuple[Protocol, dict[str, Any]]:
    """Applies the options to the protocol; returns with it what they changed, by side and setting."""
    protocol = PROTOCOLS[options.protocol]
    changes: dict[str, Any] = {}
    sides: dict[str, ClipSampling] = {}
    for side in ("real", "fake"):
        published: ClipSampling = getattr(protocol, side)
        given = {
            "frames": options.frames,
            "count": options.count,
            "stride": getattr(options, f"{side}_stride"),
            "offset": getattr(options, f"{side}_offset"),
            "mirror": True if side == "real" and options.mirror_real else None,
        }
        asked = {name: value for name, value in given.items() if value is not None}
        sides[side] = replace(published, **asked, skip_short=options.skip_short, seed=options.seed)
        changes |= {f"{side} {name}": value for name, value in asked.items() if value != asdict(published)[name]}
    return replace(protocol, real=sides["real"], fake=sides["fake"]), changes


def _open(
    options: argparse.Namespace,
    side: str,
    extractor: FeatureExtractor,
    sampling: ClipSampling,
    like: ClipSet | None = None,
    clip: ClipConfig = DEFAULT_CLIP,
    labels: LabelRule = UNLABELLED,
) -> ClipSet:
    grid = None if like is None else (like.size[-2], like.size[-1])
    place = getattr(options, side)
    check_complete(place, f"--{side}", options.incomplete)
    return open_clips(
        place, extractor.mode, sampling, options.image_size, options.root, grid, clip, options.background, labels
    )


def _warn(options: argparse.Namespace, real: ClipSet, fake: ClipSet) -> None:
    """Warns of what makes a score other than the published ones."""
    asked = PROTOCOLS[options.protocol].real.count if options.count is None else options.count
    counts = {side: len(clips.clips.chosen) for side, clips in (("real", real), ("fake", fake))}
    if set(counts.values()) != {asked}:
        warnings.warn(f"{counts['real']} real and {counts['fake']} fake clips, {asked} were asked for", stacklevel=1)
    shortest, longest = fake.description["frames_of_files"]
    if shortest != longest:
        warnings.warn(
            f"fake clips have {shortest} to {longest} frames, {options.frames} of each are scored", stacklevel=1
        )
    rates = [clips.description["frame_rate"] for clips in (real, fake)]
    if None not in rates and rates[0] != rates[1]:
        shown = [f"{low:g}" if low == high else f"{low:g} to {high:g}" for low, high in rates]
        warnings.warn(f"real clips are scored at {shown[0]} frames a second, fake ones at {shown[1]}", stacklevel=1)


def _plan(described: dict[str, dict[str, Any]], extractor: ClipExtractor, options: argparse.Namespace) -> str:
    sides = " and ".join(f"{side} {about['source']} ({about['count']} clips)" for side, about in described.items())
    target = "" if options.out is None else f", write {options.out}"
    return f"would score {sides} by {extractor.description['name']} on {options.device}{target}"


def _controls(controls: dict[str, Any]) -> list[str]:
    """Writes the controls in lines for a person."""
    values = controls["fvd"]
    ratio = controls["frozen_to_halves"]
    shown = f"halves {values['halves']:.6g} · frozen {values['frozen']:.6g} · shuffled {values['shuffled']:.6g}"
    lines = [f"controls, fvd of {controls['clips_of_a_side']} real clips a side: {shown}"]
    if controls["blind_to_motion"]:
        lines.append(
            f"blind to motion: freezing the real clips makes {ratio:.3g} times the distance of two halves of them, less"
            f" than {SEES_MOTION:g}; score more clips or other features"
        )
    return lines


@dataclass(frozen=True)
class ClipMetric:
    """Describes a metric of clips to the command line.

    Args:
        add_options: Adds its options to a parser.
        run: Scores clips as the options say, shows the progress, and shares the work among processes.
        help: What it measures.
    """

    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Progress, Processes], dict[str, Any]]
    help: str


CLIP_METRICS = {
    "fvd": ClipMetric(add_fvd, run_fvd, "Fréchet video distance, kernel distance and controls, of clips"),
    "moving-digits": ClipMetric(
        add_moving_digits,
        run_moving_digits,
        "share of frames and clips of moving digits with their label's digit and motion",
    ),
}
