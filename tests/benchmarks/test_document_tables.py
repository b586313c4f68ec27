"""`document_tables.py`: the tables of the documents are those of their CSV files."""

import re

import pytest

from headmix_vision.ops.runtime import OLDEST_TRITON


def test_documents_say_what_their_csv_files_say(load, capsys):
    tables = load("document_tables")
    with pytest.raises(SystemExit) as ended:
        tables.main(["--check"])
    assert ended.value.code == 0, capsys.readouterr().out
    shown = [found["name"] for _, text in tables.documents() for found in tables.MARKER.finditer(text)]
    assert sorted(shown) == sorted(tables.TABLES)


def test_every_csv_file_is_named_with_its_claim(load):
    tables = load("document_tables")
    assert {*tables.CLAIMS, *tables.FURTHER_CLAIMS} == {path.stem for path in tables.DOCS.glob("*.csv")}


def test_another_number_is_found(load):
    tables = load("document_tables")
    text = "Before.\n\n<!-- table digits -->\n| attention | 98.0 |\n\nAfter.\n"
    renewed = tables.renewed(text)
    assert renewed != text and tables.renewed(renewed) == renewed
    assert renewed.startswith("Before.\n\n<!-- table digits -->\n| attention | CPE |")
    assert renewed.endswith(" |\n\nAfter.\n")
    with pytest.raises(KeyError, match="nowhere"):
        tables.renewed("<!-- table nowhere -->\n")


def test_plots_of_times_name_their_lines(load, tmp_path):
    tables = load("document_tables")
    for name, labels in {"mhla_h200": ("MHLA", "cuDNN"), "hih_h200": ("r = 4", "fla, r = 1")}.items():
        tables.PLOTS[name](tables.read(name), tmp_path / "plot.svg")
        plot = (tmp_path / "plot.svg").read_text()
        assert all(f">{label}</text>" in plot for label in (*labels, "memory's floor")) and len(plot) < 100_000


def test_versions_begin_with_the_oldest_allowed_and_hold_the_pinned(load):
    tables, versions = load("document_tables"), load("tested_versions")
    oldest, *_ = versions.PAIRS
    assert f'"torch>={oldest.torch}"' in (tables.REPOSITORY / "pyproject.toml").read_text()
    assert oldest.triton == ".".join(map(str, OLDEST_TRITON))
    pins = dict(re.findall(r"(?m)^(torch|triton)==(\d+\.\d+)", (tables.REPOSITORY / "constraints.txt").read_text()))
    (pinned,) = (pair for pair in versions.PAIRS if (pair.torch, pair.triton) == (pins["torch"], pins["triton"]))
    assert pinned.evidence == versions.RUN
