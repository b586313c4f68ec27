"""Fréchet and kernel distance of clips, with controls that tell whether the features see motion at all.

Shapes: N clips, B of a batch, C channels, T frames, H and W pixels, D features.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headmix_vision.data.seeding import derive_seed
from headmix_vision.errors import InputError
from headmix_vision.evaluation.clip_sampling import ClipSampling
from headmix_vision.evaluation.extractors import FeatureExtractor
from headmix_vision.evaluation.frechet import Moments, frechet_distance
from headmix_vision.evaluation.metrics import KID_SUBSETS
from headmix_vision.evaluation.sample_sets import SampleSet
from headmix_vision.evaluation.scores import Scorer, check_sizes, kernel_distance, kid_subset_size

SEES_MOTION = 5.0  # times the distance of two halves: what freezing the clips must do to it
_HALVES, _SHUFFLE = 2, 3  # what random numbers are for


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
    moments = (Moments(), Moments())
    for side, features in zip(moments, (first, second), strict=True):
        side.update(features)
    fewest, width = min(len(first), len(second)), first.shape[1]
    if fewest <= width:
        warnings.warn(
            f"{fewest} clips for {width} features: the covariance is singular and the distance depends strongly on the"
            " number of clips",
            stacklevel=2,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same, of images
        return frechet_distance(moments[0].gaussian(), moments[1].gaussian())
