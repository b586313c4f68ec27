"""The start of a command: a first line on the screen, and the imports, which take seconds."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from headmix_vision.console.progress import is_terminal
from headmix_vision.errors import launched_rank, one_line_errors


@contextmanager
def importing(command: str) -> Iterator[None]:
    """Show on a terminal that a command starts, and end the process with one line if a part cannot be imported.

    Imports make 600,000 objects that stay until the end. The garbage collector would go through all of them again and
    again, and once more when the process ends, which takes more than a second. So they are hidden from it.

    Args:
        command: Name of the command.
    """
    known, collects = len(sys.modules), gc.isenabled()
    if "torch" not in sys.modules and is_terminal(sys.stderr) and launched_rank() == "0":
        print(f"headmix {command}: loading", file=sys.stderr, flush=True)
    gc.disable()
    try:
        with one_line_errors():
            yield
    finally:
        if collects:
            gc.enable()
    if len(sys.modules) > known:  # not in a later call, which would keep the garbage of the calls before
        gc.freeze()
        if _names_leaks():
            atexit.register(gc.unfreeze)


def _names_leaks() -> bool:
    """Tell whether a Triton is loaded that prints all that is not freed when the process ends, as 3.9 does."""
    triton = sys.modules.get("triton")
    return triton is not None and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
