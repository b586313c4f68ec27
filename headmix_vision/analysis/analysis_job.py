"""The analyses: attention matrices of networks in numbers and maps, and what networks have learned to mix.

Networks see images of a data set as validation feeds them, noisy for generators. B images, C channels, *grid height and
width of an image, frames, height and width of a clip.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headmix_vision.analysis.analysis_request import (
    NOISE_LEVEL,
    AttentionRequest,
    MapsRequest,
    MixingRequest,
    ProfileRequest,
    SensitivityRequest,
)
from headmix_vision.analysis.attention_matrices import Layer, attention_layers, record_attention
from headmix_vision.analysis.block_maps import draw_block_mixing
from headmix_vision.analysis.explicit_heads import draw_explicit
from headmix_vision.analysis.figures import Picture
from headmix_vision.analysis.interleaved_heads import draw_interleaved
from headmix_vision.analysis.maps import attention_maps, draw_maps
from headmix_vision.analysis.profiles import PROFILES, draw_profiles, profile_layers
from headmix_vision.analysis.results import ResultFolder
from headmix_vision.analysis.sensitivity import write_sensitivity
from headmix_vision.console import default_device, open_device
from headmix_vision.data.augmentation import eval_config, eval_transform
from headmix_vision.data.batches import as_it_is
from headmix_vision.data.clip_frames import ClipConfig
from headmix_vision.data.datasets import find_dataset, open_source
from headmix_vision.data.datasets.base import PreparedSource, SplitRequest, Transform
from headmix_vision.errors import InputError, check_counts, check_numbers
from headmix_vision.files.pictures import check_background, readable
from headmix_vision.layers import SwappedAttention
from headmix_vision.models.swap import swap_attention
from headmix_vision.runs.networks import open_network

Found = Callable[[str], object]
"""Called with each line of a result as soon as it is known."""
_SEED = 0  # of the noise
# The kinds of pictures, by the names of their files.
PICTURES: dict[str, Callable[[Sequence[Layer], str], Picture | None]] = {
    "iha": draw_interleaved,
    "mea": draw_explicit,
    "mhla": draw_block_mixing,
}


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
            f"{request.dataset}, split {request.split}, has {len(source)} images, --images is {request.count}"
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


def draw_mixing(network: nn.Module, name: str, title: str) -> dict[str, Picture]:
    """Draw the pictures that a network has, by the names of their files.

    Raises:
        InputError: If it has none.
    """
    layers = attention_layers(network)
    drawn = {kind: draw(layers, title) for kind, draw in PICTURES.items()}
    pictures = {kind: picture for kind, picture in drawn.items() if picture is not None}
    if not pictures:
        raise InputError(f"nothing can be drawn of {name}: it has neither the head mix iha, nor mea, nor the core mhla")
    return pictures


@dataclass(frozen=True)
class Analyzed:
    """Result of `analyze`.

    Args:
        paths: Files that were written; none in a dry run.
        tables: Rows of each table by its name; none of what networks have learned to mix.
    """

    paths: tuple[Path, ...] = ()
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


def analyze(
    request: AttentionRequest | MixingRequest | SensitivityRequest, found: Found = lambda line: None
) -> Analyzed:
    """Look into attention layers, and write figures and tables to a folder.

    Args:
        request: A `ProfileRequest`, `MapsRequest`, `MixingRequest` or `SensitivityRequest`.
        found: Called with each line of the result.

    Raises:
        InputError: Wrong input, before anything is written.
    """
    if isinstance(request, ProfileRequest):
        return _profile(request, found)
    if isinstance(request, MapsRequest):
        return _maps(request, found)
    if isinstance(request, SensitivityRequest):
        images = ImageRequest(request.data, request.root, request.split, request.images, 0, request.background)
        paths, rows = write_sensitivity(request, lambda network: read_inputs(network, {}, images).arguments[0], found)
        return Analyzed(tuple(paths), {"sensitivity": rows} if rows else {})
    assert isinstance(request, MixingRequest)
    return _mixing(request, found)


class _Model(NamedTuple):
    """A network, what it is called in results, and what is known of it."""

    title: str
    network: nn.Module
    about: dict[str, Any]


def _open_models(request: AttentionRequest) -> list[_Model]:
    paths = request.model
    opened = [open_network(path, checkpoint=request.checkpoint, raw=request.raw) for path in paths]
    for path, (network, _) in zip(paths, opened, strict=True):
        _take_over_softmax(network, path)
    names = [about["name"] for _, about in opened]
    return [
        _Model(str(path) if names.count(about["name"]) > 1 else about["name"], network, about)
        for path, (network, about) in zip(paths, opened, strict=True)
    ]


def _take_over_softmax(network: nn.Module, path: Path) -> None:
    """Put the softmax layer of this package, which computes the same, in the place of timm's attention layers."""
    layers = attention_layers(network)
    if not all(isinstance(layer.attention, SwappedAttention) for layer in layers):
        return  # a network of this package
    try:
        swap_attention(network, "softmax")
    except InputError as error:
        if not layers:
            raise InputError(f"{path} cannot be analysed: {error}") from None


def _open_inputs(request: AttentionRequest, models: Sequence[_Model]) -> list[Inputs]:
    """Read the images for each network, and take both to the device."""
    device = open_device(request.device or default_device())
    images = ImageRequest(
        request.data, request.root, request.split, request.images, request.noise_level, request.background
    )
    if request.noise_level != NOISE_LEVEL and not any("objective" in model.about for model in models):
        raise InputError(f"--noise-level {request.noise_level:g} applies to generators, these are classifiers")
    inputs = [read_inputs(model.network, model.about, images) for model in models]
    for model in models:
        model.network.to(device)
    return [
        one._replace(arguments=tuple(x.to(device) if isinstance(x, Tensor) else x for x in one.arguments))
        for one in inputs
    ]


def _settings(request: AttentionRequest, *names: str) -> dict[str, Any]:
    names = ("data", "root", "split", "images", "noise_level", "layers", *names)
    if request.background != "white":  # results of earlier versions do not name it
        names = (*names, "background")
    values = {name: getattr(request, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _about_data(request: AttentionRequest) -> str:
    return f"{request.images} image{'s' * (request.images > 1)} of {request.data}, {request.split}"


def _profile(request: ProfileRequest, found: Found) -> Analyzed:
    """Write numbers of the attention matrices: `rank` or `entropy`."""
    models = _open_models(request)
    folder = ResultFolder(request.out, request.kind, [model.about for model in models], _settings(request, "queries"))
    folder.check()
    inputs = _open_inputs(request, models)
    if request.dry_run:
        for model, (arguments, *_) in zip(models, inputs, strict=True):
            record_attention(model.network, *arguments, queries=request.queries, layers=request.layers)
        found(f"would write {request.kind}.svg and {request.kind}.csv of {len(models)} networks to {request.out}")
        return Analyzed()
    labels, rows = PROFILES[request.kind].labels, []
    for model, (arguments, *_) in zip(models, inputs, strict=True):
        own = profile_layers(model.network, arguments, [request.kind], request.queries, request.layers)
        if any(row[name] != row[name] for row in own for name in labels):
            raise InputError(f"attention matrices of {model.title} are not finite")
        rows += [{"model": model.title, **row} for row in own]
        means = [f"mean {name} {sum(row[name] for row in own) / len(own):.2f}" for name in labels]
        found(f"{model.title}: {', '.join(means)} ({own[0]['queries']} of {own[0]['tokens']} tokens)")
    figure = draw_profiles(rows, labels, f"Attention matrices of {_about_data(request)}")
    paths = folder.write({request.kind: figure}, {request.kind: rows})
    found(f"wrote {', '.join(map(str, paths))}")
    return Analyzed(tuple(paths), {request.kind: rows})


def _maps(request: MapsRequest, found: Found) -> Analyzed:
    """Write maps of what query tokens attend to."""
    models = _open_models(request)
    settings = _settings(request) | {"tokens": [list(place) for place in request.tokens]}
    folder = ResultFolder(request.out, "maps", [model.about for model in models], settings)
    folder.check()
    inputs = _open_inputs(request, models)
    maps = [
        one
        for model, (arguments, *_) in zip(models, inputs, strict=True)
        for one in attention_maps(model.title, model.network, arguments, request.tokens, request.layers)
    ]
    if request.dry_run:
        found(f"would write maps.png and maps.csv of {len(models)} networks to {request.out}")
        return Analyzed()
    figure = draw_maps(maps, inputs[0].pictures, f"Attention to {_about_data(request)}")
    rows = [row for one in maps for row in one.rows()]
    paths = folder.write({"maps": figure}, {"maps": rows})
    found(f"wrote {', '.join(map(str, paths))}")
    return Analyzed(tuple(paths), {"maps": rows})


def _mixing(request: MixingRequest, found: Found) -> Analyzed:
    """Draw what a network has learned to mix."""
    network, about = open_network(request.model, checkpoint=request.checkpoint, raw=request.raw)
    folder = ResultFolder(request.out, "mixing", [about], {})
    folder.check()
    pictures = draw_mixing(network, f"{request.model} ({about['name']})", _title(about))
    paths: Sequence[Path] = ()
    if not request.dry_run:
        numbers = {name: picture.numbers for name, picture in pictures.items()}
        paths = folder.write({name: picture.figure for name, picture in pictures.items()}, numbers=numbers)
    for name, picture in pictures.items():
        found(f"{'would draw ' if request.dry_run else ''}{folder.picture(name)}: {picture.summary}")
    return Analyzed(tuple(paths))


def _title(about: dict[str, Any]) -> str:
    step = about.get("step")
    kind = {"ema": "averaged"}.get(about["weights"], about["weights"])
    return f"{about['name']}, {kind} weights" + ("" if step is None else f", step {step:,}")
