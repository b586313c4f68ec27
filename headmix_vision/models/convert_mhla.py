"""Convert weights of the released MHLA code (github.com/DAGroup-PKU/MHLA), DeiT and DiT, to our names.

Its layers divide by the denominator of the source block, convolve the values (LePE), normalise their input once more
and take mixing weights of any sign; ours do so by options. M blocks.
"""

from __future__ import annotations

import math
import re
from typing import Any, cast

from torch import Tensor, nn

from headmix_vision.errors import InputError
from headmix_vision.layers import HeadMixAttention
from headmix_vision.layers.block_mixing import LOWER, UPPER
from headmix_vision.layers.cores.mhla import MHLACore

_MIXING = "piece_attn.conv.weight"
_NAMES = {
    _MIXING: "core.mixing.weight",
    "to_qkv": "qkv",
    "to_out.0": "proj",
    "norm": "input_norm",
    "lepe": "lepe.proj",
    "q_norm": "q_norm",
    "k_norm": "k_norm",
}
_LAYER = re.compile(
    r"(?P<layer>blocks\.\d+\.attn\.)(?P<part>piece_attn\.conv\.weight|.+(?=\.(weight|bias)$))(?P<leaf>.*)"
)


def is_released_mhla(source: dict[str, Any]) -> bool:
    """Tell whether weights have mixing matrices under the released code's name."""
    return any(name.endswith(f".attn.{_MIXING}") for name in source)


def rename_released_mhla(source: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the weights under the names of our layers.

    Raises:
        InputError: if a layer of the model is another than the released one, with the arguments that make it the same;
            if the weights have a part which no argument makes.
    """
    renamed: dict[str, Any] = {}
    for name, value in source.items():
        found = _LAYER.fullmatch(name)
        if ".dw_conv." in name or (found and found["part"] not in _NAMES):
            raise InputError(f"the weights of released MHLA have {name}, for which no layer here has a place.")
        if found is None:
            renamed[name] = value
            continue
        new = found["layer"] + _NAMES[found["part"]]
        renamed[new + found["leaf"]] = value.flatten(1) if found["part"] == _MIXING else value
        if found["part"] == _MIXING:
            side = math.isqrt(len(value))  # the released blocks are a square
            renamed[f"{found['layer']}core.mixing.block_grid"] = value.new_tensor((side, side)).long()
    for index, block in enumerate(cast(Any, model).blocks):
        _check_layer(f"blocks.{index}.attn", renamed, cast(HeadMixAttention, block.attn))
    return renamed


def _check_layer(name: str, weights: dict[str, Any], layer: HeadMixAttention) -> None:
    core, kernel, mixing = layer.core, weights.get(f"{name}.lepe.proj.weight"), weights[f"{name}.core.mixing.weight"]
    inside = bool(((mixing >= LOWER) & (mixing <= UPPER)).all())
    wanted = {
        "lepe": 0 if kernel is None else kernel.shape[-1],
        "input_norm": f"{name}.input_norm.weight" in weights,
        "qk_norm": f"{name}.q_norm.weight" in weights,
        "qkv_bias": f"{name}.qkv.bias" in weights,
    }
    own = {
        "lepe": 0 if layer.lepe is None else cast(nn.Conv2d, layer.lepe.proj).kernel_size[0],
        "input_norm": not isinstance(layer.input_norm, nn.Identity),
        "qk_norm": not isinstance(layer.q_norm, nn.Identity),
        "qkv_bias": layer.qkv.bias is not None,
    }
    extra = (layer.head_mix, layer.gate, layer.cpe)
    if (
        own != wanted
        or extra != (None, None, None)
        or not isinstance(layer.output_norm, nn.Identity)
        or not isinstance(core, MHLACore)
        or core.options["normalizer"] != "source_block"
        or (core.mixing.clip and not inside)
    ):
        core_args = {"normalizer": "source_block", **({} if inside else {"mixing_clip": False})}
        given = ", ".join(f"{option}={value!r}" for option, value in wanted.items())
        raise InputError(
            f"{name} of the released MHLA is another layer than the model's: make the model with core='mhla', {given},"
            f" core_args={core_args} and without a head mix, cpe, output_norm and output_gate."
        )
