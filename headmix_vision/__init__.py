"""Vision models whose attention heads are mixed. Importing the package registers its models with timm."""

from headmix_vision import models

__all__ = ["models"]
__version__ = "0.1.0"
