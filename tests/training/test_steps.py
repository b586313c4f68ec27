"""Single steps of the two modules, without a command line: losses, random numbers, optimizer, predictions."""

from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from timm.layers import DropPath
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from headmix_vision.errors import InputError
from headmix_vision.training import base_module
from headmix_vision.training import classifier as classifier_module
from headmix_vision.training import generator as generator_module
from headmix_vision.training.base_module import BaseModule, Throughput, place_steps
from headmix_vision.training.callbacks.ema import EmaWithWarmup
from headmix_vision.training.classifier import ClassificationMetrics, ImageClassifier
from headmix_vision.training.generator import ImageGenerator
from headmix_vision.training.options import LossConfig, MixupConfig, OptimizerConfig

from .helpers import TINY

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
STREAMS = (base_module._STEP, classifier_module._MIXUP, generator_module._VALIDATION)
UNMIXED = MixupConfig(mixup_alpha=0.0, cutmix_alpha=0.0)


def classifier(**options: Any) -> ImageClassifier:
    model = {name: TINY["model"][name] for name in ("name", "num_classes", "img_size", "model_args")}
    return ImageClassifier(**{**model, "mixup": UNMIXED, **options})


def generator(**options: Any) -> ImageGenerator:
    arguments = {"depth": 1, "embed_dim": 16, "num_heads": 2}
    return ImageGenerator(**{"name": "dit_mhla_digits", "model_args": arguments, **options})


def attach(module: BaseModule, rank: int = 0, world_size: int = 1, epoch: int = 0) -> None:
    """Give a module a trainer in an epoch; rank and world size are pretended; rank r holds r + 1 times the numbers."""
    trainer = lightning.Trainer(**QUIET)
    trainer.strategy.connect(module)
    strategy = type(trainer.strategy)
    pretended = {
        "global_rank": property(lambda _: rank),
        "world_size": property(lambda _: world_size),
        "all_gather": lambda _, tensor: torch.stack([tensor * (rank + 1) for rank in range(world_size)]),
    }
    trainer.strategy.__class__ = type("Pretended", (strategy,), pretended)
    trainer.fit_loop.epoch_progress.current.completed = epoch
    module.trainer = trainer


def digits(count: int = 6, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(count)
    return scale * torch.randn(count, 1, 8, 8, generator=numbers), torch.arange(count) % 10


def test_the_rate_of_an_epoch_leaves_its_validation_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(base_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    throughput = Throughput()
    for images, at_s, of_epoch, lately in ((10, 2.0, 5.0, 5.0), (20, 102.0, 5.0, 5.0), (30, 103.0, 6.0, 10.0)):
        throughput.images, now_s[0] = images, at_s
        assert (throughput.of_epoch(), throughput.lately()) == (of_epoch, lately)
        if images == 10:
            throughput.pause()
            now_s[0] = 100.0
            throughput.resume()
    throughput.start()
    assert throughput.images == 0


class Draws(ImageGenerator):
    """Notes the first random number of every training batch."""

    drawn: list[float]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.drawn.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)


def draws(seed: int) -> list[float]:
    arguments = {"depth": 1, "embed_dim": 16, "num_heads": 2}
    module = Draws("dit_linear_digits", model_args=arguments, seed=seed)
    module.drawn = []
    loader = DataLoader(TensorDataset(*digits(6)), batch_size=2)
    lightning.Trainer(**QUIET, max_epochs=2).fit(module, loader)
    return module.drawn


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_random_numbers_belong_to_a_step_of_a_seed() -> None:
    first = draws(0)
    assert len(first) == 6 and len({*first, *draws(1)}) == 12
    assert draws(0) == first


@pytest.mark.parametrize("make", [classifier, generator])
def test_seeds_differ_by_seed_epoch_batch_rank_and_stream(make: Any) -> None:
    places = [(seed, epoch, rank) for seed in (0, 1) for epoch in (0, 1) for rank in (0, 1)]
    seeds = set()
    for seed, epoch, rank in places:
        module = make(seed=seed)
        attach(module, rank, 2, epoch)
        seeds |= {module.batch_seed(batch, stream) for batch in (0, 1) for stream in STREAMS}
    assert len(seeds) == 2 * len(STREAMS) * len(places)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("make", "sums"), [(classifier, ["train_loss"]), (generator, ["train_loss", "level_loss"])])
def test_sums_of_the_loss_survive_a_resume_of_two_ranks_once(make: Any, sums: list[str], world_size: int) -> None:
    saved = make()
    attach(saved, 0, 2)
    for name in sums:
        setattr(saved, name, torch.rand(10, 2) if name == "level_loss" else torch.tensor([3.0, 2.0]))
    checkpoint: dict[str, Any] = {"state_dict": saved.state_dict()}
    saved.on_save_checkpoint(checkpoint)
    loaded = [make() for _ in range(world_size)]
    for rank, module in enumerate(loaded):
        attach(module, rank, world_size)
        module.on_load_checkpoint(checkpoint)
    for name in sums:
        first, *others = (getattr(module, name) for module in loaded)
        torch.testing.assert_close(first + sum(others), 3 * getattr(saved, name))
        if world_size == 2:
            assert torch.equal(first, getattr(saved, name))


def test_options_reach_the_optimizer() -> None:
    config = OptimizerConfig("adamw", lr=0.3, weight_decay=0.2, layer_decay=0.5, args={"betas": [0.8, 0.9]})
    groups = classifier(optimizer=config).configure_optimizers().param_groups
    # embeddings, two blocks, and norm with head
    assert {group["lr_scale"] for group in groups} == {0.125, 0.25, 0.5, 1.0}
    assert {(group["lr"], tuple(group["betas"])) for group in groups} == {(0.3, (0.8, 0.9))}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.2}
    groups = classifier(optimizer=replace(config, layer_decay=None)).configure_optimizers().param_groups
    assert all("lr_scale" not in group for group in groups)


@pytest.mark.parametrize("kind", ["bce", "cross_entropy"])
def test_predictions_are_probabilities_of_the_loss(kind: Any) -> None:
    module = classifier(loss=LossConfig(kind)).eval()
    images, _ = digits()
    logits = module(images)
    _, probabilities = module.predict_step((images, ["a"] * 6), 0)
    expected = 1 / (1 + (-logits).exp()) if kind == "bce" else logits.exp() / logits.exp().sum(1, keepdim=True)
    torch.testing.assert_close(probabilities, expected)


@pytest.mark.parametrize(("kind", "smoothing"), [("bce", 0.2), ("bce", 0.0), ("cross_entropy", 0.2)])
def test_smoothing_is_applied_once_with_and_without_mixup(kind: Any, smoothing: float) -> None:
    logits, labels = torch.randn(4, 10), torch.tensor([1, 2, 3, 4])
    soft = torch.full((4, 10), smoothing / 10)
    soft[torch.arange(4), labels] += 1 - smoothing
    loss = binary_cross_entropy_with_logits if kind == "bce" else cross_entropy
    module = classifier(loss=LossConfig(kind, smoothing))
    torch.testing.assert_close(module.criterion(logits, labels), loss(logits, soft))
    # half of the image itself and half of its partner, each of them smoothed
    mixed = classifier(loss=LossConfig(kind, smoothing), mixup=MixupConfig(1.0, 0.0))
    assert mixed.mix is not None
    _, targets = mixed.mix(torch.zeros(4, 1, 8, 8), labels)
    share = float(targets[0, 1] - smoothing / 10) / (1 - smoothing)
    torch.testing.assert_close(targets, share * soft + (1 - share) * soft.flip(0))
    torch.testing.assert_close(mixed.criterion(logits, targets), loss(logits, targets))


def test_targets_above_the_threshold_become_one() -> None:
    logits, targets = torch.randn(1, 10), torch.tensor([[0.7, 0.3, *[0.0] * 8]])
    for threshold, expected in ((0.2, [1.0, 1.0]), (0.5, [1.0, 0.0]), (None, [0.7, 0.3])):
        module = classifier(loss=LossConfig("bce", 0.0, threshold), mixup=MixupConfig(1.0, 0.0))
        wanted = binary_cross_entropy_with_logits(logits, torch.tensor([[*expected, *[0.0] * 8]]))
        torch.testing.assert_close(module.criterion(logits, targets), wanted)


def test_every_image_weighs_alike_in_the_loss_of_a_ragged_validation() -> None:
    metrics, logits, targets = ClassificationMetrics(10), 3 * torch.randn(9, 10), torch.arange(9)
    for part in (slice(0, 8), slice(8, 9)):
        metrics.update(logits[part], targets[part])
    torch.testing.assert_close(metrics.compute()["loss"], cross_entropy(logits, targets))


def test_top_five_of_five_classes_say_nothing() -> None:
    for classes, expected in ((5, {"loss", "top1", "balanced"}), (6, {"loss", "top1", "top5", "balanced"})):
        metrics = ClassificationMetrics(classes)
        metrics.update(torch.eye(classes), torch.arange(classes))
        assert set(metrics.compute()) == expected


def validation_loss(*batches: tuple[int, tuple[torch.Tensor, torch.Tensor]], rank: int = 0) -> float:
    """The loss over batches with their numbers, of an untrained generator, whose output is zero."""
    module = generator(seed=1).eval()
    attach(module, rank, 2)
    for index, batch in batches:
        module.validation_step(batch, index)
    return float(module.val_loss.compute())


def test_validation_of_a_generator_weighs_images_and_draws_for_each_batch() -> None:
    whole, rest = digits(7), digits(1, scale=4.0)
    alone = validation_loss((0, whole)), validation_loss((1, rest))
    assert alone[1] > 3 * alone[0]
    assert validation_loss((0, whole), (1, rest)) == pytest.approx((7 * alone[0] + alone[1]) / 8, rel=1e-5)
    assert validation_loss((0, whole)) == alone[0]
    assert len({alone[0], validation_loss((1, whole)), validation_loss((0, whole), rank=1)}) == 3


def test_the_average_keeps_steps_that_half_precision_would_lose() -> None:
    module, callback, trainer = classifier(), EmaWithWarmup(0.999), lightning.Trainer(**QUIET)
    callback.setup(trainer, module, "fit")
    callback.on_fit_start(trainer, module)
    parameter = module.net.blocks[0].norm1.weight  # ones
    assert callback._average_model is not None and callback.average is not None
    average, expected = callback.average.net.blocks[0].norm1.weight, torch.ones(24, dtype=torch.float64)
    for count in range(40):
        parameter.data += 1e-4
        callback._average_model.update_parameters(module)
        decay = min(0.999, (1 + count) / (10 + count)) if count else 0.0
        expected = decay * expected + (1 - decay) * parameter.detach().double()
    assert average.dtype == torch.float32
    # forty roundings of float32; one rounding of bfloat16 is a hundred steps of this size
    torch.testing.assert_close(average.detach().double(), expected, rtol=0, atol=3e-6)


def test_optimizers_on_a_gpu_are_fused_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageClassifier, "device", torch.device("cuda"))

    def fused(opt: str, **args: bool) -> set[bool | None]:
        optimizer: Any = classifier(optimizer=OptimizerConfig(opt, args=args)).configure_optimizers()
        return {group.get("fused") for group in optimizer.param_groups}

    assert fused("adamw") == fused("adam") == fused("adamw", fused=True) == {True}
    assert fused("adamw", fused=False) == {False}
    assert (
        fused("adamw", foreach=True) == fused("adamw", differentiable=True) == fused("sgd") == fused("lamb") == {None}
    )


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (None, "cpu")])
def test_counts_of_steps_lie_where_the_resumed_optimizer_reads_them(fused: bool | None, device: str) -> None:
    """On the device of the weights if it is fused; another one would wait for the device at every step."""
    weight = torch.nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.AdamW([weight], fused=fused)
    optimizer.state[weight] = {"step": torch.zeros(())}
    place_steps(optimizer)
    assert optimizer.state[weight]["step"].device.type == device


class Block(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.scale, self.drop_path = nn.Parameter(torch.ones(())), DropPath(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop_path(self.scale * x)


@torch._dynamo.config.patch(recompile_limit=8, optimize_ddp=True)
def test_blocks_are_compiled_by_themselves_whatever_their_stochastic_depth(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    torch.compiler.reset()
    counters.clear()
    module = classifier(compile="blocks")
    module.net = net = nn.Sequential()
    net.blocks = nn.Sequential(*(Block(rate / 20) for rate in range(10)))
    attach(module)
    module.configure_model()
    net.blocks(torch.ones(3, 2)).sum().backward()
    net.eval().blocks(torch.ones(3, 2))
    assert counters["stats"]["unique_graphs"] == 11 and not counters["unimplemented"]

    del net.blocks
    with pytest.raises(InputError, match="this model has no blocks"):
        module.configure_model()


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class TwoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(TwoLayers(), TwoLayers())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


@torch._dynamo.config.patch(optimize_ddp=True)
def test_blocks_stay_whole_where_gradients_are_summed_over_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    programs: list[object] = []

    def backend(program: Any, _: object) -> Any:
        programs.append(program)
        return program

    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for compile in (True, "blocks"):
            torch.compiler.reset()
            programs.clear()
            module = classifier(compile=compile)
            module.net = net = TwoBlocks()
            attach(module)
            module.configure_model()
            DistributedDataParallel(net, bucket_cap_mb=1)(torch.ones(3, 512, requires_grad=True)).sum().backward()
            assert (len(programs) > 1) is (compile is True)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("make", [classifier, generator])
@pytest.mark.parametrize("is_asked", [False, True])
def test_gradient_checkpointing_reaches_the_network(make: Any, is_asked: bool) -> None:
    module = make(grad_checkpointing=is_asked)
    attach(module)
    module.configure_model()
    flags = [getattr(module.net, name, False) for name in ("grad_checkpointing", "gradient_checkpointing")]
    assert any(flags) is is_asked
    module.net = nn.Linear(2, 2)
    if is_asked:
        with pytest.raises(InputError, match="this model cannot checkpoint gradients; set it to false"):
            module.configure_model()


@torch._dynamo.config.patch(recompile_limit=8, optimize_ddp=True)
def test_cuda_graphs_are_of_each_block_on_several_processes_and_not_for_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[nn.Module, object]] = []
    calls: list[None] = []

    def compile(part: nn.Module, mode: object) -> None:
        compiled.append((part, mode))
        part._compiled_call_impl = part._call_impl

    monkeypatch.setattr(nn.Module, "compile", compile)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: calls.append(None))
    for processes in (1, 2):
        compiled.clear()
        module = classifier(compile="graphs")
        attach(module, world_size=processes)
        module.configure_model()
        net: Any = module.net
        parts = [net] if processes == 1 else list(net.blocks)
        assert compiled == [(part, "reduce-overhead") for part in parts]
        module(digits()[0])
        net.forward_features(digits()[0])
        assert len(calls) == 2 * (processes - 1)  # one for all blocks, by each way through them
    module.grad_checkpointing = True
    module.configure_model()  # for validation
    module.trainer.state.fn = TrainerFn.FITTING
    with pytest.raises(InputError, match="compile=graphs cannot recompute blocks on several processes"):
        module.configure_model()
    monkeypatch.setattr(base_module, "ShardedStrategy", type(module.trainer.strategy))
    with pytest.raises(InputError, match="compile=graphs is not for shards; set it to true or to blocks"):
        module.configure_model()


@pytest.mark.parametrize("compile", ["graphs", "blocks"])
def test_gradients_that_are_accumulated_outlive_cuda_graphs(compile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = classifier(compile=compile)
    attach(module)
    accumulates = [True, True, False]
    monkeypatch.setattr(module.trainer.fit_loop, "_should_accumulate", lambda: accumulates.pop(0))
    first, *others = module.net.parameters()
    of_graph = first.grad = torch.ones_like(first)
    module.on_after_backward()
    copy = first.grad
    assert copy is not None and (copy is not of_graph) is (compile == "graphs")
    first.grad += 1  # as autograd does
    for _ in range(2):
        module.on_after_backward()
        assert first.grad is copy and all(other.grad is None for other in others)
    assert (of_graph.max().item() == 1) is (compile == "graphs") and not module._copied_gradients
