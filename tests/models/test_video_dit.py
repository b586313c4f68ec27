"""The diffusion transformers on clips: shapes and times that change, positions in seconds, weights of image models."""

import pytest
import timm
import torch
import torch.nn.functional as F

from headmix_vision.layers import HeadMixAttention
from headmix_vision.layers.convolutions import FactorisedPositionEncoding
from headmix_vision.layers.positions import rotary_tables, rotate
from headmix_vision.models import HeadMixVideoDiT
from headmix_vision.models.convert_dit import convert_dit_state_dict
from headmix_vision.models.dit_blocks import sincos_positions
from headmix_vision.models.model_list import count_flops
from headmix_vision.models.names import FAMILIES, attentions
from headmix_vision.ops import TokenGrid
from headmix_vision.runs.networks import create_generator

CORES = ("softmax", "linear", "mhla", "hih")
SMALL = {"input_size": (6, 8, 8), "depth": 2, "embed_dim": 48, "num_heads": 2, "num_classes": 5, "in_channels": 2}
CLIP = {**SMALL, "patch_size": (1, 2, 2), "block_grid": (4, 2, 2)}


def create(core="mhla", filled=True, **options):
    """A small model in float64; `filled` replaces the zeros of adaLN-Zero, with which the output would be zero."""
    torch.manual_seed(0)
    model = timm.create_model(f"dit_video_{core}_s_2", **{**CLIP, **options}).double().eval()
    return fill(model) if filled else model


def fill(model):
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def clip(frames=6, size=(8, 8)):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 2, frames, *size, generator=generator, dtype=torch.float64)
    return x, torch.tensor([30.0, 800.0]), torch.tensor([0, 5])


@pytest.mark.parametrize("attention", attentions())
def test_every_registered_name(attention):
    """One block at its true width and size, on the meta device; of each patch size one runs."""
    for member in [*(f"{size}_{p}" for size in ("s", "b", "l", "xl") for p in (2, 4)), "digits"]:
        name = f"dit_video_{attention}_{member}"
        assert name in FAMILIES["dit_video"] and timm.is_model(name)
        with torch.device("meta"):
            model = timm.create_model(name, depth=1)
        assert model.config.core == attentions()[attention]["core"]
        assert model.input_size == (16, 32, 32) and model.frame_rate == 8
        if member in ("s_4", "digits"):
            x = torch.empty(2, model.in_channels, *model.input_size, device="meta")
            assert model(x, torch.zeros(2), torch.zeros(2, dtype=torch.long, device="meta")).shape == x.shape


@pytest.mark.parametrize("core", [*CORES, "mhla_iha"])
@pytest.mark.parametrize("positions", ["sincos", "rope"])
def test_one_time_is_that_time_for_every_frame(core, positions):
    model = create(core, cpe=True, positions=positions)
    for frames in (6, 1):
        x, t, y = clip(frames)
        expected = model(x, t, y)
        assert expected.shape == x.shape and expected.any()
        torch.testing.assert_close(model(x, t[:, None].expand(-1, frames), y), expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(model(x, 30.0, y), model(x, torch.full((1, 1), 30), y))


def test_a_frame_is_modulated_by_its_own_time():
    """Without attention tokens are apart, and so are frames."""
    model = create()
    for block in model.blocks:
        for parameter in block.attn.proj.parameters():
            torch.nn.init.zeros_(parameter)
    x, _, y = clip(3)
    times = torch.tensor([[0.0, 0.0, 500.0], [10.0, 300.0, 900.0]])
    out = model(x, times, y)
    for frame in range(3):
        torch.testing.assert_close(out[:, :, frame], model(x, times[:, frame], y)[:, :, frame])


def test_a_patch_of_frames_has_the_mean_of_their_times():
    model = create(patch_size=(2, 2, 2), block_grid=(3, 2, 2))
    x, _, y = clip()
    times = torch.tensor([[0.0, 600.0, 20.0, 40.0, 5.0, 5.0]]).expand(2, -1)
    mean = torch.tensor([[300.0, 300.0, 30.0, 30.0, 5.0, 5.0]])
    torch.testing.assert_close(model(x, times, y), model(x, mean, y))
    assert not torch.allclose(model(x, times, y), model(x, times.flip(1), y))


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_a_short_clip_has_a_block_for_each_frame_mixed_as_the_first(frames):
    model, short = create(cpe=True), create(cpe=True, block_grid=(frames, 2, 2))
    state = model.state_dict()
    for name in [name for name in state if ".mixing." in name]:
        whole = state[name]
        state[name] = torch.tensor((frames, 2, 2)) if whole.ndim == 1 else whole[: 4 * frames, : 4 * frames]
    short.load_state_dict(state)
    x, t, y = clip(frames)
    torch.testing.assert_close(model(x, t, y), short(x, t, y))


@pytest.mark.parametrize("core", [*CORES, "linear_iha"])
@pytest.mark.parametrize("options", [{"cpe": True, "output_gate": True}, {"cpe": "factorised", "positions": "rope"}])
def test_every_parameter_receives_a_gradient(core, options):
    model = create(core, **options).train()
    x, t, y = clip()
    model(x, t, y).square().sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]


def test_starts_as_zero_at_the_published_scale():
    model = create(filled=False, embed_dim=96)
    x, t, y = clip()
    assert not model(x, t, y).any()
    weight = model.x_embedder.proj.weight.flatten(1)
    assert weight.abs().max() <= (6 / sum(weight.shape)) ** 0.5 and not model.x_embedder.proj.bias.any()


# positions


@pytest.mark.parametrize("tables", [sincos_positions, lambda dim, *grid, like, time_step: torch.stack(
    rotary_tables(dim, *grid, time_step, like), 2)])  # fmt: skip
def test_time_is_in_seconds(tables):
    """Half the frames a second are every other place; another length has the same places; space covers its extent."""
    like = torch.empty(0)
    whole = tables(24, (8, 2, 3), (8, 2, 3), like=like, time_step=1.0).unflatten(0, (8, 6))
    half = tables(24, (4, 2, 3), (8, 2, 3), like=like, time_step=2.0).unflatten(0, (4, 6))
    torch.testing.assert_close(half, whole[::2])
    longer = tables(24, (11, 2, 3), (8, 2, 3), like=like, time_step=1.0).unflatten(0, (11, 6))
    torch.testing.assert_close(longer[:8], whole)
    assert not torch.allclose(whole[1], whole[0])


@pytest.mark.parametrize("positions", ["sincos", "rope"])
def test_the_frame_rate_is_relative_to_that_of_training(positions):
    model = create(positions=positions, frame_rate=8.0)
    twice = create(positions=positions, frame_rate=12.0)
    x, t, y = clip(4)
    torch.testing.assert_close(model(x, t, y, frame_rate=4), twice(x, t, y, frame_rate=6.0))
    torch.testing.assert_close(model(x, t, y, frame_rate=8.0), model(x, t, y))
    assert not torch.allclose(model(x, t, y, frame_rate=4.0), model(x, t, y))
    tubes = create(positions=positions, patch_size=(2, 2, 2), block_grid=(2, 2, 2), frame_rate=8.0)
    assert not torch.allclose(tubes(x, t, y, frame_rate=4.0), tubes(x, t, y))


def rotated(x, cos, sin):
    """The definition with complex numbers: [B, N, H, D]."""
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)[:, None]
    return torch.view_as_real(turned).flatten(-2)


@pytest.mark.parametrize("core", ["softmax", "linear", "mhla"])
@pytest.mark.parametrize("normalizer", ["paper", None])
def test_rotary_positions_against_the_dense_form(core, normalizer):
    grid, args = TokenGrid.of((3, 4, 5)), {} if core == "softmax" else {"normalizer": normalizer}
    layer = HeadMixAttention(48, 2, core, grid=grid.shape, block_grid=(2, 2, 2), core_args=args).double()
    q, k, v = torch.randn(3, 2, 60, 2, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cos, sin = (table.double() for table in rotary_tables(24, grid.shape, grid.shape, 1.0, like=q))
    if core == "softmax":
        scores = torch.einsum("bihd,bjhd->bhij", rotated(q, cos, sin), rotated(k, cos, sin)) / 24**0.5
        weights = scores.softmax(-1)
        out = layer.core(q, k, v, grid, attn_mask=None, is_causal=False, rotation=(cos.float(), sin.float()))
    else:
        q_, k_ = q.relu() + 1e-6, k.relu() + 1e-6
        mixing = torch.ones(60, 60, dtype=torch.float64)
        if core == "mhla":
            block = layer.core.mixing.blocks.tables(q).block_of_token
            mixing = layer.core.mixing()[block[:, None], block]
        weights = mixing * torch.einsum("bihd,bjhd->bhij", rotated(q_, cos, sin), rotated(k_, cos, sin))
        if normalizer:
            weights = weights / (mixing * torch.einsum("bihd,bjhd->bhij", q_, k_)).sum(-1, keepdim=True)
        out = layer.core(q, k, v, grid, rotation=(cos.float(), sin.float()))
    torch.testing.assert_close(out, torch.einsum("bhij,bjhd->bihd", weights, v), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("core", [*CORES, "hih_iha", "mhla_mea"])
def test_rotary_positions_are_relative(core):
    """A clip that begins later is attended to alike; one of another rate is not."""
    options = attentions()[core] | {"output_norm": False, "block_grid": (2, 2, 2)}
    layer = fill(HeadMixAttention(48, 2, grid=(3, 2, 4), **options)).double()
    x = torch.randn(2, 24, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    long = rotary_tables(24, (8, 2, 4), (3, 2, 4), 1.0, like=x)
    first, later = ([table[start : start + 24] for table in long] for start in (0, 40))
    expected = layer(x, rotation=first)
    torch.testing.assert_close(layer(x, rotation=later), expected, rtol=1e-4, atol=1e-6)
    slow = rotary_tables(24, (3, 2, 4), (3, 2, 4), 2.0, like=x)
    assert not torch.allclose(layer(x, rotation=slow), expected, rtol=1e-3)
    assert not torch.allclose(layer(x), expected, rtol=1e-3)


def test_rotary_positions_in_low_precision():
    """bfloat16 is as near to the truth as the same sums without rotation are."""
    layer = HeadMixAttention(48, 2, grid=(4, 8, 8), block_grid=(2, 2, 2)).core.double()
    q, k, v = torch.randn(3, 1, 256, 2, 24, generator=torch.Generator().manual_seed(0)).bfloat16().double()
    grid = TokenGrid.of((4, 8, 8))
    rotation = rotary_tables(24, grid.shape, grid.shape, 1.0, like=q)
    errors = []
    for given in (None, rotation):
        exact = layer(q, k, v, grid, rotation=given)
        low = layer(q.bfloat16(), k.bfloat16(), v.bfloat16(), grid, rotation=given)
        assert low.dtype == torch.bfloat16
        errors.append((low.double() - exact).abs().mean() / exact.abs().mean())
    assert errors[1] < 3 * errors[0] < 0.02
    large = [(30 * y).half() for y in (q, k)]  # over a block their products pass the range of float16
    exact = layer(*(y.double() for y in large), v, grid, rotation=rotation)
    torch.testing.assert_close(layer(*large, v.half(), grid, rotation=rotation).double(), exact, rtol=0, atol=0.01)


def test_prefix_tokens_are_not_rotated():
    x = torch.randn(2, 14, 2, 8)
    rotation = rotary_tables(8, (3, 4), (3, 4), 1.0, like=x)
    turned = rotate(x, rotation, TokenGrid((3, 4), num_prefix_tokens=2))
    assert torch.equal(turned[:, :2], x[:, :2])
    assert torch.equal(turned[:, 2:], rotate(x[:, 2:], rotation, TokenGrid((3, 4))))
    assert not torch.equal(turned[:, 3:], x[:, 3:])


# convolution


def test_factorised_convolution():
    torch.manual_seed(0)
    encoding = fill(FactorisedPositionEncoding(6)).double()
    x, grid = torch.randn(2, 60, 6, dtype=torch.float64), TokenGrid.of((3, 4, 5))
    images = x.mT.unflatten(2, (3, 4, 5))
    space, time = encoding.proj, encoding.time
    expected = F.conv3d(images, space.weight[:, :, None], space.bias, padding=(0, 1, 1), groups=6)
    assert torch.equal(time.weight.flatten(1), torch.tensor([0.0, 1, 0]).expand(6, -1).double())
    torch.nn.init.normal_(time.weight)
    assert not torch.allclose(encoding(x, grid), x + expected.flatten(2).mT)
    expected = F.conv3d(expected, time.weight[..., None], time.bias, padding=(1, 0, 0), groups=6)
    torch.testing.assert_close(encoding(x, grid), x + expected.flatten(2).mT)
    assert encoding.flops(grid) == 2 * 60 * 6 * 12


# depth


def test_hybrid_depth():
    model = create("mhla_mea", depth=5, softmax_every=2, global_every=3, core_args={"feature_map": "elu1"})
    cores = [type(block.attn.core).__name__ for block in model.blocks]
    assert cores == ["SoftmaxCore", "MHLACore", "SoftmaxCore", "MHLACore", "SoftmaxCore"]
    assert [block.attn.head_mix is None for block in model.blocks] == [False, False, True, False, False]
    assert model.blocks[1].attn.core.options["feature_map"] == "elu1"
    model.set_block_grid((2, 4, 4))
    x, t, y = clip()
    assert model(x, t, y).any() and model.config.block_grid == (2, 4, 4)
    image = timm.create_model("dit_hih_s_2", input_size=8, depth=3, embed_dim=32, num_heads=2, softmax_every=3)
    cores = [type(block.attn.core).__name__ for block in image.blocks]
    assert cores == ["SoftmaxCore", "HeadInHeadCore", "HeadInHeadCore"]


# ways of running


def gradients(run, model, x, t, y, rate):
    model.zero_grad()
    run(x, t, y, rate).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_stills_and_clips_alternate_when_checkpointed():
    model = create(positions="rope", softmax_every=2, class_dropout=0.0)
    y = torch.tensor([0, 4])
    for frames, rate in ((6, None), (1, None), (2, 4.0)):
        x, t, _ = clip(frames)
        t = t[:, None].expand(-1, frames) if rate else t
        model.set_grad_checkpointing(False)
        plain = gradients(model, model, x, t, y, rate)
        model.set_grad_checkpointing()
        for one, other in zip(plain, gradients(model, model, x, t, y, rate), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("core", ["mhla", "hih"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_stills_and_clips_alternate_when_compiled(core, backend):
    model = create(core, positions="rope", depth=1, cpe="factorised", class_dropout=0.0)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    y = torch.tensor([0, 4])
    further = [(1, None), (6, 5.0), *([(6, None)] if core == "mhla" else [])]  # Head-in-Head takes minutes to trace
    for frames, rate in ((2, 4.0), *(further if backend == "aot_eager" else [])):
        x, t, _ = clip(frames)
        t = t[:, None].expand(-1, frames) if rate else t
        runs = [gradients(run, model, x, t, y, rate) for run in (model, compiled)]
        for one, other in zip(*runs, strict=True):
            torch.testing.assert_close(one, other)


def test_save_load_and_make_by_name(tmp_path):
    model = create(positions="rope", frame_rate=7.5, softmax_every=2, learned_variance=True)
    model.save_pretrained(tmp_path)
    loaded = HeadMixVideoDiT.from_pretrained(tmp_path, torch_dtype=torch.float64, low_cpu_mem_usage=False)
    x, t, y = clip()
    assert torch.equal(loaded(x, t, y), model(x, t, y)) and loaded(x, t, y).shape == (2, 4, 6, 8, 8)
    assert (loaded.frame_rate, loaded.patch_size, loaded.input_size) == (7.5, (1, 2, 2), (6, 8, 8))
    assert HeadMixVideoDiT(**loaded.architecture).architecture == model.architecture
    made = create_generator("dit_video_mhla_digits", 7, [8, 16, 16], {"depth": 1, "frame_rate": 4})
    assert isinstance(made, HeadMixVideoDiT) and made.input_size == (8, 16, 16) and made.num_classes == 7
    with pytest.raises(ValueError, match=r"unknown argument 'framerate'.*did you mean frame_rate"):
        create_generator("dit_video_mhla_digits", model_args={"framerate": 4})
    assert {f"blocks.1.attn.core.mixing.{n}" for n in ("weight",)} <= model.no_weight_decay()


def test_operations_are_those_that_torch_counts():
    with torch.device("meta"):
        model = timm.create_model("dit_video_softmax_digits", depth=2).eval()
        x, t, y = torch.empty(1, 1, 16, 32, 32), torch.empty(1), torch.empty(1, dtype=torch.long)
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter, torch.no_grad():
            model(x, t, y)
    assert count_flops(model) == counter.get_total_flops()


# frames that see none after them


CAUSAL = {"core_args": {"causal": True}, "learned_variance": True}


@pytest.mark.parametrize("options", [{}, {"positions": "rope", "frame_rate": 4.0}, {"head_mix": "mea"}], ids=str)
@pytest.mark.parametrize("block_grid", [(6, 2, 2), (3, 2, 1), (1, 2, 2)])
def test_frames_in_pieces_give_what_the_whole_clip_gives(options, block_grid):
    model = create(**CAUSAL, **options, block_grid=block_grid)
    for frames in (6, 1):
        x, _, y = clip(frames)
        t = torch.linspace(0, 900, 2 * frames).view(2, frames)
        expected, outs, state, length = model(x, t, y), [], None, -(-frames // block_grid[0])
        for piece, times in zip(x.split(length, 2), t.split(length, 1), strict=True):
            out, state = model.stream(piece, times, y, num_frames=frames, state=state)
            outs.append(out)
        assert len(outs) == min(frames, block_grid[0])
        torch.testing.assert_close(torch.cat(outs, 2), expected, rtol=1e-12, atol=1e-12)


def test_frames_are_drawn_on_the_state_of_clean_ones_as_if_all_were_computed_again():
    """Windows of two frames in three steps of denoising, which leave the state alone; later frames change nothing."""
    model, y = create(core_args={"causal": True}, block_grid=(3, 2, 2)), torch.tensor([0, 5])
    noise, state, sizes = clip()[0], None, set()
    drawn = again = noise[:, :, :0]
    for window in noise.split(2, 2):
        x, whole = window, window
        for t in (900.0, 500.0, 100.0):
            x = x - 0.1 * model.stream(x, t, y, num_frames=6, state=state)[0]
            later = torch.full_like(noise[:, :, again.shape[2] + 2 :], 7)
            times = torch.tensor([[0.0] * again.shape[2] + [t] * 2 + [30.0] * later.shape[2]])
            whole = whole - 0.1 * model(torch.cat([again, whole, later], 2), times, y)[:, :, again.shape[2] :][:, :, :2]
        _, state = model.stream(x, 0.0, y, num_frames=6, state=state)
        sizes.add(sum(kept.summaries.numel() for layer in state.layers for kept in layer))
        drawn, again = torch.cat([drawn, x], 2), torch.cat([again, whole], 2)
    torch.testing.assert_close(drawn, again, rtol=1e-12, atol=1e-12)
    assert sizes == {2 * 2 * 2 * 12 * 24 * 25} and not torch.allclose(drawn, noise)


@pytest.mark.parametrize("positions", ["sincos", "rope"])
def test_blocks_of_frames_of_a_clip_of_any_length_give_what_the_whole_clip_gives(positions):
    """Blocks of 4 frames, 2 tokens, of which 3 are trained; the state does not grow."""
    options = {"patch_size": (2, 2, 2), "input_size": (12, 8, 8), "positions": positions}
    model = create(core_args={"causal": "rows"}, block_grid=(3, 2, 2), **options)
    x, _, y = clip(20)
    t = torch.linspace(0, 900, 40).view(2, 20)
    outs, state, sizes = [], None, set()
    for piece, times in zip(x.split(4, 2), t.split(4, 1), strict=True):
        out, state = model.stream(piece, times, y, frame_rate=4.0, state=state)
        outs.append(out)
        sizes.add(sum(kept.summaries.numel() for layer in state.layers for kept in layer))
    torch.testing.assert_close(torch.cat(outs, 2), model(x, t, y, frame_rate=4.0), rtol=1e-11, atol=1e-11)
    assert model.block_frames == 4 and len(sizes) == 2, "of one block before, then of two"
    assert create().block_frames is None and create(**CAUSAL).block_frames is None


def test_wrong_pieces_of_clips_are_refused():
    x, t, y = clip()
    model = create(**CAUSAL, block_grid=(3, 2, 2))
    state = model.stream(x, t, y, num_frames=6)[1]
    for arguments, options, message in (
        ((x[:, :, :3], t, y), {"num_frames": 6}, "after 2, 4, 6 of 6 on the first axis: 48 tokens after 0 do not"),
        ((x[:, :, :2], t, y), {"num_frames": 6, "state": state}, "2 frames given, but of 6 only 0 are left"),
        (
            (x[:, :, :2], t, y),
            {"num_frames": 8, "state": state},
            r"state is of a clip of \(6, 4, 4\) .* of \(8, 4, 4\)",
        ),
        ((x[:, :, :2], t, y), {"num_frames": 6.0}, "num_frames must be a whole number of at least 1, got 6.0"),
        ((x[:, 0], t, y), {"num_frames": 6}, r"x must be \[B, 2, T, H, W\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model.stream(*arguments, **options)
    with pytest.raises(ValueError, match="MHLACore cannot take tokens in pieces"):
        create().stream(x, t, y, num_frames=6)
    rows = create(core_args={"causal": "rows"}, block_grid=(3, 2, 2))
    with pytest.raises(ValueError, match="pieces must be whole rows of blocks, 2 x 16 tokens each: got 48"):
        rows.stream(x[:, :, :3], t, y)
    with pytest.raises(ValueError, match=r"state is of a clip of \(2, 4, 4\) .* of \(2, 2, 4\)"):
        rows.stream(x[:, :, :, :4], t, y, state=rows.stream(x, t, y)[1])


# from an image model


@pytest.mark.parametrize("core", [*CORES, "mhla_iha"])
@pytest.mark.parametrize(
    "options", [{"cpe": True, "block_grid": (2, 4, 4)}, {"cpe": "factorised", "core_args": {}, "output_gate": True}]
)
def test_a_still_is_what_the_image_model_makes_of_it(core, options):
    blocks = options.get("block_grid", (4, 2, 2))
    sizes = {**SMALL, "input_size": (8, 8), "block_grid": blocks[1:], "output_gate": "output_gate" in options}
    torch.manual_seed(1)
    image = fill(timm.create_model(f"dit_{core}_s_2", **sizes, cpe=True).double().eval())
    for name, weight in image.named_parameters():
        if name.endswith("mixing.weight"):
            torch.nn.init.uniform_(weight, 0.01, 0.9)
    x, t, y = clip(1)
    video = create(core, filled=False, **options)
    video.load_state_dict(convert_dit_state_dict(image.state_dict(), video).state_dict)
    torch.testing.assert_close(video(x, t, y)[:, :, 0], image(x[:, :, 0], t, y), rtol=1e-12, atol=1e-12)
    tubes = create(core, filled=False, **{**options, "patch_size": (2, 2, 2), "block_grid": (1, *blocks[1:])})
    tubes.load_state_dict(convert_dit_state_dict(image.state_dict(), tubes).state_dict)
    out = tubes(x.repeat(1, 1, 2, 1, 1), t, y)
    torch.testing.assert_close(out[:, :, 1], image(x[:, :, 0], t, y), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out[:, :, 0], out[:, :, 1], rtol=1e-12, atol=1e-12)


def test_an_inflated_mixing_matrix_is_local_in_time():
    image = timm.create_model("dit_mhla_s_2", **{**SMALL, "input_size": 8, "block_grid": 2})
    video = create(core_args={"mixing_per_head": True})
    with pytest.raises(ValueError, match="core_args and block_grid must agree"):
        convert_dit_state_dict(image.state_dict(), video)
    video = create()
    converted = convert_dit_state_dict(image.state_dict(), video)
    assert converted.new_parameters == [] == converted.unused
    weight = converted.state_dict["blocks.0.attn.core.mixing.weight"].unflatten(0, (4, 4)).unflatten(2, (4, 4))
    spatial = image.blocks[0].attn.core.mixing.weight
    assert all(torch.equal(weight[t, :, t], spatial) for t in range(4))
    torch.testing.assert_close(weight[0, :, 1], spatial * 2 / 3, rtol=0.2, atol=0)
    assert (weight[0, :, 1] >= weight[0, :, 2]).all() and weight[0, :, 2].any() and not weight[0, :, 3].any()


# refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_size": (7, 8)}, r"patch_size=\(1, 2, 2\) has 3 axes, input_size=\(7, 8\) has 2"),
        ({"input_size": (1, 2, 7, 8)}, "input_size must be one whole number or two, or three of clips"),
        ({"block_grid": (2, 2)}, r"block_grid=\(2, 2\) has 2 axes"),
        ({"patch_size": (4, 2, 2)}, "latent size 6x8x8 is not a multiple of the patch size 4x2x2"),
        ({"patch_size": 0}, "patch_size must be a whole number of at least 1, got 0"),
        ({"block_grid": (7, 2, 2)}, "larger than the token grid"),
        ({"frame_rate": 0}, "frame_rate must be a finite number above 0"),
        ({"frame_rate": float("nan")}, "frame_rate must be a finite number"),
        ({"positions": "learned"}, "positions must be one of"),
        ({"positions": "rope", "embed_dim": 4, "num_heads": 2}, "even head dim of at least 6, got 2"),
        ({"positions": "rope", "core_args": {"normalizer": "source_block"}}, "need the normalizer 'paper' or None"),
        ({"positions": "rope", "core": "hih", "core_args": {"num_sub_heads": 8}}, "sub-heads of even size, got 24 / 8"),
        ({"cpe": "separable"}, "cpe must be true or false or 'factorised'"),
        ({"softmax_every": 1}, "softmax_every must be 0, or from 2 to the depth 2, got 1"),
        ({"softmax_every": 3}, "from 2 to the depth 2, got 3"),
        ({"softmax_every": True}, "softmax_every must be a whole number"),
        ({"softmax_every": 2, "core": "softmax"}, "needs another core than softmax"),
        ({"softmax_every": 2, "core_args": {"causal": True}}, "softmax_every=2 cannot be joined with causal=True"),
        ({"softmax_every": 2, "core_args": {"causal": "rows"}}, "softmax_every=2 cannot be joined with causal='rows'"),
        ({"core": "linear", "core_args": {"causal": True}}, "core_args of 'linear'"),
        ({"core_args": {"causal": "rows"}}, "rows of blocks of equal length, .* got a 6x4x4 grid in 4 rows"),
        ({"cpe": "factorised", "core_args": {"causal": True}}, "cpe='factorised' cannot be joined with causal=True"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message) as error:
        create(**options)
    assert "\n" not in str(error.value)


def test_wrong_calls_are_refused():
    model, (x, t, y) = create(), clip()
    for arguments, message in (
        ((x[:, :, 0], t, y), r"x must be \[B, 2, T, H, W\], got \(2, 2, 8, 8\)"),
        ((x[:, :, :0], t, y), "latent size 0x8x8 is not a multiple"),
        ((x[..., :7], t, y), "latent size 6x8x7 is not a multiple of the patch size 1x2x2"),
        ((x, t[:, None].expand(-1, 5), y), r"t must be one number, \[B\] or \[B, T\] with B, T = \(2, 6\)"),
        ((x, t, y, -1.0), "frame_rate must be a finite number above 0"),
        ((x, t, y, 0), "frame_rate must be a finite number above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            model(*arguments)
    tubes = create(patch_size=(2, 2, 2), block_grid=(3, 2, 2))
    with pytest.raises(ValueError, match="latent size 1x8x8 is not a multiple of the patch size 2x2x2"):
        tubes(x[:, :, :1], t, y)
