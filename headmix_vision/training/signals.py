"""Turn SIGINT and SIGTERM into an orderly end of the process."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from headmix_vision.processes import launched_rank, stopped_processes

_PATIENCE_S = 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptRequest:
    """Handle SIGINT and SIGTERM.

    While `deferred` is false, a signal ends the process at once, with one line and exit status 128 + signal number. One
    more ends it without the rest of the clean-up.
    While it is true, the first one is only noted in `signum`, and a second one ends the process at once, without any
    clean-up. Not under torchrun, which passes on to its processes what they may have got already, as from a scheduler
    that tells all processes of a job to end; torchrun kills them itself after 30 s.

    While it is false, SIGTERM ends all processes of a job but the first without this handler: they have nothing to
    clean up, and it would not run while they wait, in C++, for a first process that was refused.

    A process of several may wait in C++ for another one that was stopped, where no handler runs. A thread then ends it
    5 s after the signal, with one line, and kills the stopped processes that it has started.
    """

    def __init__(self) -> None:
        self.deferred = False
        self.signum: int | None = None
        self._ending = self._is_installed = False
        self._pid = os.getpid()

    def install(self) -> None:
        """Make itself the process's handler of both signals; Lightning replaces that of SIGTERM when it starts."""
        for signum in SIGNALS:
            at_once = signum == signal.SIGTERM and not self.deferred and launched_rank() != "0"
            signal.signal(signum, signal.SIG_DFL if at_once else self._handle)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Is the handler inside, and puts back the earlier handlers, such as the handlers of a program that trains."""
        before = {signum: signal.getsignal(signum) for signum in SIGNALS}
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._is_installed = True
        waker = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._end_if_stuck, args=(reader,), daemon=True).start()
        self.install()
        try:
            yield
        finally:
            self._is_installed = False
            signal.set_wakeup_fd(waker)
            os.close(writer)
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _end_if_stuck(self, reader: int) -> None:
        """Wait for a signal, whose number the system writes to a pipe, and then end a process that waits in vain."""
        while received := os.read(reader, 1):
            if received[0] not in SIGNALS:
                continue
            stuck: dict[int, bool] = {}
            while self._is_installed and not stuck:
                time.sleep(_PATIENCE_S)
                stuck = stopped_processes()
            if not stuck:
                break
            pids = ", ".join(map(str, stuck))
            os.write(2, f"\nerror: process {pids} of this job was stopped: this one ends, and saves nothing\n".encode())
            for pid, is_child in stuck.items():
                if is_child:
                    os.kill(pid, signal.SIGKILL)
            os._exit(128 + received[0])
        os.close(reader)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked data worker: the parent decides
            return
        # os.write, as print may have been interrupted itself
        speaks, launched = launched_rank() == "0", "TORCHELASTIC_RUN_ID" in os.environ
        if not self.deferred:
            if self._ending and not launched:
                os._exit(128 + signum)
            self._ending = True
            if speaks:
                os.write(2, f"\ninterrupted by {signal.Signals(signum).name}\n".encode())
            raise SystemExit(128 + signum)
        if self.signum is not None:
            if not launched:
                os._exit(128 + signum)
            return
        self.signum = signum
        hint = b"" if launched else b"; the same signal again stops at once"
        if speaks:
            os.write(2, b"\nfinishing this optimizer step, then saving" + hint + b"\n")
