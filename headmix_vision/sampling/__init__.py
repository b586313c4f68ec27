"""Sampling from trained generators into folders; the command is `headmix sample`.

from headmix_vision.sampling import SampleRequest, sample
print(sample(SampleRequest(model="runs/gen/digits", num=64, out="digits")))
"""

from typing import TYPE_CHECKING, Any

from headmix_vision.extras import require_extra
from headmix_vision.sampling.sample_request import SampleRequest

require_extra("diffusion", __name__)

if TYPE_CHECKING:
    from headmix_vision.sampling.sample_job import Sampled, sample

__all__ = ["SampleRequest", "Sampled", "sample"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headmix_vision.sampling import sample_job  # imports torch and diffusers

    return getattr(sample_job, name)
