"""Open the images or clips of a folder, a table or a data set, cropped as a cache encodes them.

C channels, T frames.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from headmix_vision.console import say, say_left_out
from headmix_vision.data.cache_request import CacheRequest
from headmix_vision.data.cache_sizes import cache_sizes
from headmix_vision.data.clip_frames import ClipConfig
from headmix_vision.data.datasets import find_dataset, open_source
from headmix_vision.data.datasets.base import ClipSource, Source, SplitRequest, to_picture
from headmix_vision.data.datasets.derived import Derived
from headmix_vision.data.datasets.folders import ImageFiles, find_class_folders, open_class_folders
from headmix_vision.data.datasets.moving_digits import MovingDigits
from headmix_vision.data.datasets.videos import open_video_folder
from headmix_vision.data.fitting import center_crop
from headmix_vision.data.labels import check_label
from headmix_vision.errors import InputError, check_counts
from headmix_vision.files.pictures import check_background, readable
from headmix_vision.models.autoencoders import PIXELS, Autoencoder
from headmix_vision.models.pipeline_folder import read_pipeline


def check_sources(request: CacheRequest) -> None:
    """Check that what is asked for fits together, before anything is opened.

    Raises:
        InputError: It does not.
    """
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
    of_videos = is_clips(request)
    for name, is_given in of_clips.items():
        if not of_videos and is_given:
            raise InputError(f"{name} is for videos, there are images")
    if request.flip and not find_dataset(request.dataset or "folder", "caching").can_flip:
        raise InputError(f"--flip does not apply to {request.dataset}: mirrored clips move the other way")
    check_background(request.background)
    cache_sizes(request)
    if request.sizes and request.images is None and request.videos is None:
        raise InputError("--sizes goes with files: give --images or --videos")
    if request.prompts is not None:
        if request.images is None and request.videos is None:
            raise InputError("--prompts goes with files: give --images or --videos")
        read_pipeline(request.vae)
    if request.gray and request.vae != PIXELS:
        raise InputError(f"--gray goes with --vae {PIXELS} alone, --vae is {request.vae}")
    if request.vae == PIXELS and request.encoder_dtype != "float32":
        raise InputError(f"--encoder-dtype {request.encoder_dtype} applies to autoencoders, --vae is {PIXELS}")


def is_clips(request: CacheRequest) -> bool:
    """Whether clips are encoded, not images."""
    entry = find_dataset(request.dataset or "folder", "caching")
    return request.videos is not None or entry.is_clips or (3 in entry.grid_axes and request.frames is not None)


def open_at_size(
    request: CacheRequest, wanted: SplitRequest, autoencoder: Autoencoder, size: tuple[int, int]
) -> tuple[Source, dict[str, Any] | None]:
    """Open the images, or the clips at a size, and describe the clips for the record."""
    if not is_clips(request):
        return open_images(request.images, wanted), None
    wanted, clip = _ask_for_clips(request, replace(wanted, shape=(wanted.channels, *size)), autoencoder)
    source = open_clips(request.videos, wanted, request.clips_per_video, request.skip_unusable)
    if isinstance(source, MovingDigits):
        clip["frame_rate"] = source.frame_rate
    return source, clip


def _ask_for_clips(
    request: CacheRequest, wanted: SplitRequest, autoencoder: Autoencoder
) -> tuple[SplitRequest, dict[str, Any]]:
    """Add length and frame rate of the clips to the wanted split; return them for the record too."""
    if request.frames is None:
        raise InputError("--frames is not given: the number of frames of a clip")
    check_counts(1, frames=request.frames, clips_per_video=request.clips_per_video)
    autoencoder.check_size(*wanted.grid)
    autoencoder.check_frames(request.frames)
    config = ClipConfig(request.frame_rate, request.stride)
    channels, *size = wanted.shape
    record = {"frames": request.frames, **asdict(config), "clips_per_video": request.clips_per_video}
    return replace(wanted, shape=(channels, request.frames, *size), clip=config), record


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


class EvenClips(Derived):
    """Several clips of each video of a source, in even distances.

    Args:
        source: The videos.
        count: Clips of each.
    """

    source: ClipSource

    def __init__(self, source: ClipSource, count: int) -> None:
        super().__init__(source)
        self.count = count

    def __len__(self) -> int:
        return len(self.source) * self.count

    def read(self, index: int) -> tuple[Tensor, int]:
        video, number = divmod(index, self.count)
        return self.source.read_part(video, (number + 0.5) / self.count)

    def name(self, index: int) -> str:
        return self.source.name(index // self.count)

    def files(self) -> list[tuple[str, int]] | None:
        files = self.source.files()
        return None if files is None else [file for file in files for _ in range(self.count)]


class CroppedImages(Dataset[tuple[Tensor, int]]):
    """Centre-cropped images, uint8 [C, size, size], or clips [C, T, size, size] of a source, with their label.

    Args:
        source: The images, or clips that are cropped already.
        size: Side in pixels, or height and width.
        mode: PIL mode, `L` or `RGB`.
    """

    def __init__(self, source: Source, size: int | tuple[int, int], mode: str) -> None:
        self.source = source
        self.size = size
        self.mode = mode

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from torchvision.transforms.functional import pil_to_tensor

        with readable(self.source.name(index)):
            image, label = self.source.read(index)
        if isinstance(image, Tensor) and image.ndim == 4:
            return (image * 255).round().to(torch.uint8), self._check(label, index)
        return pil_to_tensor(center_crop(to_picture(image).convert(self.mode), self.size)), self._check(label, index)

    def _check(self, label: int, index: int) -> int:
        """Label 0 where there are no classes."""
        names = self.source.class_names
        return check_label(label, self.source.name(index), len(names)) if names else 0
