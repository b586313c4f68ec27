"""Records which tests run which lines of the package by coverage.py, and chooses the tests of a mistake by it.

As a program it records the tests of `make test`, with the processes that tests start (they find
`sitecustomize.py` on PYTHONPATH), in a new folder. It needs `pip install coverage`.
"""

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from coverage import Coverage, CoverageData

SECONDS, DATA, SOURCE = "seconds.jsonl", "coverage.sqlite", "source.sha256"
FOLDER = "SLIP_REACH"  # environment variable: where recordings are written
MOST_TESTS = 400
VALUES = "tests/test_defaults.py::test_values_are_kept[{}]"  # whose line no test runs: Python does at import
SETTINGS = """[run]
source = {root}/headmix_vision
data_file = {folder}/part
parallel = true
context = ${{PYTEST_CURRENT_TEST-}}
concurrency = multiprocessing, thread
sigterm = true
disable_warnings = no-data-collected, module-not-imported
"""


class Recorder:
    """Names the test that runs to coverage.py, and notes its seconds."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if recording := Coverage.current():
            recording.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "PYTEST_XDIST_WORKER" in os.environ:  # the parent hears the same
            with (Path(os.environ[FOLDER]) / SECONDS).open("a") as file:
                file.write(json.dumps([report.nodeid, round(report.duration, 3)]) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder in the processes that run tests."""
    if FOLDER in os.environ:
        config.pluginmanager.register(Recorder())


def _source(root: Path) -> str:
    """Return the hash of the package's text."""
    files = sorted((root / "headmix_vision").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def record(root: Path, folder: Path, *arguments: str) -> None:
    """Run the tests of a repository once, and keep in a folder what they run."""
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    (folder / "sitecustomize.py").write_text("import coverage\n\ncoverage.process_startup()\n")
    (folder / "settings").write_text(SETTINGS.format(root=root, folder=folder))
    paths = [str(folder), str(root), str(root / "tests"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {FOLDER: str(folder), "COVERAGE_PROCESS_START": str(folder / "settings")}
    command = ["-m", "pytest", "-q", "-p", "slip_reach", "-p", "no:cacheprovider", "-n", "2", "--dist", "worksteal"]
    subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=root, env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)}, check=False,
    )  # fmt: skip
    data = CoverageData(str(folder / DATA))
    for part in folder.glob("part.*"):
        read = CoverageData(str(part))
        read.read()
        data.update(read)
    data.write()
    (folder / SOURCE).write_text(_source(root))


class Reach:
    """The tests of a recording by what they run.

    Raises:
        SystemExit: if there is no recording of the package as it is.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        if not (folder / SOURCE).is_file() or (folder / SOURCE).read_text() != _source(root):
            sys.exit(f"{folder} has no recording of this source: python tests/slip_reach.py {folder}")
        self.root, self.data = root, CoverageData(str(folder / DATA))
        self.data.read()
        self.files = {file.rpartition("headmix_vision/")[2]: file for file in self.data.measured_files()}
        self.seconds = defaultdict[str, float](float)
        for line in (folder / SECONDS).read_text().splitlines():
            test, seconds = json.loads(line)
            self.seconds[test] += seconds

    def _tests(self, contexts: list[str]) -> set[str]:
        """Name tests without the processes and the phases that coverage.py and pytest add to them."""
        names = {part.partition(" (")[0] for context in contexts for part in context.split("|")}
        return {name for name in names if name in self.seconds}

    def choose(self, file: str, text: str, line: int, limit_s: float) -> list[str]:
        """List tests that run a line for so many seconds, the quickest first.

        A line that is run when its file is imported takes the tests of the lines that name what it sets; else of the
        innermost function or class around it that one runs, else of the file.
        """
        tree, lines = ast.parse(text), self._lines(file)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        bodies = {
            number for node in functions for number in range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
        }
        lines = {number: tests for number, tests in lines.items() if number in bodies}
        scopes = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
        around = sorted(((node.lineno, node.end_lineno or node.lineno) for node in scopes), reverse=True)
        around = [(first, last) for first, last in around if first <= line <= last]
        found = lines.get(line, set()) or self._users(tree, line)
        for first, last in [*around, (0, len(text))]:
            found = found or {test for number in range(first, last + 1) for test in lines.get(number, ())}
        found = found if line in bodies else {*found, VALUES.format(file)}
        chosen, spent = [], 0.0
        for test in sorted(found, key=lambda test: (self.seconds[test], test)):
            spent += self.seconds[test] + 0.01
            if chosen and (spent > limit_s or len(chosen) == MOST_TESTS):
                break
            chosen.append(test)
        return chosen

    def _users(self, tree: ast.Module, line: int) -> set[str]:
        """Name the tests that run a line of the package with a name that a statement outside of functions sets."""
        set_here = [node for node in tree.body if node.lineno <= line <= (node.end_lineno or node.lineno)]
        targets = [x for node in set_here if isinstance(node, (ast.Assign, ast.AnnAssign)) for x in ast.walk(node)]
        names = {x.id for x in targets if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
        if not names:
            return set()
        named, found = re.compile(rf"\b({'|'.join(names)})\b"), set[str]()
        for file in self.files:
            texts = enumerate((self.root / "headmix_vision" / file).read_text().splitlines(), 1)
            if numbers := [number for number, text in texts if named.search(text)]:
                lines = self._lines(file)
                found |= {test for number in numbers for test in lines.get(number, ())}
        return found

    def _lines(self, file: str) -> dict[int, set[str]]:
        contexts = self.data.contexts_by_lineno(self.files[file]) if file in self.files else {}
        return {number: self._tests(names) for number, names in contexts.items()}


if __name__ == "__main__":
    record(Path(__file__).parents[1], Path(sys.argv[1]), *sys.argv[2:])
