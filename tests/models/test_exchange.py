"""How models leave Python: torch.jit.trace, ONNX, AOTInductor; torch.export of all image sizes.

That of one size stands with the suites of the models.
"""

import pickle
import subprocess
import sys

import pytest
import timm
import torch

from headmix_vision import swap_attention
from headmix_vision.errors import InputError
from headmix_vision.ops import token_blocks, token_scan, token_window
from headmix_vision.ops.head_in_head.torch_impl import invert_unit_lower


def network(name):
    torch.manual_seed(0)
    model = timm.create_model(name, depth=1, embed_dim=16, num_heads=2).eval()
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def inputs(name, batch):
    images = torch.randn(batch, 1, 8, 8)
    return (images, torch.linspace(1, 900, batch), torch.arange(batch)) if name.startswith("dit") else (images,)


@pytest.mark.parametrize(
    "name", ["deit_mhla_digits", "deit_hih_digits", "dit_mhla_digits", "deit_hih_iha_digits", "dit_mhla_mea_digits"]
)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_trace_takes_any_batch(name):
    token_blocks._cached_tables.cache_clear()  # the first trace of a process finds no tables
    token_scan._cached_tables.cache_clear()
    token_window._cached_mask.cache_clear()
    model = network(name)
    traced = torch.jit.trace(model, inputs(name, 2))
    for batch in (2, 3):
        arguments = inputs(name, batch)
        torch.testing.assert_close(traced(*arguments), model(*arguments))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_is_refused_in_one_line():
    for name in ("deit_softmax_digits", "dit_hih_digits"):
        with pytest.raises(ValueError, match=r"^torch\.jit\.script cannot read .* use torch\.jit\.trace, .*$"):
            torch.jit.script(network(name))


@pytest.mark.parametrize("size", [1, 2, 3, 13, 64])
def test_inverse_of_unit_lower_triangular_matrices(size):
    """Where all keys are alike, powers of L grow as binomials, and the inverse does not."""
    for lower in (torch.randn(2, 3, size, size).tril(-1) / size**0.5, torch.ones(2, 3, size, size).tril(-1)):
        inverse = invert_unit_lower(lower)
        torch.testing.assert_close(
            inverse @ (lower + torch.eye(size)), torch.eye(size).expand_as(lower), rtol=0, atol=1e-5
        )


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_trace_of_a_window_in_some_layers():
    token_window._cached_mask.cache_clear()
    options = {"core_args": {"window": 3}, "global_every": 2, "depth": 2}
    model = timm.create_model("deit_iha_digits", embed_dim=16, **options).eval()
    traced = torch.jit.trace(model, inputs("deit", 2))
    images = inputs("deit", 3)
    torch.testing.assert_close(traced(*images), model(*images))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["deit_mhla_digits", "deit_hih_digits", "deit_iha_digits", "deit_mhla_mea_digits", "deit_hih_iha_digits"]
)
def test_onnx_computes_the_same(name, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, path = network(name), tmp_path / "model.onnx"
    torch.onnx.export(model, inputs(name, 2), path, dynamo=True, dynamic_shapes=({0: torch.export.Dim("batch")},))
    session = runtime.InferenceSession(path)
    (images,) = inputs(name, 3)
    (out,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), model(images), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deit_mhla_digits", "deit_hih_digits"])
def test_a_package_of_aotinductor_runs_without_this_package(name, tmp_path, monkeypatch):
    """On a GPU, too: its kernels are in the package."""
    monkeypatch.setenv("HEADMIX_VISION_COMPILED", "inline")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = network(name).to(device)
    images = torch.randn(5, 1, 8, 8, device=device)
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(model, (images[:2],), dynamic_shapes=({0: batch},))
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    torch.save((images, model(images)), tmp_path / "pair.pt")
    script = (
        "import sys, torch; images, expected = torch.load(sys.argv[2]);"
        "found = torch._inductor.aoti_load_package(sys.argv[1])(images);"
        "torch.testing.assert_close(found, expected); assert 'headmix_vision' not in sys.modules"
    )
    subprocess.run([sys.executable, "-I", "-c", script, package, tmp_path / "pair.pt"], check=True)


IMAGE_SIZES = [(64, 64), (96, 128), (208, 80), (320, 240)]  # blocks of one token, whole blocks, and uneven blocks


def export_of_all_sizes(model, **largest):
    """Export a model of patches of 16 pixels for any batch, height and width."""
    height, width = (16 * torch.export.Dim(name, min=4, **largest) for name in ("height", "width"))
    sizes = {0: torch.export.Dim("batch"), 2: height, 3: width}
    return torch.export.export(model, (torch.rand(2, 3, 128, 112),), dynamic_shapes=(sizes,)).module()


def agree(exported, model, sizes=IMAGE_SIZES):
    for size in sizes:
        batch = torch.rand(3, 3, *size)
        ours, expected = exported(batch), model(batch)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5 * float(expected.detach().abs().max()))


def with_drawn_weights(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize(
    ("core", "options"),
    [
        ("mhla", {}),
        ("mhla", {"core_args": {"causal": True}}),
        ("mhla", {"core_args": {"normalizer": "source_block"}, "block_grid": (3, 2)}),
        ("mhla", {"head_mix": "iha", "head_mix_args": {"pseudo_heads": 4}}),
        ("hih", {}),
        ("hih", {"core_args": {"scans": "cross", "mask": "token", "conv_size": 0}}),
    ],
)
def test_an_exported_program_of_all_image_sizes_gives_the_models_numbers(core, options):
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=5, dynamic_img_size=True, depth=1)
    swap_attention(model, core, **options)
    exported = export_of_all_sizes(with_drawn_weights(model), max=20)
    pickle.loads(pickle.dumps(model))  # not with the symbols of the export
    agree(exported, model)


@pytest.mark.parametrize("name", ["deit_mhla_tiny", "deit_hih_tiny"])
def test_an_exported_program_of_our_models_takes_all_image_sizes(name):
    model = timm.create_model(name, img_size=64, num_classes=5, dynamic_img_size=True, depth=1)
    exported = export_of_all_sizes(with_drawn_weights(model), max=20)
    agree(exported, model)


def test_an_exported_program_needs_no_largest_image_with_mhla_and_one_with_head_in_head():
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=5, dynamic_img_size=True, depth=1)
    swap_attention(model, "mhla")
    agree(export_of_all_sizes(model.eval()), model, [(400, 416)])
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=5, dynamic_img_size=True, depth=1)
    swap_attention(model, "hih")
    with pytest.raises(InputError, match=r"give max to the torch\.export\.Dim of height"):
        export_of_all_sizes(model.eval())
