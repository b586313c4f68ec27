"""What networks are analysed with: images of a data set, as validation feeds them, noisy for generators.

B images, C channels, *grid height and width of an image, frames, height and width of a clip.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headmix_vision.checks import check_counts, check_numbers
from headmix_vision.data.augmentation import eval_config, eval_transform
from headmix_vision.data.batches import as_it_is
from headmix_vision.data.clip_frames import ClipConfig
from headmix_vision.data.datasets import find_dataset, open_source
from headmix_vision.data.datasets.base import PreparedSource, SplitRequest, Transform
from headmix_vision.errors import InputError
from headmix_vision.files.pictures import check_background, readable

_SEED = 0  # of the noise


@dataclass(frozen=True)
class ImageRequest:
    """Which images of a data set to take.

    Args:
        dataset: A name of the table `headmix_vision.data.datasets.DATASETS`.
        root: Place of the data.
        split: Name of the split.
        count: So many images, evenly spaced over the split.
        noise_level: Noise of the images of a generator, 0 to 1.
        background: Colour behind transparent pixels.

    Raises:
        InputError: If a number is out of range.
    """

    dataset: str
    root: str | None
    split: str
    count: int
    noise_level: float
    background: str = "white"

    def __post_init__(self) -> None:
        check_background(self.background)
        check_counts(1, images=self.count)
        check_numbers(0, 1, noise_level=self.noise_level)


class Inputs(NamedTuple):
    """Images as a network takes them.

    Attributes:
        arguments: Of the network: the images [B, C, *grid]; of a generator noisy, then times [B], labels [B] or None.
        pictures: The images in [0, 1], float32 [B, C, *grid]; None of latents.
        names: What to call them.
    """

    arguments: tuple[Any, ...]
    pictures: Tensor | None
    names: list[str]


def read_inputs(network: nn.Module, about: dict[str, Any], request: ImageRequest) -> Inputs:
    """Read images for a network.

    Args:
        network: A classifier or a generator.
        about: What `open_network` knows of it.
        request: Which images.

    Raises:
        InputError: If there is no such data set or split, it does not fit the network or has fewer images, or an image
            cannot be read.
    """
    net: Any = network
    is_generator = "objective" in about
    entry = find_dataset(request.dataset, "generation" if is_generator else "classification")
    if entry.is_stream:
        raise InputError(f"dataset {request.dataset!r} is a stream, whose images cannot be chosen")
    mean, std = torch.full((1,), 0.5), torch.full((1,), 0.5)  # [-1, 1]
    if is_generator:
        from headmix_vision.data.fitting import ImageToRange

        shape: tuple[int, ...] = (net.in_channels, *net.input_size)
        transform: Transform = ImageToRange(net.input_size)
    else:
        config = eval_config(net, entry.exact)
        shape, transform = tuple(config["input_size"]), eval_transform(config)
        mean, std = torch.tensor(config["mean"]), torch.tensor(config["std"])
    images, labels, names = _read(request, is_generator, shape, net, transform)
    axes = (1, -1, *[1] * (images.ndim - 2))
    pictures = (images * std.view(axes) + mean.view(axes)).clamp(0, 1) if entry.has_images else None
    arguments = _noisy(net, about, images, labels, request) if is_generator else (images,)
    return Inputs(arguments, pictures, names)


def _read(
    request: ImageRequest, is_generator: bool, shape: tuple[int, ...], net: Any, transform: Transform
) -> tuple[Tensor, list[int], list[str]]:
    source = open_source(
        SplitRequest(
            request.dataset,
            request.split,
            shape,
            "generation" if is_generator else "classification",
            root=request.root,
            num_classes=int(net.num_classes),
            background=request.background,
            needs_labels=is_generator and int(net.num_classes) > 0,
            clip=ClipConfig(getattr(net, "frame_rate", None)),
        )
    )
    if len(source) < request.count:
        raise InputError(
            f"{request.dataset}, split {request.split}, has {len(source)} images, asked for {request.count}"
        )
    indices = [number * len(source) // request.count for number in range(request.count)]
    transform = as_it_is if isinstance(source, PreparedSource) else transform
    images, labels, names = [], [], [source.name(index) for index in indices]
    for index, name in zip(indices, names, strict=True):
        with readable(name):
            image, label = source.read(index)
            images.append(transform(image))
        labels.append(int(label))
    return torch.stack(images), labels, names


def _noisy(
    net: Any, about: dict[str, Any], images: Tensor, labels: list[int], request: ImageRequest
) -> tuple[Tensor, Tensor, Tensor | None]:
    from headmix_vision.diffusion.objectives import NUM_TIMESTEPS, ObjectiveConfig, create_objective

    if net.num_classes and not 0 <= min(labels) <= max(labels) < net.num_classes:
        raise InputError(f"labels {min(labels)} to {max(labels)} in the data, the model has {net.num_classes} classes")
    objective = create_objective(ObjectiveConfig.from_dict(about["objective"]))
    times = torch.full((len(images),), min(request.noise_level * NUM_TIMESTEPS, NUM_TIMESTEPS - 1))
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(_SEED))
    return objective.add_noise(images, times, noise), times, torch.tensor(labels) if net.num_classes else None
