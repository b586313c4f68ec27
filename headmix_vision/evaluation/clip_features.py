"""Extractors of features of clips: the I3D network of FVD, the features of an image classifier over time, digits.

Shapes: B clips of a batch, C channels, T frames, H and W pixels, S pixels of a digit's side, D features of a clip, E of
a frame.
"""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from torchvision.transforms.functional import pil_to_tensor

from headmix_vision.console import open_device
from headmix_vision.data.datasets.moving_digits import DIGIT_SIZE
from headmix_vision.data.fitting import draw_sheet
from headmix_vision.errors import InputError
from headmix_vision.evaluation.extractors import FeatureExtractor, open_extractor
from headmix_vision.files.pictures import to_item

I3D_FILE = "i3d_torchscript.pt"
I3D_URL = "https://www.dropbox.com/s/ge9e5ujwgetktms/i3d_torchscript.pt?dl=1"
I3D_FRAMES = 10  # with fewer, pooling over time leaves nothing to average
_INK = 0.3  # of the brightest pixel
_TIE = 0.999  # of the most ink: windows that hold the whole digit, which has empty borders


class ClipExtractor(FeatureExtractor):
    """Extractor of features of uint8 clips: `features` float32 [B, D], and where it sees frames `frames` [B * T, E].

    Attributes:
        min_frames: The fewest frames of a clip that it can tell anything of.
    """

    grid_axes = 3
    min_frames = 2

    def check_frames(self, frames: int) -> None:
        """Raise InputError for clips of too few frames."""
        if frames < self.min_frames:
            raise InputError(
                f"--frames is {frames}, {self.description['name']} needs clips of at least {self.min_frames} frames"
            )


class I3DExtractor(ClipExtractor):
    """I3D trained on Kinetics-400, the network that the Fréchet video distance is defined by.

    The file is StyleGAN-V's TorchScript form of it, which is called with float clips [B, 3, T, H, W] of values from 0
    to 255 and `rescale=True, resize=True, return_features=True`.

    Args:
        path: The TorchScript file. It is a program, which can read and write files while it is loaded and run.
        device: Where to run.
        sha256: SHA-256 of the file, in hexadecimal, by which the caller vouches for it.

    Raises:
        InputError: No file there, no TorchScript in it, or a file that nobody vouches for.
    """

    mode = "RGB"
    min_frames = I3D_FRAMES
    num_classes = 0

    def __init__(self, path: Path, device: torch.device | str = "cpu", sha256: str | None = None) -> None:
        if not path.is_file():
            raise InputError(
                f"no I3D network at {path}: get {I3D_FILE} (StyleGAN-V, Skorokhodov et al. 2022) from {I3D_URL} and put"
                " it there, or give its place with --features PATH"
            )
        program = path.read_bytes()
        digest = hashlib.sha256(program).hexdigest()
        if sha256 is None:
            raise InputError(
                f"{path} is a program, which can do anything: if you trust it, give --features-sha256 with the hash"
                f" that sha256sum {path} prints, and compare it with the publisher's"
            )
        if sha256.lower() != digest:
            raise InputError(f"{path} has the SHA-256 {digest}, not {sha256} of --features-sha256: it was not opened")
        try:
            self.network = torch.jit.load(io.BytesIO(program), map_location=device).eval()
        except (RuntimeError, ValueError, EOFError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(f"{path} is damaged or no TorchScript file: {reason}") from None
        self.device = torch.device(device)
        self.description = {
            "name": "i3d",
            "weights": path.name,
            "sha256": digest,
            "features": "return_features",
            "mode": self.mode,
            "resize": "by the network itself (resize=True)",
        }

    @torch.inference_mode()
    def extract(self, samples: Tensor) -> dict[str, Tensor]:
        self.check_frames(samples.shape[2])
        try:
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                features = self.network(samples.float(), rescale=True, resize=True, return_features=True)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise InputError(f"{self.description['weights']} cannot be called as I3D is: {reason}") from None
        return {"features": features.float().flatten(1)}


def of_frames(images: FeatureExtractor, clips: Tensor, output: str = "features") -> Tensor:
    """Compute an output of an image extractor for the frames of clips, float32 [B, T, E].

    Equal frames, as in a frozen clip or digits cut out of real clips, are put through once.

    Args:
        images: The extractor of images.
        clips: uint8 [B, C, T, H, W].
        output: `features` or `logits`.
    """
    frames, places = clips.transpose(1, 2).flatten(0, 1).unique(dim=0, return_inverse=True)
    return images(frames)[output][places].unflatten(0, (len(clips), clips.shape[2]))


class FrameExtractor(ClipExtractor):
    """Features of an image extractor in a clip: their mean over time, and how much they change.

    With f_t the features of frame t, a clip has D = 2E: the mean of f_t, and the mean of |f_t+1 - f_t|. The first half
    knows the pictures and no order, the second the motion: it is zero for a clip that stands still, and large for one
    whose frames are shuffled.

    Args:
        images: The extractor of images.
    """

    def __init__(self, images: FeatureExtractor) -> None:
        self.images = images
        self.mode, self.num_classes, self.device = images.mode, images.num_classes, images.device
        self.num_features = None if images.num_features is None else 2 * images.num_features
        self.description = {
            **images.description,
            "features": f"of each frame, {images.description['features']}: mean over time, mean absolute change",
        }

    def extract(self, samples: Tensor) -> dict[str, Tensor]:
        frames = of_frames(self.images, samples)
        changes = frames.diff(dim=1).abs().mean(1)
        return {"features": torch.cat([frames.mean(1), changes], 1), "frames": frames.flatten(0, 1)}


class DigitsExtractor(FrameExtractor):
    """Features of a classifier of digits in clips of `moving_digits`: which digit it is, and how it moves.

    A clip has D = 2E: the mean over time of the features of the digit, cut out of each frame, and the mean absolute
    change over time of the features of the whole frame, which depend on where the digit stands. Scaled to the 8 x 8
    pixels that the classifier takes, a whole frame no longer tells which digit it is; a digit that is cut out no longer
    tells where it is. The features of frames are the features of the digit.
    """

    def __init__(self, images: FeatureExtractor) -> None:
        super().__init__(images)
        self.description["features"] = (
            f"{images.description['features']}: of the digit cut out of each frame, mean over time; of each frame, mean"
            " absolute change"
        )

    def extract(self, samples: Tensor) -> dict[str, Tensor]:
        digits = of_frames(self.images, find_digits(samples).crops)
        changes = of_frames(self.images, samples).diff(dim=1).abs().mean(1)
        return {"features": torch.cat([digits.mean(1), changes], 1), "frames": digits.flatten(0, 1)}


class SheetExtractor(ClipExtractor):
    """Features and logits of a classifier that was trained on the sheets of clips, data set `sheets`.

    Args:
        images: The extractor of sheets.
    """

    def __init__(self, images: FeatureExtractor) -> None:
        self.images = images
        self.mode, self.num_classes, self.device = images.mode, images.num_classes, images.device
        self.num_features, self.class_names, self.judges = images.num_features, images.class_names, images.judges
        self.description = {**images.description, "features": f"of a sheet, {images.description['features']}"}

    def extract(self, samples: Tensor) -> dict[str, Tensor]:
        clips = samples.permute(0, 2, 3, 4, 1).cpu().numpy()
        sheets = [draw_sheet(cast("list[Image.Image]", to_item(clip))) for clip in clips]
        return self.images(torch.stack([pil_to_tensor(sheet) for sheet in sheets]))


def open_clip_extractor(features: str, device: str = "cpu", sha256: str | None = None) -> ClipExtractor:
    """Open the extractor of a score of clips.

    Args:
        features: `i3d` (in torch's download folder) or the path of its TorchScript file (`.pt`); `digits` or
            `digits:PATH`, a classifier of digits for clips of `moving_digits`; `sheets:PATH`, a classifier of the data
            set `sheets`; or an image extractor as `open_extractor` takes it, for the frames of any clips.
        device: Where to run.
        sha256: SHA-256 of the TorchScript file, without which none is opened.

    Raises:
        InputError: Weights that are missing, with where to get them, or that cannot be used.
    """
    if features == "i3d":
        return I3DExtractor(Path(torch.hub.get_dir()) / "checkpoints" / I3D_FILE, open_device(device), sha256)
    if Path(features).suffix == ".pt":
        return I3DExtractor(Path(features), open_device(device), sha256)
    if sha256 is not None:
        raise InputError(
            f"--features-sha256 applies only to TorchScript files (i3d, PATH.pt), --features is {features}"
        )
    name, _, path = features.partition(":")
    if name == "digits":
        return DigitsExtractor(open_extractor(path or name, device))
    if name == "sheets":
        if not path:
            raise InputError(f"features are {features!r}, they must be sheets:PATH, with a run or an export")
        return SheetExtractor(open_extractor(path, device))
    return FrameExtractor(open_extractor(features, device))


@dataclass(frozen=True)
class Tracks:
    """The digit of each frame.

    Args:
        crops: uint8 [B, C, T, S, S].
        places: First row and first column of the crops before rounding, float32 [B, T, 2], in pixels.
    """

    crops: Tensor
    places: Tensor


def find_digits(clips: Tensor) -> Tracks:
    """Cut out the window of a digit's size that holds the most ink; the middle one of several that hold it all.

    Ink is what is brighter than 30 % of the brightest pixel; windows may stand out of the frame by half of a digit.

    Args:
        clips: uint8 [B, C, T, H, W].

    Raises:
        InputError: Frames smaller than two digits.
    """
    batch, _, frames, height, width = clips.shape
    size = digit_size(height, width)
    edge = size // 2
    pixels = clips.transpose(1, 2).flatten(0, 1)  # [B * T, C, H, W]
    bright = pixels.float().mean(1)
    ink = (bright - _INK * bright.amax((1, 2), keepdim=True)).relu()
    held = _windows(height, size).to(ink) @ ink @ _windows(width, size).to(ink).T  # [B * T, H + 1, W + 1]
    tied = (held >= _TIE * held.amax((1, 2), keepdim=True)).float()
    rows, columns = (torch.arange(length, device=clips.device, dtype=torch.float32) for length in held.shape[1:])
    count = tied.sum((1, 2))
    places = torch.stack([(tied.sum(2) * rows).sum(1) / count, (tied.sum(1) * columns).sum(1) / count], 1)
    row, column = places.round().long().unbind(1)
    windows = pad(pixels, (edge,) * 4).unfold(2, size, 1).unfold(3, size, 1)  # [B * T, C, H + 1, W + 1, S, S]
    crops = windows[torch.arange(len(pixels), device=clips.device), :, row, column]
    return Tracks(crops.unflatten(0, (batch, frames)).transpose(1, 2), (places - edge).unflatten(0, (batch, frames)))


def _windows(length: int, size: int) -> Tensor:
    """Which places of an axis each window holds, float32 [length + 1, length]: summing by them is a matrix product."""
    offsets = torch.arange(length) - torch.arange(length + 1)[:, None] + size // 2
    return ((offsets >= 0) & (offsets < size)).float()


def digit_size(height: int, width: int) -> int:
    """S on a canvas of a size, as `moving_digits` draws it; InputError where it has no room."""
    scale = min(height, width) // (2 * DIGIT_SIZE)
    if not scale:
        raise InputError(f"clips are {width}x{height} pixels, moving digits need at least {2 * DIGIT_SIZE}")
    return scale * DIGIT_SIZE
