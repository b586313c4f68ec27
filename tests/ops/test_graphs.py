"""Compiled graphs that launch the kernels themselves: the launches that are recorded, and their numbers."""

import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from headmix_vision.errors import InputError
from headmix_vision.ops import TokenBlocks, TokenRanks, dispatch, grid_conv, head_in_head, mhla
from headmix_vision.ops.grid_conv import triton_op as conv_op
from headmix_vision.ops.head_in_head import triton_op as delta_op
from headmix_vision.ops.mhla import triton_op as mhla_op
from headmix_vision.ops.mhla import triton_ranks, triton_tables
from headmix_vision.ops.mhla.torch_impl import Settings, needs_output

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="plays the graph in the interpreter")
BLOCKS = TokenBlocks.from_grid((4, 6), (2, 2), num_prefix_tokens=1)


@pytest.fixture(autouse=True)
def launch_at_once(monkeypatch):
    """Run a launch where it would be recorded."""
    monkeypatch.setattr(torch.library, "wrap_triton", lambda kernel: kernel)


def gradients(call, inputs, d_out):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = call(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, d_out)


def assert_same(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("regime", "causal", "normalizer"),
    [("pairwise", False, "paper"), ("summary", False, "paper"), ("summary", True, None)],
)
def test_recorded_mhla_computes_what_the_op_computes(regime, causal, normalizer):
    q, k, v, d_out = torch.randn(4, 2, BLOCKS.num_tokens, 2, 16)
    mixing, settings = torch.rand(2, 5, 5), Settings(BLOCKS, normalizer, regime=regime, causal=causal)
    packed = settings.pack()
    options = {"normalizer": normalizer, "causal": causal, "impl": f"triton_{regime}"}
    expected = gradients(lambda *x: mhla(*x, BLOCKS, **options), (q, k, v, mixing), d_out)
    mixing = mixing.tril() if causal else mixing
    tables = triton_tables.joined_tables(tuple(packed), 2, 16, 16, q.dtype, q.device)
    out, *saved = mhla_op._record(q, k, v, mixing, None, tables, packed)
    arguments = d_out, q, k, v, mixing, out if needs_output(packed) else None, *saved, tables, packed
    *d_inputs, _ = mhla_op._record_parts(*arguments)
    assert_same((out, *d_inputs), expected)
    d_qkv, d_mixing, _ = mhla_op._record_packed(*arguments)
    assert_same((*d_qkv.unbind(2), d_mixing), expected[1:])


@pytest.mark.parametrize(("rank", "normalizer"), [(0, "paper"), (1, "paper"), (1, None)])
def test_recorded_parts_of_ranks_compute_what_their_ops_compute(rank, normalizer):
    blocks, ops = BLOCKS.of_rank(TokenRanks("", rank, 2)), torch.ops.headmix_vision
    q, k, v, d_out = torch.randn(4, 2, blocks.num_tokens, 2, 16)
    packed = Settings(blocks, normalizer).pack()
    tables = triton_tables.joined_tables(tuple(packed), 2, 16, 16, q.dtype, q.device)
    summaries = ops.mhla_summarize_rank(k, v, None, packed)
    assert_same(triton_ranks._record_summarize(k, v, tables, packed), summaries)
    out, inverse = ops.mhla_apply_rank(q, *summaries, None, packed)
    assert_same(triton_ranks._record_apply(q, *summaries, tables, packed), (out, inverse))
    given = *map(torch.randn_like, summaries), k, v
    expected = ops.mhla_summary_gradients_rank(*given, None, packed)
    assert_same(triton_ranks._record_summary_gradients(*given, tables, packed), expected)
    given = d_out, q, *summaries, inverse
    expected = ops.mhla_output_gradients_rank(*given, None, packed)
    assert_same(triton_ranks._record_output_gradients(*given, tables, packed), expected)


@pytest.mark.parametrize("silu", [False, True])
def test_recorded_convolution_computes_what_the_op_computes(silu):
    inputs = torch.randn(2, 20, 6), torch.randn(6, 1, 3, 3), torch.randn(6)
    d_out, options = torch.randn(2, 20, 6), ([4, 5], 0, 1, True, silu, False, True)
    expected = gradients(lambda *x: grid_conv(*x, grid=(4, 5), residual=True, silu=silu, impl="triton"), inputs, d_out)
    assert_same((conv_op._record(*inputs, *options), *conv_op._record_gradients(d_out, *inputs, *options)), expected)


def test_recorded_head_in_head_computes_what_the_op_computes():
    q, v, d_out = torch.randn(3, 1, 40, 2, 16)
    k, beta, decay = torch.nn.functional.normalize(torch.randn_like(q), dim=-1), *torch.rand(2, 1, 40, 2)
    inputs = q, k, v, beta, -decay, torch.eye(2).expand(2, 2, 2).contiguous()
    expected = gradients(lambda *x: head_in_head(*x, impl="triton")[0], inputs, d_out)
    out, _, *saved = delta_op._record(*inputs, None, None, True, False, True)
    *d_inputs, _ = delta_op._record_backward(d_out, None, *inputs, None, None, *saved, False, True)
    assert_same((out, *d_inputs), expected)


def test_tables_are_inputs_of_a_graph_whose_grid_is_known(monkeypatch):
    """Graphs for grids of all sizes call the op, which finds its tables."""
    monkeypatch.setattr(mhla_op, "is_inline", lambda: True)
    graphs = []

    def count_tables(graph, _):
        graphs.append(sum("tables" in node.name for node in graph.graph.nodes if node.op == "placeholder"))
        return graph

    def attend(x, mixing):
        q = x.flatten(1, 2).unflatten(-1, (2, 16))
        blocks = TokenBlocks.from_grid(x.shape[1:3], (2, 2))
        return mhla(mhla(q, q, q, mixing, blocks, impl="triton"), q, q, mixing, blocks, impl="triton_summary")

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=count_tables)
    for size in ((4, 6), (6, 8), (8, 10)):
        x, mixing = torch.randn(1, *size, 32), torch.rand(4, 4)
        torch.testing.assert_close(compiled(x, mixing), attend(x, mixing))
    assert graphs == [2, 0]


def test_the_cost_model_leaves_graphs_for_grids_of_all_sizes():
    counter = CompileCounter()

    def attend(x, mixing):
        q = x.flatten(1, 2).unflatten(-1, (1, 64))  # the Gluon kernels would take it
        return mhla(q, q, q, mixing, TokenBlocks.from_grid(x.shape[1:3], (2, 2)), impl="triton")

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for size in ((10, 12), (13, 14), (9, 11), (11, 16), (7, 16)):
        x, mixing = torch.randn(1, *size, 64), torch.rand(4, 4)
        torch.testing.assert_close(compiled(x, mixing), attend(x, mixing))
    assert counter.frame_count == 2  # the first has the grid of its call


def test_an_unknown_way_is_refused(monkeypatch):
    monkeypatch.setenv(dispatch.COMPILED, "Inline")
    with pytest.raises(InputError, match="must be one of opaque, inline, auto, got 'Inline'"):
        dispatch.way_in_graphs()
    monkeypatch.setenv(dispatch.REPLAY, "true")
    with pytest.raises(InputError, match="HEADMIX_VISION_REPLAY must be 0 or 1, got 'true'"):
        dispatch.as_function(print, print, print)


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("", True), ("1", True), ("0", False)])
def test_calls_are_replayed_unless_users_say_no(monkeypatch, value, expected):
    assert not (dispatch.INTERPRETED and dispatch.are_calls_replayed())
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.delenv(dispatch.REPLAY, raising=False)
    if value is not None:
        monkeypatch.setenv(dispatch.REPLAY, value)
    assert dispatch.are_calls_replayed() == expected


TRACE = """
from benchmarks.bench_host import leave_out_the_gpu
leave_out_the_gpu()
import torch
from torch._dynamo.testing import CompileCounter
from functorch.compile import aot_function, make_boxed_func
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from headmix_vision.ops.grid_conv import triton_op
def compiler(graph, _):
    for node in graph.graph.nodes:
        clones = node.kwargs.get("tensors_to_clone")
        print(node.target, clones) if clones else print(node.target)
    return make_boxed_func(graph.forward)
options = ([14, 14], 0, 1, True, True, False, True)
with FakeTensorMode(shape_env=ShapeEnv()):
    x = torch.empty(8, 196, 64, dtype=torch.bfloat16, device="cuda")
    weight, bias = torch.empty(64, 1, 3, 3, device="cuda"), torch.empty(64, device="cuda")
    aot_function(lambda *x: triton_op._forward_op(*x, *options), compiler, dynamic=True)(x, weight, bias)
    aot_function(lambda *x: triton_op._gradients_op(*x, *options), compiler)(x, x, weight, bias)
"""


@pytest.mark.slow
def test_a_graph_holds_the_launches_and_overwrites_outputs_alone():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    lines = subprocess.run(
        [sys.executable, "-c", TRACE], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [line.split(" ", 1)[1] for line in lines if line.startswith("triton_kernel_wrapper_functional")] == [
        "['out']", "['out']", "['sums']", "['d_weight', 'd_bias']", "['out']",
    ]  # fmt: skip
    assert not any("headmix_vision" in line for line in lines)
