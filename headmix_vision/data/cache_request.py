"""The request for a cache of latents, which `cache_latents` takes, without an import of torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headmix_vision.errors import check_request


@dataclass(frozen=True, kw_only=True)
class CacheRequest:
    """Request for a cache of latents, of images, of videos or of a data set.

    Args:
        images: Folder with a folder of images per class, or with images alone.
        videos: Folder or table of videos.
        frames: Frames of a clip.
        frame_rate: Frames per second of a clip; the video's when None.
        stride: Take every `stride`-th frame of the video instead.
        clips_per_video: Evenly spaced clips of each video.
        skip_unusable: Leave out videos that are too short or cannot be read.
        dataset: Name of a data set instead.
        root: Folder or file of the data set.
        split: Split of the data set; `train` when None.
        vae: Directory or hub id of an autoencoder of images or videos; `none` for pixels.
        prompts: Table .csv with the columns path and prompt, a row for each file; --vae is then the folder of a Wan or
            Sana pipeline, whose text encoder makes the embeddings.
        out: Folder to write or complete.
        image_size: Centre crop in pixels.
        sizes: Sizes HxW in pixels instead, as 480x832 832x480: each file goes to the cache of the nearest shape.
        flip: Store mirrored images too.
        gray: Store one channel; of pixels only.
        background: Colour behind transparent pixels.
        skip_unlabelled: Leave out, and count, samples without a valid label.
        store: Mean and standard deviation, or means only.
        dtype: Type on disk.
        encoder_dtype: Type to encode in.
        batch_size: Images at a time, 32 when None, or clips, 4.
        shard_size: Images in a file, 4096 when None, or clips, 256.
        workers: Processes that read images or clips.
        device: Device as torch names it; a GPU if there is one when None.
        dry_run: Check everything, encode one image or clip, and write nothing.

    Raises:
        InputError: A name that is none of those allowed.
    """

    images: str | None = None
    videos: str | None = None
    frames: int | None = None
    frame_rate: float | None = None
    stride: int | None = None
    clips_per_video: int = 1
    skip_unusable: bool = False
    dataset: str | None = None
    root: str | None = None
    split: str | None = None
    vae: str
    prompts: Path | None = None
    out: Path
    image_size: int = 256
    sizes: tuple[str, ...] = ()
    flip: bool = False
    gray: bool = False
    background: str = "white"
    skip_unlabelled: bool = False
    store: Literal["moments", "means"] = "moments"
    dtype: Literal["float32", "float16", "bfloat16"] = "float16"
    encoder_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    batch_size: int | None = None
    shard_size: int | None = None
    workers: int = 4
    device: str | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        check_request(self)
