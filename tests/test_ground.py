"""The files on the ground: what a file says, safetensors files, devices, arguments of commands."""

import os
import stat
from pathlib import Path

import pytest
import torch

from headmix_vision.console import OneLineParser, open_device
from headmix_vision.errors import InputError, keywords
from headmix_vision.files.reading import check_fields
from headmix_vision.files.tensors import header_of, open_tensors, write_tensors
from headmix_vision.files.writing import check_place
from headmix_vision.processes import process_numbers


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([1], r"x.json is \[1\], it must be a table"),
        (None, "x.json is None"),
        ({}, "entry 'count' is missing, it must be of type int"),
        ({"count": "3"}, "entry 'count' is '3', it must be of type int"),
        ({"count": 3, "size": 8}, "entry 'size' is 8"),
        ({"count": "3" * 99}, r"is '3{59}\.\.\.,"),
    ],
)
def test_entries_are_checked(found: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_fields("x.json", found, {"count": int, "size": list | None})


def test_arguments_by_name_are_those_of_a_class_and_of_its_bases() -> None:
    class Base:
        def __init__(self, a: int, b: int = 0) -> None: ...

    class Own(Base):
        def __init__(self, c: int, **others: int) -> None: ...

    assert keywords(Own) == ["c", "a", "b"] and keywords(Own, leave_out=("a",)) == ["c", "b"]


def test_an_entry_that_may_be_none_may_be_absent() -> None:
    wanted = {"count": int, "size": list | None}
    assert check_fields("x", {"count": 1, "more": 2}, wanted) == {"count": 1, "size": None, "more": 2}


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_tensor_files_have_the_mode_of_any_file(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "a.safetensors", {"x": torch.ones(2)}, {"text": "y"})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == 0o666 & ~umask
    assert header_of(tmp_path / "a.safetensors")["text"] == "y"
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_equal_tensors_and_texts_give_equal_files(tmp_path: Path) -> None:
    texts = {"b": 'two words, "ä"\n', "a": "1", "d": "", "c": "\x7f"}
    tensors = {"y": torch.arange(3), "x": torch.ones(2, 2)}
    paths = [tmp_path / f"{number}.safetensors" for number in range(8)]
    for path in paths:
        write_tensors(path, tensors, texts)
    assert len({path.read_bytes() for path in paths}) == 1
    with open_tensors(paths[0]) as file:
        assert texts.items() <= file.metadata().items()
        assert file.get_tensor("y").equal(tensors["y"])
    assert int.from_bytes(paths[0].read_bytes()[:8], "little") % 8 == 0
    write_tensors(paths[0], {}, {}, hashed=False)
    with open_tensors(paths[0]) as file:
        assert not [*file.keys()]


def test_damaged_tensor_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"x": torch.ones(200)}, {})
    with (
        pytest.raises(InputError, match=r"a\.safetensors is truncated or no safetensors file"),
        open_tensors(path) as file,
    ):
        file.get_tensor("y")
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(InputError, match=r"a\.safetensors is truncated or no safetensors file"):
        header_of(path)


def test_a_place_that_cannot_be_written_is_found_before_the_work(tmp_path: Path) -> None:
    check_place(tmp_path / "new" / "deeper" / "x")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        check_place(tmp_path / "file" / "x")


@pytest.mark.parametrize("name", ["", "gpu", "meta", "cuda:99", "cpu:x"])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(InputError, match=f"device '{name}' cannot be used here: .") as error:
        open_device(name)
    assert "\n" not in str(error.value)
    assert open_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run", "--sise", "3"], "unknown option --sise; did you mean --size?"),
        (["run", "--sise=3"], "unknown option --sise; did you mean --size?"),
        (["run", "more"], "unknown option more"),
        (["run", "--size", "x"], "argument --size: invalid int value: 'x'"),
        ([], "the following arguments are required: what"),
        (["walk"], "argument what: invalid choice: 'walk' (choose from "),
        (["run", "--size", ""], "--size is an empty text: give a value, or leave it out"),
        (["run", "--size="], "--size is an empty text: give a value, or leave it out"),
        ([""], "an argument is an empty text: give a value"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = OneLineParser(prog="tool")
    command = parser.add_subparsers(dest="what", required=True).add_parser("run")
    command.add_argument("--size", type=int)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(arguments)
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {line}") and " --help)" in error


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "x"}, "RANK in the environment must be a number, got 'x'"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK in the environment must be a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK in the environment is 2, but WORLD_SIZE is 2"),
    ],
)
def test_numbers_of_processes_that_cannot_be(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        process_numbers()
