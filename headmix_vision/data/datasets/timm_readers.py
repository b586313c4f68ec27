"""timm's readers of data sets, with the checks that timm leaves out."""

from typing import Any

from PIL import EpsImagePlugin

from headmix_vision.errors import InputError

EpsImagePlugin.gs_binary = False  # timm's readers open whatever Pillow knows, which starts Ghostscript for EPS


def create_timm_dataset(name: str, **kwargs: Any) -> Any:
    """Call `timm.data.create_dataset`, with its many ways to fail turned into an InputError of one line."""
    from timm.data import create_dataset

    try:
        return create_dataset(name, **kwargs)
    except Exception as error:  # every reader and every library below it raises its own types
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(
            f"dataset {name or 'folder'!r}, split {kwargs.get('split')!r}, root {kwargs.get('root')!r}: {reason}"
        ) from error


def reader_class_names(reader: Any) -> list[str]:
    """Class names of a timm reader in the order of their index, empty if it does not know them."""
    indices = getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", None) or {}
    return sorted(indices, key=indices.__getitem__)
