"""Many small classifiers trained side by side in one process: all of their steps are one CUDA graph.

Each training is that of `headmix-train-cls fit` for the same options, made of the same parts (data module, optimizer,
schedule, loss), with its gradient clipping and averaged weights. On a GPU it has a stream of its own; after some steps
the steps of all are recorded together, as parallel branches of one graph that is launched once per step. On a CPU they
follow each other. Everything that changes from step to step lies on the device, so that nothing is waited for between
two validations.

S steps, B batch, C channels, H height, W width.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from headmix_vision.data.classification import ClassificationData
from headmix_vision.data.seeding import seeded
from headmix_vision.errors import InputError
from headmix_vision.recipes import with_config_paths
from headmix_vision.training.base_module import make_schedule
from headmix_vision.training.callbacks.ema import ema_decay
from headmix_vision.training.classifier import ImageClassifier
from headmix_vision.training.options import EmaConfig
from headmix_vision.training.parser import OptionParser

EAGER_STEPS = 10  # before steps are recorded: kernels are compiled, optimizers make their states
MOST_WORKERS = 8

Batch = tuple[Tensor, Tensor]


@dataclass
class TrainerOptions:
    """The options of Lightning's trainer that are heeded; others are refused.

    Args:
        max_epochs: Epochs.
        gradient_clip_val: Largest gradient norm; no limit when None.
        log_every_n_steps: As in the recipes; nothing is logged.
    """

    max_epochs: int = 1
    gradient_clip_val: float | None = None
    log_every_n_steps: int = 1


class Plateau:
    """Ends a training when its accuracy has not risen for some validations.

    Args:
        patience: Validations without a rise; 0 trains to the end.
        min_epochs: Epochs that are trained in any case.
        rise: What counts as a rise of the highest accuracy so far, as a share.
    """

    def __init__(self, patience: int, min_epochs: int, rise: float = 0.005) -> None:
        self.patience, self.min_epochs, self.rise = patience, min_epochs, rise
        self.best, self.waited = 0.0, 0

    def ends(self, top1: float, epochs: int) -> bool:
        """Whether training ends with this accuracy, a share, after so many epochs."""
        self.waited = 0 if top1 >= self.best + self.rise else self.waited + 1
        self.best = max(self.best, top1) if not self.waited else self.best
        return 0 < self.patience <= self.waited and epochs >= self.min_epochs


class Trained(NamedTuple):
    """What a training came to.

    Args:
        top1: Accuracy on the validation split, as a share; nan if a number of the training was not finite.
        test_top1: Accuracy on the test split; the validation split where the data have no other.
        loss: Mean training loss of the last epoch.
        epochs: Epochs trained.
        net: The network with its averaged weights, on its device; without averaging those of the last step.
    """

    top1: float
    test_top1: float
    loss: float
    epochs: int
    net: nn.Module


@cache
def _parser() -> OptionParser:
    parser = OptionParser()
    parser.add_argument("-c", "--config", action="config")
    parser.add_argument("--seed_everything", type=int, default=0)
    parts = {"trainer": TrainerOptions, "model": ImageClassifier, "data": ClassificationData, "ema": EmaConfig}
    for name, options in parts.items():
        parser.add_class_arguments(options, name)
    parser.link_arguments("seed_everything", "model.seed")
    parser.link_arguments("seed_everything", "data.seed")
    return parser


class Batches:
    """The batches of a data set and seed, as the data module makes them.

    Args:
        data: The data module.
        module: A module whose network takes these images.
        workers: Processes that read training images.
    """

    def __init__(self, data: ClassificationData, module: LightningModule, workers: int) -> None:
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        self.trainer: Any = Trainer(accelerator="cpu", **dict.fromkeys(quiet, False))
        self.trainer.strategy.connect(module)
        data.trainer, data.num_workers = self.trainer, 0 if data.augmentation.is_idle else workers
        data.setup("fit")
        self.loader = data.train_dataloader()
        data.num_workers = 0
        self.validation: list[Batch] = list(data.val_dataloader())
        data.setup("test")
        self.test: list[Batch] = list(data.test_dataloader())
        self._kept: tuple[tuple[int, int], Batch] | None = None

    def of_epochs(self, first: int, end: int) -> Batch:
        """Training images [S, B, C, H, W] and targets [S, B] of the epochs from `first` up to `end`."""
        if self._kept is None or self._kept[0] != (first, end):
            images, targets = map(torch.cat, zip(*map(self._of_epoch, range(first, end)), strict=True))
            self._kept = (first, end), (images, targets)
        return self._kept[1]

    def _of_epoch(self, epoch: int) -> list[Tensor]:
        self.trainer.fit_loop.epoch_loop.batch_progress.total.processed = epoch * len(self.loader)
        return [torch.stack(parts) for parts in zip(*self.loader, strict=True)]


_batches: dict[str, Batches] = {}  # for the next group too: augmentation takes its time


class Feed:
    """The batches of some epochs on the device, of which each step takes the next.

    Args:
        batches: Where they come from.
        epochs: How many epochs it holds at most.
        device: Where it holds them.
    """

    def __init__(self, batches: Batches, epochs: int, device: torch.device) -> None:
        self.batches = batches
        self.held = [x.to(device) for x in batches.of_epochs(0, epochs)]
        self.now = [x[:1].clone() for x in self.held]
        self.validation, self.test = (
            [(images.to(device), targets.to(device)) for images, targets in split]
            for split in (batches.validation, batches.test)
        )

    def load(self, first: int, end: int) -> None:
        """Hold the epochs from `first` up to `end`."""
        for held, new in zip(self.held, self.batches.of_epochs(first, end), strict=True):
            held[: len(new)].copy_(new)

    def take(self, slot: Tensor) -> None:
        """Make the batch at a place [1] the one of this step."""
        for held, now in zip(self.held, self.now, strict=True):
            torch.index_select(held, 0, slot, out=now)


class Training:
    """One network, its optimizer and averaged weights; a step is a function of the number on the clock alone.

    Args:
        options: The parsed options, instantiated.
        feed: Its batches.
        clock: The number of this step, from 0, int64 [1] on the device.

    Raises:
        InputError: The options ask for mixup.
    """

    def __init__(self, options: Any, feed: Feed, clock: Tensor) -> None:
        module: ImageClassifier = options.model
        if module.mix is not None:
            raise InputError("model.mixup must be off here: set mixup_alpha and cutmix_alpha to 0")
        device = clock.device
        self.feed, self.clock, self.clip = feed, clock, options.trainer.gradient_clip_val
        self.net, self.criterion = module.to(device).net.train(), module.criterion
        self.average = copy.deepcopy(self.net).eval()
        on_gpu = {"capturable": True} if device.type == "cuda" else {}
        module.optimizer_config = replace(
            module.optimizer_config, args={**module.optimizer_config.args, "fused": True, **on_gpu}
        )
        self.optimizer: Any = module.configure_optimizers()
        epoch = len(feed.batches.loader)
        steps = options.trainer.max_epochs * epoch
        schedule = make_schedule(self.optimizer, module.schedule_config, steps, epoch)
        rates = []
        for step in range(steps):
            schedule.step_update(step)
            rates.append([group["lr"] for group in self.optimizer.param_groups])
        self.rates = torch.tensor(rates, device=device)
        self.rate = self.rates[:1].clone()
        for group, rate in zip(self.optimizer.param_groups, self.rate[0], strict=True):
            group["lr"] = rate
        decay = options.ema.decay or 0.0
        weights = [1.0] + [1 - ema_decay(step, decay) for step in range(1, steps)]
        self.average_weights = torch.tensor(weights, device=device)
        self.history = torch.zeros(steps, 2, device=device)  # loss and gradient norm
        self.top1 = torch.zeros((), device=device)

    def step(self) -> None:
        """Train on the batch of the feed."""
        images, targets = (x[0] for x in self.feed.now)
        loss = self.criterion(self.net(images).float(), targets)
        self.optimizer.zero_grad()
        loss.backward()
        parameters = list(self.net.parameters())
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.clip is not None:
            clip_grads_with_norm_(parameters, self.clip, norm)
        torch.index_select(self.rates, 0, self.clock, out=self.rate)
        self.optimizer.step()
        self.history.index_copy_(0, self.clock, torch.stack([loss.detach(), norm])[None])
        self._follow(parameters)

    @torch.no_grad()
    def _follow(self, parameters: list[nn.Parameter]) -> None:
        """Brings the average closer, as `WarmedUpAverage` does, whose weight is a number and would be recorded."""
        averages = list(self.average.parameters())
        change = torch._foreach_sub(parameters, averages)
        torch._foreach_mul_(change, self.average_weights.index_select(0, self.clock)[0])
        torch._foreach_add_(averages, change)

    def validate(self) -> None:
        """Write the accuracy of the averaged weights on the validation split to `top1`."""
        self.top1.copy_(share_of_right(self.average, self.feed.validation))

    def result(self, epochs: int) -> Trained:
        """What the training has come to after so many epochs, the last of them validated."""
        epoch = len(self.feed.batches.loader)
        end = epochs * epoch
        test = share_of_right(self.average, self.feed.test)
        loss = self.history[end - epoch : end, 0].mean()
        scores = torch.stack([self.top1, test, loss]).tolist()
        net = copy.deepcopy(self.average)  # which may go on changing beside others
        if not self.history[:end].isfinite().all() or not all(map(math.isfinite, scores)):
            return Trained(math.nan, math.nan, math.nan, 0, net)
        return Trained(*scores, epochs, net)


@torch.no_grad()
def share_of_right(net: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """Share of the images that a network tells right, float32 []; nan where a logit is not finite."""
    logits = torch.cat([net(images).float() for images, _ in batches])
    right = logits.argmax(-1) == torch.cat([targets for _, targets in batches])
    return right.float().mean().masked_fill(~logits.isfinite().all(), math.nan)


class SideBySide:
    """Calls functions that do not depend on each other: one after the other, or as branches of a CUDA graph.

    Args:
        calls: The functions; on a GPU each works on a stream of its own, from which nothing may wait for the host.
        streams: Streams of a GPU, one for each; none on a CPU.
        eager: Calls before the functions are recorded.
        before: Called before them, on the current stream.
    """

    def __init__(
        self,
        calls: Sequence[Callable[[], None]],
        streams: Sequence[torch.cuda.Stream],
        eager: int,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.calls, self.streams, self.eager, self.before = calls, streams, eager, before
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Call all of them once."""
        if self.streams and self.eager <= 0 and self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                self._call()
        self.eager -= 1
        if self.graph is not None:
            self.graph.replay()
        else:
            self._call()

    def _call(self) -> None:
        self.before()
        if not self.streams:
            for call in self.calls:
                call()
            return
        joint, used = torch.cuda.current_stream(), self.streams[: len(self.calls)]
        for call, stream in zip(self.calls, used, strict=True):
            stream.wait_stream(joint)
            with torch.cuda.stream(stream):
                call()
        for stream in used:
            joint.wait_stream(stream)


def train_side_by_side(
    commands: Sequence[Sequence[str]],
    device: torch.device,
    *,
    rules: Sequence[Plateau] = (),
    validate_every_n_epochs: int | None = None,
) -> list[Trained]:
    """Train classifiers whose epochs have the same number of steps, each as far as its rule lets it.

    Args:
        commands: Options of `headmix-train-cls fit`, the recipe by `-c` among them, for each.
        device: Where.
        rules: When each ends before its last epoch; all train to the end when empty.
        validate_every_n_epochs: Validations of the rules; only the last epoch is validated when None.

    Raises:
        InputError: A wrong option, or one that is not heeded here.
    """
    if device.type != "cuda":
        return _train(commands, device, rules, validate_every_n_epochs, [])
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be recorded
        streams = [torch.cuda.Stream() for _ in commands]
        return _train(commands, device, rules, validate_every_n_epochs, streams)


def _train(
    commands: Sequence[Sequence[str]],
    device: torch.device,
    rules: Sequence[Plateau],
    every_n_epochs: int | None,
    streams: list[torch.cuda.Stream],
) -> list[Trained]:
    clock, slot = (torch.full((1,), -1, device=device) for _ in range(2))
    trainings, feeds = _open(commands, clock, every_n_epochs)
    (epochs,) = {len(training.rates) // len(training.feed.batches.loader) for training in trainings}
    (epoch,) = {len(feed.batches.loader) for feed in feeds}
    every = every_n_epochs or epochs

    def advance() -> None:
        clock.add_(1)
        slot.add_(1)
        for feed in feeds:
            feed.take(slot)

    rule_of = dict(zip(trainings, rules, strict=True)) if rules else {}
    results: dict[Training, Trained] = {}
    recorded: list[Training] = []
    for first in range(0, epochs, every):
        active = [training for training in trainings if training not in results]
        if not active:
            break
        if 2 * len(active) <= len(recorded) or not recorded:  # what has ended goes on until half of them have
            eager = 0 if recorded else 1
            recorded = active
            step = SideBySide([training.step for training in active], streams, eager * EAGER_STEPS, advance)
            validate = SideBySide([training.validate for training in active], streams, eager)
        end = min(first + every, epochs)
        for feed in feeds:
            feed.load(first, end)
        slot.fill_(-1)
        for _ in range((end - first) * epoch):
            step()
        validate()
        for training, top1 in zip(active, torch.stack([t.top1 for t in active]).tolist(), strict=True):
            over = training in rule_of and rule_of[training].ends(top1, end)
            if over or end == epochs or not math.isfinite(top1):
                results[training] = training.result(end)
    return [results[training] for training in trainings]


def _open(
    commands: Sequence[Sequence[str]], clock: Tensor, every_n_epochs: int | None
) -> tuple[list[Training], list[Feed]]:
    """Trainings with the initial weights of their seeds; those of one data set and seed share a feed."""
    workers = min(MOST_WORKERS, (os.cpu_count() or 1) // 2) if clock.is_cuda else 0
    feeds: dict[str, Feed] = {}
    trainings = []
    for command in commands:
        config = _parser().parse_args(with_config_paths(["fit", *command], "cls")[1:])
        with seeded(config.seed_everything):
            options = _parser().instantiate_classes(config)
        name = f"{config.data} {config.model.img_size}"
        if name not in _batches:
            _batches[name] = Batches(options.data, options.model, workers)
        if name not in feeds:
            epochs = every_n_epochs or options.trainer.max_epochs
            feeds[name] = Feed(_batches[name], min(epochs, options.trainer.max_epochs), clock.device)
        trainings.append(Training(options, feeds[name], clock))
    return trainings, list(feeds.values())
