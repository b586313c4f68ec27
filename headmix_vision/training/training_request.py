"""The request for training, which `headmix_vision.training.train` takes, without an import of torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headmix_vision.errors import check_request


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """Request for training, or for the validation, test or predictions of a run.

    Args:
        kind: What is trained; `distilled` is a generator whose attention layers learn from a teacher.
        words: Subcommand (`fit`, `validate`, `test`, `predict`) and options, as on the command line:
            `("fit", "-c", "digits", "--trainer.max_epochs", "3")`. An option has the type of the argument that it sets.
        default_config: Recipe of `fit` where the words name none.

    Raises:
        InputError: An unknown kind.
    """

    kind: Literal["classifier", "generator", "distilled"]
    words: Sequence[str]
    default_config: str | None = None

    def __post_init__(self) -> None:
        check_request(self)
