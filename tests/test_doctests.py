"""Examples in docstrings run as they stand."""

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

from headmix_vision import save_pretrained, swap_attention
from headmix_vision.layers import HeadMixAttention
from headmix_vision.models import compress_heads, convert, convert_dit
from headmix_vision.ops import head_in_head, mhla

ROOT = Path(__file__).parents[1]
SOURCES = [path for package in ("headmix_vision", "headmix_lab") for path in sorted(ROOT.glob(f"{package}/**/*.py"))]
WITH_EXAMPLES = [path for path in SOURCES if ">>> " in path.read_text()]
# A literal block of code, which nothing would run.
CODE = re.compile(r"(?m)::\n\n +(?:\w+ = \w+\.\w+\(|import |from |with |for )\S.*$")


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_of_docstrings_print_what_they_say(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    done = doctest.testmod(import_module(name))
    assert done.attempted and not done.failed


@pytest.mark.parametrize(
    "function",
    [
        *(swap_attention, save_pretrained, HeadMixAttention, compress_heads, mhla, head_in_head),
        *(convert.convert_state_dict, convert.wan_to_mhla, convert.sana_to_mhla, convert_dit.convert_dit_state_dict),
    ],
    ids=lambda function: function.__name__,
)
def test_much_used_functions_have_an_example(function: object) -> None:
    assert ">>> " in str(function.__doc__)


def test_code_in_docstrings_is_an_example_that_runs() -> None:
    found = [str(path.relative_to(ROOT)) for path in SOURCES if CODE.search(path.read_text())]
    assert not found
