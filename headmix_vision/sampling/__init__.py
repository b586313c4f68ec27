"""Drawing samples from trained generators, from the command line: `headmix-sample`."""

from headmix_vision.extras import require_extra

require_extra("diffusion", __name__)
