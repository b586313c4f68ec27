"""Run every command on wrong options and on damaged files, and judge how it ends.

python tests/hostile.py                                   # 2,000 cases
python tests/hostile.py --cases 300 --seed 7 --command "sample images"
python tests/hostile.py --seed 7 --case 153               # one case again, with all that it printed
python tests/hostile.py --kit /tmp/kit ...                # keep the files that the cases begin with for the next call

A case is one command line of `LINES` with a wrong option (the options come from the parsers), or with one of the files
that it opens damaged (`mutations.py`). It runs in a fork of this process, in a copy of the files, and ends as

- refused: status 2 (1 for NaN or infinite losses), and one line on standard error that begins with `error`;
- harmless: status 0, with the result of the undamaged files, or with a value that may be right;
- silent: status 0 although the value is certainly wrong, or another result of a damaged file of ours;
- traceback: any other end, also by a signal; time-out: no end, or processes without end;
- code: something in the files was executed, or an address was fetched.

A refused command must leave existing files alone, and no command may write outside its output: else it is `changed`.
"""

import argparse
import csv
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

sys.path.insert(0, str(Path(__file__).parents[1]))
if __name__ == "__main__":  # before the libraries read them
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

import mutations
import torch
from hostile_lines import LINES, OURS, VALUES, WORDS, Line, make_kit
from lightning.pytorch.cli import LightningCLI
from training import helpers

from headmix_vision.cli import COMMANDS
from headmix_vision.console import OneLineParser
from headmix_vision.training.base_cli import RunCLI
from headmix_vision.training.command_help import KINDS

MEMORY_BYTES, FILE_BYTES, PROCESSES = 12 << 30, 1 << 28, 40
LATER = ("--data.test_split", "--data.predict_path")  # options of `fit` that another subcommand obeys
OUTPUTS = ("--out", "--run_dir", "--json")  # options that may name what is not there
BAD = ("traceback", "silent", "time-out", "code", "changed")
NOWHERE = ("fifo", "device", "link", "absent", "long", "control", "empty")  # kinds of paths that nothing opens
WORK = {  # modules that do the work of a command
    "doctor": ("doctor.examination", "doctor.lines"),
    "models": ("models.model_list",),
    "sample": ("sampling.sample_job",),
    "evaluate": ("evaluation.scores", "evaluation.clip_scores", "evaluation.probes"),
    "export": ("runs.exporting", "runs.pipelines"),
    "analyze": ("analysis.analysis_job",),
    "cache-latents": ("data.latent_cache",),
    "index-shards": ("data.shard_index",),
}
NUMBERS = {"int", "float", "bool", "none", "choice"}


class Captured(BaseException):
    """Carries a parser out of its command."""


@cache
def parser_of(command: str) -> Any:
    """Return the parser of a command, and import what the command imports, which its forks then have."""
    for module in WORK.get(command, ("training.training_job", "training.distillation_cli")):
        import_module(f"headmix_vision.{module}")

    def capture(_: Any, *given: Any) -> None:
        raise Captured(*given)

    originals = OneLineParser.parse_args, RunCLI.parse_arguments, RunCLI.subcommands
    OneLineParser.parse_args = lambda self, *_: capture(self, self)
    RunCLI.parse_arguments = lambda self, parser, _: capture(self, parser)
    RunCLI.subcommands = lambda self: {name: LightningCLI.subcommands()[name] for name in KINDS[self.kind][1]}
    try:
        name, *words = command.split()
        COMMANDS[name]([*words, "fit"])
    except Captured as caught:
        return caught.args[0]
    finally:
        OneLineParser.parse_args, RunCLI.parse_arguments, RunCLI.subcommands = originals


@cache
def options_of(words: tuple[str, ...]) -> list[argparse.Action]:
    """List the options and arguments of a subcommand, without its help."""
    kind = words[1:2] if words[0] == "distill" and words[1] not in ("fit", "validate") else ()
    parser = parser_of(" ".join([words[0], *kind]))
    for word in words[1 + len(kind) :]:
        (choices,) = (action.choices for action in parser._actions if isinstance(action.choices, dict))
        parser = choices[word]
    return [one for one in parser._actions if not re.search("help|print_config", one.dest)]


def command_of(line: Line) -> tuple[str, ...]:
    """Return the command and subcommand of a line."""
    words = line.words.split()
    if words[0] in ("export", "cache-latents", "index-shards", "models", "doctor"):
        return (words[0],)
    return tuple(words[: 3 if words[:2] == ["distill", "classifier"] else 2])


def kinds_of(option: argparse.Action) -> set[str]:
    """Name the kinds of values that an option takes: `int`, `str`, `flag`, `choice`, `object` and so on."""
    if option.nargs == 0:
        return {"flag"}
    hint = getattr(option, "_typehint", option.type)
    if option.choices:
        return {"choice"}
    if not isinstance(hint, type) and get_origin(hint) is None:
        return {"str"} if hint is None else {"object"}
    return _kinds(hint)


def _kinds(hint: Any) -> set[str]:
    if get_origin(hint) in (Union, types.UnionType):
        return set().union(*map(_kinds, get_args(hint)))
    if get_origin(hint) is Literal:
        return {"choice"}
    names = {int: "int", float: "float", bool: "bool", str: "str", Path: "str", type(None): "none"}
    return {names.get(hint, "object")}


def is_wrong(kind: str, takes: set[str], name: str) -> bool:
    """Tell whether a kind of value is certainly wrong for an option that takes some kinds."""
    if kind == "misspelt" or takes == {"flag"}:
        return True
    if kind in ("negative", "zero", "large", "huge", "small", "repeated", "choice", "word") or "object" in takes:
        return False
    if kind == "empty":
        return "none" not in takes or "str" in takes
    if kind in ("nan", "inf", "fraction"):
        return takes <= NUMBERS and not (kind == "fraction" and "float" in takes)
    return takes <= NUMBERS or kind in ("fifo", "device") or name not in (*OUTPUTS, *LATER)


class Case(NamedTuple):
    """A case before it runs.

    Args:
        line: Its command line.
        words: The arguments, with the wrong option.
        about: What is wrong.
        certain: Whether it must be refused.
        damage: Damages a file of the folder; returns what it did.
        damaged: The file, which is not compared.
    """

    line: Line
    words: list[str]
    about: str
    certain: bool
    damage: Callable[[Path], str] | None = None
    damaged: str = ""


def draw_case(lines: list[Line], kit: Path, seed: int, number: int) -> Case:
    """Draw a case by its number, the same whatever others are run."""
    rng = random.Random(f"{seed}/{number}")
    line = rng.choice(lines)
    words = line.words.split()
    if line.opens and rng.random() < 0.5:
        files = [path for pattern in line.opens.split() for path in sorted(kit.glob(pattern)) if path.is_file()]
        name = str(rng.choice(files).relative_to(kit))
        state = rng.getstate()

        def damage(folder: Path) -> str:
            again = random.Random()
            again.setstate(state)
            return f"{name}: {mutations.mutate(folder / name, again)}"

        return Case(line, words, name, certain=False, damage=damage, damaged=name)
    abouts, certain = [], False
    for option in rng.sample(options := options_of(command_of(line)), min(len(options), rng.choice([1, 1, 1, 2]))):
        more, about, wrong = draw_option(option, rng)
        if (
            words[1:2] in (["validate"], ["test"], ["predict"])
            and "str" in kinds_of(option)
            and "misspelt" not in about
        ):
            wrong = False  # most name something of the training
        if option.option_strings:
            words += [*more, *["--dry_run"] * (about.endswith(("large", "huge")) and words[1] == "fit")]
        else:
            words[len(command_of(line))] = more[0]
        abouts.append(about)
        certain |= wrong
    return Case(line, words, ", ".join(abouts), certain)


def draw_option(option: argparse.Action, rng: random.Random) -> tuple[list[str], str, bool]:
    """Draw a value of an option; return what to write, what it is, and whether it is certainly wrong."""
    takes, kind = kinds_of(option), rng.choice([*VALUES])
    value = rng.choice(WORDS.split()) if kind == "word" else VALUES[kind]
    if kind in ("near", "choice"):
        choices = option.choices or get_args(getattr(option, "_typehint", None)) or ["x"]
        value = f"{rng.choice([*choices])}{'x' * (kind == 'near')}"
    if not option.option_strings:
        return [value], f"{option.dest} is {kind}", kind in NOWHERE
    name = option.option_strings[-1]
    about, wrong = f"{name} is {kind}", is_wrong(kind, takes, name)
    if kind == "misspelt":
        return [f"{name}x" if takes == {"flag"} else f"{name}x={value}"], about, wrong
    return [f"{name}={value}", *[f"{name}=2"] * (kind == "repeated" and takes != {"flag"})], about, wrong


def tree_of(folder: Path) -> dict[str, str]:
    """Describe all files of a folder: their kind, and the hash of what is in them."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            found[str(path.relative_to(folder))] = "special"
        elif path.is_dir():
            found[str(path.relative_to(folder))] = "folder"
        else:
            found[str(path.relative_to(folder))] = sha256(_content(path)).hexdigest()
    return found


def _content(path: Path) -> bytes:
    """Read a file, metrics without the speed."""
    with suppress(ValueError, csv.Error):
        return repr(helpers.read_csv(path)).encode() if path.name == "metrics.csv" else path.read_bytes()
    return path.read_bytes()


def start(words: list[str], folder: Path, logs: Path) -> int:
    """Run a command line in a fork of this process; return the id of the process."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        os.chdir(folder)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["headmix", *words]
        os.environ["TMPDIR"] = tempfile.tempdir = str(logs)
        sys.addaudithook(lambda event, _: (logs / "fetched").touch() if event == "socket.getaddrinfo" else None)
        COMMANDS[words[0]](words[1:])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait_for(pid: int, limit_s: float) -> int | None:
    """Wait for a process; return its status, or None if it does not end or starts too many others."""
    deadline, looked = time.monotonic() + limit_s, time.monotonic()
    ended, found = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
        ended, found = os.waitpid(pid, os.WNOHANG)
        if time.monotonic() - looked > 1:
            looked = time.monotonic()
            stats = [text.rpartition(")")[2].split() for text in map(_stat, Path("/proc").glob("[0-9]*/stat"))]
            if sum(stat[3:4] == [str(pid)] for stat in stats) > PROCESSES:
                break
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(found) if ended else None


def _stat(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


class Ending(NamedTuple):
    """How a command line ended."""

    status: int | None
    stdout: str
    stderr: str
    before: dict[str, str]
    after: dict[str, str]
    executed: bool
    done: str


@contextmanager
def _copy_of(kit: Path) -> Iterator[Path]:
    place = Path(tempfile.gettempdir()) / f"hostile-{os.getpid()}"  # the same each time, as checkpoints name it
    try:
        folder = place / "files"
        shutil.copytree(kit, folder, symlinks=True)
        (folder / "folder").mkdir()
        os.mkfifo(folder / "fifo")
        (folder / "loop").symlink_to("loop")
        (folder / "notes.txt").write_text("notes")
        (place / "logs").mkdir()
        yield folder
    finally:
        shutil.rmtree(place)


def run(words: list[str], kit: Path, limit_s: float, damage: Callable[[Path], str] | None = None) -> Ending:
    """Run a command line in a copy of the kit, damaged if asked for."""
    with _copy_of(kit) as folder:
        done = damage(folder) if damage else ""
        before, logs = tree_of(folder), folder.parent / "logs"
        status = wait_for(start(words, folder, logs), limit_s)
        stdout, stderr = ((logs / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        after = tree_of(folder)
        executed = (logs / "fetched").exists() or any(path.endswith(mutations.MARK) for path in after)
        return Ending(status, stdout, stderr, before, after, executed, done)


@cache
def usual(line: Line, kit: Path, limit_s: float) -> tuple[dict[str, str], set[str]]:
    """Return files and printed lines of the undamaged line, as far as they are the same each time."""
    first, second = (run(line.words.split(), kit, limit_s) for _ in range(2))
    assert first.status == second.status == 0, f"{line.words}: {first.stderr}"
    files = dict(first.after.items() & second.after.items())
    return files, set(first.stdout.splitlines()) & set(second.stdout.splitlines())


def judge(case: Case, end: Ending, kit: Path, limit_s: float) -> set[str]:
    """Name how a case has ended, and whether it changed what it must leave alone."""
    found = {"code"} if end.executed else set()
    own = [case.line.out, *(word.partition("=")[2] for word in case.words if word.startswith(OUTPUTS))]
    own = [os.path.normpath(place) for place in own if place]
    changed = {name for name in end.before if end.after.get(name) != end.before[name]}
    if end.status == 0:
        changed |= end.after.keys() - end.before.keys()
        parents = {str(parent) for place in own for parent in Path(place).parents}
        changed = {name for name in changed - parents if not any(f"{name}/".startswith(f"{o}/") for o in own)}
    if changed - {mutations.MARK}:
        found.add("changed")
    lines = [line for line in end.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error( \(rank \d+\))?: ", line)]
    if end.status is None:
        return found | {"time-out"}
    if end.status in (1, 2) and len(errors) == 1 and lines[-1] == errors[0] and "Traceback" not in end.stderr:
        return found | {"refused"}
    if end.status != 0:
        return found | {"traceback"}
    if case.certain:
        return found | {"silent"}
    if case.damage and case.line in OURS and not re.search(r"\.(yaml|csv)$|^pipe/.*\.json$", case.damaged):
        files, printed = usual(case.line, kit, limit_s)
        differs = any(end.after.get(name) != files[name] for name in files if name != case.damaged)
        if differs or (not case.line.out and printed - set(end.stdout.splitlines())):
            return found | {"silent"}
    return found | {"harmless"}


def make(words: list[str], kit: Path) -> None:
    """Run a command line that makes a file of the kit."""
    with tempfile.TemporaryDirectory() as logs:
        status = wait_for(start(words, kit, Path(logs)), 300)
        assert status == 0, (Path(logs) / "stderr").read_text()


def try_case(lines: list[Line], kit: Path, seed: int, number: int, limit_s: float) -> tuple[Case, Ending, set[str]]:
    """Run one case and judge it."""
    case = draw_case(lines, kit, seed, number)
    end = run(case.words, kit, limit_s, case.damage)
    return case._replace(about=end.done or case.about, damage=None), end, judge(case, end, kit, limit_s)


def print_table(found: list[tuple[Case, set[str]]]) -> None:
    """Print how many cases of each command ended how."""
    columns = ("tried", "refused", "harmless", *BAD)
    counts: dict[str, Counter[str]] = {}
    for case, verdicts in found:
        for name in (" ".join(command_of(case.line)), "all"):
            counts.setdefault(name, Counter()).update(["tried", *verdicts])
    print(f"{'command':22}", *(f"{column:>10}" for column in columns))
    for name, count in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        print(f"{name:22}", *(f"{count[column]:10}" for column in columns))


def main() -> None:
    """Run the cases that are asked for; end with status 1 if one is bad."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2000, help="numbers of the cases: from 0 to this")
    parser.add_argument("--case", type=int, help="this one alone, with what it prints")
    parser.add_argument("--command", nargs="+", default=[""], help="lines that begin with one of these (all)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit", type=float, default=90, help="seconds after which a case has no end")
    parser.add_argument("--kit", type=Path, help="folder of the files that cases begin with, made if it is not there")
    options = parser.parse_args()
    lines = [line for line in LINES if line.words.startswith(tuple(options.command))]
    with tempfile.TemporaryDirectory() as place:
        kit = (options.kit or Path(place) / "kit").resolve()
        torch.set_num_threads(1)
        for command in COMMANDS:
            parser_of(command)
        if not kit.exists():
            make_kit(lines, kit, make)
        if options.case is not None:
            case, end, verdicts = try_case(lines, kit, options.seed, options.case, options.limit)
            print(f"headmix {' '.join(case.words)}\n{case.about}\n{end.stdout}{end.stderr}{end.status}: {verdicts}")
            sys.exit(bool(verdicts & {*BAD}))
        found = []
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("fork")) as pool:
            jobs = [
                pool.submit(try_case, lines, kit, options.seed, number, options.limit)
                for number in range(options.cases)
            ]
            for number, job in enumerate(jobs):
                case, end, verdicts = job.result()
                found.append((case, verdicts))
                if bad := sorted(verdicts & {*BAD}):
                    last = (end.stderr.strip().splitlines() or [""])[-1][:200]
                    print(
                        f"case {number} ({case.line.words}): {', '.join(bad)}: {case.about[:200]}: {last}", flush=True
                    )
                    if "traceback" in bad:  # which may not come again
                        print(f"status {end.status}\n{end.stderr}", flush=True)
    print_table(found)
    sys.exit(any(verdicts & {*BAD} for _, verdicts in found))


if __name__ == "__main__":
    main()
