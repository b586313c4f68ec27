"""Image autoencoders of diffusers behind one face: pixels in, scaled latents out, and back.

Shapes: B images, C image channels, H and W pixels, c latent channels, h and w latent places.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.files.hashes import state_sha256

PIXELS = "none"


@dataclass(frozen=True)
class LatentScale:
    """Brings latents to unit scale: (latent - shift) * scale, each a number or one per channel.

    Args:
        scale: Factor after the shift.
        shift: Subtracted first.
    """

    scale: float | list[float] = 1.0
    shift: float | list[float] = 0.0

    def apply(self, latents: Tensor) -> Tensor:
        """Scales latents [B, C, *grid]: images of an autoencoder or clips, the channels stand second."""
        return (latents - self._tensor(self.shift, latents)) * self._tensor(self.scale, latents)

    def undo(self, latents: Tensor) -> Tensor:
        """Inverts `apply`."""
        return latents / self._tensor(self.scale, latents) + self._tensor(self.shift, latents)

    @staticmethod
    def _tensor(value: float | list[float], like: Tensor) -> Tensor:
        tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
        return tensor.view(-1, *[1] * (like.ndim - 2)) if tensor.ndim else tensor


class Autoencoder:
    """An image autoencoder of diffusers, or none.

    Its module is kept out of `nn.Module`s that hold this object: it is neither trained, nor averaged, nor saved.

    Args:
        module: `AutoencoderKL`, `AutoencoderDC` or one with their methods; None for pixels, which are scaled from
            [0, 1] to [-1, 1].
        source: Where it came from, for the record.
        device: Where to run.
        dtype: Type to run in.
    """

    def __init__(
        self,
        module: Any | None,
        source: str = PIXELS,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.source = source
        self.device = torch.device(device)
        self.dtype = dtype
        if module is not None and module.dtype != dtype:
            module = module.to(dtype)
        self.module = None if module is None else module.to(device).eval().requires_grad_(False)
        config: Any = {} if module is None else module.config
        self.downsampling = 1 if module is None else downsampling(module)
        self.image_channels = int(config.get("in_channels", 3))
        self.scale = latent_scale(config)
        self.sha256 = None if module is None else state_sha256(module.state_dict())

    @property
    def description(self) -> dict[str, Any]:
        """Everything that a latents file records about the autoencoder."""
        return {
            "source": self.source,
            "class": type(self.module).__name__ if self.module is not None else None,
            "sha256": self.sha256,
            "downsampling": self.downsampling,
            **asdict(self.scale),
        }

    def check_size(self, height: int, width: int) -> None:
        """Raises InputError if an image size does not divide into latent places."""
        if height % self.downsampling or width % self.downsampling:
            raise InputError(f"image size {height}x{width} is no multiple of {self.downsampling}, the autoencoder's")

    @torch.inference_mode()
    def moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Encodes images into mean and standard deviation of their latents, not yet scaled.

        Args:
            images: Float [B, C, H, W] in [0, 1].

        Returns:
            Mean, and standard deviation where the autoencoder has one, each float32 [B, c, h, w].
        """
        self.check_size(*images.shape[-2:])
        pixels = images.to(self.device, self.dtype) * 2 - 1
        if self.module is None:
            return pixels.float(), None
        encoded = self.module.encode(pixels)
        distribution = getattr(encoded, "latent_dist", None)
        if distribution is None:
            return encoded.latent.float(), None
        return distribution.mean.float(), distribution.std.float()

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Tensor:
        """Decodes scaled latents [B, c, h, w] into images, float32 [B, C, H, W] in [0, 1]."""
        latents = self.scale.undo(latents.to(self.device, torch.float32))
        if self.module is not None:
            latents = self.module.decode(latents.to(self.dtype)).sample.float()
        return (latents / 2 + 0.5).clamp(0, 1)


def load_autoencoder(
    source: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, subfolder: str | None = None
) -> Autoencoder:
    """Loads an image autoencoder of diffusers.

    Args:
        source: A local directory with `config.json` and weights, also a pipeline's directory with `vae/`; a hub id,
            which is fetched unless the hub's cache has it; or `none` for pixels.
        device: Where to run.
        dtype: Type to run in.
        subfolder: Folder within the directory or repository.

    Raises:
        InputError: No autoencoder there, or one that is none of images.
    """
    if source == PIXELS:
        return Autoencoder(None, device=device, dtype=dtype)
    import diffusers

    path = Path(source)
    if path.is_dir() and subfolder is None and not (path / "config.json").is_file():
        if not (path / "vae" / "config.json").is_file():
            raise InputError(f"{source} has neither config.json nor vae/config.json: no autoencoder of diffusers")
        subfolder = "vae"
    if not path.is_dir() and (path.is_absolute() or source.startswith(".") or source.count("/") != 1):
        raise InputError(f"autoencoder {source!r} is no directory, no hub id OWNER/NAME, and not {PIXELS!r}")
    try:
        module = diffusers.AutoModel.from_pretrained(
            source, subfolder=subfolder, torch_dtype=dtype, low_cpu_mem_usage=False
        )
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        hint = "" if path.is_dir() else "; without a connection, give the directory of a downloaded copy"
        raise InputError(f"autoencoder {source!r} cannot be loaded: {str(error).splitlines()[0]}{hint}") from None
    if not hasattr(module, "encode") or not hasattr(module, "decode"):
        raise InputError(f"autoencoder {source!r} is a {type(module).__name__}, which does not encode images")
    return Autoencoder(module, source, device, dtype)


def downsampling(module: Any) -> int:
    """Counts the pixels of an image per latent place, along one axis."""
    ratio = getattr(module, "spatial_compression_ratio", None)
    return int(ratio or 2 ** (len(module.config.block_out_channels) - 1))


def latent_scale(config: Any) -> LatentScale:
    """Reads the scale that a configuration states, by the rule of diffusers' pipelines."""
    factor = float(config.get("scaling_factor") or 1.0)
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if mean is not None and std is not None:
        return LatentScale([factor / float(value) for value in std], [float(value) for value in mean])
    return LatentScale(factor, float(config.get("shift_factor") or 0.0))
