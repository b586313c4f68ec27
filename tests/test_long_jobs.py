"""What long jobs of several commands share: commands until a time, GPUs, tables over seeds, tables of results."""

import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from headmix_lab import scripts, tables
from headmix_lab.scripts import Gpus, RunFailed, TimeOver, run_python
from headmix_lab.tables import ResultTable, installed_version, markdown_table, mean_and_deviation, write_table


def test_a_command_is_interrupted_when_the_time_is_over():
    begin = time.monotonic()
    with pytest.raises(TimeOver):
        run_python(["-c", "import time; time.sleep(60)"], deadline_s=begin + 0.2)
    with pytest.raises(TimeOver):
        run_python(["-c", "raise SystemExit('it was started')"], deadline_s=begin)
    assert time.monotonic() - begin < 30
    with pytest.raises(RunFailed, match="no memory"):
        run_python(["-c", "raise SystemExit('no memory')"], deadline_s=time.monotonic() + 60)


def test_a_command_says_what_it_printed_and_why_it_failed(tmp_path: Path):
    assert run_python(["-c", "import os; print(os.getcwd())"], cwd=tmp_path) == f"{tmp_path}\n"
    with pytest.raises(RunFailed, match=r"no_such_script\.py"):
        run_python(["no_such_script.py"])
    with pytest.raises(RunFailed) as failed:
        run_python(["-c", "raise SystemExit('a warning\\nerror: no such file')"])
    assert failed.value.reason == "no such file"


def test_commands_side_by_side_share_the_gpus_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    gpus = Gpus()
    with gpus.least_busy() as first, gpus.least_busy() as second:
        assert [first, second] == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "5"}]
    with gpus.least_busy(), gpus.least_busy(), gpus.least_busy() as third:
        assert third == {"CUDA_VISIBLE_DEVICES": "3"}
    for _ in range(2):  # a GPU is free again when its command has ended
        with gpus.least_busy() as alone:
            assert alone == {"CUDA_VISIBLE_DEVICES": "3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with Gpus().least_busy() as only:
        assert only == {}


def test_commands_that_start_at_the_same_time_share_the_gpus_out(monkeypatch: pytest.MonkeyPatch):
    def slow_names() -> list[str]:
        time.sleep(0.05)
        return ["0", "1"]

    monkeypatch.setattr(scripts, "gpu_names", slow_names)
    monkeypatch.setattr(scripts, "_GPUS", Gpus())
    show = ["-c", "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES']); time.sleep(1)"]
    with ThreadPoolExecutor(6) as pool:
        shown = list(pool.map(lambda _: run_python(show, side_by_side=True), range(6)))
    assert sorted(shown) == ["0\n"] * 3 + ["1\n"] * 3


def test_tables_of_seeds():
    assert mean_and_deviation([1.0, 2.0, 3.0]) == "2.00 ± 1.00"
    assert [mean_and_deviation(values, 1) for values in ([], [2.0])] == ["–", "2.0"]
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"


def test_a_table_of_results_keeps_its_rows(tmp_path: Path):
    def opened() -> ResultTable:
        return ResultTable(tmp_path / "new" / "x.csv", ("name", "seed", "top1", "recipe"), 2, lambda key: key)

    opened().add(("b", 0), top1=1 / 3, recipe="r")
    opened().add(("a", 1), recipe="r")
    assert (tmp_path / "new" / "x.csv").read_text().split() == ["name,seed,top1,recipe", "a,1,,r", "b,0,0.33,r"]
    assert opened().row(("b", 0), "other") is None and opened().row(("c", 0), "r") is None
    (tmp_path / "new" / "x.csv").write_text("something,else\n1,2\n")
    with pytest.raises(ValueError, match=r"x\.csv is not a table"):
        opened()


@pytest.mark.parametrize("completed", [True, False])
def test_a_table_says_where_its_rows_come_from(completed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)

    def write(commit: str, rate: str) -> list[dict[str, str]]:
        monkeypatch.setenv("HEADMIX_VISION_COMMIT", commit)
        monkeypatch.setattr(sys, "argv", [str(Path("benchmarks/x.py").absolute()), "--rate", rate])
        tables._this_call.cache_clear()
        write_table(tmp_path / "x.csv", ["a"], [{"a": 1}], completed=completed)
        calls: list[dict[str, str]] = json.loads((tmp_path / "origins.json").read_text())["x.csv"]
        return calls

    first, again = write("abc1234", "0.1"), write("abc1234", "0.1")
    assert first == again and first[0]["torch"] == installed_version("torch")
    assert [first[0][name] for name in ("commit", "command")] == ["abc1234", "python benchmarks/x.py --rate 0.1"]
    write_table(tmp_path / "other.csv", ["a"], [])
    both = write("def5678", "a b")
    assert both[:-1] == (first if completed else []) and both[-1]["command"].endswith("--rate 'a b'")
    (tmp_path / "x.csv").unlink()
    monkeypatch.setattr(main, "__spec__", find_spec("headmix_vision.analysis.__main__"))
    (call,) = write("abc1234", "0.1")
    assert call["command"] == "python -m headmix_vision.analysis --rate 0.1"


def test_the_commit_of_a_table_is_that_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *arguments], cwd=tmp_path, check=True)

    monkeypatch.delenv("HEADMIX_VISION_COMMIT", raising=False)
    monkeypatch.setattr(tables, "_REPOSITORY", tmp_path)
    assert tables._commit() == "unknown"
    for folder in ("headmix_vision", "experiments", "docs"):
        (tmp_path / folder).mkdir()
        for name in ("a.py", "a.csv"):
            (tmp_path / folder / name).touch()
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "x")
    for folder in ("experiments", "docs"):
        (tmp_path / folder / "a.csv").write_text("a result")
    assert re.fullmatch("[0-9a-f]{7,}", tables._commit())
    (tmp_path / "experiments" / "a.py").write_text("a change")
    assert re.fullmatch(r"[0-9a-f]{7,}\+changes", tables._commit())
