"""Define the command line that trains generators after a teacher: that of generators, with a teacher beside."""

from typing import Any

from lightning.pytorch import Trainer

from headmix_vision.errors import InputError
from headmix_vision.training.distillation import DistilledGenerator
from headmix_vision.training.generation_cli import GenerationCLI
from headmix_vision.training.sharding import ShardedStrategy


class DistillationCLI(GenerationCLI):
    """Train generators after a teacher, from the command line: `headmix distill`."""

    module_class = DistilledGenerator
    runs_folder = "runs/distilled"

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """As `RunCLI` says.

        Raises:
            InputError: Also if the student would be sharded: its attention layers run outside of the blocks that
                gather weights.
        """
        trainer = super().instantiate_trainer(**kwargs)
        if isinstance(trainer.strategy, ShardedStrategy):
            raise InputError("distillation cannot shard the student: set trainer.strategy=ddp")
        return trainer
