"""Runs tests on a copy of the repository that holds a mistake, each time in a fork that has loaded the libraries."""

import compileall
import importlib
import multiprocessing
import os
import py_compile
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "timm", "diffusers", "lightning.pytorch", "torchmetrics", "torch_fidelity", "sklearn.datasets")


class Verdict(NamedTuple):
    """The outcome of a run of tests.

    Attributes:
        kind: ``failed`` and ``crashed`` (killed by a signal while a test ran) are notice; ``passed`` and ``too long``
            are not; ``broken``: the tests could not run, or failed because something cannot be imported.
        test: the test that failed, or that ran when the process ended.
        reason: the error in one line.
    """

    kind: str
    test: str = ""
    reason: str = ""

    @property
    def is_notice(self) -> bool:
        return self.kind in ("failed", "crashed")

    def __str__(self) -> str:
        said = "NOT NOTICED" if self.kind == "passed" else self.kind.upper() if self.kind != "failed" else ""
        return " ".join(part for part in (said, self.test, f"({self.reason})" if self.reason else "") if part)


class Observer:
    """Sends the name of each test that starts, and each failure, to the parent."""

    def __init__(self, answer: Connection, chosen: Sequence[str]) -> None:
        self.answer, self.places = answer, {name: place for place, name in enumerate(chosen)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.places:
            items[:] = sorted((x for x in items if x.nodeid in self.places), key=lambda x: self.places[x.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.answer.send(("running", nodeid))

    @pytest.hookimpl(tryfirst=True)
    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        kind = (
            "broken" if call.excinfo.errisinstance((ImportError, SyntaxError)) or call.when == "collect" else "failed"
        )
        self.answer.send((kind, node.nodeid, " ".join(call.excinfo.exconly().split())[:160]))


def _run(copy: Path, arguments: list[str], chosen: Sequence[str], module: str, answer: Connection) -> None:
    os.setsid()  # ended with everything that the tests start
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)
    sys.dont_write_bytecode = True
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        if module:
            try:
                importlib.import_module(module)
            except Exception as error:
                answer.send(("broken", "", f"{type(error).__name__}: {error}"[:160]))
                return
        status = pytest.main([*options, *arguments], plugins=[Observer(answer, chosen)])
    answer.send(("passed",) if status == 0 else ("broken", "pytest", f"ended with status {status}"))


class Copy:
    """A copy of the repository, whose files are changed for a while."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "copy"
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=_left_out)
        compileall.compile_dir(self.root, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        import torch

        if not torch.cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, by some of them
        for library in LIBRARIES:
            importlib.import_module(library)

    @contextmanager
    def changed(self, file: str, text: str) -> Iterator[None]:
        """Replace the text of a file of the package within the context."""
        path = self.root / "headmix_vision" / file
        before = path.read_text()
        path.write_text(text)
        try:
            yield
        finally:
            path.write_text(before)

    def run(self, arguments: list[str], limit_s: float, chosen: Sequence[str] = (), module: str = "") -> Verdict:
        """Run tests until the first failure.

        Args:
            arguments: of pytest.
            limit_s: seconds after which the run is ended.
            chosen: tests of these arguments that run, in this order; all where it is empty.
            module: imported first; where that fails no test runs.
        """
        running = ""
        for kind, *rest in self._messages(["-x", *arguments], limit_s, chosen, module):
            if kind != "running":
                return Verdict(kind, *(rest or [running]))
            running = rest[0]
        raise AssertionError("the last message is a verdict")

    def _messages(
        self, arguments: list[str], limit_s: float, chosen: Sequence[str] = (), module: str = ""
    ) -> Iterator[tuple[str, ...]]:
        """Run tests in a fork, and pass on what it sends; the last message is a verdict on the whole run."""
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(
            target=_run, args=(self.root, arguments, chosen, module, theirs)
        )
        process.start()
        theirs.close()
        running, end = "", time.monotonic() + limit_s
        try:
            while ours.poll(max(0.0, end - time.monotonic())):
                message = ours.recv()
                running = message[1] if message[0] == "running" else running
                yield message
                if message[0] == "passed":
                    return
            yield "too long", running
        except EOFError:
            process.join()
            if process.exitcode is not None and process.exitcode < 0 and running:
                yield "crashed", running, signal.Signals(-process.exitcode).name
            else:
                yield "broken", running, f"the process ended with {process.exitcode}"
        finally:
            process.join(5)
            with suppress(ProcessLookupError):
                os.killpg(process.ident, signal.SIGKILL)
            process.kill()
            process.join()


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Name what a copy of the repository does without."""
    top = {".git", ".venv", "runs"} if Path(folder) == ROOT else set()
    return {name for name in names if name in top or name == "__pycache__"}
