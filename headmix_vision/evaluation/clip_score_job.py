"""The job of scoring clips, from a request to a result."""

import warnings
from dataclasses import asdict, replace
from typing import Any

from headmix_vision.console.processes import Processes
from headmix_vision.data.clip_frames import DEFAULT_CLIP, ClipConfig
from headmix_vision.data.datasets.moving_digits import FRAME_RATE
from headmix_vision.data.labels import LabelRule
from headmix_vision.errors import InputError, check_counts, check_numbers
from headmix_vision.evaluation.clip_features import ClipExtractor, open_clip_extractor
from headmix_vision.evaluation.clip_sampling import ClipSampling
from headmix_vision.evaluation.extractors import FeatureExtractor, open_extractor
from headmix_vision.evaluation.fvd import PROTOCOLS, SEES_MOTION, Protocol, check_clips, fvd
from headmix_vision.evaluation.moving_digit_scores import DigitJudge, check_judged, check_labels, judge
from headmix_vision.evaluation.sample_folders import check_complete
from headmix_vision.evaluation.sample_sets import UNLABELLED, SampleSet, check_side_options, open_samples
from headmix_vision.evaluation.score_request import FvdRequest, MovingDigitsRequest
from headmix_vision.evaluation.scores import MAX_SUBSETS, Progress, Scorer, check_sizes, kid_subset_size


def run_fvd(request: FvdRequest, device: str, progress: Progress, processes: Processes) -> dict[str, Any]:
    """Score the clips of a request; in a dry run, describe what would be scored."""
    extractor = open_clip_extractor(request.features, device, request.features_sha256)
    extractor.check_frames(request.frames)
    frame_extractor = None
    if request.frame_features is not None:
        frame_extractor = open_extractor(request.frame_features, device)
        if frame_extractor.mode != extractor.mode:
            raise InputError(
                f"--frame-features {request.frame_features} takes images of mode {frame_extractor.mode}, --features"
                f" {request.features} clips of mode {extractor.mode}"
            )
    check_counts(1, MAX_SUBSETS, **{"kid subsets": request.subsets})
    protocol, changes = _protocol(request)
    scorer = Scorer(extractor, request.batch_size, progress, processes)
    fake = _open(request, "fake", extractor, protocol.fake)
    real = _open(request, "real", extractor, protocol.real, fake)
    check_side_options(request.root, request.background, request.real, request.fake)
    check_clips(real, fake)
    kid_subset_size(min(len(real), len(fake)), request.subset_size)
    _warn(request, real, fake)
    described = {"real": real.description, "fake": fake.description}
    if request.dry_run:
        return {"dry_run": _plan(described, extractor, request, device)}
    result = fvd(
        scorer,
        real,
        fake,
        frame_extractor=frame_extractor,
        subsets=request.subsets,
        subset_size=request.subset_size,
        seed=request.seed,
    )
    return {
        **result,
        "protocol": {"name": request.protocol, "about": protocol.about, "changed": changes},
        **described,
        "extractor": extractor.description,
        **({} if frame_extractor is None else {"frame_extractor": frame_extractor.description}),
        "seed": request.seed,
        "printed": _controls(result["controls"]),
    }


def run_moving_digits(
    request: MovingDigitsRequest, device: str, progress: Progress, processes: Processes
) -> dict[str, Any]:
    """Judge the clips of a request; in a dry run, describe what would be judged."""
    if request.frame_rate is not None:
        check_numbers(0.01, 10_000, **{"--frame-rate": request.frame_rate})
    extractor = DigitJudge(open_extractor(request.features, device))
    scorer = Scorer(extractor, request.batch_size, progress, processes)
    sampling = ClipSampling(frames=None, count=request.count)
    fake = _open(request, "fake", extractor, sampling, labels=LabelRule())
    frame_rate = request.frame_rate or (fake.description["frame_rate"] or [FRAME_RATE])[0]
    sampling = ClipSampling(frames=fake.size[0], count=len(fake))
    real = _open(request, "real", extractor, sampling, fake, ClipConfig(frame_rate), LabelRule())
    check_side_options(request.root, request.background, request.real, request.fake)
    check_sizes(real, fake)
    sides = {"fake": fake, "real": real}
    labels = {name: clips.labels() for name, clips in sides.items()}
    check_judged(fake.size, frame_rate)
    for name, clips in sides.items():
        check_labels(clips, labels[name])
    described = {name: clips.description for name, clips in sides.items()}
    if request.dry_run:
        return {"dry_run": _plan(described, extractor, request, device)}
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


def _protocol(request: FvdRequest) -> tuple[Protocol, dict[str, Any]]:
    """Apply a request to its protocol; return with it what was changed, by side and setting."""
    protocol = PROTOCOLS[request.protocol]
    changes: dict[str, Any] = {}
    sides: dict[str, ClipSampling] = {}
    for side in ("real", "fake"):
        published: ClipSampling = getattr(protocol, side)
        given = {
            "frames": request.frames,
            "count": request.count,
            "stride": getattr(request, f"{side}_stride"),
            "offset": getattr(request, f"{side}_offset"),
            "mirror": True if side == "real" and request.mirror_real else None,
        }
        asked = {name: value for name, value in given.items() if value is not None}
        sides[side] = replace(published, **asked, skip_short=request.skip_short, seed=request.seed)
        changes |= {f"{side} {name}": value for name, value in asked.items() if value != asdict(published)[name]}
    return replace(protocol, real=sides["real"], fake=sides["fake"]), changes


def _open(
    request: FvdRequest | MovingDigitsRequest,
    side: str,
    extractor: FeatureExtractor,
    sampling: ClipSampling,
    like: SampleSet | None = None,
    clip: ClipConfig = DEFAULT_CLIP,
    labels: LabelRule = UNLABELLED,
) -> SampleSet:
    grid = None if like is None else (like.size[-2], like.size[-1])
    place = getattr(request, side)
    check_complete(place, f"--{side}", request.incomplete)
    common = (request.image_size, request.root, request.background, labels)
    return open_samples(place, extractor.mode, *common, sampling=sampling, grid=grid, clip=clip)


def _warn(request: FvdRequest, real: SampleSet, fake: SampleSet) -> None:
    """Warn of what makes a score other than the published ones."""
    asked = PROTOCOLS[request.protocol].real.count if request.count is None else request.count
    counts = {side: len(clips.chosen) for side, clips in (("real", real), ("fake", fake))}
    if set(counts.values()) != {asked}:
        warnings.warn(f"{counts['real']} real and {counts['fake']} fake clips, {asked} were asked for", stacklevel=1)
    shortest, longest = fake.description["frames_of_files"]
    if shortest != longest:
        warnings.warn(
            f"fake clips have {shortest} to {longest} frames, {request.frames} of each are scored", stacklevel=1
        )
    rates = [clips.description["frame_rate"] for clips in (real, fake)]
    if None not in rates and rates[0] != rates[1]:
        shown = [f"{low:g}" if low == high else f"{low:g} to {high:g}" for low, high in rates]
        warnings.warn(f"real clips are scored at {shown[0]} frames a second, fake ones at {shown[1]}", stacklevel=1)


def _plan(
    described: dict[str, dict[str, Any]],
    extractor: ClipExtractor,
    request: FvdRequest | MovingDigitsRequest,
    device: str,
) -> str:
    sides = " and ".join(f"{side} {about['source']} ({about['count']} clips)" for side, about in described.items())
    target = "" if request.out is None else f", write {request.out}"
    return f"would score {sides} by {extractor.description['name']} on {device}{target}"


def _controls(controls: dict[str, Any]) -> list[str]:
    """Return the controls in lines for a person."""
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
