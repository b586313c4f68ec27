"""Run a script with the package's models registered: `python -m headmix_vision SCRIPT [ARGUMENTS ...]`.

For scripts that take a timm model name but import nothing of ours, such as timm's `validate.py` or `benchmark.py`.
"""

import runpy
import sys
from pathlib import Path

import headmix_vision  # noqa: F401  (registers the models with timm)
from headmix_vision.errors import InputError, one_line_errors


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(f"{__doc__}")
    with one_line_errors():
        if not Path(sys.argv[1]).exists():
            raise InputError(f"script {sys.argv[1]} does not exist")
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
