"""Loading a generator as a pipeline: from a run directory, a checkpoint or an exported pipeline."""

from pathlib import Path
from typing import Any

from headmix_vision.diffusion.objectives import ObjectiveConfig
from headmix_vision.diffusion.pipeline import HeadMixDiTPipeline
from headmix_vision.diffusion.schedulers import create_scheduler
from headmix_vision.errors import InputError
from headmix_vision.hashes import state_sha256
from headmix_vision.models.autoencoders import load_autoencoder
from headmix_vision.runs.checkpoints import DESCRIPTION_KEY, is_generator, read_checkpoint
from headmix_vision.runs.directory import CHECKPOINTS, find_checkpoint
from headmix_vision.runs.networks import load_network


def load_pipeline(
    model: Path, *, checkpoint: str = "last", raw: bool = False, vae: str | None = None
) -> tuple[HeadMixDiTPipeline, dict[str, Any]]:
    """Loads a generator, in evaluation mode and on the CPU.

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
        if model.suffix != ".ckpt" and not (model / CHECKPOINTS).is_dir():
            raise InputError(
                f"{model} is neither a run directory (with checkpoints/), nor a .ckpt, nor an exported pipeline"
                " (with model_index.json)"
            )
        pipeline, about = _from_checkpoint(find_checkpoint(model, checkpoint), raw, vae)
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
    if not is_generator(checkpoint):
        raise InputError(f"{path} is of the classifier {description['name']}, not of a generator")
    model: Any = load_network(checkpoint, raw=raw)
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
