"""Training with Lightning: modules, callbacks, run directory, options; the commands are `headmix train-cls` and so on.

from headmix_vision.training import TrainingRequest, train
print(train(TrainingRequest(kind="classifier", words=("fit", "-c", "digits"))).metrics["val/top1"])
"""

from typing import TYPE_CHECKING, Any

from headmix_vision.extras import require_extra
from headmix_vision.training.training_request import TrainingRequest

require_extra("train", __name__)

if TYPE_CHECKING:
    from headmix_vision.training.training_job import Trained, train

__all__ = ["Trained", "TrainingRequest", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headmix_vision.training import training_job  # imports torch and Lightning

    return getattr(training_job, name)
