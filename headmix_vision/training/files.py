"""Writing files: see `headmix_vision.files`, which the layers below training use as well."""

from headmix_vision.files import atomic_path

__all__ = ["atomic_path"]
