"""Training with Lightning: modules, callbacks, run directory, options; the commands are `headmix train-cls` and so on.

from headmix_vision.training import TrainingRequest, train
print(train(TrainingRequest(kind="classifier", configs=["digits"])).metrics["val/top1"])
"""

from typing import TYPE_CHECKING

from headmix_vision.errors import imported_when_used, require_extra

require_extra("train", __name__)

if TYPE_CHECKING:
    from headmix_vision.training.training_job import Trained, TrainingRequest, train

__all__ = ["Trained", "TrainingRequest", "train"]

__getattr__ = imported_when_used(__name__, "training_job", __all__)
