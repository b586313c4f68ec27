"""The package as a whole: what importing it does, and running other people's scripts with its models."""

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import slips
from test_wheel import COMMANDS

import headmix_vision
from headmix_vision.cli import main
from headmix_vision.console import one_line_errors
from headmix_vision.errors import InputError

SCRIPT = """
import sys, timm
model = timm.create_model(sys.argv[1])
print(type(model).__name__, __name__, sys.argv[1:])
"""


def test_importing_loads_neither_generators_nor_training_nor_plotting():
    heavy = (
        *("diffusers", "jsonargparse", "lightning", "matplotlib", "pandas", "rich", "sklearn", "tensorboard"),
        *("torch.distributed.checkpoint", "torch_fidelity", "torchmetrics", "transformers"),
    )
    parts = "headmix_vision.models, headmix_vision.runs.exporting"
    code = f"import sys, {parts}; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def run_module(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["headmix_vision", *arguments])
    runpy.run_module("headmix_vision", run_name="__main__")


def test_the_list_of_commands_needs_no_torch():
    code = (
        "import sys\nfrom headmix_vision.cli import main\nmain(['--help'])\n"
        "print([name for name in ('torch', 'timm', 'numpy') if name in sys.modules])"
    )
    *listed, loaded = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert loaded == "[]"
    assert {line.split()[0] for line in listed if line.startswith("  ")} == {"doctor", *COMMANDS}


def test_a_command_runs_by_either_name(capsys, monkeypatch):
    main(["models", "deit_mhla_digits"])
    listed = capsys.readouterr().out
    assert listed.startswith("deit_mhla_digits")
    run_module("models", "deit_mhla_digits", monkeypatch=monkeypatch)
    assert capsys.readouterr().out == listed


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["modles"], "no command is called 'modles'; did you mean models? The commands are doctor, models, "),
        (["xyz"], "no command is called 'xyz'. The commands are doctor, "),
        (["absent.py"], "script absent.py does not exist"),
    ],
)
def test_an_unknown_command_ends_with_one_line(arguments, line, capsys, monkeypatch):
    with pytest.raises(SystemExit, match="2"):
        run_module(*arguments, monkeypatch=monkeypatch)
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {line}")


def test_no_command_ends_with_the_list_of_commands(capsys, monkeypatch):
    with pytest.raises(SystemExit, match="2"):
        run_module(monkeypatch=monkeypatch)
    assert capsys.readouterr().err.startswith("usage: headmix COMMAND")


def test_the_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"headmix_vision {headmix_vision.__version__}\n"


def test_a_script_runs_with_the_models_registered(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "headmix_vision", script, "deit_mhla_digits", "--flag"]
    assert subprocess.check_output(command, text=True).split(maxsplit=2) == [
        "HeadMixVisionTransformer",
        "__main__",
        "['deit_mhla_digits', '--flag']\n",
    ]


FLOORS = [
    "files",
    "console",
    "ops",
    "doctor",
    "layers",
    "models",
    "data",
    "diffusion",
    "runs",
    "evaluation",
    "sampling",
    "analysis",
    "training",
    "cli",
]
GROUND = ["errors", "processes", "recipes", "registry"]
PACKAGE = Path(__file__).parents[1] / "headmix_vision"


def imported(path: Path, package: str = "headmix_vision.") -> set[str]:
    """Modules of a package that a file imports, wherever in the file it does so."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path} imports relatively"
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.removeprefix(package) for name in modules if name.startswith(package)}


def test_imports_point_downward():
    """From floor to floor, down to the files on the ground, which import each other at most."""
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()} == set(FLOORS) - {"console"}
    rooms = [(name, [PACKAGE / f"{name}.py", *(PACKAGE / name).rglob("*.py")]) for name in FLOORS]
    rooms += [("", [PACKAGE / f"{name}.py" for name in GROUND])]
    for name, paths in rooms:
        above = set(FLOORS[FLOORS.index(name) + 1 :] if name else FLOORS)
        for path in paths:
            if path.name == "__main__.py" or not path.exists():  # a program, which nothing imports
                continue
            climbs = {module for module in imported(path) if module.split(".")[0] in above}
            assert not climbs, f"{path.relative_to(PACKAGE)} imports {climbs}"


def test_only_documented_commands_reach_into_the_laboratory():
    doors = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if imported(path, "headmix_lab.")}
    assert doors == {"cli/analyze.py", "data/emoji.py"}


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("no such file", "no such file"),
        ("damaged (Foo: one\ntwo)", "damaged (Foo: one two)"),
        ("Caught\n  File x\nheadmix_vision.errors.InputError: shard 3", "shard 3"),
        ("", ""),
    ],
)
@pytest.mark.parametrize(("rank", "who"), [("0", "error"), ("3", "error (rank 3)")])
def test_errors_of_users_end_with_one_line(message, line, rank, who, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit, match="2"), one_line_errors():
        raise InputError(message)
    assert capsys.readouterr().err == f"{who}: {line}\n"


@pytest.mark.slow
@pytest.mark.parametrize(("refused", "said"), [("0 1", "error: no"), ("1", "error (rank 1): no")])
def test_processes_of_torchrun_say_once_what_they_refuse(refused, said, tmp_path):
    script = tmp_path / "refuse.py"
    script.write_text(
        "import os, time\nfrom headmix_vision import console\nfrom headmix_vision.errors import InputError\n"
        "console._PATIENCE_S = 100 if '0' in os.environ['REFUSED'] else 1\n"
        "with console.one_line_errors():\n"
        "    if os.environ['RANK'] in os.environ['REFUSED']:\n"
        "        raise InputError('no')\n"
        "    time.sleep(100)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    environment = os.environ | {"REFUSED": refused}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert [line for line in done.stderr.splitlines() if line.startswith("error")] == [said]


def test_a_link_to_itself_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "run").symlink_to("run")
    with pytest.raises(SystemExit, match="2"), one_line_errors():
        if (tmp_path / "run").resolve().is_symlink():  # of later versions of Python, which resolve it to itself
            raise InputError("Symlink loop from run")
    assert capsys.readouterr().err.startswith("error: Symlink loop from ")


def test_a_reader_that_has_gone_is_told_nothing():
    code = (
        "from headmix_vision.console import one_line_errors\n"
        "with one_line_errors():\n    for _ in range(9):\n        print('y' * 1_000_000)\n"
    )
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_process_whose_peer_is_gone_ends_with_one_line(capsys):
    with pytest.raises(SystemExit, match="2"), one_line_errors():
        raise RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:20663")
    assert capsys.readouterr().err == "error: another process has ended, see its message\n"
    with pytest.raises(RuntimeError, match="size"), one_line_errors():
        raise RuntimeError("a size is wrong")
    with pytest.raises(SystemExit, match="2"), one_line_errors():
        raise MemoryError("for 3 GB")
    assert capsys.readouterr().err == "error: the memory does not suffice for 3 GB\n"
    with pytest.raises(SystemExit, match="130"), one_line_errors():
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_the_first_call_of_a_command_alone_hides_what_it_imports_from_garbage_collection():
    script = (
        "import gc, sys\nfrom headmix_vision.cli.models import main\n"
        "for _ in range(2):\n"
        "    main(['dit_mhla_s_*'])\n"
        "    print(gc.get_freeze_count(), gc.isenabled(), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, second = (line.split() for line in done.stderr.splitlines())
    assert int(first[0]) >= int(second[0]) > 100_000 and first[1] == second[1] == "True"


def test_slips_find_what_they_change():
    package = Path(slips.ROOT) / "headmix_vision"
    stale = [slip.behaviour for slip in slips.SLIPS if (package / slip.file).read_text().count(slip.old) != 1]
    assert not stale
