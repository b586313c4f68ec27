"""The Lightning data module for training generators: images, clips or cached latents, with labels.

B batch, C channels, *grid the network's input size: H x W, or T x H x W of clips.
"""

from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader
from torchvision.transforms import Normalize

from headmix_vision.data.batches import TrainLoader, as_it_is
from headmix_vision.data.clip_frames import DEFAULT_CLIP, ClipConfig
from headmix_vision.data.data_module import DataModule
from headmix_vision.data.datasets import find_dataset, open_split
from headmix_vision.data.datasets.base import Source, SplitRequest, Transform
from headmix_vision.data.datasets.latents import LatentBuckets, LatentShards, find_caches, read_manifest
from headmix_vision.data.datasets.streams import Stream
from headmix_vision.data.fitting import FitImage, ImageToRange
from headmix_vision.data.seeding import derive_seed
from headmix_vision.data.stills import ImageStills, MixedBatchSampler, MixedSamples, Renumbered, StillsConfig
from headmix_vision.errors import InputError, check_numbers

_STILLS = 1  # stream of random numbers, beside that of the clips
_RATE_TOLERANCE = 0.01
DEFAULT_STILLS = StillsConfig()


class GenerationData(DataModule):
    """Images or clips in [-1, 1] or scaled latents, with class labels, for training a generator.

    Channels, size and length come from the network, the attribute `net` of the LightningModule; of a video also the
    frame rate, unless `clip` says otherwise. Batches are (x float32 [B, C, *grid], labels int64 [B]).

    Training data are a function of `seed` and of the number of batches trained so far, whatever the number of
    processes and workers; see `DataModule`.

    Args:
        dataset: digits (embedded), canvas or canvas/opposite (boards of digits), latents (shards of cache_latents),
            fake (random numbers, to try a recipe), folder (a directory per split and class), shards (tar files with
            the index of headmix index-shards), fashion_mnist (idx files; without a root those of Debian's
            dataset-fashion-mnist), table/NAME (a table of images, labelled by its column NAME) or a timm name
            torch/NAME, hfds/NAME. For networks of clips: moving_digits (embedded), videos (a directory per split
            and class, of files or of folders of frames, or a table), videos/unlabelled, shards, latents, fake.
        root: Place of the data; of latents the directory of the cache, or of a cache for each split.
        train_split: Name of the training split; `all` trains on both splits of digits.
        val_split: Name of the validation split, on which the loss is measured; none when null.
        batch_size: Samples per process and step, or per context-parallel group.
        hflip: Probability of a horizontal flip of an image or of a whole clip.
        canvas_size: Height and width of a canvas in pixels; the network's input size if null.
        clip: Which frames of a video make a clip: the network's frame rate if nothing is set.
        stills: Batches of clips that stand still, one frame or the frames of a patch, among the batches of clips.
        prompt_dropout: Share of prompts of a batch that are replaced by the empty one, for guidance; of networks that
            take prompts.
        common: The options that both tasks share, see `DataModule`.

    Raises:
        InputError: An option out of range, a missing package, file or split, a training split smaller than one global
            batch, more classes than the network has, latents of another shape or frame rate than its input, images
            for a network of clips or the other way round.
    """

    use = "generation"

    def __init__(
        self,
        dataset: str = "digits",
        root: str | None = None,
        train_split: str = "train",
        val_split: str | None = "validation",
        batch_size: int = 256,
        hflip: float = 0.0,
        canvas_size: int | None = None,
        clip: ClipConfig = DEFAULT_CLIP,
        stills: StillsConfig = DEFAULT_STILLS,
        prompt_dropout: float = 0.1,
        **common: Any,
    ) -> None:
        check_numbers(0, 1, hflip=hflip, prompt_dropout=prompt_dropout)
        super().__init__(
            dataset,
            root,
            train_split=train_split,
            val_split=val_split,
            test_split=None,
            batch_size=batch_size,
            repeats=1,
            holdout_every=None,
            **common,
        )
        if hflip and not self.entry.has_images:
            raise InputError(f"hflip does not apply to {dataset}: cache_latents has flipped the images or not")
        if hflip and not self.entry.can_flip:
            raise InputError(f"hflip is {hflip}, it must be 0 for {dataset}: mirrored clips move the other way")
        if canvas_size is not None and not dataset.lower().startswith("canvas"):
            raise InputError(f"canvas_size is {canvas_size}, it must be null for dataset {dataset!r}")
        if clip != DEFAULT_CLIP and (3 not in self.entry.grid_axes or not self.entry.has_images):
            made = "cache_latents has chosen the frames" if 3 in self.entry.grid_axes else "it holds no videos"
            raise InputError(f"clip does not apply to {dataset}: {made}")
        if stills.dataset is not None:
            find_dataset(stills.dataset, self.use)
        self.hflip = hflip
        self.canvas_size = canvas_size
        self.clip = clip
        self.stills = stills
        self.prompt_dropout = prompt_dropout

    def _prompt_dropout(self, training: bool) -> float | None:
        return (self.prompt_dropout if training else 0.0) if self._takes_prompts else None

    def sample_shape(self, net: Any) -> tuple[int, ...]:
        """(channels, height, width) of the network's input, (channels, frames, height, width) of one of clips."""
        self._net_rate: float | None = getattr(net, "frame_rate", None)
        self._patch_frames = getattr(net, "patch_size", (1,))[0]
        self._takes_prompts = getattr(net, "takes_prompts", False)
        if not self._takes_prompts:
            return (net.in_channels, *net.input_size)
        if self.dataset != "latents":
            raise InputError(f"data.dataset is {self.dataset!r}, it must be latents for a model that takes prompts")
        if self.stills.share:
            raise InputError(f"stills.share is {self.stills.share}, it must be 0 for a model that takes prompts")
        caches = find_caches(self.root, self.train_split, self.train_split)
        return tuple(read_manifest(caches[0])["shape"])

    def train_transform(self) -> Transform:
        """Crop, flip and scale to [-1, 1]."""
        return ImageToRange(self._shape[1:], self.hflip)

    def eval_transform(self) -> Transform:
        """Crop and scale to [-1, 1]."""
        return ImageToRange(self._shape[1:])

    def batch_transform(self, training: bool) -> Transform | None:
        """Scale to [-1, 1], where nothing is flipped."""
        return None if training and self.hflip else Normalize([0.5], [0.5])

    def request(self, split: str, role: str) -> SplitRequest:
        """As in the base; a canvas may be drawn at another size than the network takes, clips have a frame rate."""
        clip = ClipConfig(self._net_rate) if self.clip == DEFAULT_CLIP else self.clip
        request = replace(super().request(split, role), clip=clip)
        if self.canvas_size is not None:
            request = replace(request, shape=(self._shape[0], self.canvas_size, self.canvas_size))
        return request

    def setup(self, stage: str) -> None:
        """Open the splits that `stage` (fit or validate) needs, and check them."""
        self._still_source: Source | None = None
        super().setup(stage)
        if self._model_classes and not 0 < self.num_classes <= self._model_classes:
            raise InputError(
                f"the data have {self.num_classes} classes, the model {self._model_classes}:"
                f" set model.num_classes={self.num_classes}"
            )
        for split in self._splits.values():
            self._check_rate(split)
        if stage == "fit" and self.stills.share:
            self._still_source = self._open_stills()
            self.train_dataloader()  # which refuses fewer stills than a batch

    def train_dataloader(self) -> DataLoader[Any]:
        """Training batches as in the base, with batches of stills among them."""
        if self._still_source is None:
            return super().train_dataloader()
        clips = self._splits["train"]
        assert isinstance(clips, Source)
        samples = self._train_samples(clips, self._shape)
        frames = self._still_source.frames if isinstance(self._still_source, ImageStills) else 1
        stills = self._train_samples(self._still_source, (self._shape[0], frames, *self._shape[2:]))
        both = self._loader_options(clips, samples), self._loader_options(self._still_source, stills)
        options = {**max(both, key=lambda one: one["num_workers"]), "collate_fn": as_it_is}
        sampler = MixedBatchSampler(
            self._train_sampler(clips, self.seed),
            self._train_sampler(self._still_source, derive_seed(self.seed, _STILLS)),
            self.stills.share,
        )
        return TrainLoader(MixedSamples(samples, stills), batch_sampler=sampler, **options)

    def training_sources(self) -> dict[str, Source | Stream]:
        """As in the base, and the stills."""
        stills = {} if self._still_source is None else {"stills": self._still_source}
        return {**super().training_sources(), **stills}

    def manifests(self) -> dict[str, dict[str, Any]]:
        """Return the manifests of all opened caches of latents, by their folders."""
        caches: list[Any] = []
        for split in self._splits.values():
            caches += split.caches if isinstance(split, LatentBuckets) else [split]
        return {str(cache.path): cache.manifest for cache in caches if isinstance(cache, LatentShards)}

    def _open_stills(self) -> Source:
        """Open the stills: images, or single frames of videos, clips or latents."""
        if len(self._shape) != 4:
            raise InputError(f"stills.share is {self.stills.share}, but the network takes images: it must be 0")
        channels, _, height, width = self._shape
        request = self.request(self.train_split, "train")
        if self.stills.dataset is not None:
            request = replace(
                request, name=self.stills.dataset, root=self.stills.root, split=self.stills.split,
                train_split=self.stills.split,
            )  # fmt: skip
        is_clips = 3 in find_dataset(request.name, self.use).grid_axes
        shape = (channels, 1, height, width) if is_clips else (channels, height, width)
        source = open_split(replace(request, shape=shape))
        assert isinstance(source, Source), "streams serve training of classifiers alone"
        if self._model_classes and not is_clips and set(source.class_names) < set(self.class_names):
            source = Renumbered(source, self.class_names)
        if self._model_classes:
            self._check_class_names(source.class_names, "the data set of stills")
        return source if is_clips else ImageStills(source, FitImage((height, width)), self._patch_frames)

    def _check_rate(self, split: object) -> None:
        rate = split.frame_rate if isinstance(split, LatentShards) else None
        if rate and self._net_rate and abs(rate / self._net_rate - 1) > _RATE_TOLERANCE:
            raise InputError(
                f"the latents have {rate:g} frames a second, the network takes {self._net_rate:g}:"
                f" set model.model_args.frame_rate={rate:g}"
            )
