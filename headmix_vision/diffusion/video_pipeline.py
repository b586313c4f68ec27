"""A pipeline of diffusers that makes videos of given classes, from noise or from their first frames on.

B videos, T frames, H x W pixels; C latent channels, latents are [B, C, T, H, W] of the latent size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from diffusers.utils import BaseOutput
from diffusers.video_processor import VideoProcessor
from PIL import Image
from torch import Tensor

from headmix_vision.checks import check_counts, check_numbers
from headmix_vision.diffusion.denoising import Generators, Guidance, Network
from headmix_vision.diffusion.generator_pipeline import GeneratorPipeline, StepCallback, require_finite
from headmix_vision.diffusion.schedulers import is_flow
from headmix_vision.errors import InputError
from headmix_vision.models import HeadMixVideoDiT
from headmix_vision.models.autoencoders import latent_scale, time_downsampling
from headmix_vision.models.diffusers_features import found_by_diffusers
from headmix_vision.models.headmix_dit import ClipState


@dataclass
class VideoPipelineOutput(BaseOutput):
    """Videos: float32 [B, T, H, W, C] (`np`), [B, T, C, H, W] (`pt`), lists of images (`pil`), or latents."""

    frames: np.ndarray | Tensor | list[list[Image.Image]]


@found_by_diffusers
class HeadMixVideoDiTPipeline(GeneratorPipeline):
    """Videos of given classes from a :class:`~headmix_vision.models.HeadMixVideoDiT`.

    Args:
        transformer: the network.
        scheduler: a scheduler that fits what the network was trained for; see `set_scheduler`.
        vae: the autoencoder whose latents the network knows, of videos (such as AutoencoderKLWan) or of images, which
            then takes frame by frame; None for pixels.
        objective: what the network was trained for, an :class:`~headmix_vision.diffusion.ObjectiveConfig` as a
            dictionary; flow matching when None.
        class_names: one name per class.

    Raises:
        InputError: if the autoencoder's latents are not the network's, or the objective or the names are malformed.
    """

    samples_are = "videos"
    num_axes = 3
    network_class = HeadMixVideoDiT

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | Sequence[int] | Tensor | None = None,
        num_videos: int | None = None,
        guidance_scale: float = 1.0,
        guidance_interval: tuple[float, float] = (0.0, 1.0),
        guidance_channels: str = "all",
        later_guidance_scale: float | None = None,
        num_inference_steps: int = 50,
        num_frames: int | None = None,
        frame_rate: float | None = None,
        height: int | None = None,
        width: int | None = None,
        prefix: np.ndarray | Tensor | None = None,
        generator: Generators = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> VideoPipelineOutput | tuple[Any]:
        """Samples videos.

        Args:
            class_labels: a label for each video, `num_classes` for no class; None with an unconditional model.
            num_videos: their number, needed without labels only.
            guidance_scale, guidance_interval, guidance_channels: see :class:`~headmix_vision.diffusion.Guidance`; with
                `guidance_scale=0` the prefix alone decides how a video goes on.
            later_guidance_scale: of a network that draws block by block, the scale of the blocks that come after as
                many frames as in training; `guidance_scale` when None.
            num_inference_steps: sampling steps.
            num_frames: frames of a video, those of training when None; of more frames the positions go on.
            frame_rate: frames a second, that of training when None.
            height, width: of the videos in pixels; those of training when None.
            prefix: known first frames, of each video or of all, values in [0, 1]: an array [B or 1, T0, H, W, channels]
                or a tensor [B or 1, T0, channels, H, W], as `np` and `pt` give them. The model should have been trained
                with a `clean_prefix`.
            generator: random numbers, one generator for all videos or a list with one for each, which makes a video
                independent of the others.
            latents: start noise [B, C, T, H, W] instead of drawing it.
            output_type: `pil` (a list of images for each video), `np` (float32 [B, T, H, W, channels] in [0, 1]), `pt`
                (the same as [B, T, channels, H, W]) or `latent` (what the network produced).
            return_dict: a tuple if False.
            callback_on_step_end: called as `callback(pipeline, step, timestep, tensors)` after each step, of each block
                where they are drawn block by block; what it returns under `latents` is gone on with.
            callback_on_step_end_tensor_inputs: names of the tensors it wants; there is `latents`.

        Returns:
            `VideoPipelineOutput` with `frames`.

        Raises:
            InputError: if labels are missing, too many, no whole numbers or out of range, guidance is asked of a model
                without a null class, a size, a number of frames or the prefix does not fit or needs more memory than
                there is, or an option is unknown.
            NonFiniteSamplesError: if a video became infinite or not a number.
        """
        guidance = Guidance(guidance_scale, guidance_interval, guidance_channels)  # type: ignore[arg-type]
        labels = self.check_labels(class_labels, num_videos, guidance)
        later = guidance
        if later_guidance_scale is not None:
            if self.transformer.block_frames is None:
                raise InputError("later_guidance_scale needs a network that draws block by block: causal='rows'")
            later = replace(guidance, scale=later_guidance_scale)
            self.check_labels(class_labels, num_videos, later)
        count = len(labels) if labels is not None else num_videos or 1
        inputs = getattr(callback_on_step_end, "tensor_inputs", callback_on_step_end_tensor_inputs)
        self._check_options(num_inference_steps, output_type, inputs, generator, count)
        rate = self.check_frame_rate(frame_rate)
        grid = self._latent_size(num_frames, height, width)
        self.check_memory(count, num_frames, height, width, guidance)
        if prefix is not None:
            prefix = self._check_prefix(prefix, count, self.clip_size(num_frames, height, width))
        known = None if prefix is None else self._encode(prefix)
        noise = self._start_noise((count, self.transformer.config.in_channels, *grid), generator, latents)
        place_rate = rate / self._frames_per_place

        def draw(noise: Tensor, guidance: Guidance, network: Network, prefix: Tensor | None = None) -> Tensor:
            callback = callback_on_step_end, inputs
            return self._denoise(
                noise, labels, guidance, num_inference_steps, generator, *callback, prefix=prefix, network=network
            )

        if self.transformer.block_frames is None:

            def network(x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
                return self.transformer(x.to(self.transformer.dtype), t, y, place_rate).float()

            latents = draw(noise, guidance, network, known)
        else:
            latents = self._draw_blocks(noise, labels, guidance, later, place_rate, known, draw)
        frames = latents if output_type == "latent" else self._decode(latents, output_type)
        self.maybe_free_model_hooks()
        return VideoPipelineOutput(frames=frames) if return_dict else (frames,)

    def _draw_blocks(
        self,
        noise: Tensor,
        labels: Tensor | None,
        guidance: Guidance,
        later: Guidance,
        frame_rate: float,
        known: Tensor | None,
        draw: Callable[[Tensor, Guidance, Network], Tensor],
    ) -> Tensor:
        """Turns noise [B, C, T, H, W] into clips block by block, each on the state of the clean ones before it.

        Where there is guidance, the state is that of all clips with their class, and once more without.

        Args:
            noise, labels: Of all frames.
            guidance, later: Of the blocks that begin within as many frames as in training, and of those after them.
            frame_rate: Latent frames a second.
            known: Latents of the known first frames, whole blocks.
            draw: Turns the noise of a block into data, by a network.
        """
        model, count = self.transformer, len(noise)
        if not is_flow(self.scheduler):
            raise InputError("block by block needs a model trained by flow matching: DDPM has no noise level 0")
        both = labels is not None and (guidance.enabled or later.enabled)
        labels = None if labels is None else labels.to(noise.device)
        if labels is not None and both:
            labels = torch.cat([labels, torch.full_like(labels, model.num_classes)])
        state: ClipState | None = None

        def network(x: Tensor, t: Tensor | float, y: Tensor | None) -> Tensor:
            before = state
            if before is not None and y is not None and len(x) < len(cast(Tensor, labels)):  # with class, or without
                before = before.of(torch.arange(count, device=x.device) + count * (y == model.num_classes))
            return model.stream(x.to(model.dtype), t, y, frame_rate, state=before)[0].float()

        blocks: list[Tensor] = []
        for block in noise.split(model.block_frames, dim=2):
            first = len(blocks) * model.block_frames
            if known is not None and first < known.shape[2]:
                clean = known[:, :, first : first + model.block_frames].to(noise).expand_as(block)
            else:
                clean = draw(block, guidance if first < model.input_size[0] else later, network)
            blocks.append(clean)
            if first + model.block_frames < noise.shape[2]:
                pushed = torch.cat([clean, clean]) if both else clean
                _, state = model.stream(pushed.to(model.dtype), 0.0, labels, frame_rate, state=state)
        return torch.cat(blocks, dim=2)

    def check_memory(
        self, count: int, num_frames: int | None, height: int | None, width: int | None, guidance: Guidance
    ) -> None:
        """Refuses videos whose tokens alone, with the hidden layer of an MLP, are more than the memory holds.

        Raises:
            InputError: If `count` videos of this size at a time cannot be made on the pipeline's device.
        """
        grid, size = self._latent_size(num_frames, height, width), self.clip_size(num_frames, height, width)
        if self.transformer.block_frames is not None:
            grid = (self.transformer.block_frames, *grid[1:])
        self._check_memory(count, grid, size, guidance)

    def check_frame_rate(self, frame_rate: float | None) -> float:
        """Returns the frames a second of the videos, those of training for None; refuses what is no such number."""
        if frame_rate is None:
            return float(self.transformer.frame_rate * self._frames_per_place)
        check_numbers(0.01, 1e4, frame_rate=frame_rate)  # GIF shows a frame for 655 s at most
        return float(frame_rate)

    def clip_size(
        self, num_frames: int | None = None, height: int | None = None, width: int | None = None
    ) -> tuple[int, int, int]:
        """Returns frames, and height and width in pixels, of the videos; those of training where None is given."""
        frames = self._latent_size(num_frames, height, width)[0]
        return (frames - 1) * self._frames_per_place + 1, *self.image_size(height, width)

    def most_frames(self, limit: int) -> int:
        """Returns the largest number of frames, of at most `limit`, that fits network and autoencoder; 0 for none."""
        places = (limit - 1) // self._frames_per_place + 1
        places -= places % self._unit
        return (places - 1) * self._frames_per_place + 1 if places > 0 else 0

    def check_frames(self, name: str, frames: Any) -> int:
        """Returns the latent frames of a number of frames.

        Raises:
            InputError: If it fits the network's tubelets, or blocks, or the autoencoder not; it names the nearest that
                do.
        """
        check_counts(1, **{name: frames})
        below = self.most_frames(frames)
        if below != frames:
            step = self._frames_per_place * self._unit
            least = self.most_frames(step)
            form = f"a multiple of {step}" if least == step else f"{step}n + {least}"
            takes = f"{'blocks' if self.transformer.block_frames else 'tubelets'} of {self._unit}"
            takes += " and the autoencoder" if self._frames_per_place > 1 else ""
            nearest = f"{below} or {below + step}" if below else str(least)
            raise InputError(f"{name} must be {form}, for {takes}; got {frames}, nearest: {nearest}")
        return (frames - 1) // self._frames_per_place + 1

    def count_blocks(self, num_frames: int, known: int = 0) -> int:
        """Counts how often noise is denoised for a clip: once, or for each block after the known frames."""
        if self.transformer.block_frames is None:
            return 1
        places = [(frames - 1) // self._frames_per_place + 1 for frames in (num_frames, known)]
        return (places[0] - places[1]) // self.transformer.block_frames

    @property
    def _unit(self) -> int:
        """Latent frames of which a clip has a multiple."""
        return self.transformer.block_frames or self._patch[0]

    @property
    def _is_frame_by_frame(self) -> bool:
        return self.vae is not None and time_downsampling(self.vae) is None

    @property
    def _frames_per_place(self) -> int:
        """Frames for each latent frame but the first, which is one frame."""
        return (time_downsampling(self.vae) or 1) if self.vae is not None else 1

    def _latent_size(self, num_frames: int | None, height: int | None, width: int | None) -> tuple[int, int, int]:
        trained = self.transformer.input_size[0]
        frames = trained if num_frames is None else self.check_frames("num_frames", num_frames)
        return frames, *self._places(height, width)

    def _check_prefix(self, prefix: Any, count: int, size: tuple[int, int, int]) -> Tensor:
        """Converts the known first frames to [B, channels, T0, H, W] in [-1, 1]; refuses what does not fit."""
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
        """Encodes clips [B, channels, T, H, W] in [-1, 1] into scaled latents [B, C, T, H, W], clip by clip."""
        if self.vae is None:
            return clips
        latents = []
        for clip in clips.to(self.vae.dtype):
            encoded = self.vae.encode(clip.transpose(0, 1) if self._is_frame_by_frame else clip[None])
            distribution = getattr(encoded, "latent_dist", None)
            one = (encoded.latent if distribution is None else distribution.mean).float()
            latents.append(one.transpose(0, 1) if self._is_frame_by_frame else one[0])
        return latent_scale(self.vae).apply(torch.stack(latents))

    def _decode(self, latents: Tensor, output_type: str) -> Any:
        clips = latents
        if self.vae is not None:
            decoded, options = [], {}
            if self.vae.config.get("timestep_conditioning"):  # of LTX from 0.9.1 on: it may denoise while it decodes
                options["temb"] = torch.zeros(1, dtype=self.vae.dtype, device=latents.device)
            for one in latent_scale(self.vae).undo(latents).to(self.vae.dtype):
                given = one.transpose(0, 1) if self._is_frame_by_frame else one[None]
                clip = self.vae.decode(given, **options).sample.float()
                decoded.append(clip.transpose(0, 1) if self._is_frame_by_frame else clip[0])
            clips = require_finite(torch.stack(decoded))
        return VideoProcessor().postprocess_video(clips, output_type)
