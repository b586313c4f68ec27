"""Sana with MHLA in the place of linear attention: tiny random models of diffusers."""

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel

from headmix_vision.models.convert import sana_to_mhla
from headmix_vision.models.convert_sana import SanaMHLATransformer2DModel

TINY = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": 8,
    "sample_size": 8,
}


@pytest.fixture
def sana():
    torch.manual_seed(0)
    return SanaTransformer2DModel(**TINY).eval()


def inputs(height=8, width=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, 4, height, width, generator=generator, dtype=dtype)
    return latents, torch.randn(2, 5, 8, generator=generator, dtype=dtype), torch.tensor([5, 900])


def run(model, *arguments):
    return model(*arguments, return_dict=False)[0]


@pytest.mark.parametrize("size", [(8, 8), (6, 9)])
@pytest.mark.parametrize("options", [{}, {"qk_norm": "rms_norm_across_heads"}], ids=["plain", "qk norm"])
def test_the_function_is_the_same_at_the_start(options, size):
    torch.manual_seed(0)
    sana = SanaTransformer2DModel(**TINY, **options).eval()
    torch.testing.assert_close(run(sana_to_mhla(sana), *inputs(*size)), run(sana, *inputs(*size)), rtol=1e-5, atol=1e-6)


def test_layers_equal_a_dense_form(sana):
    """Against the mixed dense form in float64, which for equal weights is Sana's own in float64."""
    model = sana_to_mhla(sana, block_grid=(2, 3), mixing_init="locality").double()
    places = torch.cartesian_prod(torch.arange(5), torch.arange(7))
    block = places[:, 0] * 2 // 5 * 3 + places[:, 1] * 3 // 7
    uniform = torch.full((6, 6), 1 / 6).double()
    x = torch.randn(2, 35, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x[:, :3] -= 100 * model.transformer_blocks[0].attn1.to_q.weight.pinverse().sum(1)  # queries without a feature
    attn = model.transformer_blocks[0].attn1
    attn.call_grid = (5, 7)

    def dense(mixing):
        q, k, v = (project(x).unflatten(-1, (2, 8)) for project in (attn.to_q, attn.to_k, attn.to_v))
        weights = mixing[block][:, block] * torch.einsum("bihd,bjhd->bhij", F.relu(q), F.relu(k))
        out = torch.einsum("bhij,bjhe->bihe", weights, v) / (weights.sum(-1).transpose(1, 2)[..., None] + 1e-15)
        return attn.to_out[0](out.flatten(2))

    with torch.no_grad():
        torch.testing.assert_close(attn(x), dense(attn.processor.mixing()), rtol=1e-10, atol=1e-12)
        attn.processor.mixing.weight.copy_(uniform)
        torch.testing.assert_close(attn(x), dense(torch.ones(6, 6).double()), rtol=1e-10, atol=1e-12)
        assert not F.relu(attn.to_q(x))[:, :3].any()


def test_float16_is_neither_left_by_sums_nor_by_the_output(sana):
    attn = sana_to_mhla(sana, block_grid=(2, 3)).transformer_blocks[0].attn1
    attn.call_grid = (5, 7)
    x = torch.randn(2, 35, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for name in ("to_q", "to_k", "to_v"):
            getattr(attn, name).weight.mul_(50)
        expected = attn(x)
        torch.testing.assert_close(attn.half()(x.half()).float(), expected, rtol=0, atol=0.1)
        attn.to_out[0].weight.mul_(1e4)
        out = attn(x.half())
    assert out.abs().max() == 65504 and (out.sign() == attn.float()(x).sign()).float().mean() > 0.99


def test_chosen_layers_learn_to_mix(sana):
    model = sana_to_mhla(sana, layers=[1])
    new = set(model.state_dict()) - set(sana.state_dict())
    assert new == {f"transformer_blocks.1.attn1.processor.mixing.{name}" for name in ("weight", "block_grid")}
    assert (
        model.transformer_blocks[1].attn1.to_q.weight.data_ptr()
        != sana.transformer_blocks[1].attn1.to_q.weight.data_ptr()
    )
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.enable_gradient_checkpointing()
        output = run(model, *inputs(6, 8))
        run(model, *inputs(8, 6))  # another size before the backward pass
        output.square().mean().backward()
        gradients.append(model.transformer_blocks[1].attn1.processor.mixing.weight.grad)
    assert gradients[0].any()
    assert torch.equal(*gradients)


def test_saved_models_come_back_to_the_bit(sana, tmp_path):
    model = sana_to_mhla(sana, block_grid=(2, 4), mixing_init="locality")
    model.save_pretrained(tmp_path)
    loaded = SanaMHLATransformer2DModel.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert torch.equal(run(loaded, *inputs()), run(model, *inputs()))
    half = SanaMHLATransformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert half.transformer_blocks[0].attn1.processor.mixing.weight.dtype == torch.float32


def test_a_pipeline_runs_saves_and_loads(sana, tmp_path):
    torch.manual_seed(3)
    vae = AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_block_types="ResBlock",
        decoder_block_types="ResBlock",
        encoder_qkv_multiscales=((), ()),
        decoder_qkv_multiscales=((), ()),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
    )
    pipeline = SanaPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae,
        scheduler=DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        transformer=sana_to_mhla(sana),
    )
    text, mask = torch.randn(1, 5, 8), torch.ones(1, 5, dtype=torch.long)

    def images(pipeline):
        pipeline.set_progress_bar_config(disable=True)
        return pipeline(
            prompt_embeds=text,
            prompt_attention_mask=mask,
            negative_prompt=None,
            negative_prompt_embeds=0 * text,
            negative_prompt_attention_mask=mask,
            height=32,
            width=64,
            num_inference_steps=2,
            use_resolution_binning=False,
            generator=torch.Generator().manual_seed(4),
            output_type="np",
        ).images

    drawn = images(pipeline)
    assert drawn.shape == (1, 32, 64, 3)
    pipeline.save_pretrained(tmp_path)
    loaded = SanaPipeline.from_pretrained(tmp_path, text_encoder=None, tokenizer=None)
    assert type(loaded.transformer) is SanaMHLATransformer2DModel
    assert (images(loaded) == drawn).all()


def test_wrong_options_are_refused(sana):
    for message, options in (
        ("layers must be a whole number from 0 to 1, got 2", {"layers": [2]}),
        ("layers must be a list of whole numbers, got 1", {"layers": 1}),
        ("block_grid must be one whole number for each axis", {"block_grid": 4}),
        ("larger than the token grid", {"block_grid": (4, 9)}),
        ("mixing_init must be one of", {"mixing_init": "ones"}),
    ):
        with pytest.raises(ValueError, match=message):
            sana_to_mhla(sana, **options)
    with pytest.raises(ValueError, match="larger than the token grid"):  # of 4 x 4 whole patches
        sana_to_mhla(SanaTransformer2DModel(**TINY | {"patch_size": 2, "sample_size": 9}), block_grid=(4, 5))
    with pytest.raises(ValueError, match=r"must be a diffusers.SanaTransformer2DModel, got SanaMHLA"):
        sana_to_mhla(sana_to_mhla(sana))
