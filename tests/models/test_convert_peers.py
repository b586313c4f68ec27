"""Weights of SiT, of LightningDiT and of the released MHLA: each computes what its own code does, or is refused."""

import argparse
import itertools

import pytest
import timm
import torch
import torch.nn.functional as F
from test_dit import batch, create, official_forward, official_shapes, random_official

from headmix_vision.diffusion import HeadMixDiTPipeline, ObjectiveConfig, create_scheduler
from headmix_vision.models.convert import convert_state_dict
from headmix_vision.models.convert_dit import convert_dit_state_dict, read_dit_weights
from headmix_vision.runs.networks import create_generator


def random_sit(learn_sigma=True):
    """Weights as SiT's code trains them: the second half of the channels stays zero, or is not there."""
    state = random_official()
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        first, second = state[name].unflatten(0, (4, 2, 4)).unbind(1)
        halves = [first, torch.zeros_like(second)] if learn_sigma else [first]
        state[name] = torch.stack(halves, 1).flatten(0, 2)
    return state


def sit_velocity(state, x, t, y):
    """SiT's own prediction at its time, 0 for noise and 1 for data."""
    return official_forward(state, x, t, y, 2, 2)[:, :4]


def convert(state, model, **options):
    model.load_state_dict(convert_dit_state_dict(state, model, **options).state_dict)
    return model.eval()


@pytest.mark.parametrize("learn_sigma", [True, False])
def test_sit_predicts_its_velocity_at_its_time(learn_sigma):
    state = random_sit(learn_sigma)
    model = convert(state, create("dit_softmax_s_2", sit_time=True))
    x, t, y = batch()
    torch.testing.assert_close(-model(x, t, y), sit_velocity(state, x, 1 - t / 1000, y), rtol=1e-4, atol=1e-4)


def test_sit_draws_what_its_own_sampler_draws():
    """Euler from noise to data with guidance in three channels, as SiT's sampler goes, by the pipeline."""
    state, labels, scale = random_sit(), torch.tensor([0, 4]), 3.0
    model = convert(state, create("dit_softmax_s_2", sit_time=True))
    pipe = HeadMixDiTPipeline(model, create_scheduler("euler", ObjectiveConfig()))
    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    options = {"guidance_scale": scale, "guidance_channels": "first_three", "output_type": "latent"}
    drawn = pipe(labels.tolist(), num_inference_steps=8, latents=noise, **options).images
    x, times = noise, [1 - float(level) for level in pipe.scheduler.sigmas]
    assert times[0] == 0 and times[-1] == 1 and times == sorted(times)
    for t, after in itertools.pairwise(times):
        both = sit_velocity(state, torch.cat([x, x]), torch.full((4,), t), torch.tensor([0, 4, 5, 5]))
        with_class, without = both.chunk(2)
        guided = without + scale * (with_class - without)
        x = x + (after - t) * torch.cat([guided[:, :3], with_class[:, 3:]], 1)
    torch.testing.assert_close(drawn, x, rtol=1e-3, atol=1e-3)


def test_sit_on_clips_and_in_another_core():
    state = random_sit()
    video = create("dit_video_softmax_s_2", input_size=(4, 8, 8), block_grid=(2, 2, 2), sit_time=True)
    x, t, y = batch()
    still = convert(state, video)(x[:, :, None], t, y)[:, :, 0]
    torch.testing.assert_close(-still, sit_velocity(state, x, 1 - t / 1000, y), rtol=1e-4, atol=1e-4)
    converted = convert_dit_state_dict(state, create("dit_mhla_s_2", sit_time=True))
    assert converted.new_parameters == [f"blocks.{i}.attn.core.mixing.weight" for i in range(2)]


SIT = r"^the weights are those of SiT: make the model with sit_time=True and without learned_variance\.$"


def test_sit_and_dit_are_told_apart_by_the_variance():
    for options in ({}, {"learned_variance": True}, {"sit_time": True, "learned_variance": True}):
        with pytest.raises(ValueError, match=SIT):
            convert_dit_state_dict(random_sit(), create("dit_softmax_s_2", **options))
    with pytest.raises(ValueError, match="those of DiT: make the model with sit_time=False and with learned_variance"):
        convert_dit_state_dict(random_official(), create("dit_softmax_s_2", sit_time=True))
    halved, model = random_sit(learn_sigma=False), create("dit_softmax_s_2")
    with pytest.raises(ValueError, match=r"names of DiT and of SiT, and no variance .*sit_time=True .* sit=False"):
        convert_dit_state_dict(halved, model)
    with pytest.raises(ValueError, match=SIT):
        convert_dit_state_dict(halved, model, sit=True)
    x, t, y = batch()
    expected = official_forward(halved, x, t, y, 2, 2)
    torch.testing.assert_close(convert(halved, model, sit=False)(x, t, y), expected, rtol=1e-4, atol=1e-4)
    untrained = {name: value * ("final_layer.linear" not in name) for name, value in random_official().items()}
    convert(untrained, create("dit_softmax_s_2", learned_variance=True))


def test_files_of_sit(tmp_path):
    """A file's name and its arguments of training tell what its numbers may not."""
    for name, saved in (
        ("SiT-XL-2-256x256.pt", random_official()),
        (
            "0050000.pt",
            {"ema": random_official(), "args": argparse.Namespace(path_type="Linear", prediction="velocity")},
        ),
    ):
        torch.save(saved, tmp_path / name)
        with pytest.raises(ValueError, match=SIT):
            convert_dit_state_dict(read_dit_weights(tmp_path / name), create("dit_softmax_s_2", learned_variance=True))
        model_args = {"depth": 2, "embed_dim": 32, "num_heads": 2, "sit_time": True}
        model = create_generator("dit_softmax_s_2", 5, 8, model_args, str(tmp_path / name))
        assert torch.equal(model.blocks[0].mlp.fc1.bias, random_official()["blocks.0.mlp.fc1.bias"])
    for path_type, prediction in (("GVP", "velocity"), ("Linear", "noise")):
        arguments = argparse.Namespace(path_type=path_type, prediction=prediction)
        torch.save({"ema": random_sit(), "args": arguments}, tmp_path / "0050000.pt")
        with pytest.raises(ValueError, match=f"path_type='{path_type}' and prediction='{prediction}': only those of"):
            read_dit_weights(tmp_path / "0050000.pt")
    torch.save(random_official(), tmp_path / "website.pt")
    convert(read_dit_weights(tmp_path / "website.pt"), create("dit_softmax_s_2", learned_variance=True))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_prefixes_of_wrappers_are_left_out(prefix):
    state = random_official()
    wrapped = {"ema": {f"{prefix}{name}": value for name, value in state.items()}}
    model, same = (create("dit_softmax_s_2", learned_variance=True) for _ in range(2))
    for name, value in convert(wrapped, model).state_dict().items():
        assert torch.equal(value, convert(state, same).state_dict()[name])


def test_lightning_dit_is_refused_by_name():
    """Names and shapes as its class makes them with the options of its published models."""
    shapes = official_shapes(32, 2, 16, classes=5)
    state = {name: torch.randn(shape) for name, shape in shapes.items() if ".mlp.fc" not in name}
    state |= {f"feat_rope.freqs_{part}": torch.randn(16, 16) for part in ("cos", "sin")}
    for i in range(2):
        state |= {f"blocks.{i}.norm{n}.weight": torch.ones(32) for n in (1, 2)}
        state |= {f"blocks.{i}.mlp.w12.weight": torch.randn(170, 32), f"blocks.{i}.mlp.w3.weight": torch.randn(32, 85)}
    message = (
        "weights of LightningDiT, with RMSNorm with weights, SwiGLU, rotary positions: no model here has these parts"
    )
    with pytest.raises(ValueError, match=message):
        convert_dit_state_dict({"ema": state}, create("dit_softmax_s_2", learned_variance=True))


class ReleasedMHLA(torch.nn.Module):
    """The layer of the released code by its published definition, in raster order; M blocks of side x side tokens."""

    def __init__(self, dim, heads, grid, blocks, extent, qk_norm, bias):
        super().__init__()
        self.heads, self.grid, self.blocks = heads, grid, blocks
        self.norm = torch.nn.LayerNorm(dim)
        self.to_qkv = torch.nn.Linear(dim, 3 * dim, bias=bias)
        self.q_norm, self.k_norm = (torch.nn.RMSNorm(dim) if qk_norm else torch.nn.Identity() for _ in range(2))
        self.lepe = torch.nn.Conv2d(dim, dim, extent, padding=extent // 2, groups=dim)
        self.piece_attn = torch.nn.Module()
        self.piece_attn.conv = torch.nn.Conv2d(blocks**2, blocks**2, 1, bias=False)
        self.to_out = torch.nn.Sequential(torch.nn.Linear(dim, dim), torch.nn.Dropout(0.1))

    def forward(self, x, **_):
        side, part = self.grid, self.grid // self.blocks
        q, k, v = self.to_qkv(self.norm(x)).chunk(3, -1)
        lepe = self.lepe(v.mT.unflatten(2, (side, side))).flatten(2).mT
        q, k = F.relu(self.q_norm(q)) + 1e-6, F.relu(self.k_norm(k)) + 1e-6

        def in_blocks(y):  # [B, H, M, tokens of a block, D]
            y = y.unflatten(2, (self.heads, -1)).unflatten(1, (self.blocks, part, self.blocks, part))
            return y.permute(0, 5, 1, 3, 2, 4, 6).flatten(4, 5).flatten(2, 3)

        q, k, v = map(in_blocks, (q, k, v))
        mixing = self.piece_attn.conv.weight[:, :, 0, 0]
        memory = torch.einsum("ij,bhjtd,bhjte->bhide", mixing, k, v)
        denominator = torch.einsum("ij,bhjtd,bhjsd->bhits", mixing, q, k).sum(-1, keepdim=True) + 1e-6
        out = q @ memory / denominator
        out = out.unflatten(2, (self.blocks, self.blocks)).unflatten(4, (part, part))
        out = out.permute(0, 2, 4, 3, 5, 1, 6).flatten(1, 4).flatten(2)
        return self.to_out(out + lepe)


RELEASED = {"core_args": {"normalizer": "source_block", "mixing_clip": False}, "input_norm": True}


def released(model, extent, qk_norm, bias, grid=4, blocks=2):
    """A model with the released layers in the place of ours, and weights as training leaves them."""
    torch.manual_seed(0)
    for block in model.blocks:
        dim = block.attn.proj.in_features
        block.attn = ReleasedMHLA(dim, block.attn.num_heads, grid, blocks, extent, qk_norm, bias)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
            if "piece_attn" in name:  # mostly positive, some not
                parameter.copy_(torch.rand_like(parameter) - 0.02)
                parameter[0, 1] = -0.01
    return model.double().eval()


def classifier(**kwargs):
    return timm.create_model("deit_mhla_tiny", img_size=64, depth=2, num_classes=7, block_grid=(2, 2), **kwargs)


def test_released_deit_computes_what_its_own_code_computes():
    source = released(classifier(), extent=5, qk_norm=True, bias=False)
    options = {**RELEASED, "lepe": 5, "qk_norm": True, "qkv_bias": False}
    model = classifier(**options)
    conversion = convert_state_dict({"state_dict": source.state_dict()}, model)
    assert (conversion.new_parameters, conversion.unused) == ([], [])
    model.load_state_dict(conversion.state_dict)
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    for norm in (module for block in source.blocks for module in (block.attn.q_norm, block.attn.k_norm)):
        norm.eps = 1e-6  # theirs depends on the type of the numbers
    torch.testing.assert_close(model.double().eval()(images), source(images), rtol=1e-9, atol=1e-9)
    larger = timm.create_model("deit_mhla_tiny", img_size=128, depth=2, num_classes=7, block_grid=(2, 2), **options)
    larger.load_state_dict(convert_state_dict(source.state_dict(), larger).state_dict)
    assert larger(images.float().repeat(1, 1, 2, 2)).shape == (2, 7)


def test_released_dit_computes_what_its_own_code_computes():
    def generator(**kwargs):
        return create("dit_mhla_s_2", learned_variance=True, **kwargs)

    source = released(generator(), extent=3, qk_norm=False, bias=True)
    model = generator(**RELEASED, lepe=3)
    state = {**source.state_dict(), "pos_embed": random_official()["pos_embed"]}
    conversion = convert_dit_state_dict({"ema": state}, model)
    assert (conversion.new_parameters, conversion.unused) == ([], [])
    model.load_state_dict(conversion.state_dict)
    x, t, y = batch()
    torch.testing.assert_close(model.double().eval()(x.double(), t, y), source(x.double(), t, y), rtol=1e-7, atol=1e-7)


def test_released_weights_name_the_arguments_that_their_layers_need():
    state = released(classifier(), extent=5, qk_norm=True, bias=False).state_dict()
    message = (
        r"^blocks\.0\.attn of the released MHLA is another layer than the model's: make the model with core='mhla',"
        r" lepe=5, input_norm=True, qk_norm=True, qkv_bias=False, core_args=\{'normalizer': 'source_block',"
        r" 'mixing_clip': False\} and without a head mix, cpe, output_norm and output_gate\.$"
    )
    full = {**RELEASED, "lepe": 5, "qk_norm": True, "qkv_bias": False}
    for change in (
        {"lepe": 3},
        {"input_norm": False},
        {"qk_norm": False},
        {"qkv_bias": True},
        {"cpe": True},
        {"core_args": {"mixing_clip": False}},
        {"core_args": {"normalizer": "source_block"}},
        {"core": "linear", "core_args": {}},
    ):
        with pytest.raises(ValueError, match=message):
            convert_state_dict(state, classifier(**full | change))
    with pytest.raises(ValueError, match=r"released MHLA have blocks\.0\.dw_conv\.weight, for which no layer here"):
        convert_state_dict({**state, "blocks.0.dw_conv.weight": torch.ones(1)}, classifier(**full))
