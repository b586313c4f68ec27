"""Diffusion: training objectives, guidance, schedulers by name, the denoising loop, the pipeline."""

from headmix_vision.errors import require_extra

require_extra("diffusion", __name__)

from headmix_vision.diffusion.denoising import SCHEDULER_NAMES, Guidance, create_scheduler, denoise
from headmix_vision.diffusion.objectives import Objective, ObjectiveConfig, create_objective
from headmix_vision.diffusion.pipeline import HeadMixDiTPipeline, HeadMixVideoDiTPipeline, VideoPipelineOutput

__all__ = [
    "SCHEDULER_NAMES",
    "Guidance",
    "HeadMixDiTPipeline",
    "HeadMixVideoDiTPipeline",
    "Objective",
    "ObjectiveConfig",
    "VideoPipelineOutput",
    "create_objective",
    "create_scheduler",
    "denoise",
]
