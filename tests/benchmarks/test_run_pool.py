"""`run_pool.py` and `run_table.py`: calls that end in time, dead workers, statuses, one writer at a time."""

import time
from types import SimpleNamespace

import pytest


@pytest.fixture
def pool(load):
    return load("run_pool")


def any_run(load, seed=0, epochs=1):
    runs = load("head_mix_runs")
    return runs.Run(runs.Network("digits", "linear", "plain"), "digits", 1e-3, seed, epochs)


class Asleep:
    """Instead of a worker: runs take as many seconds as they have epochs."""

    def __init__(self, gpu):
        self.gpu, self.run, self.killed = gpu, None, False
        self.process = SimpleNamespace(is_alive=lambda: True)


def test_no_run_begins_that_would_not_end(load, pool, monkeypatch, tmp_path):
    """Runs of 30 s, with 100 s left: three after each other; the fourth would be killed."""
    clock = SimpleNamespace(now=0.0)

    class Worker(Asleep):
        @property
        def connection(self):
            return self

        def begin(self, run, directory):
            self.run, self.began_s = run, clock.now

        def outcome(self):
            run, self.run = self.run, None
            return pool.Result(90.0, 0.5, run.epochs, 90.0)

        def kill(self):
            self.killed = True

    def wait(connections, timeout):
        clock.now += 30
        return connections if timeout >= 30 else []

    monkeypatch.setattr(pool, "Worker", Worker)
    monkeypatch.setattr(pool, "Connection", Worker)
    monkeypatch.setattr(pool, "wait", wait)
    monkeypatch.setattr(pool.time, "monotonic", lambda: clock.now)
    table = pool.RunTable(tmp_path / "x.csv")
    with pool.Workers(1, 0, 100.0) as workers:
        completion = pool.complete(table, workers, [any_run(load, seed) for seed in range(5)], lambda run: False)
    assert [run.seed for run in completion.missing] == [3, 4] and not completion.failures
    assert clock.now == 90, "nothing was waited for in vain"
    assert all(worker.killed for worker in workers.workers)
    with pytest.raises(SystemExit) as ended:
        completion.exit()
    assert ended.value.code == pool.EXIT_TIME_OVER


def test_status_names_failures_before_missing_runs(load, pool, capsys):
    pool.Completion([], []).exit()
    with pytest.raises(SystemExit) as ended:
        pool.Completion(["digits mhla: no memory"], [any_run(load)]).exit()
    assert ended.value.code == pool.EXIT_FAILED
    said = capsys.readouterr().err
    assert "error: digits mhla: no memory" in said and "1 of digits linear plain" in said


def test_two_calls_do_not_write_the_same_table(load, tmp_path):
    table = load("run_table")
    with (
        table.open_table(tmp_path / "x.csv"),
        pytest.raises(SystemExit, match=r"x\.csv is in use by process"),
        table.open_table(tmp_path / "x.csv"),
    ):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_time_ends_a_run_at_once_and_quietly(load, pool, tmp_path, capfd):
    """A real worker in the middle of a run that would take hours."""
    start = time.monotonic()
    with pool.Workers(1, 0, start + 20) as workers:
        completion = pool.complete(
            pool.RunTable(tmp_path / "x.csv"), workers, [any_run(load, epochs=100_000)], lambda run: False
        )
        (worker,) = workers.workers
    assert len(completion.missing) == 1 and time.monotonic() - start < 30
    assert worker.process.exitcode == -9
    printed = capfd.readouterr()
    assert not printed.out and not printed.err


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_dead_worker_is_a_failure_and_another_takes_over(load, pool, tmp_path):
    broken = any_run(load)._replace(options=("--no_such_option", "1"))
    first, second = any_run(load, 0, 100_000), any_run(load, 1)
    short = ("--trainer.limit_train_batches", "1", "--trainer.limit_val_batches", "1")
    with pool.Workers(1, 0, time.monotonic() + 100) as workers:
        for run in (first, broken, second._replace(options=short)):
            workers.submit(run, False)
        results = workers.results()
        workers._begin()
        workers.workers[0].process.kill()
        outcomes = [outcome for _, outcome in results]
    assert "its process ended with -9" in str(outcomes[0]) and "no_such_option" in str(outcomes[1])
    assert isinstance(outcomes[2], pool.Result) and len(workers.workers) == 1
