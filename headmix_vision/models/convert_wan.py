"""Conversion of a Wan video transformer of diffusers to MHLA self-attention, also of published MHLA weights.

B batch, N = T * H * W tokens, C width, H heads, D head dim, M blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

from diffusers import WanTransformer3DModel
from diffusers.configuration_utils import register_to_config
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from diffusers.models.modeling_utils import ModelMixin as ModelMixin  # loading a pipeline, diffusers looks for it here
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn

from headmix_vision.errors import InputError, check_choice, check_flags, check_numbers
from headmix_vision.layers.block_mixing import LOWER, UPPER
from headmix_vision.models.convert import Conversion, fit
from headmix_vision.models.converted import ConvertedModel, check_layers
from headmix_vision.models.diffusers_features import found_by_diffusers
from headmix_vision.models.headmix_vit import state_dict_in
from headmix_vision.models.wan_attention import (
    GridRotary,
    WanMHLAProcessor,
    WanSoftmaxProcessor,
    WanState,
    WanStream,
)
from headmix_vision.ops import TokenBlocks, TokenRanks
from headmix_vision.ops.dispatch import as_axes
from headmix_vision.ops.token_ranks import SEQUENCE

RELEASE_GRID = (21, 30, 50)  # tokens of 81 frames at 480 x 800
RELEASE_BLOCKS = (3, 5, 10)


@found_by_diffusers
class WanMHLATransformer3DModel(ConvertedModel, WanTransformer3DModel):
    """A Wan video transformer whose self-attention is MHLA, in all layers or some; cross-attention is unchanged.

    Weights are named as in diffusers; MHLA's are ``blocks.i.attn1.processor.*``. Any number of frames and any size
    is taken that leaves a token for each block along height and width; frames may be fewer than blocks along time.

    Args:
        block_grid: blocks along time, height and width.
        mhla_layers: layers with MHLA, from 0; all for None.
        normalizer: ``"paper"`` divides by the denominator of unrotated features, None does not divide.
        output_gate: multiply outputs by SiLU of a projection of the layer's input; a new gate is open, that is 1.
        clip_mixing: keep mixing weights in (0, 1); False takes any, as the released code does.
        token_grid: the tokens (T, H, W) for whose blocks new mixing matrices are drawn.
        causal: tokens see their own row of blocks along time and those before it, as many as ``block_grid`` has. Rows
            keep the length that they have in ``token_grid``, and a clip has any number of them (:meth:`stream`).
        wan: arguments of ``diffusers.WanTransformer3DModel``.

    Shape:
        as ``diffusers.WanTransformer3DModel``: latents [B, C, T, H, W].

    Raises:
        InputError: if a layer is out of range, blocks do not fit the token grid, or an option is unknown.
    """

    ignore_for_config = ("wan",)
    _keep_in_fp32_modules: ClassVar[list[str]] = [*WanTransformer3DModel._keep_in_fp32_modules, "mixing"]
    rope: nn.Module

    @register_to_config
    def __init__(
        self,
        *,
        block_grid: tuple[int, int, int] = RELEASE_BLOCKS,
        mhla_layers: Sequence[int] | None = None,
        normalizer: str | None = None,
        output_gate: bool = False,
        clip_mixing: bool = True,
        token_grid: tuple[int, int, int] = RELEASE_GRID,
        causal: bool = False,
        **wan: Any,
    ) -> None:
        super().__init__(**wan)
        self._install()

    def _install(self) -> None:
        """Put the processors that the configuration asks for into the self-attention layers."""
        config = cast(Any, self.config)
        self.rope = GridRotary(self.rope, config.patch_size)
        layers = _check_options(config, len(self.blocks))
        for index, block in enumerate(self.blocks):
            attn = block.attn1
            processor: Any = WanMHLAProcessor(attn, config) if index in layers else WanSoftmaxProcessor()
            if index not in layers:
                processor._attention_backend = attn.processor._attention_backend
            attn.set_processor(processor)

    @property
    def row_frames(self) -> int | None:
        """Latent frames of a row of blocks of a causal model, else None."""
        config = cast(Any, self.config)
        return config.patch_size[0] * config.token_grid[0] // config.block_grid[0] if config.causal else None

    def stream(
        self, hidden_states: Tensor, timestep: Tensor, *further: Any, state: WanState | None = None, **options: Any
    ) -> tuple[Tensor, WanState]:
        """Run the next frames of a clip on the state of those before, where the model is causal.

        Outputs are as in ``forward`` on all frames up to these, each with its own time. A state is never changed:
        frames can be denoised in many calls on the state before them, and are then pushed once, clean and at time 0.

        Args:
            hidden_states, timestep, further, options: as in ``forward``, of the next whole rows of blocks alone.
            state: returned for the frames before; None at the start.

        Returns:
            The sample, and the state after these frames.

        Raises:
            InputError: if the model is not causal or runs on several devices, the frames are not whole rows of blocks,
                the state is of another size, or the rotary positions end.
        """
        if self.row_frames is None or self._parallel_config is not None:
            raise InputError("stream needs a model converted with causal=True, on one device.")
        size = tuple(x // p for x, p in zip(hidden_states.shape[3:], self.config["patch_size"][1:], strict=True))
        state = WanState(0, size, ()) if state is None else state
        if state.size != size:
            raise InputError(f"the state is of frames of {state.size} tokens, these are of {size}.")
        rope = cast(GridRotary, self.rope)
        stream = rope.stream = WanStream(state.frames, state.layers or [None] * len(self.blocks), [])
        try:
            sample = self(hidden_states, timestep, *further, return_dict=False, **options)[0]
        finally:
            rope.stream = None
        frames = state.frames + hidden_states.shape[2] // self.config["patch_size"][0]
        return sample, WanState(frames, size, tuple(stream.after))

    def enable_parallelism(self, *, config: Any, cp_plan: Any = None) -> None:
        """Divide work among devices as diffusers does; under context parallelism MHLA exchanges block summaries alone.

        Each rank is called with the whole input and returns the whole output. Layers that keep softmax use diffusers'
        ring or Ulysses attention. Each rank has the gradients of its own tokens; their sum over the ranks is the whole.

        Args:
            config: a ``diffusers.ContextParallelConfig``, or another configuration that diffusers takes.
            cp_plan: None, for diffusers' plan of Wan.

        Raises:
            InputError: for another plan and, when called, for tokens that are not a multiple of the ranks, unless the
                configuration has ``ulysses_anything`` or ``ring_anything``.
        """
        if cp_plan is not None:
            raise InputError("cp_plan does not apply to a converted Wan, whose layers follow diffusers' plan of Wan.")
        super().enable_parallelism(config=config)
        parallel = cast(Any, self._parallel_config).context_parallel_config
        if parallel is None:
            return
        ranks = replace(TokenRanks.of(parallel._flattened_mesh), axis=SEQUENCE)
        for block in self.blocks:
            block.attn1.processor.ranks = ranks
        cast(GridRotary, self.rope).ranks = None if parallel.ulysses_anything or parallel.ring_anything else ranks


def _check_options(config: Any, depth: int) -> list[int]:
    """Return the layers with MHLA; raise InputError for options that do not fit."""
    check_choice("normalizer", config.normalizer, ("paper", None))
    check_flags(output_gate=config.output_gate, clip_mixing=config.clip_mixing, causal=config.causal)
    check_numbers(0, eps=config.eps)
    axes = {name: as_axes(name, getattr(config, name)) for name in ("block_grid", "token_grid")}
    for name, sizes in axes.items():
        if len(sizes) != 3:
            raise InputError(f"{name} must be three whole numbers, of time, height and width, got {sizes}.")
    TokenBlocks.from_grid(axes["token_grid"], axes["block_grid"])
    layers = check_layers(config.mhla_layers, depth)
    if config.causal and (len(layers) < depth or axes["token_grid"][0] % axes["block_grid"][0]):
        raise InputError(
            f"causal needs MHLA in all {depth} layers and rows of blocks of one length: got layers {layers},"
            f" {axes['token_grid'][0]} tokens in {axes['block_grid'][0]} rows along time."
        )
    return layers


def wan_to_mhla(
    transformer: WanTransformer3DModel,
    block_grid: tuple[int, int, int] = RELEASE_BLOCKS,
    layers: Sequence[int] | None = None,
    normalizer: str | None = None,
    output_gate: bool = False,
    clip_mixing: bool = True,
    token_grid: tuple[int, int, int] = RELEASE_GRID,
    causal: bool = False,
) -> WanMHLATransformer3DModel:
    """Copy a Wan transformer of diffusers, with MHLA in the place of its softmax self-attention.

    All weights are copied; mixing matrices, norms and gates are new, so the model has to be trained on
    (:mod:`headmix_vision.training.distillation`). A pipeline takes the copy as its ``transformer``. Two thirds of the
    layers, as the paper's hybrid:

    >>> from diffusers import WanTransformer3DModel
    >>> wan = WanTransformer3DModel(num_layers=3, num_attention_heads=2, attention_head_dim=12, ffn_dim=32)
    >>> hybrid = wan_to_mhla(wan, layers=[i for i in range(len(wan.blocks)) if i % 3])
    >>> [block.attn1.processor.__class__.__name__ for block in hybrid.blocks]
    ['WanSoftmaxProcessor', 'WanMHLAProcessor', 'WanMHLAProcessor']

    Args:
        transformer: the model to convert, on any device; it is not changed and shares no memory with the result.
        layers: layers that become MHLA, from 0; all for None, and for none of them the function stays the same.
        block_grid, normalizer, output_gate, clip_mixing, token_grid, causal: see :class:`WanMHLATransformer3DModel`.

    Raises:
        InputError: if the model is not a ``WanTransformer3DModel``, or an option does not fit.
    """
    if type(transformer) is not WanTransformer3DModel:
        raise InputError(f"transformer must be a diffusers.WanTransformer3DModel, got {type(transformer).__name__}.")
    options: dict[str, Any] = {
        "block_grid": as_axes("block_grid", block_grid),
        "mhla_layers": check_layers(layers, len(transformer.blocks)),
        "normalizer": normalizer,
        "output_gate": output_gate,
        "clip_mixing": clip_mixing,
        "token_grid": as_axes("token_grid", token_grid),
        "causal": causal,
    }
    _check_options(SimpleNamespace(**options, eps=transformer.config.eps), len(transformer.blocks))
    for index, block in enumerate(transformer.blocks):
        if type(block.attn1.processor) is not WanAttnProcessor:
            raise InputError(f"blocks.{index}.attn1 has a {type(block.attn1.processor).__name__}, not diffusers' own.")
    return WanMHLATransformer3DModel.copy_of(transformer, options)


_PUBLISHED = {
    "block_attn.conv.weight": "mixing.weight",
    "g_norm.weight": "norm.weight",
    "g.weight": "gate.weight",
    "g.bias": "gate.bias",
}
_OF_ATTENTION = re.compile(r"(blocks\.(\d+)\.attn1\.)(?:processor\.)?(.+)")


def convert_wan_mhla_state_dict(state_dict: Mapping[str, Any], model: WanMHLATransformer3DModel) -> Conversion:
    """Map published weights of Wan with MHLA, in the original naming or that of diffusers, onto ``model``.

    The released code takes mixing weights of any sign, so the model is made with ``clip_mixing=False``, and with the
    layers and the gate of the weights (docs/wan.md).

    Args:
        state_dict: ``blocks.i.self_attn.block_attn.conv.weight`` [M, M, 1, 1], ``g_norm.weight`` [D], ``g.weight`` and
            ``g.bias`` where there is a gate, and the weights of Wan; or a checkpoint holding them under ``state_dict``.
        model: the model to fill; it is not changed.

    Raises:
        InputError: if the weights hold no MHLA, or LePE, which the model does not have; if layers, gate, blocks or any
            shape differ; if mixing weights are outside (0, 1) and the model clips them.
    """
    source = state_dict_in(state_dict, "state_dict")
    lepe = [name for name in source if ".lepe." in name]
    if lepe:
        raise InputError(f"the weights have {lepe[0]}: a convolution of the values (LePE) is not supported.")
    if any(".self_attn." in name for name in source):
        source = convert_wan_transformer_to_diffusers(source)
    source = dict(_rename(name, value) for name, value in source.items())
    config = cast(Any, model.config)
    layers = sorted(int(name.split(".")[1]) for name in source if name.endswith(".processor.mixing.weight"))
    own = [index for index, block in enumerate(model.blocks) if isinstance(block.attn1.processor, WanMHLAProcessor)]
    if layers != own:
        raise InputError(f"the weights have MHLA in layers {layers}, the model in {own} (option mhla_layers).")
    gated = any(".processor.gate." in name for name in source)
    if gated != config.output_gate:
        raise InputError(f"the weights have {'a' if gated else 'no'} gate: make the model with output_gate={gated}.")
    hints = ("the options of Wan must agree", "block_grid must agree")
    converted = fit(source, model, lambda name: hints[".mixing." in name])
    for name, value in source.items():
        if config.clip_mixing and ".mixing.weight" in name and not ((value >= LOWER) & (value <= UPPER)).all():
            raise InputError(
                f"{name} has weights from {value.min():.2g} to {value.max():.2g}: make the model with"
                " clip_mixing=False."
            )
    return converted


def _rename(name: str, value: Tensor) -> tuple[str, Tensor]:
    """Give a published weight of a self-attention layer its name here, and a mixing matrix two axes."""
    found = _OF_ATTENTION.fullmatch(name)
    if found is None or found[3] not in _PUBLISHED:
        return name, value
    new = f"{found[1]}processor.{_PUBLISHED[found[3]]}"
    return new, value.flatten(1) if new.endswith("mixing.weight") else value
