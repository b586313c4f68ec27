"""Draws samples of the generator while it trains."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from headmix_vision.diffusion.denoising import Guidance
from headmix_vision.diffusion.pipeline import HeadMixDiTPipeline
from headmix_vision.diffusion.schedulers import create_scheduler
from headmix_vision.errors import InputError
from headmix_vision.models.autoencoders import load_autoencoder
from headmix_vision.png import write_png
from headmix_vision.sampling.contact_sheet import draw_grid
from headmix_vision.sampling.draw import SamplingPlan, sample_batch
from headmix_vision.training.callbacks.ema import EmaWithWarmup
from headmix_vision.training.options import SampleGridConfig


def draw_images(
    trainer: Trainer, module: LightningModule, vae: Any, plan: SamplingPlan, indices: Sequence[int]
) -> np.ndarray:
    """Draws samples of a module that is being trained, in the trainer's precision.

    Args:
        trainer: Its trainer.
        module: The module, or its average.
        vae: Autoencoder of the latents; None for pixels.
        plan: What to draw.
        indices: Which samples of the plan.

    Returns:
        uint8 [N, H, W, channels].
    """
    net: Any = module.net
    objective: Any = module.objective_config
    was_training = net.training
    net.eval()
    try:
        pipeline = HeadMixDiTPipeline(
            net,
            create_scheduler(plan.scheduler, objective, clip=vae is None),
            vae=vae.to(module.device) if vae is not None else None,
        )
        pipeline.set_progress_bar_config(disable=True)
        with trainer.precision_plugin.forward_context():
            return sample_batch(pipeline, plan, indices)
    finally:
        net.train(was_training)


class SampleGrids(Callback):
    """Draws samples from fixed noise and labels, once with the weights being trained and once with their average.

    Files are `step_00001000_raw.png` and `step_00001000_ema.png`, tags in TensorBoard `samples/raw` and `samples/ema`.
    The autoencoder lives here, outside of the module, so that neither the average nor a checkpoint copies it.

    Args:
        folder: Folder of the pictures.
        config: What to draw, and when.
        average: The callback with the moving average, if there is one.
        vae: Autoencoder of the latents, a local directory or a hub id; None for pixels.
        seed: Seed of the noise.
    """

    def __init__(
        self, folder: Path, config: SampleGridConfig, average: EmaWithWarmup | None, vae: str | None, seed: int
    ) -> None:
        self.folder = folder
        self.config = config
        self.average = average
        self.vae_source = vae
        self.seed = seed
        self._vae: Any = None
        self._last_step = self._end_step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Loads the autoencoder, and checks scheduler and labels before any training.

        Raises:
            InputError: If there is no such autoencoder, scheduler or class, or guidance is asked of a model without a
                null class.
        """
        create_scheduler(self.config.scheduler, pl_module.objective_config)  # type: ignore[arg-type]
        net: Any = pl_module.net
        classes = self._plan(net).classes
        if classes is not None and not all(0 <= label < net.num_classes for label in classes):
            raise InputError(f"samples.classes must be from 0 to {net.num_classes - 1}, got {self.config.classes}")
        if self.config.guidance != 1 and not net.has_null_class:
            raise InputError(f"samples.guidance={self.config.guidance} needs a model with a null class: set it to 1")
        drawn = self.config.every_n_steps is not None and not trainer.fast_dev_run  # type: ignore[attr-defined]
        if drawn and self.vae_source is None and net.in_channels not in (1, 3):
            raise InputError(
                f"the model makes latents of {net.in_channels} channels: set model.vae to see samples,"
                " or samples.every_n_steps to null"
            )
        if drawn and self.vae_source is not None and self._vae is None and trainer.is_global_zero:
            self._vae = load_autoencoder(self.vae_source).module

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remembers where this run starts and ends."""
        self._last_step, self._end_step = trainer.global_step, int(trainer.estimated_stepping_batches)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draws every `every_n_steps` steps, and after the last one."""
        step, every = trainer.global_step, self.config.every_n_steps
        stepped, self._last_step = step != self._last_step, step
        due = every is not None and (step % every == 0 or step >= self._end_step)
        if not (stepped and due and trainer.is_global_zero) or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self.draw(trainer, pl_module, "raw")
        if self.average is not None and self.average.average is not None:
            self.draw(trainer, self.average.average, "ema")

    def draw(self, trainer: Trainer, module: LightningModule, kind: str) -> None:
        """Draws the samples of one module, `raw` or `ema`, of the present step."""
        plan, config = self._plan(module.net), self.config
        columns = len(plan.classes) if plan.classes is not None else 10
        indices = range(columns * config.rows)
        images = draw_images(trainer, module, self._vae, plan, indices)
        labels = plan.labels(indices)
        names = getattr(module, "class_names", None)
        captions = None if labels is None else [names[label] if names else str(label) for label in labels]
        weights = "moving average" if kind == "ema" else "weights being trained"
        title = f"step {trainer.global_step}, {weights}, {config.steps} steps, guidance {config.guidance:g}"
        picture = draw_grid(images, captions, title, columns)
        write_png(self.folder / f"step_{trainer.global_step:08d}_{kind}.png", picture)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image(f"samples/{kind}", picture, trainer.global_step, dataformats="HWC")

    def _plan(self, net: Any) -> SamplingPlan:
        config, classes = self.config, None
        if net.num_classes:
            classes = tuple(config.classes if config.classes is not None else range(min(10, net.num_classes)))
        return SamplingPlan(self.seed, classes, config.steps, config.scheduler, Guidance(config.guidance), None)
