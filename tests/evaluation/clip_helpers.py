"""Clips to score, and a network that is called as I3D is."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from headmix_vision.data.datasets.moving_digits import MovingDigits
from headmix_vision.files.tensors import file_sha256
from headmix_vision.sampling.folder import SampleFolder


class TinyI3D(nn.Module):
    """Brightness of four quarters, and how much it changes; without `moves`, of the first frame alone."""

    def __init__(self, moves: bool = True) -> None:
        super().__init__()
        self.moves = moves

    def forward(self, x: Tensor, rescale: bool = False, resize: bool = False, return_features: bool = False) -> Tensor:
        assert rescale and resize and return_features
        x = nn.functional.adaptive_avg_pool3d((x * 2 / 255 - 1).mean(1), (x.shape[2], 2, 2)).flatten(2)
        if not self.moves:
            return x[:, 0]
        return torch.cat([x.mean(1), 10 * (x[:, 1:] - x[:, :-1]).abs().mean(1)], 1)


def write_network(path: Path, moves: bool = True) -> Path:
    """Write the network as TorchScript."""
    torch.jit.script(TinyI3D(moves).eval()).save(str(path))
    return path


def vouched(features: object) -> tuple[object, ...]:
    """Options that open an extractor, with the hash that a TorchScript file needs."""
    path = Path(str(features))
    is_program = path.suffix == ".pt" and path.is_file()
    return "--features", features, *(("--features-sha256", file_sha256(path)) if is_program else ())


def moving(
    count: int, frames: int = 12, size: int = 16, seed: int = 0, frame_rate: float = 8.0
) -> tuple[np.ndarray, list[int]]:
    """Moving digits as uint8 [N, T, size, size, 1], and their classes."""
    source = MovingDigits("train", (frames, size, size), seed=seed, length=count, frame_rate=frame_rate)
    clips, labels = source.read_batch(range(count))
    return (clips * 255).round().to(torch.uint8).movedim(1, -1).numpy(), labels.tolist()


def write_samples(
    folder: Path, clips: np.ndarray, labels: list[int] | None = None, frame_rate: float | None = None
) -> Path:
    """Write clips as `headmix sample` does."""
    samples = SampleFolder(folder)
    for number, pixels in enumerate(clips):
        samples.write_sample(number, pixels)
    samples.write_grid(clips[0].repeat(3, -1))
    samples.write_metadata({"settings": {"classes": labels, "clips": {"frame_rate": frame_rate}}})
    return folder
