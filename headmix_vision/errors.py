"""Errors that a user can mend, and how command lines end on them."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Input of a user is wrong: an option, a file, a name, the shape of a tensor.

    The message is one line that says what was given and what is allowed. A command line prints it and ends, as it does
    for what the system refuses (`OSError`); every other exception is a defect of the program and keeps its traceback.
    """


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with status 2 and one line, with the rank unless it is 0, for an `InputError` or `OSError`."""
    try:
        yield
    except BrokenPipeError:
        # the reader of our output, such as `head`, has gone: there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (InputError, OSError) as error:
        # A data loader's worker hands its error on with the traceback in front of the message.
        message = " ".join(_message(error).rpartition(f"{__name__}.InputError: ")[2].split())
        rank = os.environ.get("RANK", "0")
        print(f"error: {message}" if rank == "0" else f"error (rank {rank}): {message}", file=sys.stderr)
        sys.exit(2)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror is not None:
        path = "" if error.filename is None else f": {error.filename}"
        return f"{error.strerror}{path}"
    return str(error)
