"""The base class of attention cores, and the sizes from which a layer builds its core and its head mix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headmix_vision.errors import InputError
from headmix_vision.layers.positions import Rotation
from headmix_vision.ops import SampleGrids, TokenGrid
from headmix_vision.registry import Registry


@dataclass(frozen=True)
class LayerSpec:
    """The sizes of an attention layer, from which its head mix and its core are built.

    Args:
        dim: C, the width of the layer's input.
        num_heads: H, the heads that the module gets.
        head_dim: D.
        grid: the tokens that it gets, prefix tokens and repeats included.
        block_grid: blocks along each axis of the grid; only block-wise cores read it.
        attn_drop: dropout on attention weights; only a core that forms them accepts more than 0.
        averages_places: of the core, see :class:`~headmix_vision.layers.AttentionCore`.
        device, dtype: of the parameters.
    """

    dim: int
    num_heads: int
    head_dim: int
    grid: TokenGrid
    block_grid: tuple[int, ...]
    attn_drop: float = 0.0
    averages_places: bool = True
    device: torch.device | None = None
    dtype: torch.dtype | None = None

    @property
    def factory(self) -> dict[str, Any]:
        """Device and type as keyword arguments of a module."""
        return {"device": self.device, "dtype": self.dtype}


class AttentionCore(nn.Module):
    """Base class of attention cores, which compute head outputs: ``core(q, k, v, grid)``.

    A core is built from the :class:`LayerSpec` that the head mix gives it, and from options of its own.

    Shape:
        ``q``, ``k`` [B, N, H, D] and ``v`` [B, N, H, Dv] in raster order -> [B, N, H, Dv]. ``grid`` holds the N tokens
        of this call, whose number may differ from the spec. A core that can rotate (``check_rotation``) is called with
        the further argument ``rotation`` where positions are rotary. Under context parallelism a core that supports it
        (``check_ranks``) is called with the further argument ``ranks``. Tensors and rotation then hold this rank's
        tokens, and ``grid`` is the full grid. A core that supports padding (``check_padding``) is called with the
        further argument ``key_mask`` [B, N] where there is some, True for real tokens: outputs of real tokens do not
        depend on padding, and outputs of padding are zero. Where samples have grids of their own, the further argument
        ``sample_grids`` holds them, and ``grid`` is the padded sequence.

    Attributes:
        forms_weights: the core forms a weight for each pair of tokens; it accepts ``attn_drop`` and is called with the
            further arguments ``attn_mask`` and ``is_causal``.
        reads_input: the core is called with the further argument ``x``, the layer's input [B, N / repeats, C].
        averages_places: where the pseudo-tokens of a token have equal keys, the core reads the mean of their values;
            False where the first alone is written at the start.
        causal: True where tokens see none that come later, ``"rows"`` where they see no later row of blocks along the
            first axis; the core can then take them in pieces (``stream``).
        float32_parameters: the core has parameters that bfloat16 is too coarse for: sharded training gathers the blocks
            of its models in float32.
        layer_options: options of the layer that models of this core have on unless told otherwise.

    Raises:
        InputError: if dropout is asked of a core that forms no weights.
    """

    forms_weights: ClassVar[bool] = False
    reads_input: ClassVar[bool] = False
    averages_places: ClassVar[bool] = True
    causal: bool | str = False
    float32_parameters: ClassVar[bool] = False
    layer_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        if spec.attn_drop and not self.forms_weights:
            name = type(self).__name__
            raise InputError(f"attn_drop={spec.attn_drop} needs the 'softmax' core: {name} forms no weights.")
        self.dim, self.num_heads, self.head_dim = spec.dim, spec.num_heads, spec.head_dim

    def bind(self, grid: TokenGrid) -> Callable[..., Any]:
        """Return the call of this core on the tokens of a grid.

        A core whose blocks, index tables or order of tokens follow from the grid makes them here, once. It returns a
        :class:`~headmix_vision.ops.dispatch.Bound`, which is kept for equal grids and options, and which its
        ``forward`` calls with tensors alone. A bound call holds no weights: layers share it, and no state dict has it.
        """
        return partial(self, grid=grid)

    def flops(self, grid: TokenGrid) -> int:
        """Return the operations of the method for one image, multiply and add as two, whatever kernel computes it.

        Lists of models leave out the operations of a core that does not override this.
        """
        raise NotImplementedError

    def linear_map(
        self, q: Tensor, k: Tensor, v: Tensor, grid: TokenGrid, **arguments: Any
    ) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """Return the core as a linear map of values, and the values for which it gives what the core computes.

        The matrix of this map is the attention matrix. A core that changes its values first overrides this.
        """
        return lambda values: self(q, k, values, grid, **arguments), v

    def stream(
        self, q: Tensor, k: Tensor, v: Tensor, grid: TokenGrid, state: Any = None, *, rotation: Rotation | None = None
    ) -> tuple[Tensor, Any]:
        """Compute the head outputs of the next tokens of a grid, and the state after them.

        Args:
            q, k, v: of the next tokens in raster order, [B, n, H, D] and [B, n, H, Dv].
            grid: all tokens, those before and to come included. Of ``causal="rows"`` its other axes alone are read.
            state: after the tokens before; None at the start.
            rotation: of the next tokens, for a core that can rotate.

        Raises:
            InputError: if the core is not causal, or the tokens end where no piece may end.
        """
        raise InputError(f"{type(self).__name__} cannot take tokens in pieces: this needs 'mhla' with causal=True.")

    def check_rotation(self) -> None:
        """Raise InputError if the core cannot take rotary positions; it then has no argument ``rotation``."""
        raise InputError(f"{type(self).__name__} takes no rotary positions.")

    def check_padding(self, sample_grids: SampleGrids | None) -> None:
        """Raise InputError if the core cannot leave out padding, or cannot take a grid for each sample."""
        raise InputError(f"{type(self).__name__} takes no key mask.")

    def check_ranks(self) -> None:
        """Raise InputError if tokens of a sample cannot lie on several ranks; there is then no argument ``ranks``."""
        raise InputError(
            f"{type(self).__name__} needs all tokens: only MHLA and linear attention share them between ranks."
        )

    def set_grid(self, grid: TokenGrid) -> None:
        """Adopt another token grid; most cores do not depend on it."""

    def set_block_grid(self, block_grid: tuple[int, ...]) -> None:
        """Cut the token grid into other blocks.

        Raises:
            InputError: if the core has no blocks.
        """
        raise InputError(f"{type(self).__name__} has no token blocks.")


CORES: Registry[type[AttentionCore]] = Registry()
