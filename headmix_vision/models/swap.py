"""Replacement of the attention in a trained vision transformer of timm or transformers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from timm.models import beit, eva
from torch import Tensor, nn

from headmix_vision.errors import InputError, check_counts, check_keywords, is_whole, keywords, pair
from headmix_vision.layers import HeadMixAttention, undecayed_parameters
from headmix_vision.layers.swapped_attention import GridOfCall, Names, SwappedAttention
from headmix_vision.models.call_grids import ImageGrid, PixelGrid
from headmix_vision.models.naflex import NaFlexEmbeds, NaFlexGrid
from headmix_vision.ops import TokenGrid


class _SwappedEvaAttention(SwappedAttention):
    """EVA's layer: timm resets its biases, and fills the bias of its keys, which is not saved."""

    reset_parameters = eva.EvaAttention.reset_parameters
    init_non_persistent_buffers = eva.EvaAttention.init_non_persistent_buffers
    _init_buffers = eva.EvaAttention._init_buffers


class _SwappedBeitAttention(SwappedAttention):
    """BEiT's layer: its bias of scores by relative positions stays with softmax."""

    reset_parameters = beit.Attention.reset_parameters
    init_non_persistent_buffers = beit.Attention.init_non_persistent_buffers
    _init_buffers = beit.Attention._init_buffers

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Follow another grid with the bias, where there is one."""
        if self.relative_position_bias_table is not None:
            beit.Attention.set_window_size(cast(Any, self), window_size)

    def forward(self, x: Tensor, *args: Any, shared_rel_pos_bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        if self.takes_bias:
            biases = [] if shared_rel_pos_bias is None else [shared_rel_pos_bias]
            if self.relative_position_bias_table is not None:
                biases.append(beit.Attention._get_rel_pos_bias(cast(Any, self)))
            kwargs["attn_mask"] = sum(biases[1:], biases[0]) if biases else None
        return super().forward(x, *args, **kwargs)


class _SwappedTransformersAttention(SwappedAttention):
    """A layer of transformers: it gets rotary positions as cosines and sines, and returns no weights."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        rotation = None
        if position_embeddings is not None:
            cos, sin = position_embeddings
            rotation = self._rotation(sin, cos)
        mask = None if attention_mask is None else self._of_keys(attention_mask)
        return super().forward(hidden_states, mask, rotation=rotation), None

    def _of_keys(self, mask: Tensor) -> Tensor | None:
        """Return one row of a mask [B, 1, N, N] that transformers made of the padding [B, N]; None without padding."""
        if mask.ndim != 4 or mask.shape[1] != 1:
            return mask
        axes = cast(PixelGrid, self.grid_of_call).mask_axes
        if axes == 0 and torch.compiler.is_compiling():  # transformers makes one where a compiler looks on
            return None
        return mask[:, :, :1] if axes == 2 else mask


_HF = Names("num_attention_heads", ("q_proj", "k_proj", "v_proj"), "o_proj", "attention_dropout")
_HF_ROTARY = Names("num_heads", ("q_proj", "k_proj", "v_proj"), "o_proj", "dropout", rotate_half=True)
OWN = "headmix_vision.layers.attention.HeadMixAttention"
KNOWN: dict[str, tuple[type[HeadMixAttention], Names]] = {
    OWN: (HeadMixAttention, Names()),
    "timm.layers.attention.Attention": (SwappedAttention, Names()),
    "timm.layers.attention.AttentionRope": (SwappedAttention, Names()),
    "timm.models.eva.EvaAttention": (_SwappedEvaAttention, Names()),
    "timm.models.beit.Attention": (
        _SwappedBeitAttention,
        Names(bias=("relative_position_bias_table", "relative_position_index")),
    ),
    "transformers.models.vit.modeling_vit.ViTAttention": (_SwappedTransformersAttention, _HF),
    "transformers.models.deit.modeling_deit.DeiTAttention": (_SwappedTransformersAttention, _HF),
    "transformers.models.dinov2.modeling_dinov2.Dinov2Attention": (_SwappedTransformersAttention, _HF),
    "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersAttention": (
        _SwappedTransformersAttention,
        _HF,
    ),
    "transformers.models.dinov3_vit.modeling_dinov3_vit.DINOv3ViTAttention": (
        _SwappedTransformersAttention,
        _HF_ROTARY,
    ),
}
_LIKE_ATTENTION = re.compile(r"Attn|Attention|XCA|ParallelScalingBlock")
_REASONS = {
    "AttentionPoolLatent": "it pools by cross-attention",
    "AttentionPoolPrr": "it pools by cross-attention",
    "ClassAttn": "only its class token has queries",
    "ClassAttention": "only its class token has queries",
    "ClassAttentionBlock": "only its class token has queries",
    "CrossAttention": "it attends to tokens of another branch",
    "DiffAttention": "it is the difference of two softmax attentions",
    "DiffParallelScalingBlock": "its attention and MLP share a projection",
    "MaskUnitAttention": "its attention is windowed",
    "ParallelScalingBlock": "its attention and MLP share a projection",
    "RelPosAttention": "relative positions bias its softmax",
    "TalkingHeadAttn": "it mixes the attention weights of its heads",
    "WindowAttention": "its attention is windowed",
    "WindowMultiHeadAttention": "its attention is windowed",
    "XCA": "it attends between channels, not tokens",
}


@dataclass
class SwapReport:
    """The result of :func:`swap_attention`.

    Attributes:
        core: the new core.
        layers: names of the swapped layers in the model, such as ``blocks.0.attn``.
        replaced: class of each of them before.
        kept: reasons of the attention layers that stay, by name.
        new: names of the parameters that were not there before; they are untrained.
        left_out: names of parameters that the new core cannot use; the model has them no more.
    """

    core: str
    layers: list[str]
    replaced: dict[str, str]
    kept: dict[str, str] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        classes = ", ".join(dict.fromkeys(self.replaced.values()))
        lines = [f"{len(self.layers)} layers swapped to {self.core} ({classes}): {_listed(self.layers)}"]
        for reason in dict.fromkeys(self.kept.values()):
            lines.append(f"kept: {_listed([name for name, own in self.kept.items() if own == reason])} ({reason})")
        lines.append(f"new parameters: {_listed(self.new)}")
        if self.left_out:
            lines.append(f"left out: {_listed(self.left_out)}")
        return "\n".join(lines)


def _listed(names: Sequence[str]) -> str:
    shown = names if len(names) < 4 else [names[0], "…", names[-1]]
    return f"{', '.join(shown) or 'none'}{f' ({len(names)})' if len(names) > 3 else ''}"


def swap_attention(
    model: nn.Module,
    core: str = "mhla",
    layers: Iterable[int | str] | None = None,
    head_mix: str | None = None,
    *,
    softmax_every: int = 0,
    **options: Any,
) -> SwapReport:
    """Put another attention into a trained vision transformer, in place, and keep all other weights.

    It takes timm's models whose blocks hold attention of ``timm.layers`` (also with rotary positions, norms of queries
    and keys, a gate or grouped queries), EVA and BEiT, and ViT, DeiT, DINOv2 and DINOv3 of transformers. The grid
    follows ``set_input_size`` and ``dynamic_img_size``. NaFlexVit takes batches of pictures of several grids, with
    ``patch_coord`` and ``patch_valid``: each picture has the outputs that it has alone. With ``dynamic_img_size`` call
    the model from one thread at a time, and with gradient checkpointing run the backward pass before a forward pass on
    another grid of as many tokens. Rotary positions rotate features in the numerator and not in the denominator. Models
    of transformers take padding as ``attention_mask`` [B, N].

    >>> import timm, headmix_vision
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=3)  # pretrained=True: with its weights
    >>> print(headmix_vision.swap_attention(model, "mhla", layers=[1, 2]))
    2 layers swapped to mhla (Attention): blocks.1.attn, blocks.2.attn
    kept: blocks.0.attn (asked to stay)
    new parameters: blocks.1.attn.core.mixing.weight, blocks.2.attn.core.mixing.weight

    Args:
        model: the model, or a module that contains it. ViTs of this package are taken too, and keep their head mixes
            and convolutions.
        core: the new core, see :data:`headmix_vision.layers.CORES`.
        layers: the layers to swap, by name or by number; None for all. Numbers count the layers that can be swapped or
            have been, from 0.
        head_mix: mix across feature heads, or None.
        softmax_every: k, at least 2, for an original layer as the first of each k; 0 for none. It takes no ``layers``.
        options: ``block_grid``, ``core_args``, ``head_mix_args``, ``cpe``, ``lepe`` and ``output_norm``, see
            :class:`~headmix_vision.layers.HeadMixAttention`.

    Returns:
        What was swapped, what was kept and why, and the parameters that are new or left out.

    Raises:
        InputError: if there is nothing to swap, a layer cannot be swapped, or an option does not fit. The model is as
            before then.
    """
    check_keywords("swap_attention", options, _OPTIONS)
    if "block_grid" in options:
        options["block_grid"] = pair("block_grid", options["block_grid"])
    _check_model(model)
    found, kept = _find(model)
    numbered = [name for name, _ in model.named_modules() if name in found or kept.get(name) == _SWAPPED_BEFORE]
    chosen = _choose(numbered, found, kept, layers, softmax_every)
    owners = {name: _owner(model, name) for name in chosen}
    modules = dict(owners.values())
    grids = {owner: cast(tuple[Any, int], _grid_of(module)) for owner, module in modules.items()}
    new = {}
    for name, (owner, module) in owners.items():
        try:
            if name.endswith("_orig_mod"):
                raise InputError("it is compiled already: swap before torch.compile.")
            new[name] = _swapped(found[name], module, *grids[owner], core=core, head_mix=head_mix, **options)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
    before = dict(model.named_parameters())
    swaps = {found[name]: layer for name, layer in new.items()}
    for module in [*model.modules()]:
        for name, child in module._modules.items():  # a layer may stand in several places
            if child in swaps:
                setattr(module, name, swaps[child])
    for owner, module in modules.items():
        grid_of_call = grids[owner][0]
        grid_of_call.attach()
        if isinstance(grid_of_call, NaFlexGrid):
            module._forward_embeds = NaFlexEmbeds(module)  # type: ignore[assignment]
        _leave_out_shared_bias(module)
        of_owner = [name for name in chosen if owners[name][0] == owner]
        _record(model, cast(str, owner), of_owner, {"core": core, "head_mix": head_mix, **options})
    after = dict(model.named_parameters())
    return SwapReport(
        core=core if head_mix is None else f"{core} with {head_mix}",
        layers=chosen,
        replaced={name: type(found[name]).__name__ for name in chosen},
        kept=kept | {name: "asked to stay" for name in found if name not in new},
        new=[name for name in after if name not in before],
        left_out=[name for name in before if name not in after],
    )


_OPTIONS = [
    name
    for name in keywords(SwappedAttention)
    if name not in ("original", "names", "grid", "grid_of_call", "core", "head_mix")
]
SWAP_ARGUMENTS = ["core", "layers", "head_mix", "softmax_every", *_OPTIONS]
SWAPPED = "swapped"  # the name in timm's registry that headmix_vision.models.swap_files gives swapped models
_SWAPPED_BEFORE = "it has been swapped before"
_UNKNOWN = "this class is unknown here; HeadMixAttention can take its place (docs/swap.md)"


def _check_model(model: nn.Module) -> None:
    """Refuse what is no model, and a model whose wrapper has already listed its parameters."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {model!r:.60}.")
    for module in model.modules():
        for cls in type(module).__mro__:
            if cls.__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"):
                raise InputError(f"the model is wrapped by {cls.__name__}, which knows no new layers: swap it before.")


def _find(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the layers that can be swapped, and the reasons of other attention layers, by name."""
    found: dict[str, nn.Module] = {}
    others: dict[str, str] = {}
    for name, module in model.named_modules():
        if _class_of(module) in KNOWN:
            owner, _ = _owner(model, name)
            if owner is None:
                others[name] = "no module around it names a token grid, as patch_embed.grid_size of timm does"
            else:
                found[name] = module
        elif _LIKE_ATTENTION.search(type(module).__name__):
            others[name] = _reason(module)
    inner = [*found, *others]
    containers = {name for name in others if any(other.startswith(f"{name}.") for other in inner)}
    return found, {name: reason for name, reason in others.items() if name not in containers}


def _reason(module: nn.Module) -> str:
    kind = type(module).__name__
    if isinstance(module, SwappedAttention):
        return _SWAPPED_BEFORE
    return f"{kind}: {_REASONS.get(kind, _UNKNOWN)}"


def _class_of(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _choose(
    numbered: list[str],
    found: Collection[str],
    kept: dict[str, str],
    layers: Iterable[int | str] | None,
    softmax_every: int,
) -> list[str]:
    """Return the names of the layers to swap, in their order."""
    if not found:
        reasons = {reason: name for name, reason in reversed(kept.items())}
        why = "; ".join(f"{name or 'it'} cannot be swapped: {reason}" for reason, name in reversed(reasons.items()))
        raise InputError(f"the model has nothing to swap. {why or 'It has no attention layer that is known here'}.")
    check_counts(0, softmax_every=softmax_every)
    if softmax_every:
        if layers is not None:
            raise InputError("give layers or softmax_every, not both.")
        if softmax_every == 1 or softmax_every > len(numbered):
            raise InputError(f"softmax_every must be 0, or from 2 to the {len(numbered)} layers, got {softmax_every}.")
        return [name for index, name in enumerate(numbered) if index % softmax_every and name in found]
    if layers is None:
        return [*found]
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise InputError(
            f"layers must list the layers to swap by number or name, got {layers!r}. softmax_every=3 keeps the first of"
            " each 3 layers."
        )
    wanted = {_name_of(layer, numbered, found, kept) for layer in layers}
    if not wanted:
        raise InputError("layers is empty: name at least one layer to swap.")
    return [name for name in found if name in wanted]


def _name_of(layer: object, numbered: list[str], found: Collection[str], kept: dict[str, str]) -> str:
    """Return the name of a layer that is given by its number or name."""
    name = numbered[layer] if is_whole(layer) and 0 <= layer < len(numbered) else layer
    if isinstance(name, str) and name in found:
        return name
    if isinstance(name, str) and name in kept:
        raise InputError(f"{name} cannot be swapped: {kept[name]}.")
    raise InputError(
        f"the model has no layer {layer!r} to swap: give numbers from 0 to {len(numbered) - 1}, or names from"
        f" {numbered[0]} to {numbered[-1]}."
    )


def _grid_of(module: Any) -> tuple[Any, int] | None:
    """Return the token grid of a model and the number of its prefix tokens; None where it is not known."""
    embed: Any = getattr(module, "patch_embed", None)
    embeddings: Any = getattr(module, "embeddings", None)
    if getattr(embed, "grid_size", None) and hasattr(embed, "strict_img_size") and hasattr(module, "num_prefix_tokens"):
        return ImageGrid(module), module.num_prefix_tokens
    if _class_of(module) == "timm.models.naflexvit.NaFlexVit":
        shape = module.embeds.pos_embed_grid_size or module.embeds.default_grid_size
        return NaFlexGrid(module, tuple(shape)), module.num_prefix_tokens
    if hasattr(embeddings, "patch_embeddings") and hasattr(getattr(module, "config", None), "patch_size"):
        tokens = (getattr(embeddings, name, None) for name in ("cls_token", "register_tokens", "distillation_token"))
        prefix = sum(token.shape[1] for token in tokens if token is not None)
        return PixelGrid(module), prefix
    return None


def _owner(model: nn.Module, name: str) -> tuple[str | None, nn.Module]:
    """Return the nearest module around a layer that knows its token grid, with its name; None without one."""
    for around in _around(name):
        module = model.get_submodule(around)
        if _grid_of(module) is not None:
            return around, module
    return None, model


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules around one, from the nearest to the model itself."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _swapped(original: nn.Module, owner: Any, grid_of_call: GridOfCall, prefix: int, **options: Any) -> nn.Module:
    rate = getattr(getattr(owner, "patch_drop", None), "prob", 0)
    if rate and not isinstance(grid_of_call, NaFlexGrid):
        raise InputError(f"patch_drop_rate must be 0, got {rate}: dropped patches leave holes in the token grid.")
    if "forward" in vars(original):
        raise InputError("its forward was replaced, as hooks of accelerate do: remove them before the swap.")
    cls, names = KNOWN[_class_of(original)]
    if isinstance(original, HeadMixAttention):
        return _with_core(original, **options)
    layer = cast(type[SwappedAttention], cls)(
        original, names, TokenGrid(grid_of_call.shape, prefix), grid_of_call, **options
    )
    if getattr(owner, "rope", None) is not None or names.rotate_half:
        layer.core.check_rotation()
    return layer


def _with_core(layer: HeadMixAttention, core: str, head_mix: str | None, **options: Any) -> HeadMixAttention:
    """Swap the core of a layer of this package, which keeps the parts that it was made with."""
    for name, value in {"head_mix": head_mix, **options}.items():
        if name not in ("block_grid", "core_args") and value is not None:
            raise InputError(f"{name}={value!r} cannot be added to a layer of this package: leave {name} out.")
    return layer.with_core(core, **options)


def _leave_out_shared_bias(owner: Any) -> None:
    """Remove BEiT's bias of all layers once none of them can use it."""
    layers = [module for module in owner.modules() if isinstance(module, (_SwappedBeitAttention, beit.Attention))]
    uses = [layer for layer in layers if not isinstance(layer, _SwappedBeitAttention) or layer.takes_bias]
    if layers and not uses and getattr(owner, "rel_pos_bias", None) is not None:
        owner.rel_pos_bias = None


class _Undecayed:
    """``no_weight_decay`` of a swapped model, with the parameters that its cores list."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self) -> set[str]:
        own: set[str] = type(self.model).no_weight_decay(self.model)
        return own | undecayed_parameters(self.model)


def _record(model: nn.Module, owner: str, layers: list[str], swap: dict[str, Any]) -> None:
    """Note a swap where timm looks for the arguments of a model that it saves, and its parameters without decay."""
    names = (owner, *_around(owner))
    name = next((name for name in names if hasattr(model.get_submodule(name), "pretrained_cfg")), owner)
    made: Any = model.get_submodule(name)
    if hasattr(type(made), "no_weight_decay"):
        made.no_weight_decay = _Undecayed(made)
    config, arguments = getattr(made, "pretrained_cfg", None), getattr(made, "_model_args", None)
    if not config or arguments is None:  # timm.create_model did not make it
        return
    arguments = {"architecture": config["architecture"], "swaps": [], **arguments}
    swap = {"layers": [layer.removeprefix(f"{name}.") for layer in layers], **swap}
    swap = {option: value for option, value in swap.items() if value is not None}
    made._model_args = {**arguments, "swaps": [*as_swaps(arguments["swaps"]), swap]}
    made.pretrained_cfg = made.default_cfg = {**config, "architecture": SWAPPED}


def record_block_grid(model: Any, block_grid: tuple[int, ...]) -> None:
    """Note another block grid of all layers where timm looks for the arguments of a model that it saves."""
    arguments = getattr(model, "_model_args", None)
    if arguments is None:
        return
    model._model_args = {**arguments, "block_grid": block_grid}
    if "swaps" in arguments:
        swaps = as_swaps(arguments["swaps"])
        model._model_args["swaps"] = [{**swap, "block_grid": block_grid} for swap in swaps]


def as_swaps(swaps: Any) -> list[dict[str, Any]]:
    """Return the arguments of swaps, given as a list of them, those of one, or a core.

    Raises:
        InputError: if it is something else, or :func:`swap_attention` has no such argument.
    """
    swaps = {"core": swaps} if isinstance(swaps, str) else swaps
    swaps = [swaps] if isinstance(swaps, Mapping) else swaps
    if not isinstance(swaps, (list, tuple)):
        raise InputError(f"swaps must be a core, arguments of swap_attention, or a list of such, got {swaps!r}.")
    for swap in swaps:
        check_keywords("swaps", swap, SWAP_ARGUMENTS)
    return [dict(swap) for swap in swaps]
