"""Sizes, options and memory of what a pipeline draws: checks before any work.

B samples, C latent channels, *grid latent size: H x W of images, T x H x W of videos.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import DiffusionPipeline, ModelMixin
from torch import Tensor

from headmix_vision.console import available_memory
from headmix_vision.diffusion.denoising import Generators, Guidance
from headmix_vision.diffusion.objectives import NUM_TIMESTEPS
from headmix_vision.errors import InputError, check_counts, check_numbers, is_whole
from headmix_vision.models.autoencoders import downsampling, time_downsampling

OUTPUT_TYPES = ("pil", "np", "pt", "latent")


class SampleSizes(DiffusionPipeline):
    """Base class of the pipeline, with the sizes that its network and its autoencoder allow."""

    _callback_tensor_inputs: ClassVar[list[str]] = ["latents"]

    @property
    def draws_videos(self) -> bool:
        """Whether the network is one of clips."""
        return len(self.transformer.input_size) == 3

    @property
    def samples_are(self) -> str:
        """Name of the samples in messages, `images` or `videos`; the argument with their number follows from it."""
        return "videos" if self.draws_videos else "images"

    def check_labels(
        self, class_labels: int | Sequence[int] | Tensor | None, count: int | None, guidance: Guidance
    ) -> Tensor | None:
        """Return labels as int64 [B], None for an unconditional model; refuses what does not fit, see `__call__`."""
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

    def check_memory(
        self,
        count: int,
        guidance: Guidance,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
    ) -> None:
        """Refuse samples whose tokens alone, with the hidden layer of an MLP, exceed the memory.

        Args:
            count: number of samples at a time.
            guidance: how they are guided.
            height, width, num_frames: as in `__call__`.

        Raises:
            InputError: if they cannot be made on the pipeline's device.
        """
        grid, size = self._latent_size(num_frames, height, width), self.image_size(height, width)
        if self.transformer.block_frames is not None:
            grid = (self.transformer.block_frames, *grid[1:])
        width_of_all = self.transformer.embed_dim * (1 + 2 * self.transformer.config.mlp_ratio)
        passes = 1 if guidance.scale in (0, 1) else 2
        values = count * math.prod(grid) // math.prod(self.transformer.patch_size) * width_of_all * passes
        needed = values * self.transformer.dtype.itemsize
        device = self._execution_device
        memory = available_memory(device)
        if needed > memory:
            frames = f"{self.clip_size(num_frames)[0]} frames of " if self.draws_videos else ""
            raise InputError(
                f"{count} {self.samples_are} of {frames}{size[0]}x{size[1]} pixels at a time need more than"
                f" {needed / 1e9:.0f} GB, {memory / 1e9:.0f} GB of the memory of {device} are left"
            )

    def image_size(self, height: int | None = None, width: int | None = None) -> tuple[int, int]:
        """Return height and width of the images, or frames, in pixels; the training size where None is given."""
        places_high, places_wide = self._places(height, width)
        return places_high * self._pixels_per_place, places_wide * self._pixels_per_place

    @property
    def image_channels(self) -> int:
        """Channels of the pixels, 1 or 3 as a rule."""
        if self.vae is None:
            return int(self.transformer.in_channels)
        channels = int(self.vae.config.get("out_channels", 3))
        return channels if channels in (1, 3) else 3  # Wan 2.2 counts the channels of its patches

    @property
    def _pixels_per_place(self) -> int:
        """Pixels along one axis for each latent place."""
        return downsampling(self.vae) if self.vae is not None else 1

    def check_frame_rate(self, frame_rate: float | None) -> float:
        """Return the frames a second of the videos, as in training for None, or refuse another value."""
        if frame_rate is None:
            return float(self.transformer.frame_rate * self._frames_per_place)
        check_numbers(0.01, 1e4, frame_rate=frame_rate)  # GIF shows a frame for 655 s at most
        return float(frame_rate)

    def clip_size(
        self, num_frames: int | None = None, height: int | None = None, width: int | None = None
    ) -> tuple[int, int, int]:
        """Return frames, and height and width in pixels, of the videos; as in training where None is given."""
        frames = self._latent_size(num_frames, height, width)[0]
        return (frames - 1) * self._frames_per_place + 1, *self.image_size(height, width)

    def most_frames(self, limit: int) -> int:
        """Return the largest number of frames, of at most `limit`, that fits network and autoencoder; 0 for none."""
        places = (limit - 1) // self._frames_per_place + 1
        places -= places % self._unit
        return (places - 1) * self._frames_per_place + 1 if places > 0 else 0

    def check_frames(self, name: str, frames: Any) -> int:
        """Return the latent frames of a number of frames.

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

    def count_blocks(self, num_frames: int, prefix: int = 0) -> int:
        """Count how often noise is denoised for a clip: once, or for each block after the frames of the prefix."""
        if self.transformer.block_frames is None:
            return 1
        places = [(frames - 1) // self._frames_per_place + 1 for frames in (num_frames, prefix)]
        return (places[0] - places[1]) // self.transformer.block_frames

    @property
    def _unit(self) -> int:
        """Latent frames of which a clip has a multiple."""
        return self.transformer.block_frames or self.transformer.patch_size[0]

    @property
    def _is_frame_by_frame(self) -> bool:
        return self.vae is not None and time_downsampling(self.vae) is None

    @property
    def _frames_per_place(self) -> int:
        """Frames for each latent frame but the first, which is one frame."""
        return (time_downsampling(self.vae) or 1) if self.vae is not None else 1

    def _latent_size(self, num_frames: int | None, height: int | None, width: int | None) -> tuple[int, ...]:
        places = self._places(height, width)
        if not self.draws_videos:
            return places
        trained = self.transformer.input_size[0]
        return trained if num_frames is None else self.check_frames("num_frames", num_frames), *places

    def _places(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Convert height and width in pixels to latent places; as in training for None."""
        sizes = []
        for name, pixels, axis in (("height", height, -2), ("width", width, -1)):
            unit = self._pixels_per_place * self.transformer.patch_size[axis]
            if pixels is not None and (not is_whole(pixels) or pixels < unit or pixels % unit):
                raise InputError(f"{name} must be a multiple of {unit} pixels, got {pixels}")
            trained = self.transformer.input_size[axis]
            sizes.append(trained if pixels is None else pixels // self._pixels_per_place)
        return sizes[0], sizes[1]


def latent_channels(vae: ModelMixin) -> int | None:
    """Count the channels of an autoencoder's latents; None where its configuration does not tell."""
    return vae.config.get("latent_channels", vae.config.get("z_dim"))  # `z_dim` is Wan's name for them


def _as_list(class_labels: Any, sample: str) -> list[int]:
    """List labels; torch itself would round 1.5 and take True for 1."""
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
