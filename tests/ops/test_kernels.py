"""Which form of an op runs where, and what a user is told when it is the slow one."""

import gc
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headmix_vision.errors import InputError
from headmix_vision.ops import TokenBlocks, dispatch, hardware, mhla, token_blocks
from headmix_vision.ops.mhla import triton_launch
from headmix_vision.ops.runtime import forget_plans

from .helpers import make_inputs

BLOCKS = TokenBlocks.from_grid((4, 4), (2, 2))
RTX_4090 = hardware.Gpu("RTX 4090", (8, 9), 99 << 10)


@pytest.fixture
def gpu(monkeypatch):
    """Put a GPU behind every device."""

    def put(gpu):
        monkeypatch.setattr(hardware, "find_gpu", lambda device: gpu)

    return put


def _inputs(dtype=torch.float32, **options):
    q, k, v, mixing = make_inputs(BLOCKS, **options)
    return *(x.to(dtype) for x in (q, k, v)), mixing.float()


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        (("GTX 1080", (6, 1), 48 << 10), "compute capability 6.1: the kernels need 8.0"),
        (("half a GPU", (8, 9), 48 << 10), "48 KB of shared memory: the kernels need 99 KB"),
        (("B200", (10, 0), 227 << 10), r"B200 of compute capability 10.0, for which triton 3\.\d .* DISABLE_MMA_V5=1"),
        (
            ("MI300X", (9, 4), 64 << 10, 1, "gfx942"),
            r"MI300X \(gfx942\): the kernels compile for it, but nobody has run",
        ),
        (("RX 6800", (10, 3), 64 << 10, 1, "gfx1030"), "the kernels have not been compiled for it, but nobody has run"),
        (None, "q is on cpu: the kernels need a CUDA device"),
    ],
)
def test_gpus_that_the_kernels_refuse(gpu, monkeypatch, about, reason):
    monkeypatch.setattr(hardware, "triton_release", lambda: (3, 8))
    gpu(about and hardware.Gpu(*about))
    with pytest.raises(InputError, match=reason):
        mhla(*_inputs(), BLOCKS, impl="triton")


@pytest.mark.parametrize("about", [("B200", (10, 0), 227 << 10), ("MI300X", (9, 4), 64 << 10, 1, "gfx942")])
def test_untested_gpus_on_demand(gpu, monkeypatch, about):
    gpu(hardware.Gpu(*about))
    monkeypatch.setattr(hardware, "triton_release", lambda: (3, 8))
    monkeypatch.setenv(hardware.ALLOW_UNTESTED, "1")
    assert hardware.why_not_here(torch.device("cpu")) is None


def test_products_go_through_tensor_memory_on_the_gpus_that_have_it():
    has = [major for major in range(8, 13) if hardware.Gpu("X", (major, 3), 227 << 10).has_tensor_memory]
    assert has == [10, 11] and not hardware.Gpu("X", (10, 3), 64 << 10, amd="gfx950").has_tensor_memory


@pytest.mark.parametrize(
    ("capability", "release", "variable"),
    [((10, 0), (3, 9), None), ((10, 3), (3, 10), None), ((10, 0), (3, 6), "DISABLE_MMA_V5"), ((11, 0), (3, 6), None)],
)
def test_tensor_memory_is_right_with_a_new_triton_or_unused(gpu, monkeypatch, capability, release, variable):
    gpu(hardware.Gpu("B200", capability, 227 << 10))
    monkeypatch.setattr(hardware, "triton_release", lambda: release)
    if variable:
        monkeypatch.setenv(variable, "1")
    assert hardware.why_not_here(torch.device("cpu")) is None


@pytest.mark.skipif(hardware.NO_KERNELS is not None, reason="needs triton")
def test_hopper_gets_an_assembler_that_is_right(gpu, monkeypatch):
    from triton.backends.nvidia.compiler import get_ptxas_version

    default = get_ptxas_version(90)
    found = hardware.find_assembler()
    assert found and found.version >= hardware.FIRST_RIGHT
    assert found.is_default == (hardware.default_assembler((9, 0)).version >= hardware.FIRST_RIGHT)
    with hardware.right_assembler():
        assert hardware.default_assembler((9, 0)).path == found.path
        assert "release {}.{}".format(*found.version) in get_ptxas_version(90)  # part of the key of cached code
    assert get_ptxas_version(90) == default

    gpu(hardware.Gpu("H100", (9, 0), 227 << 10))
    monkeypatch.setattr(hardware, "INTERPRETED", False)
    assert hardware.why_not_here(torch.device("cpu")) is None
    monkeypatch.setattr(hardware, "FIRST_RIGHT", (99, 0))
    hardware.find_assembler.cache_clear()
    with pytest.raises(InputError, match=r"H100, where triton .* has no ptxas that makes right .* TRITON_PTXAS_PATH"):
        mhla(*_inputs(), BLOCKS, impl="triton")
    hardware.find_assembler.cache_clear()


def test_processes_that_compile_for_graphs_start_again_with_the_right_assembler(monkeypatch):
    found, stopped = hardware.find_assembler(), []
    monkeypatch.setattr("torch._inductor.async_compile.shutdown_compile_workers", lambda: stopped.append(True))
    monkeypatch.setenv(hardware._ASSEMBLER, "")
    hardware.give_compilers_the_assembler()
    assert stopped == [True] * (not found.is_default)
    assert hardware.default_assembler((9, 0)).path == found.path
    hardware.give_compilers_the_assembler()  # it is the default now
    assert len(stopped) <= 1
    hardware.find_assembler.cache_clear()


def test_a_driver_does_not_load_code_of_a_later_assembler(monkeypatch):
    monkeypatch.setattr(hardware, "_driver_major", lambda: 11)
    hardware.find_assembler.cache_clear()
    assert hardware.find_assembler() is None
    hardware.find_assembler.cache_clear()


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (12, 0)])
def test_gpus_that_the_kernels_take(gpu, capability):
    gpu(RTX_4090._replace(capability=capability))
    assert hardware.why_not_here(torch.device("cpu")) is None


@pytest.mark.parametrize("installed", ["3.4.1", "2.3.0"])
def test_an_old_triton_is_named(monkeypatch, installed):
    import triton

    monkeypatch.setattr(triton, "__version__", installed)
    assert f"they need triton 3.5 (torch 2.9), installed is {installed}" in hardware.why_no_kernels()


def test_the_slow_form_takes_the_place_of_kernels_with_one_warning():
    def choose(impl, reason, on_gpu=True):
        return dispatch.select(impl, on_gpu, lambda: reason)

    with pytest.warns(UserWarning, match="q has no reason to be here; the slower PyTorch implementation runs instead"):
        assert choose("auto", "q has no reason to be here") == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose("auto", "q has no reason to be here") == "torch"  # once
        assert choose("auto", None) == "auto"
        assert choose("auto", "q is on cpu", on_gpu=False) == "torch"  # nobody expects kernels there
    with pytest.raises(InputError, match="q has no reason to be here; impl='triton' was asked for"):
        choose("triton", "q has no reason to be here")


def test_the_warning_does_not_break_a_compiled_graph():
    implementations = {"torch": torch.sin, "auto": torch.cos}

    @torch.compile(fullgraph=True, backend="eager")
    def model(x):
        return implementations[dispatch.select("auto", True, lambda: "compiled graphs warn, too")](x)

    x = torch.ones(3)
    with pytest.warns(UserWarning, match="compiled graphs warn, too"):
        assert torch.equal(model(x), x.sin())


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float64, 8), (torch.bfloat16, 160)])
def test_auto_says_what_the_kernels_do_not_take(dtype, dim):
    inputs = [x.cuda() for x in _inputs(dtype, dim=dim, value_dim=dim)]
    dispatch._warned.clear()
    forget_plans()
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


@pytest.mark.skipif(hardware.NO_KERNELS is not None, reason="needs the kernels")
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


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton_pairwise", "triton_summary", "torch"])
def test_index_tables_live_as_long_as_a_graph_that_reads_them(impl):
    blocks = TokenBlocks.from_grid((9, 11), (2, 3))
    q, k, v, mixing = (x.cuda().float() for x in make_inputs(blocks))
    expected = mhla(q, k, v, mixing, blocks, impl=impl)  # warms up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mhla(q, k, v, mixing, blocks, impl=impl)
    forget_plans()
    for tables in (token_blocks._cached_tables, triton_launch.places, triton_launch.parts):
        tables.cache_clear()
    gc.collect()
    torch.cuda.empty_cache()
    taken = [torch.full((1 << size,), -1, dtype=torch.int32, device="cuda") for size in range(6, 16) for _ in range(64)]
    graph.replay()
    assert torch.equal(out, expected), len(taken)


def test_a_bound_call_is_planned_once_for_each_kind_of_tensors():
    seen = []

    @dispatch.kept
    def bind(option):
        def plan(x):
            seen.append(option)
            return lambda x, about=f"{tuple(x.shape)} {option!r}": about

        return dispatch.Bound(plan)

    x = torch.ones(2, 3)
    assert bind(1)(x) == bind(1)(torch.zeros(2, 3)) == "(2, 3) 1" and seen == [1]
    assert bind(1) is bind(1) and bind(True)(x) == "(2, 3) True"  # equal to 1, but of another type
    assert bind(1)(x.T) == "(3, 2) 1" and bind(1)(x.double()) == "(2, 3) 1" and len(seen) == 4
    assert bind([1])(x) == bind([1])(x) and len(seen) == 6  # cannot be hashed
    torch.func.vmap(lambda x: (bind(1)(x), x)[1])(x[None])
    assert len(seen) == 7
    forget_plans()
    assert bind(1)(x) == "(2, 3) 1" and len(seen) == 8


def test_a_wrong_call_is_refused_each_time():
    q, k, v = make_inputs(BLOCKS)[:3]
    for _ in range(2):
        with pytest.raises(InputError, match="mixing must be"):
            mhla(q, k, v, torch.ones(2, 3), BLOCKS)
