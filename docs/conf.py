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
    "Guides": {
        "docs/swap": "Swap the attention of my model",
        "docs/folder": "Train on my folder",
        "docs/finetune": "Fine-tune",
        "docs/training": "Runs: train, resume, export",
        "docs/generating": "Generate images",
        "docs/video": "Video: train on clips",
        "docs/sampling_videos": "Video: draw",
        "docs/models": "ImageNet on 8 GPUs",
        "docs/wan": "Wan and Sana",
        "docs/scale": "Many GPUs and SLURM",
        "docs/datasets": "Data sets and latents",
        "docs/evaluation": "Evaluation",
        "docs/inputs": "Inputs",
        "docs/analysis": "Look into attention layers",
    },
    "Choose": {
        "docs/using_models": "Choose an attention",
        "docs/hardware": "My card",
        "docs/faq": "FAQ",
        "SECURITY": "Security",
    },
    "How the kernels work": {
        "docs/kernels": "Overview",
        "headmix_vision/ops/mhla/README": "MHLA",
        "headmix_vision/ops/head_in_head/README": "Head-in-Head",
        "headmix_vision/ops/mix_heads/README": "Head mixes",
        "headmix_vision/ops/grid_conv/README": "Convolution on the grid",
    },
    "Results": {"benchmarks/README": "Speed and memory", "experiments/README": "Experiments"},
    "API": {
        "docs/api/headmix_vision": "headmix_vision",
        **{
            f"docs/api/{package}": package
            for package in (
                *("ops", "layers", "models", "data", "diffusion", "runs", "sampling"),
                *("evaluation", "analysis", "training"),
            )
        },
    },
    "Contribute": {
        "CONTRIBUTING": "From clone to a new core",
        "CODE_OF_CONDUCT": "Code of conduct",
        "docs/architecture": "Architecture",
        "docs/changes": "Changes since 0.1.0",
        "CHANGELOG": "Changelog",
        "notes/libraries": "Own code beside libraries",
        "notes/experiments": "Notes: what models learn",
        "notes/generation": "Notes: generation",
        "notes/kernels": "Notes: kernels",
        "notes/models": "Notes: whole models",
        "notes/scale": "Notes: several GPUs",
    },
}
EXPERIMENTS = {f"experiments/{path.parent.name}/README": "" for path in sorted(ROOT.glob("experiments/*/README.md"))}

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


def _toctree(caption: str, pages: dict[str, str]) -> str:
    listed = [f"{title} </{page}>" if title else f"/{page}" for page, title in pages.items()]
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *listed, "```", ""])


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


def _skip_fields(app: object, kind: str, name: str, member: object, skip: bool, options: object) -> bool:
    """Leave out fields of named tuples: their class describes them."""
    return skip or str(getattr(member, "__doc__", "")).startswith("Alias for field number")


def setup(app) -> None:
    app.connect("autodoc-skip-member", _skip_fields)
    app.connect("builder-inited", _import_lazy_names)
    app.connect("autodoc-process-docstring", _escape_shapes, priority=900)
    app.connect("source-read", _read_source)
    app.connect("build-finished", _write_index)
