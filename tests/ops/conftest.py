import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headmix_vision.ops.hardware import INTERPRETED
from headmix_vision.ops.runtime import forget_plans


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> None:
    """Spare Triton's interpreter work without effect, half of its time, and mend two of its releases."""
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
    # Up to 3.6 it makes integers of arrays [x], for the bounds of range(), as NumPy 2.4 no longer does.
    tl.core.tensor.__index__ = lambda self: int(self.handle.data.item())
    # In 3.9 it spreads a truth value to integers, which its loads refuse as a mask.
    spread = builder.create_splat

    def create_splat(kind: Any, value: Any) -> Any:
        handle = spread(kind, value)
        if value.data.dtype == bool:
            handle.data = handle.data.astype(bool)
        return handle

    builder.create_splat = create_splat
    keep_types(tl.core, interpreter)


def keep_types(core: Any, interpreter: Any) -> None:
    """Compute once what follows from the shape and the elements of a block: Triton does so for each of its values."""
    fill, block_fields = core.block_type.__init__, {}

    def fill_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (str(element_ty), *(getattr(size, "value", size) for size in shape))
        if key not in block_fields:
            fill(self, element_ty, shape)
            self.of_tensors = {}
            block_fields[key] = vars(self).copy()
        vars(self).update(block_fields[key], element_ty=element_ty)

    core.block_type.__init__ = fill_block
    fill_any = core.tensor.__init__

    def fill_tensor(self: Any, handle: Any, type: Any) -> None:  # Triton passes it by this name
        kept = vars(type).setdefault("of_tensors", {})
        if kept:
            vars(self).update(kept, handle=handle, type=type, dtype=type.scalar)
        else:
            fill_any(self, handle, type)
            kept.update(shape=self.shape, numel=self.numel)

    core.tensor.__init__ = fill_tensor
    tuple_type, tuple_types = core._type_for_tuple_values, {}

    def type_of_tuple(values: Any, fields: Any = None) -> Any:
        if fields is not None or set(map(type, values)) != {int}:
            return tuple_type(values, fields)
        key = tuple(values)
        if key not in tuple_types:
            tuple_types[key] = tuple_type(values)
        return tuple_types[key]

    core._type_for_tuple_values = type_of_tuple
    numpy_type, numpy_types = interpreter._get_np_dtype, {}

    def numpy_type_of(kind: Any) -> Any:
        name = str(kind)
        if name not in numpy_types:
            numpy_types[name] = numpy_type(kind)
        return numpy_types[name]

    interpreter._get_np_dtype = numpy_type_of


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    """Tests change constants that launches depend on."""
    forget_plans()
    yield
    forget_plans()
