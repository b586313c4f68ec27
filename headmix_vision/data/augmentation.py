"""Augment, crop and normalise images for classifiers, by timm's transforms."""

import re
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageOps
from torch import Tensor

from headmix_vision.data.batches import BatchedEnd
from headmix_vision.data.datasets.base import PIL_MODES, Transform
from headmix_vision.errors import InputError, check_counts, check_numbers

TENSOR_INTERPOLATIONS = ("bilinear", "bicubic", "nearest")
INTERPOLATIONS = (*TENSOR_INTERPOLATIONS, "box", "hamming", "lanczos")
ERASE_MODES = ("const", "rand", "pixel")
_NUMBER = r"\d+(\.\d*)?"
_POLICY = re.compile(
    rf"rand(-(mstd|mmax|inc|m|n|p){_NUMBER}|-t\w+)*|augmix(-(mstd|m|w|d|a|b){_NUMBER})*"
    rf"|(originalr?|v0r?|3a)(-mstd{_NUMBER})?"
)


@dataclass
class Augmentation:
    """Training augmentation, with timm's names and values. The defaults change nothing but the size.

    Args:
        scale: Range of the area of the random crop, as a share of the image. (1, 1) with ratio (1, 1) is the whole
            centre square.
        ratio: Range of the aspect ratio of the random crop.
        interpolation: Resizing of the crop: nearest, bilinear, bicubic, box, hamming, lanczos, or random (bilinear
            or bicubic). None: as in evaluation.
        hflip: Probability of a horizontal flip.
        vflip: Probability of a vertical flip.
        auto_augment: timm policy, for example rand-m9-mstd0.5-inc1. Needs decoded images, so not for digits.
        color_jitter: Strength of brightness, contrast and saturation jitter; as in timm, an auto_augment policy
            replaces it.
        reprob: Probability of erasing a random rectangle.
        remode: Fill of the erased rectangle: const, rand or pixel.
        recount: Largest number of erased rectangles.
        repeats: Repeated augmentation: each image this many times in a row, the epoch keeping its length.
        degrees: Random rotation in [-degrees, degrees], in degrees; like the next two for drawings on black.
        translate: Random shift, up to this share of the image size.
        rescale: Range of a random zoom factor.
    """

    scale: tuple[float, float] = (1.0, 1.0)
    ratio: tuple[float, float] = (1.0, 1.0)
    interpolation: str | None = None
    hflip: float = 0.0
    vflip: float = 0.0
    auto_augment: str | None = None
    color_jitter: float = 0.0
    reprob: float = 0.0
    remode: str = "pixel"
    recount: int = 1
    repeats: int = 1
    degrees: float = 0.0
    translate: float = 0.0
    rescale: tuple[float, float] = (1.0, 1.0)

    def check(self) -> None:
        """Raise InputError, naming the option, for a value that is out of range."""
        for name in ("hflip", "vflip", "reprob", "translate"):
            check_numbers(0, 1, **{f"augmentation.{name}": getattr(self, name)})
        for name in ("scale", "ratio", "rescale"):
            given = getattr(self, name)
            bounds = given if isinstance(given, (tuple, list)) else ()
            check_numbers(0, **{f"augmentation.{name}[{place}]": bound for place, bound in enumerate(bounds)})
            rising = len(bounds) == 2 and 0 < bounds[0] <= bounds[1]
            _require(rising, name, given, "(low, high) with 0 < low <= high")
        _require(self.scale[1] <= 1, "scale", self.scale, "at most 1")
        for name in ("recount", "repeats"):
            check_counts(1, **{f"augmentation.{name}": getattr(self, name)})
        for name in ("color_jitter", "degrees"):
            check_numbers(0, **{f"augmentation.{name}": getattr(self, name)})
        _require(self.remode in ERASE_MODES, "remode", self.remode, f"one of {', '.join(ERASE_MODES)}")
        if self.auto_augment is not None:
            # timm leaves out what it does not understand
            allowed = "a policy of timm, for example rand-m9-mstd0.5-inc1, or null"
            _require(bool(_POLICY.fullmatch(self.auto_augment)), "auto_augment", repr(self.auto_augment), allowed)
        if self.interpolation is not None:
            check_interpolation("augmentation.interpolation", self.interpolation, (*INTERPOLATIONS, "random"))

    @property
    def is_affine(self) -> bool:
        """Whether rotation, shift or zoom is on."""
        return bool(self.degrees or self.translate or tuple(self.rescale) != (1.0, 1.0))

    @property
    def is_idle(self) -> bool:
        """Whether an image of the model's input size stays as it is."""
        random = (self.hflip, self.vflip, self.auto_augment, self.color_jitter, self.reprob)
        return not (any(random) or self.is_affine) and tuple(self.scale) == tuple(self.ratio) == (1.0, 1.0)


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise InputError(f"augmentation.{name} must be {allowed}, got {value}")


def check_interpolation(option: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise InputError unless `value` is an allowed interpolation."""
    if value not in allowed:
        raise InputError(f"{option} must be one of {', '.join(allowed)}, got {value!r}")


def check_tensor_images(dataset: str, augmentation: Augmentation, interpolation: str) -> None:
    """Raise InputError for what cannot be done to images that come as tensors."""
    if augmentation.auto_augment is not None:
        raise InputError(f"augmentation.auto_augment needs decoded images; {dataset} are numbers, set it to null")
    check_interpolation(f"interpolation ({dataset})", interpolation, TENSOR_INTERPOLATIONS)
    if augmentation.interpolation is not None:
        allowed = (*TENSOR_INTERPOLATIONS, "random")
        check_interpolation(f"augmentation.interpolation ({dataset})", augmentation.interpolation, allowed)


def eval_config(
    net: Any, exact: bool, crop_pct: float | None = None, interpolation: str | None = None
) -> dict[str, Any]:
    """Find input size, mean, std, interpolation and crop of a timm model.

    Args:
        net: The model.
        exact: Take all pixels, bilinearly, unless the next two say otherwise; else what the model was made for.
        crop_pct: Centre crop, as a share of the resized image.
        interpolation: Resizing.

    Returns:
        timm's resolved data configuration.

    Raises:
        InputError: The model does not take 1 or 3 channels.
    """
    asked = {"crop_pct": crop_pct, "interpolation": interpolation}
    if exact:
        asked = {"crop_pct": crop_pct or 1.0, "interpolation": interpolation or "bilinear"}
    config = input_config(net, asked)
    if config["input_size"][0] not in PIL_MODES:
        raise InputError(f"the model takes {config['input_size'][0]} input channels, images have 1 or 3")
    return config


def input_config(net: Any, asked: dict[str, Any] | None = None) -> dict[str, Any]:
    """Resolve timm's data configuration of a model, with the input size that the model was made for or set to."""
    from timm.data import resolve_input_data_config

    config: dict[str, Any] = resolve_input_data_config(net, asked or {})
    size = getattr(getattr(net, "patch_embed", None), "img_size", None)
    if isinstance(size, (tuple, list)) and len(size) == 2:
        config["input_size"] = (config["input_size"][0], *size)
    return config


def train_transform(data_config: dict[str, Any], augmentation: Augmentation) -> Transform:
    """Random transform of one training image.

    Args:
        data_config: timm's resolved data configuration (input_size, interpolation, mean, std).
        augmentation: What to do; checked by its `check`.

    Returns:
        A function from a PIL image, or a float32 tensor [C, H, W] in [0, 1], to a normalised float32 tensor of the
        model's input size. It draws from the global generators (see `seeding.seeded`). It normalises whole batches
        where it can, as a `BatchedEnd`.

    Raises:
        InputError: timm does not understand the auto_augment policy.
    """
    from timm.data import auto_augment, create_transform
    from timm.data.transforms import MaybePILToTensor, MaybeToTensor
    from torchvision import transforms

    for name in ("Posterize", "PosterizeIncreasing", "PosterizeOriginal"):
        auto_augment.NAME_TO_OP[name] = _posterize
    options: dict[str, Any] = {
        "scale": augmentation.scale,
        "ratio": augmentation.ratio,
        "interpolation": augmentation.interpolation or data_config["interpolation"],
        "hflip": augmentation.hflip,
        "vflip": augmentation.vflip,
        "auto_augment": augmentation.auto_augment,
        "color_jitter": augmentation.color_jitter or None,
        "re_prob": augmentation.reprob,
        "re_mode": augmentation.remode,
        "re_count": augmentation.recount,
        "mean": data_config["mean"],
        "std": data_config["std"],
    }
    try:
        parts = create_transform(data_config["input_size"], is_training=True, separate=True, **options)
    except (AssertionError, KeyError) as error:
        raise InputError(f"augmentation.auto_augment {augmentation.auto_augment!r} is not a timm policy") from error
    geometry, colour, normalise = parts
    steps = [*geometry.transforms, *colour.transforms]
    if augmentation.is_affine:
        # Between decoding and normalisation, where black, the fill of the uncovered border, is 0.
        steps += [MaybeToTensor(), _random_affine(augmentation)]
    to_tensor, scale, *erase = normalise.transforms
    if erase:  # draws for each image, which must be normalised before
        return transforms.Compose([*steps, to_tensor, scale, *erase])
    scale.inplace = True
    return BatchedEnd(transforms.Compose([*steps, MaybePILToTensor()]), transforms.Compose([_to_unit_range, scale]))


def _to_unit_range(pixels: Tensor) -> Tensor:
    """Scale uint8 pixels as torchvision's ToTensor does; float32 pixels are in [0, 1] already."""
    return pixels if pixels.is_floating_point() else pixels.float().div_(255)


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Keep the highest bits of each number, as timm does: Pillow 13 refuses to keep none, as timm 1.0.31 asks."""
    return image if bits >= 8 else ImageOps.posterize(image, bits) if bits else image.point(lambda _: 0)


def _random_affine(augmentation: Augmentation) -> Transform:
    from torchvision.transforms import InterpolationMode, v2

    return v2.RandomAffine(
        degrees=augmentation.degrees,
        translate=(augmentation.translate, augmentation.translate),
        scale=tuple(augmentation.rescale),
        interpolation=InterpolationMode.BILINEAR,
    )


def eval_transform(data_config: dict[str, Any]) -> Transform:
    """Deterministic transform of one image for evaluation and prediction: resize, centre crop, normalise.

    Args:
        data_config: timm's resolved data configuration (input_size, interpolation, crop_pct, crop_mode, mean, std).
    """
    from timm.data import create_transform

    return create_transform(**data_config, is_training=False)


def normalize(data_config: dict[str, Any]) -> Transform:
    """Normalisation alone, of a batch too: what the other transforms leave of an image that already has its size."""
    from torchvision.transforms import Normalize

    return Normalize(data_config["mean"], data_config["std"])
