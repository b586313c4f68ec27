"""The head mixes: they mix feature heads on both sides of the core.

To add a mix, write a subclass of :class:`HeadMix` in a file of its own, registered under its name, and import it here;
it works over every core. The models and their names follow from ``HEAD_MIXES``.
"""

from headmix_vision.layers.head_mixes.base import HEAD_MIXES as HEAD_MIXES
from headmix_vision.layers.head_mixes.base import HeadMix as HeadMix
from headmix_vision.layers.head_mixes.explicit import ExplicitHeads as ExplicitHeads
from headmix_vision.layers.head_mixes.interleaved import InterleavedHeads as InterleavedHeads
