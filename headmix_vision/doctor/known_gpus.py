"""Evidence for the kernels on each GPU, by compute capability or AMD architecture."""

from typing import NamedTuple

MEASURED = "measured"
COMPILED = "compiled, not run"
UNKNOWN = "unknown"


class KnownGpu(NamedTuple):
    """Evidence for one architecture.

    Attributes:
        status: `MEASURED`, `COMPILED` or `UNKNOWN`.
        cards: GPUs of this architecture.
    """

    status: str
    cards: str


KNOWN_GPUS = {
    "9.0": KnownGpu(MEASURED, "H100, H200"),
    "8.0": KnownGpu(COMPILED, "A100"),
    "8.6": KnownGpu(COMPILED, "RTX 30"),
    "8.9": KnownGpu(COMPILED, "RTX 40, L40S"),
    "10.0": KnownGpu(COMPILED, "B200"),
    "10.3": KnownGpu(COMPILED, "B300"),
    "11.0": KnownGpu(COMPILED, "Thor"),
    "12.0": KnownGpu(COMPILED, "RTX 50"),
    "12.1": KnownGpu(COMPILED, "DGX Spark"),
    "gfx942": KnownGpu(COMPILED, "MI300"),
    "gfx950": KnownGpu(COMPILED, "MI350"),
    "gfx1100": KnownGpu(COMPILED, "RX 7900"),
}
MEANINGS = {
    MEASURED: "the kernels are tested and timed on such a GPU",
    COMPILED: "the kernels compile for such a GPU, and nobody has reported a run",
    UNKNOWN: "the kernels have neither been run on nor compiled for such a GPU",
}


def known_gpu(architecture: str) -> KnownGpu:
    """Return what is known of an architecture, as "9.0" or "gfx942"."""
    return KNOWN_GPUS.get(architecture, KnownGpu(UNKNOWN, ""))
