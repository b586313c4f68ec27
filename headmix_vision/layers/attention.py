"""The attention layer of all models: project, mix heads, run a core, norm, gate and project.

B batch, N tokens, C width, H heads, D = C / H head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from headmix_vision.errors import InputError, check_choice, check_counts, check_flags, check_keywords, keywords
from headmix_vision.layers.convolutions import POSITION_ENCODINGS, GridConvolution, in_autocast_type, is_bare
from headmix_vision.layers.cores import CORES
from headmix_vision.layers.cores.base import AttentionCore, LayerSpec
from headmix_vision.layers.head_mixes import HEAD_MIXES
from headmix_vision.layers.padding import is_of_keys, join_key_masks
from headmix_vision.layers.positions import Rotation
from headmix_vision.ops import SampleGrids, TokenGrid, TokenRanks
from headmix_vision.ops.dispatch import as_axes
from headmix_vision.ops.token_grid import repeated, with_shape


class HeadMixAttention(nn.Module):
    """Self-attention over a token grid by a chosen core and head mix. Parameter names follow timm's Attention.

    >>> layer = HeadMixAttention(64, 4, core="mhla", grid=(8, 8), block_grid=(2, 2))
    >>> layer(torch.rand(2, 64, 64)).shape
    torch.Size([2, 64, 64])

    Args:
        dim: width C.
        num_heads: H, a divisor of ``dim``.
        core: ``"softmax"``, ``"linear"``, ``"mhla"`` or ``"hih"``.
        head_mix: mix across feature heads, a name in ``HEAD_MIXES``, or None.
        grid: token grid, (H, W) or (T, H, W), prefix tokens left out.
        block_grid: blocks along each axis, for block-wise cores. It stays fixed when the grid changes.
        num_prefix_tokens: class and register tokens in front of the grid.
        core_args: options of the core, such as ``normalizer`` or ``mixing_init`` for ``"mhla"``.
        head_mix_args: options of the head mix.
        qk_norm: RMSNorm of queries and keys over the full width.
        cpe: depthwise convolutional positional encoding, of extent 3 along each axis, of the input; on a grid with time
            ``"factorised"`` convolves in space, then in time.
        lepe: odd extent along each axis of a depthwise convolution of the values, added to the heads' outputs (LePE, as
            in the released code of MHLA), not of prefix tokens; 0 for none. It takes no head mix.
        input_norm: LayerNorm of the input, beside the one of the transformer block, as in the released code of MHLA.
        output_norm: RMSNorm of each head's output.
        output_gate: multiply the output by SiLU of a projection of the input, as in GLA.
        qkv_bias, proj_bias, scale_norm, attn_drop, proj_drop, norm_layer: as in timm's Attention.

    Shape:
        ``x`` [B, N, C] -> [B, N, C], tokens in raster order, prefix first. ``grid`` is another token grid for this
        call alone; ``rotation`` are its rotary positions (:func:`~headmix_vision.layers.positions.rotary_tables`).
        Under context parallelism (:meth:`context_parallel`) ``x`` and ``rotation`` hold this rank's tokens, while
        ``grid`` is the full grid.

    Padding:
        ``key_mask`` (bool [B, N], prefix tokens included) is False for padding. Outputs of real tokens do not depend
        on padding: sums, denominators, scans, scores and convolutions leave it out. Heads return zeros for padding, so
        the layer returns the bias of ``proj`` there. In place of ``key_mask`` all cores take an ``attn_mask`` of shape
        [B, 1, 1, N]: bool, or 0 for real tokens and ``-inf`` or the smallest number of its type for padding.

        Where samples have grids of their own, ``grid`` is a :class:`~headmix_vision.ops.SampleGrids` and ``x`` holds
        prefix tokens, the tokens of each sample and its padding. Each sample has the outputs that it has alone:
        blocks, scans and convolutions follow its own grid. ``rotation`` then has a table for each sample without
        its prefix tokens, [B, N, H or 1, D / 2]. On the CPU a sample without a real token is refused. Elsewhere reading
        the mask would hold up every call, and the outputs of its heads are zero.

    Raises:
        InputError: for an unknown core or head mix, an option that it does not take, heads not dividing the width,
            blocks not fitting the grid, and, when called, a number of tokens that is not the grid's, or a mask, grids
            of samples or rotary positions that the core or the mix cannot take.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        core: str = "mhla",
        head_mix: str | None = None,
        grid: tuple[int, ...] = (14, 14),
        block_grid: tuple[int, ...] = (4, 4),
        num_prefix_tokens: int = 0,
        core_args: dict[str, Any] | None = None,
        head_mix_args: dict[str, Any] | None = None,
        qk_norm: bool = False,
        cpe: bool | str = False,
        lepe: int = 0,
        input_norm: bool = False,
        output_norm: bool = False,
        output_gate: bool = False,
        qkv_bias: bool = False,
        proj_bias: bool = True,
        scale_norm: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: type[nn.Module] | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts(1, dim=dim, num_heads=num_heads)
        if dim % num_heads:
            raise InputError(f"num_heads={num_heads} does not divide the width dim={dim}.")
        check_parts(core, head_mix, core_args, head_mix_args, lepe)
        if not isinstance(cpe, bool) and cpe != "factorised":
            raise InputError(f"cpe must be true or false or 'factorised', got {cpe!r}.")
        check_flags(qk_norm=qk_norm, input_norm=input_norm, output_norm=output_norm, output_gate=output_gate)
        for count in as_axes("block_grid", block_grid):
            check_counts(1, block_grid=count)
        head_dim = dim // num_heads
        self.num_heads, self.head_dim = num_heads, head_dim
        self.grid = TokenGrid.of(grid, num_prefix_tokens)
        self.ranks: TokenRanks | None = None
        averages = CORES[core].averages_places
        spec = LayerSpec(dim, num_heads, head_dim, self.grid, tuple(block_grid), attn_drop, averages, device, dtype)
        factory = spec.factory

        self.input_norm = nn.LayerNorm(dim, **factory) if input_norm else nn.Identity()
        self.cpe = POSITION_ENCODINGS[cpe](dim, len(self.grid.shape), **factory) if cpe else None
        self.lepe = GridConvolution(dim, len(self.grid.shape), lepe, **factory) if lepe else None
        self.head_mix = None if head_mix is None else HEAD_MIXES[head_mix](spec, **(head_mix_args or {}))
        projected_heads = self.head_mix.projected_heads if self.head_mix else (num_heads,) * 3
        self.projected_dims = [heads * head_dim for heads in projected_heads]
        self.qkv = nn.Linear(dim, sum(self.projected_dims), bias=qkv_bias, **factory)
        q_dim, k_dim, _ = self.projected_dims
        self.q_norm = nn.RMSNorm(q_dim, eps=1e-6, **factory) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(k_dim, eps=1e-6, **factory) if qk_norm else nn.Identity()
        self.repeats = self.head_mix.repeats if self.head_mix else 1
        self.folds = self.head_mix is not None and self.head_mix.folds and not qk_norm
        core_spec = self.head_mix.core_spec(spec) if self.head_mix else spec
        self.core = CORES[core](core_spec, **(core_args or {}))
        check_sees_later(self.core, cpe, lepe)
        self.output_norm = nn.RMSNorm(head_dim, eps=1e-6, **factory) if output_norm else nn.Identity()
        self.gate = nn.Linear(dim, dim, bias=False, **factory) if output_gate else None
        self.norm = (norm_layer or nn.LayerNorm)(dim, **factory) if scale_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    def flops(self, grid: tuple[int, ...] | None = None) -> int:
        """Return the operations of one image of this grid, or of another, multiply and add as two.

        Counted are projections, convolutions, the head mix and the core's method, whatever kernel computes it; norms,
        activations and other work on single numbers are not.
        """
        tokens = self.grid if grid is None else replace(self.grid, shape=tuple(grid))
        total = 2 * tokens.num_tokens * sum(projection.weight.numel() for projection in self.projections())
        total += self.core.flops(tokens.repeat(self.repeats))
        total += 0 if self.head_mix is None else self.head_mix.flops(tokens)
        return total + sum(0 if conv is None else conv.flops(tokens) for conv in (self.cpe, self.lepe))

    def projections(self) -> list[nn.Linear]:
        """Return the projections of the layer."""
        return [self.qkv, self.proj, *([] if self.gate is None else [self.gate])]

    def _project(self, x: Tensor) -> list[Tensor]:
        """Project to queries, keys and values and mix their heads: [B, N * repeats, heads, D] each."""
        mix = self.head_mix
        folded = mix is not None and self.folds and is_bare(self.qkv, nn.Linear)
        if mix is not None and folded:
            qkv = F.linear(x, *mix("fold", self.qkv.weight, self.qkv.bias))
            q, k, v = qkv.split([self.proj.in_features] * 3, dim=-1)  # unpacked, which torch.fx can trace
        else:
            q, k, v = self.qkv(x).split(self.projected_dims, dim=-1)
            q, k = self.q_norm(q), self.k_norm(k)
        heads = [torch.unflatten(y, -1, (-1, self.head_dim)) for y in (q, k, v)]
        if mix is None:
            return heads
        heads = heads if folded else list(mix("before", *heads))
        _assert_mixed(mix.core_heads, self.repeats * x.shape[1], *heads)
        return heads

    def set_grid(self, grid: tuple[int, ...]) -> None:
        """Use another token grid; the weights do not change."""
        new = replace(self.grid, shape=tuple(grid))
        self.core.set_grid(new.repeat(self.repeats))
        self.grid = new

    def context_parallel(self, ranks: TokenRanks | ProcessGroup | DeviceMesh | None) -> None:
        """Turn on context parallelism. Ranks exchange block summaries, and the edges that ``cpe`` reads.

        Each rank then has the parameter gradients of its own tokens (:meth:`TokenRanks.sum_gradients`).

        Args:
            ranks: a process group, or a device mesh of one dimension, which parts the first axis of the grid;
                :meth:`TokenRanks.of` for another axis; None for all tokens on each rank.

        Raises:
            InputError: if there is a head mix, the core needs all tokens, or ``ranks`` is something else.
        """
        if ranks is not None:
            self.check_ranks()
            ranks = ranks if isinstance(ranks, TokenRanks) else TokenRanks.of(ranks)
        self.ranks = ranks

    def check_ranks(self) -> None:
        """Raise InputError if the layer does not support context parallelism."""
        if self.head_mix is not None:
            raise InputError(f"tokens on several ranks take no head mix, got {type(self.head_mix).__name__}.")
        self.core.check_ranks()

    def set_block_grid(self, block_grid: tuple[int, ...]) -> None:
        """Cut the token grid into other blocks and resample the mixing matrix.

        Raises:
            InputError: if the core has no blocks, or they do not fit the grid.
        """
        for count in as_axes("block_grid", block_grid):
            check_counts(1, block_grid=count)
        self.core.set_block_grid(tuple(block_grid))

    def with_core(
        self, core: str, block_grid: tuple[int, ...] = (4, 4), core_args: dict[str, Any] | None = None
    ) -> HeadMixAttention:
        """Return a layer with another core, which shares all other parts with this one.

        Raises:
            InputError: if the core or an option is unknown or does not fit the layer.
        """
        check_parts(core, None, core_args, None, 0)
        averages, weight = CORES[core].averages_places, self.qkv.weight
        sizes = (weight.shape[1], self.num_heads, self.head_dim, self.grid, tuple(block_grid))
        spec = LayerSpec(*sizes, getattr(self.core, "attn_drop", 0.0), averages, weight.device, weight.dtype)
        made = CORES[core](self.head_mix.core_spec(spec) if self.head_mix else spec, **(core_args or {}))
        check_sees_later(made, self.cpe is not None, 0 if self.lepe is None else self.lepe.proj.kernel_size[0])
        new = copy.copy(self)
        new._modules = {**self._modules, "core": made.train(self.training)}
        return new

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse torch.jit.script, which calls this, before it fails on the first line that it cannot read."""
        raise InputError(
            "torch.jit.script cannot read the attention layers of headmix_vision: use torch.jit.trace, torch.export "
            "or torch.compile."
        )

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        grid: tuple[int, ...] | SampleGrids | None = None,
        rotation: Rotation | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        samples, tokens = None, self.grid
        if isinstance(grid, SampleGrids):
            samples, tokens = grid, with_shape(tokens, (grid.num_tokens,))
        elif grid is not None:
            tokens = with_shape(tokens, tuple(grid))
        if attn_mask is not None or key_mask is not None or samples is not None:
            attn_mask, key_mask = self._masks(x, tokens, samples, attn_mask, key_mask)
        x = self._encode(x, tokens, key_mask, samples)
        q, k, v = self._project(x)
        places = tokens if self.repeats == 1 else repeated(tokens, self.repeats)
        arguments = self._core_arguments(x, attn_mask, is_causal, rotation)
        if key_mask is not None:
            arguments |= self._padding_arguments(key_mask, samples, rotation)
        out = self.core(q, k, v, places, **arguments)
        convolved = None if self.lepe is None else self._convolve_values(v.flatten(2), tokens, key_mask, samples)
        return self._finish(x, out, convolved)

    def _masks(
        self,
        x: Tensor,
        tokens: TokenGrid,
        samples: SampleGrids | None,
        attn_mask: Tensor | None,
        key_mask: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Join all that marks padding in one key mask; a mask of keys stays with softmax if no convolution reads x."""
        softmax_alone = self.core.forms_weights and self.repeats == 1 and self.cpe is None and self.lepe is None
        of_keys = None
        if isinstance(attn_mask, Tensor) and not softmax_alone and is_of_keys(attn_mask, x):
            of_keys, attn_mask = attn_mask, None
        if isinstance(key_mask, torch.fx.Proxy):
            _refuse_in_graph(key_mask)
            key_mask = None
        if self.ranks is not None and any(one is not None for one in (key_mask, of_keys, samples)):
            raise InputError("tokens on several ranks take no key mask and no grid for each sample.")
        return attn_mask, join_key_masks(x, key_mask, of_keys, samples, tokens.num_prefix_tokens)

    def _encode(
        self,
        x: Tensor,
        tokens: TokenGrid,
        key_mask: Tensor | None = None,
        samples: SampleGrids | None = None,
    ) -> Tensor:
        """Check the number of tokens, then apply the input norm and the positional encoding, where there are any."""
        ranks = self.ranks
        _check_tokens(x, tokens if ranks is None else ranks.local(tokens))
        x = self.input_norm(x)
        if self.cpe is None:
            return x
        x = _as_projections_read(x)
        if key_mask is not None:
            return cast(Tensor, self.cpe.of_padded(x, tokens, key_mask, samples))
        return cast(Tensor, self.cpe(x, tokens) if ranks is None else self.cpe.of_rank(x, tokens, ranks))

    def _padding_arguments(
        self, key_mask: Tensor, samples: SampleGrids | None, rotation: Rotation | None
    ) -> dict[str, Any]:
        """Return the arguments that tell the core of padding, and refuse what it cannot take."""
        self.core.check_padding(samples)
        if samples is not None and rotation is not None and rotation[0].shape[:2] != samples.valid.shape:
            raise InputError(
                f"rotary positions of samples with grids of their own must be [B, N, H or 1, D / 2] with B, N ="
                f" {tuple(samples.valid.shape)}, got {tuple(rotation[0].shape)}."
            )
        repeated_mask = key_mask if self.repeats == 1 else key_mask.repeat_interleave(self.repeats, 1)
        arguments: dict[str, Any] = {"key_mask": repeated_mask}
        return arguments if samples is None else arguments | {"sample_grids": samples}

    def _core_arguments(
        self, x: Tensor, attn_mask: Tensor | None, is_causal: bool, rotation: Rotation | None
    ) -> dict[str, Any]:
        """Return the arguments that this core reads, and refuse a mask or rotary positions that it cannot take."""
        core = self.core
        arguments: dict[str, Any] = {"x": x} if core.reads_input else {}
        if core.forms_weights:
            arguments |= {"attn_mask": attn_mask, "is_causal": is_causal}
        if not core.forms_weights or self.repeats > 1:
            _refuse_masks(attn_mask, is_causal, type(core).__name__, self.repeats)
        if rotation is not None:
            core.check_rotation()
            arguments["rotation"] = rotation
        if self.ranks is not None:
            arguments["ranks"] = self.ranks
        return arguments

    def stream(
        self, x: Tensor, state: Any = None, grid: tuple[int, ...] | None = None, rotation: Rotation | None = None
    ) -> tuple[Tensor, Any]:
        """Compute the next tokens of a grid as ``forward`` of all of them does, for a causal core.

        Args:
            x: [B, n, C], the next tokens in raster order, prefix tokens with the first.
            state: what this returned for the tokens before, which stays as it is; None at the start.
            grid: of all tokens, as in ``forward``; with ``causal="rows"`` there may be any number of them.
            rotation: of the next tokens.

        Returns:
            The outputs [B, n, C], and the state after them, whose size does not depend on the number of tokens.

        Raises:
            InputError: if the core is not causal, or the tokens do not end with a row of blocks along the first axis.
        """
        tokens = self.grid if grid is None else with_shape(self.grid, tuple(grid))
        rotated: dict[str, Any] = {}
        if rotation is not None:
            self.core.check_rotation()
            rotated["rotation"] = rotation
        x = self.input_norm(x)
        q, k, v = self._project(x)
        out, state = self.core.stream(q, k, v, tokens.repeat(self.repeats), state, **rotated)
        return self._finish(x, out), state

    def _convolve_values(
        self, values: Tensor, tokens: TokenGrid, key_mask: Tensor | None, samples: SampleGrids | None
    ) -> Tensor:
        """Convolve values [B, N, C] on the grid, with zeros for prefix tokens."""
        lepe, ranks = cast(GridConvolution, self.lepe), self.ranks
        if key_mask is not None:
            out = cast(Tensor, lepe.of_padded(values, tokens, key_mask, samples))
        else:
            out = lepe(values, tokens) if ranks is None else lepe.of_rank(values, tokens, ranks)
        first = (tokens if ranks is None else ranks.local(tokens)).num_prefix_tokens
        return F.pad(out[:, first:], (0, 0, first, 0)) if first else out

    def _finish(self, x: Tensor, out: Tensor, positions: Tensor | None = None) -> Tensor:
        """Mix the heads back, add ``positions``, norm, gate and project: [B, N, C]."""
        out = self.output_norm(out if self.head_mix is None else self._mix_back(x, out)).flatten(2)
        out = out if positions is None else out + positions
        if self.gate is not None:
            out = out * F.silu(self.gate(x))
        return self.proj_drop(self.proj(self.norm(out)))

    def _mix_back(self, x: Tensor, out: Tensor) -> Tensor:
        out = cast(nn.Module, self.head_mix)("after", out)
        _assert_mixed(self.num_heads, x.shape[1], out)
        return out


def attention_of_layers(
    depth: int,
    *,
    core: str,
    core_args: dict[str, Any] | None,
    head_mix: str | None,
    head_mix_args: dict[str, Any] | None,
    global_every: int,
    softmax_every: int = 0,
) -> list[dict[str, Any]]:
    """Choose core, head mix and their options for each layer of a model.

    With ``global_every`` k the last of each k layers is the core alone, without head mix and window. The paper of IHA
    (arXiv 2602.21371) so follows four windowed layers of IHA by one of plain global attention, k = 5.

    With ``softmax_every`` k the first of each k layers has the softmax core in place of another, without its options: a
    hybrid, with k = 3 that of MHLA's paper on video (arXiv 2601.07832).

    Args:
        depth: layers of the model.
        core, core_args, head_mix, head_mix_args: of the other layers.
        global_every: k, from 2 to the depth, or 0 for layers that are all alike.
        softmax_every: k, from 2 to the depth, or 0 for one core.

    Raises:
        InputError: if ``softmax_every`` is not such a number, or the core is softmax; if ``global_every`` is not a
            whole number of at least 0, is 1, which would leave no other layer, is above the depth, which would leave no
            such layer, or there is nothing that it would leave out.
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
    check_counts(0, softmax_every=softmax_every)
    if softmax_every == 1 or softmax_every > depth:
        raise InputError(f"softmax_every must be 0, or from 2 to the depth {depth}, got {softmax_every}.")
    if softmax_every and core == "softmax":
        raise InputError(f"softmax_every={softmax_every} needs another core than softmax.")
    layers = []
    for index in range(depth):
        layer = {"head_mix": head_mix, "head_mix_args": head_mix_args, "core": core, "core_args": core_args}
        if global_every and (index + 1) % global_every == 0:
            plain = {name: value for name, value in options.items() if name != "window"}
            layer |= {"head_mix": None, "head_mix_args": None, "core_args": plain}
        if softmax_every and index % softmax_every == 0:
            layer |= {"core": "softmax", "core_args": None}
        layers.append(layer)
    return layers


def undecayed_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters that a module lists as its ``undecayed``, such as mixing matrices."""
    return {
        f"{module_name}.{name}"
        for module_name, module in model.named_modules()
        for name in getattr(module, "undecayed", ())
        if getattr(module, name, None) is not None
    }


def check_parts(
    core: str,
    head_mix: str | None,
    core_args: dict[str, Any] | None,
    head_mix_args: dict[str, Any] | None,
    lepe: int,
) -> None:
    """Raise InputError for an unknown core or head mix, for options that they do not take, and for a wrong ``lepe``."""
    check_choice("core", core, tuple(CORES))
    if head_mix not in (None, *HEAD_MIXES):
        raise InputError(f"head_mix must be None or one of {tuple(HEAD_MIXES)}, got {head_mix!r}.")
    if head_mix is None and head_mix_args not in (None, {}):
        raise InputError(f"head_mix_args={head_mix_args!r} needs a head_mix, one of {tuple(HEAD_MIXES)}.")
    _check_options("core_args", core, CORES[core], core_args)
    if head_mix is not None:
        _check_options("head_mix_args", head_mix, HEAD_MIXES[head_mix], head_mix_args)
    check_counts(0, lepe=lepe)
    if lepe and (lepe % 2 == 0 or head_mix is not None):
        raise InputError(f"lepe must be 0, or odd in a layer without a head mix, got {lepe}.")


def check_sees_later(core: AttentionCore, cpe: bool | str, lepe: int) -> None:
    """Raise InputError if a convolution stands beside a causal core."""
    if core.causal and (cpe or lepe):
        name, value = ("cpe", cpe) if cpe else ("lepe", lepe)
        causal = f"causal={core.causal!r}"
        raise InputError(f"{name}={value!r} cannot be joined with {causal}: the convolution sees later tokens.")


def _check_options(name: str, of: str, cls: type[nn.Module], options: object) -> None:
    check_keywords(f"{name} of {of!r}", {} if options is None else options, keywords(cls, leave_out=("spec",)))


# torch.fx records these calls whole: checks need real arguments.
@torch.fx.wrap
def _check_tokens(x: Tensor, grid: TokenGrid) -> None:
    if x.shape[1] != grid.num_tokens:
        shape = "x".join(map(str, grid.shape))
        raise InputError(
            f"{x.shape[1]} tokens given, but the layer expects {grid.num_tokens}: "
            f"{grid.num_prefix_tokens} prefix tokens and a {shape} grid."
        )


@torch.fx.wrap
def _as_projections_read(x: Tensor) -> Tensor:
    return in_autocast_type(x)


@torch.fx.wrap
def _assert_mixed(heads: int, places: int, *tensors: Tensor) -> None:
    """Hold a head mix to what it says of itself."""
    for y in tensors:
        assert y.shape[1:3] == (places, heads), (
            f"head mix: {tuple(y.shape)} is not {places} pseudo-tokens of {heads} heads"
        )


@torch.fx.wrap
def _refuse_in_graph(key_mask: Tensor | None) -> None:
    if key_mask is not None:
        raise InputError(
            "a graph of torch.fx takes no key_mask: call the layer itself, or compile it with torch.compile."
        )


@torch.fx.wrap
def _refuse_masks(attn_mask: Tensor | None, is_causal: bool, core: str, repeats: int) -> None:
    if attn_mask is not None or is_causal:
        alone = " whose tokens are not repeated by a head mix" if repeats > 1 else ""
        places = f" with {repeats} pseudo-tokens per token" if repeats > 1 else ""
        raise InputError(
            f"attn_mask and is_causal need the 'softmax' core{alone}, not {core}{places}. Give padding as a"
            " key_mask, bool [B, N], or as an attn_mask of keys alone, [B, 1, 1, N]."
        )
