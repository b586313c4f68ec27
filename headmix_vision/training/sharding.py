"""Train on several processes: copies whose gradients are summed in one order (DDP), or shards of all state (FSDP2)."""

import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, async_save
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.futures import Future as TorchFuture
from torch.nn.parallel import DistributedDataParallel

from headmix_vision.errors import InputError, check_counts, check_flags
from headmix_vision.files.tensors import file_sha256
from headmix_vision.layers.cores import AttentionCore
from headmix_vision.runs.checkpoints import SHARDED, SHARDS, check_state, map_tensors, read_checkpoint, whole
from headmix_vision.runs.shards import FORMAT, SHARDS_INDEX, fill, identity_name, remove_unfinished, shards_folder

NOT_ON_SHARDS = ("adamp", "adamuon", "kron", "mars", "novograd", "sgdp")  # in names of timm's optimizers


class _OrderedReplica(DistributedDataParallel):
    """Lay gradients out for their sums before the first step, from the last parameter to the first.

    PyTorch lays them out anew after the first step of each start, in the order in which they became ready. The sums of
    more than two processes depend on the layout, so that a run that was interrupted would not go on bit-equal.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reducer._push_all_rebuilt_params()  # the next forward pass lays them out, and none after it

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, are_sparse = (listed[::-1] for listed in super()._build_params_for_reducer())
        return parameters, are_sparse


class ReplicatedStrategy(DDPStrategy):
    """Lightning's `ddp`, with which an interrupted run goes on bit-equal on any number of processes."""

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        # On the current stream. On one of its own, as Lightning's, each gradient records an event and waits for one.
        return _OrderedReplica(model, self.determine_ddp_device_ids(), **self._ddp_kwargs)


StrategyRegistry.register(
    "ddp", ReplicatedStrategy, description="A copy on each process", override=True, start_method="popen"
)


@dataclass(frozen=True)
class _Written(WriteResult):
    """A tensor that was written, with the hash of its file."""

    sha256: str


class _Writer(FileSystemWriter):
    """Write shards that may be moved to another folder, and hash them: each process its own, while training goes on.

    Attributes:
        sha256: SHA-256 of all files by their names; known to the first process alone, when all are written.
    """

    sha256: dict[str, str]

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        try:
            written = super().write_data(plan, planner).value()
        except RuntimeError as error:
            # torch covers what the system said with words about its container
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        names = {result.storage_data.relative_path for result in written}
        hashes = {name: file_sha256(Path(self.path) / name) for name in names}
        results: TorchFuture[list[WriteResult]] = TorchFuture()
        results.set_result(
            [
                _Written(one.index, one.size_in_bytes, one.storage_data, hashes[one.storage_data.relative_path])
                for one in written
            ]
        )
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        written = [one for of_process in results for one in of_process if isinstance(one, _Written)]
        self.sha256 = {one.storage_data.relative_path: one.sha256 for one in written}
        self.sha256[SHARDS_INDEX] = file_sha256(Path(self.path) / SHARDS_INDEX)


class ShardedStrategy(ModelParallelStrategy):
    """Shard each block of a network, and the rest of it, by `fully_shard`, over all processes or groups of them.

    Checkpoints are written by all processes, each its own part, while training goes on: a `.ckpt` file that takes its
    place when the folder of its shards is complete. Its entries are as in a run of one process, so that a run continues
    with another number of processes, and from or without shards.

    Under `trainer.precision: bf16-mixed` blocks are gathered in bfloat16, to which autocast would round most of their
    weights anyway, and half as much is sent, but those whose core has `float32_parameters` (Head-in-Head's decays)
    and the blocks of Wan and Sana. Gradients are summed, and weights updated, in float32.

    Args:
        shard_size: Number of neighbouring processes that share one copy of the weights, such as the GPUs of a host;
            it divides the number of processes. All share one when null.
        reshard_after_forward: Give a block's gathered weights back after its forward pass, and gather them again in
            the backward pass. If not, a process holds a copy of the weights in between, and sends a third less, under
            `bf16-mixed` a quarter.
    """

    # as of one process: by names and numbers of parameters, with DTensors in the place of tensors
    lightning_module_state_dict = ParallelStrategy.lightning_module_state_dict
    load_model_state_dict = ParallelStrategy.load_model_state_dict
    optimizer_state = ParallelStrategy.optimizer_state
    load_optimizer_state_dict = ParallelStrategy.load_optimizer_state_dict
    lightning_restore_optimizer = True

    def __init__(self, shard_size: int | None = None, reshard_after_forward: bool = True) -> None:
        super().__init__()
        self.shard_size, self.reshard_after_forward = shard_size, reshard_after_forward
        self._saving: Future[None] | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._group: dist.ProcessGroup | None = None
        self._plain: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()

    def setup_environment(self) -> None:
        """Start the processes and lay them out.

        Raises:
            InputError: If `shard_size` does not divide their number, or is not positive; if `reshard_after_forward` is
                neither true nor false.
        """
        check_flags(**{"trainer.strategy.reshard_after_forward": self.reshard_after_forward})
        if self.shard_size is not None:
            check_counts(1, **{"trainer.strategy.shard_size": self.shard_size})
        self._setup_distributed()
        shard_size = self.shard_size or self.world_size
        if self.world_size % shard_size:
            raise InputError(f"trainer.strategy.shard_size={shard_size} does not divide {self.world_size} processes")
        shape, names = (self.world_size // shard_size, shard_size), ("replicate", "shard")
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        self._device_mesh = mesh if shape[0] > 1 else mesh["shard"]
        self._group = dist.new_group(backend="gloo")  # checkpoints must not wait for the devices

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Copy what is to be saved, and return while it is being written; wait for the checkpoint before.

        Raises:
            OSError: If the system refused the checkpoint before; the file that was there stays.
        """
        self.finish_saving()
        path = Path(self.broadcast(filepath))
        identity = self.broadcast(secrets.randbits(62))
        tensors = {identity_name(self.global_rank): torch.tensor(identity)}

        def part(name: str, tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor):
                return tensor.detach().clone()
            tensors[name] = tensor.detach()
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        index = {name: entry if name in SHARDED else deepcopy(entry) for name, entry in checkpoint.items()}
        index = map_tensors(index, part)
        if len(tensors) > 1:
            folder = shards_folder(path, identity)
            about = {"format": FORMAT, "folder": folder.name, "identity": identity, "processes": self.world_size}
            index[SHARDS] = about
            writer = _Writer(folder)
            written = async_save(tensors, storage_writer=writer, process_group=self._group)
            self._saving = self._writer.submit(self._complete, written, writer, index, path)
        elif self.is_global_zero:
            self.checkpoint_io.save_checkpoint(index, path)

    def _complete(self, written: Any, writer: _Writer, index: dict[str, Any], path: Path) -> None:
        try:
            written.result()
        except CheckpointException as error:  # known to all processes when none of them writes any more
            if self.is_global_zero:
                remove_unfinished(path.parent)
            refused = next((cause for cause, _ in error.failures.values() if isinstance(cause, OSError)), None)
            if refused is None:
                raise
            refused.filename = refused.filename or str(path)
            raise refused from error
        if self.is_global_zero:
            index[SHARDS]["sha256"] = writer.sha256
            self.checkpoint_io.save_checkpoint(index, path)

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            OSError: If the system refused it.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint with or without shards; in training only what this process holds of it.

        Raises:
            InputError: If it is damaged, or of another model.
        """
        path = Path(self.broadcast(checkpoint_path))
        targets = self._targets()
        if not targets:
            return read_checkpoint(path, sharded=SHARDED)
        assert self.lightning_module is not None
        checkpoint = read_checkpoint(path, sharded=())
        check_state(checkpoint["state_dict"], self.lightning_module.state_dict())
        to_read: dict[str, Tensor] = {}

        def place(name: str, tensor: Tensor) -> Tensor:
            target = targets.get(name, targets.get(name.rpartition("/")[0]))
            alike = target is not None and tensor.shape == target.shape
            if target is None or not (tensor.is_meta or alike):
                return tensor
            mesh, placements = target.device_mesh, target.placements if alike else None
            if not tensor.is_meta:
                return distribute_tensor(tensor.to(self.root_device), mesh, placements, src_data_rank=None)
            empty = torch.distributed.tensor.empty(
                tensor.shape, dtype=tensor.dtype, device_mesh=mesh, placements=placements
            )
            return to_read.setdefault(name, empty)

        stored = {name: checkpoint[name] for name in SHARDED if name in checkpoint}
        placed = {**checkpoint, **map_tensors(stored, place)}
        if to_read:
            fill(to_read, path, checkpoint[SHARDS], group=self._group)
        return placed

    def _targets(self) -> dict[str, DTensor]:
        """Find the parameters of this process by the places of their states in a checkpoint."""
        assert self.lightning_module is not None
        state = self.lightning_module.state_dict()
        found = {f"/{entry}/{name}": tensor for entry in SHARDED[:2] for name, tensor in state.items()}
        for i, optimizer in enumerate(self.optimizers):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            found |= {f"/{SHARDED[2]}/{i}/state/{k}": parameter for k, parameter in enumerate(parameters)}
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, DTensor)}

    def shard(self, network: nn.Module) -> None:
        """Shard the parameters of a network in place; each of `network.blocks` is gathered when it is computed."""
        meta = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in network.parameters()}
        self._plain[network] = deepcopy(network, meta)
        mesh, after_forward = self.device_mesh, self.reshard_after_forward
        for block in getattr(network, "blocks", ()):
            fully_shard(block, mesh=mesh, reshard_after_forward=after_forward, mp_policy=self._precision_of(block))
        fully_shard(network, mesh=mesh)

    def _precision_of(self, block: nn.Module) -> MixedPrecisionPolicy:
        if self.precision_plugin.precision != "bf16-mixed" or self.root_device.type == "cpu":  # norms of CPUs refuse it
            return MixedPrecisionPolicy()
        cores = [module for module in block.modules() if isinstance(module, AttentionCore)]
        # autocast leaves the tables of diffusers' blocks in float32
        if any(core.float32_parameters for core in cores) or hasattr(block, "scale_shift_table"):
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)

    def whole(self, network: nn.Module) -> nn.Module:
        """Make a plain copy of a network that `shard` has sharded, with all weights; all processes call it."""
        copy = deepcopy(self._plain[network])
        weights = {**network.state_dict(), **dict(network.named_parameters())}  # frozen ones, which the former may lack
        copy.load_state_dict({name: whole(tensor) for name, tensor in weights.items()}, assign=True)
        return copy.to(self.root_device).train(network.training)

    def teardown(self) -> None:
        """Wait for the last checkpoint, and end."""
        self.finish_saving()
        super().teardown()


StrategyRegistry.register("fsdp2", ShardedStrategy, description="Fully sharded over all processes, by fully_shard")


@contextmanager
def whole_network(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Let each process compute with the network of a module by itself, as often as it likes.

    A plain copy with all weights takes the place of a sharded network, without context parallelism. All
    processes have to enter.
    """
    network = cast(nn.Module, module.net)
    if isinstance(network, FSDPModule):
        assert isinstance(trainer.strategy, ShardedStrategy)
        module.net = trainer.strategy.whole(network)
    whole: Any = module.net
    ranks = getattr(whole, "ranks", None)
    if ranks is not None:
        whole.context_parallel(None)
    try:
        yield
    finally:
        if ranks is not None:
            whole.context_parallel(ranks)
        module.net = network


def finish_saving(trainer: Trainer) -> None:
    """Wait until the last checkpoint is on the disk."""
    if isinstance(trainer.strategy, ShardedStrategy):
        trainer.strategy.finish_saving()
