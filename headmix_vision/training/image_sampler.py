"""Drawing samples of a generator while it is trained."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
from lightning.pytorch import LightningModule, Trainer

from headmix_vision.console import Processes
from headmix_vision.data.batches import deal_batches
from headmix_vision.diffusion.denoising import NonFiniteSamplesError
from headmix_vision.diffusion.objectives import NUM_TIMESTEPS
from headmix_vision.diffusion.pipeline import HeadMixDiTPipeline
from headmix_vision.diffusion.schedulers import create_scheduler, set_steps
from headmix_vision.errors import InputError
from headmix_vision.models.autoencoders import check_source, downsampling, load_autoencoder
from headmix_vision.sampling.planning import SamplingPlan, named, sample_batch
from headmix_vision.training.callbacks.non_finite import NonFiniteError

T = TypeVar("T")


class ImageSampler:
    """Draw samples of a module that is being trained, or of its average, for all callbacks with one autoencoder.

    The autoencoder lives here, outside of the module, so that neither the average nor a checkpoint copies it.

    Args:
        vae: Autoencoder of the latents, a local directory or a hub id; None for pixels.
        fetch: Whether a hub id is fetched; else it must be in the hub's cache.

    Raises:
        InputError: If `vae` is neither a folder nor a hub id.
    """

    def __init__(self, vae: str | None, *, fetch: bool = False) -> None:
        if vae is not None:
            check_source(vae)
        self.vae_source, self._fetch = vae, fetch
        self._vae: Any = None

    def check(self, module: LightningModule, plan: SamplingPlan, option: str) -> None:
        """Check that a plan can be drawn with a module, before any training.

        Raises:
            InputError: If scheduler, steps or guidance do not fit the model; it names the group of options.
        """
        net: Any = module.net
        scheduler = create_scheduler(plan.scheduler, module.objective_config)  # type: ignore[arg-type]
        if plan.steps > NUM_TIMESTEPS:
            raise InputError(f"{option}.steps must be at most {NUM_TIMESTEPS}, got {plan.steps}")
        with named(f"{option}.steps={plan.steps}"):
            set_steps(scheduler, plan.steps, "cpu")
        if plan.guidance.enabled and not net.has_null_class:
            raise InputError(f"{option}.guidance={plan.guidance.scale} needs a model with a null class: set it to 1")

    def makes_images(self, module: LightningModule) -> bool:
        """Return whether the model makes pixels, or latents that can be decoded."""
        net: Any = module.net
        return self.vae_source is not None or net.in_channels in (1, 3)

    def open(self) -> None:
        """Load the autoencoder, unless it is here already.

        Raises:
            InputError: If there is none.
        """
        if self.vae_source is not None and self._vae is None:
            self._vae = load_autoencoder(self.vae_source, fetch=self._fetch).module

    def image_shape(self, module: LightningModule) -> tuple[int, int, int]:
        """Return channels, height and width of the images, or of a clip's frames, in pixels; after `open`."""
        net: Any = module.net
        height, width = net.input_size[-2:]
        if self._vae is None:
            return net.in_channels, height, width
        factor = downsampling(self._vae)
        return int(self._vae.config.get("out_channels", 3)), height * factor, width * factor

    def frame_rate(self, module: LightningModule) -> float:
        """Return the frames a second of the clips that a model makes, in training; after `open`."""
        return self._pipeline(module, None).check_frame_rate(None)

    def draw(self, trainer: Trainer, module: LightningModule, plan: SamplingPlan, indices: Sequence[int]) -> np.ndarray:
        """Draw samples in the trainer's precision.

        Args:
            trainer: The module's trainer.
            module: The module, or its average.
            plan: What to draw.
            indices: Which samples of the plan.

        Returns:
            uint8 [N, H, W, channels], or clips [N, T, H, W, channels].

        Raises:
            NonFiniteError: If a sample became infinite or not a number.
        """
        net: Any = module.net
        was_training = net.training
        net.eval()
        try:
            pipeline = self._pipeline(module, plan.scheduler)
            pipeline.set_progress_bar_config(disable=True)
            with trainer.precision_plugin.forward_context():
                return sample_batch(pipeline, plan, indices)
        except NonFiniteSamplesError as error:
            raise NonFiniteError(f"{error} (drawn after step {trainer.global_step} of training)") from None
        finally:
            net.train(was_training)

    def draw_shared(
        self,
        trainer: Trainer,
        module: LightningModule,
        plan: SamplingPlan,
        num: int,
        batch_size: int,
        then: Callable[[np.ndarray], T],
    ) -> Iterator[T]:
        """Draw samples 0 to `num` - 1 on all processes of the trainer, which share the batches.

        Every batch the network sees has `batch_size` samples, the last one filled up, so that a sample does not depend
        on the number of processes. All processes draw equally many batches, some of them the last one again, as
        networks whose weights are spread over processes compute together.

        Args:
            trainer: The module's trainer.
            module: The module, or its average.
            plan: What to draw.
            num: Number of samples.
            batch_size: Samples at a time in each process.
            then: What to make of the samples of a batch, without those that fill it up, where they were drawn.

        Yields:
            What `then` returned for each batch, in the order of samples, on all processes.
        """
        rank, world_size = trainer.global_rank, trainer.world_size
        batches = deal_batches(range(num), batch_size)
        rounds = -(-len(batches) // world_size)

        def share() -> Iterator[T | None]:
            for place in range(rank, rounds * world_size, world_size):
                indices = batches[min(place, len(batches) - 1)]
                filled = indices + [indices[-1]] * (batch_size - len(indices))
                samples = self.draw(trainer, module, plan, filled)[: len(indices)]
                yield then(samples) if place < len(batches) else None

        return Processes(rank, world_size).in_turn(share(), rounds)

    def _pipeline(self, module: LightningModule, scheduler: str | None) -> HeadMixDiTPipeline:
        net: Any = module.net
        objective: Any = module.objective_config
        return HeadMixDiTPipeline(
            net,
            create_scheduler(scheduler, objective, clip=self._vae is None),
            vae=self._vae.to(module.device) if self._vae is not None else None,
            objective=asdict(objective),
        )
