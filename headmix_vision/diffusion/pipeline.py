"""A pipeline of diffusers that makes images of given classes.

B images, C latent channels, H x W latent size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import ImagePipelineOutput
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor

from headmix_vision.diffusion.denoising import Generators, Guidance
from headmix_vision.diffusion.generator_pipeline import GeneratorPipeline, StepCallback, require_finite
from headmix_vision.models import HeadMixDiT
from headmix_vision.models.autoencoders import latent_scale
from headmix_vision.models.diffusers_features import found_by_diffusers


@found_by_diffusers
class HeadMixDiTPipeline(GeneratorPipeline):
    """Images of given classes from a :class:`~headmix_vision.models.HeadMixDiT`.

    Args:
        transformer: the network.
        scheduler: a scheduler that fits what the network was trained for; see `set_scheduler`.
        vae: the autoencoder (AutoencoderKL or AutoencoderDC) whose latents the network knows; None for pixels.
        objective: what the network was trained for, an :class:`~headmix_vision.diffusion.ObjectiveConfig` as a
            dictionary; flow matching when None.
        class_names: one name per class.

    Raises:
        InputError: if the autoencoder's latents are not the network's, or the objective or the names are malformed.
    """

    samples_are = "images"
    num_axes = 2
    network_class = HeadMixDiT

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | Sequence[int] | Tensor | None = None,
        num_images: int | None = None,
        guidance_scale: float = 1.0,
        guidance_interval: tuple[float, float] = (0.0, 1.0),
        guidance_channels: str = "all",
        num_inference_steps: int = 50,
        height: int | None = None,
        width: int | None = None,
        generator: Generators = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> ImagePipelineOutput | tuple[Any]:
        """Samples images.

        Args:
            class_labels: a label for each image, `num_classes` for no class; None with an unconditional model.
            num_images: their number, needed without labels only.
            guidance_scale, guidance_interval, guidance_channels: see :class:`~headmix_vision.diffusion.Guidance`.
            num_inference_steps: sampling steps.
            height, width: of the images in pixels; those of training when None.
            generator: random numbers, one generator for all images or a list with one for each, which makes an image
                independent of the others.
            latents: start noise [B, C, H, W] instead of drawing it.
            output_type: `pil`, `np` (float32 [B, H, W, channels] in [0, 1]), `pt` (the same as [B, channels, H, W])
                or `latent` (what the network produced).
            return_dict: a tuple if False.
            callback_on_step_end: called as `callback(pipeline, step, timestep, tensors)` after each step; what it
                returns under `latents` is gone on with.
            callback_on_step_end_tensor_inputs: names of the tensors it wants; there is `latents`.

        Returns:
            `ImagePipelineOutput` with `images`.

        Raises:
            InputError: if labels are missing, too many, no whole numbers or out of range, guidance is asked of a model
                without a null class, a size does not fit or needs more memory than there is, or an option is unknown.
            NonFiniteSamplesError: if an image became infinite or not a number.
        """
        guidance = Guidance(guidance_scale, guidance_interval, guidance_channels)  # type: ignore[arg-type]
        labels = self.check_labels(class_labels, num_images, guidance)
        count = len(labels) if labels is not None else num_images or 1
        inputs = getattr(callback_on_step_end, "tensor_inputs", callback_on_step_end_tensor_inputs)
        self._check_options(num_inference_steps, output_type, inputs, generator, count)
        shape = (count, self.transformer.config.in_channels, *self._places(height, width))
        self.check_memory(count, height, width, guidance)
        latents = self._denoise(
            self._start_noise(shape, generator, latents),
            labels,
            guidance,
            num_inference_steps,
            generator,
            callback_on_step_end,
            inputs,
        )
        images = self._finish(latents, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def check_memory(self, count: int, height: int | None, width: int | None, guidance: Guidance) -> None:
        """Refuses images whose tokens alone, with the hidden layer of an MLP, are more than the memory holds.

        Raises:
            InputError: If `count` images of this size at a time cannot be made on the pipeline's device.
        """
        self._check_memory(count, self._places(height, width), self.image_size(height, width), guidance)

    def _finish(self, latents: Tensor, output_type: str) -> Any:
        if output_type == "latent":
            return latents
        images = latents
        if self.vae is not None:
            latents = latent_scale(self.vae.config).undo(latents)
            images = require_finite(self.vae.decode(latents.to(self.vae.dtype)).sample.float())
        return VaeImageProcessor().postprocess(images, output_type)
