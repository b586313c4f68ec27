"""The attention cores: they compute head outputs from queries, keys and values.

To add a core, write a subclass of :class:`AttentionCore` in a file of its own, registered under its name, and import it
here. The models and their names follow from ``CORES``.
"""

from headmix_vision.layers.cores.base import CORES as CORES
from headmix_vision.layers.cores.base import AttentionCore as AttentionCore
from headmix_vision.layers.cores.head_in_head import HeadInHeadCore as HeadInHeadCore
from headmix_vision.layers.cores.mhla import LinearCore as LinearCore
from headmix_vision.layers.cores.mhla import MHLACore as MHLACore
from headmix_vision.layers.cores.softmax import SoftmaxCore as SoftmaxCore
