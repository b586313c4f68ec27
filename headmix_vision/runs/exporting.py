"""Exporting a run: a classifier becomes a weights file for timm, a generator a pipeline directory for diffusers."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from timm.models import is_model

import headmix_vision  # noqa: F401  (registers the models with timm)
from headmix_vision.errors import InputError, check_request
from headmix_vision.files.tensors import write_tensors
from headmix_vision.files.writing import atomic_folder, check_place, hold_lock, remove_temporaries
from headmix_vision.runs.checkpoints import DESCRIPTION_KEY, find_checkpoint, is_generator, read_checkpoint
from headmix_vision.runs.directory import INDEX
from headmix_vision.runs.networks import configured, is_prompted, load_network, without_sources

_DIFFUSION = "headmix_vision.diffusion"
# They act while training only, and change no weight's name or shape.
_TRAINING_ARGUMENTS = ("drop_rate", "drop_path_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate")


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """Request for the export of a run.

    Args:
        run: Run directory, or a `.ckpt` file.
        out: File ending in `.safetensors`; a directory for a generator.
        checkpoint: Of a run directory: `best`, `last` or a file; when None the best, of a generator the last.
        raw: Export the weights being trained, not their EMA.
        adapter: Write the LoRA adapter of a transformer into a file of its own instead of merging it.
        overwrite: Replace an earlier export.
        dry_run: Check everything and write nothing.

    Raises:
        InputError: A checkpoint of a checkpoint.
    """

    run: Path
    out: Path
    checkpoint: str | None = None
    raw: bool = False
    adapter: bool = False
    overwrite: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        check_request(self)
        if self.run.suffix == ".ckpt" and self.checkpoint is not None:
            raise InputError(f"--checkpoint is for a run directory, {self.run} is a checkpoint already")


@dataclass(frozen=True)
class Exported:
    """Result of `export_run`.

    Args:
        checkpoint: The checkpoint that was exported.
        out: The file or directory.
        code: Python statements that load it.
    """

    checkpoint: Path
    out: Path
    code: str


def export_run(request: ExportRequest) -> Exported:
    """Export the network of a run, under timm's names or as a directory of diffusers with its autoencoder, if any.

    The header of a weights file tells the model, the arguments, the class names and the top-1 accuracy.

    Raises:
        InputError: If the checkpoint is not one of this package, holds weights that are not finite or of another model
            than it says, or `out` has another ending, exists, or is being written by another process.
        OSError: If the directory cannot be written.
    """
    path = find_checkpoint(request.run, request.checkpoint)
    found = read_checkpoint(path, sharded=(), values=False)
    if request.adapter and found[DESCRIPTION_KEY].get("lora") is None:
        raise InputError(f"--adapter applies only to a run with model.lora.rank, and {path} has none: remove it")
    export = _export_pipeline if is_generator(found) else _export_classifier
    return Exported(path, request.out, export(path, request))


def create_model_arguments(description: dict[str, Any]) -> dict[str, Any]:
    """Collect the arguments of `timm.create_model`, besides the name, which a trained network needs.

    Args:
        description: Entry `headmix_vision` of a checkpoint.

    Returns:
        The arguments that differ from the model's defaults, without those which act in training only.
    """
    name = description["name"]
    stored = without_sources(description["model_args"])
    arguments = {name: value for name, value in stored.items() if name not in _TRAINING_ARGUMENTS}
    default = configured(name, stored, "num_classes") if is_model(name) else None
    if description["num_classes"] != default:
        arguments["num_classes"] = description["num_classes"]
    if description["img_size"] is not None:
        arguments["img_size"] = description["img_size"]
    return arguments


def _export_classifier(checkpoint_path: Path, request: ExportRequest) -> str:
    """Write a safetensors file; return the Python statements which load it."""
    out = request.out
    if out.suffix != ".safetensors":
        raise InputError(f"--out must end in .safetensors, got {out}")
    if out.is_dir():
        raise InputError(f"--out {out} is a directory, a classifier is exported to a file")
    _check_absent(request)
    check_place(out)
    checkpoint = read_checkpoint(checkpoint_path)
    description = checkpoint[DESCRIPTION_KEY]
    arguments = create_model_arguments(description)
    network = load_network(checkpoint, raw=request.raw)
    header = {
        "format": "pt",
        "model_name": description["name"],
        "model_args": json.dumps(arguments),
        "class_names": json.dumps(description["class_names"]),
        "top1": json.dumps(None if request.raw else description["top1"]),
    }
    if not request.dry_run:
        tensors = {name: value.contiguous() for name, value in network.state_dict().items()}
        with hold_lock(out.with_name(f".{out.name}.lock"), f"file {out}"):
            _check_absent(request)  # another process may have written it meanwhile
            remove_temporaries(out.parent, escape(out.name))
            write_tensors(out, tensors, header)
    given = "".join(f"{name}={value!r}, " for name, value in arguments.items())
    loaded = f"timm.create_model({description['name']!r}, {given}checkpoint_path={str(out)!r})"
    return f"import timm, headmix_vision; model = {loaded}"


def _check_absent(request: ExportRequest) -> None:
    if request.out.exists() and not request.overwrite:
        raise InputError(f"--out {request.out} already exists; choose another one, or replace it with --overwrite")


def _export_pipeline(checkpoint_path: Path, request: ExportRequest) -> str:
    """Write a directory of diffusers; return the Python statements which load it."""
    from headmix_vision.runs.pipelines import load_pipeline  # loads diffusers, which classifiers do without
    from headmix_vision.runs.prompted import open_run

    out = request.out
    if out.suffix == ".safetensors":
        raise InputError(f"--out is {out}, but a generator is exported to a directory")
    replaceable = (out / INDEX).is_file()
    if out.exists() and not (request.overwrite and replaceable):
        hint = ", or replace it with --overwrite" if replaceable else ", it holds no pipeline that could be replaced"
        raise InputError(f"--out {out} already exists; choose another one{hint}")
    check_place(out)
    about = read_checkpoint(checkpoint_path, sharded=(), values=False)[DESCRIPTION_KEY]
    _check_apart(out, checkpoint_path, about.get("vae"))
    save: Callable[[Path], object]
    if prompted := is_prompted(about):
        save, kind = open_run(checkpoint_path, raw=request.raw, adapter=request.adapter)
    else:
        pipeline, _ = load_pipeline(checkpoint_path, raw=request.raw)
        save, kind = pipeline.save_pretrained, type(pipeline).__name__
    if not request.dry_run:
        with atomic_folder(out, overwrite=request.overwrite) as complete:
            try:
                save(complete)
            except SafetensorError as error:  # what the system refused, in the words of the library
                raise OSError(f"{error}: {out}") from None
            _open_to_umask(complete)
    home, registers = ("diffusers", "import headmix_vision.models.prompted; ") if prompted else (_DIFFUSION, "")
    added = f"; pipe.load_lora_weights({str(out)!r})" if request.adapter else ""
    return f"{registers}from {home} import {kind}; pipe = {kind}.from_pretrained({str(out)!r}){added}"


def _check_apart(out: Path, checkpoint: Path, source: object) -> None:
    """Refuse an export in the place of the run, or in, around or in the place of the pipeline whose parts it copies."""
    place = out.resolve()
    if checkpoint.resolve().is_relative_to(place):
        raise InputError(f"--out {out} holds the run itself; choose another one")
    if isinstance(source, str) and Path(source).is_dir():
        folder = Path(source).resolve()
        if place.is_relative_to(folder) or folder.is_relative_to(place):
            raise InputError(
                f"--out {out} is not apart from {source}, which the run was trained with; choose another one"
            )


def _open_to_umask(folder: Path) -> None:
    """Give all files of a folder the mode that a new file has; safetensors makes them for their owner alone."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)
