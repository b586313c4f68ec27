"""Inputs, error measures and error budgets of the op tests."""

import torch
import torch.nn.functional as F

from headmix_vision import ops
from headmix_vision.ops import grid_conv, mhla, mix_heads
from headmix_vision.ops.mhla.torch_impl import apply_feature_map

HEAD_IN_HEAD_NAMES = ("q", "k", "v", "beta", "log_decay", "mask", "initial_state")


def _with_positional_options(op, num_tensors):
    """The op with its initial state among the inputs, so that tests can treat all tensors alike."""

    def call(*inputs, **options):
        options |= zip(("initial_state", "output_final_state"), inputs[num_tensors:], strict=False)
        return op(*inputs[:num_tensors], **options)

    return call


head_in_head = _with_positional_options(ops.head_in_head, 6)
head_in_head_rwkv7 = _with_positional_options(ops.head_in_head_rwkv7, 7)


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
    """Output, or all of several outputs, and gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outs, d_outs = (x if isinstance(x, (tuple, list)) else (x,) for x in (op(*leaves), d_out))
    d_outs = [d.to(out.dtype) for d, out in zip(d_outs, outs, strict=True)]
    return *(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, d_outs)


def eager_pairwise(q, k, v, mixing, blocks, normalizer, feature_map, causal, eps=1e-6):
    """The method token by token, every step in the type of the inputs."""
    q, k, mixing = apply_feature_map(q, feature_map, eps), apply_feature_map(k, feature_map, eps), mixing.to(q.dtype)
    block, _, slot, *_ = blocks.tables(q)
    weights = mixing[..., block[:, None], block[None, :]] * torch.einsum("bihd,bjhd->bhij", q, k)
    weights = weights.where(slot[None] <= slot[:, None], 0) if causal else weights
    out = torch.einsum("bhij,bjhe->bihe", weights, v)
    return out / weights.sum(-1).transpose(1, 2)[..., None] if normalizer == "paper" else out


def eager_summary(q, k, v, mixing, blocks, normalizer, feature_map, causal, eps=1e-6):
    """The method by block summaries, every step in the type of the inputs."""
    tables = blocks.tables(q)
    q, k, mixing = apply_feature_map(q, feature_map, eps), apply_feature_map(k, feature_map, eps), mixing.to(q.dtype)
    present = (tables.tokens >= 0)[:, :, None, None]
    q, k, v = (x[:, tables.tokens.clamp(min=0)] * present for x in (q, k, F.pad(v, (0, 1), value=1.0)))
    mixing = mixing.expand(q.shape[3], *mixing.shape[-2:])
    mixed = mixing.tril(-1) if causal else mixing
    mixed = torch.einsum("hij,bjhde->bihde", mixed, torch.einsum("bjnhd,bjnhe->bjhde", k, v))
    out = torch.einsum("binhd,bihde->binhe", q, mixed)
    if causal:
        scores = torch.einsum("binhd,bimhd->bihnm", q, k).tril() * mixing.diagonal(dim1=1, dim2=2).T[..., None, None]
        out = out + torch.einsum("bihnm,bimhe->binhe", scores, v)
    out = out.flatten(1, 2)[:, tables.slot_of_token]
    return out[..., :-1] / out[..., -1:] if normalizer == "paper" else out[..., :-1]


EAGER = {"triton_pairwise": eager_pairwise, "triton_summary": eager_summary}


def assert_within_budget(impl, ours, inputs, d_out, blocks, normalizer="paper", feature_map="relu", causal=False):
    """Errors against float64 at most twice the eager form's in the type of the inputs, of gradients three times.

    Both the mean and the largest error of the output and of each gradient count. The first tokens of causal attention
    see few, so that nothing averages the rounding of single TF32 products, which the eager form has not: three of them,
    of halves that are cut off, leave out up to 2^-20 of a product of float32 numbers, and 2^-22 on average.
    """
    options = {"normalizer": normalizer, "feature_map": feature_map, "causal": causal}
    exact = run(lambda *x: mhla(*x, blocks, impl="torch", **options), [x.double() for x in inputs], d_out)
    eager = run(lambda *x: EAGER[impl](*x, blocks, **options), inputs, d_out)
    shares = {torch.float32: (2.0**-22, 2.0**-20), torch.float16: (2.0**-11, 2.0**-11)}
    rounding = shares.get(inputs[0].dtype, (0.0, 0.0)) if causal else (0.0, 0.0)
    assert_errors_within(("out", "dq", "dk", "dv", "dmixing"), ours, eager, exact, rounding)


def assert_errors_within(names, ours, eager, exact, rounding=(0.0, 0.0)):
    """Mean and largest error of each result at most twice the eager form's, of gradients three times.

    ``rounding``: what is added, as shares of the mean and of the largest result.
    """
    for name, x, e, reference in zip(names, ours, eager, exact, strict=True):
        factor = 3 if name.startswith("d") else 2
        error, budget = (x.double() - reference).abs(), (e.double() - reference).abs()
        for kind, measure, share in (("mean", torch.mean, rounding[0]), ("max", torch.max, rounding[1])):
            allowed = factor * measure(budget) + share * measure(reference.abs())
            message = f"{kind} error of {name}: {measure(error):.2e}, of the eager form {measure(budget):.2e}"
            assert measure(error) <= allowed, message


def make_head_in_head_inputs(
    tokens=40, r=2, batch=2, heads=2, dim=8, value_dim=5, per_token=False, dtype=torch.float64, seed=0
):
    """q, k, v, beta, log_decay, mask, initial_state."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = F.normalize(normal(2, batch, tokens, heads, dim), dim=-1)
    rows = F.normalize(normal(*((batch, tokens) if per_token else ()), heads, r, r).abs(), dim=-1)
    inputs = [q, k, normal(batch, tokens, heads, value_dim), 2 * normal(batch, tokens, heads).sigmoid()]
    inputs += [-0.2 * normal(batch, tokens, heads).abs(), rows @ rows.mT, normal(batch, heads, dim, value_dim)]
    return [x.to(dtype) for x in inputs]


def values_and_gradients(op, inputs, impl, weights=None, **options):
    """Output, final state and the gradients of all inputs, for a loss that weighs output and state.

    A weight of None leaves its result out of the loss.
    """
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, state = op(*leaves, True, impl=impl, **options)
    if weights is None:
        generator = torch.Generator().manual_seed(2)
        weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, state)]
    used = [(x, w.to(x)) for x, w in zip((out, state), weights, strict=True) if w is not None]
    values, weights = zip(*used, strict=True)
    return out.detach(), state.detach(), *torch.autograd.grad(values, leaves, weights, materialize_grads=True)


def eager_head_in_head(q, k, v, beta, log_decay, mask, initial_state, output_final_state, impl, scan=None):
    """The loop of the definition with every step, and the state, in the type of q."""
    state, outputs = initial_state, {}
    identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    per_token = mask.ndim == 5
    mask = mask.repeat_interleave(k.shape[-1] // mask.shape[-1], -1)
    mask = mask.repeat_interleave(k.shape[-1] // mask.shape[-2], -2)
    order = range(q.shape[1]) if scan is None else _order(scan, q)
    for t in order:
        strength, decay = beta[:, t, :, None, None], log_decay[:, t, :, None, None].exp()
        key = k[:, t, :, :, None]
        erase = key * k[:, t, :, None] * (mask[:, t] if per_token else mask)
        state = decay * ((identity - strength * erase) @ state) + strength * (key * v[:, t, :, None])
        outputs[t] = q.shape[-1] ** -0.5 * (q[:, t, :, None] @ state)[..., 0, :]
    return torch.stack([outputs[t] for t in range(q.shape[1])], 1), state


def _order(scan, q):
    return (scan if isinstance(scan, torch.Tensor) else scan.tables(q).order).tolist()


def assert_head_in_head_within_budget(inputs, weights, scan=None):
    """As `assert_within_budget`, for the kernels; with numbers that the type of q can hold.

    Args:
        inputs: q, k, v, beta, log_decay, mask, initial_state.
        weights: of output and final state in the loss, see `values_and_gradients`.
    """
    ours = values_and_gradients(head_in_head, inputs, "triton", weights, scan=scan)
    exact = values_and_gradients(head_in_head, [x.double() for x in inputs], "torch", weights, scan=scan)
    eager = values_and_gradients(eager_head_in_head, [x.to(inputs[0].dtype) for x in inputs], "", weights, scan=scan)
    assert_errors_within(("out", "state", *(f"d{name}" for name in HEAD_IN_HEAD_NAMES)), ours, eager, exact)


def make_mix_heads_inputs(count, batch, tokens, heads, out_heads, dim, dtype=torch.float64, seed=0):
    """The inputs and weights of `mix_heads`, and output gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    inputs = [normal(batch, tokens, heads, dim) for _ in range(count)]
    weights = normal(count, out_heads, heads)
    return [*inputs, weights], [normal(batch, tokens, out_heads, dim) for _ in range(count)]


def mix_heads_call(impl):
    """`mix_heads` with its weights as the last of its tensors."""
    return lambda *tensors: mix_heads(tensors[:-1], tensors[-1], impl=impl)


def make_grid_conv_inputs(grid, extents, channels, batch=2, bias=True, dtype=torch.float64, seed=0):
    """x, weight and bias of `grid_conv`, x a part of a packed projection, and an output gradient."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x = normal(batch, grid.num_tokens, 3 * channels)[..., channels : 2 * channels]
    inputs = [x, normal(channels, 1, *extents), *([normal(channels)] if bias else [])]
    return inputs, normal(batch, grid.num_tokens, channels)


def grid_conv_call(grid, impl, **options):
    """`grid_conv` of its tensors alone."""
    return lambda *tensors: grid_conv(*tensors, grid=grid, impl=impl, **options)
