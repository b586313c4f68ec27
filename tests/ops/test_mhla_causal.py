"""Causal MHLA in float64: the definition, what each token sees, and tokens taken one after the other."""

import pytest
import torch

from headmix_vision.errors import InputError
from headmix_vision.ops import TokenBlocks, mhla, mhla_step

from .helpers import make_inputs, relative_error, run

IMPLS = ("reference", "torch")
NORMALIZERS = ("paper", "source_block", None)
PARTITIONS = [
    ((8, 8), (4, 4), 0),
    ((7, 5), (2, 3), 2),
    ((3, 5, 4), (2, 2, 3), 1),
    ((15,), (4,), 0),
    ((9, 16), (1, 1), 1),
]


def members(blocks):
    return [row[row >= 0].tolist() for row in blocks.tables(torch.empty(0)).tokens]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize(("grid", "block_grid", "prefix"), PARTITIONS[:-1])
def test_appendix_c(grid, block_grid, prefix, normalizer, impl):
    """o = q (sum_{b < i} m_ib S_b + m_ii S_i), S_i and z_i of the tokens up to and with the query, written as loops."""
    blocks = TokenBlocks.from_grid(grid, block_grid, prefix)
    q, k, v, mixing = make_inputs(blocks, batch=1, heads=1)
    phi_q, phi_k, values = (x[0, :, 0] for x in (q.relu() + 1e-6, k.relu() + 1e-6, v))
    expected, sets = torch.empty_like(values), members(blocks)
    for i, tokens in enumerate(sets):
        for place, token in enumerate(tokens):
            out, denominator = 0, 0 if normalizer == "paper" else 1e-6
            for b in range(i + 1):
                seen = sets[b] if b < i else tokens[: place + 1]
                out += mixing[i, b] * phi_q[token] @ (phi_k[seen].T @ values[seen])
                z, table = phi_k[seen].sum(0), blocks.tables(q)
                source = token
                if normalizer == "source_block" and b < i:
                    source = table.tokens[b, table.slot_of_token[token] % blocks.max_block_size]
                if source >= 0:
                    denominator += mixing[i, b] * phi_q[source] @ z
            expected[token] = out if normalizer is None else out / denominator
    ours = mhla(q, k, v, mixing, blocks, normalizer=normalizer, causal=True, impl=impl)[0, :, 0]
    assert relative_error(ours, expected) < 1e-12


@pytest.mark.parametrize("feature_map", ["relu", "elu1", "identity"])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("grid", "block_grid", "prefix"), PARTITIONS)
def test_torch_agrees_with_the_reference(grid, block_grid, prefix, per_head, normalizer, feature_map):
    blocks = TokenBlocks.from_grid(grid, block_grid, prefix)
    inputs = make_inputs(blocks, per_head=per_head)
    d_out = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options = {"normalizer": normalizer, "feature_map": feature_map, "causal": True}
    results = [run(lambda *x, impl=impl: mhla(*x, blocks, impl=impl, **options), inputs, d_out) for impl in IMPLS]
    for ours, reference in zip(*results, strict=True):
        assert relative_error(ours, reference) < 1e-9
    later = torch.ones(blocks.num_blocks, blocks.num_blocks).triu(1).bool()
    assert not any(result[-1][..., later].any() for result in results)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize(("grid", "block_grid", "prefix"), PARTITIONS)
def test_what_comes_first_in_the_order_sees_only_itself(grid, block_grid, prefix, normalizer, impl):
    """Later tokens, and weights of later blocks, may be anything."""
    blocks = TokenBlocks.from_grid(grid, block_grid, prefix)
    inputs = make_inputs(blocks)
    order = blocks.order(inputs[0])
    whole = mhla(*inputs, blocks, normalizer=normalizer, causal=True, impl=impl)
    for count in {1, 2, len(order) // 2, len(order) - 1}:
        *changed, mixing = (x.clone() for x in inputs)
        for x in changed:
            x[:, order[count:]] *= -3
        last = blocks.tables(mixing).block_of_token[order[count - 1]]
        mixing[last + 1 :], mixing[:, last + 1 :] = torch.nan, torch.nan
        out = mhla(*changed, mixing, blocks, normalizer=normalizer, causal=True, impl=impl)
        assert relative_error(out[:, order[:count]], whole[:, order[:count]]) < 1e-14


def take(inputs, blocks, lengths, **options):
    """Outputs in raster order, and the last state, of tokens taken in the order in pieces of some lengths."""
    *tokens, mixing = inputs
    order = blocks.order(mixing)
    outs, state = [], None
    for part in order.split(lengths):
        out, state = mhla_step(*(x[:, part] for x in tokens), mixing, blocks, state, **options)
        outs.append(out)
    return torch.cat(outs, 1)[:, order.argsort()], state


@pytest.mark.parametrize("options", [{}, {"normalizer": None, "feature_map": "identity"}], ids=str)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("grid", "block_grid", "prefix"), PARTITIONS)
def test_tokens_in_pieces_give_what_all_at_once_give(grid, block_grid, prefix, per_head, options):
    blocks = TokenBlocks.from_grid(grid, block_grid, prefix)
    inputs = make_inputs(blocks, per_head=per_head)
    expected = mhla(*inputs, blocks, causal=True, **options)
    N = blocks.num_tokens
    for lengths in ([1] * N, [N], [N // 3, 1, 1, N - N // 3 - 2]):
        out, state = take(inputs, blocks, lengths, **options)
        assert relative_error(out, expected) < 1e-12
        assert state.num_tokens == N


def test_the_state_is_the_block_summaries_and_does_not_grow():
    blocks = TokenBlocks.from_grid((4, 6), (2, 3), 1)
    q, k, v, mixing = make_inputs(blocks)
    order, state, sizes = blocks.order(q), None, set()
    for token in order[:, None]:
        before = state
        kept = None if state is None else state.summaries.clone()
        state = mhla_step(q[:, token], k[:, token], v[:, token], mixing, blocks, state).state
        assert kept is None or torch.equal(before.summaries, kept)
        sizes.add(state.summaries.shape)
    assert sizes == {(2, 3, blocks.num_blocks, 8, 5 + 1)}
    for block, tokens in enumerate(members(blocks)):
        ours = torch.einsum("bnhd,bnhe->bhde", k[:, tokens].relu() + 1e-6, v[:, tokens])
        torch.testing.assert_close(state.summaries[:, :, block, :, :-1], ours)


def test_gradients_reach_through_the_state():
    blocks = TokenBlocks.from_grid((3, 4), (2, 2), 1)
    inputs = make_inputs(blocks)
    d_out = torch.randn(inputs[2].shape, dtype=torch.float64)
    by_piece = run(lambda *x: take(x, blocks, [5, 1, 7])[0], inputs, d_out)
    for ours, expected in zip(by_piece, run(lambda *x: mhla(*x, blocks, causal=True), inputs, d_out), strict=True):
        assert relative_error(ours, expected) < 1e-12


def test_gradcheck():
    blocks = TokenBlocks.from_grid((2, 3), (2, 2), 1)
    inputs = [x.requires_grad_() for x in make_inputs(blocks, batch=1, heads=2, dim=3, value_dim=2)]
    for normalizer in NORMALIZERS:

        def op(*args, normalizer=normalizer):
            return mhla(*args, blocks, normalizer=normalizer, feature_map="elu1", causal=True)

        assert torch.autograd.gradcheck(op, inputs)
        assert torch.autograd.gradgradcheck(op, inputs)


def test_wrong_steps_are_refused():
    blocks = TokenBlocks.from_grid((4, 4), (2, 2))
    q, k, v, mixing = make_inputs(blocks)
    one = [x[:, :1] for x in (q, k, v)]
    _, state = mhla_step(q[:, :15], k[:, :15], v[:, :15], mixing, blocks)
    for arguments, options, message in (
        ((q[:, :2], k[:, :2], v[:, :2], mixing, blocks, state), {}, "q has 2 tokens, but of a 4x4 grid 1 are left"),
        ((*one, mixing, blocks, state), {"normalizer": None}, r"the state must hold torch.float64 \(2, 3, 4, 8, 5\)"),
        ((*one, mixing, blocks), {"normalizer": "source_block"}, "of which none are kept"),
        ((*one, mixing[:3], blocks), {}, "mixing must be"),
    ):
        with pytest.raises(InputError, match=message) as error:
            mhla_step(*arguments, **options)
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="causal must be true or false, got 1"):
        mhla(q, k, v, mixing, blocks, causal=1)


def test_compiles_as_one_graph():
    blocks = TokenBlocks.from_grid((5, 4), (2, 2), 1)
    compiled = torch.compile(lambda *x: mhla(*x, blocks, causal=True), fullgraph=True, backend="aot_eager")
    inputs = make_inputs(blocks)
    torch.testing.assert_close(compiled(*inputs), mhla(*inputs, blocks, causal=True))
