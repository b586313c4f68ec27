"""A pipeline of diffusers that makes images of given classes: labels, sizes, noise and decoding around `denoise`.

B images, C latent channels, H x W latent size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, DiffusionPipeline, ImagePipelineOutput, SchedulerMixin
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import is_accelerate_available
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from headmix_vision.diffusion.denoising import Generators, Guidance, denoise
from headmix_vision.diffusion.objectives import NUM_TIMESTEPS, ObjectiveConfig
from headmix_vision.diffusion.schedulers import create_scheduler
from headmix_vision.errors import InputError
from headmix_vision.models import HeadMixDiT
from headmix_vision.models.autoencoders import downsampling, latent_scale

StepCallback = Callable[["HeadMixDiTPipeline", int, Any, dict[str, Tensor]], dict[str, Tensor]]
OUTPUT_TYPES = ("pil", "np", "pt", "latent")


class HeadMixDiTPipeline(DiffusionPipeline):
    """Images of given classes from a :class:`~headmix_vision.models.HeadMixDiT`.

    Args:
        transformer: the network.
        scheduler: a scheduler that fits what the network was trained for; see `set_scheduler`.
        vae: the autoencoder (AutoencoderKL or AutoencoderDC) whose latents the network knows; None for pixels.
        objective: what the network was trained for, an :class:`~headmix_vision.diffusion.ObjectiveConfig` as a
            dictionary; flow matching when None.
        class_names: one name per class.
    """

    model_cpu_offload_seq = "transformer->vae"
    _optional_components: ClassVar[list[str]] = ["vae"]
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents"]

    def __init__(
        self,
        transformer: HeadMixDiT,
        scheduler: SchedulerMixin,
        vae: AutoencoderKL = None,
        objective: dict[str, Any] | None = None,
        class_names: list[str] | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)
        self.register_to_config(objective=dict(objective or asdict(ObjectiveConfig())), class_names=class_names)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> HeadMixDiTPipeline:
        """Loads a directory written by `save_pretrained`; arguments as in diffusers."""
        kwargs.setdefault("low_cpu_mem_usage", is_accelerate_available())
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    @property
    def objective(self) -> ObjectiveConfig:
        """What the network was trained for."""
        return ObjectiveConfig(**self.config.objective)

    def set_scheduler(self, name: str | None) -> None:
        """Chooses another scheduler by its name in :data:`~headmix_vision.diffusion.SCHEDULER_NAMES`."""
        self.register_modules(scheduler=create_scheduler(name, self.objective, clip=self.vae is None))

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
            InputError: if labels are missing, too many, or out of range, guidance is asked of a model without a null
                class, a size does not fit, or an option is unknown.
        """
        guidance = Guidance(guidance_scale, tuple(guidance_interval), guidance_channels)  # type: ignore[arg-type]
        labels = self.check_labels(class_labels, num_images, guidance)
        count = len(labels) if labels is not None else int(num_images or 1)
        self._check_options(num_inference_steps, output_type, callback_on_step_end_tensor_inputs, generator, count)
        shape = (count, self.transformer.config.in_channels, *self._latent_size(height, width))
        device = self._execution_device
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        elif tuple(latents.shape) != shape:
            raise InputError(f"latents must be of shape {list(shape)}, got {list(latents.shape)}.")
        latents = latents.to(device, torch.float32)
        if labels is not None:
            labels = labels.to(device)

        def network(x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
            return self.transformer(x.to(self.transformer.dtype), t, y).float()

        def step_end(i: int, t: Any, latents: Tensor) -> Tensor:
            if callback_on_step_end is None:
                return latents
            tensors = {name: latents for name in callback_on_step_end_tensor_inputs}
            return (callback_on_step_end(self, i, t, tensors) or {}).get("latents", latents)

        latents = denoise(
            network,
            latents,
            self.scheduler,
            num_inference_steps,
            labels=labels,
            null_label=self.transformer.num_classes,
            guidance=guidance,
            generator=generator,
            step_end=step_end,
            progress=self.progress_bar,
        )
        images = self._finish(latents, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def check_labels(
        self, class_labels: int | Sequence[int] | Tensor | None, num_images: int | None, guidance: Guidance
    ) -> Tensor | None:
        """Returns labels as int64 [B], None for an unconditional model; refuses what does not fit, see `__call__`."""
        model = self.transformer
        if guidance.enabled and not model.has_null_class:
            kind = "unconditional" if model.num_classes == 0 else "trained without label dropout"
            raise InputError(
                f"guidance scale {guidance.scale} needs a null class, but the model is {kind}: use guidance scale 1"
            )
        if model.num_classes == 0:
            if class_labels is not None:
                raise InputError("class_labels given, but the model is unconditional: give num_images instead")
            return None
        if class_labels is None:
            raise InputError(f"class_labels are missing: a label from 0 to {model.num_classes - 1} for each image")
        labels = torch.as_tensor(class_labels, dtype=torch.long).reshape(-1).cpu()
        if num_images is not None and num_images != len(labels):
            raise InputError(f"{len(labels)} class_labels, but num_images is {num_images}")
        highest = model.num_classes if model.has_null_class else model.num_classes - 1
        bad = labels[(labels < 0) | (labels > highest)]
        if len(bad) or not len(labels):
            what = f"class label {int(bad[0])} is out of range" if len(bad) else "class_labels are empty"
            raise InputError(f"{what}: the model takes 0 to {model.num_classes - 1}")
        return labels

    def _check_options(
        self, num_steps: int, output_type: str, tensor_inputs: Sequence[str], generator: Generators, count: int
    ) -> None:
        if num_steps < 1 or num_steps > NUM_TIMESTEPS:
            raise InputError(f"num_inference_steps must be from 1 to {NUM_TIMESTEPS}, got {num_steps}")
        if output_type not in OUTPUT_TYPES:
            raise InputError(f"output_type must be one of {OUTPUT_TYPES}, got {output_type!r}")
        unknown = set(tensor_inputs) - set(self._callback_tensor_inputs)
        if unknown:
            raise InputError(f"callback_on_step_end_tensor_inputs may hold 'latents' only, got {sorted(unknown)}")
        if isinstance(generator, list) and len(generator) != count:
            raise InputError(f"{len(generator)} generators for {count} images: give one for each, or a single one")

    def image_size(self, height: int | None = None, width: int | None = None) -> tuple[int, int]:
        """Returns height and width of the images in pixels, those of training where None is given."""
        factor = downsampling(self.vae) if self.vae is not None else 1
        latent_height, latent_width = self._latent_size(height, width)
        return latent_height * factor, latent_width * factor

    def _latent_size(self, height: int | None, width: int | None) -> tuple[int, int]:
        factor = downsampling(self.vae) if self.vae is not None else 1
        trained = self.transformer.input_size
        sizes = []
        for name, pixels, own in (("height", height, trained[0]), ("width", width, trained[1])):
            unit = factor * self.transformer.patch_size
            if pixels is not None and (pixels < unit or pixels % unit):
                raise InputError(f"{name} must be a multiple of {unit} pixels, got {pixels}")
            sizes.append(own if pixels is None else pixels // factor)
        return sizes[0], sizes[1]

    def _finish(self, latents: Tensor, output_type: str) -> Any:
        if output_type == "latent":
            return latents
        images = latents
        if self.vae is not None:
            latents = latent_scale(self.vae.config).undo(latents)
            images = self.vae.decode(latents.to(self.vae.dtype)).sample.float()
        return VaeImageProcessor().postprocess(images, output_type)
