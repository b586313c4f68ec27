"""Head mixes: what happens across feature heads on both sides of the core.

To add a mix, write a subclass of :class:`HeadMix` in a file of its own and a line in ``HEAD_MIXES``; it works over
every core. The models and their names follow from this table.
"""

from headmix_vision.layers.head_mixes.base import HeadMix

HEAD_MIXES: dict[str, type[HeadMix]] = {}

__all__ = ["HEAD_MIXES", "HeadMix"]
