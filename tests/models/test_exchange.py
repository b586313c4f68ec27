"""How models leave Python: torch.jit.trace, ONNX, AOTInductor; torch.export stands with the suites of the models."""

import subprocess
import sys

import pytest
import timm
import torch

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
