"""Scores of generated images: Fréchet distance, KID, inception score, precision and recall; scores of clips.

The command is `headmix evaluate`. From Python:

    from headmix_vision.evaluation import ScoreRequest, evaluate
    scores = evaluate(ScoreRequest(metric="fid", real="digits", fake="samples/digits", features="digits")).scores
"""

from typing import TYPE_CHECKING, Any

from headmix_vision.evaluation.score_request import FvdRequest, MovingDigitsRequest, ScoreRequest
from headmix_vision.extras import require_extra

require_extra("eval", __name__)

if TYPE_CHECKING:
    from headmix_vision.evaluation.score_job import Scored, evaluate

__all__ = ["FvdRequest", "MovingDigitsRequest", "ScoreRequest", "Scored", "evaluate"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headmix_vision.evaluation import score_job  # imports torch

    return getattr(score_job, name)
