"""A plugin of pytest that turns timm's own model tests on eight of our models: `make test-peers` runs it.

The tests choose their models by `timm.list_models` when they are collected, which names ours alone here. Tests of
models that they name themselves are left out. Their lists of modules do not know ours, and are passed over.
"""

import pytest
import timm

import headmix_vision  # noqa: F401  (registers the models with timm)

NAMES = (
    "deit_softmax_tiny",
    "deit_linear_tiny",
    "deit_mhla_tiny",
    "deit_hih_tiny",
    "vit_mhla_tiny",
    "vit_iha_tiny",
    "deit_mhla_mea_tiny",
    "deit_mhla_digits",
)
_SCRIPT = (
    "TorchScript reads the source of each function it meets, and cannot read the ops, which choose a kernel in Python"
    " and have gradients of their own. torch.jit.script is refused in one line, which tests/models/test_exchange.py"
    " checks along with what replaces it: torch.jit.trace, torch.export and torch.compile."
)
EXCLUDED = {"test_model_forward_torchscript": _SCRIPT, "test_model_forward_fx_torchscript": _SCRIPT}


def _restrict(list_names):
    def listed(filter="", module="", **options):
        return [name for name in list_names(filter, **options) if name.partition(".")[0] in NAMES]

    return listed


timm.list_models = _restrict(timm.list_models)
timm.list_pretrained = _restrict(timm.list_pretrained)


def pytest_collection_modifyitems(config, items):
    chosen = [item for item in items if _model_of(item) in NAMES]
    names = {item.originalname for item in chosen}
    if missing := set(EXCLUDED) - names:
        raise pytest.UsageError(f"timm has no tests {', '.join(sorted(missing))}: leave them out of EXCLUDED")
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
    for item in items:
        if item.originalname in EXCLUDED:
            item.add_marker(pytest.mark.skip(reason=EXCLUDED[item.originalname]))


def _model_of(item):
    parameters = getattr(item, "callspec", None)
    return str(parameters.params.get("model_name", "")).partition(".")[0] if parameters else ""
