"""Where a kernel does not compile, the next form serves under impl="auto", and an explicit one says so."""

import signal
import subprocess
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor

from headmix_vision.ops import TokenBlocks, TokenGrid, TokenRanks, TokenScan, dispatch, hardware, runtime
from headmix_vision.ops.grid_conv import api as grid_conv
from headmix_vision.ops.grid_conv import triton_op as grid_conv_op
from headmix_vision.ops.head_in_head import api as head_in_head
from headmix_vision.ops.head_in_head import triton_op as head_in_head_op
from headmix_vision.ops.head_in_head.torch_impl import Inputs
from headmix_vision.ops.mhla import api as mhla
from headmix_vision.ops.mhla import triton_op as mhla_op
from headmix_vision.ops.mhla import triton_ranks
from headmix_vision.ops.mhla.torch_impl import Settings
from headmix_vision.ops.mix_heads import api as mix_heads
from headmix_vision.ops.mix_heads import triton_op as mix_heads_op
from headmix_vision.ops.runtime import KernelFailed, Launch

pytestmark = pytest.mark.skipif(hardware.NO_KERNELS is not None, reason="needs the kernels")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS = TokenBlocks.from_grid((4, 5), (2, 2), 1)
CASES = ("mhla", "mhla source_block", "mhla causal", "head_in_head", "head_in_head state", "grid_conv", "mix_heads")


class NoCompiler:
    """A kernel that does not compile."""

    def __init__(self, name):
        self.__name__ = name

    def __getitem__(self, grid):
        def launch(*args, **options):
            raise RuntimeError("PassManager::run\nfailed")

        return launch


@pytest.fixture
def broken(monkeypatch):
    """Let kernels with some letters in their names fail to compile."""
    compile_and_run = Launch._compile_and_run

    def break_(letters):
        def run(self, tensors):
            if letters not in self.kernel.__name__:
                return compile_and_run(self, tensors)
            self.kernel = NoCompiler(self.kernel.__name__)
            with monkeypatch.context() as compiling:
                compiling.setattr(runtime, "INTERPRETED", False)
                return compile_and_run(self, tensors)

        monkeypatch.setattr(Launch, "_compile_and_run", run)

    dispatch.FAILED.clear()
    dispatch._warned.clear()
    yield break_
    dispatch.FAILED.clear()


def _call(case: str, impl: str) -> list[Tensor]:
    """Return outputs and all gradients."""
    torch.manual_seed(0)

    def draw(*size):
        return torch.rand(*size, device=DEVICE).requires_grad_()

    name, _, option = case.partition(" ")
    if name == "mhla":
        inputs = [*(draw(2, 21, 2, 16) for _ in range(3)), draw(5, 5)]
        normalizer = option if option == "source_block" else "paper"
        settings = Settings(BLOCKS, normalizer, causal=option == "causal")
        outputs = mhla.IMPLEMENTATIONS[impl](inputs[0], inputs[2], settings)(*inputs)
    elif name == "head_in_head":
        inputs = [draw(1, 20, 2, 16) for _ in range(3)] + [draw(1, 20, 2), draw(1, 20, 2)]
        log_decay = -inputs[4]
        inputs.append(torch.eye(2, device=DEVICE).expand(2, 2, 2).clone().requires_grad_())
        state = draw(1, 2, 16, 16) if option else None
        scan = TokenScan.from_grid((4, 5), "column_major").tables(inputs[0]) if option else None
        tensors = (*inputs[:4], log_decay, inputs[5], state)
        outputs = head_in_head.IMPLEMENTATIONS[impl](Inputs(*tensors), scan)
        inputs += [state] if option else []
        outputs = outputs if option else outputs[:1]
    elif name == "grid_conv":
        inputs = [draw(2, 21, 8), draw(8, 1, 3, 3), draw(8)]
        outputs = grid_conv.IMPLEMENTATIONS[impl](*inputs, TokenGrid((4, 5), 1), True, True)
    else:
        inputs = [*(draw(2, 5, 2, 16) for _ in range(3)), draw(3, 4, 2)]
        outputs = mix_heads.IMPLEMENTATIONS[impl](*inputs[:4])
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    return outputs + list(torch.autograd.grad(sum(x.square().sum() for x in outputs), inputs))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_pytorch_form_serves_and_is_named_once(broken, case, backward):
    """All kernels fail, or one of the backward pass alone."""
    expected = _call(case, "torch")
    broken("_" if not backward else "gradient" if case == "grid_conv" else "backward")
    reason = r"_kernel does not compile with triton .*: RuntimeError: PassManager::run failed; the slower PyTorch"
    with pytest.warns(UserWarning, match=reason):
        found = _call(case, "auto")
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _call(case, "auto")
    with pytest.raises(KernelFailed, match="_kernel does not compile with triton"):
        _call(case, "triton")


@pytest.mark.parametrize(("number", "direct"), [(signal.SIGINT, False), (signal.SIGTERM, True), (signal.SIGKILL, True)])
def test_a_compiler_that_a_signal_to_all_ends_runs_once_more(monkeypatch, number, direct):
    """Triton hides what ends its assembler behind an error of its own, and passes on what ends its C compiler."""
    attempts = []

    class Interrupted(NoCompiler):
        arg_names = ()

        def __getitem__(self, grid):
            def launch(*args, **options):
                attempts.append(1)
                if len(attempts) % 2 == 0:
                    return "compiled"
                try:
                    raise subprocess.CalledProcessError(-number, "ptxas")
                except subprocess.CalledProcessError:
                    if direct:
                        raise
                    raise RuntimeError("`ptxas` failed")  # noqa: B904

            return launch

    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(runtime, "gpu_behind", lambda device: hardware.INTERPRETER)
    compile_ = partial(Launch(Interrupted("some_kernel"), (1,), (), {})._compile_and_run, (torch.ones(1),))
    if number == signal.SIGKILL:  # as the kernel of Linux sends for lack of memory
        with pytest.raises(KernelFailed, match="some_kernel does not compile"):
            compile_()
    else:
        assert compile_() == "compiled"


def test_compiled_graphs_fall_back_too(broken):
    inputs = [*(torch.rand(2, 21, 2, 16, device=DEVICE).requires_grad_() for _ in range(3))]
    mixing = torch.rand(5, 5, device=DEVICE, requires_grad=True)
    plan, plan_torch = mhla.IMPLEMENTATIONS["auto"], mhla.IMPLEMENTATIONS["torch"]
    broken("_")
    model = torch.compile(
        lambda q, k, v, m: plan(q, v, Settings(BLOCKS))(q, k, v, m), backend="aot_eager", fullgraph=True
    )
    with pytest.warns(UserWarning, match="slower PyTorch implementation"):
        out = model(*inputs, mixing)
        found = torch.autograd.grad(out.sum(), [*inputs, mixing])
    call = plan_torch(inputs[0], inputs[2], Settings(BLOCKS))
    expected = torch.autograd.grad(call(*inputs, mixing).sum(), [*inputs, mixing])
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


KINDS = {
    "mhla": (lambda q, v, last: mhla_op._kind(q, v, Settings(BLOCKS)), "both"),
    "mhla of ranks": (lambda q, v, last: triton_ranks._kind(q, v.shape[-1], Settings(BLOCKS)), "both"),
    "head_in_head": (lambda q, v, last: head_in_head_op._kind(q, v, last, True), "all"),
    "grid_conv": (lambda q, v, last: grid_conv_op._kind(q, last, True), "last"),
    "mix_heads": (lambda q, v, last: mix_heads_op._kind([q], last, True), "first"),
}


@pytest.mark.parametrize("name", KINDS)
def test_kernels_of_a_kind_depend_on_dims_and_not_on_sizes(name):
    kind, dims = KINDS[name]

    def of(batch=2, tokens=21, dim=16, value_dim=8, last=(3, 1, 4, 4), dtype=torch.float32):
        q, v = (torch.empty(batch, tokens, 2, d, dtype=dtype, device=DEVICE) for d in (dim, value_dim))
        return kind(q, v, torch.empty(last, device=DEVICE))

    assert of() == of(batch=3) == of(tokens=22) != of(dtype=torch.float16)
    assert (of(dim=24) != of()) == (dims != "last")
    assert (of(value_dim=16) != of()) == (dims in ("both", "all"))
    assert (of(last=(3, 1, 2, 2)) != of()) == (dims in ("all", "first", "last"))
    assert (of(last=(3, 4, 4)) != of()) == (dims in ("all", "first", "last"))
    assert (of(last=(3, 1, 2, 4)) != of()) == (dims in ("first", "last"))
    assert (of(last=(7, 1, 4, 4)) != of()) == (dims == "first")


@pytest.mark.parametrize("letters", ["_", "backward"])
@pytest.mark.parametrize("normalizer", ["paper", None])
def test_the_ops_of_a_rank_have_their_pytorch_form(broken, normalizer, letters):
    blocks = TokenBlocks.from_grid((4, 6), (2, 2)).of_rank(TokenRanks("", 0, 2, 1))
    given, n = (None, Settings(blocks, normalizer, fallback=True).pack()), blocks.num_tokens
    torch.manual_seed(0)
    q, k, v = (torch.rand(2, n, 2, 16, device=DEVICE) for _ in range(3))

    def results():
        matrix, vector = triton_ranks._summarize(k, v, *given)
        out, inverse = triton_ranks._apply(q, matrix, vector, *given)
        d_keys = triton_ranks._summary_gradients(matrix, vector, k, v, *given)
        d_queries = triton_ranks._output_gradients(torch.ones_like(out), q, matrix, vector, inverse, *given)
        return [matrix, vector, out, *d_keys, *d_queries]

    expected = results()
    assert expected[0].shape == (2, 2, blocks.num_blocks, 16, 16)
    runtime.forget_plans()
    broken(letters)
    with pytest.warns(UserWarning, match="slower PyTorch implementation"):
        found = results()
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    assert len(dispatch.FAILED) == 1, "all ops leave out kernels for inputs of this kind"
