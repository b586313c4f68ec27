"""Settings of the table of whole models, in the order in which `bench_models` runs them, and what each is beside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import timm

from headmix_lab.model_families import Size, split_spelling
from headmix_vision.layers.cores import CORES


def equal_softmax(spelling: str, cpe: bool = True) -> str | None:
    """Return the model that differs in its core alone, softmax; None for models without a core in their name.

    A classifier of ours with softmax has a class token by default, its equal has none. Without ``cpe`` the equal model
    has no convolution of tokens either.
    """
    name, options = split_spelling(spelling)
    words = name.split("_")
    if not (cores := [word for word in words if word in CORES]):
        return None
    if words[0] == "deit" and cores != ["softmax"]:
        options = ["class_token=False", "global_pool=avg", *options]
    options = [option for option in options if cpe or option != "cpe=True"]
    name = "_".join("softmax" if word == cores[0] else word for word in words)
    return f"{name}:{','.join(options)}" if options else name


def timm_deit(spelling: str) -> str | None:
    """Return timm's DeiT of the size and options of one of ours; None for other models."""
    name, given = split_spelling(spelling)
    theirs = f"deit_{name.split('_')[-1]}_patch16_224"
    options = [option for option in given if option.partition("=")[0] in SIZE_OPTIONS]
    return ":".join([theirs, *([",".join(options)] if options else [])]) if timm.is_model(theirs) else None


class Setting(NamedTuple):
    """Models that are timed in turns, and how."""

    models: tuple[str, ...]
    size: Size
    batch: int
    mode: str
    compile: str


SIZE_OPTIONS = ("depth", "embed_dim", "num_heads")
TINY_SIZES: dict[Size, Size] = {224: 64, (16, 32, 32): (4, 8, 8)}
TINY_OPTIONS = "depth=1,embed_dim=48,num_heads=2"
COMPILE = ("default", "none", "reduce-overhead")
# Candidates, sizes and batches of a kind; the slow compilation of Head-in-Head holds no other row up.
KINDS: dict[str, tuple[tuple[str, ...], tuple[Size, ...], tuple[int, ...]]] = {
    "deit_s": (("deit_mhla_small", "deit_mhla_small:cpe=True", "deit_linear_small"), (224, 512, 384, 1024), (256, 32)),
    "deit_s_hih": (("deit_hih_small",), (224, 512, 384, 1024), (256, 32)),
    "dit_s": (("dit_mhla_s_2", "dit_linear_s_2"), (32, 64, 128), (256, 32)),
    "dit_s_hih": (("dit_hih_s_2",), (32, 64, 128), (256, 32)),
    "dit_xl": (("dit_mhla_xl_2", "dit_linear_xl_2"), (32, 64, 128), (32, 8)),
    "dit_xl_hih": (("dit_hih_xl_2",), (32, 64, 128), (32, 8)),
    "video": (("dit_video_mhla_s_2", "dit_video_linear_s_2", "dit_video_hih_s_2"), ((16, 32, 32),), (32, 8)),
}
# Kind, size, batch and compile mode of the settings that tell a user most, in that order.
FIRST = (
    ("deit_s", 224, 256, "default"), ("deit_s", 224, 32, "none"), ("dit_s", 32, 256, "default"),
    ("deit_s", 224, 256, "reduce-overhead"), ("deit_s", 512, 32, "default"), ("deit_s_hih", 224, 256, "default"),
    ("video", (16, 32, 32), 32, "default"), ("dit_xl", 64, 32, "default"), ("deit_s", 1024, 32, "default"),
    ("dit_xl", 128, 8, "default"), ("dit_s", 32, 256, "reduce-overhead"), ("deit_s", 384, 256, "default"),
)  # fmt: skip


def whole_table(kinds: Sequence[str], modes: Sequence[str], tiny: bool) -> Iterator[Setting]:
    """Yield the settings of these kinds, first what tells a user most; one of each for a CPU if tiny."""
    rest = [(kind, *x) for kind, (_, sizes, batches) in KINDS.items() for x in product(sizes, batches, COMPILE)]
    table = list(dict.fromkeys((*FIRST, *rest)))
    if tiny:
        table = [(kind, TINY_SIZES.get(sizes[0], 8), 2, "none") for kind, (_, sizes, _) in KINDS.items()]
    for (kind, size, batch, compile_mode), mode in product(table, modes):
        models = (spelling.partition(":") for spelling in KINDS[kind][0])
        options = [TINY_OPTIONS] if tiny else []
        spelled = (":".join(filter(None, [name, ",".join([*options, *filter(None, [x])])])) for name, _, x in models)
        if kind in kinds:
            yield Setting(tuple(spelled), size, batch, mode, compile_mode)
