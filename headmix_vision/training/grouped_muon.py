"""Muon for networks of many alike, small matrices: a Newton-Schulz iteration for all of a shape, not for each."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from timm.optim.muon import _COEFFICIENTS, Muon, get_lr_scale, resolve_ns_coefficients, zeropower_via_newtonschulz
from torch import Tensor
from torch.distributed.tensor import DTensor

GROUP_ELEMENTS = 2**24  # of matrices in one iteration, whose temporary copies take 12 bytes each


class GroupedMuon(Muon):
    """timm's Muon in fewer launches: the same steps, states and options, for small matrices bound by the host.

    timm 1.0.31 launches some 25 kernels for each matrix. Here matrices of one shape are stacked. Anything else (a
    shape's only matrix, kernels of convolutions, shards, vectors, the first step, which makes the states, AdaMuon,
    capturable groups) is updated by timm. Source: https://kellerjordan.github.io/posts/muon/.

    Args:
        params: As for `timm.optim.Muon`, and so are all options.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; see `torch.optim.Optimizer.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        taken: list[tuple[Tensor, Tensor | None]] = []
        for group in self.param_groups:
            for matrices in self._alike(group):
                self._update(matrices, group)
                taken += [(matrix, matrix.grad) for matrix in matrices]
        for matrix, _ in taken:
            matrix.grad = None  # timm passes it over
        super().step()
        for matrix, gradient in taken:
            matrix.grad = gradient
        return loss

    def _alike(self, group: Mapping[str, Any]) -> list[list[Tensor]]:
        """Matrices of a parameter group that are updated together, at least two each."""
        if group["algo"] != "muon" or group["capturable"]:
            return []
        found: defaultdict[object, list[Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            known = self.state.get(parameter, {}).get("use_muon", False) and parameter.ndim == 2
            if known and parameter.grad is not None and not isinstance(parameter, DTensor):
                found[parameter.shape, parameter.dtype, parameter.device].append(parameter)
        parts = []
        for matrices in found.values():
            size = max(1, GROUP_ELEMENTS // matrices[0].numel())
            parts += [matrices[first : first + size] for first in range(0, len(matrices), size)]
        return [part for part in parts if len(part) > 1]

    def _update(self, matrices: list[Tensor], group: Mapping[str, Any]) -> None:
        """A step of Muon for matrices of one shape, as timm takes it for each."""
        rate, momentum = group["lr"], group["momentum"]
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        averages = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        torch._foreach_mul_(matrices, 1 - rate * group["weight_decay"])
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        updates = torch.stack(averages)
        if group["nesterov"]:
            updates = torch.stack(gradients).lerp_(updates, momentum)
        updates = zeropower_via_newtonschulz(
            updates,
            group["ns_steps"],
            resolve_ns_coefficients(group["ns_coefficients"], _COEFFICIENTS),
            eps=group["eps"],
            safety_factor=group["safety_factor"],
            scale_eps=group["scale_eps"],
        )
        scale = get_lr_scale(updates.shape[1:], group["adjust_lr_fn"]) if group["adjust_lr_fn"] else 1.0
        torch._foreach_add_(matrices, updates.to(matrices[0].dtype).unbind(), alpha=-rate * scale)
