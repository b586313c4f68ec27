"""Features of diffusers on our models and pipelines: the properties that its own model tests check."""

import subprocess
import sys
from importlib.util import find_spec

import diffusers
import pytest
import timm
import torch
from diffusers import AutoModel, DiffusionPipeline, FirstBlockCacheConfig
from diffusers.callbacks import PipelineCallback, SDCFGCutoffCallback
from diffusers.hooks import FasterCacheConfig

from headmix_vision.diffusion import HeadMixDiTPipeline, HeadMixVideoDiTPipeline, ObjectiveConfig, create_scheduler
from headmix_vision.models import HeadMixDiT, HeadMixVideoDiT
from headmix_vision.runs.pipelines import load_pipeline

SIZES = {"embed_dim": 32, "num_heads": 2, "num_classes": 5, "cpe": True, "output_gate": True, "qk_norm": True}
IMAGE = {"input_size": 8, "block_grid": (2, 2)}
VIDEO = {"input_size": (4, 8, 8), "block_grid": (2, 2, 2)}
FAMILIES = ("dit", "dit_video")
ATTENTIONS = [f"{core}{mix}" for core in ("softmax", "linear", "mhla", "hih") for mix in ("", "_iha", "_mea")]


def create(family="dit", attention="mhla", depth=3, **kwargs):
    """A small model whose parameters are all filled: at its start it would return zeros."""
    torch.manual_seed(0)
    sizes = {**(IMAGE if family == "dit" else VIDEO), **SIZES, "depth": depth, **kwargs}
    model = timm.create_model(f"{family}_{attention}_s_2", **sizes).eval()
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def batch(model):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, *model.input_size, generator=generator)
    return x, torch.tensor([100.0, 900.0]), torch.tensor([0, 4])


def pipeline(family="dit", **kwargs):
    cls = HeadMixDiTPipeline if family == "dit" else HeadMixVideoDiTPipeline
    pipe = cls(create(family, **kwargs), create_scheduler("euler", ObjectiveConfig()))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, steps=6, **options):
    options = {"guidance_scale": 2.0, "output_type": "latent", **options}
    generator = torch.Generator().manual_seed(2)
    return pipe([0, 4], num_inference_steps=steps, generator=generator, return_dict=False, **options)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_output_as_the_caller_wants_it(family):
    model = create(family)
    with torch.no_grad():
        plain = model(*batch(model))
        assert torch.equal(model(*batch(model), return_dict=True).sample, plain)
        (first,) = model(*batch(model), return_dict=False)
    assert torch.equal(first, plain)


@pytest.mark.parametrize(
    ("family", "attention"), [*(("dit", attention) for attention in ATTENTIONS), ("dit_video", "mhla")]
)
def test_weights_stored_in_eight_bits(family, attention):
    """Linear layers of the blocks are kept as fp8; the output equals the output of weights rounded to fp8."""
    model, rounded = create(family, attention), create(family, attention)
    kinds = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    cast = {name for name, module in model.named_modules() if name.startswith("blocks.") and isinstance(module, kinds)}
    cast = {name for name in cast if "adaLN" not in name}
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    stored = {name for name, p in model.named_parameters() if p.dtype == torch.float8_e4m3fn}
    assert {name.rpartition(".")[0] for name in stored} == cast
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if name in stored:
                parameter.copy_(parameter.to(torch.float8_e4m3fn))
        assert model.dtype == torch.float32
        expected = rounded(*batch(rounded))
        torch.testing.assert_close(model(*batch(model)), expected, rtol=1e-4, atol=1e-5)
    assert {p.dtype for n, p in model.named_parameters() if n in stored} == {torch.float8_e4m3fn}


@pytest.mark.parametrize("family", FAMILIES)
def test_pipelines_draw_with_weights_in_eight_bits(family):
    pipe = pipeline(family)
    pipe.transformer.to(torch.bfloat16)
    plain = draw(pipe)
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    assert 0 < (draw(pipe) - plain).abs().mean() < 0.2 * plain.abs().mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_compiled_alone(family):
    model, plain = create(family), create(family)
    model.compile_repeated_blocks(backend="eager", fullgraph=True)
    assert [name for name, module in model.named_modules() if module._compiled_call_impl] == [
        f"blocks.{i}" for i in range(3)
    ]
    with torch.no_grad():
        torch.testing.assert_close(model(*batch(model)), plain(*batch(plain)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("interval", [(0.0, 1.0), (0.3, 0.8)])
def test_first_block_cache(family, interval):
    """A threshold of 0 computes all, a large one the first step alone; each call begins anew."""
    pipe = pipeline(family)
    calls = []
    pipe.transformer.blocks[1].mlp.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    plain = draw(pipe, guidance_interval=interval)
    counts = [*calls]
    assert len(counts) == 6 and set(counts) == ({4} if interval[0] == 0 else {2, 4})
    for threshold, expected in ((-1.0, counts), (1e9, list(dict.fromkeys(counts)))):
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
        for _ in range(2):
            calls.clear()
            drawn = draw(pipe, guidance_interval=interval)
            assert calls == expected
            assert torch.equal(drawn, plain) == (threshold < 0)
        pipe.transformer.disable_cache()
        calls.clear()
        assert torch.equal(draw(pipe, guidance_interval=interval), plain) and calls == counts


def test_what_caches_and_backends_cannot_do_is_refused():
    model = create()
    with pytest.raises(ValueError, match="HeadMixDiT takes a FirstBlockCacheConfig, got FasterCacheConfig"):
        model.enable_cache(FasterCacheConfig())
    with pytest.raises(ValueError, match="does not apply to a model with one block"):
        create(depth=1).enable_cache(FirstBlockCacheConfig())
    rows = create("dit_video", core_args={"causal": "rows"}, cpe=False)
    with pytest.raises(ValueError, match="does not apply to a model with causal='rows'"):
        rows.enable_cache(FirstBlockCacheConfig())
    assert not model.is_cache_enabled and not rows.is_cache_enabled
    for family in FAMILIES:
        with pytest.raises(ValueError, match=r"set_attention_backend\('flash'\) does not act on HeadMix.*sdpa_kernel"):
            create(family).set_attention_backend("flash")


@pytest.mark.parametrize("family", FAMILIES)
def test_callbacks_read_what_pipelines_of_diffusers_tell(family):
    pipe, seen = pipeline(family), []

    class Callback(PipelineCallback):
        tensor_inputs = ("latents",)

        def callback_fn(self, pipeline, step_index, timestep, callback_kwargs):
            cutoff = int(pipeline.num_timesteps * self.config.cutoff_step_ratio)
            seen.append(
                (step_index == cutoff, pipeline.num_timesteps, pipeline._guidance_scale, pipeline.guidance_scale)
            )
            return callback_kwargs

    assert torch.equal(draw(pipe, callback_on_step_end=Callback(0.5)), draw(pipe))
    assert seen == [(i == 3, 6, 2.0, 2.0) for i in range(6)]
    pipe.set_scheduler("heun")
    seen.clear()
    draw(pipe, steps=4, callback_on_step_end=Callback(0.5))
    assert {entry[1] for entry in seen} == {len(seen)} == {len(pipe.scheduler.timesteps)}


def test_callbacks_that_would_not_act_are_refused():
    def stop_guidance(pipeline, step, time, tensors):
        pipeline._guidance_scale = 0.0
        return tensors

    with pytest.raises(
        ValueError, match=r"a callback set _guidance_scale to 0\.0, which does not act: give guidance_int"
    ):
        draw(pipeline(), callback_on_step_end=stop_guidance)
    with pytest.raises(ValueError, match=r"may hold 'latents' only, got \['prompt_embeds'\]"):
        draw(pipeline(), callback_on_step_end=SDCFGCutoffCallback(cutoff_step_ratio=0.5))


@pytest.mark.parametrize("family", FAMILIES)
def test_classes_are_found_by_their_names(family, tmp_path):
    pipe = pipeline(family)
    pipe.save_pretrained(tmp_path)
    loaded = DiffusionPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded) is type(pipe) and torch.equal(draw(loaded), draw(pipe))
    for found in (
        AutoModel.from_pretrained(str(tmp_path), subfolder="transformer"),
        AutoModel.from_pretrained(str(tmp_path / "transformer")),
    ):
        assert type(found) is type(pipe.transformer)
        assert all(torch.equal(p, q) for p, q in zip(found.parameters(), pipe.transformer.parameters(), strict=True))
    classes = (HeadMixDiT, HeadMixVideoDiT, HeadMixDiTPipeline, HeadMixVideoDiTPipeline)
    assert all(getattr(diffusers, cls.__name__) is cls for cls in classes)


def test_clips_saved_under_an_earlier_name_draw_the_same(tmp_path):
    """The index named the class and module of a network for clips alone."""
    pipe = pipeline("dit_video")
    pipe.save_pretrained(tmp_path)
    for name in ("model_index.json", "transformer/config.json"):
        text = (tmp_path / name).read_text()
        for ours, earlier in (("HeadMixDiT", "HeadMixVideoDiT"), (".headmix_dit", ".headmix_video_dit")):
            text = text.replace(f"{ours}Pipeline", f"{earlier}Pipeline").replace(f'{ours}"', f'{earlier}"')
        (tmp_path / name).write_text(text)
    assert '"headmix_vision.models.headmix_video_dit"' in (tmp_path / "model_index.json").read_text()
    (tmp_path / "SHA256SUMS").unlink()
    for loaded in (DiffusionPipeline.from_pretrained(tmp_path), load_pipeline(tmp_path)[0]):
        loaded.set_progress_bar_config(disable=True)
        assert type(loaded) is type(pipe) and torch.equal(draw(loaded), draw(pipe))


def test_one_import_is_enough_to_be_found(tmp_path):
    pipeline().save_pretrained(tmp_path)
    code = (
        "import headmix_vision.diffusion; from diffusers import AutoModel, DiffusionPipeline;"
        f"print(type(DiffusionPipeline.from_pretrained({str(tmp_path)!r})).__name__,"
        f" type(AutoModel.from_pretrained({str(tmp_path / 'transformer')!r})).__name__)"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.split() == ["HeadMixDiTPipeline", "HeadMixDiT"]


@pytest.mark.skipif(find_spec("peft") is None, reason="needs the package peft")
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters(family, attention, tmp_path):
    """An adapter starts as nothing, trains alone, and is saved, merged and left out again."""
    from peft import LoraConfig

    model = create(family, attention)
    with torch.no_grad():
        plain = model(*batch(model))
    model.add_adapter(LoraConfig(r=2, target_modules=["attn.qkv", "attn.proj", "mlp.fc1"]))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 18 and all(".lora_" in name for name in trained)
    torch.testing.assert_close(model(*batch(model)), plain)
    model(*batch(model)).square().sum().backward()
    assert all((p.grad is not None) == (name in trained) for name, p in model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in trained:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted = model(*batch(model))
        assert (adapted - plain).abs().max() > 1e-3
        model.save_lora_adapter(tmp_path)
        again = create(family, attention)
        again.load_lora_adapter(tmp_path, prefix=None, weight_name="pytorch_lora_weights.safetensors")
        torch.testing.assert_close(again(*batch(again)), adapted)
        model.disable_adapters()
        torch.testing.assert_close(model(*batch(model)), plain)
        model.enable_adapters()
        model.fuse_lora()
        torch.testing.assert_close(model(*batch(model)), adapted, rtol=1e-3, atol=1e-4)
