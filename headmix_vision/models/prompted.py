"""Transformers of diffusers that take a prompt, Wan and Sana, behind the interface of our generators.

B samples, C channels, *grid (T, H, W) of clips or (H, W) of images, L tokens of a prompt of width D.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from headmix_vision.errors import InputError, check_keywords
from headmix_vision.models.building import building
from headmix_vision.models.convert_sana import SanaMHLATransformer2DModel, sana_to_mhla
from headmix_vision.models.convert_wan import WanMHLATransformer3DModel, wan_to_mhla
from headmix_vision.models.converted import ConvertedModel
from headmix_vision.models.pipeline_folder import PIPELINES, part_of, read_pipeline
from headmix_vision.ops import TokenGrid

Prompt = Sequence[Tensor]
"""Embeddings [B, L, D], of Sana with the mask [B, L] of tokens that count."""

_CONVERSIONS: dict[str, Any] = {"WanTransformer3DModel": wan_to_mhla, "SanaTransformer2DModel": sana_to_mhla}
CONVERTED: dict[str, Any] = {cls.__name__: cls for cls in (WanMHLATransformer3DModel, SanaMHLATransformer2DModel)}
_OF_IMAGES = ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len", "guidance_embeds")


class PromptedTransformer(nn.Module):
    """A converted transformer of Wan or Sana that predicts the velocity of noisy latents from a prompt.

    Args:
        transformer: The converted transformer.

    Raises:
        InputError: If it takes more than latents, a time and a prompt.
    """

    takes_prompts = True
    num_classes = 0
    has_null_class = False
    frame_rate = block_frames = None

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        config = transformer.config
        further = [name for name in _OF_IMAGES if config.get(name)]
        if further or config.out_channels not in (None, config.in_channels):
            what = further[0] if further else f"out_channels={config.out_channels}"
            raise InputError(f"the transformer has {what}: only models that take latents and a prompt are trained")
        self.transformer = transformer
        self.is_wan = isinstance(transformer, WanMHLATransformer3DModel)
        patch, axes = config.patch_size, 3 if self.is_wan else 2
        self.patch_size = tuple(patch) if self.is_wan else (patch, patch)
        self.in_channels = self.out_channels = int(config.in_channels)
        self.input_size = (None,) * axes  # any
        self.prompt_width = int(config.text_dim if self.is_wan else config.caption_channels)
        self.time_scale = 1.0 if self.is_wan else float(config.timestep_scale)

    @property
    def blocks(self) -> nn.ModuleList:
        """Transformer blocks."""
        blocks: nn.ModuleList = self.transformer.blocks if self.is_wan else self.transformer.transformer_blocks
        return blocks

    @property
    def architecture(self) -> dict[str, Any]:
        """Arguments that make the transformer again."""
        return {name: value for name, value in self.transformer.config.items() if not name.startswith("_")}

    def check_size(self, grid: Sequence[int]) -> None:
        """Check that latents of a size, (T, H, W) or (H, W), have whole patches, positions, and tokens for each block.

        Raises:
            InputError: If they do not.
        """
        for axis, (size, patch) in enumerate(zip(grid, self.patch_size, strict=True)):
            if size % patch:
                raise InputError(f"size {size} of axis {axis} is not a multiple of the patch size {patch}")
        tokens = TokenGrid(tuple(size // patch for size, patch in zip(grid, self.patch_size, strict=True)))
        most = self.transformer.config.rope_max_seq_len if self.is_wan else max(tokens.shape)
        if max(tokens.shape) > most:
            raise InputError(f"the transformer has {most} rotary positions along an axis, the token grid is {tokens}")
        blocks: Any = self.blocks
        processors = [block.attn1.processor for block in blocks]
        for processor in [one for one in processors if hasattr(one, "mixing")][:1]:  # all have the same blocks
            processor.bind(tokens)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass (timm's name for it)."""
        if enable:
            self.transformer.enable_gradient_checkpointing()
        else:
            self.transformer.disable_gradient_checkpointing()

    def forward(self, x: Tensor, t: Tensor, y: Prompt) -> Tensor:
        """Return the velocity, as x [B, C, *grid], at times t [B] from 0 to 1000 for prompts y."""
        text, *masks = y
        given = {"encoder_attention_mask": masks[0]} if masks else {}
        velocity: Tensor = self.transformer(
            hidden_states=x,
            timestep=t * self.time_scale,
            encoder_hidden_states=text.to(x.dtype),
            return_dict=False,
            **given,
        )[0]
        return velocity


def open_prompted(
    folder: str, layers: Sequence[int] | None = None, options: dict[str, Any] | None = None
) -> PromptedTransformer:
    """Convert the transformer of a pipeline of Wan or Sana; one that is converted already stays as it is.

    Args:
        folder: The pipeline's folder.
        layers: Layers that become MHLA, from 0; all when None.
        options: Further options of `wan_to_mhla` or `sana_to_mhla`.

    Raises:
        InputError: If the folder is not such a pipeline, its transformer is neither Wan nor Sana or takes more than a
            prompt, a layer is out of range, or an option does not fit.
    """
    index = read_pipeline(folder)
    name, place = part_of(folder, "transformer"), Path(folder) / "transformer"
    wanted = PIPELINES[index["_class_name"]]
    if name not in (wanted, wanted.replace("Transformer", "MHLATransformer")):
        raise InputError(f"the transformer of {folder} is a {name}, it must be a {wanted}")
    for entry in ("boundary_ratio", "expand_timesteps"):
        if index.get(entry):
            raise InputError(f"{folder} has {entry}={index[entry]}: one transformer for all noise levels is trained")
    kind: Any = CONVERTED.get(name) or getattr(diffusers, name)
    try:
        with building(f"the transformer of {folder}", {}):
            model = kind.from_pretrained(str(place), torch_dtype=torch.float32)
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"the transformer of {folder} cannot be loaded: {' '.join(str(error).split())[:300]}"
        ) from None
    if not isinstance(model, ConvertedModel):
        convert = _CONVERSIONS[name]
        known = [option for option in inspect.signature(convert).parameters if option not in ("transformer", "layers")]
        check_keywords("model.model_args", options or {}, known)
        model = convert(model, layers=layers, **(options or {}))
    elif layers is not None or options:
        raise InputError(
            f"the transformer of {folder} is converted already: leave out model.layers and model.model_args"
        )
    return PromptedTransformer(model).train()


def make_prompted(name: str, architecture: dict[str, Any]) -> PromptedTransformer:
    """Make a converted transformer with new weights.

    Args:
        name: Its class, one of `CONVERTED`.
        architecture: As `PromptedTransformer.architecture`.

    Raises:
        InputError: If an option is unknown or does not fit.
    """
    kind = CONVERTED.get(name)
    if kind is None:
        raise InputError(f"{name!r} is not a converted transformer, it must be one of {', '.join(CONVERTED)}")
    check_keywords(name, architecture, [*kind._get_init_keys(kind) - {"self"}])
    return PromptedTransformer(kind(**architecture))
