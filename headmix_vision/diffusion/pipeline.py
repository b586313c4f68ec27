"""A pipeline of diffusers that draws images or videos of given classes.

B samples, T frames, H x W pixels, C latent channels, *grid latent size: H x W of images, T x H x W of videos.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from diffusers import ImagePipelineOutput, ModelMixin, SchedulerMixin
from diffusers.utils import BaseOutput, is_accelerate_available
from diffusers.utils.torch_utils import randn_tensor
from diffusers.video_processor import VideoProcessor
from PIL import Image
from torch import Tensor

from headmix_vision.diffusion.denoising import (
    Generators,
    Guidance,
    Network,
    NonFiniteSamplesError,
    check_scheduler,
    create_scheduler,
    denoise,
    is_flow,
)
from headmix_vision.diffusion.objectives import ObjectiveConfig
from headmix_vision.diffusion.sizes import SampleSizes, latent_channels
from headmix_vision.errors import InputError
from headmix_vision.files.tensors import check_sums, write_sums
from headmix_vision.models.autoencoders import decode, encode, latent_scale
from headmix_vision.models.diffusers_features import found_by_diffusers
from headmix_vision.models.headmix_dit import ClipState

StepCallback = Callable[[Any, int, Any, dict[str, Tensor]], dict[str, Tensor]]
_PARTS = ("transformer", "scheduler", "vae")
_LIBRARIES = ("diffusers", "headmix_vision")
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")


@dataclass
class VideoPipelineOutput(BaseOutput):
    """Videos: float32 [B, T, H, W, C] (`np`), [B, T, C, H, W] (`pt`), lists of images (`pil`), or latents."""

    frames: np.ndarray | Tensor | list[list[Image.Image]]


@dataclass(frozen=True)
class _Drawing:
    """Settings of one call of a pipeline; see `HeadMixDiTPipeline.__call__`."""

    labels: Tensor | None
    num_steps: int
    generator: Generators
    callback: StepCallback | None
    tensor_inputs: Sequence[str]


class HeadMixDiTPipeline(SampleSizes):
    """Images or videos of given classes from a :class:`~headmix_vision.models.HeadMixDiT`.

    Args:
        transformer: the network; its input decides between images and videos.
        scheduler: a scheduler that fits what the network was trained for; see `set_scheduler`.
        vae: the autoencoder of diffusers whose latents the network knows; None for pixels. One of images (such as
            AutoencoderKL or AutoencoderDC) takes videos frame by frame.
        objective: what the network was trained for, an :class:`~headmix_vision.diffusion.ObjectiveConfig` as a
            dictionary; flow matching when None.
        class_names: one name per class.

    Raises:
        InputError: if the autoencoder's latents do not fit the network, or the objective or the names are malformed.
    """

    model_cpu_offload_seq = "transformer->vae"
    _optional_components: ClassVar[list[str]] = ["vae"]

    def __init__(
        self,
        transformer: ModelMixin,
        scheduler: SchedulerMixin,
        vae: ModelMixin = None,
        objective: dict[str, Any] | None = None,
        class_names: list[str] | None = None,
    ) -> None:
        super().__init__()
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
        """Load a directory written by `save_pretrained`; arguments as in diffusers.

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
        """Write a directory for `from_pretrained`, with `SHA256SUMS` of its files; arguments as in diffusers."""
        super().save_pretrained(save_directory, *args, **kwargs)
        write_sums(Path(save_directory))

    @property
    def objective(self) -> ObjectiveConfig:
        """Objective of the network's training."""
        return ObjectiveConfig.from_dict(self.config.objective)

    def set_scheduler(self, name: str | None, spacing: str | None = None) -> None:
        """Choose another scheduler by its name in :data:`~headmix_vision.diffusion.SCHEDULER_NAMES`.

        Args:
            name: the name; the objective's own scheduler when None.
            spacing: which of the 1,000 times ddim and ddpm take: `trailing`, `linspace` or `leading`.
        """
        scheduler = create_scheduler(name, self.objective, clip=self.vae is None, spacing=spacing)
        self.register_modules(scheduler=scheduler)

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
        *,
        num_videos: int | None = None,
        num_frames: int | None = None,
        frame_rate: float | None = None,
        prefix: np.ndarray | Tensor | None = None,
        later_guidance_scale: float | None = None,
    ) -> ImagePipelineOutput | VideoPipelineOutput | tuple[Any]:
        """Draw images or videos.

        Args:
            class_labels: a label for each sample, `num_classes` for no class; None with an unconditional model.
            num_images, num_videos: their number, needed without labels only.
            guidance_scale, guidance_interval, guidance_channels: see :class:`~headmix_vision.diffusion.Guidance`; with
                `guidance_scale=0` the prefix alone decides how a video continues.
            num_inference_steps: sampling steps.
            height, width: in pixels; the size of training when None.
            generator: random numbers, one generator for all samples or a list with one for each, which makes a sample
                independent of the others.
            latents: start noise [B, C, *grid] instead of drawing it.
            output_type: `pil`, `np` (float32 [B, H, W, channels] or [B, T, H, W, channels] in [0, 1]), `pt` (the same
                as [B, channels, H, W] or [B, T, channels, H, W]) or `latent` (what the network produced).
            return_dict: a tuple if False.
            callback_on_step_end: called as `callback(pipeline, step, timestep, tensors)` after each step, of each block
                where videos are drawn block by block. The `latents` that it returns replace the current ones.
            callback_on_step_end_tensor_inputs: names of the tensors it wants; there is `latents`.
            num_frames: frames of a video; the length of training when None. Positions extend to more frames.
            frame_rate: frames per second; the rate of training when None.
            prefix: first frames, of each video or of all, values in [0, 1]: an array [B or 1, T0, H, W, channels]
                or a tensor [B or 1, T0, channels, H, W], as `np` and `pt` give them. The model should have been trained
                with a `clean_prefix`.
            later_guidance_scale: for a network that draws block by block, the scale of the blocks after as many frames
                as in training; `guidance_scale` when None.

        Returns:
            `ImagePipelineOutput` with `images`, or `VideoPipelineOutput` with `frames`.

        Raises:
            InputError: if labels are missing, too many, not whole numbers or out of range, guidance is asked of a model
                without a null class, a size, a number of frames or the prefix does not fit or exceeds the memory, an
                option of videos is given for images, or an option is unknown.
            NonFiniteSamplesError: if a sample became infinite or NaN.
        """
        of_videos = {"num_videos": num_videos, "num_frames": num_frames, "frame_rate": frame_rate, "prefix": prefix}
        of_videos["later_guidance_scale"] = later_guidance_scale
        for name, value in ({"num_images": num_images} if self.draws_videos else of_videos).items():
            if value is not None:
                raise InputError(f"{name} does not apply to a network of {self.samples_are}: leave it out")
        guidance = Guidance(guidance_scale, guidance_interval, guidance_channels)  # type: ignore[arg-type]
        num = num_videos if self.draws_videos else num_images
        labels, later = self.check_labels(class_labels, num, guidance), guidance
        if later_guidance_scale is not None:
            if self.transformer.block_frames is None:
                raise InputError("later_guidance_scale needs a network that draws block by block: causal='rows'")
            later = replace(guidance, scale=later_guidance_scale)
            self.check_labels(class_labels, num, later)
        count = len(labels) if labels is not None else num or 1
        inputs = getattr(callback_on_step_end, "tensor_inputs", callback_on_step_end_tensor_inputs)
        self._check_options(num_inference_steps, output_type, inputs, generator, count)
        rate = self.check_frame_rate(frame_rate) / self._frames_per_place if self.draws_videos else None
        grid = self._latent_size(num_frames, height, width)
        self.check_memory(count, guidance, height, width, num_frames)
        encoded = None
        if prefix is not None:
            encoded = self._encode(self._check_prefix(prefix, count, self.clip_size(num_frames, height, width)))
        noise = self._start_noise((count, self.transformer.config.in_channels, *grid), generator, latents)
        drawing = _Drawing(labels, num_inference_steps, generator, callback_on_step_end, inputs)

        def network(x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
            rates = () if rate is None else (rate,)
            return self.transformer(x.to(self.transformer.dtype), t, y, *rates).float()

        if self.transformer.block_frames is None:
            latents = self._denoise(noise, guidance, network, drawing, encoded)
        else:
            latents = self._draw_blocks(noise, guidance, later, cast(float, rate), encoded, drawing)
        samples: Any = latents if output_type == "latent" else self._decode(latents, output_type)
        self.maybe_free_model_hooks()
        if not return_dict:
            return (samples,)
        return VideoPipelineOutput(frames=samples) if self.draws_videos else ImagePipelineOutput(images=samples)

    def _draw_blocks(
        self, noise: Tensor, guidance: Guidance, later: Guidance, rate: float, prefix: Tensor | None, drawing: _Drawing
    ) -> Tensor:
        """Turn noise [B, C, T, H, W] into clips block by block, each on the state of the clean ones before it.

        Where there is guidance, the state is that of all clips with their class, and once more without.

        Args:
            noise: Of all frames.
            guidance, later: Of the blocks that begin within as many frames as in training, and of those after them.
            rate: Latent frames a second.
            prefix: Latents of the prefix, whole blocks.
            drawing: The rest of the call.
        """
        model, count = self.transformer, len(noise)
        if not is_flow(self.scheduler):
            raise InputError("block by block needs a model trained by flow matching: DDPM has no noise level 0")
        both = drawing.labels is not None and (guidance.enabled or later.enabled)
        labels = None if drawing.labels is None else drawing.labels.to(noise.device)
        if labels is not None and both:
            labels = torch.cat([labels, torch.full_like(labels, model.num_classes)])
        state: ClipState | None = None

        def network(x: Tensor, t: Tensor | float, y: Tensor | None) -> Tensor:
            before = state
            if before is not None and y is not None and len(x) < len(cast(Tensor, labels)):  # with class, or without
                before = before.of(torch.arange(count, device=x.device) + count * (y == model.num_classes))
            return model.stream(x.to(model.dtype), t, y, rate, state=before)[0].float()

        blocks: list[Tensor] = []
        for block in noise.split(model.block_frames, dim=2):
            first = len(blocks) * model.block_frames
            if prefix is not None and first < prefix.shape[2]:
                clean = prefix[:, :, first : first + model.block_frames].to(noise).expand_as(block)
            else:
                clean = self._denoise(block, guidance if first < model.input_size[0] else later, network, drawing)
            blocks.append(clean)
            if first + model.block_frames < noise.shape[2]:
                pushed = torch.cat([clean, clean]) if both else clean
                _, state = model.stream(pushed.to(model.dtype), 0.0, labels, rate, state=state)
        return torch.cat(blocks, dim=2)

    def _start_noise(self, shape: tuple[int, ...], generator: Generators, latents: Tensor | None) -> Tensor:
        """Draw the start of the samples, float32 of a shape [B, C, *grid], or takes the one that is given."""
        if latents is None:
            device = self._execution_device
            return randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        if not isinstance(latents, Tensor) or tuple(latents.shape) != shape or not latents.isfinite().all():
            given = list(latents.shape) if isinstance(latents, Tensor) else type(latents).__name__
            raise InputError(f"latents must be of shape {list(shape)} and finite, got {given}")
        return latents.to(self._execution_device, torch.float32)

    def _denoise(
        self, noise: Tensor, guidance: Guidance, network: Network, drawing: _Drawing, prefix: Tensor | None = None
    ) -> Tensor:
        """Turn noise [B, C, *grid] into data by a network."""
        check_scheduler(self.scheduler, self.objective)

        def predict(x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
            if not self.transformer.is_cache_enabled:
                return network(x, t, y)
            with self.transformer.cache_context(f"{len(x)} samples"):  # more of them where guidance acts
                return network(x, t, y)

        def progress(times: Any) -> Any:
            self._num_timesteps = len(times)
            return self.progress_bar(times)

        def step_end(i: int, t: Any, latents: Tensor) -> Tensor:
            if drawing.callback is None:
                return latents
            tensors = {name: latents for name in drawing.tensor_inputs}
            returned = drawing.callback(self, i, t, tensors)
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
            drawing.num_steps,
            labels=None if drawing.labels is None else drawing.labels.to(noise.device),
            null_label=self.transformer.num_classes,
            guidance=guidance,
            generator=drawing.generator,
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

    def _check_prefix(self, prefix: Any, count: int, size: tuple[int, int, int]) -> Tensor:
        """Convert the prefix to [B, channels, T0, H, W] in [-1, 1]; refuses what does not fit."""
        if isinstance(prefix, np.ndarray) and prefix.ndim == 5:
            prefix = torch.from_numpy(prefix).movedim(-1, 2)
        if not isinstance(prefix, Tensor) or prefix.ndim != 5 or not prefix.is_floating_point():
            raise InputError(
                "prefix must hold numbers in [0, 1]: an array [B, T0, H, W, channels] or a tensor"
                " [B, T0, channels, H, W]"
            )
        given, frames, channels, *pixels = prefix.shape
        if given not in (1, count) or channels != self.image_channels or tuple(pixels) != size[1:]:
            raise InputError(
                f"prefix is of {given} clips of {channels} channels and {pixels[0]}x{pixels[1]} pixels, the videos are"
                f" {count} of {self.image_channels} channels and {size[1]}x{size[2]} pixels"
            )
        self.check_frames("the frames of the prefix", frames)
        if frames >= size[0]:
            raise InputError(f"num_frames is {size[0]}, the prefix alone has {frames}")
        if not (prefix.isfinite().all() and prefix.min() >= 0 and prefix.max() <= 1):
            raise InputError("prefix must hold finite numbers in [0, 1]")
        return prefix.to(self._execution_device, torch.float32).transpose(1, 2) * 2 - 1

    def _encode(self, clips: Tensor) -> Tensor:
        """Encode clips [B, channels, T, H, W] in [-1, 1] into scaled latents [B, C, T, H, W], clip by clip."""
        if self.vae is None:
            return clips
        latents = []
        for clip in clips.to(self.vae.dtype):
            one, _ = encode(self.vae, clip.transpose(0, 1) if self._is_frame_by_frame else clip[None])
            latents.append(one.transpose(0, 1) if self._is_frame_by_frame else one[0])
        return latent_scale(self.vae).apply(torch.stack(latents))

    def _decode(self, latents: Tensor, output_type: str) -> Any:
        """Turn latents into samples of a type; videos pass the autoencoder one by one."""
        processor = VideoProcessor()
        to_type = processor.postprocess_video if self.draws_videos else processor.postprocess
        if self.vae is None:
            return to_type(latents, output_type)
        latents = latent_scale(self.vae).undo(latents).to(self.vae.dtype)
        if not self.draws_videos:
            return to_type(require_finite(decode(self.vae, latents)), output_type)
        decoded = []
        for one in latents:
            frames = decode(self.vae, one.transpose(0, 1) if self._is_frame_by_frame else one[None])
            decoded.append(frames.transpose(0, 1) if self._is_frame_by_frame else frames[0])
        return to_type(require_finite(torch.stack(decoded)), output_type)


HeadMixVideoDiTPipeline = found_by_diffusers(HeadMixDiTPipeline, "HeadMixVideoDiTPipeline")
"""An earlier name, under which pipelines of videos were saved."""


def require_finite(samples: Tensor) -> Tensor:
    """Return samples [B, ...] from an autoencoder; raises `NonFiniteSamplesError` where one holds a non-number."""
    bad = (~samples.isfinite().flatten(1).all(1)).nonzero().flatten().tolist()
    if bad:
        raise NonFiniteSamplesError(bad, "in the autoencoder")
    return samples
