"""Tables that files enter their classes into, by name, and registration with timm at the moment when it is imported."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


class Registry(dict[str, T]):
    """Classes or functions by name; a decorator enters them where they are defined."""

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that enters what it decorates under a name."""

        def enter(item: T) -> T:
            assert name not in self, f"{name!r} is registered twice"
            self[name] = item
            return item

        return enter


class _TimmFinder(MetaPathFinder):
    """Find timm where the other finders do, and let its loader import our models behind it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "timm":
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                sys.meta_path.remove(self)
                execute(module)
                import_module("headmix_vision.models")

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_after_timm() -> None:
    """Register the models of this package when timm is imported; nothing is imported now."""
    sys.meta_path.insert(0, _TimmFinder())
