"""MHLA: agreement of the implementations, and the invariants of the method in float64."""

import pytest
import torch

from headmix_vision.ops import TokenBlocks, mhla

from .helpers import make_inputs, relative_error

IMPLS = ("reference", "torch")
NORMALIZERS = ("paper", "source_block", None)


def linear_attention(q, k, v, eps=1e-6):
    q, k = q.relu() + eps, k.relu() + eps
    out = torch.einsum("bnhd,bhde->bnhe", q, torch.einsum("bnhd,bnhe->bhde", k, v))
    return out / torch.einsum("bnhd,bhd->bnh", q, k.sum(1))[..., None]


@pytest.mark.parametrize("feature_map", ["relu", "elu1", "identity"])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(
    ("grid", "block_grid", "prefix"),
    [((8, 8), (4, 4), 0), ((14, 14), (4, 4), 1), ((7, 5), (2, 3), 2), ((3, 5, 4), (2, 2, 3), 1), ((15,), (4,), 0)],
)
def test_torch_agrees_with_the_reference_in_values_and_gradients(
    grid, block_grid, prefix, per_head, normalizer, feature_map
):
    blocks = TokenBlocks.from_grid(grid, block_grid, prefix)
    inputs = make_inputs(blocks, per_head=per_head)
    results = {}
    for impl in IMPLS:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = mhla(*leaves, blocks, normalizer=normalizer, feature_map=feature_map, impl=impl)
        gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        results[impl] = (out, *torch.autograd.grad(out, leaves, gradient))
    for ours, reference in zip(results["torch"], results["reference"], strict=True):
        assert relative_error(ours, reference) < 1e-9


@pytest.mark.parametrize("impl", IMPLS)
def test_paper_equation_4(impl):
    """S~_i = sum_b m_ib S_b, z~_i = sum_b m_ib z_b, o = q S~_i / (q z~_i), written as loops."""
    blocks = TokenBlocks.from_grid((5, 4), (2, 2), 1)
    q, k, v, mixing = make_inputs(blocks)
    index = blocks.tables(q).tokens
    phi_q, phi_k = q.relu() + 1e-6, k.relu() + 1e-6
    members = [row[row >= 0] for row in index]
    states = [torch.einsum("bnhd,bnhe->bhde", phi_k[:, t], v[:, t]) for t in members]
    sums = [phi_k[:, t].sum(1) for t in members]
    expected = torch.empty_like(v)
    for i, tokens in enumerate(members):
        state = sum(mixing[i, b] * states[b] for b in range(blocks.num_blocks))
        total = sum(mixing[i, b] * sums[b] for b in range(blocks.num_blocks))
        numerator = torch.einsum("bnhd,bhde->bnhe", phi_q[:, tokens], state)
        expected[:, tokens] = numerator / torch.einsum("bnhd,bhd->bnh", phi_q[:, tokens], total)[..., None]
    assert relative_error(mhla(q, k, v, mixing, blocks, impl=impl), expected) < 1e-12


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("block_grid", [(1, 1), (2, 3)])
def test_one_block_or_equal_weights_are_linear_attention(impl, block_grid):
    blocks = TokenBlocks.from_grid((6, 7), block_grid)
    q, k, v, mixing = make_inputs(blocks)
    out = mhla(q, k, v, torch.ones_like(mixing), blocks, impl=impl)
    assert relative_error(out, linear_attention(q, k, v)) < 1e-12


@pytest.mark.parametrize("impl", IMPLS)
def test_identity_mixing_is_block_local_linear_attention(impl):
    blocks = TokenBlocks.from_grid((7, 6), (2, 3), 2)
    q, k, v, mixing = make_inputs(blocks)
    out = mhla(q, k, v, torch.eye(len(mixing), dtype=mixing.dtype), blocks, impl=impl)
    for row in blocks.tables(q).tokens:
        tokens = row[row >= 0]
        assert relative_error(out[:, tokens], linear_attention(q[:, tokens], k[:, tokens], v[:, tokens])) < 1e-12


@pytest.mark.parametrize("impl", IMPLS)
def test_one_token_per_block_is_weighted_kernel_attention(impl):
    blocks = TokenBlocks.from_grid((4, 5), (4, 5))
    q, k, v, mixing = make_inputs(blocks)
    weights = mixing * torch.einsum("bihd,bjhd->bhij", q.relu() + 1e-6, k.relu() + 1e-6)
    expected = torch.einsum("bhij,bjhe->bihe", weights / weights.sum(-1, keepdim=True), v)
    assert relative_error(mhla(q, k, v, mixing, blocks, impl=impl), expected) < 1e-12


@pytest.mark.parametrize("impl", IMPLS)
def test_row_scale_of_the_mixing_does_not_matter(impl):
    blocks = TokenBlocks.from_grid((7, 6), (2, 3), 1)
    q, k, v, mixing = make_inputs(blocks)
    scale = torch.linspace(0.1, 9, len(mixing), dtype=mixing.dtype)[:, None]
    out = mhla(q, k, v, mixing, blocks, impl=impl)
    assert relative_error(mhla(q, k, v, scale * mixing, blocks, impl=impl), out) < 1e-12


@pytest.mark.parametrize("impl", IMPLS)
def test_constant_values_pass_unchanged(impl):
    """The released normaliser breaks this: with it the output is not constant."""
    blocks = TokenBlocks.from_grid((8, 8), (4, 4))
    q, k, v, mixing = make_inputs(blocks)
    v = v[:1, :1].expand_as(v)
    assert relative_error(mhla(q, k, v, mixing, blocks, impl=impl), v) < 1e-12
    released = mhla(q, k, v, mixing, blocks, normalizer="source_block", impl=impl)
    assert relative_error(released, v) > 0.05


@pytest.mark.parametrize("impl", IMPLS)
def test_permuting_blocks_with_the_mixing_permutes_the_output(impl):
    blocks = TokenBlocks.from_grid((8, 8), (2, 4))
    q, k, v, mixing = make_inputs(blocks)
    index = blocks.tables(q).tokens
    order = torch.randperm(len(mixing), generator=torch.Generator().manual_seed(3))
    permutation = torch.empty(blocks.num_tokens, dtype=torch.long)
    permutation[index.flatten()] = index[order].flatten()  # token at place j of block b comes from block order[b]
    out = mhla(q, k, v, mixing, blocks, impl=impl)
    permuted = mhla(*(x[:, permutation] for x in (q, k, v)), mixing[order][:, order].contiguous(), blocks, impl=impl)
    assert relative_error(permuted, out[:, permutation]) < 1e-12


@pytest.mark.parametrize(("grid", "block_grid", "dim"), [((8, 8), (2, 2), 6), ((7, 6), (2, 3), 5), ((4, 4), (1, 1), 6)])
def test_generic_rank_of_the_attention_matrix(grid, block_grid, dim):
    """rank = min(N, sum_b min(n_b, D)), against D for linear attention."""
    blocks = TokenBlocks.from_grid(grid, block_grid)
    n = blocks.num_tokens
    q, k, _, mixing = make_inputs(blocks, batch=1, heads=1, dim=dim)
    attention = mhla(q, k, torch.eye(n, dtype=q.dtype)[None, :, None], mixing, blocks, feature_map="elu1")[0, :, 0]
    sizes = (blocks.tables(q).tokens >= 0).sum(1)
    assert torch.linalg.matrix_rank(attention, rtol=1e-10) == min(n, int(sizes.clamp(max=dim).sum()))


@pytest.mark.parametrize("impl", IMPLS)
def test_released_normaliser(impl):
    """With equal blocks: queries and keys in block order, block-wise scores mixed place by place."""
    blocks = TokenBlocks.from_grid((6, 6), (3, 2))
    q, k, v, mixing = make_inputs(blocks)
    index = blocks.tables(q).tokens
    phi_q, phi_k, blocked_v = (x[:, index] for x in (q.relu() + 1e-6, k.relu() + 1e-6, v))  # [B, M, n, H, D]
    states = torch.einsum("bmnhd,bmnhe->bmhde", phi_k, blocked_v)
    numerator = torch.einsum("bmnhd,bmhde->bmnhe", phi_q, torch.einsum("im,bmhde->bihde", mixing, states))
    scores = torch.einsum("bmnhd,bmhd->bmnh", phi_q, phi_k.sum(2))
    expected = numerator / (torch.einsum("im,bmnh->binh", mixing, scores) + 1e-6)[..., None]
    out = mhla(q, k, v, mixing, blocks, normalizer="source_block", impl=impl)
    assert relative_error(out[:, index], expected) < 1e-12


def test_gradcheck():
    blocks = TokenBlocks.from_grid((2, 3), (2, 2), 1)
    inputs = [x.requires_grad_() for x in make_inputs(blocks, batch=1, heads=2, dim=3, value_dim=2)]
    for normalizer in NORMALIZERS:

        def op(*args, normalizer=normalizer):
            return mhla(*args, blocks, normalizer=normalizer, feature_map="elu1")

        assert torch.autograd.gradcheck(op, inputs)
        assert torch.autograd.gradgradcheck(op, inputs)


@pytest.mark.parametrize("dim", [24, 64, 72, 80, 128])
@pytest.mark.parametrize("grid", [(1, 1), (3, 5), (14, 14), (32, 32)])
def test_float32_shapes_of_real_models(grid, dim):
    blocks = TokenBlocks.from_grid(grid, tuple(min(4, g) for g in grid), num_prefix_tokens=1)
    inputs = make_inputs(blocks, batch=1, heads=1, dim=dim, value_dim=dim // 2)
    expected = mhla(*inputs, blocks, impl="reference")
    assert relative_error(mhla(*(x.float() for x in inputs), blocks).double(), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_accumulates_in_float32(dtype):
    """Only the inputs and the result are rounded: the error stays at the size of rounding, whatever N."""
    blocks = TokenBlocks.from_grid((64, 64), (4, 4))
    q, k, v, mixing = make_inputs(blocks, batch=1, heads=1, dim=16)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    expected = mhla(q.double(), k.double(), v.double(), mixing, blocks)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mhla(q, k, v, mixing.float(), blocks)
    assert out.dtype is dtype
    assert (out.double() - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("impl", IMPLS)
def test_all_zero_and_large_features_stay_finite(impl):
    blocks = TokenBlocks.from_grid((14, 14), (4, 4), 1)
    q, k, v, mixing = make_inputs(blocks, dtype=torch.float32)
    zero = torch.zeros_like(q, requires_grad=True)
    out = mhla(zero, zero, v, torch.ones_like(mixing), blocks, impl=impl)
    out.sum().backward()
    assert relative_error(out, v.mean(1, keepdim=True).expand_as(v)) < 1e-4
    assert zero.grad.isfinite().all()
    large = mhla(q * 1e4, k * 1e4, v, mixing, blocks, impl=impl)
    assert relative_error(large, mhla(q, k, v, mixing, blocks, impl=impl)) < 1e-4


def test_strided_views_of_a_packed_projection():
    blocks = TokenBlocks.from_grid((6, 6), (2, 2))
    packed = torch.randn(2, 36, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    mixing = torch.rand(4, 4, dtype=torch.float64)
    out = mhla(*packed.unbind(2), mixing, blocks)
    gradient = torch.randn(2, 4, 36, 8, dtype=torch.float64).transpose(1, 2)  # non-contiguous
    (packed_gradient,) = torch.autograd.grad(out, packed, gradient)
    copies = [x.detach().clone().requires_grad_() for x in packed.unbind(2)]
    expected = mhla(*copies, mixing, blocks, impl="reference")
    gradients = torch.autograd.grad(expected, copies, gradient)
    assert relative_error(out, expected) < 1e-12
    assert relative_error(packed_gradient, torch.stack(gradients, 2)) < 1e-12


@pytest.mark.parametrize(("block_grid", "causal", "numbers"), [((4, 4), False, 16), ((1, 1), True, 64)])
def test_no_token_by_token_matrix_is_formed(block_grid, causal, numbers):
    """Numbers a token of the largest tensor of the linear form: far below N; causal not even the N x N of a block."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class LargestTensor(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, torch.Tensor):
                    self.numel = max(self.numel, x.numel())
            return out

    blocks = TokenBlocks.from_grid((48, 48), block_grid)
    inputs = [x.requires_grad_() for x in make_inputs(blocks, batch=1, heads=1, dtype=torch.float32)]
    with LargestTensor() as largest:
        mhla(*inputs, blocks, causal=causal).sum().backward()
    assert largest.numel <= numbers * blocks.num_tokens < blocks.num_tokens**2


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiles_as_one_graph(dynamic):
    blocks = TokenBlocks.from_grid((5, 4), (2, 2), 1)
    compiled = torch.compile(lambda *x: mhla(*x, blocks), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for batch in (2, 3):
        inputs = [x.requires_grad_() for x in make_inputs(blocks, batch=batch)]
        out = compiled(*inputs)
        expected = mhla(*inputs, blocks)
        torch.testing.assert_close(out, expected)
        for ours, reference in zip(
            torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True
        ):
            torch.testing.assert_close(ours, reference)


def _case(**changes):
    blocks = TokenBlocks.from_grid((4, 4), (2, 2))
    q, k, v, mixing = make_inputs(blocks, dtype=torch.float32)
    return {"q": q, "k": k, "v": v, "mixing": mixing, "blocks": blocks, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 16, 8)}, r"q must be \[B, N, H, D\]"),
        ({"k": torch.zeros(2, 16, 3, 7)}, "k must have the shape of q"),
        ({"v": torch.zeros(2, 15, 3, 5)}, r"v must be \[B, N, H, Dv\]"),
        ({"q": torch.zeros(2, 16, 3, 0), "k": torch.zeros(2, 16, 3, 0)}, "q must have a head dim of at least 1"),
        ({"blocks": TokenBlocks.from_grid((4, 5), (2, 2))}, "16 tokens, but blocks divide a 4x5 grid: 20"),
        ({"blocks": TokenBlocks.from_grid((4, 4), (2, 2), 2)}, "plus 2 prefix tokens: 18"),
        ({"mixing": torch.ones(5, 5)}, r"mixing must be \[M, M\] or \[H, M, M\] with M = 4"),
        ({"mixing": torch.ones(2, 4, 4)}, "mixing must be"),
        ({"mixing": torch.ones(4, 4, dtype=torch.long)}, "mixing must have a floating type"),
        ({"k": torch.zeros(2, 16, 3, 8, dtype=torch.float64)}, "k has type"),
        ({"v": torch.zeros(2, 16, 3, 5, device="meta")}, "v is on meta"),
        ({"normalizer": "row"}, "normalizer must be one of"),
        ({"feature_map": "softmax"}, "feature_map must be one of"),
        ({"impl": "cuda"}, "impl must be one of"),
        *(
            ({"eps": eps}, "eps must be a finite number of at least 0")
            for eps in (-1e-6, float("nan"), float("inf"), "1")
        ),
        *(({name: [1.0]}, f"{name} must be a tensor, got list") for name in ("q", "k", "v", "mixing")),
        ({"blocks": ((4, 4), (2, 2))}, "blocks must be a TokenBlocks"),
    ],
)
@pytest.mark.parametrize("impl", [*IMPLS, "triton", "triton_pairwise", "triton_summary", "auto"])
def test_wrong_arguments_are_refused_by_name(changes, message, impl):
    with pytest.raises(ValueError, match=message):
        mhla(**{"impl": impl, **_case(**changes)})
