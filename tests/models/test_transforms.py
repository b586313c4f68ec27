"""What torch.func makes of the models: gradients of each sample, and derivatives in forward mode."""

import pytest
import timm
import torch
from torch.func import functional_call, grad, jvp, vmap

from headmix_vision.layers import HeadMixAttention


def network(name):
    torch.manual_seed(0)
    model = timm.create_model(name, depth=1, embed_dim=16, num_heads=2).double().eval()
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model


# PyTorch's softmax attention on a CPU, which torch.func calls image by image
slowly = pytest.mark.filterwarnings("ignore:There is a performance drop")


@slowly
@pytest.mark.parametrize(
    "name",
    [
        *("deit_linear_digits", "deit_mhla_digits", "deit_hih_digits", "dit_mhla_digits"),
        *("deit_iha_digits", "deit_hih_iha_digits", "dit_mhla_mea_digits"),
    ],
)
def test_gradients_of_each_sample(name):
    model = network(name)
    x, labels = torch.randn(3, 1, 8, 8, dtype=torch.float64), torch.arange(3)
    conditions = (torch.full((3,), 300.0), labels) if name.startswith("dit") else ()

    def loss(parameters, *inputs):
        return functional_call(model, parameters, tuple(value[None] for value in inputs)).square().mean()

    parameters = {key: value.detach() for key, value in model.named_parameters()}
    each = vmap(grad(loss), (None, *(0 for _ in (x, *conditions))))(parameters, x, *conditions)
    for i in range(3):
        model.zero_grad()
        loss(dict(model.named_parameters()), *(value[i] for value in (x, *conditions))).backward()
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(each[key][i], parameter.grad, rtol=1e-9, atol=1e-11)


# mixing weights inside their bounds and smooth features: differences meet no kink
@pytest.mark.parametrize("head_mix", [None, "iha", "mea"])
@pytest.mark.parametrize(
    ("core", "core_args"), [("mhla", {"feature_map": "elu1", "mixing_init": "uniform"}), ("hih", {"conv_size": 0})]
)
def test_forward_mode_agrees_with_differences_and_with_the_gradient(core, core_args, head_mix):
    torch.manual_seed(0)
    sizes = {"grid": (3, 3), "block_grid": (2, 2), "dtype": torch.float64}
    layer = HeadMixAttention(8, 2, core, head_mix, core_args=core_args, **sizes)
    if core == "hih" and head_mix == "iha":
        torch.nn.init.uniform_(layer.core.shares, 0.2, 0.8)
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    parameters = {key: value.detach() for key, value in layer.named_parameters()}
    first, second = ({key: 0.1 * torch.randn_like(value) for key, value in parameters.items()} for _ in range(2))

    def loss(parameters):
        return functional_call(layer, parameters, x).square().sum()

    def moved(sign):
        return loss({key: value + sign * 1e-4 * first[key] for key, value in parameters.items()})

    def times(gradient, direction):
        return sum((gradient[key] * direction[key]).sum() for key in direction)

    gradient, product = jvp(grad(loss), (parameters,), (first,))
    derivative = jvp(loss, (parameters,), (first,))[1]
    torch.testing.assert_close(derivative, (moved(1) - moved(-1)) / 2e-4, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(derivative, times(gradient, first))
    other = jvp(grad(loss), (parameters,), (second,))[1]  # the Hessian is symmetric
    torch.testing.assert_close(times(product, second), times(other, first))


@slowly
@pytest.mark.parametrize(
    ("core", "grid", "core_args"), [("mhla", (5, 7), {}), ("hih", (7, 5), {}), ("softmax", (5, 7), {"window": 5})]
)
def test_tables_of_a_transformed_call_are_not_kept(core, grid, core_args):
    """The first call with these sizes is a transformed one; the next one is not, and stands in a graph."""
    layer = HeadMixAttention(8, 2, core=core, grid=grid, block_grid=(2, 3), core_args=core_args)
    x = torch.randn(2, 35, 8, requires_grad=True)
    each = vmap(grad(lambda x: layer(x[None]).square().sum()))(x)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(each, expected)


def test_images_of_evaluation_are_cropped_as_timms_models_of_the_size():
    for size in (224, 384):
        ours, theirs = (timm.get_pretrained_cfg(f"{name}_base_patch16_{size}") for name in ("deit_mhla", "deit"))
        assert (ours.crop_pct, ours.interpolation) == (theirs.crop_pct, theirs.interpolation)
