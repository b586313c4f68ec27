"""`headmix models`: list the models of the package."""

import argparse
from collections.abc import Sequence

from headmix_vision.console import OneLineParser, importing, one_line_errors


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; wrong input ends the process with one line and exit status 2."""
    options = vars(_parser().parse_args(args))
    with importing("models"):
        from headmix_vision.models.model_list import ModelsRequest, describe, list_models
    with one_line_errors():
        names = list_models(ModelsRequest(**options))
        width = max(map(len, names), default=0)
        for model in describe(names):
            size = " x ".join(map(str, model.input_size))
            cost = f"{model.parameters / 1e6:7.2f} M  {model.gflops:>8} GFLOPs"
            line = f"{model.name:{width}}  {cost}  {size:13}"
            print(f"{line} pretrained" if model.pretrained else line.rstrip(), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="headmix models", description="List the models of the package.")
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="names, with * and ?, such as 'deit_mhla_*'")
    parser.add_argument("--pretrained", action="store_true", help="only models whose weights come with the package")
    return parser
