"""The analyses: attention matrices of networks in numbers and maps, and what networks have learned to mix."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from headmix_vision.analysis.analysis_request import (
    NOISE_LEVEL,
    AttentionRequest,
    MapsRequest,
    MixingRequest,
    ProfileRequest,
)
from headmix_vision.analysis.attention_matrices import record_attention
from headmix_vision.analysis.inputs import ImageRequest, Inputs, read_inputs
from headmix_vision.analysis.learned_mixes import draw_mixing
from headmix_vision.analysis.maps import attention_maps, draw_maps
from headmix_vision.analysis.profiles import PROFILES, draw_profiles, profile_layers
from headmix_vision.analysis.results import ResultFolder
from headmix_vision.console.processes import default_device, open_device
from headmix_vision.errors import InputError
from headmix_vision.runs.opening import open_network

Found = Callable[[str], object]
"""Called with each line of a result as soon as it is known."""


@dataclass(frozen=True)
class Analyzed:
    """Result of `analyze`.

    Args:
        paths: Files that were written; none in a dry run.
        tables: Rows of each table by its name; none of what networks have learned to mix.
    """

    paths: tuple[Path, ...] = ()
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


def analyze(request: AttentionRequest | MixingRequest, found: Found = lambda line: None) -> Analyzed:
    """Look into attention layers, and write figures and tables to a folder.

    Args:
        request: A `ProfileRequest`, `MapsRequest` or `MixingRequest`.
        found: Called with each line of the result.

    Raises:
        InputError: Wrong input, before anything is written.
    """
    if isinstance(request, ProfileRequest):
        return _profile(request, found)
    if isinstance(request, MapsRequest):
        return _maps(request, found)
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
    names = [about["name"] for _, about in opened]
    return [
        _Model(str(path) if names.count(about["name"]) > 1 else about["name"], network, about)
        for path, (network, about) in zip(paths, opened, strict=True)
    ]


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
