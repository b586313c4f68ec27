"""Score the generator with the Fréchet distance while it trains."""

from collections.abc import Iterable

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from headmix_vision.console import Processes
from headmix_vision.diffusion.denoising import Guidance
from headmix_vision.errors import InputError
from headmix_vision.evaluation.extractors import FeatureExtractor, open_extractor
from headmix_vision.evaluation.frechet import Gaussian, Moments, Statistics, frechet_distance
from headmix_vision.evaluation.sample_sets import SampleSet, describe_size
from headmix_vision.evaluation.sample_sources import TensorSamples
from headmix_vision.evaluation.scores import Scorer, open_side
from headmix_vision.sampling.planning import SamplingPlan
from headmix_vision.training.callbacks.ema import EmaWithWarmup
from headmix_vision.training.image_sampler import ImageSampler
from headmix_vision.training.options import FidConfig
from headmix_vision.training.sharding import whole_network


class SampleFid(Callback):
    """Score samples from fixed noise every few epochs and log `val/fid`.

    All processes draw and extract features: they share the batches of samples, and of real images. Each batch is one
    that a single process would have, and the features are summed up in the order of samples, so that the score does not
    depend on the number of processes. The extractor lives here, outside of the module.

    Args:
        config: What to score, and when.
        sampler: Draws the samples.
        average: The EMA callback, if there is one.
        root: Place of the real images' data set, if it needs one.
        seed: Seed of the noise.
        background: Colour behind transparent pixels of the real images.
    """

    def __init__(
        self,
        config: FidConfig,
        sampler: ImageSampler,
        average: EmaWithWarmup | None,
        root: str | None,
        seed: int,
        background: str = "white",
    ) -> None:
        self.config = config
        self.sampler = sampler
        self.average = average
        self.root = root
        self.background = background
        self.seed = seed
        self._extractor: FeatureExtractor | None = None
        self._real: Gaussian | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open extractor, autoencoder and real images before any training, and read the real images' features.

        Raises:
            InputError: If one of them is missing, or does not fit the images that the model makes.
        """
        if self.config.every_n_epochs is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if len(pl_module.net.input_size) != 2:  # type: ignore[union-attr, arg-type]
            raise InputError(
                "fid.every_n_epochs must be null for a model of clips: FID is of images;"
                " draw clips by headmix sample videos and score them by headmix evaluate fvd"
            )
        self.sampler.check(pl_module, self._plan(pl_module), "fid")
        if not self.sampler.makes_images(pl_module):
            channels = pl_module.net.in_channels  # type: ignore[union-attr]
            raise InputError(f"the model makes latents of {channels} channels: fid needs model.vae")
        self._extractor = open_extractor(self.config.features, pl_module.device)
        self.sampler.open()
        channels, height, width = self.sampler.image_shape(pl_module)
        real = open_side(
            self.config.real,
            self._extractor,
            image_size=height if height == width else None,
            root=self.root,
            background=self.background,
        )
        black = SampleSet(
            TensorSamples(torch.zeros(2, channels, height, width, dtype=torch.uint8)), self._extractor.mode
        )
        size = real.description.get("size", black.size)
        if list(size) != list(black.size):
            raise InputError(
                f"fid.real={self.config.real} is of {describe_size(size)}, the model makes {describe_size(black.size)}"
            )
        self._real = self._real_gaussian(trainer, real)
        num_features = self._extractor(next(black.batches(2)))["features"].shape[1]
        if len(self._real.mean) != num_features:
            raise InputError(
                f"fid.real={self.config.real} is of {len(self._real.mean)} features,"
                f" fid.features={self.config.features} makes {num_features}"
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score after every `every_n_epochs` epochs."""
        every = self.config.every_n_epochs
        if self._real is None or every is None or (trainer.current_epoch + 1) % every:
            return
        average = self.average.average if self.average is not None else None
        module, size = average or pl_module, min(self.config.batch_size, self.config.num)
        with whole_network(trainer, module):
            drawn = self.sampler.draw_shared(trainer, module, self._plan(module), self.config.num, size, self._features)
            fake = self._gaussian(drawn)
        if trainer.is_global_zero:
            value = frechet_distance(self._real, fake)
            pl_module.log_now({"val/fid": value}, trainer.global_step - 1)  # type: ignore[operator]

    def _real_gaussian(self, trainer: Trainer, real: SampleSet | Statistics) -> Gaussian:
        if isinstance(real, Statistics):
            return real.gaussians["features"]
        assert self._extractor is not None
        processes = Processes(trainer.global_rank, trainer.world_size)
        scorer = Scorer(self._extractor, self.config.batch_size, processes=processes)
        made = scorer.of_all(real, lambda first, batch, outputs: {"features": outputs["features"]})
        return self._gaussian(batch["features"] for batch in made)

    def _features(self, pixels: np.ndarray) -> Tensor:
        """Extract the features of images, uint8 [B, H, W, channels]."""
        assert self._extractor is not None
        images = SampleSet(TensorSamples(torch.from_numpy(pixels).permute(0, 3, 1, 2)), self._extractor.mode)
        return self._extractor(next(images.batches(len(pixels))))["features"].cpu()

    def _gaussian(self, features: Iterable[Tensor]) -> Gaussian:
        """Compute the Gaussian of features that come in batches."""
        assert self._extractor is not None
        moments = Moments()
        for batch in features:
            moments.update(batch.to(self._extractor.device))
        return moments.gaussian()

    def _plan(self, module: LightningModule) -> SamplingPlan:
        config, num_classes = self.config, int(module.net.num_classes)  # type: ignore[arg-type, union-attr]
        classes = tuple(range(num_classes)) if num_classes else None
        return SamplingPlan(self.seed, classes, config.steps, config.scheduler, Guidance(config.guidance), None)
