"""Sampling: options of schedulers, guidance, saving and loading, refusals."""

import json
from dataclasses import asdict

import diffusers
import pytest
import timm
import torch

from headmix_vision.diffusion import (
    Guidance,
    HeadMixDiTPipeline,
    ObjectiveConfig,
    create_objective,
    create_scheduler,
)
from headmix_vision.diffusion.denoising import check_scheduler_config, set_steps
from headmix_vision.diffusion.objectives import shifted
from headmix_vision.errors import InputError
from headmix_vision.models import HeadMixDiT
from headmix_vision.models.autoencoders import load_autoencoder

MEAN, STD = {0: 0.5, 1: -0.5, 2: 0.0}, 0.2


class Oracle(HeadMixDiT):
    """The best predictor for pixels from N(mean of the class, STD²), class 2 being the null class."""

    def forward(self, x, t, y=None):
        mean = torch.tensor([MEAN[int(label)] for label in y]).view(-1, 1, 1, 1)
        if not hasattr(self, "bar"):
            level = (t / 1000).view(-1, 1, 1, 1)
            variance = (1 - level) ** 2 * STD**2 + level**2
            return (level - (1 - level) * STD**2) / variance * (x - (1 - level) * mean) - mean
        bar = self.bar[t.long()].float().view(-1, 1, 1, 1)
        return (1 - bar).sqrt() / (bar * STD**2 + 1 - bar) * (x - bar.sqrt() * mean)


def oracle_pipeline(kind):
    objective = ObjectiveConfig(kind=kind)
    model = Oracle(input_size=16, patch_size=2, in_channels=1, embed_dim=16, depth=1, num_heads=1, num_classes=2).eval()
    if kind == "ddpm":
        object.__setattr__(model, "bar", create_objective(objective).alphas_cumprod)
    pipeline = HeadMixDiTPipeline(model, create_scheduler(None, objective), objective=asdict(objective))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_schedulers_are_those_of_the_table():
    with pytest.raises(ValueError, match=r"unknown scheduler 'plms'; for this model: euler, heun, dpm\+\+, unipc"):
        create_scheduler("plms", ObjectiveConfig())
    with pytest.raises(ValueError, match=r"'ddim' does not fit a model trained with objective\.kind=flow"):
        create_scheduler("ddim", ObjectiveConfig())
    with pytest.raises(ValueError, match="'euler' does not fit"):
        create_scheduler("euler", ObjectiveConfig(kind="ddpm"))


def test_steps_of_euler_are_equal_and_shifted():
    pipeline = oracle_pipeline("flow")
    levels = []
    pipeline([0], num_inference_steps=4, callback_on_step_end=lambda p, i, t, k: levels.append(float(t)) or k)
    assert levels == [1000, 750, 500, 250]
    assert create_scheduler("euler", ObjectiveConfig(shift=3.0)).config.shift == 3.0


@pytest.mark.parametrize("scheduler", ["euler", "heun", "dpm++", "unipc"])
def test_noise_levels_of_sampling_are_shifted_as_in_training(scheduler):
    levels = {}
    for shift in (1.0, 4.0):
        made = create_scheduler(scheduler, ObjectiveConfig(shift=shift))
        set_steps(made, 10, "cpu")
        levels[shift] = made.sigmas[made.sigmas > 0].double()
    torch.testing.assert_close(levels[4.0], shifted(levels[1.0], 4.0), rtol=0, atol=2e-3)


@pytest.mark.parametrize("scheduler", ["ddim", "ddpm", "dpm++", "unipc"])
def test_schedulers_of_ddpm_know_its_betas_and_what_is_predicted(scheduler):
    for prediction, theirs in (("epsilon", "epsilon"), ("v", "v_prediction")):
        objective = ObjectiveConfig(kind="ddpm", beta_start=2e-4, beta_end=0.03, prediction=prediction)
        made = create_scheduler(scheduler, objective)
        expected = create_objective(objective).alphas_cumprod.float()
        torch.testing.assert_close(made.alphas_cumprod, expected, rtol=1e-4, atol=0)
        assert made.config.prediction_type == theirs


def test_configurations_of_schedulers_are_checked():
    for objective in (ObjectiveConfig(), ObjectiveConfig(kind="ddpm")):
        for name in ("dpm++", "unipc"):
            check_scheduler_config(create_scheduler(name, objective))
    for options, message in (
        ({"timestep_spacing": "even"}, "timestep_spacing of the scheduler must be one of"),
        ({"flow_shift": float("inf")}, "flow_shift of the scheduler must be finite, got inf"),
    ):
        with pytest.raises(ValueError, match=message):
            check_scheduler_config(diffusers.DPMSolverMultistepScheduler(**options))


def test_schedulers_with_a_scale_of_their_own_start_from_their_noise():
    """The noise of Euler's method for DDPM is the noise of x / sqrt(alphas_cumprod), 157 times as large."""
    pipeline = oracle_pipeline("ddpm")
    pipeline.scheduler = diffusers.EulerDiscreteScheduler(beta_end=0.02, beta_schedule="linear")
    drawn = pipeline([0], num_inference_steps=50, generator=generators(0), output_type="latent").images
    assert abs(drawn.mean() - MEAN[0]) < 0.05 and abs(drawn.std() / STD - 1) < 0.25


@pytest.mark.parametrize("scheduler", ["ddim", "ddpm"])
def test_pixels_are_clipped_within_the_loop_and_latents_are_not(scheduler, tmp_path):
    objective = ObjectiveConfig(kind="ddpm")
    for clip in (True, False):
        made = create_scheduler(scheduler, objective, clip=clip)
        set_steps(made, 4, "cpu")
        # nothing but noise is predicted as nothing: the data would be 1 / sqrt(alphas_cumprod) times too large
        x = torch.full((1, 1, 2, 2), 3.0)
        estimate = made.step(torch.zeros_like(x), made.timesteps[0], x).pred_original_sample
        assert bool(estimate.abs().max() <= 1) is clip
    pipeline = oracle_pipeline("ddpm")
    pipeline.set_scheduler(scheduler)
    assert pipeline.scheduler.config.clip_sample
    pipeline.register_modules(vae=tiny_vae("kl", tmp_path).module)
    pipeline.set_scheduler(scheduler)
    assert not pipeline.scheduler.config.clip_sample


def test_learned_variance_is_sampled_with():
    """The DDPM scheduler takes both halves of the output, the others the first."""
    objective = ObjectiveConfig(kind="ddpm", learned_variance=True)
    torch.manual_seed(0)
    model = timm.create_model("dit_mhla_digits", depth=1, learned_variance=True).eval()
    torch.nn.init.normal_(model.final_layer.linear.weight, std=0.1)
    pipeline = HeadMixDiTPipeline(model, create_scheduler(None, objective), objective=asdict(objective))
    pipeline.set_progress_bar_config(disable=True)
    for name in ("ddpm", "ddim", "dpm++"):
        pipeline.set_scheduler(name)
        image = pipeline([1], num_inference_steps=3, generator=generators(0), output_type="pt").images
        assert image.shape == (1, 1, 8, 8) and image.isfinite().all()
    assert create_scheduler("ddpm", objective).config.variance_type == "learned_range"


def test_guidance_extrapolates_in_its_interval_and_channels():
    one, zero = torch.ones(1, 4, 2, 2), torch.zeros(1, 4, 2, 2)
    assert (Guidance(3.0).combine(one, zero) == 3).all()
    three = Guidance(3.0, channels="first_three").combine(one, zero)
    assert (three[:, :3] == 3).all() and (three[:, 3] == 1).all()
    guidance = Guidance(2.0, (0.2, 0.6))
    assert [guidance.acts_at(level) for level in (0.1, 0.2, 0.6, 0.7)] == [False, True, True, False]
    assert not Guidance(1.0).acts_at(0.5)
    assert Guidance(2.0, (0.5, 0.5)).acts_at(0.5) and Guidance(1000.0, (0.0, 1.0)).acts_at(1.0)


def test_guidance_moves_samples_and_an_empty_interval_does_not():
    pipeline = oracle_pipeline("flow")
    plain = pipeline([0], generator=generators(0), output_type="latent").images
    guided = pipeline([0], guidance_scale=2.0, generator=generators(0), output_type="latent").images
    assert guided.mean() - plain.mean() > 0.3  # away from the null class, whose mean is 0
    late = {"guidance_scale": 2.0, "guidance_interval": (0.0, 0.001)}
    assert torch.equal(pipeline([0], **late, generator=generators(0), output_type="latent").images, plain)
    null = pipeline([0], guidance_scale=0.0, generator=generators(0), output_type="latent").images
    assert torch.equal(null, pipeline([2], generator=generators(0), output_type="latent").images)


@pytest.fixture
def digits():
    torch.manual_seed(0)
    model = timm.create_model("dit_mhla_digits", depth=2).eval()
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    names = [str(i) for i in range(10)]
    pipeline = HeadMixDiTPipeline(model, create_scheduler("euler", ObjectiveConfig()), class_names=names)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_images_depend_on_their_own_generator(digits):
    options = {"guidance_scale": 1.5, "num_inference_steps": 5, "output_type": "pt"}
    together = digits([3, 7, 9], generator=generators(0, 1, 2), **options).images
    alone = digits([7], generator=generators(1), **options).images
    torch.testing.assert_close(together[1:2], alone, rtol=0, atol=1e-5)
    assert not torch.allclose(together[0], digits([3], generator=generators(5), **options).images[0], atol=1e-2)


def test_output_types_sizes_and_callback(digits):
    options = {"num_inference_steps": 2, "generator": torch.Generator().manual_seed(0)}
    images = digits(class_labels=[3, 7], **options).images
    assert [(image.size, image.mode) for image in images] == [((8, 8), "L")] * 2
    assert digits(4, output_type="np", **options).images.shape == (1, 8, 8, 1)
    assert digits(torch.tensor([1]), height=16, width=12, output_type="pt", **options).images.shape == (1, 1, 16, 12)
    (latents,) = digits([1], output_type="latent", return_dict=False, **options)
    assert latents.shape == (1, 1, 8, 8)
    steps = []

    def callback(pipeline, step, t, tensors):
        steps.append((step, float(t)))
        return {"latents": torch.full_like(tensors["latents"], 9.0)}

    white = digits([1, 2], callback_on_step_end=callback, output_type="pt", **options).images
    assert [step for step, _ in steps] == [0, 1] and (white == 1).all()
    given = digits([1], latents=torch.zeros(1, 1, 8, 8), num_inference_steps=2, output_type="pt").images
    assert torch.equal(given, digits([1], latents=torch.zeros(1, 1, 8, 8), num_inference_steps=2, output_type="pt")[0])


def test_an_index_imports_no_foreign_modules(digits, tmp_path, monkeypatch):
    ran, folder = tmp_path / "ran", tmp_path / "saved"
    (tmp_path / "foreign_module.py").write_text(f"import pathlib; pathlib.Path({str(ran)!r}).touch()")
    monkeypatch.syspath_prepend(tmp_path)
    digits.save_pretrained(folder)
    (folder / "SHA256SUMS").unlink()
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"][0] = "foreign_module"
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="names the module foreign_module for scheduler, which would be imported"):
        HeadMixDiTPipeline.from_pretrained(folder)
    assert not ran.exists()


def test_save_and_load(digits, tmp_path):
    digits.set_scheduler("unipc")
    digits.save_pretrained(tmp_path)
    loaded = HeadMixDiTPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert isinstance(loaded.scheduler, diffusers.UniPCMultistepScheduler)
    assert loaded.objective == ObjectiveConfig() and loaded.config.class_names == [str(i) for i in range(10)]
    options = {"num_inference_steps": 3, "output_type": "pt", "guidance_scale": 2.0}
    expected = digits([5], generator=generators(4), **options).images
    assert torch.equal(loaded([5], generator=generators(4), **options).images, expected)


def tiny_vae(kind, folder):
    torch.manual_seed(0)
    if kind == "kl":
        vae = diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 8),
            layers_per_block=1,
            norm_num_groups=4,
            latent_channels=4,
            scaling_factor=0.5,
            shift_factor=0.1,
        )
    else:
        blocks = {"block_out_channels": (8, 16), "layers_per_block": (1, 1), "block_types": ("ResBlock", "ResBlock")}
        options = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in blocks.items()}
        multiscales = {"encoder_qkv_multiscales": ((), ()), "decoder_qkv_multiscales": ((), ())}
        acts = {"decoder_norm_types": "rms_norm", "decoder_act_fns": "silu"}
        vae = diffusers.AutoencoderDC(latent_channels=4, **options, **multiscales, **acts)
    vae.save_pretrained(folder / "vae")
    return load_autoencoder(str(folder))


@pytest.mark.parametrize("kind", ["kl", "dc"])
def test_latents_of_an_autoencoder(kind, tmp_path):
    autoencoder = tiny_vae(kind, tmp_path)
    vae = autoencoder.module
    model = timm.create_model("dit_mhla_s_2", input_size=8, depth=1, embed_dim=32, num_heads=2, num_classes=5).eval()
    pipeline = HeadMixDiTPipeline(model, create_scheduler(None, ObjectiveConfig()), vae=vae)
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline([1], num_inference_steps=2).images[0]
    assert image.size == (16, 16) and image.mode == "RGB"
    pipeline.save_pretrained(tmp_path / "pipeline")
    loaded = HeadMixDiTPipeline.from_pretrained(tmp_path / "pipeline")
    assert type(loaded.vae) is type(vae)
    latents = pipeline([1], num_inference_steps=2, generator=generators(0), output_type="latent").images
    decoded = pipeline([1], num_inference_steps=2, generator=generators(0), output_type="pt").images
    torch.testing.assert_close(decoded, autoencoder.decode(latents))
    with pytest.raises(ValueError, match="width must be a multiple of 4 pixels, got 18"):
        pipeline([1], width=18)


def test_wrong_input_is_refused(digits):
    for options, message in (
        ({"class_labels": [3, 11]}, "class label 11 is out of range: the model takes 0 to 9"),
        ({"class_labels": [-1]}, "class label -1 is out of range"),
        ({"class_labels": []}, "class_labels are empty"),
        ({"class_labels": [1.5]}, "class_labels must be a whole number for each image, got 1.5"),
        ({}, "class_labels are missing"),
        ({"class_labels": [1], "num_images": 2}, "1 class_labels, but num_images is 2"),
        ({"class_labels": [1], "num_inference_steps": 0}, "num_inference_steps must be a whole number from 1 to 1000"),
        ({"class_labels": [1], "output_type": "jpg"}, "output_type must be one of"),
        ({"class_labels": [1], "guidance_scale": -1.0}, "guidance scale must be a finite number from 0 to 1000"),
        ({"class_labels": [1], "guidance_interval": (0.5, 0.2)}, "low before high"),
        ({"class_labels": [1], "guidance_channels": "two"}, "guidance channels must be one of"),
        ({"class_labels": [1], "generator": generators(0, 1)}, "2 generators for 1 images"),
        ({"class_labels": [1], "latents": torch.zeros(1, 1, 4, 4)}, r"latents must be of shape \[1, 1, 8, 8\]"),
        ({"class_labels": [1], "callback_on_step_end_tensor_inputs": ("x",)}, "may hold 'latents' only"),
        ({"class_labels": [1], "height": 0}, "height must be a multiple of 2 pixels"),
    ):
        with pytest.raises(ValueError, match=message):
            digits(**options)


@pytest.mark.parametrize(
    ("kind", "scheduler", "message"),
    [
        (
            "flow",
            diffusers.DDIMScheduler(),
            "DDIMScheduler takes prediction_type='epsilon', but the model predicts a flow",
        ),
        ("ddpm", diffusers.FlowMatchEulerDiscreteScheduler(), "takes a flow, but the model predicts 'epsilon'"),
        (
            "ddpm",
            diffusers.DDIMScheduler(prediction_type="v_prediction"),
            "'v_prediction', but the model predicts 'epsilon'",
        ),
        ("ddpm", diffusers.DDIMScheduler(num_train_timesteps=500), "another noise schedule than the model"),
        ("ddpm", diffusers.DDPMScheduler(beta_schedule="scaled_linear"), "another noise schedule than the model"),
    ],
    ids=["no flow", "flow", "v", "steps", "betas"],
)
def test_a_scheduler_that_takes_the_output_for_something_else_is_refused(kind, scheduler, message):
    objective = ObjectiveConfig(kind=kind)
    model = timm.create_model("dit_linear_digits", depth=1).eval()
    pipeline = HeadMixDiTPipeline(model, scheduler, objective=asdict(objective))
    with pytest.raises(ValueError, match=message):
        pipeline([1], num_inference_steps=2)


def test_guidance_needs_a_null_class():
    for options, kind in (({"num_classes": 0}, "unconditional"), ({"class_dropout": 0.0}, "without label dropout")):
        model = timm.create_model("dit_linear_digits", depth=1, **options).eval()
        pipeline = HeadMixDiTPipeline(model, create_scheduler(None, ObjectiveConfig()))
        pipeline.set_progress_bar_config(disable=True)
        labels = None if model.num_classes == 0 else [0]
        with pytest.raises(ValueError, match=f"needs a null class, but the model is .*{kind}"):
            pipeline(labels, guidance_scale=1.5)
        for count in ({"num_images": 1}, {}):
            assert len(pipeline(labels, **count, num_inference_steps=2).images) == 1
    with pytest.raises(ValueError, match="class label 10 is out of range: the model takes 0 to 9"):
        pipeline([10])
    unconditional = HeadMixDiTPipeline(
        timm.create_model("dit_linear_digits", depth=1, num_classes=0), create_scheduler(None, ObjectiveConfig())
    )
    with pytest.raises(ValueError, match="give num_images instead"):
        unconditional([1])
