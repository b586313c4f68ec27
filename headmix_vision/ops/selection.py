"""Whether the Triton kernels can be loaded at all; imports no Triton of a version that they do not know."""

from __future__ import annotations

from importlib.util import find_spec

OLDEST_TRITON = (3, 6)


def why_no_kernels() -> str | None:
    """Reason why the kernels cannot be loaded, if so: older versions of Triton lack some of their language."""
    if find_spec("triton") is None:
        return "q cannot reach the kernels: the package triton is not installed"
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"q cannot reach the kernels: they need triton {oldest} (torch 2.11), installed is {triton.__version__}"
    return None


NO_KERNELS = why_no_kernels()
