"""What to install when a part of the package lacks another package."""

from collections.abc import Callable, Collection
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from headmix_vision.errors import InputError

# By extra, the packages whose lack keeps its part from being imported.
PACKAGES = {
    "models": ("timm", "safetensors"),
    "diffusion": ("timm", "safetensors", "diffusers", "rich"),
    "video": ("timm", "safetensors", "diffusers", "rich", "av"),
    "analysis": ("timm", "safetensors", "matplotlib", "scipy", "sklearn"),
    "train": ("timm", "diffusers", "jsonargparse", "lightning", "matplotlib", "sklearn", "tensorboard", "torchmetrics"),
    "eval": ("timm", "safetensors", "rich", "sklearn", "torch_fidelity"),
}


class MissingExtraError(ImportError, InputError):
    """A package of an extra is not installed; the message is the command that installs it."""


def imported_when_used(
    package: str, module: str, names: Collection[str], extra: str | None = None
) -> Callable[[str], Any]:
    """Make the `__getattr__` of a package whose names come from a module that is slow to import.

    Args:
        package: The package.
        module: A module in it.
        names: What the package offers.
        extra: The extra that they need; None where the package itself requires it.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if extra is not None:
            require_extra(extra, name)
        return getattr(import_module(f"{package}.{module}"), name)

    return get


def require_extra(extra: str, what: str) -> None:
    """Tell what to install, unless the packages of an extra are there; none of them is loaded.

    Args:
        extra: One of `PACKAGES`.
        what: What needs them, to begin the message.

    Raises:
        MissingExtraError: The first package that is missing.
    """
    for package in PACKAGES[extra]:
        if find_spec(package) is None:
            raise MissingExtraError(
                f"{what} needs the package {package}: pip install 'headmix_vision[{extra}]'", name=package
            )
