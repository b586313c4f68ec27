"""MHLA kernels: masks, indices and every branch in small float32 shapes, interpreted where there is no GPU."""

import itertools
import math

import pytest
import torch
import torch._inductor.config
import triton
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from headmix_vision.ops import TokenBlocks, TokenGrid, TokenRanks, hardware, mhla
from headmix_vision.ops.hardware import why_no_kernels
from headmix_vision.ops.mhla import regimes, triton_launch, triton_pairwise, triton_summary, triton_tuning
from headmix_vision.ops.mhla.torch_impl import FEATURE_MAPS, NORMALIZERS, Settings, unpack
from headmix_vision.ops.runtime import forget_plans, layout

from .helpers import make_inputs, relative_error, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REGIMES = ("triton_pairwise", "triton_summary")
EVEN = TokenBlocks.from_grid((4, 8), (2, 2))
UNEVEN = TokenBlocks.from_grid((5, 7), (2, 3), num_prefix_tokens=2)
LONG = TokenBlocks.from_grid((5, 15), (1, 2), num_prefix_tokens=2)  # blocks of more tokens than a tile
DTYPE = torch.float32


def make(blocks, seed=0, **options):
    options = {"batch": 1, "heads": 2, "dim": 16, "value_dim": 16, **options}
    inputs = [x.to(DEVICE, DTYPE) for x in make_inputs(blocks, seed=seed, **options)]
    generator = torch.Generator().manual_seed(seed + 1)
    return inputs, torch.randn(inputs[2].shape, generator=generator, dtype=torch.float64).to(DEVICE, DTYPE)


def assert_agrees(impl, inputs, d_out, blocks, tolerance=3e-6, **options):
    ours = run(lambda *x: mhla(*x, blocks, impl=impl, **options), inputs, d_out)
    exact = run(lambda *x: mhla(*x, blocks, impl="reference", **options), [x.double() for x in inputs], d_out)
    for name, x, reference in zip(("out", "dq", "dk", "dv", "dmixing"), ours, exact, strict=True):
        assert relative_error(x.double(), reference) < tolerance, name
    return ours


@pytest.mark.parametrize("impl", REGIMES)
@pytest.mark.parametrize(
    ("normalizer", "feature_map"),
    [
        *itertools.product(["paper", "source_block", None], ["relu", "elu1"]),
        (None, "identity"),  # has denominators of either sign, close to zero
    ],
)
@pytest.mark.parametrize("blocks", [UNEVEN, pytest.param(LONG, marks=pytest.mark.slow)], ids=["one tile", "several"])
def test_normalizers_and_feature_maps(impl, blocks, normalizer, feature_map):
    inputs, d_out = make(blocks, dim=24, value_dim=8)
    assert_agrees(impl, inputs, d_out, blocks, normalizer=normalizer, feature_map=feature_map)


@pytest.mark.parametrize("impl", REGIMES)
@pytest.mark.parametrize(
    ("blocks", "normalizer", "feature_map", "per_head"),
    [
        pytest.param(UNEVEN, "paper", "relu", True, id="one tile"),
        pytest.param(LONG, None, "identity", False, id="several tiles"),
        pytest.param(UNEVEN, "source_block", "elu1", False, id="given denominators", marks=pytest.mark.slow),
        pytest.param(LONG, "paper", "relu", False, id="several tiles, divided", marks=pytest.mark.slow),
    ],
)
def test_causal(impl, blocks, normalizer, feature_map, per_head):
    """Weights of later blocks are not read: they are not numbers."""
    inputs, d_out = make(blocks, dim=24, value_dim=8, per_head=per_head)
    options = {"normalizer": normalizer, "feature_map": feature_map, "causal": True}
    ours = assert_agrees(impl, inputs, d_out, blocks, **options)
    later = torch.ones(blocks.num_blocks, blocks.num_blocks, dtype=torch.bool, device=DEVICE).triu(1)
    inputs[3] = inputs[3].masked_fill(later, torch.nan)
    again = run(lambda *x: mhla(*x, blocks, impl=impl, **options), inputs, d_out)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    assert not ours[-1][..., later].any()


HEAD_DIMS = [(3, 1), (24, 40), (72, 72), (80, 16), (16, 72), (64, 5)]


@pytest.mark.parametrize("impl", REGIMES)
@pytest.mark.parametrize(
    ("dim", "value_dim", "per_head"),
    [  # dims with weights for each head and without in turn, the rest among the long matrices
        pytest.param(*dims, per_head, marks=() if per_head == (i % 2 == 1) else pytest.mark.slow)
        for per_head in (False, True)
        for i, dims in enumerate(HEAD_DIMS)
    ],
)
def test_head_dims(impl, dim, value_dim, per_head):
    blocks = TokenBlocks.from_grid((3, 5), (2, 2), num_prefix_tokens=1)
    inputs, d_out = make(blocks, dim=dim, value_dim=value_dim, per_head=per_head)
    assert_agrees(impl, inputs, d_out, blocks)


@pytest.mark.parametrize("impl", REGIMES)
@pytest.mark.parametrize(
    "blocks",
    [
        TokenBlocks.from_grid((15,), (4,)),
        EVEN,
        TokenBlocks.from_grid((5, 5), (5, 5)),  # a block for each token
        TokenBlocks.from_grid((2, 3, 4), (2, 1, 3), 1),
        TokenBlocks.from_grid((8, 16), (1, 2)),  # blocks of several tiles
        TokenBlocks.from_grid((9, 5), (9, 1), 3),
    ],
    ids=lambda blocks: "x".join(map(str, blocks.grid.shape)),
)
def test_partitions(impl, blocks):
    inputs, d_out = make(blocks)
    assert_agrees(impl, inputs, d_out, blocks)


def test_no_kernel_reads_a_table_of_places_beyond_its_end(monkeypatch):
    """Places may fill tiles of queries and end within a tile of keys: 96 are three of 32, and one and a half of 64."""
    blocks, built = TokenBlocks.from_grid((12, 8), (3, 1)), []

    def places(*arguments):
        listed = triton_launch.places(*arguments)
        followed = torch.cat([listed.tokens, listed.tokens.flip(0)])  # by tokens of the last block
        built.append(listed._replace(tokens=followed[: len(listed.tokens)]))
        return built[-1]

    monkeypatch.setattr(triton_pairwise, "places", places)
    inputs, d_out = make(blocks)
    assert_agrees("triton_pairwise", inputs, d_out, blocks)
    assert len(built) == 3 and all(x.full for x in built)


@pytest.mark.parametrize("impl", REGIMES)
def test_a_single_token_keeps_its_value(impl):
    blocks = TokenBlocks.from_grid((1,), (1,))
    inputs, d_out = make(blocks)
    out, dq, dk, dv, d_mixing = run(lambda *x: mhla(*x, blocks, impl=impl), inputs, d_out)
    torch.testing.assert_close(out, inputs[2])
    torch.testing.assert_close(dv, d_out)
    for gradient in (dq, dk, d_mixing):
        assert gradient.abs().max() < 1e-5


def test_more_blocks_than_weights_stay_on_chip(monkeypatch):
    monkeypatch.setattr(triton_summary, "MAX_CHUNKS", 0)
    inputs, d_out = make(UNEVEN)
    assert_agrees("triton_summary", inputs, d_out, UNEVEN)


def test_more_blocks_than_a_tile_holds():
    blocks = TokenBlocks.from_grid((5, 13), (5, 13))
    inputs, d_out = make(blocks, batch=1, heads=1)
    assert_agrees("triton_summary", inputs, d_out, blocks)


@pytest.mark.parametrize("row", range(6))
@pytest.mark.parametrize(
    ("blocks", "dims"),
    [
        (LONG, (24, 24)),
        (TokenBlocks.from_grid((8, 8), (1, 2)), (16, 48)),
        (TokenBlocks.from_grid((8, 8), (2, 2)), (24, 24)),
    ],
    ids=["padding for vectors", "whole tiles", "blocks of a tile"],
)
def test_forms_of_rows_for_bfloat16(monkeypatch, row, blocks, dims):
    for name in ("SUMMARIZE", "APPLY", "BACKWARD_QUERY", "BACKWARD_QUERY_LONG", "BACKWARD_KEY"):
        table = getattr(triton_tuning, name)
        monkeypatch.setattr(triton_tuning, name, (dict(table[row], BT=16),) * len(table))
    forget_plans()
    try:
        inputs, d_out = make(blocks, dim=dims[0], value_dim=dims[1])
        assert_agrees("triton_summary", inputs, d_out, blocks)
    finally:
        forget_plans()


@pytest.fixture
def rtx_4090(monkeypatch):
    """Let the kernels choose as on an RTX 4090."""
    gpu = hardware.find_gpu(torch.device(DEVICE))
    gpu = gpu._replace(capability=(8, 9), shared_memory=hardware.LEAST_SHARED_MEMORY)
    monkeypatch.setattr(hardware, "find_gpu", lambda device: gpu)
    forget_plans()
    yield gpu
    forget_plans()


@pytest.mark.parametrize("impl", REGIMES)
@pytest.mark.parametrize("dim", [72, 128])
def test_tiles_of_wide_heads_on_small_gpus(rtx_4090, impl, dim):
    inputs, d_out = make(LONG, heads=1, dim=dim, value_dim=dim)
    assert_agrees(impl, inputs, d_out, LONG)


@pytest.mark.parametrize(
    ("capability", "kilobytes", "resident"), [((8, 0), 163, (False, True)), ((8, 9), 99, (False, False))]
)
def test_keys_and_values_on_chip_with_mma_sync(rtx_4090, monkeypatch, capability, kilobytes, resident):
    gpu = rtx_4090._replace(capability=capability, shared_memory=kilobytes << 10)
    monkeypatch.setattr(hardware, "find_gpu", lambda device: gpu)
    x = layout(torch.empty(1, 196, 2, 64, dtype=torch.bfloat16, device=DEVICE))
    mixing, settings = layout(torch.empty(16, 16, device=DEVICE)), Settings(TokenBlocks.from_grid((14, 14), (4, 4)))
    forward = triton_pairwise._pairwise_forward(x, x, x, mixing, settings).launch
    backward = triton_pairwise._pairwise_backward_key(x, x, x, x, mixing, 1, settings).launch
    assert tuple("resident" in launch.kernel.__name__ for launch in (forward, backward)) == resident


@pytest.fixture
def summary_constants(rtx_4090, monkeypatch):
    """Return the constants of the four kernels that read tokens of a side x side picture in 16 blocks."""

    def constants(side, dims, dtype=torch.bfloat16, **gpu):
        gpu = rtx_4090._replace(**gpu)
        monkeypatch.setattr(hardware, "find_gpu", lambda device: gpu)
        k, v = (layout(torch.empty(1, side**2, 2, dim, dtype=dtype, device=DEVICE)) for dim in dims)
        settings = Settings(TokenBlocks.from_grid((side, side), (4, 4)), regime="summary")
        plans = (
            triton_summary._summarize(k, v, settings),
            triton_summary._apply(k, v, settings),
            triton_summary._backward_query(k, v, 1, settings),
            triton_summary._backward_key(k, v, 1, settings),
        )
        return [plan.launch.constants for plan in plans]

    return constants


HOPPER = {"capability": (9, 0), "shared_memory": 227 << 10}
AMD = {"capability": (9, 4), "shared_memory": hardware.AMD_SHARED_MEMORY, "amd": "gfx942"}


@pytest.mark.parametrize(
    ("gpu", "side", "dims", "rows"),
    [
        ({}, 14, (64, 64), [16, 16, 16, 16]),
        ({}, 32, (64, 64), [64, 64, 64, 32]),
        ({}, 14, (72, 72), [16, 16, 16, 16]),
        (HOPPER, 14, (64, 64), [16, 16, 16, 16]),
        (HOPPER, 32, (64, 64), [64, 64, 64, 64]),
        (HOPPER, 14, (72, 64), [16, 16, 64, 64]),
        (HOPPER, 14, (64, 72), [16, 16, 64, 64]),
        (AMD, 14, (72, 72), [16, 16, 64, 64]),
    ],
)
def test_tiles_are_no_longer_than_parts(summary_constants, gpu, side, dims, rows):
    """Gradients of heads in two parts keep longer tiles where products are not by mma.sync."""
    assert [constants["BT"] for constants in summary_constants(side, dims, **gpu)] == rows


def test_tiles_as_short_as_parts_agree(rtx_4090):
    blocks = TokenBlocks.from_grid((14, 14), (4, 4))
    inputs, d_out = make(blocks)
    assert_agrees("triton_summary", inputs, d_out, blocks)


@pytest.mark.parametrize(
    ("side", "dims", "dtype", "exact"),
    [
        (16, (72, 72), torch.float32, True),
        (16, (80, 128), torch.float32, True),  # otherwise eight warps
        (16, (64, 72), torch.float32, False),
        (16, (96, 96), torch.float32, False),
        (16, (72, 72), torch.float16, False),
        (36, (72, 72), torch.float32, False),  # blocks of several tiles
    ],
)
def test_products_that_would_spill_are_exact(summary_constants, side, dims, dtype, exact):
    """On Hopper gradients of keys with products on tensor cores took 60 times as long."""
    found = summary_constants(side, dims, dtype, **HOPPER)
    assert [constants["PRECISION"] == "ieee" for constants in found] == [exact] * 4
    assert not exact or [constants["num_warps"] for constants in found] == [4] * 4


def test_float32_heads_above_96_dims_have_tiles_of_their_own(summary_constants):
    found = [summary_constants(36, (dim, dim), torch.float32, **HOPPER)[2:] for dim in (96, 112)]
    assert [[constants["num_warps"] for constants in one] for one in found] == [[4, 4], [8, 8]]


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_cut_into_parts(monkeypatch, causal):
    monkeypatch.setattr(triton_summary, "PART_TOKENS", 7)
    blocks = TokenBlocks.from_grid((6, 7), (1, 2), num_prefix_tokens=1)
    inputs, d_out = make(blocks, batch=2, per_head=causal)
    assert_agrees("triton_summary", inputs, d_out, blocks, causal=causal)


def test_mixing_gradients_in_several_launches(monkeypatch):
    inputs, d_out = make(UNEVEN, batch=3)
    at_once = assert_agrees("triton_pairwise", inputs, d_out, UNEVEN)
    monkeypatch.setattr(triton_pairwise, "MIXING_GRADIENT_BYTES", 1)
    forget_plans()
    one_by_one = assert_agrees("triton_pairwise", inputs, d_out, UNEVEN)
    for a, b in zip(at_once[:-1], one_by_one[:-1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("impl", "blocks"),
    [
        pytest.param(REGIMES[0], UNEVEN, id="pairwise, uneven"),
        pytest.param(REGIMES[1], UNEVEN, id="summary, uneven", marks=pytest.mark.slow),
        pytest.param(REGIMES[0], EVEN, id="pairwise, even", marks=pytest.mark.slow),
        pytest.param(REGIMES[1], EVEN, id="summary, even", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_a_packed_projection_are_written_in_place(impl, blocks):
    """Compiled, the gradients of its parts are not concatenated."""
    (q, k, v, mixing), d_out = make(blocks, batch=2)
    packed = torch.stack([q, k, v], 2).flatten(2)

    def attend(packed, mixing):
        q, k, v = (x.unflatten(-1, (2, 16)) for x in (2 * packed).chunk(3, dim=-1))
        return mhla(q, k, v, mixing, blocks, impl=impl)

    graphs = []  # what is left of forward and backward pass to generate code for
    options = {
        "post_grad_custom_post_pass": lambda graph: graphs.append([str(node.target) for node in graph.nodes]),
        "force_disable_caches": True,  # keys of the caches know nothing of an op's gradients
        "cpp.vec_isa_ok": False,  # else seven probes are compiled and loaded first
        "cpp_cache_precompile_headers": False,
    }
    expected = run(attend, [packed, mixing], d_out)
    with torch._inductor.config.patch(options):
        ours = run(torch.compile(attend, fullgraph=True), [packed, mixing], d_out)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert "headmix_vision.mhla_packed_gradients_kernels.default" in graphs[-1]
    assert "aten.cat.default" not in graphs[-1]


@pytest.mark.parametrize("prefetch_run", [1, 128])
@pytest.mark.parametrize("blocks", [EVEN, UNEVEN], ids=["full", "masked"])
def test_heads_held_on_chip(monkeypatch, blocks, prefetch_run):
    """As in bf16 and up to 256 tokens; here in float32, for the interpreter."""
    monkeypatch.setattr(triton_pairwise, "is_resident", lambda *_, forward: True)
    monkeypatch.setattr(triton_tuning, "PREFETCH_RUN", prefetch_run)
    inputs, d_out = make(blocks)
    assert_agrees("triton_pairwise", inputs, d_out, blocks)


@pytest.mark.parametrize("impl", REGIMES)
def test_strided_views_and_gradients(impl):
    """q, k, v out of one packed projection, odd strides and offsets, and an expanded output gradient."""
    packed = torch.randn(2, UNEVEN.num_tokens, 3, 2, 17, device=DEVICE, dtype=DTYPE)[..., 1:]
    mixing = torch.rand(2, UNEVEN.num_blocks, UNEVEN.num_blocks, device=DEVICE, dtype=DTYPE)
    q, k, v = packed.unbind(2)
    head_first = torch.randn(2, 2, UNEVEN.num_tokens, 16, device=DEVICE, dtype=DTYPE).transpose(1, 2)
    constant = torch.ones((), device=DEVICE, dtype=DTYPE).expand(q.shape)
    for inputs in ((q, k, v), (q, k, v.transpose(-1, -2).contiguous().transpose(-1, -2))):
        for d_out in (head_first, constant):
            assert_agrees(impl, [*inputs, mixing.mT], d_out, UNEVEN)


@pytest.mark.parametrize("impl", REGIMES)
def test_repeated_backward_is_bit_equal(impl):
    inputs, d_out = make(UNEVEN)
    first, second = (run(lambda *x: mhla(*x, UNEVEN, impl=impl), inputs, d_out) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("impl", REGIMES)
def test_an_item_does_not_depend_on_its_batch(impl):
    inputs, d_out = make(UNEVEN, batch=3)
    q, k, v, mixing = inputs
    out, *gradients = run(lambda *x: mhla(*x, UNEVEN, impl=impl), inputs, d_out)
    alone, *others = run(lambda *x: mhla(*x, UNEVEN, impl=impl), (q[1:2], k[1:2], v[1:2], mixing), d_out[1:2])
    assert torch.equal(out[1:2], alone)
    assert all(torch.equal(a[1:2], b) for a, b in zip(gradients[:3], others, strict=False))


@pytest.mark.parametrize("impl", REGIMES)
def test_zero_and_large_features_stay_finite(impl):
    (q, k, v, mixing), d_out = make(UNEVEN)
    zero = torch.zeros_like(q)
    out, *gradients = run(lambda *x: mhla(*x, UNEVEN, impl=impl), (zero, zero, v, torch.ones_like(mixing)), d_out)
    assert relative_error(out, v.mean(1, keepdim=True).expand_as(v)) < 1e-4
    assert all(x.isfinite().all() for x in gradients)
    large = mhla(q * 1e4, k * 1e4, v, mixing, UNEVEN, impl=impl)
    assert relative_error(large, mhla(q, k, v, mixing, UNEVEN, impl=impl)) < 1e-4


@pytest.mark.parametrize(("settings", "dtype"), [({}, torch.bfloat16), ({"causal": True}, torch.bfloat16)])
def test_summaries_are_float32_while_they_are_summed(settings, dtype, monkeypatch):
    q, v = torch.empty(1, UNEVEN.num_tokens, 2, 8, dtype=dtype), torch.empty(1, UNEVEN.num_tokens, 2, 16, dtype=dtype)
    whole = triton_summary.part_summaries(q, v, Settings(UNEVEN, **settings))
    assert (whole.matrix.shape, whole.matrix.dtype) == ((1, 2, UNEVEN.num_blocks, 8, 16), dtype)
    assert (whole.vector.shape, whole.vector.dtype) == ((1, 2, UNEVEN.num_blocks, 8), torch.float32)
    assert triton_summary.part_summaries(q, v, Settings(UNEVEN, None)).vector.shape == (1, 2, 0, 8)
    monkeypatch.setattr(triton_summary, "PART_TOKENS", UNEVEN.max_block_size - 1)
    parts = triton_summary.part_summaries(q, v, Settings(UNEVEN, **settings))
    assert parts.matrix.shape == (1, 2, 2 * UNEVEN.num_blocks, 8, 16)
    assert parts.matrix.dtype == (dtype if settings else torch.float32)


def test_empty_batch():
    inputs, d_out = make(UNEVEN, batch=0)
    out, *gradients = run(lambda *x: mhla(*x, UNEVEN, impl="triton"), inputs, d_out)
    assert out.shape == d_out.shape
    assert gradients[3].count_nonzero() == 0


@pytest.mark.parametrize("impl", REGIMES)
@pytest.mark.parametrize(
    "normalizer", ["paper", *(pytest.param(n, marks=pytest.mark.slow) for n in ("source_block", None))]
)
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_opcheck(impl, normalizer, causal):
    (q, k, v, mixing), _ = make(UNEVEN, dim=8, value_dim=8)
    inputs = [x.requires_grad_() for x in (q, k, v, mixing)]
    denominator = torch.rand(1, 2, UNEVEN.num_tokens, device=DEVICE).add(1) if normalizer == "source_block" else None
    settings = Settings(UNEVEN, normalizer, regime=impl.removeprefix("triton_"), causal=causal)
    arguments = (*inputs, denominator, None, settings.pack())
    torch.library.opcheck(torch.ops.headmix_vision.mhla_forward.default, arguments)


@pytest.mark.parametrize(("rank", "normalizer"), [(0, "paper"), (1, None)])
def test_opcheck_of_ranks(rank, normalizer):
    ops, checks = torch.ops.headmix_vision, ("test_schema", "test_faketensor")
    blocks = UNEVEN.of_rank(TokenRanks("", rank, 2))
    packed, shape = [None, Settings(blocks, normalizer, regime="summary").pack()], (1, blocks.num_tokens, 2, 8)
    assert unpack(packed[1]) == Settings(blocks, normalizer, regime="summary")
    q, k, v, d_out = torch.randn(4, *shape, device=DEVICE).unbind()
    torch.library.opcheck(ops.mhla_summarize_rank.default, (k, v, *packed), test_utils=checks)
    summaries = ops.mhla_summarize_rank(k, v, *packed)
    torch.library.opcheck(ops.mhla_apply_rank.default, (q, *summaries, *packed), test_utils=checks)
    _, inverse = ops.mhla_apply_rank(q, *summaries, *packed)
    torch.library.opcheck(ops.mhla_summary_gradients_rank.default, (*summaries, k, v, *packed), test_utils=checks)
    inputs = (d_out, q, *summaries, inverse, *packed)
    torch.library.opcheck(ops.mhla_output_gradients_rank.default, inputs, test_utils=checks)
    empty = [x[:0] for x in ops.mhla_summarize_rank(k, v, *packed)]
    assert [x.shape for x in ops.mhla_summarize_rank(k[:0], v[:0], *packed)] == [x.shape for x in empty]


@pytest.mark.parametrize("impl", [REGIMES[0], pytest.param(REGIMES[1], marks=pytest.mark.slow)])
def test_compiles_as_one_graph_with_any_batch(impl):
    compiled = torch.compile(lambda *x: mhla(*x, UNEVEN, impl=impl), fullgraph=True, backend="aot_eager")
    for batch in (1, 2, 3):
        inputs, d_out = make(UNEVEN, batch=batch)
        torch._dynamo.maybe_mark_dynamic(inputs[0], 0)
        ours, expected = (run(f, inputs, d_out) for f in (compiled, lambda *x: mhla(*x, UNEVEN, impl=impl)))
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_activation_checkpointing():
    inputs, d_out = make(UNEVEN)

    def op(*x):
        return mhla(*x, UNEVEN, impl="triton")

    plain, again = run(op, inputs, d_out), run(lambda *x: checkpoint(op, *x, use_reentrant=False), inputs, d_out)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_autocast_does_not_reach_in():
    inputs, _ = make(UNEVEN)
    for normalizer in ("paper", "source_block"):
        out = mhla(*inputs, UNEVEN, impl="triton", normalizer=normalizer)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            assert torch.equal(mhla(*inputs, UNEVEN, impl="triton", normalizer=normalizer), out)


@pytest.mark.parametrize("impl", REGIMES)
def test_saved_state_is_no_larger_than_the_block_summaries(impl):
    blocks = TokenBlocks.from_grid((8, 8), (2, 2))
    inputs, _ = make(blocks)
    own = {x.data_ptr() for x in inputs}
    sizes = []

    def pack(x):
        if x.data_ptr() not in own:
            sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        mhla(*[x.requires_grad_() for x in inputs], blocks, impl=impl)
    q, _, v, _ = inputs
    summaries = 2 * blocks.num_blocks * q.shape[-1] * (v.shape[-1] + 1)
    assert 0 < sum(sizes) <= max(v.numel(), summaries) + 2 * blocks.num_tokens


@pytest.mark.parametrize(
    ("blocks", "run_length", "count"),
    [
        (TokenBlocks.from_grid((16, 16), (4, 4)), 16, 256),  # four blocks to a tile of 64
        (TokenBlocks.from_grid((14, 14), (4, 4)), 16, 256),  # 196 tokens: four tiles in any case
        (TokenBlocks.from_grid((14, 14), (4, 4), 1), 4, 212),
        (TokenBlocks.from_grid((32, 32), (2, 2)), 64, 1024),
    ],
)
def test_places_waste_no_tile(blocks, run_length, count):
    places = triton_launch.places(blocks, 64, torch.device("cpu"))
    present = places.tokens[places.tokens >= 0]
    assert present.sort().values.equal(torch.arange(blocks.num_tokens, dtype=torch.int32))
    owner = blocks.tables(torch.empty(0)).block_of_token
    by_place = places.blocks.repeat_interleave(places.run)[places.tokens >= 0]
    assert by_place.long().equal(owner[present.long()])
    assert (places.run, places.num_places) == (run_length, count)
    tiles = math.ceil(places.num_places / triton_launch.TILE)
    assert tiles == math.ceil(blocks.num_tokens / triton_launch.TILE)


@pytest.mark.parametrize(
    ("dim", "parts"), [(1, (16, 0)), (64, (64, 0)), (72, (64, 16)), (80, (64, 16)), (96, (64, 32))]
)
def test_head_dims_are_covered_by_two_powers_of_two(dim, parts):
    assert triton_tuning.head_parts(dim) == parts


@pytest.mark.parametrize(
    ("grid", "block_grid", "dim", "regime"),
    [
        ((14, 14), (4, 4), 64, "pairwise"),
        ((16, 16), (4, 4), 72, "pairwise"),
        ((24, 24), (8, 8), 32, "summary"),  # blocks of nine tokens: each pair of tokens has a weight in memory
        ((24, 24), (8, 8), 72, "summary"),
        ((24, 24), (8, 8), 128, "pairwise"),
        ((20, 20), (8, 8), 32, "pairwise"),
        ((20, 20), (4, 4), 128, "summary"),
        ((32, 32), (8, 8), 128, "summary"),
        ((32, 32), (4, 4), 72, "summary"),
        ((64, 64), (8, 8), 64, "summary"),
        ((21, 30, 50), (3, 5, 10), 128, "summary"),
        ((14, 14), (1, 1), 32, "summary"),  # plain linear attention
        ((14, 14), (1, 1), 128, "pairwise"),
        ((16, 16), (16, 16), 64, "pairwise"),  # a block for each token
    ],
)
@pytest.mark.parametrize("on_hopper", [False, True])
def test_cost_model_picks_the_measured_regime(grid, block_grid, dim, regime, on_hopper):
    blocks = TokenBlocks.from_grid(grid, block_grid)
    assert regimes.choose_regime(blocks, dim, dim, on_hopper=on_hopper) == regime


@pytest.mark.parametrize(("side", "block_side", "dim"), [(16, 1, 64), (16, 2, 64), (16, 1, 72), (16, 2, 72)])
def test_cost_model_knows_the_kernels_of_hopper(side, block_side, dim):
    """On an H200 these few blocks were fastest as pairs with the Gluon kernels, as summaries without them."""
    blocks = TokenBlocks.from_grid((side, side), (block_side, block_side))
    assert regimes.choose_regime(blocks, dim, dim, on_hopper=True) == "pairwise"
    assert regimes.choose_regime(blocks, dim, dim) == "summary"


@pytest.mark.parametrize(
    ("side", "block_side", "prefix", "dim", "regime"),
    [
        (8, 2, 0, 128, "pairwise"),
        (14, 2, 0, 64, "summary"),
        (14, 4, 0, 32, "summary"),
        (14, 4, 0, 64, "pairwise"),
        (14, 4, 1, 64, "pairwise"),
        (14, 4, 0, 72, "pairwise"),
        (16, 4, 0, 64, "pairwise"),
        (16, 4, 0, 72, "pairwise"),
        (16, 4, 0, 128, "pairwise"),
        (20, 4, 0, 64, "summary"),
        (20, 8, 0, 64, "pairwise"),
        (24, 8, 0, 64, "summary"),
        (32, 4, 0, 128, "summary"),
    ],
)
def test_cost_model_knows_gpus_with_mma_sync(side, block_side, prefix, dim, regime):
    """The faster one on an H200 in place of an RTX card."""
    blocks = TokenBlocks.from_grid((side, side), (block_side, block_side), prefix)
    assert regimes.choose_regime(blocks, dim, dim, costs=regimes.MMA_SYNC) == regime


@pytest.mark.parametrize(("prefix", "repeats"), [(0, 1), (1, 1), (3, 2), (5, 3)])
def test_cost_model_counts_the_runs_of_the_kernels(prefix, repeats):
    found = set()
    for grid, blocks_along in itertools.product([(5, 19), (8, 8), (20, 20), (24, 24), (6, 7, 5)], (1, 2, 3, 4, 5)):
        blocks = TokenBlocks(TokenGrid(grid, prefix, repeats), (blocks_along,) * len(grid))
        single = triton_launch.places(blocks, triton_launch.TILE, torch.device("cpu")).run == 1
        assert regimes.pairwise_terms(blocks, 32, 32)[3] == single * blocks.num_tokens**2
        found.add(single)
    assert found == {False} if repeats == 2 else {False, True}


@pytest.mark.parametrize("costs", ["WGMMA", "MMA_SYNC"])
def test_cost_model_decides_what_triton_runs(monkeypatch, request, costs):
    if costs == "MMA_SYNC":
        request.getfixturevalue("rtx_4090")
    launched = []
    for module, name in ((triton_pairwise, "pairwise_forward"), (triton_summary, "summarize")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *x, f=original, n=name: (launched.append(n), f(*x))[1])
    inputs, _ = make(EVEN)
    for regime, expected in (("pairwise", "pairwise_forward"), ("summary", "summarize")):
        with monkeypatch.context() as patch:
            nothing = [0.0] * len(getattr(regimes.WGMMA, regime))
            patch.setattr(regimes, costs, getattr(regimes, costs)._replace(**{regime: nothing}))
            forget_plans()
            mhla(*inputs, EVEN, impl="triton")
        assert launched.pop() == expected
    forget_plans()


@pytest.mark.parametrize(
    ("dtype", "dim", "message"),
    [(torch.float64, 8, "q has type torch.float64"), (torch.float32, 136, "q has head dim 136: .* up to 128")],
)
@pytest.mark.parametrize("impl", ["triton", *REGIMES])
def test_what_the_kernels_cannot_run_is_refused_by_name(impl, dtype, dim, message):
    inputs = [x.to(DEVICE) for x in make_inputs(EVEN, dim=dim, dtype=dtype)]
    with pytest.raises(ValueError, match=message):
        mhla(*inputs, EVEN, impl=impl)
    torch.testing.assert_close(mhla(*inputs, EVEN), mhla(*inputs, EVEN, impl="torch"))


@pytest.mark.parametrize("eps", [1e-6, 0.0, 1.0, 3e-39])
def test_settings_survive_as_integers(eps):
    grid = TokenGrid((3, 5, 4), 2, 3)
    regimes = ("pairwise", "summary")
    for normalizer, feature_map, *rest in itertools.product(NORMALIZERS, FEATURE_MAPS, regimes, (False, True)):
        settings = Settings(TokenBlocks(grid, (2, 1, 4)), normalizer, feature_map, eps, *rest)
        assert unpack(settings.pack()) == settings
        assert all(type(x) is int and abs(x) < 2**63 for x in settings.pack())


@pytest.mark.parametrize("impl", [REGIMES[0], pytest.param(REGIMES[1], marks=pytest.mark.slow)])
def test_grids_of_any_size_share_a_compiled_graph(impl):
    """Sizes of the grid may be symbolic in the settings."""

    def attend(x, mixing):
        q = x.flatten(1, 2).unflatten(-1, (2, -1))
        return mhla(q, q, q, mixing, TokenBlocks.from_grid(x.shape[1:3], (2, 2)), impl=impl)

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    mixing = torch.rand(4, 4, device=DEVICE)
    for size in ((4, 4), (4, 6), (6, 6), (8, 4), (9, 7)):
        x = torch.randn(2, *size, 16, device=DEVICE)
        torch.testing.assert_close(compiled(x, mixing), attend(x, mixing))
    assert counter.frame_count <= 3


def test_meta_tensors_are_refused():
    inputs = [x.to("meta") for x in make_inputs(EVEN, dtype=DTYPE)]
    with pytest.raises(ValueError, match="q is on meta: the kernels need a CUDA device"):
        mhla(*inputs, EVEN, impl="triton")


def test_an_older_triton_is_named(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.4.1")
    assert "they need triton 3.5 (torch 2.9), installed is 3.4.1" in why_no_kernels()


class OfAnyGrid(torch.nn.Module):
    """Attend to the places of a picture."""

    def __init__(self, impl):
        super().__init__()
        self.impl = impl

    def forward(self, x, mixing):
        tokens = x.flatten(1, 2)[:, :, None]
        return mhla(tokens, tokens, tokens, mixing, TokenBlocks.from_grid(x.shape[1:3], (2, 2)), impl=self.impl)


def test_an_exported_program_of_all_grids_has_one_regime():
    x, mixing = torch.randn(1, 4, 6, 16, device=DEVICE), torch.rand(4, 4, device=DEVICE)
    sizes = {axis: torch.export.Dim(name, min=2) for axis, name in ((1, "height"), (2, "width"))}
    exported = torch.export.export(OfAnyGrid("triton"), (x, mixing), dynamic_shapes=(sizes, None)).module()
    for shape in ((2, 2), (3, 5), (9, 4), (20, 15)):  # where the cost model chooses either
        x = torch.randn(1, *shape, 16, device=DEVICE)
        exact = OfAnyGrid("reference")(x.double(), mixing.double())
        assert relative_error(exported(x, mixing).double(), exact) < 3e-6
