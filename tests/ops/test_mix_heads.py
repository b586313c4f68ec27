"""Head mixing: agreement of the implementations, and what the definition says in float64."""

import pytest
import torch

from headmix_vision.ops import mix_heads

from .helpers import make_mix_heads_inputs, mix_heads_call, relative_error, run

IMPLS = ("reference", "torch")


@pytest.mark.parametrize(
    "sizes", [(3, 2, 15, 3, 6, 24), (1, 2, 1, 6, 3, 8), (2, 1, 197, 1, 2, 5), (2, 3, 7, 4, 4, 1)], ids=str
)
def test_torch_agrees_with_the_reference_in_values_and_gradients(sizes):
    inputs, d_outs = make_mix_heads_inputs(*sizes)
    ours, expected = (run(mix_heads_call(impl), inputs, d_outs) for impl in ("torch", "reference"))
    for a, b in zip(ours, expected, strict=True):
        assert relative_error(a, b) < 1e-12


@pytest.mark.parametrize("impl", IMPLS)
def test_definition(impl):
    (*inputs, weights), _ = make_mix_heads_inputs(2, 2, 3, 4, 5, 6)
    outs = mix_heads(inputs, weights, impl=impl)
    for c, (x, out) in enumerate(zip(inputs, outs, strict=True)):
        assert out.shape == (2, 3, 5, 6) and out.is_contiguous()
        for g in range(5):
            expected = sum(weights[c, g, h] * x[:, :, h] for h in range(4))
            assert relative_error(out[:, :, g], expected) < 1e-12


@pytest.mark.parametrize("impl", IMPLS)
def test_a_second_mix_is_a_mix_by_the_product(impl):
    (x, weights), _ = make_mix_heads_inputs(1, 2, 5, 3, 6, 4)
    collapse = torch.randn(1, 3, 6, dtype=torch.float64)
    twice = mix_heads(mix_heads([x], weights, impl=impl), collapse, impl=impl)[0]
    assert relative_error(twice, mix_heads([x], collapse @ weights, impl=impl)[0]) < 1e-12


@pytest.mark.parametrize("impl", IMPLS)
def test_permutations_and_sums_of_heads(impl):
    (x, _), _ = make_mix_heads_inputs(1, 2, 5, 4, 4, 3)
    order = torch.tensor([2, 0, 3, 1])
    permutation = torch.eye(4, dtype=x.dtype)[order][None]
    assert torch.equal(mix_heads([x], permutation, impl=impl)[0], x[:, :, order])
    total = mix_heads([x], torch.ones(1, 1, 4, dtype=x.dtype), impl=impl)[0]
    assert relative_error(total, x.sum(2, keepdim=True)) < 1e-12


def test_gradcheck():
    inputs, _ = make_mix_heads_inputs(2, 1, 2, 2, 3, 2)
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(mix_heads_call("torch"), leaves)
    assert torch.autograd.gradgradcheck(mix_heads_call("torch"), leaves)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_accumulates_in_float32(dtype, impl):
    """Only the inputs and the result are rounded, not the weights nor the sums."""
    (x, weights), _ = make_mix_heads_inputs(1, 2, 15, 32, 8, 16)
    x, weights = x.to(dtype), weights.float()
    expected = mix_heads([x.double()], weights.double(), impl="reference")[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (out,) = mix_heads([x], weights, impl=impl)
    assert out.dtype is dtype
    assert ((out.double() - expected).abs() <= 0.6 * torch.finfo(dtype).eps * expected.abs() + 1e-5).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_views_of_a_packed_projection(impl):
    packed = torch.randn(2, 6, 3, 4, 8, dtype=torch.float64)
    weights = torch.randn(3, 4, 8, dtype=torch.float64).mT
    d_outs = [torch.randn(2, 8, 6, 8, dtype=torch.float64).transpose(1, 2) for _ in range(3)]
    views = [*packed.unbind(2), weights]
    ours = run(mix_heads_call(impl), views, d_outs)
    expected = run(mix_heads_call("reference"), [x.contiguous() for x in views], [x.contiguous() for x in d_outs])
    for a, b in zip(ours, expected, strict=True):
        assert relative_error(a, b) < 1e-12


def test_transformations_of_torch_func():
    (x, weights), _ = make_mix_heads_inputs(1, 2, 3, 4, 5, 6)
    (tangent, weight_tangent), _ = make_mix_heads_inputs(1, 2, 3, 4, 5, 6, seed=1)

    def mix(x, weights):
        return mix_heads([x], weights)[0]

    out, jvp = torch.func.jvp(mix, (x, weights), (tangent, weight_tangent))
    assert relative_error(jvp, mix(tangent, weights) + mix(x, weight_tangent)) < 1e-12
    batched = torch.func.vmap(mix, (0, None))(torch.stack([x, tangent]), weights)
    assert relative_error(batched, torch.stack([out, mix(tangent, weights)])) < 1e-12


@pytest.mark.parametrize("impl", IMPLS)
def test_compiles_as_one_graph_with_any_batch(impl):
    compiled = torch.compile(mix_heads_call(impl), fullgraph=True, backend="aot_eager", dynamic=None)
    for batch in (2, 3):
        inputs, d_outs = make_mix_heads_inputs(2, batch, 3, 2, 4, 5)
        ours, expected = (run(f, inputs, d_outs) for f in (compiled, mix_heads_call("reference")))
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b)


X, W = torch.zeros(2, 3, 4, 8), torch.zeros(2, 6, 4)


@pytest.mark.parametrize(
    ("inputs", "weights", "message"),
    [
        ((), W, "inputs must be a tuple of at least one tensor, got none"),
        (X, W, "inputs must be a tuple of at least one tensor, got Tensor"),
        ((X, [1.0]), W, r"inputs\[1\] must be a tensor, got list"),
        ((X, X), [1.0], "weights must be a tensor, got list"),
        ((X[0], X), W, r"inputs\[0\] must be \[B, N, H, D\].* got shape \(3, 4, 8\)"),
        ((X[:, :, :0],) * 2, W[..., :0], r"inputs\[0\] must be .* with at least one head"),
        ((X[..., :0],) * 2, W, r"inputs\[0\] must be .* head dim of at least 1"),
        ((X, X[:, :2]), W, r"inputs\[1\] must have the shape of inputs\[0\], \(2, 3, 4, 8\), got \(2, 2, 4, 8\)"),
        ((X,), W, r"weights must be \[C, G, H\] with C = 1 inputs and H = 4 heads, got shape \(2, 6, 4\)"),
        ((X, X), W.mT, r"weights must be \[C, G, H\] with C = 2 inputs and H = 4 heads"),
        ((X, X), W[:, :0], r"weights must be \[C, G, H\]"),
        ((X, X), W[0], r"weights must be \[C, G, H\]"),
        ((X.long(), X.long()), W, r"inputs\[0\] must have a floating type"),
        ((X, X), W.long(), "weights must have a floating type"),
        ((X, X.double()), W, r"inputs\[1\] has type torch.float64, inputs\[0\] torch.float32"),
        ((X, X.to("meta")), W, r"inputs\[1\] is on meta, inputs\[0\] on cpu"),
        ((X, X), W.to("meta"), r"weights is on meta"),
    ],
)
@pytest.mark.parametrize("impl", [*IMPLS, "triton", "auto"])
def test_wrong_arguments_are_refused_by_name(inputs, weights, message, impl):
    with pytest.raises(ValueError, match=message):
        mix_heads(inputs, weights, impl=impl)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"impl must be one of .*, got 'cuda'"):
        mix_heads((X, X), W, impl="cuda")
