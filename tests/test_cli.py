"""The front door: `headmix COMMAND` answers at once, in one spelling."""

import argparse
import os
import pty
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

import headmix_vision
from headmix_vision.analysis import ProfileRequest, analyze
from headmix_vision.console import OneLineParser, add_options
from headmix_vision.data.cache_request import CacheRequest
from headmix_vision.data.datasets.latents import STORES
from headmix_vision.data.latent_cache import DTYPES
from headmix_vision.diffusion.denoising import CHANNELS, SCHEDULER_NAMES, SPACINGS
from headmix_vision.errors import InputError, literals
from headmix_vision.evaluation import FvdRequest, ScoreRequest, evaluate
from headmix_vision.evaluation.clip_scores import PROTOCOLS
from headmix_vision.sampling.folder import FORMATS
from headmix_vision.sampling.sample_request import SCHEDULERS, SampleRequest

START = "from headmix_vision.console import importing\nwith importing('sample'): pass"


def test_a_terminal_gets_a_first_line_before_the_imports_and_a_log_does_not():
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "wb") as terminal:
        subprocess.run([sys.executable, "-c", START], stderr=terminal, check=True)
        assert os.read(ours, 1000) == b"headmix sample: loading\r\n"
    os.close(ours)
    assert subprocess.run([sys.executable, "-c", START], capture_output=True, check=True).stderr == b""


def test_help_needs_no_torch():
    code = """
import sys
from headmix_vision.cli import main
for words in {lines}:
    sys.argv = ["headmix", *words.split()]
    try:
        main([*words.split(), "--help"])
    except SystemExit as end:
        assert not end.code
print([name for name in ("torch", "timm", "numpy") if name in sys.modules])
"""
    lines = [
        "sample",
        "sample images",
        "sample videos",
        "evaluate",
        "evaluate kid",
        "evaluate fvd",
        "export",
        "models",
        "doctor",
    ]
    lines += ["cache-latents", "index-shards", "analyze", "analyze rank", "analyze sweep"]
    lines += ["train-cls", "train-cls fit", "train-gen fit", "distill validate"]
    printed = subprocess.check_output([sys.executable, "-c", code.format(lines=lines)], text=True)
    assert printed.splitlines()[-1] == "[]" and printed.count("usage: headmix") == len(lines)


def test_the_words_of_help_are_those_of_the_library():
    assert SCHEDULERS == SCHEDULER_NAMES
    assert literals(SampleRequest, "spacing") == SPACINGS
    assert literals(SampleRequest, "guidance_channels") == CHANNELS
    assert literals(SampleRequest, "format") == FORMATS
    assert literals(FvdRequest, "protocol") == tuple(PROTOCOLS)
    assert literals(CacheRequest, "store") == STORES and set(literals(CacheRequest, "dtype")) == set(DTYPES)


def test_options_come_with_hyphens_or_underscores():
    parser = OneLineParser()
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--run_dir")
    options = parser.parse_args(["--batch_size=3", "--run-dir", "a_b"])
    assert (options.batch_size, options.run_dir) == (3, "a_b")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request.

    Args:
        place: Folder to read.
        count: Number of `things`, 3 % (`COUNT`) of all when None, each
            of them once.
        sizes: Their sizes.
        form: What they are.
        raw: Take them as they are.
    """

    place: Path
    count: int | None = None
    sizes: tuple[float, ...] = (1.0, 2.0)
    form: Literal["a", "b"] = "a"
    raw: bool = False


def test_the_fields_of_a_request_become_options(capsys: pytest.CaptureFixture[str]):
    parser = OneLineParser(formatter_class=partial(argparse.HelpFormatter, width=200))
    add_options(parser, Asked, form={"metavar": "FORM"})
    words = ["--place", "x", "--count", "3", "--sizes", "1", "2.5", "--form", "b", "--raw"]
    given = {"place": "x", "count": 3, "sizes": [1.0, 2.5], "form": "b", "raw": True}
    assert vars(parser.parse_args(words)) == given
    assert Asked(**vars(parser.parse_args(["--place", "x"]))) == Asked(place="x")
    for wrong in ([], ["--place", "x", "--form", "c"], ["--place", "x", "--count", "1.5"]):
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args(wrong)
    text = parser.format_help()
    assert "Number of things, 3 % of all when left out, each of them once\n" in text
    assert "Their sizes (1.0,2.0)\n" in text and "--form FORM" in text and "What they are (a)\n" in text
    assert "Take them as they are\n" in text and len(capsys.readouterr().err.splitlines()) == 3


def test_a_request_is_refused_when_it_is_made():
    assert SampleRequest(model="runs/a").model == Path("runs/a")
    with pytest.raises(InputError, match="dtype must be one of float32, bfloat16, float16, got 'int8'"):
        SampleRequest(model="a", dtype="int8")
    with pytest.raises(InputError, match="frames applies only to videos"):
        SampleRequest(model="a", frames=3)
    for words, message in {
        ("fidd", "x"): "no metric is called 'fidd'; did you mean fid",
        ("fid", None): "fid needs real",
        ("is", "x"): "is does not take real",
        ("fvd", "x"): "fvd scores clips",
        ("stats", "x"): "stats needs a file to write",
    }.items():
        with pytest.raises(InputError, match=message):
            ScoreRequest(metric=words[0], real=words[1], fake="y")
    with pytest.raises(InputError, match="kid has no option subset; did you mean subsets"):
        ScoreRequest(metric="kid", real="x", fake="y", options={"subset": 3})
    with pytest.raises(InputError, match="kid reads no labels"):
        ScoreRequest(metric="kid", real="x", fake="y", skip_unlabelled=True)


def test_a_request_from_python_returns_its_result_and_prints_nothing(tmp_path, capsys):
    judge = str(next(Path(headmix_vision.__file__).parent.rglob("deit_mhla_digits.safetensors")))
    scored = evaluate(ScoreRequest(metric="accuracy", fake="digits[:20]", features=judge, device="cpu", batch_size=20))
    assert scored is not None and scored.scores["top1"] > 0.9
    request = ProfileRequest(
        kind="rank", model=("deit_mhla_digits",), data="digits", images=1, out=tmp_path, device="cpu"
    )
    analyzed = analyze(request)
    assert {path.name for path in analyzed.paths} >= {"rank.svg", "rank.csv"} and analyzed.tables["rank"]
    assert not capsys.readouterr().out
