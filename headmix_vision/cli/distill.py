"""`headmix distill`: train attention layers after the layers of a teacher, of generators and of classifiers."""

import sys
from collections.abc import Sequence

from headmix_vision.cli.training import Kind, run
from headmix_vision.console import DISTILLED
from headmix_vision.recipes import DEFAULT

_CLASSIFIER, _GENERATOR = DISTILLED


def main(args: Sequence[str] | None = None, default_config: str | None = DEFAULT) -> None:
    """Run the command, for generators where no kind is named; wrong input ends the process with one line."""
    words = [*(sys.argv[1:] if args is None else args)]
    named = words.pop(0) if words[:1] in ([_CLASSIFIER], [_GENERATOR]) else _GENERATOR
    kind: Kind = "distilled_classifier" if named == _CLASSIFIER else "distilled"
    run("distill", kind, words, default_config)
