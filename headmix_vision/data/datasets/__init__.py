"""The table of data sets, and how a split of any of them is opened.

A new data set is a file in this folder and a line in `DATASETS`. The file holds a function that takes a `SplitRequest`
and returns a `Source` (see `base`); the line says where the function is. Training of classifiers and generators,
`evaluate` and `cache_latents` then know the data set, as far as its line allows.
"""

import importlib
import importlib.util
import math

from headmix_vision.data.datasets.base import DatasetEntry, Source, SplitRequest, Use
from headmix_vision.data.datasets.streams import Stream
from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_memory

_STREAM = ".streams:open_stream"
_SKLEARN = ("sklearn", "pip install scikit-learn")
_HUGGINGFACE = ("datasets", "pip install headmix_vision[datasets]")
_WEBDATASET = ("webdataset", "pip install headmix_vision[webdataset]")
_TENSORFLOW = ("tensorflow_datasets", "pip install tensorflow-datasets")

DATASETS = {
    "digits": DatasetEntry(".digits:open_digits", exact=True, package=_SKLEARN, scored_split="all", takes_root=False),
    "canvas": DatasetEntry(
        ".canvas:open_canvas",
        names=("canvas", "canvas/same", "canvas/opposite"),
        uses=("classification", "generation", "scoring"),
        exact=True,
        package=_SKLEARN,
        takes_root=False,
    ),
    # tries a recipe without its data, whose root and background may stay
    "fake": DatasetEntry(".fake:open_fake", uses=("classification", "generation"), grid_axes=(2, 3)),
    "folder": DatasetEntry(".folders:open_folder"),
    "torch": DatasetEntry(".torchvision:open_torchvision", names=("torch/NAME",)),
    "hfds": DatasetEntry(".huggingface:open_huggingface", names=("hfds", "hfds/NAME"), package=_HUGGINGFACE),
    "table": DatasetEntry(".image_tables:open_table", names=("table/NAME",)),
    "latents": DatasetEntry(".latents:open_latents", uses=("generation",), has_images=False, grid_axes=(2, 3)),
    "videos": DatasetEntry(
        ".videos:open_videos",
        names=("videos", "videos/unlabelled"),
        uses=("generation", "scoring", "caching"),
        grid_axes=(3,),
    ),
    "sheets": DatasetEntry(".videos:open_sheets", uses=("classification", "scoring")),
    "shards": DatasetEntry(".shards:open_shards", grid_axes=(2, 3)),
    "moving_digits": DatasetEntry(
        ".moving_digits:open_moving_digits",
        uses=("generation", "scoring", "caching"),
        exact=True,
        grid_axes=(3,),
        can_flip=False,
        package=_SKLEARN,
        takes_root=False,
    ),
    "fashion_mnist": DatasetEntry(".fashion_mnist:open_fashion_mnist", exact=True),
    "hfids": DatasetEntry(
        _STREAM, names=("hfids/NAME",), uses=("classification",), is_stream=True, package=_HUGGINGFACE
    ),
    "wds": DatasetEntry(_STREAM, names=("wds/",), uses=("classification",), is_stream=True, package=_WEBDATASET),
    "tfds": DatasetEntry(_STREAM, names=("tfds/NAME",), uses=("classification",), is_stream=True, package=_TENSORFLOW),
}

_CANNOT = {
    "classification": "cannot train a classifier",
    "generation": "cannot train a generator",
    "scoring": "cannot be scored",
    "caching": "cannot be cached",
}


def find_dataset(name: str, use: Use) -> DatasetEntry:
    """Look a data set up by the name that a user writes; the part before a slash may be in any case.

    Raises:
        InputError: The name is unknown, or the data set does not serve this use.
    """
    if not isinstance(name, str):
        raise InputError(f"dataset {name!r} is not a name, it must be one of {dataset_names(use)}")
    prefix, slash, variant = name.partition("/")
    kind = prefix.lower()
    entry = DATASETS.get(kind)
    spellings = {f"{kind}{slash}{variant}", *((f"{kind}/NAME", f"{kind}/") if variant else ())}
    if entry is None or not spellings & set(entry.names or (kind,)):
        raise InputError(f"dataset {name!r} is unknown, it must be one of {dataset_names(use)}")
    if use not in entry.uses:
        what = "is a stream and " if entry.is_stream else ""
        raise InputError(f"dataset {name!r} {what}{_CANNOT[use]}, it must be one of {dataset_names(use)}")
    return entry


def dataset_names(use: Use) -> str:
    """List the data sets that serve a use, as a user writes them."""
    return ", ".join(name for kind, entry in DATASETS.items() if use in entry.uses for name in entry.names or (kind,))


def _names_of(use: Use, axes: int) -> str:
    return ", ".join(kind for kind, entry in DATASETS.items() if use in entry.uses and axes in entry.grid_axes)


def open_split(request: SplitRequest) -> Source | Stream:
    """Open one split of a data set.

    Raises:
        InputError: The name is unknown or does not serve this use, its samples are images where clips are wanted or
            the other way round, a place or background is given for samples that come with a package, a package is
            missing, or whatever the data set complains about.
        TypeError: The opener of the table returns something else.
    """
    entry = find_dataset(request.name, request.use)
    if len(request.grid) in (2, 3) and len(request.grid) not in entry.grid_axes:
        holds, wanted = ("images", "clips") if len(request.grid) == 3 else ("clips", "images")
        raise InputError(
            f"dataset {request.name!r} holds {holds}, asked for {wanted} of {'x'.join(map(str, request.grid))};"
            f" {wanted} are in {_names_of(request.use, len(request.grid))}"
        )
    if request.root is not None and not entry.takes_root:
        raise InputError(
            f"dataset {request.name!r} needs no files and takes no root, got {request.root!r}: leave root out,"
            " or set it to null"
        )
    if request.background != "white" and not (entry.takes_root and entry.has_images):
        raise InputError(
            f"dataset {request.name!r} has no transparent pixels, got background {request.background!r}: leave"
            " background out"
        )
    size = "x".join(map(str, request.shape))
    check_memory(4 * math.prod(request.shape), f"a sample of {request.name} with {size} numbers")
    package, command = entry.package or ("", "")
    if package and importlib.util.find_spec(package) is None:
        raise InputError(f"dataset {request.name!r} needs the package {package}: {command}")
    module, _, function = entry.opener.partition(":")
    opened = getattr(importlib.import_module(module, __name__), function)(request)
    if not isinstance(opened, Source | Stream):
        raise TypeError(f"{entry.opener} returned a {type(opened).__name__}, which is neither a Source nor a Stream")
    return opened


def open_source(request: SplitRequest) -> Source:
    """Open one split of a data set with random access; see `open_split`."""
    opened = open_split(request)
    assert isinstance(opened, Source), "streams serve training of classifiers alone"
    return opened
