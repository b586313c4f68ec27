"""Requests for analyses, which `headmix_vision.analysis.analysis_job.analyze` takes, without an import of torch."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headmix_vision.errors import InputError, check_counts, check_request

NOISE_LEVEL = 0.5


@dataclass(frozen=True, kw_only=True)
class MixingRequest:
    """Request for pictures of the learned mixing of heads and token blocks.

    Args:
        model: Run directory, `.ckpt`, export, or the name of a model that comes with weights.
        out: Folder to write.
        checkpoint: Of a run directory: `best`, `last` or a file; when None the best, of a generator the last.
        raw: Use the weights being trained, not their EMA.
        dry_run: Check everything and write nothing.
    """

    model: Path
    out: Path
    checkpoint: str | None = None
    raw: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        check_request(self)


@dataclass(frozen=True, kw_only=True)
class SensitivityRequest:
    """Request for the error at the output of a teacher when one attention layer alone is swapped.

    Args:
        teacher: Run directory, `.ckpt`, export, name in timm, `local-dir:` with a folder of timm or transformers, or
            pipeline folder of Wan or Sana.
        out: Folder to write.
        data: Name of a data set, such as digits, folder, torch/NAME, or latents for a pipeline; no labels are needed.
        student: Run of `headmix distill`, whose trained layers are taken; untrained layers when None.
        teacher_checkpoint: Weights of a teacher that is named in timm.
        core: Core of untrained layers.
        head_mix: Mix of untrained layers across feature heads.
        block_grid: Blocks along each axis of untrained layers; when None 4 x 4, of Wan 3 x 5 x 10.
        keep: Layers that may stay as they are: the most sensitive ones are named.
        img_size: Height and width of the images; the teacher's when None.
        dry_run: Check everything and write nothing.
        root: Folder or file of the data.
        split: Split of the data.
        images: Number of images, evenly spaced over the split.
        batch_size: Images at a time.
        background: Colour behind transparent pixels.
        device: Device that computes, in float32; a GPU if there is one when None.

    Raises:
        InputError: A number out of range, or options of untrained layers beside a student.
    """

    teacher: str
    out: Path
    data: str
    student: Path | None = None
    teacher_checkpoint: str | None = None
    core: str = "mhla"
    head_mix: str | None = None
    block_grid: tuple[int, ...] | None = None
    keep: int = 0
    img_size: int | None = None
    dry_run: bool = False
    root: str | None = None
    split: str = "validation"
    images: int = 64
    batch_size: int = 32
    background: str = "white"
    device: str | None = None

    def __post_init__(self) -> None:
        check_request(self)
        check_counts(0, keep=self.keep)
        check_counts(1, batch_size=self.batch_size)
        if self.img_size is not None:
            check_counts(1, img_size=self.img_size)
        given = {"core": self.core != "mhla", "head_mix": self.head_mix, "block_grid": self.block_grid}
        for name, value in given.items() if self.student is not None else ():
            if value:
                raise InputError(
                    f"{name} applies to untrained layers: leave it out, or leave out student {self.student}"
                )


@dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """Settings of all requests for attention matrices.

    Args:
        model: Networks: each a run directory, `.ckpt`, export, the name of a model that comes with weights, or
            `local-dir:` with a folder that timm or transformers has saved; also with timm's softmax attention.
        out: Folder to write.
        data: Name of a data set, such as digits, folder, torch/NAME, latents or moving_digits.
        checkpoint: Of a run directory: `best`, `last` or a file; when None the best, of a generator the last.
        raw: Use the weights being trained, not their EMA.
        dry_run: Check everything and write nothing.
        root: Folder or file of the data.
        split: Split of the data.
        images: Number of images, evenly spaced over the split.
        background: Colour behind transparent pixels.
        noise_level: Noise of the images of a generator, 0 to 1.
        layers: Numbers of attention layers, from 0; all when None, for maps the last.
        device: Device that computes, in float64; a GPU if there is one when None.

    Raises:
        InputError: A network that is named twice.
    """

    model: tuple[Path, ...]
    out: Path
    data: str
    checkpoint: str | None = None
    raw: bool = False
    dry_run: bool = False
    root: str | None = None
    split: str = "validation"
    images: int = 8
    background: str = "white"
    noise_level: float = NOISE_LEVEL
    layers: tuple[int, ...] | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        check_request(self)
        object.__setattr__(self, "model", tuple(map(Path, self.model)))
        if len(set(self.model)) < len(self.model):
            raise InputError("--model names a network twice")


@dataclass(frozen=True, kw_only=True)
class ProfileRequest(AttentionRequest):
    """Request for numbers of attention matrices, by layer and head.

    Args:
        kind: Rank and stable rank, or entropy and distance.
        queries: Number of query tokens, drawn by a fixed seed; all when None.

    Raises:
        InputError: Also for a number of queries below 1.
    """

    kind: Literal["rank", "entropy"]
    queries: int | None = None

    def __post_init__(self) -> None:
        if self.queries is not None:
            check_counts(1, queries=self.queries)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class MapsRequest(AttentionRequest):
    """Request for attention maps of query tokens.

    Args:
        tokens: Query tokens by row and column, of clips by frame, row and column; the middle when empty.

    Raises:
        InputError: Also for a token that is named twice.
    """

    images: int = 1
    tokens: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if twice := [place for place, count in Counter(self.tokens).items() if count > 1]:
            raise InputError(f"--tokens names {','.join(map(str, twice[0]))} twice")
        super().__post_init__()
