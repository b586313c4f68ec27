"""Turns a run into something to load elsewhere: `python -m headmix_vision.export RUN --out TARGET`.

A classifier becomes a weights file for timm (`--out model.safetensors`), a generator a pipeline directory for diffusers
(`--out DIRECTORY`).
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from timm.models import get_pretrained_cfg_value, is_model

import headmix_vision  # noqa: F401  (registers the models with timm)
from headmix_vision.atomic import atomic_path
from headmix_vision.errors import InputError, one_line_errors
from headmix_vision.runs.checkpoints import DESCRIPTION_KEY, is_generator, model_state, read_checkpoint
from headmix_vision.runs.directory import find_checkpoint

# They act while training only, and change no weight's name or shape.
_TRAINING_ARGUMENTS = ("drop_rate", "drop_path_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate")


def create_model_arguments(description: dict[str, Any]) -> dict[str, Any]:
    """Collects the arguments of `timm.create_model`, besides the name, which a trained network needs.

    Args:
        description: Entry `headmix_vision` of a checkpoint.

    Returns:
        The arguments that differ from the model's defaults, without those which act in training only.
    """
    name = description["name"]
    arguments = {k: v for k, v in description["model_args"].items() if k not in _TRAINING_ARGUMENTS}
    default = get_pretrained_cfg_value(name, "num_classes") if is_model(name) else None
    if description["num_classes"] != default:
        arguments["num_classes"] = description["num_classes"]
    if description["img_size"] is not None:
        arguments["img_size"] = description["img_size"]
    return arguments


def export(checkpoint_path: Path, out: Path, *, raw: bool = False) -> str:
    """Writes the network of a checkpoint to a safetensors file, under timm's names.

    Args:
        checkpoint_path: A `.ckpt` file.
        out: The file to write. Its header tells the model, the arguments, the class names and the top-1 accuracy.
        raw: Export the weights being trained instead of their moving average.

    Returns:
        The Python expression which loads the file.

    Raises:
        InputError: If the checkpoint is not one of this package, or `out` does not end in `.safetensors`.
    """
    if out.suffix != ".safetensors":
        raise InputError(f"--out must end in .safetensors, got {out}")
    checkpoint = read_checkpoint(checkpoint_path)
    description = checkpoint[DESCRIPTION_KEY]
    arguments = create_model_arguments(description)
    top1 = None if raw else description["top1"]
    header = {
        "format": "pt",
        "model_name": description["name"],
        "model_args": json.dumps(arguments),
        "class_names": json.dumps(description["class_names"]),
        "top1": json.dumps(top1),
    }
    tensors = {name: value.contiguous() for name, value in model_state(checkpoint, raw=raw).items()}
    with atomic_path(out) as temporary:
        save_file(tensors, temporary, metadata=header)
    given = "".join(f"{name}={value!r}, " for name, value in arguments.items())
    return f"timm.create_model({description['name']!r}, {given}checkpoint_path={str(out)!r})"


def export_pipeline(checkpoint_path: Path, out: Path, *, raw: bool = False) -> str:
    """Writes the generator of a checkpoint as a directory of diffusers, with its autoencoder if it has one.

    Args:
        checkpoint_path: A `.ckpt` file.
        out: The directory to write; it must not exist.
        raw: Export the weights being trained instead of their moving average.

    Returns:
        The Python expression which loads the directory.

    Raises:
        InputError: If the checkpoint is not one of this package, or `out` exists.
    """
    if out.exists():
        raise InputError(f"--out {out} already exists; a generator is exported to a new directory")
    from headmix_vision.runs.pipelines import load_pipeline  # not needed for classifiers, unlike diffusers

    pipeline, _ = load_pipeline(checkpoint_path, raw=raw)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        complete = Path(temporary) / out.name
        pipeline.save_pretrained(complete)
        complete.rename(out)
    return f"HeadMixDiTPipeline.from_pretrained({str(out)!r})"


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line; wrong input ends the process with one line and exit status 2."""
    parser = argparse.ArgumentParser(prog="python -m headmix_vision.export", description="Export a run's weights.")
    parser.add_argument("run", type=Path, help="run directory, or a .ckpt file")
    parser.add_argument(
        "--out", type=Path, required=True, help="file ending in .safetensors; for a generator a directory"
    )
    parser.add_argument(
        "--checkpoint", help="best, last or a file; of a run directory (default: best, of a generator last)"
    )
    parser.add_argument("--raw", action="store_true", help="the weights being trained, not their moving average")
    options = parser.parse_args(args)
    with one_line_errors():
        path = find_checkpoint(options.run, options.checkpoint)
        generator = is_generator(read_checkpoint(path))
        expression = (export_pipeline if generator else export)(path, options.out, raw=options.raw)
    if generator:
        print(f"from headmix_vision.diffusion import HeadMixDiTPipeline; pipe = {expression}")
    else:
        print(f"import timm, headmix_vision; model = {expression}")
