"""Tables and links of all documents: tables equal their CSV files, links lead somewhere."""

import re
import runpy
from pathlib import Path

import matplotlib
import pytest

from benchmarks import report as benchmarks
from experiments import tables
from headmix_vision.ops.hardware import OLDEST_TRITON

REPOSITORY = Path(__file__).parents[2]
FOLDERS = (".", "docs", "notes", "benchmarks", "experiments", "experiments/*", "headmix_vision/ops/*")
# Pictures that runs draw, and the test that runs their command in its smallest form.
DRAWN_IN = {
    "docs/images/attention.png": "lab/test_schematic.py",
    "docs/images/digits.png": "experiments/test_tables.py",
    "docs/images/generated.png": "sampling/test_sample.py",
    "experiments/attention_matrices/maps.png": "analysis/test_attention_commands.py",
    "experiments/attention_matrices/rank.svg": "analysis/test_attention_commands.py",
    "experiments/demos/curves.svg": "training/test_fit.py",
    "experiments/emoji/emoji.png": "experiments/test_emoji_models.py",
    "experiments/emoji/emoji_cores.png": "experiments/test_emoji_models.py",
    "experiments/emoji/large/emoji.png": "experiments/test_emoji_models.py",
    "experiments/emoji/large/emoji_neighbours.png": "experiments/test_emoji_models.py",
    "experiments/fashion_mnist/fashion_mnist_cores.png": "experiments/test_emoji_models.py",
    "experiments/head_mixes/learned_iha.png": "analysis/test_mixing_command.py",
    "experiments/head_mixes/learned_mea.png": "analysis/test_pictures.py",
    "experiments/head_mixes/learned_mhla.png": "analysis/test_mixing_command.py",
    "experiments/moving_digits/moving_digits.png": "experiments/test_moving_digits_models.py",
    "experiments/moving_digits/moving_digits_curves.svg": "experiments/test_moving_digits_models.py",
    "experiments/swap/maps.png": "experiments/test_swapped_backbones.py",
    "experiments/swap/maps_hih.png": "experiments/test_swapped_backbones.py",
}
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


def test_plots_are_those_of_their_csv_files(tmp_path):
    for path, draw in tables.plots().items():
        draw(tmp_path / "plot.svg")
        old, new = path.read_text(), (tmp_path / "plot.svg").read_text()
        if f"Matplotlib v{matplotlib.__version__}," in old:  # other versions place things elsewhere
            assert new == old, f"python -m experiments.tables renews {path}"
    plot = (benchmarks.FOLDER / "mhla_h200.svg").read_text()
    assert all(f">{text}</text>" in plot for text in ("MHLA", "softmax, cuDNN", "memory's floor", "0.262", "13"))


def test_every_picture_is_drawn_by_a_command_that_a_test_runs():
    folders = (REPOSITORY / name for name in ("benchmarks", "docs", "examples", "experiments"))
    found = {path for folder in folders for path in folder.rglob("*") if path.suffix in (".png", ".svg")}
    assert found - tables.plots().keys() == {REPOSITORY / path for path in DRAWN_IN}
    assert all((REPOSITORY / "tests" / test).is_file() for test in DRAWN_IN.values())


def test_the_example_draws_the_digits_that_a_file_of_weights_knows(tmp_path, monkeypatch, capsys):
    weights = REPOSITORY / "headmix_vision/models/weights/deit_mhla_digits.safetensors"
    monkeypatch.setattr("sys.argv", ["classify_digits.py", str(weights), "--out", str(tmp_path / "digits.png")])
    runpy.run_path(str(REPOSITORY / "examples" / "classify_digits.py"), run_name="__main__")
    assert "top-1 through timm 99.44%" in capsys.readouterr().out
    assert (tmp_path / "digits.png").stat().st_size > 10_000


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
