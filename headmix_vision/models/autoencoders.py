"""One interface to the autoencoders of diffusers for images and videos: pixels in, scaled latents out, and back.

Shapes: B images or clips, C image channels, T frames, H and W pixels, c latent channels, t latent frames, h and w
latent places.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_files
from headmix_vision.files.tensors import state_sha256
from headmix_vision.models.building import building

PIXELS = "none"


@dataclass(frozen=True)
class LatentScale:
    """Linear map of latents to unit scale: (latent - shift) * scale, each a number or one per channel.

    Args:
        scale: Factor after the shift.
        shift: Subtracted first.
    """

    scale: float | list[float] = 1.0
    shift: float | list[float] = 0.0

    def apply(self, latents: Tensor) -> Tensor:
        """Scale latents [B, C, *grid]: images of an autoencoder or clips, the channels stand second."""
        return (latents - self._tensor(self.shift, latents)) * self._tensor(self.scale, latents)

    def undo(self, latents: Tensor) -> Tensor:
        """Invert `apply`."""
        return latents / self._tensor(self.scale, latents) + self._tensor(self.shift, latents)

    @staticmethod
    def _tensor(value: float | list[float], like: Tensor) -> Tensor:
        tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
        return tensor.view(-1, *[1] * (like.ndim - 2)) if tensor.ndim else tensor


class Autoencoder:
    """An autoencoder of images or of videos of diffusers, or none.

    One of images takes clips frame by frame. One of videos takes an image as a clip of one frame; its first latent
    frame stands for the first frame alone, each further one for as many frames as it compresses.

    Its module is kept out of every `nn.Module` that holds this object: it is neither trained, nor averaged, nor saved.

    Args:
        module: `AutoencoderKL`, `AutoencoderDC`, `AutoencoderKLWan`, `AutoencoderKLLTXVideo`,
            `AutoencoderKLCogVideoX` or one with their methods; None for pixels, which are scaled from [0, 1] to
            [-1, 1].
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
        self.time_downsampling = None if module is None else time_downsampling(module)
        channels = int(config.get("in_channels", 3))
        self.image_channels = channels if channels in (1, 3) else 3  # Wan 2.2 counts the channels of its patches
        self.scale = LatentScale() if module is None else latent_scale(module)
        self.sha256 = None if module is None else state_sha256(module.state_dict())

    @property
    def description(self) -> dict[str, Any]:
        """Everything that a latents file records about the autoencoder."""
        return {
            "source": self.source,
            "class": type(self.module).__name__ if self.module is not None else None,
            "sha256": self.sha256,
            "downsampling": self.downsampling,
            **({} if self.time_downsampling is None else {"time_downsampling": self.time_downsampling}),
            **asdict(self.scale),
        }

    def check_size(self, height: int, width: int) -> None:
        """Raise InputError if an image size does not divide into latent places."""
        if height % self.downsampling or width % self.downsampling:
            raise InputError(f"image size {height}x{width} is not a multiple of {self.downsampling}, the autoencoder's")

    def check_frames(self, frames: int) -> None:
        """Raise InputError if a number of frames does not divide into latent frames; it names the nearest that do."""
        step = self.time_downsampling or 1
        if (frames - 1) % step:
            below = (frames - 1) // step * step + 1
            raise InputError(
                f"{frames} frames do not fit the autoencoder, which takes {step}n + 1: the nearest are {below} and"
                f" {below + step}"
            )

    def latent_frames(self, frames: int) -> int:
        """Count the latent frames of a clip."""
        return (frames - 1) // (self.time_downsampling or 1) + 1

    def frames(self, latent_frames: int) -> int:
        """Count the frames that latent frames are decoded into."""
        return (latent_frames - 1) * (self.time_downsampling or 1) + 1

    @torch.inference_mode()
    def moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Encode images or clips into mean and standard deviation of their latents, not yet scaled.

        Args:
            images: Float [B, C, H, W] or [B, C, T, H, W] in [0, 1].

        Returns:
            Mean, and standard deviation where the autoencoder has one, each float32 [B, c, h, w] or [B, c, t, h, w]; of
            an autoencoder of videos always the latter.

        Raises:
            InputError: A size or a number of frames that does not fit the autoencoder.
        """
        self.check_size(*images.shape[-2:])
        pixels = images.to(self.device, self.dtype) * 2 - 1
        if self.module is None:
            return pixels.float(), None
        if self.time_downsampling is None:
            if pixels.ndim == 4:
                return encode(self.module, pixels)
            mean, std = encode(self.module, pixels.transpose(1, 2).flatten(0, 1))
            return _to_clips(mean, len(images)), None if std is None else _to_clips(std, len(images))
        pixels = pixels[:, :, None] if pixels.ndim == 4 else pixels
        self.check_frames(pixels.shape[2])
        mean, std = encode(self.module, pixels)
        if mean.shape[2] != self.latent_frames(pixels.shape[2]):
            raise InputError(
                f"autoencoder {self.source!r} makes {mean.shape[2]} latent frames of {pixels.shape[2]}, a causal one"
                f" {self.latent_frames(pixels.shape[2])}: it is not supported"
            )
        return mean, std

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode scaled latents into pixels.

        Args:
            latents: [B, c, h, w] of images, [B, c, t, h, w] of clips.

        Returns:
            Float32 [B, C, H, W] or [B, C, T, H, W] in [0, 1].
        """
        x = self.scale.undo(latents.to(self.device, torch.float32))
        if self.module is not None:
            by_frame, count = x.ndim == 5 and self.time_downsampling is None, len(x)
            x = decode(self.module, (x.transpose(1, 2).flatten(0, 1) if by_frame else x).to(self.dtype))
            x = _to_clips(x, count) if by_frame else x
        return (x / 2 + 0.5).clamp(0, 1)


def encode(module: Any, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
    """Encode pixels in [-1, 1] by a module of diffusers: float32 mean and, where it has one, standard deviation."""
    encoded = module.encode(pixels)
    distribution = getattr(encoded, "latent_dist", None)
    if distribution is None:
        return encoded.latent.float(), None
    return distribution.mean.float(), distribution.std.float()


def decode(module: Any, latents: Tensor) -> Tensor:
    """Decode latents that are not scaled by a module of diffusers: float32 pixels in [-1, 1]."""
    arguments = {}
    if module.config.get("timestep_conditioning"):  # of LTX from 0.9.1 on: it may denoise while it decodes
        arguments["temb"] = torch.zeros(len(latents), dtype=latents.dtype, device=latents.device)
    return module.decode(latents, **arguments).sample.float()


def load_autoencoder(
    source: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, *, fetch: bool = True
) -> Autoencoder:
    """Load an autoencoder of images or of videos of diffusers.

    Args:
        source: A local directory with `config.json` and weights, also a pipeline's directory with `vae/`; a hub id; or
            `none` for pixels.
        device: Where to run.
        dtype: Type to run in.
        fetch: Whether a hub id is fetched unless the hub's cache has it. A source that a file names is not.

    Raises:
        InputError: No autoencoder there, or one that is not in the cache and is not fetched.
    """
    check_source(source)
    if source == PIXELS:
        return Autoencoder(None, device=device, dtype=dtype)
    import diffusers

    path = Path(source)
    where = {}
    if path.is_dir() and not (path / "config.json").is_file():
        if not (path / "vae" / "config.json").is_file():
            raise InputError(f"{source} has neither config.json nor vae/config.json: no autoencoder of diffusers")
        where["subfolder"] = "vae"
    if (folder := path / where.get("subfolder", "")).is_dir():
        check_files(folder)
    try:
        place = source if fetch or path.is_dir() else _cached(source)
        kind = _find_class(source, diffusers.AutoencoderKL.load_config(place, **where).get("_class_name"))
        with building(f"the autoencoder {source}", {}):
            module = kind.from_pretrained(place, torch_dtype=dtype, low_cpu_mem_usage=False, **where)
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        hint = "" if path.is_dir() else "; give a downloaded copy: --vae FOLDER, in training --model.vae FOLDER"
        raise InputError(f"autoencoder {source!r} cannot be loaded: {str(error).splitlines()[0]}{hint}") from None
    return Autoencoder(module, source, device, dtype)


def check_source(source: str) -> None:
    """Raise `InputError` for an autoencoder that is neither a folder, nor a hub id, nor `none`, without opening it."""
    path = Path(source)
    if (
        source != PIXELS
        and not path.is_dir()
        and (path.is_absolute() or source.startswith(".") or source.count("/") != 1)
    ):
        raise InputError(f"autoencoder {source!r} is not a folder, a hub id OWNER/NAME, or {PIXELS!r}")


def _find_class(source: str, name: object) -> Any:
    """Find an autoencoder of diffusers; its `AutoModel` would import the modules that a pipeline's index names."""
    import diffusers

    kind = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type) or not issubclass(kind, diffusers.ModelMixin):
        raise InputError(f"autoencoder {source!r} is of the class {name!r}, which diffusers does not have")
    if not hasattr(kind, "encode") or not hasattr(kind, "decode"):
        raise InputError(f"autoencoder {source!r} is a {name}, which does not encode images")
    return kind


def _cached(source: str) -> str:
    """Find a repository in the hub's cache, without any connection."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(source, "config.json")
    if not isinstance(config, str):
        raise InputError(
            f"autoencoder {source!r} is not in the hub's cache, and it is not fetched because a file names it: give"
            f" --vae {source}, in training --model.vae {source}"
        )
    return str(Path(config).parent)


def downsampling(module: Any) -> int:
    """Count the pixels of an image per latent place, along one axis."""
    ratio = getattr(module, "spatial_compression_ratio", None)
    return int(ratio or 2 ** (len(module.config.block_out_channels) - 1))


def time_downsampling(module: Any) -> int | None:
    """Count the frames of a clip per latent frame after the first; None of an autoencoder of images."""
    if not any(isinstance(part, nn.Conv3d) for part in module.modules()):
        return None
    levels = module.config.get("temperal_downsample")  # of Wan, whose stated factor need not be that of its levels
    if levels is not None:
        return 2 ** sum(map(bool, levels))
    name = "temporal_compression_ratio"
    return int(module.config.get(name) or getattr(module, name, None) or 1)


def latent_scale(module: Any) -> LatentScale:
    """Read the scale that an autoencoder states, by the rule of diffusers' pipelines.

    Args:
        module: The autoencoder; its configuration will do, but for LTX, whose means lie among the weights.
    """
    config = getattr(module, "config", module)
    factor = float(config.get("scaling_factor") or 1.0)
    names = ("latents_mean", "latents_std")
    mean, std = (config[name] if name in config else getattr(module, name, None) for name in names)
    if mean is not None and std is not None:
        return LatentScale([factor / float(value) for value in std], [float(value) for value in mean])
    return LatentScale(factor, float(config.get("shift_factor") or 0.0))


def _to_clips(frames: Tensor, count: int) -> Tensor:
    """Join frames [B T, C, H, W] to clips [B, C, T, H, W]."""
    return frames.unflatten(0, (count, -1)).transpose(1, 2)
