import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from headmix_vision.ops.kernels import INTERPRETED
from headmix_vision.ops.launching import forget_plans


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> None:
    """Spares Triton's interpreter work without effect, half of its time."""
    if not INTERPRETED:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    # It patches the language at every call of every function: here once, for good.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    # It computes integers twice, for an assertion that is off.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    """Tests change constants that launches depend on."""
    forget_plans()
    yield
    forget_plans()
