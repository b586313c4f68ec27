"""Inputs, error measures and error budgets of the op tests."""

import torch
import torch.nn.functional as F

from headmix_vision.ops import mhla
from headmix_vision.ops.feature_maps import apply_feature_map


def make_inputs(blocks, batch=2, heads=3, dim=8, value_dim=5, per_head=False, dtype=torch.float64, seed=0):
    """q, k, v, mixing; the same numbers whatever the type they are rounded to."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, blocks.num_tokens, heads)
    q, k = torch.randn(2, *shape, dim, generator=generator, dtype=dtype).unbind()
    v = torch.randn(*shape, value_dim, generator=generator, dtype=dtype)
    mixing_shape = (*((heads,) if per_head else ()), blocks.num_blocks, blocks.num_blocks)
    return q, k, v, torch.rand(mixing_shape, generator=generator, dtype=dtype)


def relative_error(x, reference):
    return ((x - reference).norm() / reference.norm().clamp(min=1e-30)).item()


def run(op, inputs, d_out):
    """Output and gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = op(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype))


def eager_pairwise(q, k, v, mixing, blocks, normalizer, feature_map, eps=1e-6):
    """The method token by token, every step in the type of the inputs."""
    q, k, mixing = apply_feature_map(q, feature_map, eps), apply_feature_map(k, feature_map, eps), mixing.to(q.dtype)
    block = blocks.tables(q).block_of_token
    weights = mixing[..., block[:, None], block[None, :]] * torch.einsum("bihd,bjhd->bhij", q, k)
    out = torch.einsum("bhij,bjhe->bihe", weights, v)
    return out / weights.sum(-1).transpose(1, 2)[..., None] if normalizer == "paper" else out


def eager_summary(q, k, v, mixing, blocks, normalizer, feature_map, eps=1e-6):
    """The method by block summaries, every step in the type of the inputs."""
    tables = blocks.tables(q)
    q, k, mixing = apply_feature_map(q, feature_map, eps), apply_feature_map(k, feature_map, eps), mixing.to(q.dtype)
    present = (tables.tokens >= 0)[:, :, None, None]
    q, k, v = (x[:, tables.tokens.clamp(min=0)] * present for x in (q, k, F.pad(v, (0, 1), value=1.0)))
    mixing = mixing.expand(q.shape[3], *mixing.shape[-2:])
    mixed = torch.einsum("hij,bjhde->bihde", mixing, torch.einsum("bjnhd,bjnhe->bjhde", k, v))
    out = torch.einsum("binhd,bihde->binhe", q, mixed).flatten(1, 2)[:, tables.slot_of_token]
    return out[..., :-1] / out[..., -1:] if normalizer == "paper" else out[..., :-1]


EAGER = {"triton_pairwise": eager_pairwise, "triton_summary": eager_summary}


def assert_within_budget(impl, ours, inputs, d_out, blocks, normalizer="paper", feature_map="relu"):
    """Errors against float64 at most those of the eager form in the type of the inputs: twice, gradients three times.

    Both the mean and the largest error of the output and of each gradient count.
    """
    options = {"normalizer": normalizer, "feature_map": feature_map}
    exact = run(lambda *x: mhla(*x, blocks, impl="torch", **options), [x.double() for x in inputs], d_out)
    eager = run(lambda *x: EAGER[impl](*x, blocks, **options), inputs, d_out)
    for name, x, e, reference in zip(("out", "dq", "dk", "dv", "dmixing"), ours, eager, exact, strict=True):
        factor = 2 if name == "out" else 3
        error, budget = (x.double() - reference).abs(), (e.double() - reference).abs()
        for kind, measure in (("mean", torch.mean), ("max", torch.max)):
            message = f"{kind} error of {name}: {measure(error):.2e}, of the eager form {measure(budget):.2e}"
            assert measure(error) <= factor * measure(budget), message
