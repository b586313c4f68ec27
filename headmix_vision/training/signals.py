"""Turns SIGINT and SIGTERM into an orderly end of the process."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from headmix_vision.errors import launched_rank

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptRequest:
    """Handles SIGINT and SIGTERM.

    While `deferred` is false, a signal ends the process at once, with one line and exit status 128 + signal number.
    While it is true, the first one is only noted in `signum`, and a second one ends the process at once, without any
    clean-up. Not under torchrun, which passes on to its processes what they may have got already, as from a scheduler
    that tells all processes of a job to end; torchrun kills them itself after 30 s.

    While it is false, SIGTERM ends all processes of a job but the first without this handler: they have nothing to
    clean up, and it would not run while they wait, in C++, for a first process that was refused.
    """

    def __init__(self) -> None:
        self.deferred = False
        self.signum: int | None = None
        self._pid = os.getpid()

    def install(self) -> None:
        """Makes itself the process's handler of both signals; Lightning replaces that of SIGTERM when it starts."""
        for signum in SIGNALS:
            at_once = signum == signal.SIGTERM and not self.deferred and launched_rank() != "0"
            signal.signal(signum, signal.SIG_DFL if at_once else self._handle)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Is the handler inside, and puts back the handlers of before, such as those of a program that trains."""
        before = {signum: signal.getsignal(signum) for signum in SIGNALS}
        self.install()
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked data worker: the parent decides
            return
        # os.write, as print may have been interrupted itself
        speaks = launched_rank() == "0"
        if not self.deferred:
            if speaks:
                os.write(2, f"\ninterrupted by {signal.Signals(signum).name}\n".encode())
            raise SystemExit(128 + signum)
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        if self.signum is not None:
            if not launched:
                os._exit(128 + signum)
            return
        self.signum = signum
        hint = b"" if launched else b"; the same signal again stops at once"
        if speaks:
            os.write(2, b"\nfinishing this optimizer step, then saving" + hint + b"\n")
