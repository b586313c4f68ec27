"""Sensitivity of a trained network to another attention: the error at its output when one layer alone is swapped.

B batch, N tokens, C channels.
"""

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from headmix_vision.analysis.analysis_request import SensitivityRequest
from headmix_vision.analysis.results import ResultFolder
from headmix_vision.console import default_device, open_device, progress
from headmix_vision.errors import InputError, check_counts
from headmix_vision.files.tensors import state_sha256
from headmix_vision.models.attention_errors import (
    attention_errors,
    attention_names,
    attention_pairs,
    feature_errors,
    tell_grid,
)
from headmix_vision.runs.directory import INDEX
from headmix_vision.runs.networks import open_network
from headmix_vision.runs.teachers import make_student, open_teacher

ALL = "all"
"""Name of the row in which all layers are swapped."""
Row = dict[str, Any]


def measure_sensitivity(
    teacher: nn.Module, student: nn.Module, images: Tensor | Sequence[tuple[Any, ...]], batch_size: int = 32
) -> list[Row]:
    """Measure the errors of a teacher with one layer of a student each, and of the whole student.

    Args:
        teacher: The trained network; a model of timm with `forward_features`, or a generator.
        student: A network that differs from it in attention layers, trained or not.
        images: Images, [B, C, H, W], as the networks take them; of generators a list of batches, each the arguments of
            a call: noisy latents [B, C, *grid], times [B], prompts.
        batch_size: Images at a time.

    Returns:
        A row for each layer that differs, and one for all of them together: `layer`, `attention_error` (squared error
        of the layer's output over the mean square, on the teacher's activations), `feature_error` (1 - cosine of the
        last features, mean over tokens; of a generator of what it predicts, mean over places) and `order` (1 for the
        largest `feature_error`, 0 for all layers).

    Raises:
        InputError: If teacher and student do not fit.
    """
    teacher, student = (copy.deepcopy(network).eval() for network in (teacher, student))
    names, pairs = attention_names(teacher, student), attention_pairs(teacher, student)
    originals = {name: teacher.get_submodule(name) for name in names}
    sums = torch.zeros(2, len(names) + 1, dtype=torch.float64)
    batches = [(batch,) for batch in images.split(batch_size)] if isinstance(images, Tensor) else images
    count = sum(len(batch[0]) for batch in batches)
    with torch.no_grad(), progress("measuring", count, "images") as advance:
        for batch in batches:
            tell_grid(pairs, batch[0])
            with attention_errors(pairs, learn=False) as errors:
                wanted = _features(teacher, batch)
            for index, name in enumerate(names):
                teacher.set_submodule(name, student.get_submodule(name))
                sums[0, index] += errors[index].double().sum().cpu()
                sums[1, index] += feature_errors(_features(teacher, batch), wanted)[0].double().sum().cpu()
                teacher.set_submodule(name, originals[name])
            sums[0, -1] += torch.stack(errors).mean(0).double().sum().cpu()
            sums[1, -1] += feature_errors(_features(student, batch), wanted)[0].double().sum().cpu()
            advance(len(batch[0]))
    attention, features = (sums / count).tolist()
    order = {name: place for place, (_, name) in enumerate(sorted(zip(features, names, strict=False), reverse=True), 1)}
    return [
        {"layer": name, "attention_error": error, "feature_error": distance, "order": order.get(name, 0)}
        for name, error, distance in zip((*names, ALL), attention, features, strict=True)
    ]


def _features(network: Any, batch: tuple[Any, ...]) -> Tensor:
    features: Tensor = network.forward_features(*batch) if len(batch) == 1 else network(*batch).flatten(2).mT
    return features


def layers_to_swap(rows: Sequence[Mapping[str, Any]], keep: int) -> list[str]:
    """Choose the layers to swap when the most sensitive ones stay, for `swap_attention(layers=...)`.

    Args:
        rows: Rows of `measure_sensitivity`.
        keep: Number of layers that stay.

    Raises:
        InputError: If no layer is left to swap.
    """
    layers = [row for row in rows if row["layer"] != ALL]
    check_counts(0, len(layers) - 1, keep=keep)
    return [row["layer"] for row in layers if row["order"] > keep]


def write_sensitivity(
    request: SensitivityRequest, read: Callable[[nn.Module], Any], found: Callable[[str], object]
) -> tuple[list[Any], list[Row]]:
    """Measure the sensitivity that a request asks for, and write its table.

    Args:
        request: The request.
        read: Reads the images for a classifier, [B, C, H, W].
        found: Called with each line of the result.

    Returns:
        The files, and the rows of the table; nothing in a dry run.

    Raises:
        InputError: Wrong input, before anything is written.
    """
    options = {} if request.block_grid is None else {"block_grid": list(request.block_grid)}
    teacher: Any
    student: Any
    if prompted := (Path(request.teacher) / INDEX).is_file():
        from headmix_vision.analysis.prompted_inputs import open_pair, read_batches  # loads diffusers

        (teacher, student), read = open_pair(request, options), partial(read_batches, request=request)
    else:
        teacher, student = _open_pair(request, options)
    names = attention_names(teacher, student)
    check_counts(0, len(names) - 1, keep=request.keep)
    networks = [
        {"name": name, "weights_sha256": state_sha256(network.state_dict())}
        for name, network in ((request.teacher, teacher), (str(request.student or request.core), student))
    ]
    settings = {
        name: getattr(request, name)
        for name in ("data", "root", "split", "images", "background", "core", "head_mix", "img_size")
    }
    folder = ResultFolder(request.out, "sensitivity", networks, {**settings, **options})
    folder.check()
    images = read(teacher)
    if request.dry_run:
        found(f"would write sensitivity.csv of {len(names)} layers to {request.out}")
        return [], []
    device = open_device(request.device or default_device())
    for network in (teacher, student):
        network.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=prompted and device.type == "cuda"):
        rows = measure_sensitivity(teacher, student, tree_map(lambda x: x.to(device), images), request.batch_size)
    if any(not math.isfinite(row[name]) for row in rows for name in ("attention_error", "feature_error")):
        raise InputError("a feature of the teacher or of the student is not finite")
    kind = "untrained" if request.student is None else "trained"
    found(f"one {kind} {request.core if request.student is None else 'layer'} at a time, {request.images} images")
    width = max(len(row["layer"]) for row in rows)
    found(f"{'layer':{width}}  attention error  1 - cosine of features  order")
    for row in rows:
        errors = f"{row['attention_error']:15.4f}  {row['feature_error']:22.4f}"
        found(f"{row['layer']:{width}}  {errors}  {row['order'] or '':>5}".rstrip())
    layers: list[Any] = layers_to_swap(rows, request.keep)
    if prompted:
        layers = [int(number) for name in layers for number in name.split(".") if number.isdigit()]
    if request.keep:
        stay = [row["layer"] for row in sorted(rows, key=lambda row: row["order"])[1 : request.keep + 1]]
        found(f"stay: {', '.join(stay)}; swap: --model.layers '{json.dumps(layers)}'")
    paths = folder.write({}, {"sensitivity": rows}, {"keep": request.keep, "layers": layers})
    found(f"wrote {', '.join(map(str, paths))}")
    return [*paths], rows


def _open_pair(request: SensitivityRequest, options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """Open a teacher of images and a student: a run's, or one with untrained layers."""
    teacher = open_teacher(request.teacher, request.teacher_checkpoint, img_size=request.img_size)
    if request.student is None:
        made = make_student(teacher, request.core, head_mix=request.head_mix, options=options)
        return teacher.network, made.network
    student, _ = open_network(request.student)
    _check_alike(teacher.network, student, request)
    return teacher.network, student


def _check_alike(teacher: nn.Module, student: nn.Module, request: SensitivityRequest) -> None:
    """Refuse a student that was not made of a teacher of these sizes."""
    theirs = {name: tuple(value.shape) for name, value in teacher.state_dict().items()}
    odd = [
        name
        for name, value in student.state_dict().items()
        if ".core." not in name and not name.startswith("head.") and theirs.get(name, value.shape) != value.shape
    ]
    if odd:
        raise InputError(f"student {request.student} does not fit teacher {request.teacher}: {odd[0]} has other sizes")
