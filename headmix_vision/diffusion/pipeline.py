"""A pipeline of diffusers that makes images of given classes: labels, sizes, noise and decoding around `denoise`.

B images, C latent channels, H x W latent size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import AutoencoderKL, DiffusionPipeline, ImagePipelineOutput, SchedulerMixin
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import is_accelerate_available
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from headmix_vision.checks import check_counts, is_whole
from headmix_vision.diffusion.denoising import Generators, Guidance, NonFiniteSamplesError, denoise
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

    Raises:
        InputError: if the autoencoder's latents are not the network's, or the objective or the names are malformed.
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
        if vae is not None and vae.config.get("latent_channels") != transformer.in_channels:
            raise InputError(
                f"the autoencoder's latents have {vae.config.get('latent_channels')} channels,"
                f" those of the network {transformer.in_channels}"
            )
        if class_names is not None and not (
            isinstance(class_names, list) and all(isinstance(name, str) for name in class_names)
        ):
            raise InputError(f"class_names must be a list of texts, got {class_names!r:.100}")
        objective = asdict(ObjectiveConfig.from_dict(objective or {}))
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)
        self.register_to_config(objective=objective, class_names=class_names)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> HeadMixDiTPipeline:
        """Loads a directory written by `save_pretrained`; arguments as in diffusers."""
        kwargs.setdefault("low_cpu_mem_usage", is_accelerate_available())
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    @property
    def objective(self) -> ObjectiveConfig:
        """What the network was trained for."""
        return ObjectiveConfig.from_dict(self.config.objective)

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
            InputError: if labels are missing, too many, no whole numbers or out of range, guidance is asked of a model
                without a null class, a size does not fit or needs more memory than there is, or an option is unknown.
            NonFiniteSamplesError: if an image became infinite or not a number.
        """
        guidance = Guidance(guidance_scale, guidance_interval, guidance_channels)  # type: ignore[arg-type]
        labels = self.check_labels(class_labels, num_images, guidance)
        count = len(labels) if labels is not None else num_images or 1
        self._check_options(num_inference_steps, output_type, callback_on_step_end_tensor_inputs, generator, count)
        shape = (count, self.transformer.config.in_channels, *self._latent_size(height, width))
        self.check_memory(count, height, width, guidance)
        device = self._execution_device
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        elif not isinstance(latents, Tensor) or tuple(latents.shape) != shape or not latents.isfinite().all():
            given = list(latents.shape) if isinstance(latents, Tensor) else type(latents).__name__
            raise InputError(f"latents must be of shape {list(shape)} and finite, got {given}")
        latents = latents.to(device, torch.float32)
        if labels is not None:
            labels = labels.to(device)

        def network(x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
            return self.transformer(x.to(self.transformer.dtype), t, y).float()

        def step_end(i: int, t: Any, latents: Tensor) -> Tensor:
            if callback_on_step_end is None:
                return latents
            tensors = {name: latents for name in callback_on_step_end_tensor_inputs}
            returned = callback_on_step_end(self, i, t, tensors)
            changed = returned.get("latents", latents) if isinstance(returned, dict) else latents
            if not (returned is None or isinstance(returned, dict)) or changed.shape != latents.shape:
                raise InputError(f"callback_on_step_end must return a dictionary, with latents {list(latents.shape)}")
            return changed

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
        if guidance.channels == "first_three" and model.in_channels < 3:
            raise InputError(f"guidance channels 'first_three' given, but the model has {model.in_channels}")
        if num_images is not None:
            check_counts(1, num_images=num_images)
        if model.num_classes == 0:
            if class_labels is not None:
                raise InputError("class_labels given, but the model is unconditional: give num_images instead")
            return None
        if class_labels is None:
            raise InputError(f"class_labels are missing: a label from 0 to {model.num_classes - 1} for each image")
        labels = _as_list(class_labels)
        if num_images is not None and num_images != len(labels):
            raise InputError(f"{len(labels)} class_labels, but num_images is {num_images}")
        highest = model.num_classes if model.has_null_class else model.num_classes - 1
        bad = [label for label in labels if not 0 <= label <= highest]
        if bad or not labels:
            what = f"class label {bad[0]} is out of range" if bad else "class_labels are empty"
            raise InputError(f"{what}: the model takes 0 to {model.num_classes - 1}")
        return torch.tensor(labels, dtype=torch.long)

    def check_memory(self, count: int, height: int | None, width: int | None, guidance: Guidance) -> None:
        """Refuses images whose tokens alone, with the hidden layer of an MLP, are more than the memory holds.

        Raises:
            InputError: If `count` images of this size at a time cannot be made on the pipeline's device.
        """
        latent_height, latent_width = self._latent_size(height, width)
        tokens = latent_height * latent_width // self.transformer.patch_size**2
        width_of_all = self.transformer.embed_dim * (1 + 2 * self.transformer.config.mlp_ratio)
        values = count * tokens * width_of_all * (2 if guidance.enabled else 1)
        needed = values * self.transformer.dtype.itemsize
        device = self._execution_device
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
        else:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > memory:
            size = "x".join(map(str, self.image_size(height, width)))
            raise InputError(
                f"{count} images of {size} pixels at a time need more than {needed / 1e9:.0f} GB,"
                f" the memory of {device} is {memory / 1e9:.0f} GB"
            )

    def _check_options(
        self, num_steps: int, output_type: str, tensor_inputs: Sequence[str], generator: Generators, count: int
    ) -> None:
        check_counts(1, NUM_TIMESTEPS, num_inference_steps=num_steps)
        if output_type not in OUTPUT_TYPES:
            raise InputError(f"output_type must be one of {OUTPUT_TYPES}, got {output_type!r}")
        unknown = set(tensor_inputs) - set(self._callback_tensor_inputs)
        if unknown:
            raise InputError(f"callback_on_step_end_tensor_inputs may hold 'latents' only, got {sorted(unknown)}")
        for one in generator if isinstance(generator, list) else [generator]:
            if one is not None and not isinstance(one, torch.Generator):
                raise InputError(f"generator must be a torch.Generator or a list of them, got {one!r:.100}")
        if isinstance(generator, list) and len(generator) != count:
            raise InputError(f"{len(generator)} generators for {count} images: give one for each, or a single one")

    @property
    def image_channels(self) -> int:
        """Channels of the images, 1 or 3 as a rule."""
        return self.transformer.in_channels if self.vae is None else int(self.vae.config.get("out_channels", 3))

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
            if pixels is not None and (not is_whole(pixels) or pixels < unit or pixels % unit):
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
            bad = (~images.isfinite().flatten(1).all(1)).nonzero().flatten().tolist()
            if bad:
                raise NonFiniteSamplesError(bad, "in the autoencoder")
        return VaeImageProcessor().postprocess(images, output_type)


def _as_list(class_labels: Any) -> list[int]:
    """Lists labels; torch itself would round 1.5 and take True for 1."""
    if isinstance(class_labels, Tensor | np.ndarray):
        class_labels = class_labels.tolist()
    items = list(class_labels) if isinstance(class_labels, Sequence) and not isinstance(class_labels, str) else None
    labels = []
    for item in [class_labels] if items is None else items:
        label = item.item() if isinstance(item, Tensor) and item.ndim == 0 else item
        if not is_whole(label):
            raise InputError(f"class_labels must be a whole number for each image, got {label!r:.100}")
        labels.append(int(label))
    return labels
