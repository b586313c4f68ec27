"""Encoding images or videos into latents once, for training.

An interrupted job goes on with the missing shards. The same latents come out of any number of processes. The names and
sizes of the files are recorded: a cache is not continued with other files than its shards were made of.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headmix_vision.console import default_device, open_device, process_numbers, say, say_left_out
from headmix_vision.data.cache_request import CacheRequest
from headmix_vision.data.clip_frames import ClipConfig
from headmix_vision.data.datasets import find_dataset, open_source
from headmix_vision.data.datasets.base import ClipSource, Source, SplitRequest
from headmix_vision.data.datasets.folders import find_class_folders, open_class_folders
from headmix_vision.data.datasets.image_files import ImageFiles
from headmix_vision.data.datasets.latents import count_shards, read_manifest
from headmix_vision.data.datasets.moving_digits import MovingDigits
from headmix_vision.data.datasets.videos import open_video_folder
from headmix_vision.data.latent_cache import DTYPES, EvenClips, write_cache
from headmix_vision.errors import InputError, check_counts
from headmix_vision.files.pictures import check_background
from headmix_vision.models.autoencoders import PIXELS, Autoencoder, load_autoencoder


def open_images(images: str | None, request: SplitRequest) -> Source:
    """Open the images to encode: a folder (of class folders, or of images alone, which have label 0) or a data set.

    Raises:
        InputError: Nothing there, a data set that cannot be cached, or an image without a valid label.
    """
    if images is None:
        return open_source(request)
    folder = Path(images)
    if not images or not folder.is_dir():
        raise InputError(f"--images {images} is not a folder" if images else "--images is '', it must be a folder")
    listing = find_class_folders(folder)
    listing.check_filled(f"--images {images!r}", "image")
    if any(path.parent != folder for path in listing.paths):
        return open_class_folders(folder, request, listing)
    say_left_out(folder, len(listing.paths), "pictures", listing.left_out)
    return ImageFiles(listing.paths, request.decoding)


def open_clips(
    videos: str | None, request: SplitRequest, clips_per_video: int = 1, skip_unusable: bool = False
) -> Source:
    """Open the clips to encode: a folder or table of videos, or a data set; names and counts the videos it skips.

    Raises:
        InputError: Nothing there, or a data set that cannot be cached, or not so many times.
    """
    if videos is not None and not Path(videos).exists():
        raise InputError(f"--videos {videos} does not exist")
    source = open_source(request) if videos is None else open_video_folder(Path(videos), request)
    if skip_unusable and isinstance(source, ClipSource):
        total, faults = len(source), source.leave_out_unusable()
        for number, fault in enumerate(faults, start=1):
            say(f"skipped {fault}, {number} of {total} videos")
    if clips_per_video == 1:
        return source
    if not isinstance(source, ClipSource):
        raise InputError(f"--clips-per-video is {clips_per_video}, a sample of {request.name} is one clip")
    return EvenClips(source, clips_per_video)


@dataclass(frozen=True)
class Cached:
    """Result of `cache_latents`, of one process.

    Args:
        out: Directory of the cache.
        written: Number of shards that the process wrote, or would write in a dry run.
        shards: Number of all shards; None after a dry run.
        shape: Shape of a sample's latents; None after a dry run.
        rank: Number of the process.
        world_size: Number of processes.
    """

    out: Path
    written: int
    shards: int | None
    shape: tuple[int, ...] | None
    rank: int
    world_size: int

    def __str__(self) -> str:
        who = f"process {self.rank} of {self.world_size} " if self.world_size > 1 else ""
        if self.shape is None:
            return f"{self.out}: {who}would write {self.written} shards"
        return f"{self.out}: {who}wrote {self.written} of {self.shards} shards, latents {[*self.shape]}"


def cache_latents(request: CacheRequest) -> Cached:
    """Encode images or videos into latents; the same request again goes on with the missing shards.

    Raises:
        InputError: Wrong input, before anything is written; see also `write_cache`.
    """
    processes = process_numbers()
    _check_sources(request)
    device = open_device(request.device or default_device(), processes.local_rank)
    autoencoder = load_autoencoder(request.vae, device, DTYPES[request.encoder_dtype])
    if request.gray:
        autoencoder.image_channels = 1
    is_clips = _is_clips(request)
    dataset, split = request.dataset or ("videos" if is_clips else "folder"), request.split or "train"
    shape = (autoencoder.image_channels, request.image_size, request.image_size)
    wanted = SplitRequest(
        dataset,
        split,
        shape,
        "caching",
        root=request.root,
        background=request.background,
        skip_unlabelled=request.skip_unlabelled,
    )
    clip = None
    if is_clips:
        wanted, clip = _ask_for_clips(request, wanted, autoencoder)
        source = open_clips(request.videos, wanted, request.clips_per_video, request.skip_unusable)
        if isinstance(source, MovingDigits):
            clip["frame_rate"] = source.frame_rate
    else:
        source = open_images(request.images, wanted)
    written = write_cache(
        source,
        autoencoder,
        request.out,
        image_size=request.image_size,
        origin=request.images or request.videos or " ".join(filter(None, (dataset, request.root, split))),
        clip=clip,
        background=request.background,
        flip=request.flip,
        store=request.store,
        dtype=request.dtype,
        batch_size=request.batch_size,
        shard_size=request.shard_size,
        workers=request.workers,
        rank=processes.rank,
        world_size=processes.world_size,
        dry_run=request.dry_run,
    )
    if request.dry_run:
        return Cached(request.out, written, None, None, processes.rank, processes.world_size)
    manifest = read_manifest(request.out)
    shards, shape = count_shards(manifest), tuple(manifest["shape"])
    return Cached(request.out, written, shards, shape, processes.rank, processes.world_size)


def _ask_for_clips(
    request: CacheRequest, wanted: SplitRequest, autoencoder: Autoencoder
) -> tuple[SplitRequest, dict[str, Any]]:
    """Add length and frame rate of the clips to the wanted split; return them for the record too."""
    if request.frames is None:
        raise InputError("--frames is not given: the number of frames of a clip")
    check_counts(1, frames=request.frames, clips_per_video=request.clips_per_video)
    autoencoder.check_size(request.image_size, request.image_size)
    autoencoder.check_frames(request.frames)
    config = ClipConfig(request.frame_rate, request.stride)
    channels, *size = wanted.shape
    record = {"frames": request.frames, **asdict(config), "clips_per_video": request.clips_per_video}
    return replace(wanted, shape=(channels, request.frames, *size), clip=config), record


def _is_clips(request: CacheRequest) -> bool:
    entry = find_dataset(request.dataset or "folder", "caching")
    return request.videos is not None or entry.is_clips or (3 in entry.grid_axes and request.frames is not None)


def _check_sources(request: CacheRequest) -> None:
    if request.images is None and request.videos is None and request.dataset is None and request.root is None:
        raise InputError("neither --images nor --videos nor --dataset is given")
    if request.images is not None and request.videos is not None:
        raise InputError("--images and --videos are both given, a cache holds one of them")
    for given in ("images", "videos"):
        for name in ("dataset", "root", *(("split",) if given == "images" else ())):
            if getattr(request, given) is not None and getattr(request, name) is not None:
                raise InputError(f"--{given} names the {given} already, leave out --{name}")
    of_clips = {
        "--frames": request.frames is not None,
        "--frame-rate": request.frame_rate is not None,
        "--stride": request.stride is not None,
        "--clips-per-video": request.clips_per_video != 1,
        "--skip-unusable": request.skip_unusable,
    }
    is_clips = _is_clips(request)
    for name, is_given in of_clips.items():
        if not is_clips and is_given:
            raise InputError(f"{name} is for videos, there are images")
    if request.flip and not find_dataset(request.dataset or "folder", "caching").can_flip:
        raise InputError(f"--flip does not apply to {request.dataset}: mirrored clips move the other way")
    check_background(request.background)
    if request.gray and request.vae != PIXELS:
        raise InputError(f"--gray goes with --vae {PIXELS} alone, --vae is {request.vae}")
    if request.vae == PIXELS and request.encoder_dtype != "float32":
        raise InputError(f"--encoder-dtype {request.encoder_dtype} applies to autoencoders, --vae is {PIXELS}")
