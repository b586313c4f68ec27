"""A small attention layer in float64, with every core and mix, and tokens for it."""

import torch

from headmix_vision.layers import HeadMixAttention

GRID, PREFIX, DIM, HEADS = (5, 6), 2, 24, 3
HEAD_DIM = DIM // HEADS
TOKENS = PREFIX + 30
# Every core, and the options with which a mix could compute something else than its core.
VARIANTS = [
    ("softmax", {}),
    ("softmax", {"window": (3, 5)}),
    ("linear", {}),
    ("linear", {"normalizer": "source_block", "feature_map": "elu1"}),
    ("linear", {"normalizer": "source_block"}),
    ("linear", {"normalizer": None}),
    ("mhla", {"feature_map": "elu1"}),
    ("mhla", {"normalizer": "source_block"}),
    ("mhla", {"normalizer": None, "mixing_per_head": True}),
    ("hih", {}),
    ("hih", {"mask": "token", "scans": "cross"}),
    ("hih", {"mask": "token", "scans": "forward", "conv_size": 0, "num_sub_heads": 1}),
]


def make_layer(core, head_mix=None, head_mix_args=None, core_args=None, **kwargs):
    torch.manual_seed(0)
    sizes = {"grid": GRID, "block_grid": (2, 3), "num_prefix_tokens": PREFIX, "dtype": torch.float64}
    core_args = ({"num_sub_heads": 2} if core == "hih" else {}) | (core_args or {})
    mix = {"head_mix": head_mix, "head_mix_args": head_mix_args}
    return HeadMixAttention(DIM, HEADS, core=core, core_args=core_args, **mix, **{**sizes, **kwargs})


def tokens(count=TOKENS):
    return torch.randn(2, count, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def transplant(layer, plain):
    """Give a layer with a mix the weights of one without."""
    missing, unexpected = layer.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and all(name.startswith("head_mix.") or name == "core.shares" for name in missing)
    return layer


def projected(layer, x):
    """The queries, keys and values of a layer without a norm of them, as the mix gets them."""
    return [y.unflatten(-1, (-1, HEAD_DIM)) for y in layer.qkv(x).split(layer.projected_dims, dim=-1)]
