"""`headmix doctor`: check the kernels on this machine, and time them against PyTorch's softmax."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headmix_vision.console import OneLineParser, end, one_line_errors
from headmix_vision.errors import InputError, explain

if TYPE_CHECKING:
    from headmix_vision.doctor.examination import Finding
    from headmix_vision.doctor.report import Report


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line: exit status 1 if anything is wrong, 2 for wrong input."""
    started_s = time.monotonic()
    parser = OneLineParser(
        prog="headmix doctor", description="Check the kernels on this machine, and time them, in under a minute."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report, without names and paths")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument("--seed", type=int, default=0, help="another one draws other cases (default: 0)")
    options = parser.parse_args(args)
    print("headmix doctor: this takes less than a minute", flush=True)
    with one_line_errors():
        try:
            report = _examine(options.device, options.seed, options.json, started_s)
        except (InputError, OSError, MemoryError):
            raise
        except Exception as error:  # a defect of this command or of an installed package: no traceback, a finding
            end(f"the examination itself failed: {explain(error)}; open an issue with this line", status=1)
    sys.exit(1 if report.wrong else 0)


def _examine(device: str | None, seed: int, json_file: Path | None, started_s: float) -> Report:
    """Examine the machine, print what is found as it is found, and write the file."""
    from headmix_vision.console import default_device, open_device
    from headmix_vision.doctor.examination import Request, examine
    from headmix_vision.doctor.lines import lines_of
    from headmix_vision.errors import check_counts
    from headmix_vision.files.writing import atomic_path, check_place

    check_counts(0, 2**32 - 1, **{"--seed": seed})
    if json_file is not None:
        check_place(json_file)
        if json_file.is_dir():
            raise InputError(f"--json must be a file, {json_file} is a folder")
    opened = open_device(device or default_device())
    if opened.type not in ("cpu", "cuda"):
        raise InputError(f"--device must be cpu, cuda or cuda:N, got {device!r}")
    kinds: set[type] = set()

    def show(finding: Finding) -> None:
        first = type(finding) not in kinds
        kinds.add(type(finding))
        print(*lines_of(finding, first), sep="\n", flush=True)

    report = examine(Request(opened, seed, started_s=started_s), show)
    print(f"\nVerdict, after {report.seconds:.0f} s", *report.verdict, sep="\n  ")
    if json_file is not None:
        with atomic_path(json_file) as temporary:
            temporary.write_text(report.to_json())
        print(f"  Report written to {json_file}.")
    return report
