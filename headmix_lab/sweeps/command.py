"""`headmix analyze sweep`: the order in which runs are started."""

import argparse
import math
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from headmix_lab.scripts import EXIT_FAILED, EXIT_TIME_OVER, RunFailed, TimeOver
from headmix_lab.sweeps.figure import draw
from headmix_lab.sweeps.kinds import SWEEPS
from headmix_lab.sweeps.runs import COLUMNS, CURVES, NUMBERS, Case, Request, Runs
from headmix_lab.sweeps.table import report
from headmix_lab.tables import ResultTable, write_table
from headmix_vision.analysis.line_charts import save_svg
from headmix_vision.errors import InputError, check_counts, check_positive, require_extra, suggest
from headmix_vision.files.reading import check_workers
from headmix_vision.files.writing import atomic_path, check_place, hold_lock

MAX_SEEDS = 1000
MAX_EPOCHS = 1_000_000


def run(options: argparse.Namespace) -> None:
    """Train the missing runs until the time is over, then write table and figure."""
    require_extra("train", "headmix analyze sweep")
    request = _request(options)
    deadline_s = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    _check_place(request.table)
    runs = Runs(request, deadline_s)
    if options.dry_run:
        _try(runs, ResultTable(request.table, COLUMNS, 3, runs.place))
        return
    with hold_lock(request.out / f".{request.kind}.lock", f"sweep {request.table}"):
        table = ResultTable(request.table, COLUMNS, 3, runs.place)
        _check_rows(runs, table)
        if ready := runs.ready(table):
            runs.check(ready[0])
        failures = _complete(runs, table, request.jobs, deadline_s)
        if table.rows:
            _write(runs, table)
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    if failures:
        raise SystemExit(EXIT_FAILED)
    if missing := runs.missing(table):
        print(f"the time was over before {missing} runs: repeat the command", file=sys.stderr)
        raise SystemExit(EXIT_TIME_OVER)


def _request(options: argparse.Namespace) -> Request:
    """Check the options."""
    check_counts(1, **{"--jobs": options.jobs})
    check_counts(1, MAX_SEEDS, **{"--seeds": options.seeds})
    check_workers(**{"--jobs": options.jobs})
    if options.epochs is not None:
        check_counts(1, MAX_EPOCHS, **{"--epochs": options.epochs})
    for option, numbers in (("--minutes", [options.minutes]), ("--rates", options.rates or [])):
        for number in numbers:
            if number is not None:
                check_positive(**{option: number})
    sweep = SWEEPS[options.kind]
    known = {variant.name: variant for variant in sweep.variants}
    for option in ("rates", "variants"):
        given = [f"{one:g}" if isinstance(one, float) else one for one in getattr(options, option) or []]
        if len(set(given)) < len(given):
            raise InputError(f"--{option} names one twice")
    for name in options.variants or []:
        if name not in known:
            raise InputError(
                f"--variants of {options.kind} are {', '.join(known)}, got {name!r}{suggest(name, list(known))}"
            )
    chosen = tuple(variant for name, variant in known.items() if name in (options.variants or known))
    return Request(
        options.kind, replace(sweep, variants=chosen), options.task, options.root, options.options, options.rates,
        options.seeds, options.epochs, options.out, options.jobs,
    )  # fmt: skip


def _check_place(table: Path) -> None:
    """Refuse to overwrite other files."""
    check_place(table)
    for path in (table.with_suffix(".md"), table.with_suffix(".svg"), _curves(table)):
        if path.exists() and not table.exists():
            raise InputError(f"{path.parent} holds {path.name} without {table.name}; choose another --out")


def _check_rows(runs: Runs, table: ResultTable) -> None:
    """Refuse a damaged table, and a table with other options, whose rows would be replaced."""
    for (variant, rate, seed), row in table.rows.items():
        try:
            case = Case(variant, f"{float(rate):g}", int(seed))
            list(map(float, filter(None, (row[name] for name in NUMBERS))))
        except ValueError as error:
            raise InputError(f"{table.path} is damaged: {error}; correct it, or choose another --out") from None
        if variant in runs.variants and runs.row(table, case) is None:
            raise InputError(f"{table.path} holds runs of other options ({_name(case)}); choose another --out")


def _try(runs: Runs, table: ResultTable) -> None:
    _check_rows(runs, table)
    ready = runs.ready(table)
    if ready:
        runs.check(ready[0])
    print(f"networks: {', '.join(runs.variants)}; learning rates: {', '.join(runs.rates)}")
    print(f"would train {runs.missing(table)} runs, first {len(ready)}:")
    for case in ready:
        print(f"  {_name(case)}: {runs.directory(case)}")
    curves = f", {_curves(table.path).name}" if runs.config["analysis"]["every_n_epochs"] else ""
    print(f"would write {table.path}{curves}, {table.path.stem}.md and {table.path.stem}.svg")


def _complete(runs: Runs, table: ResultTable, jobs: int, deadline_s: float) -> list[str]:
    """Train the missing runs, add a row for each, and return the failures."""
    start, failures, known = time.monotonic(), list[str](), set[Case]()
    running: dict[Future[dict[str, object]], Case] = {}
    pool = ThreadPoolExecutor(jobs)

    def submit() -> None:
        for case in runs.ready(table):
            if case not in known and time.monotonic() < deadline_s:
                known.add(case)
                running[pool.submit(runs.complete, case)] = case

    try:
        submit()
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                case = running.pop(future)
                try:
                    row = table.add(case, **future.result())
                except TimeOver:
                    continue
                except RunFailed as error:
                    failures.append(f"{_name(case)}: {error.reason}")
                    found = "failed"
                else:
                    found = f"validation {row['val_percent']} %, test {row['test_top1_percent'] or '–'} %"
                print(f"[{time.monotonic() - start:5.0f} s] {_name(case)}: {found}", flush=True)
            submit()
    finally:  # an interrupt has reached the runs, too: they save and end
        pool.shutdown(cancel_futures=True)
    return failures


def _curves(table: Path) -> Path:
    return table.with_name(f"{table.stem}_curves.csv")


def _write(runs: Runs, table: ResultTable) -> None:
    text, curves = report(table, runs), runs.curves(table)
    rows = {name: runs.rows(table, name) for name in runs.variants}
    figure = draw(
        runs.request.kind, rows, runs.accuracy, curves, " ".join(Path(recipe).stem for recipe in runs.request.recipes)
    )
    print(f"\n{text}")
    with atomic_path(table.path.with_suffix(".md")) as temporary:
        temporary.write_text(text)
    if curves:
        write_table(_curves(table.path), CURVES, curves, completed=True)
    if figure is not None:
        save_svg(table.path.with_suffix(".svg"), figure)


def _name(case: Case) -> str:
    return f"{case.variant}, rate {case.rate}, seed {case.seed}"
