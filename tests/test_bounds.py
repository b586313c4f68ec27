"""Numbers at their bounds are taken, the next ones beyond are refused by name."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm

from headmix_vision.data import ClassificationData, GenerationData
from headmix_vision.data.augmentation import Augmentation
from headmix_vision.data.clip_frames import ClipConfig
from headmix_vision.data.datasets.canvas import CanvasDigits
from headmix_vision.data.datasets.moving_digits import MovingDigits
from headmix_vision.data.stills import StillsConfig
from headmix_vision.diffusion.denoising import Guidance
from headmix_vision.errors import InputError
from headmix_vision.evaluation.sample_sets import ClipSampling
from headmix_vision.layers.attention import HeadMixAttention
from headmix_vision.layers.block_mixing import MixingMatrix
from headmix_vision.models.compress import compress_heads
from headmix_vision.models.converted import check_layers
from headmix_vision.ops.sample_grids import SampleGrids
from headmix_vision.ops.token_blocks import TokenBlocks
from headmix_vision.runs.teachers import _preprocessing
from headmix_vision.training import options

INF = math.inf
WIDTH, VIT, DIT = 16, "deit_mhla_digits", "dit_mhla_digits"


def augment(**values: Any) -> None:
    Augmentation(**values).check()


def layer(dim: int = WIDTH, num_heads: int = 2, core: str = "mhla", mix: str | None = None, **values: Any) -> None:
    HeadMixAttention(dim, num_heads if dim > 1 else 1, core, mix, **values)


def of_core(core: str, **values: Any) -> None:
    layer(core=core, core_args=values)


def of_mix(mix: str, **values: Any) -> None:
    layer(mix=mix, head_mix_args=values)


def cut(block_grid: int) -> None:
    layer(grid=(4, 4), block_grid=(block_grid, 1))


def cut_again(block_grid: int) -> None:
    HeadMixAttention(WIDTH, 2, "mhla", grid=(4, 4), block_grid=(2, 2)).set_block_grid((block_grid, 1))


def model(name: str, **values: Any) -> None:
    timm.create_model(name, **{"depth": 2, "embed_dim": WIDTH, "num_heads": 2, **values}, device="meta")


def parted(axis: int) -> None:
    timm.create_model(DIT, device="meta").context_parallel(None, axis=axis)


def compressed(component_heads: int) -> None:
    compress_heads(timm.create_model("deit_softmax_digits", depth=1, embed_dim=16, num_heads=2), component_heads)


def images(**values: Any) -> None:
    ClassificationData(**{"dataset": "digits", "num_workers": 0, **values})


def clips(frames: int) -> None:
    MovingDigits("train", (frames, 16, 16))


COUNTS: list[tuple[Callable[..., Any], str, float, float]] = [
    (options.SampleGridConfig, "every_n_steps", 1, INF),
    (options.SampleGridConfig, "rows", 1, 1000),
    (options.SampleGridConfig, "steps", 1, INF),
    (options.FidConfig, "every_n_epochs", 1, INF),
    (options.FidConfig, "num", 2, 1_000_000),
    (options.FidConfig, "steps", 1, 1_000_000),
    (options.FidConfig, "batch_size", 2, 1_000_000),
    (options.AnalysisConfig, "every_n_epochs", 1, INF),
    (options.AnalysisConfig, "images", 1, INF),
    (options.AnalysisConfig, "queries", 1, INF),
    (options.EarlyStoppingConfig, "patience", 1, INF),
    (options.AttentionStage, "steps", 0, 100_000_000),
    (augment, "recount", 1, INF),
    (augment, "repeats", 1, INF),
    (layer, "dim", 1, INF),
    (layer, "num_heads", 1, INF),
    (cut, "block_grid", 1, INF),
    (layer, "lepe", 0, INF),
    (cut_again, "block_grid", 1, INF),
    (partial(of_core, "hih"), "num_sub_heads", 1, INF),
    (partial(of_core, "hih"), "conv_size", 0, INF),
    (partial(of_mix, "iha"), "pseudo_heads", 1, INF),
    (partial(of_mix, "mea"), "key_value_heads", 1, INF),
    (partial(of_mix, "mea"), "component_heads", 1, INF),
    (partial(MixingMatrix, TokenBlocks.from_grid((4, 4), (2, 2)), init="identity"), "num_heads", 1, INF),
    *((partial(model, VIT), name, 1, INF) for name in ("depth", "embed_dim", "in_chans", "num_heads")),
    *((partial(model, VIT), name, 0, INF) for name in ("num_classes", "reg_tokens", "softmax_every")),
    (partial(model, "deit_mhla_iha_digits"), "global_every", 0, INF),
    *((partial(model, DIT), name, 1, INF) for name in ("depth", "embed_dim", "in_channels", "num_heads")),
    *((partial(model, DIT), name, 1, INF) for name in ("input_size", "patch_size", "block_grid")),
    (partial(model, DIT), "num_classes", 0, INF),
    (parted, "axis", 0, 1),
    (compressed, "component_heads", 1, 2),
    (lambda layer: check_layers([layer], 3), "layer", 0, 2),
    (partial(SampleGrids.of, [(2, 3), (4, 1)]), "num_tokens", 6, INF),
    (images, "batch_size", 1, INF),
    (images, "eval_batch_size", 1, INF),
    (images, "seed", 0, INF),
    (images, "num_workers", 0, INF),
    (images, "holdout_every", 2, INF),
    (images, "shuffle_shards", 1, INF),
    (partial(CanvasDigits, "train"), "length", 1, INF),
    (partial(MovingDigits, "train"), "length", 1, INF),
    (clips, "frames", 1, INF),
    (ClipConfig, "frame_stride", 1, INF),
    *((ClipSampling, name, 1, INF) for name in ("count", "frames", "stride")),
]
NUMBERS: list[tuple[Callable[..., Any], str, float, float]] = [
    (options.OptimizerConfig, "weight_decay", 0, INF),
    *((options.ScheduleConfig, name, 0, INF) for name in ("warmup_epochs", "warmup_lr", "min_lr")),
    *((options.MixupConfig, name, 1e-6, 1e6) for name in ("mixup_alpha", "cutmix_alpha")),
    *((options.MixupConfig, name, 0, 1) for name in ("prob", "switch_prob")),
    (options.SampleGridConfig, "guidance", 0, INF),
    (options.FidConfig, "guidance", 0, INF),
    (options.EarlyStoppingConfig, "min_delta", 0, INF),
    (options.FeaturesStage, "warmup_share", 0, 1),
    (options.LabelsStage, "distill_weight", 0, INF),
    (Guidance, "scale", 0, 1000),
    *((augment, name, 0, 1) for name in ("hflip", "vflip", "reprob", "translate")),
    *((augment, name, 0, INF) for name in ("color_jitter", "degrees")),
    (StillsConfig, "share", 0, 1),
    (partial(of_core, "mhla"), "eps", 0, INF),
    (partial(of_core, "hih"), "beta_max", 0, 2),
    *((partial(model, VIT), name, 0, 1) for name in ("drop_rate", "pos_drop_rate", "proj_drop_rate", "drop_path_rate")),
    *((partial(model, name), "mlp_ratio", 0, INF) for name in (VIT, DIT)),
    (partial(model, DIT), "class_dropout", 0, 1),
    (images, "max_unreadable", 0, 1),
    (images, "crop_pct", 0, 1),
    (partial(GenerationData, dataset="digits"), "hflip", 0, 1),
]


def prepared(**found: Any) -> None:
    _preprocessing("config.json", found)


NUMBERS += [
    (prepared, "mean", -1e6, 1e6),
    (prepared, "std", 1e-6, 1e6),
    (prepared, "crop_pct", 1e-3, 10),
]


def refuses(make: Callable[..., Any], name: str, value: float) -> bool:
    """Whether a value is refused for its size; what else is wrong with it is another matter."""
    try:
        make(**{name: value})
    except InputError as error:
        return "must be a whole number" in str(error) or "must be a finite number" in str(error)
    return False


@pytest.mark.parametrize(
    ("make", "name", "least", "most"), COUNTS + NUMBERS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_the_bound_is_taken_and_the_next_number_is_not(
    make: Callable[..., Any], name: str, least: float, most: float
) -> None:
    whole = (make, name, least, most) in COUNTS
    below, above = (least - 1, most + 1) if whole else (math.nextafter(least, -INF), math.nextafter(most, INF))
    assert refuses(make, name, below) and not refuses(make, name, least)
    if most < INF:
        assert refuses(make, name, above) and not refuses(make, name, most)
    elif not whole:
        assert refuses(make, name, INF) and refuses(make, name, math.nan)


@pytest.mark.parametrize("name", [VIT, DIT])
def test_an_mlp_may_be_of_one_channel(name: str) -> None:
    model(name, mlp_ratio=1 / WIDTH)
    with pytest.raises(InputError, match="leaves the MLP no width"):
        model(name, mlp_ratio=0.99 / WIDTH)


POSITIVE: list[tuple[Callable[..., Any], str]] = [
    (options.FeaturesStage, "lr"),
    (options.LabelsStage, "temperature"),
    (ClipConfig, "frame_rate"),
    (partial(MovingDigits, "train"), "frame_rate"),
]
FLAGS: list[tuple[Callable[..., Any], str]] = [
    *((layer, name) for name in ("qk_norm", "input_norm", "output_norm", "output_gate")),
    *((partial(of_core, "mhla"), name) for name in ("mixing_trainable", "mixing_clip", "mixing_per_head", "causal")),
    *((partial(model, DIT), name) for name in ("learned_variance", "sit_time")),
    (images, "skip_unlabelled"),
]
CHOICES: list[tuple[Callable[..., Any], str]] = [
    (layer, "core"),
    *((partial(of_core, "mhla"), name) for name in ("normalizer", "feature_map", "impl", "mixing_init")),
    *((partial(of_core, "hih"), name) for name in ("mask", "scans", "impl")),
    *((partial(of_mix, "iha"), name) for name in ("collapse", "impl")),
    *((partial(model, VIT), name) for name in ("global_pool", "pos_embed", "weight_init")),
    (partial(model, DIT), "positions"),
]


@pytest.mark.parametrize(("make", "name"), POSITIVE)
def test_what_must_be_above_zero_may_be_small_and_not_zero(make: Callable[..., Any], name: str) -> None:
    make(**{name: 1e-9})
    for value in (0, -1.0, INF, math.nan, True):
        with pytest.raises(InputError, match=f"{name} must be a finite number above 0"):
            make(**{name: value})


@pytest.mark.parametrize(("make", "name"), FLAGS)
def test_flags_are_true_or_false(make: Callable[..., Any], name: str) -> None:
    for value in ("false", 1):
        with pytest.raises(InputError, match=f"{name} must be true or false"):
            make(**{name: value})


@pytest.mark.parametrize(("make", "name"), CHOICES)
def test_choices_are_listed(make: Callable[..., Any], name: str) -> None:
    with pytest.raises(InputError, match=f"{name.replace('mixing_', 'mixing ')} must be one of"):
        make(**{name: "other"})


@pytest.mark.parametrize(
    "make", [partial(model, VIT), partial(model, DIT), partial(of_core, "hih"), partial(of_mix, "iha")]
)
def test_unknown_names_are_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match="other"):
        make(other=1)
