"""MHLA kernels on a GPU: types, sizes and options against float64, and what surrounds them there."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from headmix_vision.ops import TokenBlocks, TokenRanks, hardware, mhla
from headmix_vision.ops.mhla.hopper import launch as gluon_launch

from .helpers import assert_within_budget, make_inputs, run

pytestmark = pytest.mark.gpu
PORTABLE = "triton_pairwise_portable"
REGIMES = ("triton_pairwise", PORTABLE, "triton_summary")
VIT = TokenBlocks.from_grid((14, 14), (4, 4), num_prefix_tokens=1)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def exact_float32_products():
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.fixture
def impl(request, monkeypatch):
    """The name of an implementation; PORTABLE goes without the kernels that only Hopper has."""
    if request.param == PORTABLE:
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("has no other pairwise kernels")
        for name in ("takes_forward", "takes_backward"):
            monkeypatch.setattr(gluon_launch, name, lambda *_: False)
    return "triton_pairwise" if request.param == PORTABLE else request.param


def make(blocks, dtype=BF16, **options):
    """Views of one packed projection, a float32 mixing matrix, and an output gradient with the heads in front."""
    options = {"batch": 2, "heads": 3, "dim": 64, "value_dim": 64, **options}
    q, k, v, mixing = make_inputs(blocks, **options)
    packed = torch.cat([q, k, v], -1).to("cuda", dtype)
    inputs = [*packed.split([options["dim"], options["dim"], options["value_dim"]], -1), mixing.to("cuda").float()]
    d_out = torch.randn(v.transpose(1, 2).shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return inputs, d_out.to("cuda", dtype).transpose(1, 2)


def check(impl, blocks, dtype=BF16, options=None, **shapes):
    inputs, d_out = make(blocks, dtype, **shapes)
    ours = run(lambda *x: mhla(*x, blocks, impl=impl, **(options or {})), inputs, d_out)
    assert_within_budget(impl, ours, inputs, d_out, blocks, **(options or {}))


@pytest.mark.parametrize("impl", REGIMES, indirect=True)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [16, 24, 64, 72, 80, 128])
def test_head_dims_and_types(impl, dim, dtype):
    check(impl, VIT, dtype, dim=dim, value_dim=dim)


@pytest.mark.parametrize("impl", REGIMES, indirect=True)
@pytest.mark.parametrize(("dim", "value_dim"), [(72, 24), (24, 128), (64, 1), (128, 72)])
def test_other_value_dims(impl, dim, value_dim):
    check(impl, VIT, dim=dim, value_dim=value_dim, per_head=True)


@pytest.mark.parametrize("impl", REGIMES, indirect=True)
@pytest.mark.parametrize("dim", [32, 64, 72, 128])
@pytest.mark.parametrize(
    "blocks",
    [
        TokenBlocks.from_grid((3, 5), (2, 2)),
        TokenBlocks.from_grid((14, 14), (4, 4)),
        TokenBlocks.from_grid((16, 16), (4, 4)),
        TokenBlocks.from_grid((32, 32), (4, 4)),
        TokenBlocks.from_grid((27, 48), (5, 3), 5),
        TokenBlocks.from_grid((9, 15, 10), (2, 4, 3)),
        TokenBlocks.from_grid((40, 25), (1, 1)),
        TokenBlocks.from_grid((14, 14), (14, 14)),
    ],
    ids=lambda blocks: "x".join(map(str, blocks.grid.shape)),
)
def test_partitions(impl, blocks, dim):
    check(impl, blocks, dim=dim, value_dim=dim, batch=1, heads=1)


MANY = {"batch": 80, "heads": 4}  # more heads than a GPU has multiprocessors: on Hopper a program takes several


@pytest.mark.parametrize(
    ("tokens", "dim", "value_dim"),
    [
        (50, 64, 64),
        (50, 72, 72),
        (64, 64, 64),
        (64, 80, 80),
        (97, 64, 64),
        (97, 80, 80),
        (128, 64, 64),
        (128, 72, 72),
        (144, 64, 64),
        (144, 72, 72),
        (169, 80, 80),
        (170, 64, 64),
        (193, 64, 64),
        (196, 64, 64),
        (196, 80, 80),
        (197, 72, 72),
        (208, 72, 72),
        (225, 64, 80),
        (240, 80, 64),
        (255, 80, 80),
        (256, 64, 64),
        (256, 72, 72),
    ],
)
def test_many_short_sequences(tokens, dim, value_dim):
    prefix = tokens % 2
    blocks = TokenBlocks.from_grid((1, tokens - prefix), (1, 15), prefix)
    check("triton_pairwise", blocks, dim=dim, value_dim=value_dim, per_head=tokens < 200, **MANY)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dim", [64, 72])
@pytest.mark.parametrize(
    ("tokens", "num_blocks"), [(50, 20), (100, 17), (128, 32), (144, 17), (197, 16), (256, 1), (256, 32)]
)
def test_many_short_sequences_with_few_or_many_blocks(tokens, num_blocks, dim, per_head):
    blocks = TokenBlocks.from_grid((tokens,), (num_blocks,))
    check("triton_pairwise", blocks, dim=dim, value_dim=dim, per_head=per_head, **MANY)


@pytest.mark.parametrize(
    ("tokens", "normalizer", "feature_map"),
    [
        (64, "paper", "elu1"),
        (100, None, "relu"),
        (170, None, "relu"),
        (196, None, "elu1"),
        (196, None, "identity"),
        (256, "paper", "elu1"),
    ],
)
def test_options_of_many_short_sequences(tokens, normalizer, feature_map):
    options = {"normalizer": normalizer, "feature_map": feature_map}
    check("triton_pairwise", TokenBlocks.from_grid((tokens,), (16,)), options=options, **MANY)


@pytest.mark.parametrize(
    ("tokens", "normalizer"),
    [(64, "paper"), (100, "source_block"), (170, "paper"), (196, "paper"), (197, "source_block"), (256, None)],
)
def test_many_short_sequences_read_no_uninitialised_memory_and_repeat(tokens, normalizer):
    """Under deterministic algorithms torch fills fresh memory with NaN."""
    blocks = TokenBlocks.from_grid((tokens - 1,), (16,), 1)
    inputs, d_out = make(blocks, per_head=tokens == 100, **MANY)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = (run(lambda *x: mhla(*x, blocks, normalizer=normalizer), inputs, d_out) for _ in "ab")
    finally:
        torch.use_deterministic_algorithms(False)
    expected = run(lambda *x: mhla(*x, blocks, normalizer=normalizer, impl="torch"), inputs, d_out)
    for a, b, reference in zip(first, second, expected, strict=True):
        assert torch.equal(a, b)
        assert ((a - reference).float().norm() / reference.float().norm()).item() < 0.02


@pytest.mark.parametrize("dim", [64, 72])
def test_gradients_in_one_tensor(dim):
    """A compiled projection gets the gradients of q, k and v as one tensor."""
    blocks = TokenBlocks.from_grid((14, 14), (4, 4))

    def block(x, weight, mixing):
        q, k, v = (x @ weight).unflatten(-1, (3, 4, dim)).unbind(-3)
        return mhla(q, k, v, mixing, blocks).flatten(2)

    randn = partial(torch.randn, device="cuda", dtype=BF16)
    inputs, d_out = [randn(64, 196, 64), randn(64, 12 * dim) / 8], randn(64, 196, 4 * dim)
    inputs.append(torch.rand(16, 16, device="cuda"))
    ours, expected = (run(f, inputs, d_out) for f in (torch.compile(block, fullgraph=True), block))
    for a, b in zip(ours, expected, strict=True):
        assert ((a - b).float().norm() / b.float().norm()).item() < 0.01


@pytest.mark.parametrize("impl", REGIMES, indirect=True)
@pytest.mark.parametrize("dim", [97, 128])
def test_wide_float32_heads_in_parts_of_several_tiles(impl, dim):
    check(impl, TokenBlocks.from_grid((32, 32), (4, 4)), torch.float32, dim=dim, value_dim=dim)


@pytest.mark.parametrize("impl", REGIMES, indirect=True)
@pytest.mark.parametrize("normalizer", ["paper", None])
@pytest.mark.parametrize("feature_map", ["relu", "elu1"])
@pytest.mark.parametrize("dim", [64, 72])
def test_normalizers_and_feature_maps(impl, normalizer, feature_map, dim):
    check(impl, VIT, dim=dim, value_dim=dim, options={"normalizer": normalizer, "feature_map": feature_map})


@pytest.mark.parametrize("impl", REGIMES, indirect=True)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [24, 64, 72, 128])
@pytest.mark.parametrize(
    "blocks",
    [VIT, TokenBlocks.from_grid((27, 48), (5, 3), 5), TokenBlocks.from_grid((8, 40, 40), (8, 1, 1))],
    ids=["one tile", "several", "several parts"],
)
def test_causal(impl, blocks, dim, dtype):
    check(impl, blocks, dtype, {"causal": True}, dim=dim, value_dim=dim, batch=1, heads=2, per_head=dim == 64)


@pytest.mark.parametrize("impl", REGIMES, indirect=True)
@pytest.mark.parametrize("scale", [0.0, 100.0])
def test_zero_and_large_features(impl, scale):
    (q, k, v, mixing), d_out = make(VIT)
    inputs = (q * scale, k * scale, v, mixing)
    ours = run(lambda *x: mhla(*x, VIT, impl=impl), inputs, d_out)
    assert all(x.isfinite().all() for x in ours)
    if scale:
        assert_within_budget(impl, ours, inputs, d_out, VIT)


@pytest.mark.parametrize("impl", REGIMES, indirect=True)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalizer", ["paper", "source_block", None])
def test_no_uninitialised_memory_is_read_and_results_repeat(impl, normalizer, causal):
    """Under deterministic algorithms torch fills fresh memory with NaN."""
    inputs, d_out = make(TokenBlocks.from_grid((9, 11), (4, 3), 3), dim=72, value_dim=40)
    blocks = TokenBlocks.from_grid((9, 11), (4, 3), 3)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = (
            run(lambda *x: mhla(*x, blocks, impl=impl, normalizer=normalizer, causal=causal), inputs, d_out)
            for _ in "ab"
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_offsets_beyond_two_to_the_31():
    """262,144 tokens in a packed projection of 2.4e9 numbers; the last head against float64."""
    blocks = TokenBlocks.from_grid((512, 512), (8, 8))
    packed = torch.empty(1, blocks.num_tokens, 3, 48, 64, device="cuda", dtype=BF16)
    assert packed.numel() > 2**31
    packed[:, :, :, :-1] = 1
    packed[:, :, :, -1].normal_(generator=torch.Generator("cuda").manual_seed(0))
    packed.requires_grad_()
    mixing = torch.rand(64, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(1), requires_grad=True)
    out = mhla(*packed.unbind(2), mixing, blocks)
    d_out = torch.randn(1, blocks.num_tokens, 1, 64, device="cuda", dtype=BF16)
    (gradient,) = torch.autograd.grad(out[:, :, -1:], packed, d_out)

    exact = [x[:, :, -1:].detach().double().requires_grad_() for x in packed.unbind(2)]
    expected = mhla(*exact, mixing.detach().double(), blocks, impl="torch")
    references = torch.autograd.grad(expected, exact, d_out.double())
    for ours, reference in (
        (out[:, :, -1:], expected),
        *zip((x[:, :, -1:] for x in gradient.unbind(2)), references, strict=True),
    ):
        assert ((ours.double() - reference).norm() / reference.norm()).item() < 0.01


@pytest.mark.parametrize("impl", REGIMES, indirect=True)
@pytest.mark.parametrize("stride", [2**30 + 5, 2**30 + 8], ids=["odd", "whole words"])
def test_head_strides_beyond_two_to_the_31(impl, stride):
    """Views with the heads in front, and a mixing matrix of each head, whose third head lies 2.1e9 numbers away.

    Near heads whose strides are as even take the same kernels, so results are equal to the bit.
    """
    blocks = TokenBlocks.from_grid((14, 14), (4, 4))
    inputs, d_out = make(blocks, batch=1, per_head=True)

    def results(stride):
        leaves = []
        for x in inputs:
            strides = (64, 64, stride, 1) if x.ndim == 4 else (stride, 16, 1)
            memory = torch.empty(2 * stride + 196 * 64, device="cuda", dtype=x.dtype)
            leaves.append(memory.as_strided(x.shape, strides).copy_(x))
        return run(lambda *x: mhla(*x, blocks, impl=impl), leaves, d_out)

    for far, near in zip(results(stride), results(196 * 64 + stride % 16), strict=True):
        assert torch.equal(far, near)


@pytest.mark.parametrize("grid", [(14, 14), (16, 16)], ids=str)
def test_heads_that_do_not_fit_a_small_gpu_are_read_tile_by_tile(monkeypatch, grid):
    gpu = hardware.find_gpu(torch.device("cuda"))._replace(shared_memory=hardware.LEAST_SHARED_MEMORY)
    monkeypatch.setattr(hardware, "find_gpu", lambda device: gpu)
    check("triton_pairwise", TokenBlocks.from_grid(grid, (4, 4)))


@pytest.mark.parametrize("impl", REGIMES, indirect=True)
@pytest.mark.parametrize(
    "blocks", [TokenBlocks.from_grid((11, 13), (3, 2), 1), TokenBlocks.from_grid((13, 16), (4, 4), 1)], ids=str
)
def test_tables_first_asked_for_inside_a_cuda_graph(impl, blocks):
    """With ``reduce-overhead`` the first call runs in the memory pool of a graph, which others use again."""

    @partial(torch.compile, mode="reduce-overhead")
    def block(x, weight, mixing):
        q, k, v = (x @ weight).unflatten(-1, (3, 3, 64)).unbind(-3)
        return mhla(q, k, v, mixing, blocks, impl=impl).flatten(2)

    weight = (torch.randn(96, 3 * 3 * 64, device="cuda", dtype=BF16) / 10).requires_grad_()
    mixing = torch.rand(blocks.num_blocks, blocks.num_blocks, device="cuda", requires_grad=True)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(2, blocks.num_tokens, 96, device="cuda", dtype=BF16)
        out = block(x, weight, mixing)
        ours = [y.clone() for y in (out, *torch.autograd.grad(out.sum(), (weight, mixing)))]
        expected = mhla(*(x @ weight).unflatten(-1, (3, 3, 64)).unbind(-3), mixing, blocks, impl="torch").flatten(2)
        for a, b in zip(ours, (expected, *torch.autograd.grad(expected.sum(), (weight, mixing))), strict=True):
            assert ((a - b).float().norm() / b.float().norm()).item() < 0.02


@pytest.mark.parametrize("impl", REGIMES, indirect=True)
def test_compiled_by_inductor_with_any_batch(impl):
    def block(x, weight, mixing):
        q, k, v = (x @ weight).unflatten(-1, (3, 3, 64)).unbind(-3)
        return mhla(q, k, v, mixing, VIT, impl=impl).flatten(2).relu()

    compiled = torch.compile(block, fullgraph=True, dynamic=None)
    weight = torch.randn(96, 3 * 3 * 64, device="cuda", dtype=BF16) / 10
    mixing = torch.rand(17, 17, device="cuda")
    for batch in (2, 3, 5):
        x = torch.randn(batch, 197, 96, device="cuda", dtype=BF16)
        d_out = torch.randn(batch, 197, 192, device="cuda", dtype=BF16)
        ours, expected = (run(f, (x, weight, mixing), d_out) for f in (compiled, block))
        for a, b in zip(ours, expected, strict=True):
            assert ((a - b).float().norm() / b.float().norm()).item() < 0.01


@pytest.mark.parametrize("impl", REGIMES, indirect=True)
def test_cuda_graph(impl):
    inputs, d_out = make(VIT)
    leaves = [x.clone().requires_grad_() for x in inputs]

    def step():
        return mhla(*leaves, VIT, impl=impl), *torch.autograd.grad(mhla(*leaves, VIT, impl=impl), leaves, d_out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        leaves[0].neg_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def test_auto_takes_the_kernels_wherever_they_can_run():
    inputs, _ = make(VIT)
    assert torch.equal(mhla(*inputs, VIT), mhla(*inputs, VIT, impl="triton"))
    with torch.autocast("cuda", dtype=BF16):
        assert torch.equal(mhla(*inputs, VIT), mhla(*inputs, VIT, impl="triton"))
    wide, _ = make(VIT, dim=136)
    assert torch.equal(mhla(*wide, VIT), mhla(*wide, VIT, impl="torch"))


def test_devices_may_not_mix():
    (q, k, v, mixing), _ = make(VIT)
    for name, changed in (("k", (q, k.cpu(), v, mixing)), ("mixing", (q, k, v, mixing.cpu()))):
        with pytest.raises(ValueError, match=f"{name} is on cpu, q on cuda"):
            mhla(*changed, VIT)


def _peak_bytes(f):
    f()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(
    ("grid", "block_grid", "dim"), [((14, 14), (4, 4), 64), ((32, 32), (4, 4), 72), ((64, 64), (8, 8), 64)]
)
def test_peak_memory_is_at_most_one_percent_above_flash_attention(grid, block_grid, dim):
    blocks = TokenBlocks.from_grid(grid, block_grid)
    (q, k, v, mixing), d_out = make(blocks, batch=16, heads=8, dim=dim, value_dim=dim)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, mixing)]

    def ours():
        torch.autograd.grad(mhla(*leaves, blocks), leaves, d_out)

    def flash():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves[:3]))
        torch.autograd.grad(out.transpose(1, 2), leaves[:3], d_out)

    assert _peak_bytes(ours) <= 1.01 * _peak_bytes(flash)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_kernels_of_a_rank_and_nccl_within_budget(dtype):
    inputs, d_out = make(VIT, dtype)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        blocks = VIT.of_rank(TokenRanks.of(dist.group.WORLD))
        ours = run(lambda *x: mhla(*x, blocks, impl="triton"), inputs, d_out)
    finally:
        dist.destroy_process_group()
    assert_within_budget("triton_summary", ours, inputs, d_out, VIT)
