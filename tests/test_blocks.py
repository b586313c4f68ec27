"""Blocks of README and `docs/` run in the order of their pages, each in its smallest form."""

import os
import re
import subprocess
import sys
from pathlib import Path

import blocks
import pytest
import test_documents

TEXTS = {path.stem: [block.text for block in test_documents.all_blocks(path)] for path in blocks.pages()}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_blocks_run_in_the_order_of_their_pages(tmp_path: Path) -> None:
    script = Path(blocks.__file__)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, script, tmp_path / "work"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, re.sub(r"(?m)^ran .*\n", "", done.stdout)[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("page", ["README", "swap", "using_models"])
def test_programs_of_first_pages_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (path,) = (path for path in blocks.pages() if path.stem == page)
    ran = [*blocks.run_page(path, tmp_path, ("python",))]
    assert ran and not [one for one in ran if one.wrong]


def test_every_page_of_docs_is_run() -> None:
    assert {path.name for path in blocks.pages()} == {"README.md"} | {
        path.name for path in (blocks.ROOT / "docs").glob("*.md")
    }


def test_rules_for_blocks_are_used() -> None:
    for page, pattern, _ in blocks.SMALLER:
        texts = [text for name, found in TEXTS.items() if page in ("", name) for text in found]
        assert any(re.search(pattern, text) for text in texts), pattern
    everything = "\n".join(text for texts in TEXTS.values() for text in texts)
    assert not [part for part in blocks.LEFT_OUT if part not in everything]
    assert blocks.MADE.keys() <= TEXTS.keys()
