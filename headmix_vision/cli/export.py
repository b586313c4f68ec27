"""`headmix export`: export the network of a run."""

import argparse
from collections.abc import Sequence

from headmix_vision.console import OneLineParser, importing, one_line_errors


def main(args: Sequence[str] | None = None) -> None:
    """Run the command; wrong input ends the process with one line and exit status 2."""
    options = vars(_parser().parse_args(args))
    with importing("export"):
        from headmix_vision.runs.exporting import ExportRequest, export_run
    with one_line_errors():
        exported = export_run(ExportRequest(**options))
        print(f"would write {exported.out} from {exported.checkpoint}" if options["dry_run"] else exported.code)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="headmix export",
        description="Export the weights of a run: of a classifier for timm, of a generator as a pipeline of diffusers.",
    )
    add = parser.add_argument
    add("run", help="run directory, or a .ckpt file")
    add("--out", required=True, help="file ending in .safetensors; for a generator a folder")
    add("--checkpoint", help="checkpoint of a run directory: best, last or a file (best, of a generator last)")
    add("--raw", action="store_true", help="the weights being trained, not their EMA")
    add("--adapter", action="store_true", help="a LoRA adapter in a file of its own, not merged")
    add("--overwrite", action="store_true", help="replace an earlier export")
    add("--dry-run", action="store_true", help="check everything, write nothing")
    return parser
