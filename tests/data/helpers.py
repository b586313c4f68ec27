"""A model that only records what it is fed, and small image folders."""

from pathlib import Path

import lightning
import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor

from headmix_vision.data import ClassificationData


class Recorder(lightning.LightningModule):
    """Keeps every batch; its network only tells the data module what it wants."""

    def __init__(self, img_size: int = 8, in_chans: int = 1, num_classes: int = 10) -> None:
        super().__init__()
        self.net = timm.create_model(
            "vit_tiny_patch16_224",
            img_size=img_size,
            patch_size=4,
            in_chans=in_chans,
            num_classes=num_classes,
            embed_dim=12,
            depth=1,
            num_heads=1,
        )
        self.train_batches: list[tuple[int, Tensor, Tensor]] = []
        self.eval_batches: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.train_batches.append((batch_idx, *batch))
        return self.net.head.bias.sum()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.eval_batches.append(batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.eval_batches.append(batch)

    def predict_step(self, batch: tuple[Tensor, list[str]], batch_idx: int) -> tuple[Tensor, list[str]]:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(**options: object) -> lightning.Trainer:
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    return lightning.Trainer(**{**defaults, **options})


def attach(
    data: ClassificationData,
    stage: str = "fit",
    rank: int = 0,
    world_size: int = 1,
    use_distributed_sampler: bool = False,
    **model: int,
) -> Recorder:
    """Set a data module up for a stage without running a trainer; rank and world size are pretended."""
    trainer, module = make_trainer(max_epochs=1, use_distributed_sampler=use_distributed_sampler), Recorder(**model)
    trainer.strategy.connect(module)
    trainer.strategy.__class__ = type(
        "Pretended",
        (type(trainer.strategy),),
        {"global_rank": property(lambda _: rank), "world_size": property(lambda _: world_size)},
    )
    data.trainer = trainer
    data.setup(stage)
    return module


def write_image(path: Path, seed: int, size: tuple[int, int] = (20, 16)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
