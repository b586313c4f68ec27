"""Tables that files enter their classes into, by name."""

from collections.abc import Callable
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
