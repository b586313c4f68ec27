"""Wan with MHLA in the place of softmax: tiny random models of diffusers against dense forms in float64."""

import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file

from headmix_vision.models.convert import wan_to_mhla
from headmix_vision.models.convert_wan import WanMHLATransformer3DModel, convert_wan_mhla_state_dict

TINY = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 256,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
    "eps": 1e-3,
}
OPTIONS = {"block_grid": (2, 2, 3), "token_grid": (5, 4, 5)}
NEW = {"mixing.weight", "mixing.block_grid", "norm.weight", "gate.weight", "gate.bias"}


@pytest.fixture
def wan():
    torch.manual_seed(0)
    return WanTransformer3DModel(**TINY).eval()


def inputs(grid=(5, 4, 5), dtype=torch.float32):
    """Latents, times and text of two clips whose tokens are a grid."""
    generator = torch.Generator().manual_seed(1)
    size = (grid[0], 2 * grid[1], 2 * grid[2])
    latents = torch.randn(2, 4, *size, generator=generator, dtype=dtype)
    return latents, torch.tensor([5, 900]), torch.randn(2, 7, 16, generator=generator, dtype=dtype)


def run(model, *arguments):
    return model(*arguments, return_dict=False)[0]


def randomized(model):
    """Draw all new weights, so that nothing is 1 or 0 by its start."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".processor." in name:
                parameter.uniform_(0.1, 0.9, generator=generator)
    return model


def dense_attention(attn, x, grid, mixing, block_grid, eps, normalizer, norm, gate):
    """Compute MHLA as the paper writes it, with rotary angles as complex numbers: [B, N, C] -> [B, N, C]."""
    heads, dim = attn.heads, attn.inner_dim // attn.heads
    places = torch.cartesian_prod(*(torch.arange(size) for size in grid))
    block = torch.zeros(len(places), dtype=torch.long)
    for axis, (size, count) in enumerate(zip(grid, block_grid, strict=True)):
        block = block * count + places[:, axis] * count // size

    q, k = attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(x))
    q, k = (y.relu().add(eps).unflatten(-1, (heads, dim)) for y in (q, k))
    v = attn.to_v(x).unflatten(-1, (heads, dim))
    sizes = [dim - 4 * (dim // 6), 2 * (dim // 6), 2 * (dim // 6)]  # channels that turn with time, height and width
    angles = [
        places[:, axis, None] / 10000 ** (torch.arange(0, size, 2).double() / size) for axis, size in enumerate(sizes)
    ]
    turn = torch.polar(torch.ones(()).double(), torch.cat(angles, dim=1))[:, None]

    def turned(y):
        return torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)

    weights = mixing[block][:, block]  # [N, N]
    out = torch.einsum("ij,bihd,bjhd,bjhe->bihe", weights, turned(q), turned(k), v)
    if normalizer:
        out = out / torch.einsum("ij,bihd,bjhd->bih", weights, q, k)[..., None]
    out = out * (out.square().mean(-1, keepdim=True) + eps).rsqrt() * norm
    out = out.flatten(2) if gate is None else out.flatten(2) * torch.nn.functional.silu(gate(x))
    return attn.to_out[0](out)


@pytest.mark.parametrize(
    ("grid", "normalizer", "gate"),
    [((5, 4, 5), None, True), ((4, 4, 6), "paper", False), ((1, 3, 4), "paper", True)],
)
def test_layers_equal_a_dense_form(wan, grid, normalizer, gate):
    model = randomized(wan_to_mhla(wan, normalizer=normalizer, output_gate=gate, **OPTIONS)).double()
    seen = []

    def check(attn, arguments, output):
        processor, frames = attn.processor, min(grid[0], 2)
        mixing = processor.mixing()[: 6 * frames, : 6 * frames]
        expected = dense_attention(
            attn,
            arguments[0],
            grid,
            mixing,
            (frames, 2, 3),
            model.config.eps,
            normalizer,
            processor.norm.weight,
            processor.gate,
        )
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-7)  # diffusers' tables are float32
        seen.append(attn)

    for block in model.blocks:
        block.attn1.register_forward_hook(check)
    with torch.no_grad():
        assert run(model, *inputs(grid, torch.float64)).isfinite().all()
    assert len(seen) == 2


@pytest.mark.parametrize("normalizer", [None, "paper"])
def test_sums_over_a_clip_do_not_leave_the_range_of_float16(wan, normalizer):
    grid = (5, 4, 5)
    attn = randomized(wan_to_mhla(wan, normalizer=normalizer, **OPTIONS)).blocks[0].attn1
    with torch.no_grad():
        attn.to_v.weight.mul_(5000)  # each head's norm divides by it again
    rotary = wan_to_mhla(wan, **OPTIONS).rope(inputs(grid)[0])
    x = torch.randn(2, 100, 24, generator=torch.Generator().manual_seed(3))
    expected = attn(x, rotary_emb=rotary)
    assert attn.to_v(x).abs().max() < 65504
    torch.testing.assert_close(attn.half()(x.half(), rotary_emb=rotary).float(), expected, rtol=0, atol=0.01)


def test_only_the_chosen_self_attention_changes(wan):
    arguments = inputs()
    same = wan_to_mhla(wan, layers=[], **OPTIONS)
    assert torch.equal(run(same, *arguments), run(wan, *arguments))
    hybrid = wan_to_mhla(wan, layers=[1], output_gate=True, **OPTIONS)
    new = {name: value for name, value in hybrid.state_dict().items() if name not in wan.state_dict()}
    assert new.keys() == {f"blocks.1.attn1.processor.{name}" for name in NEW}
    for name, value in wan.state_dict().items():
        assert torch.equal(hybrid.state_dict()[name], value)
        assert hybrid.state_dict()[name].data_ptr() != value.data_ptr()
    assert not torch.equal(run(hybrid, *arguments), run(wan, *arguments))
    linear = {name for name, module in wan.named_modules() if isinstance(module, torch.nn.Linear)}
    assert linear < {name for name, module in hybrid.named_modules() if isinstance(module, torch.nn.Linear)}


def test_a_new_gate_is_open(wan):
    arguments = inputs()
    gated, plain = (wan_to_mhla(wan, output_gate=gate, **OPTIONS) for gate in (True, False))
    torch.testing.assert_close(run(gated, *arguments), run(plain, *arguments))


def test_saved_models_come_back_to_the_bit(wan, tmp_path):
    model = randomized(wan_to_mhla(wan, layers=[0], normalizer="paper", output_gate=True, **OPTIONS))
    model.save_pretrained(tmp_path / "ours")
    loaded = WanMHLATransformer3DModel.from_pretrained(tmp_path / "ours")
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert torch.equal(run(loaded, *inputs()), run(model, *inputs()))
    half = WanMHLATransformer3DModel.from_pretrained(tmp_path / "ours", torch_dtype=torch.bfloat16)
    attention = half.blocks[0].attn1
    assert attention.to_q.weight.dtype == torch.bfloat16 and attention.processor.mixing.weight.dtype == torch.float32
    wan.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"theirs lacks weights of WanMHLA.*, first blocks\.0\.attn1\.processor\."):
        WanMHLATransformer3DModel.from_pretrained(tmp_path / "theirs")


def test_checkpointing_and_fused_projections_change_nothing(wan):
    model, arguments = randomized(wan_to_mhla(wan, layers=[1], output_gate=True, **OPTIONS)), inputs()
    results = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.enable_gradient_checkpointing()
        output = run(model, *arguments)
        run(model, *inputs((4, 5, 4)))  # another size before the backward pass
        output.square().mean().backward()
        results.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert all(gradient.any() for gradient in results[0].values() if gradient.ndim > 1)
    for name, gradient in results[0].items():
        assert torch.equal(results[1][name], gradient), name
    with torch.no_grad():
        expected = run(model, *arguments)
        model.fuse_qkv_projections()
        torch.testing.assert_close(run(model, *arguments), expected)
        model.unfuse_qkv_projections()
        assert torch.equal(run(model, *arguments), expected)


@pytest.mark.slow
def test_models_train_compiled_as_one_graph(wan):
    model, arguments = wan_to_mhla(wan, layers=[1], output_gate=True, **OPTIONS), inputs()
    model.enable_gradient_checkpointing()
    results = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        output = run(call, *arguments)
        output.square().mean().backward()
        results.append([output.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(results[1], results[0])


def test_a_pipeline_runs_saves_and_loads(wan, tmp_path):
    torch.manual_seed(3)
    vae = AutoencoderKLWan(
        base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    vae.register_to_config(latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    transformer = wan_to_mhla(wan, layers=[1], **OPTIONS)
    pipeline = WanPipeline(tokenizer=None, text_encoder=None, vae=vae, scheduler=scheduler, transformer=transformer)
    text = torch.randn(1, 7, 16)

    def frames(pipeline):
        pipeline.set_progress_bar_config(disable=True)
        return pipeline(
            prompt_embeds=text,
            negative_prompt_embeds=0 * text,
            num_frames=5,
            height=64,
            width=96,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(4),
            output_type="np",
        ).frames

    drawn = frames(pipeline)
    assert drawn.shape == (1, 5, 64, 96, 3)
    pipeline.save_pretrained(tmp_path)
    loaded = WanPipeline.from_pretrained(tmp_path, text_encoder=None, tokenizer=None)
    assert type(loaded.transformer) is WanMHLATransformer3DModel
    assert (frames(loaded) == drawn).all()


def published(model, original):
    """Name a model's weights as published ones are."""
    state = {}
    renamed = {"mixing.weight": "block_attn.conv.weight", "norm.weight": "g_norm.weight"}
    theirs = {"attn1": "self_attn", "attn2": "cross_attn", "to_q": "q", "to_k": "k", "to_v": "v", "norm2": "norm3"}
    others = {
        "condition_embedder.time_embedder.linear_1": "time_embedding.0",
        "condition_embedder.time_embedder.linear_2": "time_embedding.2",
        "condition_embedder.text_embedder.linear_1": "text_embedding.0",
        "condition_embedder.text_embedder.linear_2": "text_embedding.2",
        "condition_embedder.time_proj": "time_projection.1",
        "proj_out": "head.head",
        "ffn.net.0.proj": "ffn.0",
        "ffn.net.2": "ffn.2",
        "to_out.0": "o",
    }
    for name, value in model.state_dict().items():
        if name.endswith("mixing.block_grid"):
            continue
        for ours, theirs_ in renamed.items():
            name = name.replace(f"processor.{ours}", theirs_)
        name = name.replace("processor.gate.", "g.")
        value = value[:, :, None, None] if "block_attn" in name else value
        if original:
            for ours, theirs_ in others.items():
                name = name.replace(ours, theirs_)
            name = ".".join(theirs.get(part, part) for part in name.split("."))
            if name == "scale_shift_table":
                name = "head.modulation"
            name = name.replace("scale_shift_table", "modulation")
        state[name] = value
    return state


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("original", [True, False])
def test_published_weights_are_mapped(wan, original, gate):
    options = {"layers": [1], "output_gate": gate, "clip_mixing": False, **OPTIONS}
    source, target = (wan_to_mhla(wan, **options) for _ in range(2))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_(generator=generator)
    weights = published(source, original)
    assert ("blocks.1.self_attn.block_attn.conv.weight" in weights) == original
    wrapped = {f"module.{name}": value for name, value in weights.items()}
    converted = convert_wan_mhla_state_dict({"state_dict": wrapped}, target)
    assert (converted.new_parameters, converted.unused) == ([], [])
    target.load_state_dict(converted.state_dict)
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name


def test_a_file_of_published_weights_draws_as_the_model_it_was_made_of(wan, tmp_path):
    layers = [index for index in range(2) if index % 3]  # as docs/wan.md fetches, maps and runs them
    source = randomized(wan_to_mhla(wan, layers=layers, output_gate=True, clip_mixing=False, **OPTIONS))
    save_file(published(source, original=True), tmp_path / "weights.safetensors")
    weights = load_file(tmp_path / "weights.safetensors")
    gate = any(".self_attn.g." in name for name in weights)
    model = wan_to_mhla(wan, layers=layers, output_gate=gate, clip_mixing=False, **OPTIONS)
    assert not torch.equal(run(model, *inputs()), run(source, *inputs()))
    model.load_state_dict(convert_wan_mhla_state_dict(weights, model).state_dict)
    assert torch.equal(run(model, *inputs()), run(source, *inputs()))


def test_published_weights_that_do_not_fit_are_refused(wan):
    source = wan_to_mhla(wan, output_gate=True, **OPTIONS)
    weights = published(source, original=True)

    def refused(message, weights=weights, **options):
        with pytest.raises(ValueError, match=message):
            convert_wan_mhla_state_dict(weights, wan_to_mhla(wan, **{"output_gate": True, **OPTIONS, **options}))

    refused(r"MHLA in layers \[0, 1\], the model in \[1\]", layers=[1])
    refused("the weights have a gate: make the model with output_gate=True", output_gate=False)
    refused(r"mixing.weight has shape \(12, 12\), the model needs \(4, 4\): block_grid", block_grid=(1, 2, 2))
    refused(r"self_attn\.lepe\.weight: .*LePE", {**weights, "blocks.0.self_attn.lepe.weight": torch.ones(1)})
    name = "blocks.0.self_attn.block_attn.conv.weight"
    refused("clip_mixing=False", {**weights, name: -weights[name]})


def test_wrong_options_are_refused(wan):
    for message, options in (
        ("layers must be a whole number from 0 to 1, got 2", {"layers": [2]}),
        ("layers must be a whole number from 0 to 1, got -1", {"layers": [-1]}),
        ("block_grid must be three whole numbers", {"block_grid": (4, 4)}),
        ("block_grid must be one whole number for each axis", {"block_grid": 4}),
        ("larger than the token grid", {"block_grid": (3, 5, 60)}),
        ("normalizer must be one of", {"normalizer": "source_block"}),
        ("output_gate must be true or false", {"output_gate": 1}),
    ):
        with pytest.raises(ValueError, match=message):
            wan_to_mhla(wan, **options)
    with pytest.raises(ValueError, match=r"must be a diffusers.WanTransformer3DModel, got WanMHLA"):
        wan_to_mhla(wan_to_mhla(wan))
    with pytest.raises(ValueError, match=r"larger than the token grid \(5, 4, 2\)"):
        run(wan_to_mhla(wan, **OPTIONS), *inputs((5, 4, 2)))
