"""Runs the Triton kernels in their interpreter where there is no GPU, skips what needs one, and seeds every test."""

import gc
import os
import random
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))  # benchmarks and experiments, which are not installed
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined, before the package is imported


def pytest_addoption(parser):
    parser.addoption("--shuffle", metavar="SEED", help="run the tests in a random order, each file in one piece")


def pytest_collection_modifyitems(config, items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    seed = config.getoption("--shuffle")
    if seed is not None:
        items.sort(key=lambda item: [number(f"{seed} {name}") for name in (item.location[0], item.nodeid)])


def pytest_collection_finish(session):
    """Look for garbage less often, and not in what stays: libraries and thousands of tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    if "headmix_vision.training.base_cli" in sys.modules:
        keep_parsers(sys.modules["headmix_vision.training.base_cli"].RunCLI)


def keep_parsers(cli):
    """Make each parser of training once per process: it takes longer than to parse, and parsing leaves it as it is."""
    make, kept = cli.setup_parser, {}
    names = ("parser", "_subcommand_parsers", "_subcommand_method_arguments")

    def setup_parser(self, *args):
        key = (type(self), *self.subcommands(), repr(self.parser_kwargs), repr(self.trainer_defaults))
        if key not in kept:
            make(self, *args)
            kept[key] = {name: getattr(self, name) for name in names}
        vars(self).update(kept[key])

    cli.setup_parser = setup_parser


@pytest.fixture(autouse=True, scope="session")
def replayed_calls():
    """Build what replays calls on a GPU before the first test, so that no test depends on when it is there."""
    if torch.cuda.is_available():
        from headmix_vision.ops.replay import extension

        extension()


def number(name):
    return zlib.crc32(name.encode())


def seed_all(name):
    random.seed(name)
    np.random.seed(number(name))
    torch.manual_seed(number(name))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    seed_all(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """Seed a fixture of several tests by its own name, so that it does not depend on which test is the first."""
    if fixturedef.scope == "function":
        return (yield)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_all(f"{fixturedef.baseid} {fixturedef.argname} {getattr(request, 'param_index', 0)}")
    try:
        return (yield)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
