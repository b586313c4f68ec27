from collections.abc import Iterator

import pytest

from headmix_vision.ops.launching import forget_plans


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    """Tests change constants that launches depend on."""
    forget_plans()
    yield
    forget_plans()
