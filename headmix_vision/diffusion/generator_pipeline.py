"""What the pipelines of images and of videos share: labels, options, memory and noise around `denoise`.

B samples, C latent channels, *grid latent size: H x W of images, T x H x W of videos.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin
from diffusers.utils import is_accelerate_available
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from headmix_vision.checks import check_counts, is_whole
from headmix_vision.console.devices import available_memory
from headmix_vision.diffusion.denoising import Generators, Guidance, Network, NonFiniteSamplesError, denoise
from headmix_vision.diffusion.objectives import NUM_TIMESTEPS, ObjectiveConfig
from headmix_vision.diffusion.schedulers import check_scheduler, create_scheduler
from headmix_vision.errors import InputError
from headmix_vision.files.sums import check_sums, write_sums
from headmix_vision.models.autoencoders import downsampling
from headmix_vision.models.headmix_dit import HeadMixDiT

StepCallback = Callable[[Any, int, Any, dict[str, Tensor]], dict[str, Tensor]]
OUTPUT_TYPES = ("pil", "np", "pt", "latent")
_PARTS = ("transformer", "scheduler", "vae")
_LIBRARIES = ("diffusers", "headmix_vision")
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")


class GeneratorPipeline(DiffusionPipeline):
    """Samples of given classes from a diffusion transformer.

    Args:
        transformer: the network.
        scheduler: a scheduler that fits what the network was trained for; see `set_scheduler`.
        vae: the autoencoder of diffusers whose latents the network knows; None for pixels.
        objective: what the network was trained for, an :class:`~headmix_vision.diffusion.ObjectiveConfig` as a
            dictionary; flow matching when None.
        class_names: one name per class.

    Raises:
        InputError: if the network makes something else than the pipeline, the autoencoder's latents are not the
            network's, or the objective or the names are malformed.
    """

    samples_are: ClassVar[str]
    """What the samples are called in messages: `images` or `videos`; the argument with their number follows from it."""
    num_axes: ClassVar[int]
    """Axes of the latents' grid."""
    network_class: ClassVar[type[HeadMixDiT]]
    """The class of the network; diffusers loads one only where its module has been imported."""
    model_cpu_offload_seq = "transformer->vae"
    _optional_components: ClassVar[list[str]] = ["vae"]
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents"]

    def __init__(
        self,
        transformer: ModelMixin,
        scheduler: SchedulerMixin,
        vae: ModelMixin = None,
        objective: dict[str, Any] | None = None,
        class_names: list[str] | None = None,
    ) -> None:
        super().__init__()
        if len(transformer.input_size) != self.num_axes:
            raise InputError(
                f"{type(self).__name__} makes {self.samples_are}, but the input of {type(transformer).__name__} is of"
                f" size {tuple(transformer.input_size)}"
            )
        if vae is not None and latent_channels(vae) != transformer.in_channels:
            raise InputError(
                f"the autoencoder's latents have {latent_channels(vae)} channels,"
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
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Loads a directory written by `save_pretrained`; arguments as in diffusers.

        Raises:
            InputError: If the index names a module outside of this package and diffusers, which would be imported,
                without `trust_remote_code=True`; or if a local directory does not hold the files whose sums it lists.
        """
        check_sums(Path(pretrained_model_name_or_path))
        if not kwargs.get("trust_remote_code"):
            hub = {name: value for name, value in kwargs.items() if name in _HUB_OPTIONS}
            index = cls.load_config(pretrained_model_name_or_path, **hub)
            for name in _PARTS:
                module, *_ = index.get(name) or [None]
                if module is not None and str(module).partition(".")[0] not in _LIBRARIES:
                    raise InputError(
                        f"{pretrained_model_name_or_path} names the module {module} for {name}, which would be"
                        " imported: give trust_remote_code=True if you trust it"
                    )
        kwargs.setdefault("low_cpu_mem_usage", is_accelerate_available())
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Writes a directory for `from_pretrained`, with `SHA256SUMS` of its files; arguments as in diffusers."""
        super().save_pretrained(save_directory, *args, **kwargs)
        write_sums(Path(save_directory))

    @property
    def objective(self) -> ObjectiveConfig:
        """What the network was trained for."""
        return ObjectiveConfig.from_dict(self.config.objective)

    def set_scheduler(self, name: str | None, spacing: str | None = None) -> None:
        """Choose another scheduler by its name in :data:`~headmix_vision.diffusion.SCHEDULER_NAMES`.

        Args:
            name: the name; the objective's own scheduler when None.
            spacing: which of the 1,000 times ddim and ddpm take: `trailing`, `linspace` or `leading`.
        """
        scheduler = create_scheduler(name, self.objective, clip=self.vae is None, spacing=spacing)
        self.register_modules(scheduler=scheduler)

    def check_labels(
        self, class_labels: int | Sequence[int] | Tensor | None, count: int | None, guidance: Guidance
    ) -> Tensor | None:
        """Returns labels as int64 [B], None for an unconditional model; refuses what does not fit, see `__call__`."""
        model, name = self.transformer, f"num_{self.samples_are}"
        if guidance.enabled and not model.has_null_class:
            kind = "unconditional" if model.num_classes == 0 else "trained without label dropout"
            raise InputError(
                f"guidance scale {guidance.scale} needs a null class, but the model is {kind}: use guidance scale 1"
            )
        if guidance.channels == "first_three" and model.in_channels < 3:
            raise InputError(f"guidance channels 'first_three' given, but the model has {model.in_channels}")
        if count is not None:
            check_counts(1, **{name: count})
        if model.num_classes == 0:
            if class_labels is not None:
                raise InputError(f"class_labels given, but the model is unconditional: give {name} instead")
            return None
        if class_labels is None:
            raise InputError(
                f"class_labels are missing: a label from 0 to {model.num_classes - 1} for each {self.samples_are[:-1]}"
            )
        labels = _as_list(class_labels, self.samples_are[:-1])
        if count is not None and count != len(labels):
            raise InputError(f"{len(labels)} class_labels, but {name} is {count}")
        highest = model.num_classes if model.has_null_class else model.num_classes - 1
        bad = [label for label in labels if not 0 <= label <= highest]
        if bad or not labels:
            what = f"class label {bad[0]} is out of range" if bad else "class_labels are empty"
            raise InputError(f"{what}: the model takes 0 to {model.num_classes - 1}")
        return torch.tensor(labels, dtype=torch.long)

    def _check_memory(self, count: int, grid: tuple[int, ...], size: tuple[int, ...], guidance: Guidance) -> None:
        """Refuses samples whose tokens alone, with the hidden layer of an MLP, are more than the memory holds.

        Args:
            count: Number of samples at a time.
            grid: Their latent size.
            size: Their size in pixels (and frames), for the message.
            guidance: How they are guided.
        """
        width_of_all = self.transformer.embed_dim * (1 + 2 * self.transformer.config.mlp_ratio)
        passes = 1 if guidance.scale in (0, 1) else 2
        values = count * math.prod(grid) // math.prod(self._patch) * width_of_all * passes
        needed = values * self.transformer.dtype.itemsize
        device = self._execution_device
        memory = available_memory(device)
        if needed > memory:
            frames = f"{size[0]} frames of " if len(size) == 3 else ""
            raise InputError(
                f"{count} {self.samples_are} of {frames}{size[-2]}x{size[-1]} pixels at a time need more than"
                f" {needed / 1e9:.0f} GB, {memory / 1e9:.0f} GB of the memory of {device} are left"
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
            raise InputError(
                f"{len(generator)} generators for {count} {self.samples_are}: give one for each, or a single one"
            )

    def _start_noise(self, shape: tuple[int, ...], generator: Generators, latents: Tensor | None) -> Tensor:
        """Draws the start of the samples, float32 of a shape [B, C, *grid], or takes the one that is given."""
        if latents is None:
            device = self._execution_device
            return randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        if not isinstance(latents, Tensor) or tuple(latents.shape) != shape or not latents.isfinite().all():
            given = list(latents.shape) if isinstance(latents, Tensor) else type(latents).__name__
            raise InputError(f"latents must be of shape {list(shape)} and finite, got {given}")
        return latents.to(self._execution_device, torch.float32)

    def _denoise(
        self,
        noise: Tensor,
        labels: Tensor | None,
        guidance: Guidance,
        num_steps: int,
        generator: Generators,
        callback: StepCallback | None,
        tensor_inputs: Sequence[str],
        *,
        prefix: Tensor | None = None,
        network: Network | None = None,
    ) -> Tensor:
        """Turns noise [B, C, *grid] into data by a network, the transformer when None."""
        check_scheduler(self.scheduler, self.objective)

        def transformer(x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
            return self.transformer(x.to(self.transformer.dtype), t, y).float()

        def predict(x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
            if not self.transformer.is_cache_enabled:
                return (network or transformer)(x, t, y)
            with self.transformer.cache_context(f"{len(x)} samples"):  # more of them where guidance acts
                return (network or transformer)(x, t, y)

        def progress(times: Any) -> Any:
            self._num_timesteps = len(times)
            return self.progress_bar(times)

        def step_end(i: int, t: Any, latents: Tensor) -> Tensor:
            if callback is None:
                return latents
            tensors = {name: latents for name in tensor_inputs}
            returned = callback(self, i, t, tensors)
            if self._guidance_scale != guidance.scale:
                raise InputError(
                    f"a callback set _guidance_scale to {self._guidance_scale}, which does not act: give"
                    " guidance_interval, the noise levels at which guidance acts"
                )
            changed = returned.get("latents", latents) if isinstance(returned, dict) else latents
            if not (returned is None or isinstance(returned, dict)) or changed.shape != latents.shape:
                raise InputError(f"callback_on_step_end must return a dictionary, with latents {list(latents.shape)}")
            return changed

        self._guidance_scale = guidance.scale
        return denoise(
            predict,
            noise,
            self.scheduler,
            num_steps,
            labels=None if labels is None else labels.to(noise.device),
            null_label=self.transformer.num_classes,
            guidance=guidance,
            generator=generator,
            prefix=prefix,
            step_end=step_end,
            progress=progress,
        )

    @property
    def num_timesteps(self) -> int:
        """Calls of the scheduler in the sampling that goes on, or was the last: what callbacks read."""
        return self._num_timesteps

    @property
    def guidance_scale(self) -> float:
        """Scale of guidance in the sampling that goes on, or was the last."""
        return self._guidance_scale

    def image_size(self, height: int | None = None, width: int | None = None) -> tuple[int, int]:
        """Returns height and width of the images, or frames, in pixels; those of training where None is given."""
        places_high, places_wide = self._places(height, width)
        return places_high * self._pixels_per_place, places_wide * self._pixels_per_place

    @property
    def image_channels(self) -> int:
        """Channels of the pixels, 1 or 3 as a rule."""
        if self.vae is None:
            return int(self.transformer.in_channels)
        channels = int(self.vae.config.get("out_channels", 3))
        return channels if channels in (1, 3) else 3  # Wan 2.2 counts those of its patches

    @property
    def _pixels_per_place(self) -> int:
        """Pixels along one axis for each latent place."""
        return downsampling(self.vae) if self.vae is not None else 1

    @property
    def _patch(self) -> tuple[int, ...]:
        """Latent places of a patch along each axis."""
        return self.transformer.patch_size

    def _places(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Converts height and width in pixels to latent places; those of training for None."""
        sizes = []
        for name, pixels, axis in (("height", height, -2), ("width", width, -1)):
            unit = self._pixels_per_place * self._patch[axis]
            if pixels is not None and (not is_whole(pixels) or pixels < unit or pixels % unit):
                raise InputError(f"{name} must be a multiple of {unit} pixels, got {pixels}")
            trained = self.transformer.input_size[axis]
            sizes.append(trained if pixels is None else pixels // self._pixels_per_place)
        return sizes[0], sizes[1]


def latent_channels(vae: ModelMixin) -> int | None:
    """Counts the channels of an autoencoder's latents; None where its configuration does not tell."""
    return vae.config.get("latent_channels", vae.config.get("z_dim"))  # `z_dim` is Wan's name for them


def require_finite(samples: Tensor) -> Tensor:
    """Returns samples [B, ...] from an autoencoder; raises `NonFiniteSamplesError` where one holds a non-number."""
    bad = (~samples.isfinite().flatten(1).all(1)).nonzero().flatten().tolist()
    if bad:
        raise NonFiniteSamplesError(bad, "in the autoencoder")
    return samples


def _as_list(class_labels: Any, sample: str) -> list[int]:
    """Lists labels; torch itself would round 1.5 and take True for 1."""
    if isinstance(class_labels, Tensor | np.ndarray):
        class_labels = class_labels.tolist()
    items = list(class_labels) if isinstance(class_labels, Sequence) and not isinstance(class_labels, str) else None
    labels = []
    for item in [class_labels] if items is None else items:
        label = item.item() if isinstance(item, Tensor) and item.ndim == 0 else item
        if not is_whole(label):
            raise InputError(f"class_labels must be a whole number for each {sample}, got {label!r:.100}")
        labels.append(int(label))
    return labels
