"""A core, a head mix and a data set are one file and one line each: the diffs in `additions/`, applied to a copy."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DIFFS = sorted((HERE / "additions").glob("*.diff"))

USE = """
import pathlib, sys, timm, torch, headmix_vision
from headmix_vision import evaluate
from headmix_vision.cli import cache_latents
from headmix_vision.cli import models, train_cls, train_gen

assert headmix_vision.__file__.startswith(sys.argv[1])
small = {"depth": 1, "embed_dim": 32, "num_heads": 2}
image, options = torch.randn(2, 3, 64, 64), {"cpe": True, "qk_norm": True, "output_gate": True}
same = {"deit_swap_small": "deit_softmax_swap_small_patch16_224", "dit_swap_s_2": "dit_softmax_swap_s_2"}
for name, full in same.items():
    one, other = (sorted(p.shape for p in timm.create_model(n, **small).parameters()) for n in (name, full))
    assert one == other
for core in ("toy", "toy_swap", "toy_iha", "toy_mea", "softmax_swap", "linear_swap", "mhla_swap", "hih_swap"):
    for family in ("deit", "vit"):
        model = timm.create_model(f"{family}_{core}_tiny", img_size=64, **small, **options)
        model(image).square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model = timm.create_model(f"dit_{core}_s_2", input_size=8, num_classes=3, **small, **options)
    assert model(torch.randn(2, 4, 8, 8), torch.tensor([1.0, 2.0]), torch.tensor([0, 1])).shape == (2, 4, 8, 8)
assert "blocks.0.attn.head_mix.weight" in timm.create_model("deit_swap_tiny", **small).no_weight_decay()
timm.create_model("deit_mhla_swap_tiny", head_mix_args={"strength": 0.1}, **small)

models.main(["*_toy_*"])  # which does not count its operations

quick = ["--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"]
data = ["--data.dataset", "stripes", "--data.batch_size", "32", "--model.num_classes", "2"]
train_cls.main(["fit", "--model.name", "deit_toy_digits", *data, *quick, "--run_dir", "cls"], None)
train_gen.main(["fit", "--model.name", "dit_mhla_swap_digits", *data, *quick, "--run_dir", "gen"], None)
evaluate.main(["fid", "--real", "stripes", "--fake", "stripes[::2]", "--features", "cls", "--out", "fid.json"])
cache_latents.main(["--dataset", "stripes", "--vae", "none", "--gray", "--image-size", "8", "--out", "latents"])
assert pathlib.Path("fid.json").is_file() and pathlib.Path("latents/shard-00000.safetensors").is_file()
"""


@pytest.mark.parametrize("diff", DIFFS, ids=lambda path: path.stem)
def test_an_addition_is_one_file_and_one_line(diff):
    changes = diff.read_text().split("diff --git ")[1:]
    new, edited = (sorted((c for c in changes if ("new file" in c) is flag), key=len) for flag in (True, False))
    assert len(new) == len(edited) == 1
    lines = edited[0].split("\n@@", 1)[1].splitlines()[1:]
    assert [line[0] for line in lines if line[:1] in "+-"] == ["+"]


@pytest.mark.slow
def test_additions_work_everywhere(tmp_path):
    """The models of all families, training, scoring and caching know them, with nothing else changed."""
    package = tmp_path / "package"
    shutil.copytree(HERE.parent / "headmix_vision", package / "headmix_vision", ignore=shutil.ignore_patterns("__py*"))
    for diff in DIFFS:
        subprocess.run(["git", "apply", "--unsafe-paths", "--directory", package, diff], check=True, cwd=package)
    command = [sys.executable, "-c", USE, str(package)]
    work = tmp_path / "work"
    work.mkdir()
    result = subprocess.run(
        command, env={"PATH": "", "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}, cwd=work, capture_output=True
    )
    assert result.returncode == 0, result.stderr.decode()[-2000:]
