"""Defines the command line that trains generators after a teacher: that of generators, with a teacher beside."""

from collections.abc import Sequence

from headmix_vision.training.base_cli import run_command_line
from headmix_vision.training.distillation import DistilledGenerator
from headmix_vision.training.generation_cli import GenerationCLI


class DistillationCLI(GenerationCLI):
    """Trains generators after a teacher, from the command line: `headmix-distill`."""

    module_class = DistilledGenerator
    runs_folder = "runs/distilled"


def main(args: Sequence[str] | None = None, default_config: str | None = None) -> None:
    """Runs the command line of distillation; see `run_command_line`."""
    run_command_line(DistillationCLI, args, default_config)
