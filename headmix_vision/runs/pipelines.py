"""From a run directory, a checkpoint or an exported pipeline to something that samples, and where it came from."""

from pathlib import Path
from typing import Any

from headmix_vision.errors import InputError
from headmix_vision.models.autoencoders import load_autoencoder
from headmix_vision.diffusion.objectives import ObjectiveConfig
from headmix_vision.diffusion.pipeline import HeadMixDiTPipeline
from headmix_vision.diffusion.schedulers import create_scheduler
from headmix_vision.hashes import state_sha256
from headmix_vision.models import HeadMixDiT
from headmix_vision.runs.checkpoints import (
    DESCRIPTION_KEY,
    check_state,
    find_checkpoint,
    model_state,
    read_checkpoint,
)


def load_pipeline(
    model: Path, *, checkpoint: str = "last", raw: bool = False, vae: str | None = None
) -> tuple[HeadMixDiTPipeline, dict[str, Any]]:
    """Load a generator, in evaluation mode and on the CPU.

    Args:
        model: A run directory of `train_gen.py`, one of its `.ckpt` files, or an exported pipeline's directory.
        checkpoint: Of a run directory: `last` or a file.
        raw: The weights being trained instead of their moving average; not of an exported pipeline, which has one kind.
        vae: Another autoencoder than the recorded one, a local directory or a hub id.

    Returns:
        The pipeline, and what the samples' metadata should say about it.

    Raises:
        InputError: If there is nothing to load, it is no generator, or its autoencoder is missing.
    """
    if (model / "model_index.json").is_file():
        if raw:
            raise InputError(f"{model} is an exported pipeline, it has one kind of weights: leave out --raw")
        pipeline, about = _load_exported(model), {"weights": "exported"}
        if vae is not None:
            pipeline.register_modules(vae=load_autoencoder(vae).module)
    else:
        if model.suffix != ".ckpt" and not (model / "checkpoints").is_dir():
            raise InputError(
                f"{model} is neither a run directory (with checkpoints/), nor a .ckpt, nor an exported pipeline"
                " (with model_index.json)"
            )
        path = model if model.suffix == ".ckpt" else find_checkpoint(model, checkpoint)
        pipeline, about = _from_checkpoint(path, raw, vae)
    pipeline.transformer.eval().requires_grad_(False)
    return pipeline, {
        "model": str(model),
        "architecture": pipeline.transformer.architecture,
        "objective": pipeline.config.objective,
        "weights_sha256": state_sha256(pipeline.transformer.state_dict()),
        **about,
    }


def _load_exported(folder: Path) -> HeadMixDiTPipeline:
    try:
        return HeadMixDiTPipeline.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{folder} is no pipeline of this package: {reason}") from None


def _from_checkpoint(path: Path, raw: bool, vae: str | None) -> tuple[HeadMixDiTPipeline, dict[str, Any]]:
    checkpoint = read_checkpoint(path)
    description = checkpoint[DESCRIPTION_KEY]
    if description.get("kind") != "generator":
        raise InputError(f"{path} is of the classifier {description['name']}, not of a generator")
    model = HeadMixDiT(**description["architecture"])
    state = model_state(checkpoint, raw=raw)
    check_state(state, model.state_dict())
    model.load_state_dict(state)
    objective = ObjectiveConfig(**description["objective"])
    source = description["vae"]
    if vae is not None and source is None and model.in_channels in (1, 3):
        raise InputError(f"--vae {vae} given, but {path} was trained on pixels")
    source = vae or source
    pipeline = HeadMixDiTPipeline(
        model,
        create_scheduler(None, objective, clip=source is None),
        vae=load_autoencoder(source).module if source is not None else None,
        objective=description["objective"],
        class_names=description["class_names"],
    )
    averaged = "current_model_state" in checkpoint and not raw
    return pipeline, {
        "checkpoint": str(path),
        "name": description["name"],
        "step": checkpoint["global_step"],
        "weights": "ema" if averaged else "raw",
        "vae": source,
    }
