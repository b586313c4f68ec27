"""Draw samples of the generator while it trains."""

from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from headmix_vision.diffusion.denoising import Guidance
from headmix_vision.errors import InputError
from headmix_vision.files.pictures import write_png
from headmix_vision.files.video import write_video
from headmix_vision.sampling.folder import draw_grid, draw_strips
from headmix_vision.sampling.planning import SamplingPlan
from headmix_vision.training.callbacks.ema import EmaWithWarmup
from headmix_vision.training.image_sampler import ImageSampler
from headmix_vision.training.options import SampleGridConfig
from headmix_vision.training.sharding import whole_network


class SampleGrids(Callback):
    """Draw samples from fixed noise and labels, once with the weights being trained and once with their average.

    Files are `step_00001000_raw.png` and `step_00001000_ema.png`, tags in TensorBoard `samples/raw` and `samples/ema`.
    The picture of clips is a contact sheet, one row of frames for the first clip of each class; all clips move in a
    `.gif` beside it.

    Args:
        folder: Folder of the pictures.
        config: What to draw, and when.
        sampler: Draws the samples.
        average: The EMA callback, if there is one.
        seed: Seed of the noise.
    """

    def __init__(
        self, folder: Path, config: SampleGridConfig, sampler: ImageSampler, average: EmaWithWarmup | None, seed: int
    ) -> None:
        self.folder = folder
        self.config = config
        self.sampler = sampler
        self.average = average
        self.seed = seed
        self._last_step = self._end_step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the autoencoder, and check scheduler and labels before any training.

        Raises:
            InputError: If there is no such autoencoder, scheduler or class, or guidance is asked of a model without a
                null class.
        """
        net: Any = pl_module.net
        plan = self._plan(net)
        self.sampler.check(pl_module, plan, "samples")
        if plan.classes is not None and not all(0 <= label < net.num_classes for label in plan.classes):
            raise InputError(f"samples.classes must be from 0 to {net.num_classes - 1}, got {self.config.classes}")
        if self.config.every_n_steps is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if not self.sampler.makes_images(pl_module):
            raise InputError(
                f"the model makes latents of {net.in_channels} channels: set model.vae to see samples,"
                " or samples.every_n_steps to null"
            )
        self.sampler.open()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember where this run starts and ends."""
        self._last_step, self._end_step = trainer.global_step, int(trainer.estimated_stepping_batches)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draw every `every_n_steps` steps, and after the last one."""
        step, every = trainer.global_step, self.config.every_n_steps
        stepped, self._last_step = step != self._last_step, step
        due = every is not None and (step % every == 0 or step >= self._end_step)
        if not (stepped and due) or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        average = self.average.average if self.average is not None else None
        for module, kind in ((pl_module, "raw"), (average, "ema")):
            if module is not None:
                with whole_network(trainer, module):
                    self.draw(trainer, module, kind)

    def draw(self, trainer: Trainer, module: LightningModule, kind: str) -> None:
        """Draw the samples of one module, `raw` or `ema`, of the present step; all processes share the rows."""
        plan, config = self._plan(module.net), self.config
        columns = len(plan.classes) if plan.classes is not None else 10
        num = columns * config.rows
        images = np.concatenate([*self.sampler.draw_shared(trainer, module, plan, num, columns, np.asarray)])
        if not trainer.is_global_zero:
            return
        labels = plan.labels(range(num))
        names = getattr(trainer.lightning_module, "class_names", None)  # the average was copied before data were open
        captions = None if labels is None else [names[label] if names else str(label) for label in labels]
        weights = "EMA" if kind == "ema" else "weights being trained"
        title = f"step {trainer.global_step}, {weights}, {config.steps} steps, guidance {config.guidance:g}"
        picture = draw_grid(images, captions, title, columns)
        path = self.folder / f"step_{trainer.global_step:08d}_{kind}"
        if images.ndim == 5:
            rate = self.sampler.frame_rate(module)
            write_video(path.with_suffix(".gif"), picture, rate)
            picture = draw_strips(images[:columns], captions, title, rate)
        write_png(path.with_suffix(".png"), picture)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image(f"samples/{kind}", picture, trainer.global_step, dataformats="HWC")

    def _plan(self, net: Any) -> SamplingPlan:
        config, classes = self.config, None
        if net.num_classes:
            classes = tuple(config.classes if config.classes is not None else range(min(10, net.num_classes)))
        return SamplingPlan(self.seed, classes, config.steps, config.scheduler, Guidance(config.guidance), None)
