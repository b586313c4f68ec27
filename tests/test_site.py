"""The site: every public name stands in its reference, every page in its navigation."""

import ast
import re
import runpy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import test_documents

ROOT = Path(__file__).parents[1]
CONF: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "conf.py"))
PACKAGES = ("analysis", "data", "diffusion", "evaluation", "layers", "models", "ops", "sampling", "training")


def public_names() -> set[str]:
    """Names that packages list, and names that documents import."""
    names = {f"headmix_vision.{name}" for name in ("swap_attention", "save_pretrained", "from_pretrained")}
    for package in PACKAGES:
        listed = import_module(f"headmix_vision.{package}").__all__
        names |= {f"headmix_vision.{package}.{name}" for name in listed}
    for path in test_documents.DOCUMENTS:
        for block in test_documents.blocks(path, "python"):
            for line in ast.walk(ast.parse(block)):
                if isinstance(line, ast.ImportFrom) and str(line.module).startswith("headmix_vision"):
                    module = str(line.module).replace("layers.cores.base", "layers")  # which lists them
                    names |= {f"{module}.{alias.name}" for alias in line.names}
    return names


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = pytest.importorskip("sphinx.cmd.build")
    out = tmp_path_factory.mktemp("site")
    assert (
        build.main(
            ["--fail-on-warning", "--quiet", "-c", f"{ROOT}/docs", "-d", f"{out}/trees", str(ROOT), f"{out}/html"]
        )
        == 0
    )
    return out / "html"


@pytest.mark.slow
def test_every_public_name_stands_on_the_site(site: Path):
    ids = {
        name
        for page in (site / "docs" / "api").glob("*.html")
        for name in re.findall(r'id="([\w.]+)"', page.read_text())
    }
    assert not public_names() - ids


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site: Path):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="([^"]+)"', page.read_text())
        assert not [place for place in loaded if "//" in place], page


def test_every_document_is_in_the_navigation():
    listed = {page for pages in CONF["PAGES"].values() for page in pages}
    pages = {
        path.relative_to(ROOT).with_suffix("").as_posix()
        for path in ROOT.glob("docs/**/*.*")
        if path.suffix in (".md", ".rst")
    }
    assert pages <= listed
