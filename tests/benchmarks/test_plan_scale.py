"""`plan_scale.py`: bytes counted by hand and by the strategies themselves, and the pieces that it reads."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import plan_scale as plan
from experiments import tables
from headmix_lab import measuring
from headmix_vision.ops import TokenBlocks
from headmix_vision.training.sharding import ShardedStrategy


def test_a_ring_sums_gradients():
    sent = plan.weights_sent
    assert sent(90, 10, "ddp", 1, 4) == pytest.approx([2 * 3 / 4 * 400, 0])
    two_hosts = sent(90, 10, "ddp", 2, 8)
    assert two_hosts.sum() == pytest.approx(2 * 15 / 16 * 400)
    assert two_hosts[1] == pytest.approx(2 * 1 / 2 * 400 / 8)


class Collectives(TorchDispatchMode):
    """Adds up the bytes that are gathered or scattered, and those that are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = self.summed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        match func.__name__.split(".")[0]:
            case "_allgather_base_" | "_reduce_scatter_base_":
                self.moved += max(args[0].nbytes, args[1].nbytes)
            case "allreduce_":
                self.summed += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("hosts", [1, 2])
def test_sharded_weights_send_what_is_planned(hosts, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ShardedStrategy, "root_device", torch.device("cuda"))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8 * hosts)
    try:
        strategy, net = ShardedStrategy(), nn.Sequential(nn.Linear(8, 16, bias=False))
        mesh = init_device_mesh("cpu", (hosts, 8), mesh_dim_names=("replicate", "shard"))
        strategy._device_mesh = mesh if hosts > 1 else mesh["shard"]
        strategy.precision_plugin = MixedPrecision("bf16-mixed", "cpu")
        net.blocks = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
        strategy.shard(net)
        with Collectives() as found, torch.autocast("cpu", dtype=torch.bfloat16):
            net(torch.zeros(4, 8)).sum().backward()
    finally:
        dist.destroy_process_group()
    way = "hybrid" if hosts > 1 else "fsdp2"
    sent = plan.collective(found.moved, 1, 8) + 2 * plan.collective(found.summed, hosts, 1)
    np.testing.assert_allclose(plan.weights_sent(3 * 256, 128, way, hosts, 8), sent)


def test_context_parallelism_sends_summaries_and_edges():
    spread = plan.spread_over_host
    own, shared, uneven = (TokenBlocks.from_grid((t, 2, 3), (b, 1, 2)) for t, b in ((8, 8), (8, 4), (21, 8)))
    passes, others, numbers = 3 * 5, 7, 4 * 10 * 10 * 2  # five layers, forward twice and backward; heads, D, D, blocks
    for blocks in (own, shared):
        assert spread(blocks, 4, 10, 5, False).sent == pytest.approx([passes * others * numbers * 2, 0])
    with_edges = spread(own, 4, 10, 5, True).sent - spread(own, 4, 10, 5, False).sent
    assert with_edges == pytest.approx([passes * 2 * (2 * 3) * 40 * 4, 0])
    assert [spread(blocks, 4, 10, 5, False).share for blocks in (own, uneven)] == [1 / 8, 1 / 7]


def test_measured_steps_stand_beside_planned_ones(tmp_path: Path):
    model = "dit_mhla_s_2:depth=1,embed_dim=16,num_heads=2"
    cases = {("one", 1): 0.2, ("ddp", 2): 0.3, ("fsdp2", 2): 0.4, ("hybrid", 2): 0.5}
    rows = [{"model": model, "batch": 4, "what": what, "gpus": gpus, "step_s": step_s, "peak_gib": 3}
            for (what, gpus), step_s in cases.items()]  # fmt: skip
    measuring.write_csv(tmp_path / "scale.csv", rows)
    tiny = plan.trained(tmp_path / "scale.csv", model, 4)
    assert tiny.rest == 3 * 2**30 - 16 * (tiny.blocks + tiny.outside)
    ddp, fsdp2, *eight = plan.lines(tiny, [8], [450, 50])
    assert [cells[1:3] for cells in (ddp, fsdp2, *eight)] == [
        ["2", "ddp"],
        ["2", "fsdp2"],
        ["8", "ddp"],
        ["8", "fsdp2"],
    ]
    assert ddp[5:] == ["3.0 (measured: 3.0)", "200–200 (measured: 300)", "40.0–40.0"]
    assert fsdp2[6:] == ["200–200 (measured: 400)", "40.0–40.0"]


def test_the_document_follows_the_files_of_measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    text = (measuring.REPOSITORY / "docs" / "scale.md").read_text()
    assert tables.renewed(text) == text
    for path in plan.RESULTS.glob("*_h200.csv"):
        (tmp_path / path.name).write_text(re.sub(r",1669\.4,", ",1869.4,", path.read_text()))
    monkeypatch.setattr(plan, "RESULTS", tmp_path)
    assert "1,869–" in tables.renewed(text)
