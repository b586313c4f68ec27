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
    """End the process with the message of an `InputError` on one line and exit status 2; the first rank prints it."""
    try:
        yield
    except InputError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            # A data loader's worker hands its error on with the traceback in front of the message.
            print(f"error: {str(error).splitlines()[-1].removeprefix(f'{__name__}.InputError: ')}", file=sys.stderr)
        sys.exit(2)
