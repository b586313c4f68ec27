"""Head mixing kernels: masks, indices and every branch in small float32 shapes, interpreted where there is no GPU."""

import pytest
import torch
import torch._inductor.config
from torch.utils.checkpoint import checkpoint

from headmix_vision.ops import mix_heads
from headmix_vision.ops.mix_heads import triton_kernels

from .helpers import make_mix_heads_inputs, mix_heads_call, relative_error, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float32
TRITON = mix_heads_call("triton")


def make(*sizes, **options):
    inputs, d_outs = make_mix_heads_inputs(*sizes, dtype=DTYPE, **options)
    return [x.to(DEVICE) for x in inputs], [x.to(DEVICE) for x in d_outs]


def assert_agrees(inputs, d_outs, op=TRITON, tolerance=1e-6):
    ours = run(op, inputs, d_outs)
    exact = run(mix_heads_call("reference"), [x.double() for x in inputs], d_outs)
    for i, (x, reference) in enumerate(zip(ours, exact, strict=True)):
        assert relative_error(x.double(), reference) < tolerance, i
    return ours


@pytest.mark.parametrize("dim", [1, 5, 24, 64, 72, 80, 128])
@pytest.mark.parametrize("tokens", [1, 15])
def test_head_dims_and_tokens(dim, tokens):
    assert_agrees(*make(2, 2, tokens, 3, 6, dim))


@pytest.mark.parametrize(
    ("heads", "out_heads"),
    [(1, 1), (1, 8), (6, 12), (12, 6), (16, 16), (5, 17), (16, 64), (64, 16)],
    ids=lambda n: str(n),
)
def test_heads(heads, out_heads):
    assert_agrees(*make(1, 1, 7, heads, out_heads, 8))


@pytest.mark.parametrize(("heads", "out_heads"), [(4, 130), (130, 4), (70, 70)], ids=lambda n: str(n))
def test_more_heads_than_rows_of_a_tile(heads, out_heads):
    assert_agrees(*make(2, 2, 21, heads, out_heads, 16))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_any_number_of_tensors(count):
    assert_agrees(*make(count, 2, 5, 2, 4, 8))


def test_images_of_several_parts_and_sums_in_several_steps(monkeypatch):
    monkeypatch.setattr(triton_kernels, "PART_TILES", 2)
    monkeypatch.setattr(triton_kernels, "SUM_SHARE", 3)
    for table in ("FORWARD", "BACKWARD"):
        rows = [row | {"COLUMNS": 32} for row in getattr(triton_kernels, table)]
        monkeypatch.setattr(triton_kernels, table, rows)
    assert_agrees(*make(2, 2, 23, 3, 6, 24))


@pytest.mark.parametrize(("heads", "out_heads"), [(3, 6), (16, 48), (70, 20)], ids=lambda n: str(n))
@pytest.mark.parametrize("row", [0, 1])
def test_tiles_of_narrow_types(monkeypatch, row, heads, out_heads):
    """As in bf16, with sums over several tiles; here in float32, for the interpreter."""
    for table in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(triton_kernels, table, [getattr(triton_kernels, table)[row]] * 3)
    monkeypatch.setattr(triton_kernels, "EXACT", torch.float64)
    assert_agrees(*make(2, 2, 23, heads, out_heads, 24))


def test_strided_views_and_gradients():
    """Parts of packed projections of different widths, odd offsets, heads in front, and an expanded output gradient."""
    packed = torch.randn(2, 5, 3, 4, 17, device=DEVICE, dtype=DTYPE)[..., 1:]
    head_first = torch.randn(2, 4, 5, 16, device=DEVICE, dtype=DTYPE).transpose(1, 2)
    dims_apart = torch.randn(2, 5, 16, 4, device=DEVICE, dtype=DTYPE).transpose(2, 3)
    weights = torch.randn(3, 4, 8, device=DEVICE, dtype=DTYPE).mT
    for inputs in (packed.unbind(2), (packed[:, :, 1], head_first, dims_apart)):
        d_outs = [
            torch.randn(2, 8, 5, 16, device=DEVICE, dtype=DTYPE).transpose(1, 2),
            torch.ones((), device=DEVICE, dtype=DTYPE).expand(2, 5, 8, 16),
            torch.randn(2, 5, 16, 8, device=DEVICE, dtype=DTYPE).transpose(2, 3),
        ]
        assert_agrees([*inputs, weights], d_outs)


def test_strides_of_output_gradients_need_divide_by_nothing():
    """The inputs' strides divide by 8, the strides of the gradients of longer heads by 1 alone."""
    inputs, _ = make(2, 2, 5, 3, 6, 8)
    d_outs = torch.randn(2, 2, 5, 6, 9, device=DEVICE, dtype=DTYPE)[..., :8]
    assert d_outs[0].stride() == (270, 54, 9, 1)
    assert_agrees(inputs, list(d_outs))


def test_rows_are_copied_only_where_the_kernels_cannot_read_them():
    """Heads of a tensor are counted in 32 bits, from its first one on."""
    near, far = (torch.empty_strided((1, 1, 3, 8), (1, 1, stride, 1), device="meta") for stride in (2**30 - 1, 2**30))
    packed = torch.empty(2, 5, 6, 24)
    kept, copied = [packed[..., :8], near], [packed[..., ::3], far]
    assert all(x is y for x, y in zip(triton_kernels._rows(kept), kept, strict=True))
    assert all(x.is_contiguous() for x in triton_kernels._rows(copied))


def test_outputs_are_contiguous_and_of_the_inputs_type():
    (*inputs, weights), _ = make(2, 2, 5, 3, 6, 8)
    for out in mix_heads([x.half() for x in inputs], weights, impl="triton"):
        assert out.is_contiguous() and out.dtype is torch.float16 and out.shape == (2, 5, 6, 8)


def test_sums_of_many_float32_heads_are_sums_of_sixteen():
    """On a GPU one sum over 64 heads, term by term, has three times the error of the eager form."""
    (x, weights), (d_out,) = make(1, 2, 5, 16, 64, 8)
    d_outs = d_out.split(16, 2)
    parts = [run(TRITON, (x, w), d) for w, d in zip(weights.split(16, 1), d_outs, strict=True)]
    assert torch.equal(run(TRITON, (x, weights), d_out)[1], sum(d_x for _, d_x, _ in parts))
    parts = [TRITON(y, w)[0] for y, w in zip(d_outs, weights.mT.split(16, 2), strict=True)]
    assert torch.equal(TRITON(d_out, weights.mT)[0], sum(parts))


def test_repeated_backward_is_bit_equal():
    inputs, d_outs = make(2, 2, 23, 3, 6, 24)
    first, second = (run(TRITON, inputs, d_outs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_item_does_not_depend_on_its_batch():
    (x, weights), (d_out,) = make(1, 3, 7, 3, 6, 8)
    out, d_x, _ = run(TRITON, (x, weights), d_out)
    alone, d_alone, _ = run(TRITON, (x[1:2], weights), d_out[1:2])
    assert torch.equal(out[1:2], alone) and torch.equal(d_x[1:2], d_alone)


@pytest.mark.parametrize(("batch", "tokens"), [(0, 3), (2, 0)])
def test_nothing_to_mix(batch, tokens):
    inputs, d_outs = make(2, batch, tokens, 3, 6, 8)
    *outs, d_first, _, d_weights = run(TRITON, inputs, d_outs)
    assert outs[0].shape == (batch, tokens, 6, 8) and d_first.shape == inputs[0].shape
    assert d_weights.shape == (2, 6, 3) and d_weights.count_nonzero() == 0


def test_a_loss_of_some_outputs():
    """Gradients of the others are zero, not missing."""
    (x, y, weights), (d_out, _) = make(2, 1, 5, 2, 4, 8)
    leaves = [t.requires_grad_() for t in (x, y, weights)]
    d_x, d_y, d_weights = torch.autograd.grad(mix_heads((x, y), weights, impl="triton")[0], leaves, d_out)
    assert d_x.abs().max() > 0 and d_y.count_nonzero() == 0 and d_weights[1].count_nonzero() == 0


def test_opcheck():
    (*inputs, weights), _ = make(2, 2, 5, 3, 6, 8)
    leaves = [x.requires_grad_() for x in inputs], weights.requires_grad_(), False
    torch.library.opcheck(torch.ops.headmix_vision.mix_heads.default, leaves)


def test_compiles_as_one_graph_with_any_batch():
    compiled = torch.compile(TRITON, fullgraph=True, backend="aot_eager")
    for batch in (1, 2, 3):
        inputs, d_outs = make(2, batch, 5, 3, 6, 8)
        torch._dynamo.maybe_mark_dynamic(inputs[0], 0)
        ours, expected = (run(f, inputs, d_outs) for f in (compiled, TRITON))
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_activation_checkpointing():
    inputs, d_outs = make(2, 2, 5, 3, 6, 8)
    plain = run(TRITON, inputs, d_outs)
    again = run(lambda *x: checkpoint(TRITON, *x, use_reentrant=False), inputs, d_outs)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_autocast_does_not_reach_in():
    (*inputs, weights), _ = make(2, 2, 5, 3, 6, 8)
    outs = mix_heads(inputs, weights, impl="triton")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert all(map(torch.equal, outs, mix_heads(inputs, weights, impl="triton")))


def test_only_inputs_and_weights_are_saved():
    inputs, _ = make(2, 2, 5, 3, 6, 8)
    own = {x.data_ptr() for x in inputs}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: own.remove(x.data_ptr()), lambda x: x):
        TRITON(*[x.requires_grad_() for x in inputs])
    assert not own


def test_gradients_of_a_packed_projection_are_written_in_place():
    """Compiled, the gradients of its parts are not concatenated."""
    (*parts, weights), d_outs = make(3, 2, 5, 3, 6, 8)
    packed = torch.stack(parts, 2).flatten(2)

    def mix(packed, weights):
        parts = (x.unflatten(-1, (3, 8)) for x in (2 * packed).chunk(3, dim=-1))
        return mix_heads(tuple(parts), weights, impl="triton")

    graphs = []  # what is left of forward and backward pass to generate code for
    options = {
        "post_grad_custom_post_pass": lambda graph: graphs.append([str(node.target) for node in graph.nodes]),
        "force_disable_caches": True,  # keys of the caches know nothing of an op's gradients
        "cpp.vec_isa_ok": False,  # else seven probes are compiled and loaded first
        "cpp_cache_precompile_headers": False,
    }
    expected = run(mix, [packed, weights], d_outs)
    with torch._inductor.config.patch(options):
        ours = run(torch.compile(mix, fullgraph=True), [packed, weights], d_outs)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert "headmix_vision.mix_heads_packed_gradients_kernels.default" in graphs[-1]
    assert "aten.cat.default" not in graphs[-1]


@pytest.mark.parametrize(
    ("dtype", "dim", "message"),
    [(torch.float64, 8, r"inputs\[0\] has type torch.float64"), (DTYPE, 136, r"inputs\[0\] has head dim 136: .* 128")],
)
def test_what_the_kernels_cannot_run_is_refused_by_name(dtype, dim, message):
    (*inputs, weights), _ = make_mix_heads_inputs(2, 1, 3, 2, 4, dim, dtype=dtype)
    inputs, weights = [x.to(DEVICE) for x in inputs], weights.to(DEVICE)
    with pytest.raises(ValueError, match=f"{message}.*; impl='triton' was asked for"):
        mix_heads(inputs, weights, impl="triton")
    expected = mix_heads(inputs, weights, impl="torch")
    assert all(map(torch.equal, mix_heads(inputs, weights), expected))


def test_meta_tensors_and_transformations_are_refused():
    (x, weights), _ = make(1, 1, 3, 2, 4, 8)
    with pytest.raises(ValueError, match=r"inputs\[0\] is on meta: the kernels need a CUDA device"):
        mix_heads([x.to("meta")], weights.to("meta"), impl="triton")
    with pytest.raises(ValueError, match=r"inputs\[0\] is under a transformation"):
        torch.func.vmap(lambda x: mix_heads([x], weights, impl="triton")[0])(x[None])


def test_sums_of_many_parts_stay_within_the_grid():
    """Only the first axis of a grid may exceed 65,535."""
    launch, shares = triton_kernels._sum_rows(torch.Size((3, 1 << 25, 4096)), torch.device("cpu"), torch.float32)
    assert shares == launch.grid[0] == 1 << 17
    assert max(launch.grid[1:]) < 65536
