"""Load an exported digits classifier through timm alone, score it on the held-out digits, draw what it sees.

    python examples/classify_digits.py runs/demo/model.safetensors --out runs/demo/digits.png

Prints the top-1 accuracy and fails if it is not the one the training run stored in the file.
"""

import argparse
import json

import matplotlib
import timm
import timm.data
import torch
from matplotlib import pyplot as plt
from safetensors import safe_open

import headmix_vision  # noqa: F401  (registers the models with timm)
from headmix_vision.data.datasets.digits import Digits

matplotlib.use("Agg")


def load(path: str) -> tuple[torch.nn.Module, float]:
    """The model a file holds, and the top-1 accuracy, in [0, 1], which the training run stored in it."""
    with safe_open(path, "pt") as file:
        header = file.metadata()
    model = timm.create_model(header["model_name"], checkpoint_path=path, **json.loads(header["model_args"]))
    return model.eval(), json.loads(header["top1"])


def draw(images: torch.Tensor, predictions: torch.Tensor, targets: torch.Tensor, out: str) -> None:
    """A sheet of digits [B, 8, 8], wrong ones first, each under its predicted and, if wrong, its true label."""
    order = torch.argsort((predictions == targets).int(), stable=True)[:60]
    figure, axes = plt.subplots(6, 10, figsize=(10, 7))
    for axis, i in zip(axes.flat, order.tolist(), strict=True):
        right = predictions[i] == targets[i]
        axis.imshow(images[i], cmap="gray_r")
        axis.set_title(
            f"{predictions[i]}" if right else f"{predictions[i]}, is {targets[i]}",
            color="black" if right else "tab:red",
            fontsize=10,
        )
        axis.axis("off")
    wrong = int((predictions != targets).sum())
    figure.suptitle(f"Held-out digits with predictions: {wrong} of {len(targets)} wrong, wrong ones first")
    figure.tight_layout()
    figure.savefig(out, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", help="file written by headmix export")
    parser.add_argument("--out", default="digits.png", help="picture to write")
    arguments = parser.parse_args()

    model, stored = load(arguments.weights)
    config = timm.data.resolve_model_data_config(model)
    digits = Digits("validation")
    images, targets = digits.images, torch.tensor(digits.targets)
    with torch.inference_mode():
        predictions = model((images - config["mean"][0]) / config["std"][0]).argmax(1)
    top1 = (predictions == targets).float().mean().item()

    draw(images[:, 0], predictions, targets, arguments.out)
    print(f"top-1 through timm {top1:.2%}, stored by the training run {stored:.2%}; picture: {arguments.out}")
    if abs(top1 - stored) > 1e-6:
        raise SystemExit("error: the exported model does not give the accuracy of the run it came from.")


if __name__ == "__main__":
    main()
