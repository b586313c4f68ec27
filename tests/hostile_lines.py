"""Command lines for `hostile.py`, and the small files that they open."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import inputs
import numpy as np
import timm
from mutations import CALL
from PIL import Image
from training import gen_helpers, helpers

from headmix_vision import save_pretrained
from headmix_vision.data.datasets.digits import Digits


class Line(NamedTuple):
    """A command line.

    Args:
        words: The command line, in the folder of the kit.
        out: What it may write.
        opens: Patterns of the files that it opens.
    """

    words: str
    out: str
    opens: str = ""


CLS, GEN = (f"train-{kind} fit -c {kind}.yaml --trainer.max_steps 3 --run_dir" for kind in ("cls", "gen"))
THREE = "--model.num_classes 3 --data.val_split train --data.dataset"
CACHE = "cache-latents --images images/train --vae none --gray --image-size 8 --shard-size 8 --workers 0 --out"
SCORE = "--features model.safetensors --batch-size 8"
DRAW = "--num 2 --steps 1 --batch-size 2"
DATA = "--data digits --images 2"
MORE = "--ckpt_path last --trainer.max_epochs 2 --trainer.max_steps 5"
NPZ = "samples/samples.npz"
STUDENT = "--model.name dit_linear_digits --model.teacher gen"
DISTIL = "distill classifier fit -c distil.yaml --run_dir new --model.teacher"
SENSITIVITY = "analyze sensitivity --core linear --data digits --images 2 --out new --teacher"
PROBE = "evaluate probe --train digits:train[:60] --test digits:validation[:20] --batch-size 8 --model"
OF_RUN = "run/config.yaml run/checkpoints/best.ckpt"
OURS = [
    Line(f"{CLS} new --model.checkpoint model.safetensors", "new", "model.safetensors"),
    Line(f"{CLS} new --model.checkpoint run/checkpoints/last.ckpt", "new", "run/checkpoints/last.ckpt"),
    Line(f"{CLS} new {THREE} shards --data.root tars", "new", "tars/train/*"),
    Line(f"train-cls fit --run_dir run {MORE}", "run", "run/*.* run/checkpoints/*"),
    Line(
        f"train-cls fit --run_dir sharded {MORE}",
        "sharded",
        "sharded/*.* sharded/checkpoints/* sharded/checkpoints/*/*",
    ),
    Line("train-cls validate --run_dir run", "run", OF_RUN),
    Line("train-cls test --run_dir run", "run", OF_RUN),
    Line("train-cls predict --run_dir run --data.predict_path images/train/0", "run", OF_RUN),
    Line(f"{GEN} new --model.checkpoint pipe/transformer/diffusion_pytorch_model.safetensors", "new", "pipe/*/*.saf*"),
    Line(f"{GEN} new {THREE} latents --data.root cache", "new", "cache/*"),
    Line(f"train-gen fit --run_dir gen {MORE}", "gen", "gen/*.* gen/checkpoints/*"),
    Line("train-gen validate --run_dir gen", "gen", "gen/config.yaml gen/checkpoints/last.ckpt"),
    Line(f"{GEN.replace('train-gen', 'distill')} new {STUDENT}", "new", "gen/checkpoints/*"),
    Line(f"{DISTIL} run", "new", "run/checkpoints/best.ckpt"),
    Line(f"{SENSITIVITY} run", "new", "run/checkpoints/best.ckpt"),
    Line(f"sample images --model gen {DRAW} --out new", "new", "gen/checkpoints/last.ckpt"),
    Line(f"sample images --model pipe {DRAW} --out new", "new", "pipe/*.json pipe/*/*"),
    Line(f"sample images --model gen {DRAW} --num 6 --npz --out samples", "samples", "samples/*.* samples/images/*"),
    Line(f"sample videos --model clips {DRAW} --out new", "new", "clips/config.yaml clips/checkpoints/last.ckpt"),
    Line(
        f"evaluate fid --real images/train --fake samples {SCORE}", "", "samples/* samples/images/* model.safetensors"
    ),
    Line(f"evaluate fid --real stats.safetensors --fake {NPZ} {SCORE}", "", f"stats.safetensors {NPZ}"),
    Line(f"evaluate fid --real stats.npz --fake {NPZ} {SCORE}", "", "stats.npz"),
    Line(f"evaluate kid --real digits:all[:30] --fake {NPZ} --subset-size 4 {SCORE}", "", NPZ),
    Line(f"evaluate accuracy --fake {NPZ} --features run", "", f"{NPZ} run/checkpoints/best.ckpt"),
    Line(f"evaluate fvd --real drawn --fake drawn --frames 4 --subset-size 2 {SCORE}", "", "drawn/*.* drawn/images/*"),
    Line(f"{PROBE} run --teacher model.safetensors", "", "run/checkpoints/best.ckpt model.safetensors"),
    Line("export run --out new.safetensors", "new.safetensors", "run/checkpoints/best.ckpt"),
    Line("export gen --out new", "new", "gen/checkpoints/last.ckpt"),
    Line(
        "export sharded --checkpoint last --out new.safetensors",
        "new.safetensors",
        "sharded/checkpoints/last.ckpt sharded/checkpoints/last.*/*",
    ),
    Line(f"analyze rank --model run {DATA} --out new", "new", "run/checkpoints/best.ckpt"),
    Line(f"analyze entropy --model model.safetensors {DATA} --out rank", "rank", "model.safetensors rank/*"),
    Line("analyze maps --model pipe --data digits --out new", "new", "pipe/*.json pipe/*/*"),
    Line("analyze mixing --model gen --out new", "new", "gen/checkpoints/last.ckpt"),
    Line("analyze sweep block_count --task cls.yaml --out new --seeds 1 --dry-run", "new"),
    Line(f"{CACHE} cache", "cache", "cache/*"),
    Line("models deit_mhla_digits", ""),
    Line("doctor --device cpu", ""),
]
THEIRS = [
    Line(f"{DISTIL} local-dir:timm", "new", "timm/*"),
    Line(f"{SENSITIVITY} local-dir:timm", "new", "timm/*"),
    Line(f"{PROBE} local-dir:timm", "", "timm/*"),
    Line("analyze maps --model local-dir:timm --data digits --out new", "new", "timm/*"),
    Line(f"{CLS} new --data.dataset fashion_mnist --data.root clothes", "new", "clothes/*"),
    Line(f"{CLS} new", "new", "cls.yaml"),
    Line(f"{CLS} new {THREE} folder --data.root images", "new", "images/train/0/*.png"),
    Line(f"{CLS} new {THREE} table/label --data.root images/images.csv", "new", "images/images.csv"),
    Line(f"{GEN} new", "new", "gen.yaml"),
    Line(f"evaluate stats --real images/train {SCORE} --out new.safetensors", "new.safetensors", "images/train/1/*"),
    Line(f"{CACHE} new", "new", "images/train/0/*"),
    Line("index-shards tars/train --workers 0", "tars/train", "tars/train/*.tar"),
]
LINES = [*OURS, *THEIRS]
KIT = {  # what makes the files that the lines name
    "run": f"{CLS} run",
    "sharded": f"{CLS} sharded --trainer.strategy fsdp2 --trainer.devices 1",
    "gen": f"{GEN} gen",
    "clips": "train-gen fit -c clips.yaml --run_dir clips",
    "model.safetensors": "export run --out model.safetensors",
    "pipe": "export gen --out pipe",
    "samples": f"sample images --model gen {DRAW} --num 6 --npz --out samples",
    "drawn": f"sample videos --model clips {DRAW} --num 6 --out drawn",
    "cache": f"{CACHE} cache",
    "tars": "index-shards tars/train --workers 0",
    "stats.safetensors": f"evaluate stats --real images/train {SCORE} --out stats.safetensors",
    "rank": f"analyze entropy --model model.safetensors {DATA} --out rank",
}

VALUES = {  # of options, by kind; those without a text are drawn
    **{"text": "x\u2603y", "control": "a\x1b[31m\nb", "long": "x" * 5000, "list": "[1, 2]", "nested": "{a: {b: 1}}"},
    **{"fraction": "1.5", "negative": "-7", "zero": "0", "large": "1000000000", "huge": "1" + "0" * 30, "empty": ""},
    **{"nan": "nan", "inf": "inf", "small": "1e-320", "call": str(CALL), "misspelt": "1", "repeated": "1"},
    **{"directory": "folder", "absent": "no/such", "fifo": "fifo", "link": "loop", "device": "/dev/zero"},
    **{"other": "notes.txt", "near": "", "choice": "", "word": ""},
}
# right somewhere, mostly not here
WORDS = """
run gen clips sharded pipe samples samples/samples.npz model.safetensors stats.npz cache rank images tars/train
run/checkpoints/last.ckpt gen/checkpoints/last.ckpt tars/train/0.tar cls.yaml best last deit_mhla_digits
dit_mhla_digits dit_video_mhla_digits resnet18 deit_mhla_digits.x dit_s_2.y.z digits moving_digits folder latents
shards table/label torch/cifar10 videos gpu tpu hpu mps 16-mixed bf16-true transformer-engine fsdp2 ddp_spawn
deepspeed 0,1 true null auto -1 1 2 1.0 inception i3d lite0:cls.yaml digits[:0] digits:x[5:2]
"""


def make_kit(lines: list[Line], kit: Path, run: Callable[[list[str], Path], None]) -> None:
    """Make the files that lines open, by the commands themselves, which `run` runs in a folder."""
    kit.mkdir(parents=True, exist_ok=True)
    short = {"trainer__max_epochs": 1, "trainer__accumulate_grad_batches": 1}
    short |= {"trainer__limit_train_batches": 2, "trainer__limit_val_batches": 1}
    sizes = {"depth": 1, "embed_dim": 16, "num_heads": 2, "drop_path_rate": 0.1}
    model = {"name": "deit_mhla_digits", "model_args": sizes, "schedule": {"warmup_epochs": 0.5}}
    helpers.write_config(kit / "cls.yaml", **short, model=model)
    short |= {"samples__every_n_steps": None, "samples__classes": [0, 1]}
    gen_helpers.write_config(kit / "gen.yaml", **short)
    gen_helpers.write_config(kit / "clips.yaml", **short, **gen_helpers.VIDEO)
    stages = {name: {"steps": steps} for name, steps in (("attention", 2), ("features", 1), ("labels", 1))}
    model = {"core": "linear", **stages}
    helpers.write_config(kit / "distil.yaml", model=model, trainer__limit_val_batches=1, trainer__max_epochs=1)
    save_pretrained(timm.create_model("deit_softmax_digits", **sizes), kit / "timm")
    write_pictures(kit)
    (kit / "clothes").mkdir()
    inputs.write_fashion_mnist(kit / "clothes", 60, 12)
    words = " ".join(f"{line.words} {line.opens}" for line in lines)
    for name, command in reversed(KIT.items()):
        words += f" {command}" * (name in words)
    for name, command in KIT.items():
        if name in words and (name == "tars" or not (kit / name).exists()):
            run(command.split(), kit)


def write_pictures(kit: Path) -> None:
    """Write digits as folders of pictures, as a table and as tar shards, and statistics of features."""
    pixels = (Digits("train").images[:24, 0] * 255).byte().numpy()
    rows, shards = ["path,label,split"], {"train": [], "validation": []}  # type: ignore[var-annotated]
    for number, picture in enumerate(pixels):
        split, label = "validation" if number % 4 == 3 else "train", str(number % 3)
        path = kit / "images" / split / label / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
        rows.append(f"{path.relative_to(kit / 'images')},{label},{split}")
        shards[split] += [(f"{number}.png", path.read_bytes()), (f"{number}.cls", label.encode())]
    (kit / "images" / "images.csv").write_text("\n".join(rows) + "\n")
    for split, files in shards.items():
        inputs.write_tar(kit / "tars" / split / "0.tar", files)
    np.savez(kit / "stats.npz", mu=np.zeros(16), sigma=np.eye(16))
