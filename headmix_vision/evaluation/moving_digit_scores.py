"""Judge of clips of `moving_digits`: whether digit and motion are those that the label asks for.

Shapes: B clips, C channels, T frames, H and W pixels, S pixels of a digit's side.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headmix_vision.data.datasets.moving_digits import DIRECTIONS, FRAME_RATE, SPEEDS, STRAIGHT_S
from headmix_vision.errors import InputError
from headmix_vision.evaluation.clip_features import ClipExtractor, of_frames
from headmix_vision.evaluation.digit_tracks import digit_size, find_digits
from headmix_vision.evaluation.extractors import FeatureExtractor
from headmix_vision.evaluation.sample_sets import SampleSet
from headmix_vision.evaluation.scores import Scorer

ON_COURSE = 0.9  # share of a clip's windows in time


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
