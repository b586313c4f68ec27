"""Check random cases of every kernel against float64 on all cores until the time is over.

    python tests/ops/fuzz.py --seconds 300 --jobs 16 --seed 0
    python tests/ops/fuzz.py --case "mhla pairwise:float32:1234"

Each failure is printed as a command that reruns it alone. The status is 1 if a case is wrong, raises an exception or
ends its process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))  # the package of this clone, installed or not

from headmix_lab.scripts import gpu_names
from headmix_lab.tables import markdown_table
from headmix_vision.console import OneLineParser, one_line_errors
from headmix_vision.doctor.cases import CASES_OF_A_KERNEL, DTYPES, FAMILIES, Case, check, draw, numbered, read
from headmix_vision.doctor.drawing import HEAD_DIMS, head_dim_range
from headmix_vision.errors import InputError
from headmix_vision.ops.hardware import INTERPRETED

TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
CASES_OF_A_SEED = 10**6
PROCESS_BYTES = 5 << 29  # of GPU memory
CASE_LIMIT_S = 300  # no case takes as long, compilation included
_DONE = "done: "  # begins the line by which a worker reports a case
_LOST = 3  # status of a worker that reported its last case and cannot go on


def _most_jobs() -> int:
    """Count the processes for which there are cores, and memory of the GPUs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return min(cores, sum(memory // PROCESS_BYTES for memory in gpus) or cores)


def parse(args: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="time in which cases are started (default 300)")
    parser.add_argument("--jobs", type=int, default=_most_jobs(), help="processes (default: as many as fit)")
    parser.add_argument("--seed", type=int, default=0, help="other seeds draw other cases (default 0)")
    parser.add_argument("--family", choices=FAMILIES, help="draw cases of one op and form")
    parser.add_argument("--dtype", choices=TYPES, help="draw cases of one type")
    parser.add_argument("--small", action="store_true", help="draw at most 300 tokens")
    parser.add_argument("--case", help="run one case and print all of its errors")
    parser.add_argument("--impl", default="triton", help="implementation of the ops (default triton)")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)  # first case of this process
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    if options.seconds <= 0 or options.jobs < 1 or options.seed < 0:
        raise InputError("--seconds must be above 0, --jobs at least 1 and --seed at least 0.")
    if options.impl.startswith("triton") and not (torch.cuda.is_available() or INTERPRETED):
        raise InputError(
            f"--impl {options.impl} needs a CUDA device. Take --impl torch, or --dtype float32 --small under "
            "TRITON_INTERPRET=1."
        )
    return options


def drawn(options: argparse.Namespace, index: int) -> Case:
    """Draw the case of a number below `CASES_OF_A_SEED`."""
    index += options.seed * CASES_OF_A_SEED
    draw_index = partial(draw, options.family) if options.family else numbered
    return draw_index(index, TYPES.get(options.dtype), small=options.small)


def failure(case: Case, impl: str = "triton") -> str | None:
    """Check a case and return what is wrong, or None."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        bad = [str(error) for error in check(case, device, impl) if error.bad]
    except Exception as error:
        bad = [f"{type(error).__name__}: {error}"]
    return " ".join(" ".join(bad).split())[:300] or None


def rerun(case: Case, reason: str) -> str:
    """Write a failure as a command that reruns it alone."""
    return f'python tests/ops/fuzz.py --case "{case.line}"  # {reason}'


def following(index: int, jobs: int) -> int:
    """Return the case after another one of a worker: of its kernel, or the first of its next kernel."""
    index += 1
    return index if index % CASES_OF_A_KERNEL else index + (jobs - 1) * CASES_OF_A_KERNEL


def work(options: argparse.Namespace) -> None:
    """Check the cases of every ``jobs``-th kernel and report each; a process whose GPU context is lost ends."""
    torch.set_num_threads(1)
    index = options.worker
    while time.time() < options.until:
        reason = failure(drawn(options, index), options.impl)
        print(_DONE + json.dumps({"index": index, "reason": reason}), flush=True)
        if torch.cuda.is_available() and not _give_back():
            os._exit(_LOST)
        index = following(index, options.jobs)


def _give_back() -> bool:
    """Return cached GPU memory to the other processes; False if this one has lost its GPU context."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


class Tally:
    """Counts the cases of all workers and prints failures."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.lock = options, threading.Lock()
        self.cases: Counter[tuple[str, torch.dtype]] = Counter()
        self.head_dims: Counter[tuple[str, str, torch.dtype]] = Counter()
        self.bad: Counter[str] = Counter()

    def add(self, index: int, reason: str | None) -> None:
        case = drawn(self.options, index)
        with self.lock:
            self.cases[case.family, case.dtype] += 1
            if "dim" in case.options:
                op = case.family.split()[0]
                self.head_dims[op, head_dim_range(case.options["dim"]), case.dtype] += 1
            if reason:
                self.bad[case.family] += 1
                print(rerun(case, reason), flush=True)

    def __str__(self) -> str:
        rows = [
            [family, *(str(self.cases[family, dtype]) for dtype in DTYPES), str(self.bad[family])]
            for family in FAMILIES
        ]
        dims = [
            [op, head_dim_range(high), *(str(self.head_dims[op, head_dim_range(high), dtype]) for dtype in DTYPES)]
            for op in dict.fromkeys(op for op, *_ in self.head_dims)
            for _, high in HEAD_DIMS
        ]
        return "\n\n".join(
            [markdown_table(["cases", *TYPES, "bad"], rows), markdown_table(["op", "head dim", *TYPES], dims)]
        )


def supervise(first: int, options: argparse.Namespace, tally: Tally, args: list[str]) -> None:
    """Run one worker until the time is over, and start it again behind a case that ended it."""
    index, gpus = first * CASES_OF_A_KERNEL, gpu_names()
    device = {"CUDA_VISIBLE_DEVICES": gpus[first % len(gpus)]} if gpus else {}
    while time.time() < options.until:
        command = [sys.executable, __file__, *args, "--worker", str(index), "--until", str(options.until)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, env=os.environ | device, **pipes)
        assert process.stdout is not None
        last, timer = "", threading.Timer(CASE_LIMIT_S, process.kill)
        timer.start()
        for line in process.stdout:
            if line.startswith(_DONE):
                done = json.loads(line.removeprefix(_DONE))
                tally.add(**done)
                index = following(done["index"], options.jobs)
                timer.cancel()
                timer = threading.Timer(CASE_LIMIT_S, process.kill)
                timer.start()
            elif line.strip():
                last = line.strip()
        timer.cancel()
        if process.wait() == 0:
            return
        if process.returncode != _LOST:
            tally.add(index, f"the process ended with status {process.returncode}: {last}")
            index = following(index, options.jobs)


def main() -> None:
    with one_line_errors():
        options, args = parse(), sys.argv[1:]
        if options.worker is not None:
            work(options)
            return
        if options.case:
            case = read(options.case)
            print(case)
            errors = check(case, torch.device("cuda" if torch.cuda.is_available() else "cpu"), options.impl)
            print(*errors, sep="\n")
            sys.exit(any(error.bad for error in errors))
        start, tally = time.time(), Tally(options)
        args += ["--jobs", str(options.jobs)]
        options.until = start + options.seconds
        threads = [
            threading.Thread(target=supervise, args=(job, options, tally, args), daemon=True)
            for job in range(options.jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        total, bad = tally.cases.total(), tally.bad.total()
        print(f"{tally}\n\n{total} cases in {time.time() - start:.0f} s, {bad} bad")
        sys.exit(bad > 0 or total == 0)


if __name__ == "__main__":
    main()
