"""Converted transformers of diffusers, and cached latents with noise and prompts, for `headmix analyze sensitivity`.

B samples, C channels, *grid the axes of the latents.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from headmix_vision.analysis.analysis_request import SensitivityRequest
from headmix_vision.data.datasets import open_source
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.diffusion.objectives import ObjectiveConfig, create_objective
from headmix_vision.errors import InputError
from headmix_vision.models.pipeline_folder import read_shift
from headmix_vision.models.prompted import PromptedTransformer, open_prompted
from headmix_vision.runs.checkpoints import find_checkpoint, read_checkpoint
from headmix_vision.runs.networks import load_network
from headmix_vision.runs.prompted import check_latents

_SEED = 0
Batch = tuple[Tensor, Tensor, tuple[Tensor, ...]]


def open_pair(request: SensitivityRequest, options: dict[str, Any]) -> tuple[PromptedTransformer, PromptedTransformer]:
    """Open the transformer of a pipeline, and its conversion: a run's, or one with new weights.

    Args:
        request: The request.
        options: Of `wan_to_mhla` or `sana_to_mhla`, for new weights.

    Raises:
        InputError: If an option does not apply to it, or the run is of another model.
    """
    given = {"teacher_checkpoint": None, "head_mix": None, "img_size": None, "core": "mhla", "data": "latents"}
    for name, only in given.items():
        if getattr(request, name) != only:
            raise InputError(
                f"{name}={getattr(request, name)} does not apply to a pipeline of diffusers, it must be {only}"
            )
    teacher = open_prompted(request.teacher, [])
    if request.student is None:
        student: Any = open_prompted(request.teacher, None, options)
    else:
        student = load_network(read_checkpoint(find_checkpoint(request.student)))
        if not isinstance(student, PromptedTransformer):
            raise InputError(f"student {request.student} is not a run of a converted transformer of diffusers")
    return teacher.eval().requires_grad_(False), student.eval().requires_grad_(False)


def read_batches(network: PromptedTransformer, request: SensitivityRequest) -> list[Batch]:
    """Read noisy latents [B, C, *grid], times [B] and prompts, evenly spaced over a cache, each batch of one size.

    Raises:
        InputError: If another pipeline made the latents, or there are fewer.
    """
    source: Any = open_source(
        SplitRequest("latents", request.split, (network.in_channels,), "generation", request.root, prompt_dropout=0.0)
    )
    check_latents(
        network, request.teacher, {str(one.path): one.manifest for one in getattr(source, "caches", [source])}
    )
    if len(source) < request.images:
        raise InputError(f"latents, split {request.split}, has {len(source)} samples, --images is {request.images}")
    objective = create_objective(ObjectiveConfig(shift=read_shift(request.teacher)))
    samples = [source.read(number * len(source) // request.images) for number in range(request.images)]
    batches: list[Batch] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        for _, alike in groupby(samples, key=lambda sample: sample[0].shape):
            of_size = list(alike)
            for first in range(0, len(of_size), request.batch_size):
                latents, prompts = zip(*of_size[first : first + request.batch_size], strict=True)
                x0, times = torch.stack(latents), objective.draw_times(len(latents))
                noisy = objective.add_noise(x0, times, torch.randn(x0.shape))
                batches.append((noisy, times, tuple(map(torch.stack, zip(*prompts, strict=True)))))
    return batches
