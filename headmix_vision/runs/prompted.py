"""Runs of converted transformers of Wan and Sana: their start weights, their latents, and their export."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import diffusers
import torch

from headmix_vision.console import say_once
from headmix_vision.errors import InputError, message_of
from headmix_vision.files.pictures import is_hidden
from headmix_vision.files.reading import check_disk
from headmix_vision.files.tensors import state_sha256
from headmix_vision.models.autoencoders import load_autoencoder
from headmix_vision.models.lora import LoraTransformer
from headmix_vision.models.pipeline_folder import describe_text_encoder, read_pipeline
from headmix_vision.models.prompted import PromptedTransformer
from headmix_vision.runs.checkpoints import (
    DESCRIPTION_KEY,
    check_finite,
    check_state,
    is_generator,
    model_state,
    read_checkpoint,
)
from headmix_vision.runs.directory import INDEX
from headmix_vision.runs.networks import load_network

_ENCODER_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_prompted(network: PromptedTransformer, checkpoint: str) -> None:
    """Load start weights from a `.ckpt` of such a run.

    Raises:
        InputError: If it is another file, or its weights do not fit.
    """
    if Path(checkpoint).suffix != ".ckpt":
        raise InputError(f"model.checkpoint={checkpoint} must be a .ckpt of this package for model.transformer")
    read = read_checkpoint(checkpoint)
    if not is_generator(read):
        raise InputError(f"{checkpoint} holds a classifier, not a converted transformer")
    state = model_state(read)
    check_state(state, network.state_dict())
    check_finite(state, checkpoint)
    network.load_state_dict(state)


def check_latents(network: PromptedTransformer, folder: str, manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Check that the transformer's own pipeline made the cached latents and prompts.

    A note says where prompts cannot be compared: the folder has no text encoder, or an earlier version made the cache.

    Args:
        network: The network.
        folder: Folder of the pipeline.
        manifests: What `read_manifest` returned, by the folders of the caches.

    Returns:
        Description of the text encoder.

    Raises:
        InputError: If channels, axes, width of prompts, weights of the autoencoder or the text encoder differ, or a
            size does not fit the transformer and its blocks.
    """
    for place, manifest in manifests.items():
        channels, *grid = manifest["shape"]
        if (channels, len(grid)) != (network.in_channels, len(network.input_size)):
            kinds = {2: "images", 3: "clips"}
            raise InputError(
                f"{place} holds latents of {kinds.get(len(grid), 'samples')} with {channels} channels, the transformer"
                f" takes {kinds[len(network.input_size)]} with {network.in_channels}"
            )
        try:
            network.check_size(grid)
        except InputError as error:
            raise InputError(f"{place}, latents {manifest['shape']}: {error}") from None
        width = manifest["prompts"]["shape"][-1]
        if width != network.prompt_width:
            raise InputError(f"the prompts of {place} have width {width}, the transformer takes {network.prompt_width}")
    encoder = _check_prompts(folder, manifests)
    known = {manifest["autoencoder"].get("sha256") for manifest in manifests.values()}
    state = load_autoencoder(folder, fetch=False).module.state_dict()  # type: ignore[union-attr]
    for dtype in _ENCODER_TYPES:  # in which latents may have been encoded
        known -= {state_sha256({name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()})}
        if not known:
            return encoder
    places = [place for place, manifest in manifests.items() if manifest["autoencoder"].get("sha256") in known]
    raise _made_by_another("autoencoder", "latents", places[0], manifests, folder, ["sha256"])


def _check_prompts(folder: str, manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Check that the text encoder of a pipeline folder embedded the cached prompts.

    Returns:
        Its description; where the folder has no text encoder, the description that the first cache holds.
    """
    encoder = describe_text_encoder(folder)
    if encoder is None:
        say_once(f"note: {folder} has no text encoder to compare: prompts of another one go unnoticed")
        return dict(next(iter(manifests.values()))["prompts"])
    for place, manifest in manifests.items():
        differing = [name for name, value in encoder.items() if manifest["prompts"].get(name, value) != value]
        if differing:
            raise _made_by_another("text encoder", "prompts", place, manifests, folder, differing)
    earlier = [place for place, manifest in manifests.items() if "sha256" not in manifest["prompts"]]
    if earlier:
        say_once(f"note: an earlier version made {earlier[0]}: prompts of another text encoder go unnoticed")
    return encoder


def _made_by_another(
    part: str, made: str, place: str, manifests: dict[str, dict[str, Any]], folder: str, differing: list[str]
) -> InputError:
    source = manifests[place]["autoencoder"].get("source")  # for prompts too: the folder of a pipeline
    return InputError(
        f"the {made} of {place}, made with {source}, are of another {part} than that in {folder} (differing:"
        f" {', '.join(differing)}): cache them with --vae {folder}"
    )


def _size_bytes(folder: str, left_out: Callable[[str, list[str]], list[str]], network: torch.nn.Module) -> int:
    """Sum the bytes of a folder's files, without those left out, and of the weights of a network."""
    size = sum(tensor.nbytes for tensor in network.state_dict().values())
    for place, folders, names in os.walk(folder, followlinks=True):
        without = left_out(place, [*folders, *names])
        folders[:] = [name for name in folders if name not in without]
        size += sum(os.stat(Path(place) / name).st_size for name in names if name not in without)
    return size


def _copy(source: str, target: str) -> None:
    """Copy a file; what the system refuses ends the copying of its folder, in one line."""
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        error.filename = error.filename2 or error.filename
        raise InputError(message_of(error)) from None


def open_run(checkpoint: Path, *, raw: bool = False, adapter: bool = False) -> tuple[Callable[[Path], None], str]:
    """Open the trained transformer of a checkpoint, to be saved in a copy of its pipeline.

    Args:
        checkpoint: The `.ckpt` file.
        raw: The weights being trained instead of their EMA.
        adapter: Save the LoRA adapter in a file of its own instead of merging it.

    Returns:
        A function that writes the pipeline folder, which must not exist, and the class of the pipeline.

    Raises:
        InputError: If the pipeline is not there any more or has another text encoder, or the checkpoint holds no such
            network.
    """
    read = read_checkpoint(checkpoint)
    folder, network = str(read[DESCRIPTION_KEY]["vae"]), load_network(read, raw=raw)
    trained, encoder = read[DESCRIPTION_KEY]["text_encoder"] or {}, describe_text_encoder(folder) or {}
    if "sha256" in trained and "sha256" in encoder and trained["sha256"] != encoder["sha256"]:
        raise InputError(
            f"{checkpoint} was trained on prompts of another text encoder than that in {folder}: restore the folder"
        )
    index, transformer = read_pipeline(folder), cast(Any, network).transformer
    lora = network.take_adapter(merge=not adapter) if isinstance(network, LoraTransformer) else None

    def left_out(place: str, names: list[str]) -> list[str]:
        inside = Path(place) != Path(folder)
        return [name for name in names if not inside and (name == "transformer" or is_hidden(name))]

    def save(out: Path) -> None:
        check_disk(out.parents[1], _size_bytes(folder, left_out, transformer), f"a copy of {folder}")
        shutil.copytree(folder, out, ignore=left_out, copy_function=_copy)
        transformer.save_pretrained(out / "transformer")
        index["transformer"] = [type(transformer).__module__, type(transformer).__name__]
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        if adapter and lora is not None:
            getattr(diffusers, index["_class_name"]).save_lora_weights(out, **lora)

    return save, str(index["_class_name"])
