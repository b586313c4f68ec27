"""Tables and links of all documents: tables equal their CSV files, links lead somewhere."""

import re
from pathlib import Path

import pytest

from benchmarks import report as benchmarks
from experiments import tables
from headmix_vision.ops.runtime import OLDEST_TRITON

REPOSITORY = Path(__file__).parents[2]
FOLDERS = (".", "docs", "notes", "benchmarks", "experiments", "experiments/*", "headmix_vision/ops/*")
DOCUMENTS = sorted(path for folder in FOLDERS for path in REPOSITORY.glob(f"{folder}/*.md"))


def test_documents_say_what_their_csv_files_say(capsys):
    with pytest.raises(SystemExit) as ended:
        tables.main(["--check"])
    assert ended.value.code == 0, capsys.readouterr().out
    shown = [found["name"] for _, text in tables.documents() for found in tables.MARKER.finditer(text)]
    assert sorted(shown) == sorted(tables.TABLES)


def test_every_csv_file_has_its_claim_and_origin():
    found = {path for folder in ("benchmarks", "experiments") for path in (REPOSITORY / folder).rglob("*.csv")}
    assert tables.claimed().keys() == found and all(tables.origins_of(path) for path in found)


def test_another_number_is_found():
    text = "Before.\n\n<!-- table digits -->\n| attention | 98.0 |\n\nAfter.\n"
    renewed = tables.renewed(text)
    assert renewed != text and tables.renewed(renewed) == renewed
    assert renewed.startswith("Before.\n\n<!-- table digits -->\n| attention | CPE |")
    assert renewed.endswith(" |\n\nAfter.\n")
    with pytest.raises(KeyError, match="nowhere"):
        tables.renewed("<!-- table nowhere -->\n")


def test_plots_of_times_name_their_lines(tmp_path):
    for name, labels in {"mhla_h200.svg": ("MHLA", "cuDNN"), "hih_h200.svg": ("r = 4", "fla, r = 1")}.items():
        benchmarks.PLOTS[name](tmp_path / "plot.svg")
        plot = (tmp_path / "plot.svg").read_text()
        assert all(f">{label}</text>" in plot for label in (*labels, "memory's floor")) and len(plot) < 100_000


def test_versions_begin_with_the_oldest_allowed_and_hold_the_pinned():
    oldest, *_ = benchmarks.PAIRS
    assert f'"torch>={oldest.torch}"' in (REPOSITORY / "pyproject.toml").read_text()
    assert oldest.triton == ".".join(map(str, OLDEST_TRITON))
    pins = dict(re.findall(r"(?m)^(torch|triton)==(\d+\.\d+)", (REPOSITORY / "constraints.txt").read_text()))
    (pinned,) = (pair for pair in benchmarks.PAIRS if (pair.torch, pair.triton) == (pins["torch"], pins["triton"]))
    assert pinned.evidence == benchmarks.RUN_ON_GPUS


def headings(path: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```", "", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_lead_to_files_and_headings(path: Path):
    text = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", path.read_text())
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        place = (path.parent / target).resolve() if target else path
        assert place.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in headings(place), f"{path.name} links to {target}#{anchor}"
