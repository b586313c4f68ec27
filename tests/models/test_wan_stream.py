"""Causal Wan: groups of frames on a carried state, against the whole causal model on all frames so far."""

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from test_convert_wan import TINY, randomized

from headmix_vision.diffusion.wan_stream import WanStreamPipeline
from headmix_vision.models.convert import wan_to_mhla
from headmix_vision.models.wan_attention import WanState

ROWS = {"block_grid": (3, 2, 3), "token_grid": (6, 4, 6), "causal": True}


@pytest.fixture(params=[None, "paper"])
def model(request):
    torch.manual_seed(0)
    options = {"normalizer": request.param, "output_gate": True, **ROWS}
    return randomized(wan_to_mhla(WanTransformer3DModel(**TINY), **options)).eval()


def noise(frames, seed=1):
    return torch.randn(1, 4, frames, 8, 12, generator=torch.Generator().manual_seed(seed))


def state_bytes(state):
    return sum(one.summaries.nbytes for layer in state.layers for one in layer)


def test_groups_on_a_state_equal_the_whole_clip_at_a_size_that_does_not_grow(model):
    clip, text, times = noise(14), torch.randn(1, 7, 16), torch.randint(0, 1000, (7,))
    by_token = times.repeat_interleave(2 * 4 * 6)[None]
    state, drawn, sizes = None, [], []
    with torch.no_grad():
        whole = model(clip, by_token, text, return_dict=False)[0]
        for group, time in zip(clip.split(2, dim=2), times, strict=True):
            out, state = model.stream(group, time[None], text, state=state)
            drawn.append(out)
            sizes.append(state_bytes(state))
    torch.testing.assert_close(torch.cat(drawn, dim=2), whole, rtol=1e-4, atol=1e-5)
    assert len(set(sizes[1:])) == 1 and state.frames == 14


def test_no_frame_sees_a_later_row(model):
    clip, text = noise(6), torch.randn(1, 7, 16)
    changed = torch.cat([clip[:, :, :4], noise(2, seed=2)], dim=2)
    with torch.no_grad():
        a, b = (model(x, torch.tensor([500]), text, return_dict=False)[0] for x in (clip, changed))
    torch.testing.assert_close(a[:, :, :4], b[:, :, :4])
    assert (a[:, :, 4:] - b[:, :, 4:]).abs().min() > 0


@pytest.fixture
def pipeline(model):
    torch.manual_seed(3)
    vae = AutoencoderKLWan(
        base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    vae.register_to_config(latents_mean=[0.1] * 4, latents_std=[2.0] * 4)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    parts = {"tokenizer": None, "text_encoder": None, "vae": vae, "scheduler": scheduler, "transformer": model}
    pipeline = WanStreamPipeline(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def recomputed(pipeline, latents, texts, steps, scale):
    """Draw as the pipeline does, each time by the whole model on all frames so far, clean ones at time 0."""
    clean = latents[:, :, :0]
    for x in latents.split(2, dim=2):
        pipeline.scheduler.set_timesteps(steps)
        for t in pipeline.scheduler.timesteps:
            frames = torch.cat([clean, x], dim=2)
            times = torch.cat([torch.zeros(clean.shape[2]), t.expand(2)]).repeat_interleave(4 * 6)[None]
            cond, uncond = (
                pipeline.transformer(frames, times, text, return_dict=False)[0][:, :, -2:] for text in texts
            )
            x = pipeline.scheduler.step(uncond + scale * (cond - uncond), t, x, return_dict=False)[0]
        clean = torch.cat([clean, x], dim=2)
    return clean


@torch.no_grad()
def test_a_pipeline_draws_group_by_group_what_whole_recomputation_draws(pipeline, tmp_path):
    latents, text = noise(8), torch.randn(1, 7, 16)
    embeds = {"prompt_embeds": text, "negative_prompt_embeds": 0 * text}
    sizes = {"num_frames": 29, "height": 64, "width": 96, "num_inference_steps": 3, "guidance_scale": 2.0}
    expected = recomputed(pipeline, latents, (text, 0 * text), 3, 2.0)
    drawn = pipeline(**embeds, **sizes, latents=latents, output_type="latent").frames
    torch.testing.assert_close(drawn, expected, rtol=1e-3, atol=1e-3)
    video = pipeline.video_processor.postprocess_video(pipeline.vae.decode(drawn * 2.0 + 0.1).sample, "np")
    groups = list(pipeline.stream(**embeds, **sizes, latents=latents))
    assert [group.shape[1] for group in groups] == [5, 8, 8, 8]
    np.testing.assert_allclose(np.concatenate(groups, axis=1), video, atol=1e-5)
    pipeline.save_pretrained(tmp_path)
    loaded = WanStreamPipeline.from_pretrained(tmp_path, text_encoder=None, tokenizer=None)
    loaded.set_progress_bar_config(disable=True)
    frames = loaded(**embeds, **sizes, latents=latents, output_type="pil").frames
    assert len(frames) == 1 and len(frames[0]) == 29


def test_wrong_calls_are_refused(pipeline):
    model, text = pipeline.transformer, torch.zeros(1, 7, 16)
    for message, frames, state in (
        ("whole rows of blocks, 2 x 24 tokens each: got 72", 3, None),
        ("rotary positions of 32 frames, got frame 33", 2, WanState(31, (4, 6), ())),
        (r"frames of \(9, 9\) tokens, these are of \(4, 6\)", 2, WanState(0, (9, 9), ())),
    ):
        with pytest.raises(ValueError, match=message):
            model.stream(noise(frames), torch.tensor([0]), text, state=state)
    for message, options in (
        (r"groups of 2 latent frames, got 81: give \[77, 85\]", {"num_frames": 81}),
        (r"groups of 2 latent frames, got 1: give \[5\]", {"num_frames": 1}),
        ("num_frames must be a whole number of at least 1, got 5.0", {"num_frames": 5.0}),
        ("num_inference_steps must be a whole number", {"num_frames": 5, "num_inference_steps": 0}),
        (r"the shape \(1, 4, 4, 4, 6\), got \(1, 4, 2, 8, 12\)", {"num_frames": 13, "latents": noise(2)}),
    ):
        with pytest.raises(ValueError, match=message):
            next(pipeline.stream(prompt_embeds=text, negative_prompt_embeds=text, height=32, width=48, **options))
    with pytest.raises(ValueError, match=r"all 2 layers and rows of blocks of one length: got layers \[1\], 6 tokens"):
        wan_to_mhla(WanTransformer3DModel(**TINY), layers=[1], **ROWS)
    pipeline.transformer = wan_to_mhla(WanTransformer3DModel(**TINY), (1, 1, 1))
    with pytest.raises(ValueError, match="causal=True"):
        next(pipeline.stream(prompt_embeds=text))
    with pytest.raises(ValueError, match="causal=True, on one device"):
        pipeline.transformer.stream(noise(2), torch.tensor([0]), text)
