"""Autoencoders of diffusers, between images and latents: loading, encoding, decoding.

B batch, images [B, 3, H, W] in [-1, 1], latents [B, C, h, w] scaled to about unit variance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor

CLASSES = ("AutoencoderKL", "AutoencoderDC")


def load_autoencoder(source: str, dtype: torch.dtype = torch.float32) -> ModelMixin:
    """Load an image autoencoder.

    Args:
        source: A local directory as written by `save_pretrained` (or one whose folder `vae` is that), or a hub id.
        dtype: Type of its weights.

    Returns:
        The autoencoder, in evaluation mode and without gradients.

    Raises:
        ValueError: If there is none, or it is of another class.
    """
    folder = Path(source)
    if folder.is_dir():
        folder = folder if (folder / "config.json").is_file() else folder / "vae"
        if not (folder / "config.json").is_file():
            raise ValueError(f"{source} has no config.json of an autoencoder, neither itself nor in vae/")
        config = json.loads((folder / "config.json").read_text())
        source = str(folder)
    else:
        try:
            config = diffusers.AutoencoderKL.load_config(source)
        except OSError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"no autoencoder {source!r}: neither a local directory nor a hub id that can be reached ({reason});"
                " download it where there is a network, for example stabilityai/sd-vae-ft-ema, and give its directory"
            ) from None
    name = config.get("_class_name")
    if name not in CLASSES:
        raise ValueError(f"{source} holds a {name}, an autoencoder must be one of {', '.join(CLASSES)}")
    cls = getattr(diffusers, name)
    try:
        vae = cls.from_pretrained(source, torch_dtype=dtype, low_cpu_mem_usage=False)
    except OSError as error:
        raise ValueError(f"the weights of autoencoder {source} cannot be read: {str(error).splitlines()[0]}") from None
    return vae.eval().requires_grad_(False)


def latent_scale_and_shift(vae: ModelMixin) -> tuple[float, float]:
    """Scale and shift of an autoencoder's latents: what a network sees is (latent - shift) · scale."""
    config: Any = vae.config
    return float(config.get("scaling_factor") or 1.0), float(config.get("shift_factor") or 0.0)


def downsampling(vae: ModelMixin) -> int:
    """Pixels of an image per latent, along one axis."""
    channels = vae.config.get("block_out_channels") or vae.config.get("encoder_block_out_channels")
    return 2 ** (len(channels) - 1)


def latent_moments(vae: ModelMixin, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Mean and standard deviation of the unscaled latents; the deviation is None for a deterministic autoencoder."""
    encoded = vae.encode(images)
    if hasattr(encoded, "latent_dist"):
        return encoded.latent_dist.mean, encoded.latent_dist.std
    return encoded.latent, None


@torch.no_grad()
def encode_images(vae: ModelMixin, images: Tensor, noise: Tensor | None = None) -> Tensor:
    """Scaled latents of images; with standard normal noise of their shape a sample, else the mean."""
    mean, std = latent_moments(vae, images)
    if noise is not None and std is not None:
        mean = mean + std * noise
    scale, shift = latent_scale_and_shift(vae)
    return (mean - shift) * scale


@torch.no_grad()
def decode_latents(vae: ModelMixin, latents: Tensor) -> Tensor:
    """Images of scaled latents."""
    scale, shift = latent_scale_and_shift(vae)
    return vae.decode((latents / scale + shift).to(vae.dtype)).sample
