"""Key masks of padded batches, and grids that differ between samples: each picture has what it has alone."""

import math

import pytest
import torch
import torch.fx

from headmix_vision.layers import AttentionCore, HeadMixAttention
from headmix_vision.layers.positions import rotary_tables
from headmix_vision.ops import SampleGrids, TokenBlocks, TokenGrid, TokenRanks

from .helpers import DIM, GRID, HEADS, PREFIX, TOKENS, make_layer, projected, tokens

SHAPES = [(5, 6), (3, 7), (6, 3), (2, 4), (5, 6)]
LENGTH = 33  # no sample fills it
EVERY = [
    ("softmax", None, {}),
    ("linear", None, {}),
    ("linear", None, {"core_args": {"normalizer": None}, "cpe": True}),
    ("mhla", None, {}),
    ("mhla", None, {"cpe": True, "lepe": 3, "output_gate": True, "input_norm": True}),
    ("mhla", None, {"core_args": {"feature_map": "elu1", "mixing_per_head": True, "causal": True}}),
    ("mhla", "iha", {}),
    ("softmax", "iha", {"cpe": True}),
    ("softmax", "mea", {"cpe": True}),
    ("hih", None, {}),
    ("hih", None, {"core_args": {"scans": "cross", "mask": "token"}}),
    ("hih", "iha", {"core_args": {"scans": "cross", "mask": "token"}}),
    ("hih", None, {"core_args": {"scans": "forward", "conv_size": 0}}),
]
CORES = ("softmax", "linear", "mhla", "hih")


def names(case):
    core, mix, options = case
    return " ".join([core, mix or "", *options, *(f"{k}={v}" for k, v in options.get("core_args", {}).items())])


def pictures(shapes=SHAPES, prefix=PREFIX):
    generator = torch.Generator().manual_seed(1)
    counts = [prefix + math.prod(shape) for shape in shapes]
    return [torch.randn(1, count, DIM, dtype=torch.float64, generator=generator) for count in counts]


def padded(alone, length):
    """Put pictures into one batch whose padding holds large numbers."""
    batch = torch.full((len(alone), length, DIM), 1e3, dtype=alone[0].dtype)
    for sample, x in zip(batch, alone, strict=True):
        sample[: x.shape[1]] = x[0]
    return batch


def perturbed(layer):
    """Move weights away from those of the start, at which mixes compute their core.

    Clipped ones stay inside their bounds, where the gradient of a sum is the sum of gradients.
    """
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("core.mixing") or name == "core.shares":
                parameter.uniform_(0.1, 0.9)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def check_alike(layer, alone, arguments_alone, batch, arguments, real):
    """Compare outputs, and gradients of inputs and weights, of pictures alone and of a batch; return its outputs.

    ``real(y, sample)`` picks the tokens of a sample from the batch.
    """
    alone, batch = [x.requires_grad_() for x in alone], batch.requires_grad_()
    outs = [layer(x, **given) for x, given in zip(alone, arguments_alone, strict=True)]
    out = layer(batch, **arguments)
    weights = [torch.randn_like(y) for y in outs]
    parameters = list(layer.parameters())
    loss = sum((w * y).sum() for w, y in zip(weights, outs, strict=True))
    expected = torch.autograd.grad(loss, [*alone, *parameters])
    loss = sum((w[0] * real(out, sample)).sum() for sample, w in enumerate(weights))
    of_batch, *of_weights = torch.autograd.grad(loss, [batch, *parameters])
    for sample, y in enumerate(outs):
        torch.testing.assert_close(real(out, sample), y[0])
        torch.testing.assert_close(real(of_batch, sample), expected[sample][0])
        unread = of_batch[sample].abs().sum() - real(of_batch, sample).abs().sum()
        assert unread.abs() < 1e-9 * of_batch[sample].abs().sum()
    torch.testing.assert_close(of_weights, list(expected[len(alone) :]))
    return out


def check_samples(layer, shapes=SHAPES, length=LENGTH, rotations=None, grids=None):
    """Compare a padded batch of grids of their own with each picture alone."""
    prefix = layer.grid.num_prefix_tokens
    alone = pictures(shapes, prefix)
    given, of_batch = [{"grid": shape} for shape in shapes], {"grid": grids or SampleGrids.of(shapes, length)}
    if rotations is not None:
        given = [one | {"rotation": rotation} for one, rotation in zip(given, rotations, strict=True)]
        tables = zip(*rotations, strict=True)
        of_batch["rotation"] = tuple(
            torch.stack([torch.nn.functional.pad(y, (0, 0, 0, length - len(y)))[:, None] for y in table])
            for table in tables
        )
    batch = padded(alone, prefix + length)
    return check_alike(layer, alone, given, batch, of_batch, lambda y, sample: y[sample, : alone[sample].shape[1]])


@pytest.mark.parametrize("case", [EVERY[2], EVERY[6], EVERY[11]], ids=names)
def test_tables_of_a_padded_batch_are_made_where_its_tokens_are(case):
    core, mix, options = case
    layer = make_layer(core, mix, **options)
    x, grids = torch.randn(2, PREFIX + 12, DIM, dtype=torch.float64), SampleGrids.of([(3, 4), (2, 5)], 12)
    expected = layer(x, grid=grids)
    mask, whole = torch.arange(TOKENS) < 9, torch.randn(1, TOKENS, DIM, dtype=torch.float64)
    masked = layer(whole, key_mask=mask[None])
    again = SampleGrids.of([(3, 4), (2, 5)], 12)  # without the tables that the layer has made
    with torch.device("meta"):  # where tensors are made for which no device is said
        torch.testing.assert_close(layer(x, grid=again), expected, check_device=True)
        torch.testing.assert_close(layer(whole, key_mask=mask[None]), masked, check_device=True)


@pytest.mark.parametrize("case", EVERY, ids=names)
def test_a_padded_batch_gives_each_picture_what_it_has_alone(case):
    core, mix, options = case
    layer = perturbed(make_layer(core, mix, **options))
    out = check_samples(layer)
    torch.testing.assert_close(out[3, PREFIX + 8 :], layer.proj.bias.expand(LENGTH - 8, -1))


@pytest.mark.parametrize("core", ["softmax", "linear", "mhla", "hih"])
def test_each_sample_has_its_own_rotary_positions(core):
    layer = perturbed(make_layer(core, core_args={"scans": "cross"} if core == "hih" else {}))
    rotations = [rotary_tables(DIM // HEADS, shape, (4, 4), 1.0, torch.zeros(1)) for shape in SHAPES]
    check_samples(layer, rotations=rotations)


@pytest.mark.parametrize("core", ["mhla", "hih"])
def test_other_numbers_of_axes_and_no_prefix_tokens(core):
    clip = {"grid": (3, 4, 4), "block_grid": (3, 2, 2), "num_prefix_tokens": 0, "cpe": "factorised"}
    check_samples(perturbed(make_layer(core, **clip)), [(3, 4, 4), (2, 2, 3), (1, 5, 2)], 50)
    check_samples(perturbed(make_layer(core, grid=(9,), block_grid=(3,), cpe=True)), [(5,), (11,)], 12)


def test_an_axis_of_fewer_tokens_than_blocks_has_a_block_for_each():
    layer, shapes = perturbed(make_layer("mhla", block_grid=(3, 3))), [(2, 7), (9, 9)]
    with pytest.raises(ValueError, match="larger than the token grid"):
        layer(pictures(shapes)[0], grid=(2, 7))
    blocks, layout = SampleGrids.of(shapes).blocks((3, 3))
    (numbers,) = layout.collect((torch.arange(blocks.num_tokens) // blocks.max_block_size).expand(2, -1))
    assert numbers[0, :14].view(2, 7).tolist() == [[0, 0, 0, 1, 1, 2, 2], [3, 3, 3, 4, 4, 5, 5]]
    assert layer(padded(pictures(shapes), PREFIX + 81), grid=SampleGrids.of(shapes)).isfinite().all()


def test_blocks_of_samples_are_those_of_each_grid():
    blocks, layout = SampleGrids.of(SHAPES, LENGTH).blocks((2, 3))
    assert blocks.max_block_size == 6  # the largest block of any sample, not the product of the longest axes
    (numbers,) = layout.collect((torch.arange(blocks.num_tokens) // blocks.max_block_size).expand(len(SHAPES), -1))
    for shape, found in zip(SHAPES, numbers, strict=True):
        expected = TokenBlocks.from_grid(shape, (2, 3)).tables(torch.zeros(1)).block_of_token
        assert torch.equal(found[: math.prod(shape)], expected)


@pytest.mark.parametrize("gaps", [(0,), (2,), (0, 0), (1, 2), (1, 2, 1)])
def test_a_sheet_keeps_samples_apart_in_little_more_than_their_area(gaps):
    generator = torch.Generator().manual_seed(0)
    shapes = [tuple(torch.randint(1, 20, (len(gaps),), generator=generator).tolist()) for _ in range(30)]
    shapes += [shape[::-1] for shape in shapes] + [(2,) * (len(gaps) - 1) + (40,), (40, *(2,) * (len(gaps) - 1))]
    grids = SampleGrids.of(shapes)
    sheet, layout = grids.sheet(gaps)
    numbers = (torch.arange(len(shapes)) + 1)[:, None].expand_as(grids.valid).masked_fill(~grids.valid, 0)
    (placed,) = layout.spread(numbers)
    assert torch.equal(layout.collect(placed)[0], numbers)
    placed = placed[0].view(sheet.shape)
    for number, shape in enumerate(shapes):
        places = (placed == number + 1).nonzero()
        low, high = places.amin(0), places.amax(0)
        assert len(places) == math.prod(shape) and tuple((high - low + 1).tolist()) == shape
        around = placed[tuple(slice(max(a - g, 0), b + g + 1) for a, b, g in zip(low, high, gaps, strict=True))]
        assert set(around.unique().tolist()) <= {0, number + 1}
    flat = sum(math.prod(side + gap for side, gap in zip(shape[-2:], gaps[-2:], strict=True)) for shape in shapes)
    assert math.prod(sheet.shape[-2:]) < 1.5 * flat


@pytest.mark.parametrize("core", CORES)
def test_tokens_in_any_order_are_found_by_their_coordinates(core):
    """The loaders of NaFlex give coordinates; patch dropout takes tokens in a random order."""
    layer = perturbed(make_layer(core, cpe=True, core_args={"scans": "cross"} if core == "hih" else {}))
    grids, batch = SampleGrids.of(SHAPES, LENGTH), padded(pictures(), PREFIX + LENGTH)
    found = SampleGrids.of_coordinates(grids.coordinates, grids.valid)
    assert found.shapes == grids.shapes and found.is_raster
    out = layer(batch, grid=grids)
    torch.testing.assert_close(layer(batch, grid=found), out)
    order = torch.stack([torch.randperm(LENGTH) for _ in SHAPES])
    shuffled = grids.take(order)
    again = SampleGrids.of_coordinates(shuffled.coordinates, shuffled.valid)
    assert not again.is_raster
    index = torch.nn.functional.pad(order + PREFIX, (PREFIX, 0))
    index[:, :PREFIX] = torch.arange(PREFIX)
    index = index[..., None].expand(-1, -1, DIM)
    for grid in (shuffled, again):
        torch.testing.assert_close(layer(batch.gather(1, index), grid=grid), out.gather(1, index))


def test_patch_dropout_leaves_tokens_out_as_a_mask_does():
    layer, grids = perturbed(make_layer("mhla", cpe=True)), SampleGrids.of([GRID] * 2)
    kept = torch.stack([torch.randperm(30)[:20] for _ in range(2)])
    mask = torch.zeros(2, TOKENS, dtype=torch.bool).scatter(1, kept + PREFIX, True)
    mask[:, :PREFIX] = True
    x = tokens()
    some = torch.cat([x[:, :PREFIX], x[:, PREFIX:].gather(1, kept[..., None].expand(-1, -1, DIM))], 1)
    out = layer(x, key_mask=mask)[:, PREFIX:].gather(1, kept[..., None].expand(-1, -1, DIM))
    torch.testing.assert_close(layer(some, grid=grids.take(kept))[:, PREFIX:], out)


@pytest.mark.parametrize("core", CORES)
def test_a_picture_in_the_corner_of_a_canvas_is_as_alone(core):
    """All cores but MHLA, whose blocks follow the canvas there."""
    small = (3, 4)
    alone = pictures([small, small])
    inside = torch.zeros(GRID, dtype=torch.bool)
    inside[:3, :4] = True
    mask = torch.cat([torch.ones(PREFIX, dtype=torch.bool), inside.flatten()])
    canvas = torch.full((2, TOKENS, DIM), 1e3, dtype=torch.float64)
    canvas[:, mask] = torch.cat(alone)
    layer = perturbed(make_layer(core, cpe=True, block_grid=(1, 1)))
    given = {"key_mask": mask.expand(2, -1)}
    check_alike(layer, alone, [{"grid": small}] * 2, canvas, given, lambda y, sample: y[sample, mask])


def holes():
    mask = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(2)) < 0.6
    mask[:, 0] = True
    return mask


def test_masked_mhla_is_the_weighted_form_of_its_definition():
    layer, mask, x = perturbed(make_layer("mhla")), holes(), tokens()
    q, k, v = projected(layer, x)
    q, k = q.relu() + 1e-6, k.relu() + 1e-6
    blocks = layer.core.mixing.blocks.tables(x).block_of_token
    weights = torch.einsum("bnhd,bmhd->bhnm", q, k) * layer.core.mixing()[blocks][:, blocks] * mask[:, None, None]
    out = (weights / weights.sum(-1, keepdim=True)) @ v.transpose(1, 2)
    out = out.transpose(1, 2).masked_fill(~mask[..., None, None], 0).flatten(2)
    torch.testing.assert_close(layer(x, key_mask=mask), layer.proj(out))


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("mix", [None, "iha"])
def test_all_forms_of_a_key_mask_are_one(core, mix):
    layer, mask, x = perturbed(make_layer(core, mix, cpe=True)), holes(), tokens()
    out = layer(x, key_mask=mask)
    lowest = torch.zeros(2, 1, 1, TOKENS).masked_fill(~mask[:, None, None], torch.finfo(torch.float32).min)
    for attn_mask in (mask[:, None, None], lowest, lowest.clamp(max=0) * 2):
        torch.testing.assert_close(layer(x, attn_mask=attn_mask), out)
    ones = torch.ones_like(mask)
    torch.testing.assert_close(layer(x, key_mask=ones), layer(x))
    assert (layer(x, key_mask=ones) - out).abs().max() > 1e-3
    torch.testing.assert_close(layer(x, key_mask=mask, attn_mask=ones[:, None, None]), out)


def test_softmax_alone_keeps_masks_that_are_added_to_scores():
    layer, bias, x = make_layer("softmax"), torch.randn(2, 1, 1, TOKENS, dtype=torch.float64), tokens()
    q, k, v = (y.transpose(1, 2) for y in projected(layer, x))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(layer(x, attn_mask=bias), layer.proj(expected.transpose(1, 2).flatten(2)))
    mask = holes()
    expected = layer(x, attn_mask=bias.masked_fill(~mask[:, None, None], -torch.inf))
    torch.testing.assert_close(layer(x, attn_mask=bias, key_mask=mask)[mask], expected[mask])
    windowed = make_layer("softmax", core_args={"window": (3, 5)})
    seen = windowed(x, key_mask=mask)
    x[~mask] = 7
    torch.testing.assert_close(windowed(x, key_mask=mask), seen)


@pytest.mark.parametrize("core", CORES)
def test_a_sample_without_tokens_has_zeros_where_reading_the_mask_would_wait(core):
    """As on an accelerator: the core itself does not look at the values."""
    layer, x, mask = make_layer(core), tokens().requires_grad_(), holes()
    mask[1] = False
    q, k, v = projected(layer, x)
    further = {"softmax": {"attn_mask": None, "is_causal": False}, "hih": {"x": x}}.get(core, {})
    out = layer.core(q, k, v, TokenGrid(GRID, PREFIX), key_mask=mask, **further)
    assert (out[1] == 0).all() and (out[0, mask[0]] != 0).any()
    out.square().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("core", ["mhla", "hih"])
def test_kernels_take_the_padding_of_a_batch(core):
    """In float32, on kernels as on PyTorch."""
    torch.manual_seed(0)
    shapes, length = [(3, 3), (2, 4)], 10
    args = {"num_sub_heads": 2} if core == "hih" else {}
    layer = HeadMixAttention(32, 2, core=core, block_grid=(2, 2), num_prefix_tokens=1, core_args=args)
    x, grids = torch.randn(2, 1 + length, 32), SampleGrids.of(shapes, length)
    expected = layer(x, grid=grids)
    if core == "hih":
        layer.core.impl = "triton"
    else:
        layer.core.options["impl"] = "triton"
    torch.testing.assert_close(layer(x, grid=grids), expected)
    for sample, (shape, one) in enumerate(zip(shapes, x, strict=True)):
        count = 1 + math.prod(shape)
        torch.testing.assert_close(expected[sample, :count], layer(one[None, :count], grid=shape)[0])


class Unaware(AttentionCore):
    """A core that does not know of padding."""

    def forward(self, q, k, v, grid):
        return v


REFUSED = [
    ("mhla", {}, lambda x: {"key_mask": torch.zeros(2, TOKENS, dtype=torch.bool)}, "sample 0 of the batch has no"),
    ("softmax", {}, lambda x: {"key_mask": torch.ones(2, 5, dtype=torch.bool)}, r"key_mask must be bool \[B, N\]"),
    ("linear", {}, lambda x: {"key_mask": torch.ones(2, TOKENS)}, "key_mask must be bool"),
    ("mhla", {}, lambda x: {"attn_mask": torch.ones(2, 1, TOKENS, TOKENS)}, "Give padding as a key_mask"),
    ("linear", {}, lambda x: {"attn_mask": torch.zeros(3, 1, 1, TOKENS)}, "Give padding as a key_mask"),
    ("hih", {}, lambda x: {"attn_mask": torch.full((2, 1, 1, TOKENS), -1.5)}, "must hold 0 for real tokens"),
    ("mhla", {}, lambda x: {"grid": SampleGrids.of(SHAPES)}, r"must be bool \[B, N\] = \[2, 32\]"),
    ("mhla", {}, lambda x: {"grid": SampleGrids.of([(5,), (30,)])}, "same number of axes"),
    (
        "linear",
        {"normalizer": "source_block"},
        lambda x: {"grid": SampleGrids.of([(3, 4), GRID])},
        "needs the normalizer 'paper' or None",
    ),
    (
        "softmax",
        {"window": (3, 3)},
        lambda x: {"grid": SampleGrids.of([(3, 4), GRID])},
        r"window=\(3, 3\) needs one grid for all samples",
    ),
    ("softmax", {}, lambda x: {"key_mask": holes(), "is_causal": True}, "is_causal cannot be joined with a key mask"),
    (
        "mhla",
        {},
        lambda x: {"grid": SampleGrids.of([(3, 4), GRID]), "rotation": (torch.ones(30, 4), torch.ones(30, 4))},
        r"rotary positions of samples .* must be \[B, N, H or 1, D / 2\] with B, N = \(2, 30\)",
    ),
]


@pytest.mark.parametrize(("core", "args", "wrong", "message"), REFUSED)
def test_what_cannot_be_right_is_refused(core, args, wrong, message):
    layer = make_layer(core, core_args=args)
    with pytest.raises(ValueError, match=message) as refused:
        layer(tokens(), **wrong(tokens()))
    assert "\n" not in str(refused.value)


def test_a_traced_graph_refuses_a_key_mask():
    layer = make_layer("mhla")
    graph = torch.fx.symbolic_trace(layer, concrete_args={"grid": None, "rotation": None})
    torch.testing.assert_close(graph(tokens()), layer(tokens()))
    with pytest.raises(ValueError, match=r"a graph of torch.fx takes no key_mask"):
        graph(tokens(), key_mask=holes())


def test_layers_that_cannot_leave_padding_out_refuse_it():
    layer = make_layer("mhla")
    layer.ranks = TokenRanks("group", 0, 2)
    with pytest.raises(ValueError, match="on several ranks take no key mask"):
        layer(tokens(), key_mask=holes())
    layer = make_layer("softmax")
    layer.core = Unaware(type("Spec", (), {"attn_drop": 0, "dim": DIM, "num_heads": HEADS, "head_dim": DIM // HEADS}))
    with pytest.raises(ValueError, match="Unaware takes no key mask"):
        layer(tokens(), key_mask=holes())
    rows = make_layer("mhla", num_prefix_tokens=0, grid=(4, 6), core_args={"causal": "rows"})
    with pytest.raises(ValueError, match="needs one grid for all samples"):
        rows(tokens(24), grid=SampleGrids.of([(4, 6), (2, 6)]))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda c, v: SampleGrids.of([]), "at least one sample"),
        (lambda c, v: SampleGrids.of([(2, 3), (4,)]), "same number of axes"),
        (lambda c, v: SampleGrids.of([(2, 0)]), "all positive"),
        (lambda c, v: SampleGrids.of([(2, 3)], 5), "num_tokens must be a whole number of at least 6, got 5"),
        (lambda c, v: SampleGrids.of_coordinates(c.float(), v), r"coordinates must be integers \[B, N, A\]"),
        (lambda c, v: SampleGrids.of_coordinates(c[0], v), r"coordinates must be integers \[B, N, A\]"),
        (lambda c, v: SampleGrids.of_coordinates(c, v[:, 1:]), r"valid must be \[B, N\] = \(5, 33\)"),
        (lambda c, v: SampleGrids.of_coordinates(c, v & (torch.arange(5) != 2)[:, None]), "sample 2 of the batch has"),
        (lambda c, v: SampleGrids.of_coordinates(c - 1, v), "coordinates must be at least 0"),
        (lambda c, v: SampleGrids.of_coordinates(c), "two tokens of a sample have the same coordinates"),
    ],
)
def test_grids_of_samples_that_cannot_be_are_refused(build, message):
    grids = SampleGrids.of(SHAPES, LENGTH)
    with pytest.raises(ValueError, match=message):
        build(grids.coordinates, grids.valid)
