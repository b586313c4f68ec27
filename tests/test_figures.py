"""Figures of README, `docs/` and experiments follow from the data in the repository."""

import random
from pathlib import Path

import figures
import pytest


def test_forty_figures_drawn_at_random_follow_from_the_data() -> None:
    drawn = random.Random(0).sample(figures.all_figures(), figures.DRAWN)
    assert not [figure for figure in drawn if not figure.is_right]
    assert len({figure.document for figure in drawn}) > 5


@pytest.mark.parametrize("document", sorted({claim.document for claim in figures.CLAIMS}))
def test_figures_of_a_document_follow_from_the_data(document: str) -> None:
    found = [figure for claim in figures.CLAIMS if claim.document == document for figure in figures.figures(claim)]
    assert found and not [figure for figure in found if not figure.is_right]


def test_a_wrong_digit_and_a_sentence_that_is_gone_are_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "text_of", figures.text_of.__wrapped__)
    claim = figures.Claim("page.md", r"takes # ms, # with it", lambda: [1234.44, 0.245], "data.csv")
    for text, right in (("1,234.4 ms, .24", True), ("1,234.4 ms, .25", True), ("1,234.5 ms, .24", False)):
        (tmp_path / "page.md").write_text(f"It takes\n{text} with it.")
        assert all(figure.is_right for figure in figures.figures(claim)) == right
    (tmp_path / "page.md").write_text("It takes long.")
    with pytest.raises(ValueError, match=r"page.md has 0 times: takes # ms"):
        figures.figures(claim)
