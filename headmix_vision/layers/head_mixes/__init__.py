"""Head mixes: linear maps across feature heads, applied to queries, keys and values before the core.

A head mix is a module ``mix(q, k, v) -> (q, k, v)`` on [B, N, H, D] tensors and a line in ``HEAD_MIXES``; every mix
works with every core.
"""

from __future__ import annotations

from torch import nn

HEAD_MIXES: dict[str, type[nn.Module]] = {}
