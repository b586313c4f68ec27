"""`document_tables.py`: the tables of the documents are those of their CSV files."""

import pytest


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
