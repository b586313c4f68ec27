"""Train the attention of a student to compute what that of its teacher does, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headmix_vision.errors import InputError, check_counts
from headmix_vision.files.tensors import state_sha256
from headmix_vision.models.converted import ConvertedModel
from headmix_vision.runs.checkpoints import find_checkpoint
from headmix_vision.runs.networks import open_network
from headmix_vision.training.generator import ImageGenerator

Pairs = Sequence[tuple[nn.Module, nn.Module]]


def attention_pairs(teacher: nn.Module, student: nn.Module) -> Pairs:
    """Pair the attention layers of teacher and student that have the same name and compute differently.

    Layers of ours differ by core or head mix, layers of diffusers by their processor. The teacher of a converted Wan is
    ``wan_to_mhla(original, layers=[])``, of Sana ``sana_to_mhla(original, layers=[])``: it computes what the original
    does, and tells each layer the grid.

    Raises:
        InputError: if an attention layer of one has no counterpart, or all layers are alike; if the student is
            converted and the teacher is not.
    """
    if isinstance(student, ConvertedModel) and not isinstance(teacher, type(student)):
        raise InputError(
            f"the teacher of a {type(student).__name__} must be one, too, converted with layers=[], got"
            f" {type(teacher).__name__}."
        )
    theirs, ours = ({n: m for n, m in model.named_modules() if _kind(m)} for model in (teacher, student))
    if odd := theirs.keys() ^ ours.keys():
        raise InputError(f"teacher and student must have the same layers, but one of them has no {min(odd)}.")
    pairs = [(theirs[name], layer) for name, layer in ours.items() if _kind(layer) != _kind(theirs[name])]
    if not pairs:
        raise InputError(
            "teacher and student have the same kind of attention in all layers: there is nothing to distil."
        )
    return pairs


def _kind(layer: nn.Module) -> tuple[type, ...]:
    """Return what an attention layer computes with; nothing of other modules."""
    parts = {**vars(layer), **layer._modules}  # asked for an attribute, models of diffusers look into their options
    names = ("core", "head_mix") if "core" in parts else ("processor",)
    return tuple(type(parts[name]) for name in names if name in parts)


@contextmanager
def attention_errors(pairs: Pairs) -> Iterator[list[Tensor]]:
    """Run each student layer on what its teacher's is given while the teacher runs, and collect the errors.

    Under ``torch.no_grad()`` around the teacher, only the students get gradients::

        with attention_errors(attention_pairs(teacher, student)) as errors, torch.no_grad():
            teacher(latents, timestep, text)
        torch.stack(errors).mean().backward()

    Args:
        pairs: attention layers of teacher and student, outputs [B, N, C].

    Yields:
        A list, filled as the teacher runs: for each layer its squared error over the teacher's mean square, float32
        [B].
    """
    errors: list[Tensor] = []

    def compare(student: nn.Module, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> None:
        wanted = output.detach().float().flatten(1)
        if "call_grid" in vars(layer):  # layers of Sana are told the grid by the block around them
            student.call_grid = layer.call_grid
        with torch.enable_grad():
            error = (student(*args, **kwargs).float().flatten(1) - wanted).square().mean(1)
            errors.append(error / wanted.square().mean(1).clamp(min=torch.finfo(torch.float32).tiny))

    hooks = [a.register_forward_hook(partial(compare, b), with_kwargs=True) for a, b in pairs]
    try:
        yield errors
    finally:
        for hook in hooks:
            hook.remove()


class _Kept:
    """Hold a network outside of the module around it: copies of the module share it, checkpoints lack it."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return self


class DistilledGenerator(ImageGenerator):
    """Train a generator first to attend as a trained one does, then on its own objective.

    In the first `distill_steps` steps the loss is the mean of :func:`attention_errors` over the layers that differ, on
    the activations of the teacher, at the noise levels of the objective; only these layers change. Then it is the loss
    of the objective, of all weights, which `val/loss` is from the start.

    Args:
        teacher: Run directory or `.ckpt` of the trained generator, of the same sizes with another attention.
        distill_steps: Optimizer steps of the first part.
        name: Name of the model in timm, for example `dit_mhla_s_2`.
        checkpoint: Start weights; the teacher's when null.
        options: Further options of a generator.

    Raises:
        InputError: If there is no such teacher, or it and the model have no layers that differ.
    """

    def __init__(
        self, teacher: str, name: str, distill_steps: int = 1000, checkpoint: str | None = None, **options: Any
    ) -> None:
        check_counts(0, distill_steps=distill_steps)
        source = find_checkpoint(Path(teacher))
        super().__init__(name, checkpoint=checkpoint or str(source), **options)
        self.distill_steps = distill_steps
        network, _ = open_network(source)
        attention_pairs(network, self.net)
        self._teacher = _Kept(network.train())  # it drops labels as it did
        self._teacher_sha256 = state_sha256(network.state_dict())

    def on_train_start(self) -> None:
        """Move the teacher to the device of the student."""
        super().on_train_start()
        self._teacher.network.to(self.device)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what tells the teacher's weights."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["teacher_sha256"] = self._teacher_sha256

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As a generator does.

        Raises:
            InputError: Also if the student was still learning from a teacher with other weights.
        """
        super().on_load_checkpoint(checkpoint)
        learning = checkpoint["global_step"] < self.distill_steps
        if learning and checkpoint.get("teacher_sha256", self._teacher_sha256) != self._teacher_sha256:
            raise InputError(
                "model.teacher has other weights than when this run began: name the teacher of then, or begin anew with"
                " --overwrite and without --ckpt-path"
            )

    def _losses(self, x0: Tensor, labels: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        if not self.training or self.trainer.global_step >= self.distill_steps:
            return super()._losses(x0, labels, times, noise)
        y = labels if self.num_classes else None
        network = self._teacher.network
        with attention_errors(attention_pairs(network, self.net)) as errors, torch.no_grad():
            self.objective.losses(lambda x, t: network(x, t, y), x0, times, noise)
        return torch.stack(errors).mean(0)
