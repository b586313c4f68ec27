"""Wan and Sana by command: prompts and latents cached, trained, killed, resumed, exported, and drawn by diffusers."""

import csv
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
import torch.multiprocessing
from diffusers import SanaPipeline, SanaTransformer2DModel, WanPipeline, WanTransformer3DModel
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch.utilities import rank_zero_only
from safetensors.torch import load_file, save_file

from headmix_vision.cli import analyze, cache_latents, distill, export, train_gen
from headmix_vision.data.datasets.latents import LatentShards
from headmix_vision.files.tensors import sampled_sha256
from headmix_vision.models import pipeline_folder
from headmix_vision.models.convert_sana import SanaMHLATransformer2DModel
from headmix_vision.models.convert_wan import WanMHLATransformer3DModel
from headmix_vision.models.pipeline_folder import TextEncoder, describe_text_encoder, read_shift
from headmix_vision.runs.checkpoints import read_checkpoint

from .tiny_pipelines import PROMPTS, make_sana, make_wan, write_files

WAN_ARGS = {"block_grid": [1, 2, 2], "token_grid": [2, 2, 2]}


def call(main: Any, *args: object) -> int:
    try:
        main([str(arg) for arg in args])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny pipelines `wan` and `sana`, and caches `clips` of two sizes and `pictures`."""
    root = tmp_path_factory.mktemp("prompted")
    wan, sana = make_wan(root / "wan"), make_sana(root / "sana")
    clips = write_files(root / "videos", videos=True, sizes=[(32, 48), (48, 32)])
    pictures = write_files(root / "images", videos=False, sizes=[(16, 16)])
    common = ("--device", "cpu", "--workers", 0)
    of_clips = ("--videos", root / "videos", "--prompts", clips, "--frames", 5, "--sizes", "32x48", "48x32")
    assert call(cache_latents.main, *of_clips, "--vae", wan, "--out", root / "clips", *common) == 0
    of_pictures = ("--images", root / "images", "--prompts", pictures, "--image-size", 16)
    assert call(cache_latents.main, *of_pictures, "--vae", sana, "--out", root / "pictures", *common) == 0
    return root


def options_of(made: Path, kind: str, run: Path, *args: object) -> list[str]:
    """Return the options of a run of six steps."""
    cache = {"wan": "clips", "sana": "pictures"}[kind]
    options = json.dumps(WAN_ARGS) if kind == "wan" else '{"block_grid": [2, 2]}'
    words = (
        *("fit", "--model.transformer", made / kind, "--data.root", made / cache, "--run_dir", run),
        *("--model.layers", "[1]", "--model.model_args", options, "--trainer.accelerator", "cpu"),
        *("--trainer.devices", 1, "--trainer.max_steps", 6, "--trainer.log_every_n_steps", 1),
        *("--model.optimizer.lr", 1e-2, "--data.num_workers", 0, "--data.prompt_dropout", 0.5),
        *("--checkpoint_every_n_steps", 3, "--data.batch_size", 2, *args),
    )
    return [*map(str, words)]


def fit(made: Path, kind: str, run: Path, *args: object, main: Any = train_gen.main) -> int:
    return call(main, *options_of(made, kind, run, *args))


def test_cached_prompts_are_those_of_the_pipeline(made: Path) -> None:
    for kind, cls, cache, numbers in (
        ("wan", WanPipeline, "clips/48x32", [1, 3]),
        ("sana", SanaPipeline, "pictures", range(4)),
    ):
        pipeline = cls.from_pretrained(made / kind)
        options = TextEncoder(made / kind).options
        prompts = [PROMPTS[number] for number in numbers]
        expected = pipeline.encode_prompt(prompts, negative_prompt=[""] * len(prompts), **options)
        expected = [(one,) for one in expected] if kind == "wan" else [expected[:2], expected[2:]]
        for prompt_dropout, wanted in ((0.0, expected[0]), (1.0, expected[1])):
            shards = LatentShards(made / cache, prompt_dropout=prompt_dropout)
            for place in range(len(shards)):
                latent, prompt = shards.read(place)
                assert list(latent.shape) == shards.manifest["shape"] and len(prompt) == len(wanted)
                for found, tensor in zip(prompt, wanted, strict=True):
                    torch.testing.assert_close(found.float(), tensor[place].float(), rtol=1e-3, atol=1e-3)
    assert (read_shift(made / "wan"), read_shift(made / "sana")) == (3.0, 2.0)


@pytest.mark.parametrize("kind", ["wan", "sana"])
def test_a_run_goes_on_bit_equal_and_its_export_is_drawn_by_diffusers(
    kind: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert fit(made, kind, whole) == 0
    assert fit(made, kind, parts, "--trainer.max_steps", 3) == 0
    assert fit(made, kind, parts, "--ckpt_path", "last") == 0
    one, other = (read_checkpoint(run / "checkpoints" / "last.ckpt") for run in (whole, parts))
    assert one["global_step"] == other["global_step"] == 6
    for state in ("state_dict", "current_model_state"):
        for name, tensor in one[state].items():
            assert torch.equal(other[state][name], tensor), name
    assert one["headmix_vision"]["objective"]["shift"] == {"wan": 3.0, "sana": 2.0}[kind]
    with (whole / "metrics.csv").open() as file:
        losses = [float(row["train/loss_step"]) for row in csv.DictReader(file) if row.get("train/loss_step")]
    assert len({*losses}) == 6

    data = ("--data", "latents", "--root", made / {"wan": "clips", "sana": "pictures"}[kind], "--split", "train")
    options = ("--teacher", made / kind, "--student", whole, *data, "--images", 4, "--device", "cpu")
    assert call(analyze.main, "sensitivity", *options, "--out", tmp_path / "table") == 0
    with (tmp_path / "table" / "sensitivity.csv").open(newline="") as file:
        assert [row["layer"].split(".")[2:] for row in csv.DictReader(file)] == [["1", "attn1"], []]

    capsys.readouterr()
    assert call(export.main, whole, "--out", tmp_path / "out") == 0
    scope: dict[str, Any] = {}
    exec(capsys.readouterr().out, scope)
    pipe = scope["pipe"]
    pipe.set_progress_bar_config(disable=True)
    assert type(pipe.transformer) is (WanMHLATransformer3DModel if kind == "wan" else SanaMHLATransformer2DModel)
    for name, tensor in pipe.transformer.state_dict().items():
        assert torch.equal(tensor, one["state_dict"][f"net.transformer.{name}"]), name
    drawn = {"prompt": "a red square", "num_inference_steps": 2, "output_type": "np", "height": 32, "width": 32}
    if kind == "wan":
        assert pipe(num_frames=5, **drawn).frames.shape == (1, 5, 32, 32, 3)
    else:
        assert pipe(use_resolution_binning=False, **drawn).images.shape == (1, 32, 32, 3)


@pytest.mark.parametrize("kind", ["wan", "sana"])
def test_the_new_layers_learn_from_the_original_before_all_weights_do(kind: str, made: Path, tmp_path: Path) -> None:
    options = ("--model.distill_steps", 3, "--model.teacher_weight", 1.0)
    if kind == "sana":  # equal mixing weights are the original
        options += ("--model.model_args", '{"block_grid": [2, 2], "mixing_init": "locality"}')
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert fit(made, kind, whole, *options, main=distill.main) == 0
    assert fit(made, kind, parts, *options, "--trainer.max_steps", 3, main=distill.main) == 0
    first = read_checkpoint(parts / "checkpoints" / "last.ckpt")["current_model_state"]
    original = {"wan": WanTransformer3DModel, "sana": SanaTransformer2DModel}[kind].from_pretrained(
        made / kind / "transformer"
    )
    changed = {
        name
        for name, tensor in original.state_dict().items()
        if not torch.equal(first[f"net.transformer.{name}"], tensor)
    }
    layer = f"{'blocks' if kind == 'wan' else 'transformer_blocks'}.1.attn1."
    assert changed and all(name.startswith(layer) for name in changed)
    assert fit(made, kind, parts, *options, "--ckpt_path", "last", main=distill.main) == 0
    one, other = (read_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"] for run in (whole, parts))
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
    assert not torch.equal(one["net.transformer.proj_out.weight"], first["net.transformer.proj_out.weight"])


@pytest.mark.parametrize("kind", ["wan", "sana"])
def test_the_layers_that_a_conversion_changes_most_are_named(
    kind: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ("--block-grid", *((1, 2, 2) if kind == "wan" else (2, 2)))
    cache = ("--data", "latents", "--root", made / {"wan": "clips", "sana": "pictures"}[kind], "--split", "train")
    words = ("sensitivity", "--teacher", made / kind, *cache, "--images", 4, "--device", "cpu", "--keep", 1)
    assert call(analyze.main, *words, *grid, "--out", tmp_path / "out") == 0
    with (tmp_path / "out" / "sensitivity.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["order"] for row in rows] in (["1", "2", "0"], ["2", "1", "0"])
    errors = [float(row["attention_error"]) for row in rows]
    if kind == "wan":
        assert min(errors) > 0 and errors[2] == pytest.approx(sum(errors[:2]) / 2, rel=1e-3)
        assert min(float(row["feature_error"]) for row in rows) > 0
    else:  # equal mixing weights are the original
        assert max(errors) < 1e-6
    layer = next(number for number, row in enumerate(rows) if row["order"] == "2")
    assert f"swap: --model.layers '[{layer}]'" in capsys.readouterr().out
    assert call(analyze.main, *words, "--core", "hih", "--out", tmp_path / "new") == 2
    assert "core=hih does not apply to a pipeline of diffusers, it must be mhla" in capsys.readouterr().err


def start(made: Path, run: Path, *args: object) -> subprocess.Popen[bytes]:
    """Start a run of Wan in a process of its own."""
    command = [sys.executable, "-m", "headmix_vision", "train-gen", *options_of(made, "wan", run, *args)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def weights(run: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = read_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"]
    return state


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_equal(made: Path, tmp_path: Path) -> None:
    options = ("--trainer.devices", 1, "--checkpoint_every_n_steps", 5, "--trainer.max_steps", 60)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(made, whole, *options).wait() == 0
    process = start(made, killed, *options)
    while not (killed / "checkpoints" / "last.ckpt").is_file():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert start(made, killed, *options, "--ckpt_path", "last").wait() == 0
    assert all(torch.equal(weights(killed)[name], tensor) for name, tensor in weights(whole).items())


def work(rank: int, size: int, ports: list[int], commands: list[list[str]]) -> None:
    """Train in one of `size` processes, as torchrun would start them."""
    torch.set_num_threads(1)
    rank_zero_only.rank = rank  # Lightning has read it where it was imported
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for port, command in zip(ports, commands, strict=True):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(size)}
        os.environ |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
        train_gen.main(command)


SHARDED = ("fsdp2",)
REPLICATED = ("headmix_vision.training.sharding.ShardedStrategy", "--trainer.strategy.shard_size", 2)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size", "strategy"), [("wan", 2, SHARDED), ("sana", 4, REPLICATED)])
def test_processes_train_shards_as_copies(
    kind: str, size: int, strategy: tuple[object, ...], made: Path, tmp_path: Path
) -> None:
    ways, adapters = {"copies": ("ddp",), "shards": strategy}, {"all": 0, "lora": 2}
    alike = ("--trainer.precision", "32-true", "--model.optimizer.args", "{eps: 0.01}")  # no Adam step of mere rounding
    alike += ("--trainer.devices", size, "--data.batch_size", 1)

    def command(name: str, way: str, steps: int, *options: object) -> list[str]:
        further = ("--trainer.max_steps", steps, "--trainer.strategy", *ways[way], *options)
        return options_of(made, kind, tmp_path / name / way, *alike, "--model.lora.rank", adapters[name], *further)

    commands = [command(name, way, 3) for name, way in (("all", "copies"), ("all", "shards"), ("lora", "copies"))]
    commands += [command("lora", "shards", 2), command("lora", "shards", 3, "--ckpt_path", "last")]
    arguments = (size, [find_free_network_port() for _ in commands], commands)
    # Autograd of this process may have threads, which a fork does not survive.
    torch.multiprocessing.start_processes(work, arguments, size, start_method="forkserver")
    for name in adapters:
        copies, shards = (weights(tmp_path / name / way) for way in ways)
        assert all(".lora_" in key or ".processor." in key for key in copies) == (name == "lora")
        torch.testing.assert_close(shards, copies, rtol=1e-4, atol=1e-5)
    assert call(export.main, tmp_path / "lora" / "shards", "--out", tmp_path / "out") == 0


def test_wrong_input_is_refused_in_one_line(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(message: str, status: int) -> None:
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert status == 2 and len(lines) == 1 and message in lines[0], lines

    def cache(rows: str, *args: object, vae: str = "sana") -> int:
        (tmp_path / "table.csv").write_text(rows)
        return call(
            cache_latents.main,
            *("--images", made / "images", "--prompts", tmp_path / "table.csv", "--vae", made / vae),
            *("--out", tmp_path / "out", "--image-size", 16, "--device", "cpu", *args),
        )

    refused("has no prompt for 3 of 4 files, first 1.png", cache("path,prompt\n0.png,a\n"))
    refused("line 2: there is no '9.png'", cache("path,prompt\n9.png,a\n"))
    refused("line 3: 0.png has a prompt already", cache("path,prompt\n0.png,a\n0.png,b\n"))
    refused("line 2: the prompt of 0.png is empty", cache("path,prompt\n0.png,\n"))
    refused("line 2: path is missing", cache("path,prompt\n,a\n"))
    refused("it must have path and prompt", cache("path,label\n0.png,a\n"))
    refused("is not a pipeline folder of diffusers", cache("", vae="wan/vae"))
    refused("a size is height x width", cache("", "--sizes", "16"))
    long = "".join(f"{made / 'images' / str(number)}.png,{'word ' * 400 * (number == 0)}a\n" for number in range(4))
    assert cache("path,prompt\n" + long, "--workers", 0) == 0
    assert capsys.readouterr().out.endswith("longer ones are cut: 1\n")

    run = tmp_path / "run"
    refused("layers must be a whole number from 0 to 1, got 2", fit(made, "wan", run, "--model.layers", "[2]"))
    refused("did you mean block_grid", fit(made, "wan", run, "--model.model_args", "{block_gird: [1, 2, 2]}"))
    large = json.dumps({"block_grid": [1, 2, 3], "token_grid": [2, 3, 3]})  # the other size has two tokens in width
    refused(
        "48x32, latents [4, 2, 6, 4]: block_grid (1, 2, 3) is larger than",
        fit(made, "wan", run, "--model.model_args", large),
    )
    large = '{"block_grid": [9, 2]}'
    refused("pictures, latents [4, 8, 8]: block_grid (9, 2) is", fit(made, "sana", run, "--model.model_args", large))
    make_wan(tmp_path / "short", rope_max_seq_len=2)
    short = ("--model.transformer", tmp_path / "short")
    refused("2 rotary positions along an axis, the token grid is", fit(made, "wan", run, *short))
    refused("holds latents of images with 4 channels", fit(made, "wan", run, "--data.root", made / "pictures"))
    refused("samples.every_n_steps must be null", fit(made, "wan", run, "--samples.every_n_steps", 5))
    refused("model.vae=x/y does not apply", fit(made, "wan", run, "--model.vae", "x/y"))
    hub = ("--model.transformer", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    refused(f"Download a hub id first: hf download {hub[1]}", fit(made, "wan", run, *hub))
    shutil.copytree(made / "wan", tmp_path / "wan")
    index = json.loads((tmp_path / "wan" / "model_index.json").read_text())
    (tmp_path / "wan" / "model_index.json").write_text(json.dumps({**index, "_class_name": "FluxPipeline"}))
    other = ("--model.transformer", tmp_path / "wan")
    refused("is a FluxPipeline, it must be one of WanPipeline, SanaPipeline", fit(made, "wan", run, *other))
    index["transformer"] = ["diffusers", "FluxTransformer2DModel"]
    (tmp_path / "wan" / "model_index.json").write_text(json.dumps(index))
    refused("is a FluxTransformer2DModel, it must be a WanTransformer3DModel", fit(made, "wan", run, *other))
    shutil.rmtree(tmp_path / "wan")
    make_wan(tmp_path / "wan", num_layers=1)
    weights = tmp_path / "wan" / "vae" / "diffusion_pytorch_model.safetensors"
    save_file({name: value + 1 for name, value in load_file(weights).items()}, weights, {"format": "pt"})
    refused("are of another autoencoder than", fit(made, "wan", run, *other, "--model.layers", "[0]"))


def test_a_cache_of_some_of_its_sizes_is_not_trained_on(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write_files(tmp_path / "images", videos=False, sizes=[(16, 16), (16, 8)])
    words = ("--out", tmp_path / "out", "--device", "cpu", "--workers", 0)
    pictures = ("--images", tmp_path / "images", "--prompts", table, "--vae", made / "sana", *words)
    assert call(cache_latents.main, *pictures, "--sizes", "16x16", "17x8") == 2
    assert "image size 17x8 is not a multiple of 2" in capsys.readouterr().err and not (tmp_path / "out").exists()
    (tmp_path / "images" / "more").mkdir()  # files beside folders have no label, and need none
    (tmp_path / "images" / "0.png").rename(tmp_path / "images" / "more" / "0.png")
    table.write_text(table.read_text().replace("0.png", "more/0.png"))
    assert call(cache_latents.main, *pictures, "--sizes", "16x16", "16x8") == 0
    assert len(LatentShards(tmp_path / "out" / "16x16")) == 2
    shutil.rmtree(tmp_path / "out")

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    clips = (
        "--videos",
        made / "videos",
        "--prompts",
        made / "videos.csv",
        "--vae",
        made / "wan",
        "--frames",
        5,
        *words,
    )
    with monkeypatch.context() as patch:
        patch.setattr("headmix_vision.data.latent_cache._write_shards", end)
        assert call(cache_latents.main, *clips, "--sizes", "32x48", "48x32") == 130
    shutil.copytree(made / "clips" / "32x48", tmp_path / "out" / "32x48", dirs_exist_ok=True)
    root = ("--data.root", tmp_path / "out", "--trainer.max_steps", 1)
    assert fit(made, "wan", tmp_path / "run", *root) == 2
    assert "out/48x32 has no latents.json: make a cache with headmix cache-latents" in capsys.readouterr().err
    assert call(cache_latents.main, *clips, "--sizes", "32x48", "48x32") == 0
    assert fit(made, "wan", tmp_path / "run", *root) == 0


def copied(made: Path, folder: Path, kind: str = "wan") -> Path:
    shutil.copytree(made / kind, folder)
    return folder


def shift_weights(folder: Path) -> Path:
    """Add 1 to one matrix of the text encoder of a pipeline folder."""
    file = folder / "text_encoder" / "model.safetensors"
    state = load_file(file)
    name = next(name for name in sorted(state) if state[name].ndim > 1)
    save_file({**state, name: state[name] + 1}, file, {"format": "pt"})
    return folder


def edit_json(file: Path, **entries: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def test_prompts_of_another_text_encoder_are_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shift_weights(copied(made, tmp_path / "other"))
    for main in (train_gen.main, distill.main):
        assert fit(made, "wan", tmp_path / "run", "--model.transformer", other, main=main) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        message = f"made with {made / 'wan'}, are of another text encoder than that in {other} (differing: sha256)"
        assert message in line and line.endswith(f"cache them with --vae {other}")
    cache = ("--data", "latents", "--root", made / "clips", "--split", "train", "--block-grid", 1, 2, 2)
    words = ("sensitivity", "--teacher", other, *cache, "--images", 4, "--device", "cpu", "--out", tmp_path / "table")
    assert call(analyze.main, *words) == 2
    assert "are of another text encoder than" in capsys.readouterr().err
    edit_json(other / "model_index.json", text_encoder=["transformers", "T5EncoderModel"])
    assert fit(made, "wan", tmp_path / "run", "--model.transformer", other) == 2
    assert "(differing: sha256, class)" in capsys.readouterr().err
    clips = ("--videos", made / "videos", "--prompts", made / "videos.csv", "--frames", 5, "--sizes", "32x48", "48x32")
    edit_json(other / "model_index.json", text_encoder=["transformers", "UMT5EncoderModel"])
    assert call(cache_latents.main, *clips, "--vae", other, "--out", made / "clips", "--device", "cpu") == 2
    assert "was begun with prompts {'sha256': " in capsys.readouterr().err

    shutil.rmtree(other / "text_encoder")
    assert fit(made, "wan", tmp_path / "run", "--model.transformer", other, "--trainer.max_steps", 1) == 0
    assert f"note: {other} has no text encoder to compare" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["wan", "sana"])
def test_a_text_encoder_is_known_by_what_changes_embeddings(
    kind: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, known = copied(made, tmp_path / "copy", kind), describe_text_encoder(made / kind)
    assert known is not None and describe_text_encoder(folder) == known
    pipeline: Any = {"wan": WanPipeline, "sana": SanaPipeline}[kind].from_pretrained(folder)
    prompts = {"prompt": PROMPTS, "do_classifier_free_guidance": False}
    pipeline.encode_prompt(**prompts)  # the tokenizer keeps its last padding
    pipeline.text_encoder.to(torch.bfloat16)
    pipeline.save_pretrained(tmp_path / "saved", max_shard_size="2KB")
    assert (tmp_path / "saved" / "text_encoder" / "model.safetensors.index.json").is_file()
    edit_json(tmp_path / "saved" / "text_encoder" / "config.json", _name_or_path="x", transformers_version="0")
    assert describe_text_encoder(tmp_path / "saved") == known

    config, tokenizer = folder / "text_encoder" / "config.json", folder / "tokenizer" / "tokenizer.json"
    for file, entries in (
        (config, {"layer_norm_epsilon": 0.1, "rms_norm_eps": 0.1}),
        (tokenizer, {"normalizer": {"type": "Lowercase"}}),
        (folder / "tokenizer" / "tokenizer_config.json", {"padding_side": "left"}),
    ):
        text = file.read_text()
        edit_json(file, **entries)
        described = describe_text_encoder(folder)
        assert described is not None and described["sha256"] != known["sha256"], file
        file.write_text(text)
    monkeypatch.setattr(diffusers.utils, "is_transformers_available", lambda: False)
    without = describe_text_encoder(folder)
    assert without is not None and without.items() < known.items() and "sha256" in without
    monkeypatch.undo()
    file = folder / "text_encoder" / "model.safetensors"
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    assert describe_text_encoder(folder) == known  # transformers prefers the safetensors
    file.unlink()
    described = describe_text_encoder(folder)
    assert described is not None and described["sha256"] != known["sha256"]
    tokenizer.rename(tokenizer.with_name("spiece.model"))
    assert describe_text_encoder(folder) not in (None, described)
    file.with_name("pytorch_model.bin").unlink()
    assert describe_text_encoder(folder) is None


def test_large_weights_are_sampled_at_both_ends_and_between(tmp_path: Path) -> None:
    def hashed(**changes: int) -> str:
        weight = torch.arange(4096.0 * 512).view(4096, 512)
        for row in changes.values():
            weight[row] += 1e6
        save_file({"weight": weight}, tmp_path / "model.safetensors")
        return sampled_sha256([tmp_path / "model.safetensors"])

    known = hashed()
    assert known == hashed(unread=100)
    assert len({known, hashed(first=0), hashed(last=4095), hashed(between=4094 * 3 // 7 + 1)}) == 4


def test_prompts_of_earlier_versions_are_read(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_hash(folder: Path) -> dict[str, Any]:
        return {name: value for name, value in (describe_text_encoder(folder) or {}).items() if name != "sha256"}

    common = ("--vae", made / "wan", "--out", tmp_path / "clips", "--device", "cpu", "--workers", 0, "--frames", 5)
    words = (*common, "--videos", made / "videos", "--prompts", made / "videos.csv", "--sizes", "32x48", "48x32")
    with monkeypatch.context() as patch:
        patch.setattr(pipeline_folder, "describe_text_encoder", without_hash)
        assert call(cache_latents.main, *words) == 0
    root = ("--data.root", tmp_path / "clips", "--trainer.max_steps", 1)
    assert fit(made, "wan", tmp_path / "run", *root) == 0
    assert f"note: an earlier version made {tmp_path / 'clips' / '32x48'}: " in capsys.readouterr().err

    earlier = (tmp_path / "clips" / "32x48" / "latents.json").read_text()
    (tmp_path / "clips" / "32x48" / "shard-00000.safetensors").unlink()
    shutil.rmtree(tmp_path / "clips" / "48x32")
    with pytest.warns(UserWarning, match="earlier version, which did not record its text encoder"):
        assert call(cache_latents.main, *words) == 0
    assert (tmp_path / "clips" / "32x48" / "latents.json").read_text() == earlier
    assert "sha256" in json.loads((tmp_path / "clips" / "48x32" / "latents.json").read_text())["prompts"]
    assert fit(made, "wan", tmp_path / "other", *root) == 0
    capsys.readouterr()
    other = shift_weights(copied(made, tmp_path / "wan"))
    assert fit(made, "wan", tmp_path / "new", *root, "--model.transformer", other) == 2
    assert f"the prompts of {tmp_path / 'clips' / '48x32'}, made with" in capsys.readouterr().err


def test_an_export_spares_its_pipeline_and_its_run_and_needs_room(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wan = copied(made, tmp_path / "wan")
    (wan / ".git").mkdir()
    run = wan / "run"
    assert fit(made, "wan", run, "--model.transformer", wan, "--trainer.max_steps", 1) == 0
    before = sorted(tmp_path.rglob("*"))

    def refused(*args: object) -> str:
        capsys.readouterr()
        assert call(export.main, run, "--out", *args) == 2
        assert sorted(tmp_path.rglob("*")) == before
        (line,) = capsys.readouterr().err.splitlines()
        return str(line)

    assert "wan/inside is not apart from" in refused(wan / "inside")
    assert "wan holds the run itself" in refused(wan, "--overwrite")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        assert re.search(r"^error: File too large: \S+$", refused(tmp_path / "out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        assert f"a copy of {wan} needs" in refused(tmp_path / "out")
    shutil.move(run, tmp_path / "run")
    assert call(export.main, tmp_path / "run", "--out", tmp_path / "out") == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        path.name for path in (made / "wan").iterdir()
    )


def test_an_export_has_the_text_encoder_of_training(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(made, tmp_path / "wan")
    assert fit(made, "wan", tmp_path / "run", "--model.transformer", folder, "--trainer.max_steps", 1) == 0
    shift_weights(folder)
    assert call(export.main, tmp_path / "run", "--out", tmp_path / "out") == 2
    assert f"was trained on prompts of another text encoder than that in {folder}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
