"""A pipeline of diffusers that draws a clip of any length in groups of frames, by a causal converted Wan."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from diffusers import WanPipeline
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from diffusers.pipelines.pipeline_utils import DiffusionPipeline as DiffusionPipeline  # diffusers looks for it here
from diffusers.pipelines.wan.pipeline_output import WanPipelineOutput
from torch import Tensor

from headmix_vision.errors import InputError, check_counts
from headmix_vision.models.diffusers_features import found_by_diffusers


@found_by_diffusers
class WanStreamPipeline(WanPipeline):
    """Draw a clip in groups of frames, one after another, in memory that does not depend on their number.

    The transformer is one of :func:`~headmix_vision.models.convert.wan_to_mhla` with ``causal=True``. A group is a row
    of its blocks along time. It is denoised on the state of the groups before, then read once, clean, into the state.
    """

    @torch.no_grad()
    def stream(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        height: int = 480,
        width: int = 832,
        num_frames: int = 81,
        num_inference_steps: int = 50,
        guidance_scale: float = 5.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        output_type: str = "np",
        max_sequence_length: int = 512,
    ) -> Iterator[Any]:
        """Yield the frames of each group as soon as they are drawn; arguments as in ``WanPipeline``.

        Args:
            num_frames: frames of the clip, of whole groups: with groups of 7 latent frames 25, 53, 81, 109, ...

        Raises:
            InputError: if the transformer is not causal, there are two, a number is out of range, the frames are not
                whole groups, or ``latents`` has another shape.
        """
        check_counts(1, num_frames=num_frames, height=height, width=width, num_inference_steps=num_inference_steps)
        length = getattr(self.transformer, "row_frames", None)
        if length is None or self.transformer_2 is not None or self.config.expand_timesteps:
            raise InputError("streaming needs one transformer, converted by wan_to_mhla with causal=True.")
        scale = self.vae_scale_factor_temporal
        groups, rest = divmod((num_frames - 1) // scale + 1, length)
        if rest or not groups or num_frames % scale != 1:
            near = sorted({scale * (length * count - 1) + 1 for count in (max(groups, 1), groups + 1)})
            raise InputError(f"num_frames must fill groups of {length} latent frames, got {num_frames}: give {near}.")
        given = (prompt, negative_prompt, height, width, prompt_embeds, negative_prompt_embeds)
        self.check_inputs(*given)
        self._guidance_scale, device, dtype = guidance_scale, self._execution_device, self.transformer.dtype
        texts: Any = self.encode_prompt(
            prompt,
            negative_prompt,
            self.do_classifier_free_guidance,
            prompt_embeds=prompt_embeds,
            negative_prompt_embeds=negative_prompt_embeds,
            max_sequence_length=max_sequence_length,
            device=device,
        )
        texts = [text.to(dtype) for text in texts[: 1 + self.do_classifier_free_guidance]]
        sizes = (len(texts[0]), self.transformer.config.in_channels, height, width, scale * (length - 1) + 1)
        if latents is not None:
            spatial = (side // self.vae_scale_factor_spatial for side in (height, width))
            expected = (*sizes[:2], groups * length, *spatial)
            if tuple(latents.shape) != expected:
                raise InputError(f"latents must have the shape {expected}, got {tuple(latents.shape)}.")
        states: list[Any] = [None] * len(texts)
        features: list[Any] = []
        for group in range(groups):
            own = None if latents is None else latents[:, :, group * length : (group + 1) * length]
            x = self.prepare_latents(*sizes, torch.float32, device, generator, own)
            self.scheduler.set_timesteps(num_inference_steps, device=device)
            for t in self.progress_bar(self.scheduler.timesteps):
                predicted, *unguided = (one for one, _ in self._run(x.to(dtype), t, texts, states))
                for other in unguided:
                    predicted = other + guidance_scale * (predicted - other)
                x = self.scheduler.step(predicted, t, x, return_dict=False)[0]
            states = [state for _, state in self._run(x.to(dtype), torch.zeros((), device=device), texts, states)]
            yield x if output_type == "latent" else self._decode(x, features, output_type)
        self.maybe_free_model_hooks()

    def _run(self, x: Tensor, t: Tensor, texts: list[Tensor], states: list[Any]) -> list[tuple[Tensor, Any]]:
        """Run the transformer on a group for each text."""
        stream, times = self.transformer.stream, t.expand(len(x))
        return [stream(x, times, text, state=state) for text, state in zip(texts, states, strict=True)]

    def _decode(self, latents: Tensor, features: list[Any], output_type: str) -> Any:
        """Decode the next latent frames; ``features``, empty at the start, holds what the decoder keeps of the last."""
        vae, is_first = self.vae, not features
        features += [None] * (vae._cached_conv_counts["decoder"] if is_first else 0)
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        z = vae.post_quant_conv((latents * std.to(latents) + mean.to(latents)).to(vae.dtype))
        frames = [
            vae.decoder(frame, feat_cache=features, feat_idx=[0], first_chunk=is_first and index == 0)
            for index, frame in enumerate(z.split(1, dim=2))
        ]
        video = torch.cat(frames, dim=2)
        if vae.config.patch_size is not None:
            video = unpatchify(video, patch_size=vae.config.patch_size)
        return self.video_processor.postprocess_video(video.clamp(-1, 1), output_type=output_type)

    def __call__(self, *args: Any, return_dict: bool = True, **options: Any) -> Any:
        """Draw a whole clip; arguments as in :meth:`stream`."""
        groups = list(self.stream(*args, **options))
        if isinstance(groups[0], Tensor):
            video: Any = torch.cat(groups, dim=2 if options.get("output_type") == "latent" else 1)
        elif isinstance(groups[0], np.ndarray):
            video = np.concatenate(groups, axis=1)
        else:
            video = [list(chain.from_iterable(clips)) for clips in zip(*groups, strict=True)]
        return WanPipelineOutput(frames=video) if return_dict else (video,)
