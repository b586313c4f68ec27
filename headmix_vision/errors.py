"""Errors that a user can mend, and how command lines end on them."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Input of a user is wrong: an option, a file, a name, the shape of a tensor.

    The message is one line that says what was given and what is allowed. A command line prints it and ends; every other
    exception is a defect of the program and keeps its traceback.
    """


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with the message of an `InputError` on one line, with the rank unless it is 0, and status 2."""
    try:
        yield
    except InputError as error:
        # A data loader's worker hands its error on with the traceback in front of the message.
        message = " ".join(str(error).rpartition(f"{__name__}.InputError: ")[2].split())
        rank = os.environ.get("RANK", "0")
        print(f"error: {message}" if rank == "0" else f"error (rank {rank}): {message}", file=sys.stderr)
        sys.exit(2)
