"""Scores of generated images: Fréchet distance, KID, inception score, precision and recall; scores of clips.

The command is `headmix evaluate`. From Python:

    from headmix_vision.evaluation import ScoreRequest, evaluate
    scores = evaluate(ScoreRequest(metric="fid", real="digits", fake="samples/digits", features="digits")).scores
"""

from typing import TYPE_CHECKING

from headmix_vision.errors import imported_when_used, require_extra
from headmix_vision.evaluation.score_request import FvdRequest, MovingDigitsRequest, ProbeRequest, ScoreRequest

require_extra("eval", __name__)

if TYPE_CHECKING:
    from headmix_vision.evaluation.scores import Scored, evaluate

__all__ = ["FvdRequest", "MovingDigitsRequest", "ProbeRequest", "ScoreRequest", "Scored", "evaluate"]

__getattr__ = imported_when_used(__name__, "scores", __all__)
