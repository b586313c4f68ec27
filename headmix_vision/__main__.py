"""`python -m headmix_vision COMMAND`, as `headmix COMMAND`, and `python -m headmix_vision SCRIPT.py [ARGUMENTS ...]`.

The latter runs a script with the package's models registered, for scripts that take a timm model name but import
nothing of ours, such as timm's `validate.py` or `benchmark.py`.
"""

import runpy
import sys
from pathlib import Path

from headmix_vision.cli import COMMANDS, main
from headmix_vision.console import one_line_errors
from headmix_vision.errors import InputError


def run_script() -> None:
    """Run the script that the first argument names, with the arguments behind it."""
    with one_line_errors():
        if not Path(sys.argv[1]).exists():
            raise InputError(f"script {sys.argv[1]} does not exist")
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else ""
    if given and given not in COMMANDS and (Path(given).suffix == ".py" or Path(given).exists()):
        run_script()
    else:
        main()
