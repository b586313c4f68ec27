"""Loading a generator as a pipeline: from a run directory, a checkpoint or an exported pipeline."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
from diffusers import SchedulerMixin
from safetensors import SafetensorError

from headmix_vision.diffusion.denoising import check_scheduler_class, check_scheduler_config, create_scheduler
from headmix_vision.diffusion.objectives import ObjectiveConfig
from headmix_vision.diffusion.pipeline import HeadMixDiTPipeline
from headmix_vision.diffusion.sizes import latent_channels
from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_fields, check_files, read_json
from headmix_vision.files.tensors import check_sums, state_sha256
from headmix_vision.models import HeadMixDiT
from headmix_vision.models.autoencoders import PIXELS, Autoencoder, load_autoencoder
from headmix_vision.models.building import building
from headmix_vision.runs.checkpoints import (
    DESCRIPTION_KEY,
    check_finite,
    find_checkpoint,
    is_generator,
    read_checkpoint,
)
from headmix_vision.runs.directory import CHECKPOINTS, INDEX
from headmix_vision.runs.networks import load_network, refuse_prompted

# names of earlier versions included
_PIPELINES = ("HeadMixDiTPipeline", "HeadMixVideoDiTPipeline")
_NETWORKS = ("HeadMixDiT", "HeadMixVideoDiT")
_ENTRIES = {
    "_class_name": str,
    "transformer": list,
    "scheduler": list,
    "vae": list | None,
    "objective": dict | None,
    "class_names": list | None,
}
Loaded = tuple[HeadMixDiTPipeline, Autoencoder | None, dict[str, Any]]


def load_pipeline(
    model: Path, *, checkpoint: str | None = None, raw: bool = False, vae: str | None = None
) -> tuple[HeadMixDiTPipeline, dict[str, Any]]:
    """Load a generator, in evaluation mode and on the CPU.

    Args:
        model: A run directory of `headmix train-gen`, one of its `.ckpt` files, or an exported pipeline's directory.
        checkpoint: Of a run directory: `last` (which None means) or a file.
        raw: The weights being trained instead of their EMA; not of an exported pipeline, which has one kind.
        vae: Another autoencoder than the recorded one, a local directory or a hub id.

    Returns:
        The pipeline, and what the samples' metadata should say about it.

    Raises:
        InputError: If there is nothing to load, it is not a generator, its weights are not finite, its autoencoder is
            missing or has other latents, or an option does not apply to it.
    """
    exported = (model / INDEX).is_file()
    if checkpoint is not None and (exported or model.suffix == ".ckpt"):
        kind = "an exported pipeline" if exported else "a checkpoint itself"
        raise InputError(f"{model} is {kind}: leave out --checkpoint {checkpoint}")
    if exported:
        if raw:
            raise InputError(f"{model} is an exported pipeline, it has one kind of weights: leave out --raw")
        pipeline, autoencoder, about = _load_exported(model, vae)
    else:
        if model.suffix != ".ckpt" and not (model / CHECKPOINTS).is_dir():
            raise InputError(
                f"{model} is neither a run directory (with {CHECKPOINTS}/), nor a .ckpt, nor an exported pipeline"
                f" (with {INDEX})"
            )
        pipeline, autoencoder, about = _from_checkpoint(find_checkpoint(model, checkpoint or "last"), raw, vae)
    state = pipeline.transformer.state_dict()
    check_finite(state, str(model))
    if autoencoder is not None:
        check_finite(autoencoder.module.state_dict(), f"the autoencoder {autoencoder.source}")  # type: ignore[union-attr]
    pipeline.transformer.eval().requires_grad_(False)
    return pipeline, {
        "model": str(model),
        "architecture": pipeline.transformer.architecture,
        "objective": dict(pipeline.config.objective),
        "weights_sha256": state_sha256(state),
        "vae": None if autoencoder is None else autoencoder.description,
        **about,
    }


def load_exported_network(folder: Path) -> HeadMixDiT:
    """Load the network of an exported pipeline alone, without its scheduler and autoencoder.

    Raises:
        InputError: If the directory holds no network of this package, or its weights are damaged or not finite.
    """
    check_sums(folder)
    with _refused(f"{folder} is not a pipeline of this package"):
        network = _read_network(folder)
    check_finite(network.state_dict(), str(folder))
    return network


def _load_exported(folder: Path, vae: str | None) -> Loaded:
    # Part by part, not `from_pretrained`: that imports whatever modules the index names, ignores unknown options, and
    # shows a bar in logs.
    check_sums(folder)
    where = f"{folder} is not a pipeline of this package"
    with _refused(where):
        index = _read_index(folder)
        objective = ObjectiveConfig.from_dict(index["objective"] or {})
        model = _read_network(folder)
        scheduler = _read_scheduler(folder / "scheduler", index["scheduler"][-1], objective)
    has_autoencoder = any(part is not None for part in index["vae"] or [])
    if has_autoencoder and vae is None and not (folder / "vae").is_dir():  # else its path is taken for a hub id
        raise InputError(f"{where}: it lacks the folder vae")
    autoencoder = _open_autoencoder(str(folder / "vae") if has_autoencoder else None, vae, model, folder)
    with _refused(where):
        pipeline = HeadMixDiTPipeline(
            model, scheduler, _module(autoencoder), objective=index["objective"], class_names=index["class_names"]
        )
    return pipeline, autoencoder, {"weights": "exported"}


def _read_index(folder: Path) -> dict[str, Any]:
    """Read the index of a pipeline; refuse another class of pipeline or network."""
    index = check_fields(INDEX, read_json(folder / INDEX), _ENTRIES)
    if index["_class_name"] not in _PIPELINES:
        raise InputError(f"it is of the class {index['_class_name']}")
    if index["transformer"][-1:] not in ([name] for name in _NETWORKS):
        raise InputError(f"its network is of the class {index['transformer'][-1:]}")
    return index


def _read_network(folder: Path) -> HeadMixDiT:
    """Read the network of a pipeline whose index names one of ours."""
    _read_index(folder)
    place = folder / "transformer"
    config = check_fields(f"{place.name}/config.json", read_json(place / "config.json"), {})
    for name in config:
        if not name.startswith("_") and name not in inspect.signature(HeadMixDiT.__init__).parameters:
            raise InputError(f"its network has the unknown option {name!r}")
    check_files(place)
    with building("its network", config):
        return HeadMixDiT.from_pretrained(str(place), low_cpu_mem_usage=False, use_safetensors=True)


def _read_scheduler(folder: Path, name: str, objective: ObjectiveConfig) -> SchedulerMixin:
    check_scheduler_class(name, objective)
    config = read_json(folder / "scheduler_config.json")
    if not isinstance(config, dict):
        raise InputError("its scheduler_config.json is not a table of options")
    scheduler: SchedulerMixin = getattr(diffusers, name).from_config(config)
    check_scheduler_config(scheduler)
    return scheduler


def _from_checkpoint(path: Path, raw: bool, vae: str | None) -> Loaded:
    checkpoint = read_checkpoint(path)
    description = checkpoint[DESCRIPTION_KEY]
    if not is_generator(checkpoint):
        raise InputError(f"{path} is of the classifier {description['name']}, not of a generator")
    refuse_prompted(description, path)
    where = f"{path} holds no generator that can be made"
    with _refused(where):
        model: Any = load_network(checkpoint, raw=raw)
        objective = ObjectiveConfig.from_dict(description["objective"])
    autoencoder = _open_autoencoder(description["vae"], vae, model, path)
    with _refused(where):
        pipeline = HeadMixDiTPipeline(
            model,
            create_scheduler(None, objective, clip=autoencoder is None),
            _module(autoencoder),
            objective=description["objective"],
            class_names=description["class_names"],
        )
    averaged = "current_model_state" in checkpoint and not raw
    return (
        pipeline,
        autoencoder,
        {
            "checkpoint": str(path),
            "name": description["name"],
            "step": checkpoint.get("global_step"),
            "weights": "ema" if averaged else "raw",
        },
    )


def _open_autoencoder(recorded: str | None, asked: str | None, model: Any, where: Path) -> Autoencoder | None:
    """Open the autoencoder asked for, or else the recorded one; give None for a network of pixels."""
    if asked == PIXELS:
        raise InputError(f"--vae must be a directory or a hub id, got {asked}")
    if asked is not None and recorded is None and model.in_channels in (1, 3):
        raise InputError(f"--vae {asked} given, but {where} was trained on pixels")
    source = asked or recorded
    if source is None or source == PIXELS:
        return None
    autoencoder = load_autoencoder(source, fetch=asked is not None)
    channels = latent_channels(autoencoder.module)
    if channels != model.in_channels:
        raise InputError(
            f"the autoencoder {source} has latents of {channels} channels, {where} has {model.in_channels}"
        )
    return autoencoder


def _module(autoencoder: Autoencoder | None) -> Any:
    return None if autoencoder is None else autoencoder.module


@contextmanager
def _refused(where: str) -> Iterator[None]:
    """Report in one line that a file cannot be used, whatever its reader raises on it."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(f"{where}: {reason}") from None
    except SafetensorError as error:
        raise InputError(f"{where}: its weights are truncated or damaged ({error})") from None
