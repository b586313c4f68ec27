"""The front door: `headmix COMMAND` answers at once, in one spelling."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import headmix_vision
from headmix_vision.analysis import ProfileRequest, analyze
from headmix_vision.checks import literals
from headmix_vision.console.arguments import OneLineParser
from headmix_vision.data.cache_request import CacheRequest
from headmix_vision.data.datasets.latents import STORES
from headmix_vision.data.latent_cache import DTYPES
from headmix_vision.diffusion.denoising import CHANNELS, SCHEDULER_NAMES, SPACINGS
from headmix_vision.errors import InputError
from headmix_vision.evaluation import FvdRequest, ScoreRequest, evaluate
from headmix_vision.evaluation.fvd import PROTOCOLS
from headmix_vision.sampling.folder import FORMATS
from headmix_vision.sampling.sample_request import SCHEDULERS, SampleRequest

START = "from headmix_vision.cli.starting import importing\nwith importing('sample'): pass"


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
