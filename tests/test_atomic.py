"""Files are complete or absent, whatever happens while they are written."""

from pathlib import Path

import pytest

from headmix_vision.files.atomic import atomic_path


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError])
def test_an_interrupted_write_leaves_the_old_file_alone(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_text("old")
    with pytest.raises(error), atomic_path(path) as temporary:
        assert temporary.parent == path.parent  # one file system, one rename
        temporary.write_text("ne")
        assert path.read_text() == "old"
        raise error
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights"]


def test_a_finished_write_replaces_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "weights"
    for text in ("first", "second"):
        with atomic_path(path) as temporary:
            temporary.write_text(text)
        assert path.read_text() == text
    assert [entry.name for entry in path.parent.iterdir()] == ["weights"]


def test_nothing_is_left_of_a_write_that_never_began(tmp_path: Path) -> None:
    with pytest.raises(KeyError), atomic_path(tmp_path / "absent"):
        raise KeyError
    assert not list(tmp_path.iterdir())
