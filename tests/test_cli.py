"""The front door: `headmix COMMAND` answers at once, in one spelling."""

import os
import pty
import subprocess
import sys

START = "from headmix_vision.cli.starting import importing\nwith importing('sample'): pass"


def test_a_terminal_gets_a_first_line_before_the_imports_and_a_log_does_not():
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "wb") as terminal:
        subprocess.run([sys.executable, "-c", START], stderr=terminal, check=True)
        assert os.read(ours, 1000) == b"headmix sample: loading\r\n"
    os.close(ours)
    assert subprocess.run([sys.executable, "-c", START], capture_output=True, check=True).stderr == b""
