"""Turn a run into a weights file which timm loads: `python -m headmix_vision.export RUN --out model.safetensors`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from timm.models import get_pretrained_cfg_value, is_model

import headmix_vision  # noqa: F401  (registers the models with timm)
from headmix_vision.training.checkpoints import DESCRIPTION_KEY, find_checkpoint, model_state, read_checkpoint
from headmix_vision.training.files import atomic_path

# They act while training only, and change no weight's name or shape.
_TRAINING_ARGUMENTS = ("drop_rate", "drop_path_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate")


def create_model_arguments(description: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `timm.create_model`, besides the name, which a trained network needs.

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
    """Write the network of a checkpoint to a safetensors file, under timm's names.

    Args:
        checkpoint_path: A `.ckpt` file.
        out: The file to write. Its header tells the model, the arguments, the class names and the top-1 accuracy.
        raw: Export the weights being trained instead of their moving average.

    Returns:
        The Python expression which loads the file.

    Raises:
        ValueError: If the checkpoint is not one of this package, or `out` does not end in `.safetensors`.
    """
    if out.suffix != ".safetensors":
        raise ValueError(f"--out must end in .safetensors, got {out}")
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


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; wrong input ends the process with one line and exit status 2."""
    parser = argparse.ArgumentParser(prog="python -m headmix_vision.export", description="Export a run's weights.")
    parser.add_argument("run", type=Path, help="run directory, or a .ckpt file")
    parser.add_argument("--out", type=Path, required=True, help="file to write, ending in .safetensors")
    parser.add_argument("--checkpoint", default="best", help="best, last or a file; of a run directory (default: best)")
    parser.add_argument("--raw", action="store_true", help="the weights being trained, not their moving average")
    options = parser.parse_args(args)
    try:
        path = options.run if options.run.suffix == ".ckpt" else find_checkpoint(options.run, options.checkpoint)
        expression = export(path, options.out, raw=options.raw)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"import timm, headmix_vision; model = {expression}")


if __name__ == "__main__":
    main()
