"""Choice of core and head mix for each layer of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headmix_vision.errors import InputError, check_counts


def attention_of_layer(
    index: int,
    depth: int,
    global_every: int,
    head_mix: str | None,
    head_mix_args: dict[str, Any] | None,
    core_args: dict[str, Any] | None,
    core: str,
    softmax_every: int = 0,
) -> dict[str, Any]:
    """Return the head mix, the core and its options of a layer.

    With ``global_every`` k the last of each k layers is the core alone, without head mix and window. The paper of IHA
    (arXiv 2602.21371) so follows four windowed layers of IHA by one of plain global attention, k = 5.

    With ``softmax_every`` k the first of each k layers has the softmax core in place of another, without its options: a
    hybrid, with k = 3 that of MHLA's paper on video (arXiv 2601.07832).

    Args:
        index: of the layer, from 0.
        depth: layers of the model.
        global_every: k, from 2 to the depth, or 0 for layers that are all alike.
        head_mix, head_mix_args, core_args, core: of the other layers.
        softmax_every: k, from 2 to the depth, or 0 for one core.

    Raises:
        InputError: if ``softmax_every`` is no such number, or the core is softmax; if ``global_every`` is no whole
            number of at least 0, is 1, which would leave no other layer, is above the depth, which would leave no such
            layer, or there is nothing that it would leave out.
    """
    check_counts(0, global_every=global_every)
    if global_every == 1:
        raise InputError("global_every must be 0, or at least 2, got 1: no layer would have a head mix or a window.")
    options = core_args if isinstance(core_args, Mapping) else {}  # the first layer refuses another type
    if global_every and head_mix is None and options.get("window") is None:
        raise InputError(f"global_every={global_every} needs a head_mix or a window: all layers are alike without.")
    if global_every > depth:
        raise InputError(f"global_every={global_every} is above the depth {depth}: no layer would be the core alone.")
    if softmax_every and options.get("causal"):
        raise InputError(
            f"softmax_every={softmax_every} cannot be joined with causal={options['causal']!r}: softmax layers see all"
            " tokens."
        )
    layer = {"head_mix": head_mix, "head_mix_args": head_mix_args, "core": core, "core_args": core_args}
    if global_every and (index + 1) % global_every == 0:
        plain = {name: value for name, value in options.items() if name != "window"}
        layer |= {"head_mix": None, "head_mix_args": None, "core_args": plain}
    check_counts(0, softmax_every=softmax_every)
    if softmax_every == 1 or softmax_every > depth:
        raise InputError(f"softmax_every must be 0, or from 2 to the depth {depth}, got {softmax_every}.")
    if softmax_every and core == "softmax":
        raise InputError(f"softmax_every={softmax_every} needs another core than softmax.")
    if softmax_every and index % softmax_every == 0:
        layer |= {"core": "softmax", "core_args": None}
    return layer
