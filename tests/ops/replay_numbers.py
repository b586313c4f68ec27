"""Compare what replayed calls compute, without a GPU: Triton's interpreter runs each launch that reaches the driver.

`test_replay.py` runs this file beside a driver that stands in for CUDA's. MALLOC_PERTURB_ overwrites memory that is
freed, so that a buffer which goes too early changes the results.
"""

import ctypes
import struct
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from headmix_vision.ops import TokenBlocks, grid_conv, hardware, head_in_head, mhla, mix_heads
from headmix_vision.ops.dispatch import as_function, without_dispatcher
from headmix_vision.ops.grid_conv import triton_op as conv_op
from headmix_vision.ops.head_in_head import triton_op as hih_op
from headmix_vision.ops.mhla import triton_op as mhla_op
from headmix_vision.ops.mix_heads import triton_op as mix_op
from headmix_vision.ops.replay import _PACKED, extension, replayed
from headmix_vision.ops.runtime import Launch, forget_plans

assert extension() is not None  # before the tests: calls do not wait for it
CUDA = ctypes.CDLL("libcuda.so.1")
RUN = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p))
F16, F32 = torch.float16, torch.float32  # the interpreter multiplies the bits of bfloat16


class DriverKernel(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int), ("sizes", ctypes.c_int * 96), ("run", RUN))


failures = []


class Compiled:
    """A kernel as Triton compiles it: numbers that are 1, None and constants are no parameters."""

    global_scratch_size = profile_scratch_size = launch_cooperative_grid = launch_pdl = 0

    def __init__(self, launch, tensors):
        self.launch, self.run = launch, self
        values = (*tensors, *launch.numbers)
        self.names = launch.kernel.arg_names[: len(values)]
        self.dtypes = [getattr(x, "dtype", None) for x in values]
        self.rest = dict(zip(self.names, values, strict=True))
        kinds = dict(zip(self.names, map(self.kind, values), strict=True))
        self.src = SimpleNamespace(signature=kinds | dict.fromkeys(launch.constants, "constexpr"))
        self.metadata = SimpleNamespace(name=launch.kernel.__name__, num_ctas=1, num_warps=1, shared=0)
        self.codes = [
            ("P" if kind == "*" else _PACKED[kind], name) for name, kind in kinds.items() if kind != "constexpr"
        ]
        sizes = [struct.calcsize(code) for code, _ in self.codes]
        self.kept = DriverKernel(len(sizes), (ctypes.c_int * 96)(*sizes), RUN(self.interpret))
        self.function = ctypes.addressof(self.kept)

    @staticmethod
    def kind(x):
        if x is None or (isinstance(x, int) and x == 1):
            return "constexpr"
        return "*" if isinstance(x, torch.Tensor) else "i32" if isinstance(x, int) else "fp32"

    def __getitem__(self, grid):
        def run(*values):
            named = dict(zip(self.names, values, strict=False))
            packed = [ctypes.create_string_buffer(struct.pack(code, named[name]), 8) for code, name in self.codes]
            pointers = (ctypes.c_void_p * len(packed))(*map(ctypes.addressof, packed))
            CUDA.cuLaunchKernel(ctypes.c_void_p(self.function), *grid, 32, 1, 1, 0, None, pointers, None)

        return run

    def interpret(self, parameters):
        """Run the kernel on the parameters of a launch."""
        try:
            given = dict(self.rest)
            for i, (code, name) in enumerate(self.codes):
                (value,) = struct.unpack(code, ctypes.string_at(parameters[i], struct.calcsize(code)))
                dtype = self.dtypes[self.names.index(name)]
                given[name] = value if code != "P" else SimpleNamespace(dtype=dtype, data_ptr=partial(int, value))
            self.launch.kernel[self.launch.grid](*given.values(), **self.launch.constants)
        except Exception as error:
            failures.append(error)


@pytest.fixture
def gpu(monkeypatch):
    """Compile nothing; let kernels take addresses for tensors."""

    def run(launch, tensors):
        compiled = Compiled(launch, tensors)
        compiled[launch.grid](*[x if x is None else x.data_ptr() for x in tensors], *launch.numbers)
        return compiled

    monkeypatch.setattr(Launch, "_compile_and_run", run)
    monkeypatch.setattr(GridExecutor, "_init_args_hst", lambda self, args, kwargs: (args, kwargs))
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    monkeypatch.setattr(hardware, "find_gpu", lambda device: hardware.Gpu("no GPU", (8, 9), 99 << 10, 132))
    forget_plans()
    yield
    forget_plans()
    assert not failures


def replay_ops(monkeypatch):
    def make(*functions):
        return replayed(as_function(*functions), *functions)

    flat = make(mix_op._forward_flat, mix_op._setup_flat, mix_op._backward_flat)
    monkeypatch.setattr(mix_op, "_flat", flat)
    for op in (mhla_op, hih_op, conv_op):
        function = make(op._forward, op._setup_context, op._backward)
        call = without_dispatcher(op._forward_op, function, differentiable=True)
        monkeypatch.setattr(op, "_call_forward", call)


def draw(*shape, dtype=F16):
    return torch.randn(shape).to(dtype)


def hih_case(r, dtype=F16, tokens=37, ordered=False, prefix=(), initial=False):
    """Keys have length 1: longer ones let the state grow until it is infinite."""
    B, H, D = 1, 1, 16
    q, k, v = (draw(B, tokens, H, D, dtype=dtype) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    gates = torch.rand(B, tokens, H).to(dtype), -torch.rand(B, tokens, H).to(dtype)
    inputs = [q, k, v, *gates, torch.rand(*prefix, H, r, r).to(dtype)]
    inputs += [draw(B, H, D, D, dtype=dtype)] * initial
    scan = torch.arange(tokens).flip(0) if ordered else None

    def op(q, k, v, beta, decay, mask, state=None):
        out, final = head_in_head(
            q, k, v, beta, decay, mask, initial_state=state, scan=scan, output_final_state=True, impl="triton"
        )
        return (out, final) if initial else out

    return inputs, op


def mhla_case(impl, dtype=F16, **options):
    blocks = TokenBlocks.from_grid((4, 4), (2, 2), num_prefix_tokens=1)
    packed = draw(1, blocks.num_tokens, 3, 1, 16, dtype=dtype)
    inputs = [*packed.unbind(2), torch.rand(blocks.num_blocks, blocks.num_blocks)]
    return inputs, lambda *x: mhla(*x, blocks, impl=impl, **options)


def conv_case():
    inputs = [draw(1, 36, 32), draw(32, 1, 3, 3, dtype=F32), draw(32, dtype=F32)]
    return inputs, lambda *x: grid_conv(*x, grid=(6, 6), silu=True, impl="triton")


def mix_case():
    inputs = [draw(1, 36, 2, 16), draw(1, 36, 2, 16), draw(2, 4, 2, dtype=F32)]
    return inputs, lambda x, y, w: torch.cat(mix_heads([x, y], w, impl="triton"), 2)


CASES = {
    "head_in_head 1": partial(hih_case, 1),
    "head_in_head 4": partial(hih_case, 4),
    "head_in_head 4 float32": partial(hih_case, 4, F32),
    "head_in_head, all options": partial(hih_case, 2, ordered=True, prefix=(1, 37), initial=True),
    "mhla pairwise": partial(mhla_case, "triton_pairwise"),
    "mhla summary": partial(mhla_case, "triton_summary"),
    "mhla causal": partial(mhla_case, "triton_summary", causal=True),
    "mhla source_block": partial(mhla_case, "triton_pairwise", F32, normalizer="source_block"),
    "grid_conv": conv_case,
    "mix_heads": mix_case,
}


@pytest.mark.parametrize("case", CASES)
def test_replayed_calls_are_equal_to_the_bit(case, gpu, monkeypatch):
    torch.manual_seed(0)
    inputs, op = CASES[case]()
    leaves = [x.detach().requires_grad_() for x in inputs]

    def compute():
        outs = op(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        gradients = torch.autograd.grad(outs, leaves, [torch.cos(x.detach()) for x in outs])
        return [*(x.detach() for x in outs), *gradients], outs[0].grad_fn

    expected, _ = compute()
    replay_ops(monkeypatch)
    for _ in range(2):
        ours, node = compute()
        names = node.name(), *(x[0].name() for x in node.next_functions if x[0])
        assert "ReplayedBackward" in names
        for a, b in zip(ours, expected, strict=True):
            assert a.isfinite().all() and torch.equal(a, b)
