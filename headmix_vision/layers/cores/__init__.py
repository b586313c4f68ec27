"""Attention cores: how head outputs follow from queries, keys and values.

To add a core, write a subclass of :class:`AttentionCore` in a file of its own and a line in ``CORES``. The models and
their names follow from this table.
"""

from headmix_vision.layers.cores.base import AttentionCore
from headmix_vision.layers.cores.head_in_head import HeadInHeadCore
from headmix_vision.layers.cores.linear import LinearCore
from headmix_vision.layers.cores.mhla import MHLACore
from headmix_vision.layers.cores.softmax import SoftmaxCore

CORES: dict[str, type[AttentionCore]] = {
    "softmax": SoftmaxCore,
    "linear": LinearCore,
    "mhla": MHLACore,
    "hih": HeadInHeadCore,
}

__all__ = ["CORES", "AttentionCore", "HeadInHeadCore", "LinearCore", "MHLACore", "SoftmaxCore"]
