"""Build the site out of the Markdown of the whole repository: `make docs`.

Sphinx with Furo, since it reads pages where they stand in the repository; MkDocs reads one folder alone.
"""

import re
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

# All pages in their order after the README. Tests run the blocks of README and `docs/` in this order, too.
PAGES = {
    "Guides": [
        "docs/training",
        "docs/generating",
        "docs/video",
        "docs/sampling_videos",
        "docs/wan",
        "docs/scale",
        "docs/evaluation",
        "docs/inputs",
        "docs/analysis",
        "SECURITY",
    ],
    "Choose": ["docs/using_models", "docs/hardware", "docs/models"],
    "How the kernels work": [
        "headmix_vision/ops/mhla/README",
        "headmix_vision/ops/head_in_head/README",
        "headmix_vision/ops/mix_heads/README",
        "headmix_vision/ops/grid_conv/README",
    ],
    "Results": ["benchmarks/README", "experiments/README"],
    "API": [
        "docs/api/headmix_vision",
        "docs/api/ops",
        "docs/api/layers",
        "docs/api/models",
        "docs/api/data",
        "docs/api/diffusion",
        "docs/api/runs",
        "docs/api/sampling",
        "docs/api/evaluation",
        "docs/api/analysis",
        "docs/api/training",
    ],
    "Contribute": [
        "docs/architecture",
        "docs/changes",
        "CHANGELOG",
        "notes/experiments",
        "notes/generation",
        "notes/kernels",
        "notes/models",
        "notes/scale",
    ],
}
EXPERIMENTS = sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.glob("experiments/*/README.md"))

project = "headmix_vision"
root_doc = "README"
include_patterns = ["README.md", *(f"{page}.*" for pages in PAGES.values() for page in pages)]
include_patterns += ["experiments/*/README.md"]
_read = {"docs", "notes", "benchmarks", "experiments", "headmix_vision"}
exclude_patterns = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in _read]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
nitpicky = False
suppress_warnings = ["myst.header"]  # sections of some tables start below the first level

myst_heading_anchors = 4
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
default_role = "code"  # docstrings write names in single backticks, as Markdown does

html_theme = "furo"
html_title = "headmix_vision"
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}


def _toctree(caption: str, pages: list[str]) -> str:
    return "\n".join(
        ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *(f"/{page}" for page in pages), "```", ""]
    )


def _read_source(app: object, page: str, source: list[str]) -> None:
    """Add the navigation to the pages that have others below them, and make links to folders plain text."""
    text = source[0]
    folder = (ROOT / page).parent
    text = re.sub(r"\[([^]]+)\]\(([^)#:]+)\)", lambda link: link[1] if (folder / link[2]).is_dir() else link[0], text)
    if page == root_doc:
        text += "".join(_toctree(*item) for item in PAGES.items())
    if page == "experiments/README":
        text += _toctree("Experiments", EXPERIMENTS)
    source[0] = text


def _write_index(app, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "index.html").write_text('<meta http-equiv="refresh" content="0; url=README.html">\n')


def _import_lazy_names(app: object) -> None:
    """Import what packages import when it is used; autodoc lists only what a module holds."""
    for path in (ROOT / "headmix_vision").glob("*/__init__.py"):
        package = import_module(f"headmix_vision.{path.parent.name}")
        for name in getattr(package, "__all__", ()):
            setattr(package, name, getattr(package, name))


def _escape_shapes(app: object, kind: str, name: str, what: object, options: object, lines: list[str]) -> None:
    """Keep the star of shapes such as [B, C, *grid], which would start emphasis."""
    lines[:] = [re.sub(r"(?<![*\w`])\*(?=\w)", r"\\*", line) for line in lines]


def setup(app) -> None:
    app.connect("builder-inited", _import_lazy_names)
    app.connect("autodoc-process-docstring", _escape_shapes, priority=900)
    app.connect("source-read", _read_source)
    app.connect("build-finished", _write_index)
