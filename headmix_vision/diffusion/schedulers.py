"""Schedulers of diffusers, chosen by name and set up for a training objective."""

from __future__ import annotations

import math
from typing import Any

import diffusers
import numpy as np
from diffusers import SchedulerMixin
from torch import device as Device

from headmix_vision.diffusion.objectives import NUM_TIMESTEPS, ObjectiveConfig
from headmix_vision.errors import InputError

# Name -> objective -> class of diffusers and its own options.
_MULTISTEP_DDPM = {"timestep_spacing": "linspace"}
_TABLE: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "euler": {"flow": ("FlowMatchEulerDiscreteScheduler", {})},
    "heun": {"flow": ("FlowMatchHeunDiscreteScheduler", {})},
    "dpm++": {
        "flow": ("DPMSolverMultistepScheduler", {}),
        "ddpm": ("DPMSolverMultistepScheduler", _MULTISTEP_DDPM),
    },
    "unipc": {
        "flow": ("UniPCMultistepScheduler", {}),
        "ddpm": ("UniPCMultistepScheduler", _MULTISTEP_DDPM),
    },
    "ddim": {"ddpm": ("DDIMScheduler", {"timestep_spacing": "trailing"})},
    "ddpm": {"ddpm": ("DDPMScheduler", {"timestep_spacing": "linspace"})},
}
SCHEDULER_NAMES = tuple(_TABLE)
_DEFAULTS = {"flow": "euler", "ddpm": "ddpm"}


def create_scheduler(name: str | None, objective: ObjectiveConfig, *, clip: bool = False) -> SchedulerMixin:
    """Makes a scheduler that fits what the network was trained for.

    Args:
        name: One of `SCHEDULER_NAMES`; that of the objective (euler for flow matching, ddpm for DDPM) when None.
        objective: What the network was trained for.
        clip: Keep the estimate of the data in [-1, 1], for pixels; only ddim and ddpm do.

    Raises:
        InputError: If the name is unknown, or the scheduler does not fit the objective.
    """
    name = _DEFAULTS[objective.kind] if name is None else name
    fitting = [other for other, entry in _TABLE.items() if objective.kind in entry]
    if name not in _TABLE:
        raise InputError(f"unknown scheduler {name!r}; for this model: {', '.join(fitting)}")
    if objective.kind not in _TABLE[name]:
        raise InputError(
            f"scheduler {name!r} does not fit a model trained with objective.kind={objective.kind};"
            f" for this model: {', '.join(fitting)}"
        )
    class_name, options = _TABLE[name][objective.kind]
    cls = getattr(diffusers, class_name)
    if objective.kind == "flow":
        if class_name.startswith("FlowMatch"):
            return cls(num_train_timesteps=NUM_TIMESTEPS, shift=objective.shift)
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": objective.shift}
        return cls(num_train_timesteps=NUM_TIMESTEPS, **flow, **options)
    common: dict[str, Any] = {
        "num_train_timesteps": NUM_TIMESTEPS,
        "beta_schedule": "linear",
        "beta_start": objective.beta_start,
        "beta_end": objective.beta_end,
        "prediction_type": "v_prediction" if objective.prediction == "v" else "epsilon",
    }
    if name in ("ddim", "ddpm"):
        common["clip_sample"] = clip
    if name == "ddpm" and objective.learned_variance:
        common["variance_type"] = "learned_range"
    return cls(**common, **options)


def scheduler_name(scheduler: SchedulerMixin) -> str:
    """Finds the name of a scheduler in `SCHEDULER_NAMES`, or else gives that of its class."""
    for name, entry in _TABLE.items():
        if any(class_name == type(scheduler).__name__ for class_name, _ in entry.values()):
            return name
    return type(scheduler).__name__


def check_scheduler_class(class_name: str, objective: ObjectiveConfig) -> None:
    """Raises `InputError` if a class of diffusers is no scheduler for what the network was trained for."""
    fitting = {entry[objective.kind][0] for entry in _TABLE.values() if objective.kind in entry}
    if class_name not in fitting:
        raise InputError(
            f"{class_name!r} is no scheduler for objective.kind={objective.kind}; these are:"
            f" {', '.join(sorted(fitting))}"
        )


def check_scheduler_config(scheduler: SchedulerMixin) -> None:
    """Raises `InputError` if nothing can be sampled with the configuration of a scheduler, as read from a file."""
    steps = scheduler.config.get("num_train_timesteps")
    if steps != NUM_TIMESTEPS:
        raise InputError(f"num_train_timesteps of the scheduler must be {NUM_TIMESTEPS}, got {steps!r}")
    for name, value in scheduler.config.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{name} of the scheduler must be finite, got {value}")


def check_scheduler(scheduler: SchedulerMixin, objective: ObjectiveConfig) -> None:
    """Raises `InputError` if a scheduler, of any class, takes the output of the network for something else."""
    wanted = create_scheduler(None, objective)
    told = scheduler.config.get("prediction_type", "epsilon")
    if is_flow(scheduler) != is_flow(wanted) or (not is_flow(wanted) and told != wanted.config.prediction_type):
        takes = "a flow" if is_flow(scheduler) else f"prediction_type={told!r}"
        gives = "a flow" if is_flow(wanted) else f"{wanted.config.prediction_type!r}"
        raise InputError(
            f"{type(scheduler).__name__} takes {takes}, but the model predicts {gives}: pipeline.set_scheduler(name)"
            " makes one that fits"
        )


def takes_variance(scheduler: SchedulerMixin) -> bool:
    """Tells whether the scheduler takes the channels of the learned variance as well."""
    return getattr(scheduler.config, "variance_type", None) in ("learned", "learned_range")


def set_steps(scheduler: SchedulerMixin, num_steps: int, device: Device | str) -> None:
    """Sets the number of sampling steps.

    Steps of flow matching are equal in noise level before the shift, the last one ends at 0; diffusers' default for
    the Euler scheduler ends with a step from 1/1000, which is all but lost.
    """
    if isinstance(scheduler, diffusers.FlowMatchEulerDiscreteScheduler):
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / num_steps, num_steps).tolist(), device=device)
    else:
        scheduler.set_timesteps(num_steps, device=device)


def is_flow(scheduler: SchedulerMixin) -> bool:
    """Tells whether the scheduler integrates a flow; its noise levels are then its `sigmas`."""
    return type(scheduler).__name__.startswith("FlowMatch") or bool(getattr(scheduler.config, "use_flow_sigmas", False))
