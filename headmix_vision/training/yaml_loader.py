"""YAML of recipes, runs and options: loaded by jsonargparse's rules, after its size has been checked."""

from typing import Any

from jsonargparse import get_loader, set_loader
from yaml import YAMLError

from headmix_vision.files.texts import check_yaml

_load = get_loader("yaml")


def load_yaml(text: str) -> Any:
    """Load YAML; InputError where it is too large when its aliases are written out, see `check_yaml`."""
    check_yaml(text)
    return _load(text)


set_loader("yaml", load_yaml, exceptions=(YAMLError,))
