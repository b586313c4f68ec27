"""Scores of clips: Fréchet and kernel distance with controls of motion, and the judge of moving digits.

Shapes: N clips, B of a batch, C channels, T frames, H and W pixels, S pixels of a digit's side, D features.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headmix_vision.data.clip_frames import DEFAULT_CLIP, ClipConfig
from headmix_vision.data.datasets.moving_digits import DIRECTIONS, FRAME_RATE, SPEEDS, STRAIGHT_S
from headmix_vision.data.labels import LabelRule
from headmix_vision.data.seeding import derive_seed
from headmix_vision.errors import InputError, check_counts, check_numbers
from headmix_vision.evaluation.clip_features import (
    ClipExtractor,
    digit_size,
    find_digits,
    of_frames,
    open_clip_extractor,
)
from headmix_vision.evaluation.extractors import FeatureExtractor, open_extractor
from headmix_vision.evaluation.frechet import Gaussian, Moments, frechet_distance
from headmix_vision.evaluation.sample_sets import (
    UNLABELLED,
    ClipSampling,
    SampleSet,
    check_complete,
    check_side_options,
    open_samples,
)
from headmix_vision.evaluation.score_request import KID_SUBSETS, FvdRequest, MovingDigitsRequest
from headmix_vision.evaluation.scores import (
    MAX_SUBSETS,
    Progress,
    Scorer,
    check_sizes,
    kernel_distance,
    kid_subset_size,
)
from headmix_vision.processes import Processes

SEES_MOTION = 5.0  # times the distance of two halves: what freezing the clips must do to it
_HALVES, _SHUFFLE = 2, 3  # what random numbers are for
ON_COURSE = 0.9  # share of a clip's windows in time


@dataclass(frozen=True)
class Protocol:
    """Sampling of published numbers.

    Args:
        real: Sampling of real clips.
        fake: Sampling of generated ones.
        about: Whose protocol it is.
    """

    real: ClipSampling
    fake: ClipSampling
    about: str


PROTOCOLS = {
    "stylegan-v": Protocol(
        ClipSampling(offset="random", count=2048),
        ClipSampling(count=2048),
        "fvd2048_16f of StyleGAN-V: 16 frames in a row, real ones from anywhere in each of the first 2,048 videos,"
        " generated ones from the first on; no mirroring",
    ),
    "latte": Protocol(
        ClipSampling(stride=3, offset="random", count=2048, choice="random"),
        ClipSampling(count=2048, choice="random"),
        "fvd2048_16f of Latte's copy: as StyleGAN-V's, but 2,048 videos by chance, and of the real ones every third"
        " frame; its --mirror has no effect, for the metric sets it back",
    ),
}


def freeze(clips: Tensor, numbers: Sequence[int], seed: int) -> Tensor:
    """Repeat the first frame of clips [B, C, T, H, W]."""
    return clips[:, :, :1].expand_as(clips).contiguous()


def shuffle(clips: Tensor, numbers: Sequence[int], seed: int) -> Tensor:
    """Bring the frames of clips [B, C, T, H, W] into an order by chance, by the seed and the number of the clip."""
    generators = [torch.Generator().manual_seed(derive_seed(seed, _SHUFFLE, number)) for number in numbers]
    orders = [torch.randperm(clips.shape[2], generator=generator) for generator in generators]
    return torch.stack([clip[:, order] for clip, order in zip(clips, orders, strict=True)])


CHANGES: dict[str, Callable[[Tensor, Sequence[int], int], Tensor]] = {"frozen": freeze, "shuffled": shuffle}


@dataclass
class ClipFeatures:
    """The features of a side.

    Args:
        clips: float64 [N, D].
        frames: Moments of the features of all frames.
        changed: float64 [number of changed clips, D], by the name of the change.
    """

    clips: Tensor
    frames: Moments
    changed: dict[str, Tensor] = field(default_factory=dict)


def fvd(
    scorer: Scorer,
    real: SampleSet,
    fake: SampleSet,
    *,
    frame_extractor: FeatureExtractor | None = None,
    subsets: int = KID_SUBSETS,
    subset_size: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Compute the Fréchet video distance of Unterthiner et al. (2018), and what to hold it against.

    Beside it stand the kernel distance of the same features (`kvd`, as KID; Luo et al. 2024, JEDi, find it steady with
    a sixth of the clips), and the Fréchet distance of single frames (`frame_fid`), where the extractor has features of
    frames or `frame_extractor` makes them.

    The controls have real clips on both sides, see `draw_halves`: against the other half as it is, with each clip
    frozen in its first frame, and with frames in an order by chance.

    Args:
        scorer: Extractor of clips.
        real: Real clips.
        fake: Generated clips.
        frame_extractor: Extractor of images.
        subsets: Number of random subsets of the kernel distance.
        subset_size: Clips in each; 1,000, or all of the smaller side if it has fewer, when None.
        seed: Of the halves, and of the order of frames.

    Returns:
        `scores` by name, and `controls`.

    Raises:
        InputError: Fewer than four real clips, a subset larger than a side, sizes that differ, or too few frames.
    """
    check_clips(real, fake)
    subset_size = kid_subset_size(min(len(real), len(fake)), subset_size)
    kept, changed = draw_halves(real, seed)
    half = len(kept)
    generated = _features(scorer, fake, frame_extractor)
    original = _features(scorer, real, frame_extractor, frozenset(changed.tolist()), seed)

    mean, std = kernel_distance(original.clips, generated.clips, subsets, subset_size)
    scores = {"fvd": _frechet(original.clips, generated.clips), "kvd_mean": mean, "kvd_std": std}
    if original.frames.count:
        scores["frame_fid"] = frechet_distance(original.frames.gaussian(), generated.frames.gaussian())
    others = {"halves": original.clips[changed.sort().values], **original.changed}
    controls = {name: _frechet(original.clips[kept], other) for name, other in others.items()}
    sizes = (subsets, min(subset_size, half))
    kernels = {name: kernel_distance(original.clips[kept], other, *sizes)[0] for name, other in others.items()}
    ratio = controls["frozen"] / controls["halves"] if controls["halves"] else float("inf")
    return {
        "scores": {**scores, "kvd_subsets": subsets, "kvd_subset_size": subset_size},
        "controls": {
            "clips_of_a_side": half,
            "fvd": controls,
            "kvd_mean": kernels,
            "frozen_to_halves": ratio,
            "blind_to_motion": ratio < SEES_MOTION,
        },
    }


def loop_closure(clips: SampleSet, batch_size: int = 16) -> float:
    """Compare the step from the last frame of a clip back to its first with the steps within the clip.

    Returns:
        Median over clips of the mean absolute change in that step, as a multiple of the mean over the other steps: 1
        for a loop, more for clips that end elsewhere. A clip that stands still counts as 1.
    """
    found = []
    for batch in clips.batches(batch_size):
        frames = batch.float().transpose(1, 2).flatten(2)  # [B, T, D]
        within = frames.diff(dim=1).abs().mean((1, 2))
        back = (frames[:, 0] - frames[:, -1]).abs().mean(1)
        found.append(torch.where(within > 0, back / within, 1.0))
    return torch.cat(found).median().item()


def draw_halves(clips: SampleSet, seed: int) -> tuple[Tensor, Tensor]:
    """Draw two disjoint halves of clips, equally many clips each; a clip and its mirror image stay together.

    Args:
        clips: The clips, N of them.
        seed: Seed of the choice.

    Returns:
        Numbers of the clips of each half, int64 [N // 2], fewer where that is odd and clips are mirrored.
    """
    copies = clips.copies
    generator = torch.Generator().manual_seed(derive_seed(seed, _HALVES))
    order = torch.randperm(len(clips) // copies, generator=generator)[:, None] * copies + torch.arange(copies)
    half = len(order) // 2
    return order[:half].flatten(), order[half : 2 * half].flatten()


def check_clips(real: SampleSet, fake: SampleSet) -> None:
    """Check that two sides can be compared.

    Raises:
        InputError: Fewer than four real clips, or sizes that differ.
    """
    check_sizes(real, fake)
    if len(real) < 4:
        raise InputError(f"{real.description['source']} has {len(real)} clips, two halves need at least 4")


def _features(
    scorer: Scorer,
    clips: SampleSet,
    frame_extractor: FeatureExtractor | None,
    changed: frozenset[int] = frozenset(),
    seed: int = 0,
) -> ClipFeatures:
    def of_batch(first: int, batch: Tensor, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {name: values for name, values in outputs.items() if name != "logits"}
        if frame_extractor is not None:
            made["frames"] = frame_extractor(batch.transpose(1, 2).flatten(0, 1))["features"]
        numbers = [number for number in range(first, first + len(batch)) if number in changed]
        for name, change in CHANGES.items() if numbers else ():
            some = change(batch[[number - first for number in numbers]], numbers, seed)
            made[name] = scorer.extractor(some)["features"]
        return made

    joined: dict[str, list[Tensor]] = {}
    frames = Moments()
    for made in scorer.of_all(clips, of_batch):
        if "frames" in made:
            frames.update(made.pop("frames").to(scorer.extractor.device))
        for name, values in made.items():
            joined.setdefault(name, []).append(values)
    features = {name: torch.cat(values).double() for name, values in joined.items()}
    return ClipFeatures(features.pop("features"), frames, features)


def _frechet(first: Tensor, second: Tensor) -> float:
    fewest, width = min(len(first), len(second)), first.shape[1]
    if fewest <= width:
        warnings.warn(
            f"{fewest} clips for {width} features: the covariance is singular and the distance depends strongly on the"
            " number of clips",
            stacklevel=2,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same, of images
        return frechet_distance(Gaussian.of_features(first), Gaussian.of_features(second))


def check_judged(size: Sequence[int], frame_rate: float) -> None:
    """Raise InputError for clips (T, H, W) that are too small, or end before the first turn can come."""
    frames, height, width = size
    digit_size(height, width)
    steps = _straight_steps(frame_rate)
    if frames <= steps:
        raise InputError(f"clips have {frames} frames, their motion is judged from {steps + 1} on")


def _straight_steps(frame_rate: float) -> int:
    return max(1, int(STRAIGHT_S * frame_rate + 1e-6))


def judge_motion(places: Tensor, directions: Tensor, free: tuple[int, int], frame_rate: float) -> tuple[Tensor, Tensor]:
    """Find which digits start in the direction that was asked for, and which keep their course.

    A digit starts as asked if, before the first turn can come, it has gone half of the slowest way, further along the
    direction than across. It keeps its course if in 90 % of all windows of that time it neither leaves its line nor
    outruns the fastest digit nor stops, and goes half of the slowest way, but at the borders, where it may turn round.

    Args:
        places: Tracks, [B, T, 2], rows and columns in pixels.
        directions: Indices into `DIRECTIONS`, int64 [B].
        free: Rows and columns that a digit can move by: H - S and W - S.
        frame_rate: Frames a second.

    Returns:
        Two masks, bool [B].
    """
    steps = _straight_steps(frame_rate)
    axis = (directions < 2).long()  # columns for right and left
    sign = 1 - 2 * (directions % 2)
    along = places.gather(2, axis[:, None, None].expand(-1, places.shape[1], 1))[..., 0]
    across = places.gather(2, (1 - axis)[:, None, None].expand(-1, places.shape[1], 1))[..., 0]
    room = torch.tensor(free, device=places.device, dtype=places.dtype)[axis][:, None]
    slowest, fastest = (speed * steps / frame_rate * room for speed in SPEEDS)
    tolerance = 1 + room / 32  # a pixel of rounding, and of a window with noise

    moved = along[:, steps:] - along[:, :-steps]
    drifted = (across[:, steps:] - across[:, :-steps]).abs()
    first = moved[:, 0] * sign
    starts = (first >= slowest[:, 0] / 2) & (first > drifted[:, 0])
    window = along.unfold(1, steps + 1, 1)
    margin = fastest / steps + tolerance
    turns = (window.amin(2) < margin) | (window.amax(2) > room - margin)
    gone = along.diff(dim=1).abs().unfold(1, steps, 1).sum(2)
    on_course = (drifted <= tolerance) & (gone <= fastest + tolerance) & (gone >= slowest / 4)
    on_course &= turns | (moved.abs() >= slowest / 2)
    return starts, on_course.float().mean(1) >= ON_COURSE


class DigitJudge(ClipExtractor):
    """Extractor that recognises and follows the digit of each frame: the judge's raw findings as `features`.

    `features` are float32 [B, 3T]: T digits, T rows, T columns.

    Args:
        classifier: An extractor whose classifier knows ten digits.

    Raises:
        InputError: A classifier of something else.
    """

    def __init__(self, classifier: FeatureExtractor) -> None:
        if classifier.num_classes != 10:
            raise InputError(
                f"{classifier.description['name']} knows {classifier.num_classes} classes, the judge needs ten digits"
            )
        self.classifier = classifier
        self.mode, self.num_classes, self.device = classifier.mode, classifier.num_classes, classifier.device
        self.description = {**classifier.description, "features": "digit and place in each frame"}

    def extract(self, samples: Tensor) -> dict[str, Tensor]:
        tracks = find_digits(samples)
        digits = of_frames(self.classifier, tracks.crops, "logits").argmax(2)
        return {"features": torch.cat([digits, *tracks.places.unbind(2)], 1)}


def judge(scorer: Scorer, clips: SampleSet, labels: Tensor, frame_rate: float = FRAME_RATE) -> dict[str, float]:
    """Score clips of moving digits against their labels.

    Args:
        scorer: A scorer with a `DigitJudge`.
        clips: The clips, of one length.
        labels: digit * 4 + direction, int64 [N].
        frame_rate: Frames a second.

    Returns:
        `digit`: share of frames with the digit that was asked for. `motion`: share of clips that start in the direction
        asked for and keep their course; `direction` and `course` are its two parts.

    Raises:
        InputError: Not one label a clip, labels out of range, or clips too short or too small to judge.
    """
    check_labels(clips, labels)
    check_judged(clips.size, frame_rate)
    frames, height, width = clips.size
    size = digit_size(height, width)
    digits, *places = scorer.collect(clips).float().split(frames, 1)
    starts, keeps = judge_motion(
        torch.stack(places, 2), labels % len(DIRECTIONS), (height - size, width - size), frame_rate
    )
    right = digits == (labels // len(DIRECTIONS))[:, None]
    shares = {"digit": right, "motion": starts & keeps, "direction": starts, "course": keeps}
    return {name: share.double().mean().item() for name, share in shares.items()}


def check_labels(clips: SampleSet, labels: Tensor) -> None:
    """Raise InputError unless there is one label of `moving_digits` a clip."""
    if len(labels) != len(clips):
        raise InputError(f"there are {len(labels)} labels for {len(clips)} clips")
    low, high, classes = int(labels.min()), int(labels.max()), 10 * len(DIRECTIONS)
    if low < 0 or high >= classes:
        raise InputError(f"labels are {low} to {high}, moving digits have 0 to {classes - 1}")


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
