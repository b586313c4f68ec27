"""`headmix-analyze`: attention matrices of networks in numbers and maps, what they have learned to mix, and sweeps.

headmix-analyze rank --model deit_softmax_digits deit_linear_digits deit_mhla_digits --data digits --out rank
headmix-analyze mixing --model runs/digits --out pictures
headmix-analyze sweep block_count --task digits --out sweeps
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from headmix_lab.sweeps import command as sweep
from headmix_vision.analysis.attention_matrices import record_attention
from headmix_vision.analysis.inputs import ImageRequest, Inputs, read_inputs
from headmix_vision.analysis.learned_mixes import draw_mixing
from headmix_vision.analysis.maps import Place, attention_maps, draw_maps
from headmix_vision.analysis.profiles import PROFILES, draw_profiles, profile_layers
from headmix_vision.analysis.results import ResultFolder
from headmix_vision.checks import check_counts
from headmix_vision.console.arguments import OneLineParser
from headmix_vision.console.devices import default_device, open_device
from headmix_vision.errors import InputError, one_line_errors
from headmix_vision.runs.opening import open_network

NOISE_LEVEL = 0.5
_MODEL = (
    "run directory, .ckpt, export (.safetensors, pipeline directory), or the name of a model that comes with weights"
)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line; wrong input ends the process with one line and exit status 2."""
    options = _parser().parse_args(args)
    with one_line_errors():
        options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="headmix-analyze", description="Look into the attention layers of trained networks.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, what, run in (
        ("rank", "rank and stable rank of the attention matrices, by layer and head", _profile),
        ("entropy", "how widely and how far queries look, by layer and head", _profile),
        ("maps", "what chosen query tokens attend to, as maps over the image", _maps),
        ("mixing", "what has been learned to mix: heads (IHA, MEA) and token blocks (MHLA)", _mixing),
    ):
        one = commands.add_parser(command, help=what, description=f"{what[0].upper()}{what[1:]}.")
        one.set_defaults(run=run)
        _add_model_options(one, several=command != "mixing")
        if command != "mixing":
            _add_data_options(one, images=1 if command == "maps" else 8)
        if command == "maps":
            one.add_argument(
                "--tokens", nargs="+", type=_place, default=[], metavar="Y,X",
                help="query tokens by row and column, of clips by frame, row and column (default: the middle)",
            )  # fmt: skip
        if run is _profile:
            one.add_argument("--queries", type=int, help="so many query tokens, drawn by a fixed seed (default: all)")
    what = "train classifiers that differ in one thing, and compare them"
    one = commands.add_parser("sweep", help=what, description=f"{what[0].upper()}{what[1:]}.")
    one.set_defaults(run=sweep.run)
    sweep.add_options(one)
    return parser


def _add_model_options(parser: argparse.ArgumentParser, several: bool) -> None:
    add = parser.add_argument
    if several:
        add("--model", type=Path, nargs="+", required=True, metavar="RUN", help=f"{_MODEL}; one or several")
    else:
        add("--model", type=Path, required=True, metavar="RUN", help=_MODEL)
    add("--out", type=Path, required=True, help="folder to write")
    add("--checkpoint", help="best, last or a file; of a run directory (default: best, of a generator last)")
    add("--raw", action="store_true", help="the weights being trained, not their moving average")
    add("--dry-run", action="store_true", help="open and check everything, say what would be drawn, and write nothing")


def _add_data_options(parser: argparse.ArgumentParser, images: int) -> None:
    add = parser.add_argument
    add("--data", required=True, help="data set: digits, folder, torch/NAME, latents, moving_digits, ...")
    add("--root", help="place of the data")
    add("--split", default="validation", help="split of the data (default: validation)")
    add("--images", type=int, default=images, help=f"images, evenly spaced over the split (default: {images})")
    add("--background", default="white", help="colour behind transparent pixels (default: white)")
    about = f"of the images of a generator, 0 to 1 (default: {NOISE_LEVEL})"
    add("--noise-level", type=float, default=NOISE_LEVEL, help=about)
    add("--layers", type=int, nargs="+", help="numbers of attention layers, from 0 (default: all; maps: the last)")
    add("--device", default=default_device(), help="device that computes, in float64 (default: a GPU if there is one)")


def _place(text: str) -> Place:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no place such as 3,4") from None


class _Model(NamedTuple):
    """A network, what it is called in results, and what is known of it."""

    title: str
    network: nn.Module
    about: dict[str, Any]


def _open_models(options: argparse.Namespace) -> list[_Model]:
    paths: list[Path] = options.model
    if len(set(paths)) < len(paths):
        raise InputError("--model names a network twice")
    opened = [open_network(path, checkpoint=options.checkpoint, raw=options.raw) for path in paths]
    names = [about["name"] for _, about in opened]
    return [
        _Model(str(path) if names.count(about["name"]) > 1 else about["name"], network, about)
        for path, (network, about) in zip(paths, opened, strict=True)
    ]


def _open_inputs(options: argparse.Namespace, models: Sequence[_Model]) -> list[Inputs]:
    """Reads the images for each network, and takes both to the device."""
    device = open_device(options.device)
    request = ImageRequest(
        options.data, options.root, options.split, options.images, options.noise_level, options.background
    )
    if options.noise_level != NOISE_LEVEL and not any("objective" in model.about for model in models):
        raise InputError(f"--noise-level {options.noise_level:g} applies to generators, these are classifiers")
    inputs = [read_inputs(model.network, model.about, request) for model in models]
    for model in models:
        model.network.to(device)
    return [
        one._replace(arguments=tuple(x.to(device) if isinstance(x, Tensor) else x for x in one.arguments))
        for one in inputs
    ]


def _settings(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    names = ("data", "root", "split", "images", "noise_level", "layers", *names)
    if options.background != "white":  # results of earlier versions do not name it
        names = (*names, "background")
    return {name: getattr(options, name) for name in names}


def _about_data(options: argparse.Namespace) -> str:
    return f"{options.images} image{'s' * (options.images > 1)} of {options.data}, {options.split}"


def _profile(options: argparse.Namespace) -> None:
    """Writes numbers of the attention matrices: `rank` or `entropy`."""
    if options.queries is not None:
        check_counts(1, queries=options.queries)
    models = _open_models(options)
    folder = ResultFolder(
        options.out, options.command, [model.about for model in models], _settings(options, "queries")
    )
    folder.check()
    inputs = _open_inputs(options, models)
    if options.dry_run:
        for model, (arguments, *_) in zip(models, inputs, strict=True):
            record_attention(model.network, *arguments, queries=options.queries, layers=options.layers)
        print(f"would write {options.command}.svg and {options.command}.csv of {len(models)} networks to {options.out}")
        return
    labels, rows = PROFILES[options.command].labels, []
    for model, (arguments, *_) in zip(models, inputs, strict=True):
        found = profile_layers(model.network, arguments, [options.command], options.queries, options.layers)
        if any(row[name] != row[name] for row in found for name in labels):
            raise InputError(f"attention matrices of {model.title} are not finite")
        rows += [{"model": model.title, **row} for row in found]
        means = [f"mean {name} {sum(row[name] for row in found) / len(found):.2f}" for name in labels]
        print(f"{model.title}: {', '.join(means)} ({found[0]['queries']} of {found[0]['tokens']} tokens)")
    figure = draw_profiles(rows, labels, f"Attention matrices of {_about_data(options)}")
    paths = folder.write({options.command: figure}, {options.command: rows})
    print(f"wrote {', '.join(map(str, paths))}")


def _maps(options: argparse.Namespace) -> None:
    """Writes maps of what query tokens attend to."""
    if twice := [place for place, count in Counter(options.tokens).items() if count > 1]:
        raise InputError(f"--tokens names {','.join(map(str, twice[0]))} twice")
    models = _open_models(options)
    settings = _settings(options) | {"tokens": [list(place) for place in options.tokens]}
    folder = ResultFolder(options.out, options.command, [model.about for model in models], settings)
    folder.check()
    inputs = _open_inputs(options, models)
    maps = [
        one
        for model, (arguments, *_) in zip(models, inputs, strict=True)
        for one in attention_maps(model.title, model.network, arguments, options.tokens, options.layers)
    ]
    if options.dry_run:
        print(f"would write maps.png and maps.csv of {len(models)} networks to {options.out}")
        return
    figure = draw_maps(maps, inputs[0].pictures, f"Attention to {_about_data(options)}")
    paths = folder.write({"maps": figure}, {"maps": [row for one in maps for row in one.rows()]})
    print(f"wrote {', '.join(map(str, paths))}")


def _mixing(options: argparse.Namespace) -> None:
    """Draws what a network has learned to mix."""
    network, about = open_network(options.model, checkpoint=options.checkpoint, raw=options.raw)
    folder = ResultFolder(options.out, "mixing", [about], {})
    folder.check()
    pictures = draw_mixing(network, f"{options.model} ({about['name']})", _title(about))
    if not options.dry_run:
        numbers = {name: picture.numbers for name, picture in pictures.items()}
        folder.write({name: picture.figure for name, picture in pictures.items()}, numbers=numbers)
    for name, picture in pictures.items():
        print(f"{'would draw ' if options.dry_run else ''}{folder.picture(name)}: {picture.summary}")


def _title(about: dict[str, Any]) -> str:
    step = about.get("step")
    kind = {"ema": "averaged"}.get(about["weights"], about["weights"])
    return f"{about['name']}, {kind} weights" + ("" if step is None else f", step {step:,}")
