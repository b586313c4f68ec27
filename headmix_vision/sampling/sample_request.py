"""The request for samples, which `headmix_vision.sampling.sample` takes, without an import of torch."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from headmix_vision.errors import InputError, check_request

DEFAULT_GUIDANCE = 1.5
SCHEDULERS = ("euler", "heun", "dpm++", "unipc", "ddim", "ddpm")
EXTEND_SAMPLES = ""
"""Value of `extend` without a clip: the samples themselves are drawn longer, window by window."""
OF_VIDEOS = ("frames", "frame_rate", "first_frame", "extend", "overlap", "extend_guidance", "format")


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """Request for samples in a folder. Sample i depends on the seed and on i alone.

    Args:
        kind: What is drawn.
        model: Run directory, `.ckpt` file or folder of an exported pipeline.
        checkpoint: Checkpoint of a run directory: `last`, or a file; the last when None.
        raw: Use the weights being trained, not their EMA.
        num: Number of samples.
        classes: Labels in rotation, such as 0,3,7, or `balanced`: all of them, as when None.
        steps: Sampling steps.
        scheduler: One of euler, heun, dpm++, unipc, ddim and ddpm (`SCHEDULERS`); that of the model when None.
        spacing: Timestep spacing of ddim or ddpm; when None trailing for ddim, and linspace for ddpm, as in DiT.
        guidance: Scale of guidance, 1 for none; when None 1.5 (`DEFAULT_GUIDANCE`), or 1 if there is no null class.
        guidance_interval: Noise levels within which guidance acts: 0 is data, 1 noise.
        guidance_channels: Channels that are guided.
        size: Height and width in pixels, or one number for both; as in training when None.
        seed: Seed of all samples.
        batch_size: Samples per process and step; 64 images or 8 videos when None.
        out: Folder to write or complete; `samples/<name of the run>` when None.
        npz: Also write `samples.npz`, as ADM's evaluation takes it.
        vae: Autoencoder to use instead of the recorded one: folder or hub id.
        dry_run: Check everything and write nothing.
        device: Device as torch names it; a GPU if there is one when None.
        dtype: Type of the network's weights.
        frames: Frames of a video; as in training when None. Positions continue beyond the length of training.
        frame_rate: Frames per second; as in training when None.
        first_frame: Image that is the first frame of all videos.
        extend: Draw window by window until `frames`. The first window continues the clip that is named, or the samples
            themselves (`EXTEND_SAMPLES`), each other one the frames before it.
        overlap: Frames that a window shares with the one before it; half of the window when None.
        extend_guidance: Guidance of windows that continue frames, 0 to leave out the class; `guidance` when None.
        format: Files to watch, besides the lossless ones.

    Raises:
        InputError: A name that is none of those allowed, or a setting of videos for images.
    """

    kind: Literal["images", "videos"] = "images"
    model: Path
    checkpoint: str | None = None
    raw: bool = False
    num: int = 64
    classes: tuple[int, ...] | Literal["balanced"] | None = None
    steps: int = 50
    scheduler: str | None = None
    spacing: Literal["trailing", "linspace", "leading"] | None = None
    guidance: float | None = None
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    guidance_channels: Literal["all", "first_three"] = "all"
    size: tuple[int, int] | None = None
    seed: int = 0
    batch_size: int | None = None
    out: Path | None = None
    npz: bool = False
    vae: str | None = None
    dry_run: bool = False
    device: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    frames: int | None = None
    frame_rate: float | None = None
    first_frame: str | None = None
    extend: str | None = None
    overlap: int | None = None
    extend_guidance: float | None = None
    format: Literal["mp4", "gif", "frames", "png"] = "mp4"

    def __post_init__(self) -> None:
        check_request(self)
        for field in fields(self):
            if self.kind == "images" and field.name in OF_VIDEOS and getattr(self, field.name) != field.default:
                raise InputError(f"{field.name} applies only to videos, kind is images: leave it out")

    @property
    def samples_at_once(self) -> int:
        """Number of samples at a time and process."""
        return self.batch_size if self.batch_size is not None else 64 if self.kind == "images" else 8
