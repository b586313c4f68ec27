"""Origins of result tables: one `origins.json` a folder, with commit, command, device and versions of their calls."""

import json
import os
import platform
import shlex
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import headmix_vision
from headmix_vision.files.reading import read_json
from headmix_vision.files.writing import atomic_path

ORIGINS = "origins.json"
COMMIT_VARIABLE = "HEADMIX_VISION_COMMIT"  # for copies of a clone without its git directory
_REPOSITORY = Path(__file__).parents[2]
_CODE = ("headmix_*", "benchmarks/*.py", "experiments/*.py", "experiments/*.yaml")  # results are no changes


def origins_of(table: Path) -> list[dict[str, str]]:
    """Return the recorded calls that wrote a table, none if its folder has no `origins.json`."""
    return _read(table.with_name(ORIGINS)).get(table.name, [])


def write_origin(table: Path, completed: bool) -> None:
    """Record the call of this process as an origin of a table.

    Args:
        table: The table.
        completed: Keep the recorded calls, as the table keeps their rows.
    """
    call = _this_call()
    calls = origins_of(table) if completed else []
    if call not in calls:
        path = table.with_name(ORIGINS)
        origins = {**_read(path), table.name: [*calls, call]}
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(dict(sorted(origins.items())), indent=1) + "\n")


def _read(path: Path) -> dict[str, list[dict[str, str]]]:
    return read_json(path) if path.exists() else {}


@cache
def _this_call() -> dict[str, str]:
    program, module = Path(sys.argv[0]), sys.modules["__main__"].__spec__
    called = ["python", os.path.relpath(program)] if program.suffix == ".py" else [program.name]
    if module is not None:  # python -m
        called = ["python", "-m", module.name.removesuffix(".__main__")]
    return {
        "commit": _commit(),
        "command": shlex.join([*called, *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "headmix_vision": headmix_vision.__version__,
        "python": platform.python_version(),
        **{name: installed_version(name) for name in ("torch", "triton")},
    }


def _commit() -> str:
    """The commit of the code, with "+changes" if its files differ; "unknown" where neither git nor a user tells it."""
    if told := os.environ.get(COMMIT_VARIABLE):
        return told
    if not (_REPOSITORY / ".git").exists():  # what lies around an installed package is not its repository
        return "unknown"
    try:
        changes = _git("status", "--short", *_CODE)
        return _git("rev-parse", "--short", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or a clone of somebody else: no reason to lose a result
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", os.fspath(_REPOSITORY), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def installed_version(package: str) -> str:
    """Version of an installed package, "none" where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
