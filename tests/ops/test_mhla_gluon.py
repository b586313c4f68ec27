"""The Gluon kernels of Hopper, emulated: masks, indices and every branch, and what they may read when."""

import itertools
from functools import partial

import pytest
import torch

from headmix_vision.ops import TokenBlocks, dispatch, hardware, mhla
from headmix_vision.ops.mhla import triton_tuning
from headmix_vision.ops.mhla.hopper import launch as gluon_launch
from headmix_vision.ops.mhla.torch_impl import NORMALIZERS, Settings
from headmix_vision.ops.mhla.triton_launch import Backward, Forward, Saved
from headmix_vision.ops.mhla.triton_op import plan_triton
from headmix_vision.ops.mhla.triton_pairwise import pairwise_backward, pairwise_forward
from headmix_vision.ops.runtime import KernelFailed, layout

from .gluon_emulator import Emulated
from .helpers import assert_within_budget, make_inputs, relative_error, run

pytestmark = pytest.mark.skipif(not hardware.INTERPRETED, reason="a GPU runs them, in test_mhla_gpu.py")


KERNELS = ["gluon_forward_kernel", "gluon_backward_kernel"]
WIDE = ["gluon_forward_kernel", "gluon_wide_backward_kernel"]
BF16 = torch.bfloat16
PROGRAMS_THAT_FIT = triton_tuning.programs_that_fit


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Emulates a GPU of one multiprocessor, so that programs take several heads; the list names what was launched."""
    from headmix_vision.ops.mhla.hopper.backward import gluon_backward_kernel
    from headmix_vision.ops.mhla.hopper.forward import gluon_forward_kernel
    from headmix_vision.ops.mhla.hopper.wide_backward import gluon_wide_backward_kernel

    launched = []
    emulated = [
        Emulated(kernel, partial(launched.append, kernel.fn.__name__))
        for kernel in (gluon_forward_kernel, gluon_backward_kernel, gluon_wide_backward_kernel)
    ]
    monkeypatch.setattr(gluon_launch, "_kernels", lambda: gluon_launch.Kernels(*emulated))
    monkeypatch.setattr(gluon_launch, "INTERPRETED", False)
    monkeypatch.setattr(triton_tuning, "programs_that_fit", lambda *_: 16)  # Triton's interpreter gets bf16 wrong
    return launched


def make(blocks, dim=64, value_dim=64, **options):
    """Views of one packed projection, a float32 mixing matrix, and an output gradient; programs take several heads."""
    heads = 2 if blocks.num_tokens > 128 else 3
    q, k, v, mixing = make_inputs(blocks, dim=dim, value_dim=value_dim, batch=1, heads=heads, **options)
    packed = torch.cat([q, k, v], -1).to(BF16)
    d_out = torch.randn(v.transpose(1, 2).shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [*packed.split([dim, dim, value_dim], -1), mixing.float()], d_out.to(BF16).transpose(1, 2)


def check(blocks, options=None, **shapes):
    inputs, d_out = make(blocks, **shapes)
    ours = run(lambda *x: mhla(*x, blocks, impl="triton_pairwise", **(options or {})), inputs, d_out)
    assert_within_budget("triton_pairwise", ours, inputs, d_out, blocks, **(options or {}))


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(
    ("tokens", "num_blocks"),
    [(50, 9), (64, 16), (97, 7), (128, 32), (144, 5), (170, 16), (193, 16), (196, 16), (198, 16), (225, 7), (256, 32)],
)
def test_tokens(launched, tokens, num_blocks, per_head):
    """From 193 tokens on a prefix beside 16 blocks is summed apart."""
    prefix = tokens % 4
    check(TokenBlocks.from_grid((1, tokens - prefix), (1, num_blocks), prefix), per_head=per_head)
    assert launched == KERNELS


@pytest.mark.parametrize("tokens", [122, 256])
def test_more_blocks_take_other_tiles(launched, monkeypatch, tokens):
    """They leave no room for a second program, or for values that are copied ahead."""
    rows = triton_tuning.power_of_two(tokens, 64)
    first, second = triton_tuning.HOPPER_BACKWARD[rows]
    with monkeypatch.context() as whole_gpu:
        whole_gpu.setattr(triton_tuning, "programs_that_fit", PROGRAMS_THAT_FIT)
        chosen = [triton_tuning.hopper_backward(tokens, blocks, triton_tuning.HOPPER_KB << 10) for blocks in (16, 17)]
    assert chosen == [first, second]
    monkeypatch.setitem(triton_tuning.HOPPER_BACKWARD, rows, (second,))
    check(TokenBlocks.from_grid((tokens,), (17,)))
    assert launched == KERNELS


OPTIONS = [*itertools.product(NORMALIZERS, ["relu", "elu1"]), (None, "identity")]  # else denominators are close to zero


@pytest.mark.parametrize(("normalizer", "feature_map"), OPTIONS)
@pytest.mark.parametrize("tokens", [64, 196])
def test_normalizers_and_feature_maps(launched, tokens, normalizer, feature_map):
    check(TokenBlocks.from_grid((tokens,), (5,)), {"normalizer": normalizer, "feature_map": feature_map})
    assert launched == KERNELS


@pytest.mark.parametrize(("normalizer", "feature_map"), OPTIONS)
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 80), (80, 64)])
def test_other_head_dims_forward(launched, dim, value_dim, normalizer, feature_map):
    """No backward kernel takes values of other dims than keys."""
    blocks = TokenBlocks.from_grid((208,), (13,))
    inputs, _ = make(blocks, dim, value_dim)
    options = {"normalizer": normalizer, "feature_map": feature_map}
    with torch.no_grad():
        ours = mhla(*inputs, blocks, impl="triton_pairwise", **options)
        exact = mhla(*(x.double() for x in inputs), blocks, impl="torch", **options)
    assert relative_error(ours.double(), exact) < 4e-3
    assert launched == KERNELS[:1]


@pytest.mark.parametrize(
    ("tokens", "num_blocks", "dim", "per_head"),
    [
        (50, 9, 72, False),
        (64, 32, 80, True),
        (97, 7, 80, True),
        (128, 32, 72, False),
        (144, 15, 72, True),
        (200, 32, 80, False),
        (255, 16, 72, True),
        (256, 16, 80, False),
    ],
)
def test_wide_heads(launched, tokens, num_blocks, dim, per_head):
    """All keys in a pass, or half of more than 128."""
    prefix = tokens % 2
    blocks = TokenBlocks.from_grid((1, tokens - prefix), (1, num_blocks - prefix), prefix)
    check(blocks, per_head=per_head, dim=dim, value_dim=dim)
    assert launched == WIDE


@pytest.mark.parametrize(("normalizer", "feature_map"), OPTIONS)
@pytest.mark.parametrize(("tokens", "dim"), [(64, 80), (240, 72)])
def test_normalizers_and_feature_maps_of_wide_heads(launched, tokens, dim, normalizer, feature_map):
    options = {"normalizer": normalizer, "feature_map": feature_map}
    check(TokenBlocks.from_grid((tokens,), (13,)), options, dim=dim, value_dim=dim)
    assert launched == WIDE


def test_cost_model_is_told_where_they_run(launched):
    """One block of 256 tokens is fastest as pairs with these kernels alone, on an H200."""
    blocks = TokenBlocks.from_grid((16, 16), (1, 1))
    inputs, d_out = make(blocks)
    for dtype, regime in ((BF16, "pairwise"), (torch.float32, "summary")):
        plan = plan_triton(inputs[0].to(dtype), inputs[2].to(dtype), Settings(blocks))
        assert plan.keywords["settings"].regime == regime
    run(lambda *x: mhla(*x, blocks, impl="triton"), inputs, d_out)
    assert launched == KERNELS


def test_graphs_of_symbolic_head_dims_choose_as_calls_do():
    settings = Settings(TokenBlocks.from_grid((16, 16), (1, 1)))

    def choose(x):
        return plan_triton(x, x, settings).keywords["settings"].regime == "pairwise"

    chosen = torch.compile(choose, backend="eager", fullgraph=True, dynamic=True)
    for dim, is_pairwise in ((72, True), (64, True), (96, False)):
        x = torch.empty(1, 256, 2, dim, dtype=BF16)
        assert chosen(x) == choose(x) == is_pairwise


def test_strides_are_32_bit():
    settings = Settings(TokenBlocks.from_grid((14, 14), (4, 4)), regime="pairwise")
    (q, k, v, _), d_out = make(settings.blocks)
    q, k, v, d_out = map(layout, (q, k, v, d_out))
    assert gluon_launch.takes_backward(q, k, v, d_out, d_out, settings)
    far = q._replace(strides=(2**34, *q.strides[1:]))
    assert not gluon_launch.takes_backward(far, k, v, d_out, d_out, settings)


@pytest.mark.parametrize("dim", [64, 72])
def test_relu_has_slope_one_at_zero(launched, dim):
    """Its gradient is read off features, which have to tell zero from negative numbers."""
    blocks = TokenBlocks.from_grid((64,), (4,))
    (q, k, v, mixing), d_out = make(blocks, dim, dim)
    inputs = (q.round(), k.round(), v, mixing)
    ours = run(lambda *x: mhla(*x, blocks, impl="triton_pairwise"), inputs, d_out)
    assert_within_budget("triton_pairwise", ours, inputs, d_out, blocks)
    assert launched == (KERNELS if dim == 64 else WIDE)


@pytest.mark.parametrize("dim", [64, 72])
def test_gradients_in_one_tensor(dim):
    settings = Settings(TokenBlocks.from_grid((14, 14), (4, 4)), regime="pairwise")
    (q, k, v, mixing), d_out = make(settings.blocks, dim, dim)
    out, inverse = torch.empty(v.shape, dtype=BF16), torch.empty(1, 2, 196)
    saved = Saved(inverse, q.new_empty(0), q.new_empty(0))
    pairwise_forward(Forward(q, k, v, mixing, out, saved, settings))
    packed = torch.empty(1, 196, 3, 2, dim, dtype=BF16)
    apart, together = (
        pairwise_backward(Backward(d_out, q, k, v, mixing, out, saved, x, settings)) for x in (None, packed)
    )
    assert torch.equal(torch.stack(apart[:3], 2), packed)
    assert torch.equal(apart.mixing, together.mixing)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_portable_kernels_serve_where_one_does_not_compile(launched, monkeypatch, name):
    """Under "auto" with one warning; asked for by name, an error says so."""

    def fail():
        raise KernelFailed(f"gluon_{name}_kernel does not compile with triton 4.0 on H100: no barrier")

    monkeypatch.setattr(gluon_launch, "_left_out", False)
    dispatch._warned.clear()
    given = gluon_launch._kernels()
    failing = Emulated(getattr(given, name), fail)
    monkeypatch.setattr(gluon_launch, "_kernels", lambda: given._replace(**{name: failing}))
    blocks = TokenBlocks.from_grid((14, 14), (4, 4))
    inputs, d_out = make(blocks)
    with pytest.raises(KernelFailed, match="no barrier"):
        run(lambda *x: mhla(*x, blocks, impl="triton_pairwise"), inputs, d_out)

    def auto(*x):
        return plan_triton(x[0], x[2], Settings(blocks), regime="pairwise", fallback=True)(*x)

    with pytest.warns(UserWarning, match="no barrier; at 97 to 256 tokens the portable kernels take their place"):
        run(auto, [x.float() for x in inputs], d_out.float())  # the portable kernels, which are interpreted
        run(auto, inputs, d_out)
    launched.clear()
    run(auto, inputs, d_out)
    assert launched == []
