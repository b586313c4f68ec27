"""Cores on digits: a table that is completed call by call."""

import csv

import pytest

from experiments.digits import run as digits


def test_digits_of_one_core_join_those_of_an_earlier_call(monkeypatch, tmp_path, capsys):
    path = tmp_path / "digits.csv"
    calls = []

    def train(core, cpe, seed, *_):
        calls.append((core, cpe, seed))
        return 90 + int(seed), 95 + int(seed) + len(core) / 10

    monkeypatch.setattr(digits, "train_setting", train)

    def run(*arguments):
        calls.clear()
        digits.main(["--out", str(path), *arguments])
        return capsys.readouterr().out.splitlines()

    assert len(run("--cores", "mhla", "linear", "--seeds", "0", "2")) == 2 + 4 and len(calls) == 8
    table = run("--cores", "hih", "--seeds", "0", "1")
    assert set(calls) == {("hih", cpe, seed) for cpe in ("True", "False") for seed in "01"}
    cores = ["linear", "mhla", "hih"]
    assert [line.split(" ")[1] for line in table[2:]] == 2 * cores
    assert table[2] == "| linear | on | 91.00 ± 1.41 | 96.60 ± 1.41 |"
    with path.open() as file:
        assert [row["core"] for row in csv.DictReader(file)] == [core for core in 2 * cores for _ in range(2)]

    path.write_text("something,else\n1,2\n")
    with pytest.raises(SystemExit, match="was not written by this script"):
        run("--cores", "hih")
    assert not calls and path.read_text() == "something,else\n1,2\n"
