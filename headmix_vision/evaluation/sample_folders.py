"""Check of folders of samples before scoring: complete, or on request as far as they are there."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headmix_vision.errors import InputError
from headmix_vision.evaluation.sample_sources import DECODER_THREADS, SAMPLES, SAMPLES_METADATA
from headmix_vision.files.pictures import is_hidden, is_picture, is_whole_png
from headmix_vision.files.reading import read_json

_PARTS = (SAMPLES, "videos", "frames", "samples.npz")


def check_complete(source: str, option: str, incomplete: bool) -> None:
    """Check that a folder of samples is complete, if the source is one or lies in one.

    Args:
        source: Place of the samples.
        option: Name of the option that named it, for messages.
        incomplete: Take a folder with missing samples, with a warning.

    Raises:
        InputError: Samples are missing and `incomplete` is false, or a file is not a whole PNG.
    """
    path = Path(source)
    folder = path.parent if path.name in _PARTS else path
    if not source or not (folder / SAMPLES_METADATA).is_file() or not (folder / SAMPLES).is_dir():
        return
    metadata = read_json(folder / SAMPLES_METADATA)
    if not isinstance(metadata, dict) or "complete" not in metadata:  # a folder of somebody else
        return
    paths = [entry for entry in (folder / SAMPLES).iterdir() if is_picture(entry.name) and not is_hidden(entry.name)]
    with ThreadPoolExecutor(DECODER_THREADS) as pool:
        broken = sorted(entry for entry, whole in zip(paths, pool.map(is_whole_png, paths), strict=True) if not whole)
    if broken:
        raise InputError(
            f"{option} {source} has {len(broken)} files that are not whole PNGs, first {broken[0]}: remove them, or"
            " draw them again by the command that drew the others"
        )
    count = metadata.get("num")
    if metadata["complete"] is True and count == len(paths):
        return
    state = f"{option} {source} has {len(paths)} of {count} samples" + (" so far" if len(paths) == count else "")
    if not incomplete:
        raise InputError(f"{state}: draw the others by the command that drew these, or score these with --incomplete")
    warnings.warn(f"{state}: it is not complete", stacklevel=1)
