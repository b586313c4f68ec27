"""Scores the generator with the Fréchet distance while it trains."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from headmix_vision.diffusion.denoising import Guidance
from headmix_vision.diffusion.schedulers import create_scheduler
from headmix_vision.errors import InputError
from headmix_vision.evaluation.extractors import open_extractor
from headmix_vision.evaluation.sample_sets import ImageSet, TensorImages, open_images
from headmix_vision.evaluation.scores import Scorer, fid
from headmix_vision.evaluation.statistics import Statistics, read_statistics
from headmix_vision.models.autoencoders import load_autoencoder
from headmix_vision.sampling.draw import SamplingPlan
from headmix_vision.training.callbacks.ema import EmaWithWarmup
from headmix_vision.training.callbacks.sample_grids import draw_images
from headmix_vision.training.options import FidConfig


class SampleFid(Callback):
    """Scores samples from fixed noise every few epochs and logs `val/fid`, on the first process.

    Extractor and autoencoder live here, outside of the module.

    Args:
        config: What to score, and when.
        average: The callback with the moving average, if there is one.
        vae: Autoencoder of the latents, a local directory or a hub id; None for pixels.
        root: Place of the real images' data set, if it needs one.
        seed: Seed of the noise.
    """

    def __init__(
        self, config: FidConfig, average: EmaWithWarmup | None, vae: str | None, root: str | None, seed: int
    ) -> None:
        self.config = config
        self.average = average
        self.vae_source = vae
        self.root = root
        self.seed = seed
        self._vae: Any = None
        self._scorer: Scorer | None = None
        self._real: Statistics | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens extractor and real images before any training.

        Raises:
            InputError: If one of them is missing, or options do not fit the model.
        """
        if self.config.every_n_epochs is None or trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        net: Any = pl_module.net
        create_scheduler(self.config.scheduler, pl_module.objective_config)  # type: ignore[arg-type]
        if Guidance(self.config.guidance).enabled and not net.has_null_class:
            raise InputError(f"fid.guidance={self.config.guidance} needs a model with a null class: set it to 1")
        if self.vae_source is None and net.in_channels not in (1, 3):
            raise InputError(f"the model makes latents of {net.in_channels} channels: fid needs model.vae")
        self._scorer = Scorer(open_extractor(self.config.features, pl_module.device))
        self._real = self._real_statistics(self._scorer)
        if self.vae_source is not None:
            self._vae = load_autoencoder(self.vae_source).module

    def _real_statistics(self, scorer: Scorer) -> Statistics:
        path = Path(self.config.real)
        if path.suffix == ".safetensors" and path.is_file():
            return read_statistics(path)
        return scorer.statistics(open_images(self.config.real, scorer.extractor.mode, root=self.root))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Scores after every `every_n_epochs` epochs."""
        every = self.config.every_n_epochs
        if self._scorer is None or every is None or (trainer.current_epoch + 1) % every:
            return
        average = self.average.average if self.average is not None else None
        pixels = self._draw(trainer, average or pl_module)
        fake = ImageSet(TensorImages(torch.from_numpy(pixels).permute(0, 3, 1, 2)), self._scorer.extractor.mode)
        assert self._real is not None
        value = fid(self._scorer, self._real, fake)["fid"]
        pl_module.log_now({"val/fid": value}, trainer.global_step - 1)  # type: ignore[operator]

    def _draw(self, trainer: Trainer, module: LightningModule) -> np.ndarray:
        config, num_classes = self.config, int(module.net.num_classes)  # type: ignore[arg-type, union-attr]
        classes = tuple(range(num_classes)) if num_classes else None
        plan = SamplingPlan(self.seed, classes, config.steps, config.scheduler, Guidance(config.guidance), None)
        batches = (range(i, min(i + config.batch_size, config.num)) for i in range(0, config.num, config.batch_size))
        return np.concatenate([draw_images(trainer, module, self._vae, plan, indices) for indices in batches])
