"""DDP sums gradients in one order from the first step on."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn
from torch.distributed import GradBucket, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

from headmix_vision.training import sharding
from headmix_vision.training.sharding import ReplicatedStrategy


def layouts(strategy: DDPStrategy) -> list[list[int]]:
    """Return the sizes of the gradients, as they are laid out, of two steps."""
    seen: list[list[int]] = []

    def look(_: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append([parameter.numel() for parameter in bucket.parameters()])
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    replica = strategy._setup_model(nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 5, bias=False)))
    assert isinstance(replica, DistributedDataParallel)
    replica.register_comm_hook(None, look)
    for _ in range(2):
        replica(torch.ones(1, 2)).sum().backward()
    return seen


def test_gradients_are_sent_from_the_stream_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(sharding, "_OrderedReplica", lambda *given, **_: made.append(given))
    monkeypatch.setattr(ReplicatedStrategy, "determine_ddp_device_ids", lambda _: [0])
    monkeypatch.setattr(torch.cuda, "Stream", None)
    network = nn.Linear(2, 3)
    ReplicatedStrategy()._setup_model(network)
    assert made == [(network, [0])]


def test_gradients_are_laid_out_once_from_the_last_to_the_first(tmp_path: Path) -> None:
    assert StrategyRegistry["ddp"]["strategy"] is ReplicatedStrategy
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        device = [torch.device("cpu")]
        assert layouts(ReplicatedStrategy(parallel_devices=device)) == [[15, 6], [15, 6]]
        first, second = layouts(DDPStrategy(parallel_devices=device))
        assert first != second  # else PyTorch no longer needs this
    finally:
        destroy_process_group()
