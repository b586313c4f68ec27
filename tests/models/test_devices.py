"""Training away from the CPU: a tensor that is made on another device than the input stops it on the meta device."""

import pytest
import timm
import torch

from headmix_vision.diffusion import ObjectiveConfig
from headmix_vision.diffusion.denoising import Guidance, create_scheduler, denoise, set_steps
from headmix_vision.diffusion.objectives import create_objective
from headmix_vision.layers.attention import HeadMixAttention

IMAGES = {"depth": 2, "embed_dim": 16, "num_heads": 2, "class_token": True, "reg_tokens": 1}
FLAT = {"depth": 1, "embed_dim": 16, "num_heads": 2}
CLIPS = {**FLAT, "input_size": (4, 4, 4), "patch_size": (1, 1, 1), "in_channels": 1, "num_classes": 3}
FLOW = ObjectiveConfig(times="logit_normal", clean_prefix=0.5, prefix_noise=0.1)


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        ("mhla", {"cpe": True}),
        ("mhla_iha", {}),
        ("mhla_mea", {"core_args": {"impl": "reference"}}),
        ("hih", {}),
        ("hih_iha", {}),
        ("softmax", {"core_args": {"window": 3}}),
    ],
)
def test_images_are_classified_on_any_device(attention, options):
    model = timm.create_model(f"deit_{attention}_digits", **IMAGES, **options).to("meta")
    images = torch.empty(2, 1, 8, 8, device="meta")
    model(images).sum().backward()
    out, _ = torch.func.jvp(model, (images,), (images,))  # with tables of its own
    assert out.device.type == "meta"


@pytest.mark.parametrize("mix", [None, "iha", "mea"])
@pytest.mark.parametrize("core", ["hih", "hih of one", "linear", "mhla", "softmax"])
def test_a_layer_has_its_tensors_where_and_as_they_are_asked_for(core, mix):
    options = {"cpe": True, "qk_norm": True, "input_norm": True, "output_gate": True, "output_norm": True}
    options |= {"scale_norm": True, "lepe": 0 if mix else 3}
    options |= {"core_args": {"mask": "token"} if core == "hih" and mix else {}}
    if core == "hih of one":
        core, options["core_args"] = "hih", {"num_sub_heads": 1}
    layer = HeadMixAttention(16, 2, core, mix, **options, device="meta", dtype=torch.float64)
    tensors = [*layer.parameters(), *layer.buffers()]
    assert {x.device.type for x in tensors} == {"meta"}
    assert {x.dtype for x in tensors if x.is_floating_point()} == {torch.float64}


@pytest.mark.parametrize("name", ["euler", "heun", "dpm++"])
def test_times_of_sampling_are_on_the_device_that_is_asked_for(name):
    scheduler = create_scheduler(name, ObjectiveConfig())
    set_steps(scheduler, 4, "meta")
    assert scheduler.timesteps.device.type == "meta"


@pytest.mark.parametrize(("name", "kind"), [("euler", "flow"), ("ddim", "ddpm"), ("unipc", "ddpm")])
def test_samples_are_drawn_where_the_noise_is(name, kind):
    options = {"labels": torch.arange(2), "null_label": 2, "guidance": Guidance(2.0)}
    noise, scheduler = torch.randn(2, 1, 8, 8), create_scheduler(name, ObjectiveConfig(kind=kind))
    with torch.device("meta"):  # where tensors are made for which no device is said
        drawn = denoise(lambda x, t, y: x + (t + y)[:, None, None, None] / 1000, noise, scheduler, 3, **options)
    assert drawn.device.type == "cpu"


@pytest.mark.parametrize("sit_time", [False, True])
@pytest.mark.parametrize("positions", ["sincos", "rope"])
@pytest.mark.parametrize("core", ["hih", "mhla"])
def test_generators_have_their_tensors_where_and_as_they_are_asked_for(core, positions, sit_time):
    options = {**CLIPS, "sit_time": sit_time, "positions": positions, "cpe": core == "mhla", "embed_dim": 48}
    model = timm.create_model(f"dit_video_{core}_s_2", **options, device="meta", dtype=torch.float64)
    tensors = [*model.parameters(), *model.buffers()]
    assert {x.device.type for x in tensors} == {"meta"}
    assert {x.dtype for x in tensors if x.is_floating_point()} == {torch.float64}


@pytest.mark.parametrize(
    ("name", "options", "objective", "grid"),
    [
        ("dit_mhla_digits", FLAT, ObjectiveConfig(), (8, 8)),
        ("dit_hih_digits", FLAT, ObjectiveConfig(kind="ddpm"), (8, 8)),
        ("dit_video_mhla_s_2", {**CLIPS, "block_grid": (3, 2, 2), "core_args": {"causal": True}}, FLOW, (4, 4, 4)),
        ("dit_video_mhla_s_2", {**CLIPS, "block_grid": (2, 2, 2), "core_args": {"causal": "rows"}}, FLOW, (4, 4, 4)),
        ("dit_video_mhla_s_2", {**CLIPS, "block_grid": (2, 2, 2), "positions": "rope"}, FLOW, (4, 4, 4)),
    ],
)
def test_samples_are_denoised_on_any_device(name, options, objective, grid):
    model, objective = timm.create_model(name, **options, device="meta").train(), create_objective(objective)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    x = torch.empty(2, 1, *grid, device="meta")
    times = objective.draw_times(len(x), x.device, grid[0] if len(grid) == 3 else None)
    y = torch.zeros(2, dtype=torch.long, device="meta")
    loss = objective.losses(lambda x, t: model(x, t, y), x, times, torch.randn_like(x))
    loss.sum().backward()
    out, _ = torch.func.jvp(lambda x: model(x, times, y), (x,), (x,))  # with tables of its own
    assert out.device.type == loss.device.type == "meta"
