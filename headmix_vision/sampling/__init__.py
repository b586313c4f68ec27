"""Sampling from trained generators into folders; the command is `headmix sample`.

from headmix_vision.sampling import SampleRequest, sample
print(sample(SampleRequest(model="runs/gen/digits", num=64, out="digits")))
"""

from typing import TYPE_CHECKING

from headmix_vision.errors import imported_when_used, require_extra
from headmix_vision.sampling.sample_request import SampleRequest

require_extra("diffusion", __name__)

if TYPE_CHECKING:
    from headmix_vision.sampling.sample_job import Sampled, sample

__all__ = ["SampleRequest", "Sampled", "sample"]

__getattr__ = imported_when_used(__name__, "sample_job", __all__)
