"""Tasks of models that draw: pictures or clips of a data set, how they are opened, and by which scores.

A model is trained on pixels or on cached latents, and scored on pixels.

C channels, T frames, H and W pixels, of latents places.
"""

import argparse
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from headmix_lab.scoring import RememberingScorer
from headmix_vision.console import default_device
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import Source, SplitRequest
from headmix_vision.data.datasets.latents import LatentShards
from headmix_vision.errors import InputError
from headmix_vision.evaluation.clip_features import open_clip_extractor
from headmix_vision.evaluation.clip_scores import fvd, loop_closure
from headmix_vision.evaluation.extractors import FeatureExtractor, open_extractor
from headmix_vision.evaluation.frechet import frechet_distance
from headmix_vision.evaluation.sample_sets import ClipSampling, SampleSet, open_samples
from headmix_vision.evaluation.scores import (
    accuracy,
    check_judge,
    fid,
    kernel_distance,
    kid_subset_size,
    neighbours,
    precision_recall,
)

TRAIN, VALIDATION, TEST = "train", "validation", "test"
_KID_SUBSETS = 100
_JUDGED = {
    "precision_percent": "precision, %",
    "recall_percent": "recall, %",
    "top1_percent": "as its label, %",
    "balanced_percent": "the same, balanced, %",
    "nearer_percent": "nearer to training, %",
    "copied_percent": "copied, %",
}


class Task(NamedTuple):
    """A data set that models draw after, and how it is scored.

    Args:
        dataset: The data set, which is also the judge's.
        recipe: Name of the recipe of training.
        channels: C of a model's input.
        root: Place of the data.
        clips: Whether they are clips.
        latents: Folder of the latents that a model is trained on; None for pixels.
        grid: (T, H, W) or (H, W) of latents.
        autoencoder: The autoencoder of the latents.
        keys: What the caches of latents say of themselves.
    """

    dataset: str
    recipe: str
    channels: int
    root: str | None = None
    clips: bool = False
    latents: Path | None = None
    grid: tuple[int, ...] = ()
    autoencoder: str = ""
    keys: tuple[str, ...] = ()

    @property
    def scores(self) -> dict[str, str]:
        """Headers of the scores by column; guidance is chosen by the first one."""
        if not self.clips:
            return {"fid": "FID", **_JUDGED}
        distances = {
            "fvd": "FVD",
            "kvd": "KVD x 1000",
            "frame_fid": "FID of frames",
            "sheets_fvd": "FVD, judge's features",
        }
        return {**distances, **_JUDGED, "loop": "loop closure"}

    @property
    def controls(self) -> tuple[str, ...]:
        """Columns of the FVD between halves of real clips, frozen or shuffled, by either kind of features."""
        names = ("halves", "frozen", "shuffled")
        return tuple(f"{kind}_{name}" for kind in ("fvd", "sheets_fvd") for name in names) if self.clips else ()

    def network(self, core: str, given: argparse.Namespace, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Name and arguments of a network of these sizes."""
        sizes = {"embed_dim": given.dim, "depth": given.depth, "num_heads": given.heads, "patch_size": given.patch}
        arguments = {**sizes, "in_channels": self.channels, **options, "output_gate": False}
        if not self.clips:
            return f"dit_{core}_s_4", arguments
        patch = [given.frame_patch, given.patch, given.patch]
        return f"dit_video_{core}_s_4", {**arguments, "patch_size": patch, "block_grid": given.blocks}

    def input_size(self, given: argparse.Namespace) -> int | list[int]:
        """Size of a sample as a network takes it."""
        if self.latents is not None:
            return list(self.grid)
        return [given.frames, given.size, given.size] if self.clips else given.size

    def data(self, root: str | None) -> list[object]:
        """Options of `headmix train-gen` for the data: pixels at a place, or the latents, which are mirrored or not."""
        if self.latents is None:
            return ["--data.root", root or "null"]
        options = {"data.dataset": "latents", "data.root": self.latents, "model.vae": self.autoencoder}
        options |= {"data.hflip": 0, "data.clip.frame_stride": "null"}
        return [part for name, value in options.items() for part in (f"--{name}", value)]


TASKS = {
    "emoji": Task("table/style+group", "emoji", 3, "data/emoji"),
    "fashion_mnist": Task("fashion_mnist", "fashion_mnist", 1),
    "animated_emoji": Task("videos", "animated_emoji", 3, "data/animated_emoji", clips=True),
}


class Scores:
    """Scores of samples of a task by two classifiers; what is computed of the data set is kept.

    Args:
        task: The task.
        given: Options `features`, `judge` (for clips trained on their sheets), `size` and, of clips, `frames`.
        root: Place of the data.
    """

    def __init__(self, task: Task, given: argparse.Namespace, root: str | None) -> None:
        self.task, self.given, self.root = task, given, root
        self.judge = f"sheets:{given.judge}" if task.clips else given.judge
        self.scorer, self.samples = cache(self._open_scorer), cache(self._open_samples)
        self._lock = threading.Lock()

    def open(self, split: str) -> Source:
        """Open a split, whose samples have labels."""
        shape = (3, self.given.frames) if self.task.clips else (3,)
        return open_source(SplitRequest(self.task.dataset, split, shape, "scoring", root=self.root))

    def trained_on(self, latents: Path | None) -> Task:
        """Return the task of models that are trained on pixels, or on a folder's latents, `train` and `validation`.

        Raises:
            InputError: No such caches, or latents of other samples, sizes or autoencoders.
        """
        if latents is None:
            return self.task
        folder, given = latents.absolute(), self.given
        caches = {split: LatentShards(folder / split) for split in (TRAIN, VALIDATION)}
        for split, made in caches.items():
            source, manifest = self.open(split), made.manifest
            facts: dict[str, tuple[object, object]] = {
                "samples": (len(made), len(source)),
                "classes": (made.class_names, source.class_names),
                "pixels of a side": (manifest["image_size"], given.size),
                "autoencoder": (manifest["autoencoder"], caches[TRAIN].manifest["autoencoder"]),
            }
            if self.task.clips:
                facts["frames"] = ((manifest.get("clip") or {}).get("frames"), given.frames)
            for name, (found, wanted) in facts.items():
                if found != wanted:
                    raise InputError(f"--latents {folder / split}: {name} {found}, it must be {wanted}")
        made = caches[TRAIN]
        keys = tuple(key for cached in caches.values() for key in cached.keys())  # noqa: SIM118 - not a mapping
        channels, *grid = made.shape
        autoencoder = made.manifest["autoencoder"]["source"]
        return self.task._replace(
            channels=channels, latents=folder, grid=tuple(grid), autoencoder=autoencoder, keys=keys
        )

    def check(self) -> None:
        """Open the classifiers, before anything is trained that they cannot score.

        Raises:
            InputError: One cannot be opened, or the judge knows other classes.
        """
        self.scorer(self.given.features)
        judge = self.scorer(self.judge).extractor
        check_judge(judge, self.samples(self.split(TEST), judge.mode))

    def split(self, name: str) -> str:
        """Return a split as `headmix evaluate` takes it."""
        return f"{self.task.dataset}:{name}"

    def __call__(self, split: str, fake: str | None) -> dict[str, float]:
        """Score samples against a split: of the validation split their distance alone, of the test split everything.

        Args:
            split: `validation` or `test`.
            fake: File of samples; None for the validation split itself, whose labels are its own.
        """
        with self._lock:
            source = fake or self.split(VALIDATION)
            features, judge = self.scorer(self.given.features), self.scorer(self.judge)
            real, samples = (self.samples(one, features.extractor.mode) for one in (self.split(split), source))
            if split == VALIDATION:
                return self._distances(features, real, samples, choosing=True)
            scores = self._distances(features, real, samples)
            found = precision_recall(features, real, samples)
            scores |= {f"{name}_percent": 100 * found[name] for name in ("precision", "recall")}
            judged = self.samples(source if fake else self.split(split), judge.extractor.mode)
            found = accuracy(judge, judged, judged.labels())
            scores |= {f"{name}_percent": 100 * found[name] for name in ("top1", "balanced")}
            found = neighbours(features, self.samples(self.split(TRAIN), features.extractor.mode), samples, real)
            scores |= {f"{name}_percent": 100 * found[name] for name in ("nearer", "copied")}
            if self.task.clips:
                scores |= self._of_clips(real, samples, controls=fake is None)
            return scores

    def _distances(
        self, features: RememberingScorer, real: SampleSet, samples: SampleSet, choosing: bool = False
    ) -> dict[str, float]:
        distance = fid(features, real, samples)["fid"]
        if not self.task.clips:
            return {"fid": distance}
        if choosing:
            return {"fvd": distance}
        sides = [features.statistics(one).gaussians["frames"] for one in (real, samples)]
        size = kid_subset_size(min(len(real), len(samples)), None)
        kernel, _ = kernel_distance(features.collect(real), features.collect(samples), _KID_SUBSETS, size)
        return {"fvd": distance, "kvd": 1000 * kernel, "frame_fid": frechet_distance(*sides)}

    def _of_clips(self, real: SampleSet, samples: SampleSet, controls: bool) -> dict[str, float]:
        features, judge = self.scorer(self.given.features), self.scorer(self.judge)
        scores = {"sheets_fvd": fid(judge, real, samples)["fid"], "loop": loop_closure(samples)}
        for kind, scorer in (("fvd", features), ("sheets_fvd", judge)) if controls else ():
            found = fvd(scorer, real, real)["controls"]["fvd"]
            scores |= {f"{kind}_{name}": value for name, value in found.items()}
        return scores

    def _open_scorer(self, features: str) -> RememberingScorer:
        opener: Callable[..., FeatureExtractor] = open_clip_extractor if self.task.clips else open_extractor
        return RememberingScorer(opener(features, default_device()), 16 if self.task.clips else 256)

    def _open_samples(self, source: str, mode: str) -> SampleSet:
        sampling = ClipSampling(self.given.frames) if self.task.clips else None
        return open_samples(source, mode, self.given.size, self.root, sampling=sampling)
