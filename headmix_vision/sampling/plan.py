"""What is to be sampled: settings on which the pixels depend, and the label and random numbers of each sample."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from headmix_vision.data.seeding import derive_seed
from headmix_vision.diffusion.guidance import Guidance
from headmix_vision.errors import InputError


@dataclass(frozen=True)
class SamplingPlan:
    """Samples 0, 1, 2, ...; sample i depends on these settings and on i alone.

    Args:
        seed: Base seed.
        classes: Labels, which take turns; None for an unconditional model.
        steps: Sampling steps.
        scheduler: Name of the sampler.
        guidance: Classifier-free guidance.
        size: Height and width of an image in pixels.
    """

    seed: int
    classes: tuple[int, ...] | None
    steps: int
    scheduler: str
    guidance: Guidance
    size: tuple[int, int]

    def labels(self, indices: Iterable[int]) -> list[int] | None:
        """Labels of samples."""
        return None if self.classes is None else [self.classes[index % len(self.classes)] for index in indices]

    def generator(self, index: int) -> torch.Generator:
        """Random numbers of a sample; on the CPU, so that every device starts from the same noise."""
        return torch.Generator().manual_seed(derive_seed(self.seed, index))

    def settings(self) -> dict[str, Any]:
        """The settings as plain values for a JSON file."""
        values = asdict(self)
        classes = list(self.classes) if self.classes is not None else None
        interval = list(self.guidance.interval)
        return {
            **values,
            "classes": classes,
            "size": list(self.size),
            "guidance": {**values["guidance"], "interval": interval},
        }


def parse_classes(text: str | None, num_classes: int) -> tuple[int, ...] | None:
    """Labels of the option `--classes`: `balanced` (all take turns) or numbers with commas.

    Raises:
        InputError: For anything else, a label out of range, or classes of an unconditional model.
    """
    if num_classes == 0:
        if text is not None:
            raise InputError(f"--classes {text} given, but the model is unconditional")
        return None
    if text is None or text == "balanced":
        return tuple(range(num_classes))
    try:
        labels = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--classes must be 'balanced' or numbers such as 0,3,7, got {text!r}") from None
    bad = [label for label in labels if not 0 <= label < num_classes]
    if bad:
        raise InputError(f"class label {bad[0]} is out of range: the model takes 0 to {num_classes - 1}")
    return labels


def batches(indices: Sequence[int], batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """The samples of one process, in batches."""
    whole = [list(indices[i : i + batch_size]) for i in range(0, len(indices), batch_size)]
    return whole[rank::world_size]
