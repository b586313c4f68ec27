"""Which form of an op runs where, and what a user is told when it is the slow one."""

import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headmix_vision.errors import InputError
from headmix_vision.ops import TokenBlocks, kernels, mhla

from .helpers import make_inputs

BLOCKS = TokenBlocks.from_grid((4, 4), (2, 2))
RTX_4090 = kernels.Gpu("RTX 4090", (8, 9), 99 << 10)


@pytest.fixture
def gpu(monkeypatch):
    """Put a GPU behind every device."""

    def put(gpu):
        monkeypatch.setattr(kernels, "find_gpu", lambda device: gpu)

    return put


def _inputs(dtype=torch.float32, **options):
    q, k, v, mixing = make_inputs(BLOCKS, **options)
    return *(x.to(dtype) for x in (q, k, v)), mixing.float()


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        (("GTX 1080", (6, 1), 48 << 10), "compute capability 6.1: the kernels need 8.0"),
        (("half a GPU", (8, 9), 48 << 10), "48 KB of shared memory: the kernels need 99 KB"),
        (("B200", (10, 0), 227 << 10), "B200 of compute capability 10.0, where nobody has tested the kernels"),
        (None, "q is on cpu: the kernels need a CUDA device"),
    ],
)
def test_gpus_that_the_kernels_refuse(gpu, about, reason):
    gpu(about and kernels.Gpu(*about))
    with pytest.raises(InputError, match=reason):
        mhla(*_inputs(), BLOCKS, impl="triton")


def test_untested_gpus_on_demand(gpu, monkeypatch):
    gpu(kernels.Gpu("B200", (10, 0), 227 << 10))
    monkeypatch.setenv(kernels.ALLOW_UNTESTED, "1")
    assert kernels.why_not_here(torch.device("cpu")) is None


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (12, 0)])
def test_gpus_that_the_kernels_take(gpu, capability):
    gpu(RTX_4090._replace(capability=capability))
    assert kernels.why_not_here(torch.device("cpu")) is None


@pytest.mark.parametrize("installed", ["3.5.1", "2.3.0"])
def test_an_old_triton_is_named(monkeypatch, installed):
    import triton

    monkeypatch.setattr(triton, "__version__", installed)
    assert f"they need triton 3.6 (torch 2.11), installed is {installed}" in kernels.why_no_kernels()


def test_the_slow_form_takes_the_place_of_kernels_with_one_warning():
    implementations = {"torch": "slow", "triton": "fast"}

    def choose(impl, reason, on_gpu=True):
        return kernels.select(impl, implementations, on_gpu, lambda: reason)

    with pytest.warns(UserWarning, match="q has no reason to be here; the slower PyTorch form takes their place"):
        assert choose("auto", "q has no reason to be here") == "slow"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose("auto", "q has no reason to be here") == "slow"  # once
        assert choose("auto", None) == "fast"
        assert choose("auto", "q is on cpu", on_gpu=False) == "slow"  # nobody expects kernels there
    with pytest.raises(InputError, match="q has no reason to be here; impl='triton' was asked for"):
        choose("triton", "q has no reason to be here")


def test_the_warning_does_not_break_a_compiled_graph():
    implementations = {"torch": torch.sin, "triton": torch.cos}

    @torch.compile(fullgraph=True, backend="eager")
    def model(x):
        return kernels.select("auto", implementations, True, lambda: "compiled graphs warn, too")(x)

    x = torch.ones(3)
    with pytest.warns(UserWarning, match="compiled graphs warn, too"):
        assert torch.equal(model(x), x.sin())


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float64, 8), (torch.bfloat16, 160)])
def test_auto_says_what_the_kernels_do_not_take(dtype, dim):
    inputs = [x.cuda() for x in _inputs(dtype, dim=dim, value_dim=dim)]
    kernels._warned.clear()
    with pytest.warns(UserWarning, match=f"{dtype}" if dim == 8 else f"head dim {dim}"):
        mhla(*inputs, BLOCKS)


def test_torch_func_takes_the_slow_form():
    """Kernels are ops of their own, which it cannot look into."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = [x.to(device).float()[None] for x in make_inputs(BLOCKS)[:3]]
    mixing = torch.eye(4, device=device)
    with pytest.raises(InputError, match="q is under a transformation"):
        torch.func.vmap(lambda q, k, v: mhla(q, k, v, mixing, BLOCKS, impl="triton"))(*inputs)


class Seen(TorchDispatchMode):
    """Lists the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(kernels.NO_KERNELS is not None, reason="needs the kernels")
def test_who_looks_on_sees_ops_and_others_go_past_the_dispatcher():
    blocks = TokenBlocks.from_grid((2, 4), (1, 2))
    x, mixing = torch.rand(3, 1, 8, 1, 16, requires_grad=True), torch.rand(2, 2)

    def call():
        (gradient,) = torch.autograd.grad(mhla(*x, mixing, blocks, impl="triton").sum(), x, create_graph=True)
        return gradient

    if torch.cuda.is_available():
        x, mixing = x.detach().cuda().requires_grad_(), mixing.cuda()
    past = call()
    with Seen() as seen:
        through = call()
    assert torch.equal(past, through)
    assert {"headmix_vision.mhla_forward.default", "headmix_vision.mhla_gradients.default"} <= set(seen.names)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        past.sum().backward()
