"""Mix heads linearly: each output head is a weighted sum of the input heads of the same token."""

from headmix_vision.ops.mix_heads.api import mix_heads

__all__ = ["mix_heads"]
