"""Effective attention matrices: times the values they are the output, of every core and mix, and their ranks."""

import math
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headmix_vision.analysis.attention_matrices import LayerAttention, record_attention
from headmix_vision.analysis.measures import numerical_rank
from headmix_vision.analysis.profiles import profile_layers
from headmix_vision.console import available_memory
from headmix_vision.errors import InputError
from headmix_vision.layers import CORES, HeadMixAttention
from headmix_vision.models import HeadMixVideoDiT
from headmix_vision.ops import TokenBlocks, TokenScan, TokenWindow

GRID, PREFIX, DIM, HEADS = (5, 6), 2, 24, 3
HEAD_DIM, TOKENS = DIM // HEADS, PREFIX + 30
CORE_OPTIONS = [
    ("softmax", {}),
    ("softmax", {"window": (3, 5)}),
    ("linear", {}),
    ("linear", {"normalizer": "source_block", "feature_map": "elu1"}),
    ("linear", {"normalizer": None, "feature_map": "identity"}),
    ("mhla", {"feature_map": "elu1"}),
    ("mhla", {"normalizer": "source_block"}),
    ("mhla", {"normalizer": None, "mixing_per_head": True}),
    ("hih", {"mask": "token", "scans": "cross"}),
    ("hih", {}),
    ("hih", {"scans": "forward", "conv_size": 0, "num_sub_heads": 1}),
]
MIXES = {
    "none": {},
    "mea": {"head_mix": "mea", "head_mix_args": {"component_heads": 2}},
    "iha": {"head_mix": "iha", "head_mix_args": {"pseudo_heads": 2}},
    "iha_across_heads": {"head_mix": "iha", "head_mix_args": {"pseudo_heads": 2, "collapse": "across_heads"}},
}


def make_layer(core: str, core_args: dict | None = None, **options) -> HeadMixAttention:
    """A layer whose mixing weights are as if they had learned something."""
    torch.manual_seed(0)
    core_args = ({"num_sub_heads": 2} if core == "hih" else {}) | (core_args or {})
    sizes = {"grid": GRID, "block_grid": (2, 3), "num_prefix_tokens": PREFIX, "dtype": torch.float64}
    layer = HeadMixAttention(DIM, HEADS, core=core, core_args=core_args, **{**sizes, **options})
    for name, parameter in layer.named_parameters():
        if "head_mix" in name or "shares" in name or "mixing" in name:
            parameter.data += 0.3 * torch.rand_like(parameter)
    return layer


def tokens(count: int = TOKENS, dim: int = DIM) -> Tensor:
    return torch.randn(2, count, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def attention_of(layer: HeadMixAttention, **options) -> LayerAttention:
    (attention,) = record_attention(layer, tokens(layer.grid.num_tokens, layer.proj.in_features), **options)
    return attention


def assert_computes_the_heads(attention: LayerAttention, outputs: Tensor, image: int = 1) -> Tensor:
    """The product of the matrices [H, N, G * S] with the values is the heads' output [B, N, H, D] before the norm."""
    matrices = attention.matrices(image)
    torch.testing.assert_close(matrices @ attention.values(image), outputs[image].transpose(0, 1), rtol=0, atol=1e-12)
    return matrices


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("core", "core_args"), CORE_OPTIONS)
def test_the_matrix_times_the_values_is_the_output(core, core_args, mix):
    layer = make_layer(core, core_args, **MIXES[mix])
    before, outputs = {name: x.clone() for name, x in layer.state_dict().items()}, []
    with torch.no_grad():
        hook = layer.output_norm.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
        layer(tokens())
        hook.remove()
    attention = attention_of(layer)
    matrices = assert_computes_the_heads(attention, outputs[0])
    places = {"iha": 2, "iha_across_heads": 2 * HEADS}.get(mix, 1)
    assert matrices.shape == (HEADS, TOKENS, places * TOKENS)
    chosen = attention_of(layer, queries=[0, 7, TOKENS - 1])
    torch.testing.assert_close(chosen.matrices(1), matrices[:, [0, 7, TOKENS - 1]])
    weights = attention.token_weights(matrices)
    assert weights.shape == (HEADS, TOKENS, TOKENS)
    torch.testing.assert_close(weights.sum(-1), matrices.sum(-1))
    if core != "hih" and core_args.get("normalizer", "paper") == "paper" and mix in ("none", "mea"):
        torch.testing.assert_close(weights.sum(-1), torch.ones(HEADS, TOKENS).double())
    assert all(torch.equal(x, before[name]) for name, x in layer.state_dict().items())


def projected(layer: HeadMixAttention) -> tuple[Tensor, Tensor]:
    """Queries and keys of the second image, [H, N, D]."""
    q, k, _ = layer.qkv(tokens()[1]).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(1)
    return q.transpose(0, 1), k.transpose(0, 1)


@pytest.mark.parametrize("window", [None, (3, 5)])
def test_softmax_is_the_softmax_of_scaled_scores(window):
    layer = make_layer("softmax", {"window": window})
    q, k = projected(layer)
    scores = q @ k.mT / HEAD_DIM**0.5
    if window:
        scores = scores.masked_fill(~TokenWindow(layer.grid, window).mask(scores), -math.inf)
    torch.testing.assert_close(attention_of(layer).matrices(1), scores.softmax(-1))


def test_mhla_is_equation_5():
    layer = make_layer("mhla")
    q, k = (F.relu(x) + 1e-6 for x in projected(layer))
    block = TokenBlocks(layer.grid, (2, 3)).tables(q).block_of_token
    weights = layer.core.mixing()[block[:, None], block] * (q @ k.mT)
    torch.testing.assert_close(attention_of(layer).matrices(1), weights / weights.sum(-1, keepdim=True))


@pytest.mark.parametrize("scans", ["forward", "bidirectional"])
def test_head_in_head_is_its_recurrence_unrolled(scans):
    """A[t, s] = D^-1/2 q_t^T a_t T_t ... a_s+1 T_s+1 beta_s k_s in the order of the scan, T = I - beta k k^T * E."""
    layer = make_layer("hih", {"scans": scans, "conv_size": 0})
    core, x = layer.core, tokens()[1]
    q, k = (F.normalize(F.silu(y), dim=-1) for y in projected(layer))
    beta = torch.sigmoid(core.beta(x)).T  # [H, N]
    decay = (-core.A_log.exp() * F.softplus(core.decay(x) + core.dt_bias)).exp().T
    erased = core.mask(x[None]).repeat_interleave(HEAD_DIM // 2, -1).repeat_interleave(HEAD_DIM // 2, -2)
    expected = torch.zeros(HEADS, TOKENS, TOKENS, dtype=torch.float64)
    for reverse in (False, True)[: 1 + (scans == "bidirectional")]:
        order = TokenScan(layer.grid, reverse=reverse).tables(x).order.tolist()
        for head in range(HEADS):
            for place, source in enumerate(order):
                written = beta[head, source] * k[head, source]
                for step, reader in enumerate(order[place:]):
                    if step:
                        key = k[head, reader]
                        transition = torch.eye(HEAD_DIM) - beta[head, reader] * torch.outer(key, key) * erased[head]
                        written = decay[head, reader] * transition @ written
                    expected[head, reader, source] += q[head, reader] @ written / HEAD_DIM**0.5
    torch.testing.assert_close(attention_of(layer).matrices(1), expected)


def test_a_clip_with_rotary_positions_and_layers_of_softmax():
    torch.manual_seed(0)
    sizes = {"input_size": (3, 4, 6), "patch_size": 1, "in_channels": 2, "embed_dim": 32, "block_grid": (2, 2, 2)}
    model = HeadMixVideoDiT(**sizes, depth=3, num_heads=2, num_classes=0, positions="rope", softmax_every=2).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)  # the modulation starts at zero
    outputs = []
    inputs = torch.randn(2, 2, 3, 4, 6), torch.tensor([300.0, 600.0])
    recorded = record_attention(model, *inputs)
    assert [attention.layer.core_name for attention in recorded] == ["softmax", "mhla", "softmax"]
    for block in model.blocks:
        block.attn.output_norm.register_forward_pre_hook(lambda _, given: outputs.append(given[0]))
    model.double()(inputs[0].double(), inputs[1].double())
    for attention, output in zip(recorded, outputs, strict=True):
        assert_computes_the_heads(attention, output)
    (middle,) = record_attention(model, *inputs, layers=[1])
    assert middle.layer.number == 1 and torch.equal(middle.matrices(0), recorded[1].matrices(0))


@pytest.mark.parametrize("core", CORES)
def test_it_works_where_lightning_validates(core):
    """In inference mode, under autocast, of a layer that trains."""
    layer = make_layer(core, dtype=torch.float32).train()
    expected = attention_of(layer).matrices(1)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention_of(layer).matrices(1), expected)
    assert layer.training and expected.dtype is torch.float64 and not expected.requires_grad


def ranks(layer: HeadMixAttention) -> list[int]:
    return [round(row["rank"]) for row in profile_layers(layer, [tokens()[:1]], ["rank"])]


def test_mhla_has_the_rank_of_its_blocks_and_linear_attention_that_of_a_head():
    """At most D, and at most the sum of min(n, D) over blocks, here two of 15 tokens and one of 2 prefix tokens."""
    options = {"feature_map": "elu1"}
    assert ranks(make_layer("linear", options)) == [HEAD_DIM] * HEADS
    assert ranks(make_layer("mhla", options, block_grid=(1, 2))) == [2 * HEAD_DIM + PREFIX] * HEADS
    assert ranks(make_layer("mhla", options, block_grid=(2, 3))) == [TOKENS] * HEADS
    assert ranks(make_layer("linear", options, **MIXES["iha"])) == [HEAD_DIM] * HEADS


@pytest.mark.parametrize("core", CORES)
def test_ranks_do_not_depend_on_the_rounding_to_float32(core):
    matrices = attention_of(make_layer(core)).matrices(0)
    exact, rounded = (numerical_rank(torch.linalg.svdvals(x)) for x in (matrices, matrices.float().double()))
    assert torch.equal(exact, rounded)


def test_sampled_query_tokens_lie_on_the_grid():
    layer = make_layer("linear")
    chosen = attention_of(layer, queries=9).queries
    assert chosen == sorted(set(chosen)) and len(chosen) == 9 and min(chosen) >= PREFIX
    assert attention_of(layer, queries=9).queries == chosen
    assert attention_of(layer, queries=99).queries == [*range(PREFIX, TOKENS)]


def test_what_cannot_be_analysed_is_refused():
    layer = make_layer("linear")
    with pytest.raises(InputError, match="a Linear cannot be analysed: it has no attention layers"):
        record_attention(torch.nn.Linear(2, 2), torch.ones(1, 2))
    for layers in ([1], [-1]):
        with pytest.raises(InputError, match=r"cannot be analysed: it has layers 0 to 0"):
            attention_of(layer, layers=layers)
    for queries in ([32], [-1], [0.5]):
        with pytest.raises(InputError, match="does not exist, the tokens are 0 to 31"):
            attention_of(layer, queries=queries)
    with pytest.raises(InputError, match="queries must be a whole number of at least 1, got 0"):
        attention_of(layer, queries=0)


def test_matrices_beyond_the_memory_are_refused_before_they_are_computed(monkeypatch: pytest.MonkeyPatch):
    layer = HeadMixAttention(64, 64, core="softmax", grid=(512, 512))
    message = r"layer 0 need 2.81e\+05 GB \(64 heads, 262144 x 262144 in float64, 8 copies at once\), cpu has "
    with pytest.raises(InputError, match=rf"{message}\S+ GB available: take fewer query tokens, --queries \d+$"):
        record_attention(layer, torch.zeros(1, 512**2, 64))
    assert 0 < available_memory(torch.device("cpu")) < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    small, counted = HeadMixAttention(16, 2, core="linear", grid=(8, 8)), 2 * 64 * 8
    monkeypatch.setattr("headmix_vision.analysis.attention_matrices.available_memory", lambda device: 8 * 20 * counted)
    with pytest.raises(InputError, match=r"need 0.000524 GB .* cpu has 0.000164 GB available: .* --queries 18$"):
        record_attention(small, torch.zeros(1, 64, 16))
    assert len(record_attention(small, torch.zeros(1, 64, 16), queries=18)[0].queries) == 18
    monkeypatch.setattr("headmix_vision.analysis.attention_matrices.available_memory", lambda device: counted)
    with pytest.raises(InputError, match="available: not even one query token fits"):
        record_attention(small, torch.zeros(1, 64, 16), queries=1)


@pytest.mark.parametrize("core", ["linear", "mhla", "hih"])
def test_layers_that_ask_for_kernels_are_analysed_in_float64(core: str) -> None:
    asked = {**MIXES["iha"], "head_mix_args": {"pseudo_heads": 2, "impl": "triton"}}
    layer = make_layer(core, {"impl": "triton"}, **asked)
    assert torch.equal(attention_of(layer).matrices(0), attention_of(make_layer(core, **MIXES["iha"])).matrices(0))
    assert layer.head_mix is not None and layer.head_mix.impl == "triton", "the layer itself is as it was"
