"""Vision models whose attention heads are mixed. Importing the package registers its models with timm.

Without timm, `headmix_vision.ops` and `headmix_vision.layers` remain.
"""

from importlib.util import find_spec

if find_spec("timm") is not None:
    from headmix_vision import models as models

__version__ = "0.1.0"
