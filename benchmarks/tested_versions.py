"""Lists the pairs of torch and Triton that the package supports, for the table of README.

``make compile-kernels-quick`` and ``benchmarks/compile_kernels.py --quick`` with a Triton on PYTHONPATH compile the
kernels for Hopper; ``make test-newest`` runs the tests with the newest pair, interpreting kernels on a CPU.
"""

from typing import NamedTuple

GLUON = "all, Gluon included"
OLD_ASSEMBLER = "portable ones, if `TRITON_PTXAS_PATH` names the ptxas of CUDA 12.9 or newer"
RUN = "run on H100 and H200"
COMPILED = "compiled for Hopper, not run"


class Pair(NamedTuple):
    """A release of torch with the Triton that it installs.

    Attributes:
        hopper: kernels of this package that serve on Hopper GPUs.
        evidence: how it is known that they work.
    """

    torch: str
    triton: str
    hopper: str
    evidence: str


PAIRS = (
    Pair("2.9", "3.5", OLD_ASSEMBLER, COMPILED),
    Pair("2.10", "3.6", GLUON, COMPILED),
    Pair("2.11", "3.6", GLUON, RUN),
    Pair("2.12", "3.7", GLUON, COMPILED),
    Pair("2.13", "3.7", GLUON, COMPILED),
    Pair("2.14", "3.8", GLUON, COMPILED),
    Pair("2.15", "3.9", GLUON, "run on H100 beside torch 2.11"),
)
