"""Files of other people run no code, connect to nothing and write nowhere else, whichever command opens them."""

import hashlib
import json
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import safetensors.torch
import timm
import torch
import yaml
from jsonargparse import Namespace
from jsonargparse._common import parsing_settings
from PIL import Image

from headmix_vision.cli import COMMANDS
from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.data.datasets.huggingface import open_huggingface
from headmix_vision.data.datasets.timm_readers import create_timm_dataset
from headmix_vision.diffusion import HeadMixDiTPipeline
from headmix_vision.errors import InputError
from headmix_vision.evaluation.clip_features import open_clip_extractor
from headmix_vision.models.autoencoders import load_autoencoder
from headmix_vision.recipes import FOLDER
from headmix_vision.runs.networks import load_network, open_network
from headmix_vision.runs.pipelines import load_pipeline
from headmix_vision.training.trust import Trust

from . import gen_helpers, helpers

MARK = "ran"
CANARY = f"""
open({MARK!r}, "w").close()
from lightning.pytorch import Callback
class Canary(Callback): ...
"""
CLASS = {"class_path": "canary.Canary"}
PROCESS = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", MARK]}}
LIGHTNING = "lightning.pytorch.callbacks"
SMALL = {"embed_dim": 16, "depth": 1, "num_heads": 2}
ADDRESSES = {"url": "http://canary.invalid/a.pth", "hf_hub_id": "canary/canary"}
SOURCES = {"pretrained": True, "pretrained_cfg_overlay": ADDRESSES}

_connections: list[object] = []


def _record(event: str, args: tuple[Any, ...]) -> None:
    if event == "socket.getaddrinfo" or (event == "socket.connect" and isinstance(args[1], tuple)):
        _connections.append(args)


sys.addaudithook(_record)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a module that leaves a mark when it is imported; no command may connect to anything."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "canary", raising=False)
    (tmp_path / "canary.py").write_text(CANARY)
    verdicts = dict(parsing_settings["import_path_verdicts"])  # which each command adds to
    monkeypatch.setitem(parsing_settings, "import_path_verdicts", verdicts)
    _connections.clear()
    yield tmp_path
    assert not _connections


def call(command: str, *args: object) -> int:
    """Run a command in this process; returns its exit status."""
    try:
        COMMANDS[command]([str(arg) for arg in args])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def refused(capsys: pytest.CaptureFixture[str], command: str, *args: object) -> str:
    """Run a command that has to end in one line, and to leave no mark; returns the line."""
    capsys.readouterr()
    assert call(command, *args) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and not has_run()
    return line


def has_run() -> bool:
    """Whether there is a mark; while a config is parsed, its folder is the working directory."""
    return any(Path().rglob(MARK))


def write_stranger(write: Callable[..., Path] = helpers.write_config, **options: Any) -> Path:
    """Write a run's folder with a config, and other things that make it a run."""
    run = Path("stranger")
    run.mkdir()
    write(run / "config.yaml", **{"run_dir": str(run), **options})
    return run


PLANTED: dict[str, dict[str, Any]] = {
    "callback": {"trainer__callbacks": [CLASS]},
    "callback in a text": {"trainer__callbacks": json.dumps([CLASS])},
    "callback by its path": {"trainer__callbacks": "canary.Canary"},
    "plugin": {"trainer__plugins": [CLASS]},
    "logger": {"trainer__logger": CLASS},
    "profiler": {"trainer__profiler": CLASS},
    "strategy": {"trainer__strategy": "canary.Canary"},
    "accelerator": {"trainer__accelerator": CLASS},
    "function": {
        "trainer__callbacks": {
            "class_path": f"{LIGHTNING}.StochasticWeightAveraging",
            "init_args": {"swa_lrs": 0.1, "avg_fn": "canary.Canary"},
        }
    },
    "folder elsewhere": {
        "trainer__callbacks": {"class_path": f"{LIGHTNING}.ModelCheckpoint", "init_args": {"dirpath": "elsewhere"}}
    },
    "process among model arguments": {"model__model_args": {"act_layer": PROCESS}},
    "process within a list": {"model__model_args": {"act_layer": [{"a": PROCESS}]}},
    "process among optimizer arguments": {"model__optimizer": {"args": {"betas": PROCESS}}},
    "address of weights": {"model__model_args": SOURCES},
    "data set of the hub": {"data__dataset": "hfds/canary/canary"},
    "command as the place of shards": {"data__dataset": "wds/", "data__root": f"pipe:touch {MARK};"},
    "trust in itself": {"trust_config": True, "trainer__callbacks": [CLASS]},
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED.keys())
def test_a_config_names_nothing_but_what_is_listed(planted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_stranger(**planted)
    assert "--trust-config" in refused(capsys, "train-cls", "validate", "--run_dir", run)
    assert not Path("elsewhere").exists()


@pytest.mark.parametrize(
    ("command", "args"),
    [
        ("train-cls", ("fit", "-c", "stranger/config.yaml", "--run_dir", "mine")),
        ("train-cls", ("fit", "--run_dir", "stranger", "--ckpt_path", "last")),
        ("train-cls", ("test", "--run_dir", "stranger")),
        ("train-cls", ("predict", "--run_dir", "stranger", "--data.predict_path", "a.png")),
        ("train-cls", ("fit", "-c", "stranger/config.yaml", "--print_config")),
        ("train-gen", ("fit", "-c", "stranger/config.yaml", "--ckpt_path", "last")),
        ("train-gen", ("validate", "--run_dir", "stranger")),
        ("distill", ("fit", "-c", "stranger/config.yaml", "--model.teacher", "a.ckpt")),
    ],
    ids=lambda part: part if isinstance(part, str) else part[0],
)
def test_every_command_of_training_refuses_it(
    command: str, args: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    write = helpers.write_config if command == "train-cls" else gen_helpers.write_config
    write_stranger(write, trainer__callbacks=[CLASS], model__model_args={"norm_layer": PROCESS})
    assert "--trust-config" in refused(capsys, command, *args)


def test_a_config_makes_no_objects_of_python(capsys: pytest.CaptureFixture[str]) -> None:
    config = Path("a.yaml")
    config.write_text(f"trainer: !!python/object/apply:os.system ['touch {MARK}']\n")
    refused(capsys, "train-cls", "fit", "-c", config, "--dry_run")


def test_a_part_of_a_config_in_another_file_is_not_trusted(capsys: pytest.CaptureFixture[str]) -> None:
    Path("part.yaml").write_text(yaml.safe_dump([CLASS]))
    config = helpers.write_config(Path("a.yaml"), trainer__callbacks="part.yaml")
    assert "--trust-config" in refused(capsys, "train-cls", "fit", "-c", config, "--dry_run")
    assert "--trust-config" in refused(capsys, "train-cls", "fit", "--trainer.callbacks", "part.yaml", "--dry_run")


@pytest.mark.parametrize(
    ("planted", "options"),
    [
        ({}, ("--trainer.callbacks=canary.Canary",)),
        ({}, ("--trainer.callbacks", "[{class_path: canary.Canary}]")),
        ({}, ("-c", "{trainer: {callbacks: canary.Canary}}")),
        ({"trainer__callbacks": [CLASS]}, ("--trust-config",)),
        ({"trainer__callbacks": [CLASS]}, ("--trust_config",)),
    ],
)
def test_the_command_line_names_any_class_or_trusts_the_config(
    planted: dict[str, Any], options: tuple[str, ...]
) -> None:
    config = helpers.write_config(Path("a.yaml"), **planted)
    assert call("train-cls", "fit", "-c", config, *options, "--dry_run") == 0
    assert has_run()


@pytest.mark.parametrize("name", [f"{LIGHTNING}.EarlyStopping", "EarlyStopping"])
def test_a_config_names_classes_of_lightning(name: str) -> None:
    planted = {"class_path": name, "init_args": {"monitor": "val/loss"}}
    config = helpers.write_config(Path("a.yaml"), trainer__callbacks=[planted])
    assert call("train-cls", "fit", "-c", config, "--dry_run") == 0


@pytest.mark.parametrize(
    ("planted", "args"),
    [
        ({"run_dir": "mine"}, ("--ckpt_path", "last")),
        ({"run_dir": "../mine"}, ()),
        ({"overwrite": True}, ()),
        ({"ckpt_path": "last"}, ()),
    ],
)
def test_a_config_changes_no_run_but_its_own(
    planted: dict[str, Any], args: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    write_stranger(**planted)
    line = refused(capsys, "train-cls", "fit", "-c", "stranger/config.yaml", *args)
    assert f"--{next(iter(planted))} on the command line" in line


def test_links_out_of_a_run_are_not_followed(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    run = write_stranger()
    (place / "mine").mkdir()
    (place / "mine/kept.txt").write_text("kept")
    resume = ("fit", "--ckpt_path", "last")
    links = ((".replacing", "", resume), ("metrics.csv", "new", resume), ("checkpoints", "", ("validate",)))
    for name, target, options in links:
        (run / name).symlink_to(place / "mine" / target)
        line = refused(capsys, "train-cls", *options, "--run_dir", run)
        assert f"{run / name} is a link to {place / 'mine' / target}, outside of the run directory" in line
        (run / name).unlink()
    assert [path.name for path in (place / "mine").iterdir()] == ["kept.txt"]
    assert (place / "mine/kept.txt").read_text() == "kept"


def test_a_resume_command_says_what_the_config_needs() -> None:
    data = Namespace(dataset="digits", root=None)
    options = Namespace(run_dir="runs/a", trainer=Namespace(), model=Namespace(model_args=None), data=data)
    assert Trust(["fit"]).needed_to_resume(options) == []
    assert Trust(["fit", "--trainer.callbacks=EarlyStopping"]).needed_to_resume(options) == []
    assert Trust(["fit", "--trainer.callbacks=canary.Canary"]).needed_to_resume(options) == ["--trust-config"]
    options.data.dataset = "hfds/some/images"
    assert Trust(["fit", "--data.dataset", "hfds/some/images"]).needed_to_resume(options) == ["--trust-config"]


def write_checkpoint(path: Path, network: torch.nn.Module, **about: Any) -> Path:
    """Write a checkpoint as training does, where commands look for it."""
    path.parent.mkdir(parents=True)
    state = {f"net.{name}": value for name, value in network.state_dict().items()}
    torch.save({"state_dict": state, "headmix_vision": about, "global_step": 1}, path)
    return path.parent.parent


def write_classifier(**model_args: Any) -> Path:
    network = timm.create_model("deit_linear_digits", **SMALL)
    about = {"name": "deit_linear_digits", "num_classes": 10, "img_size": None, "class_names": None, "top1": None}
    return write_checkpoint(
        Path("classifier/checkpoints/best.ckpt"), network, **about, model_args={**SMALL, **model_args}
    )


def write_generator(**about: Any) -> Path:
    network = timm.create_model("dit_linear_digits", **SMALL)
    known = {"kind": "generator", "name": "dit_linear_digits", "architecture": network.architecture, "objective": {}}
    known |= {"vae": None, "class_names": None, "num_classes": 10}
    return write_checkpoint(Path("generator/checkpoints/last.ckpt"), network, **{**known, **about})


ANALYSIS = ("--data", "digits", "--images", "2", "--out", "analysis")


def test_stored_arguments_fetch_no_weights() -> None:
    run = write_classifier(**SOURCES, checkpoint_path="a.pth", cache_dir="elsewhere")
    assert call("export", run, "--out", "a.safetensors") == 0
    header = safetensors.safe_open("a.safetensors", "pt").metadata()
    assert not {"pretrained", "checkpoint_path"} & json.loads(header["model_args"]).keys()
    assert call("evaluate", "fid", "--real", "digits[:20]", "--fake", "digits[20:40]", "--features", run) == 0
    assert call("analyze", "rank", "--model", run, *ANALYSIS) == 0
    network, _ = open_network(run)
    weights = {name: value.contiguous() for name, value in network.state_dict().items()}
    header = {"model_name": "deit_linear_digits", "model_args": json.dumps({**SMALL, "pretrained": True})}
    safetensors.torch.save_file(weights, "b.safetensors", header)
    assert open_network(Path("b.safetensors"))[1]["name"] == "deit_linear_digits"


def test_weights_that_are_none_are_not_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    for source in ({}, {"pretrained_cfg": {**ADDRESSES, "source": "hf-hub"}}):
        header = {"model_name": "resnet18", "model_args": json.dumps(source)}
        safetensors.torch.save_file({}, "a.safetensors", header)
        with pytest.raises(InputError, match="holds no weights"):
            open_network(Path("a.safetensors"))
    assert "holds no weights" in refused(capsys, "evaluate", "is", "--fake", "digits", "--features", "a.safetensors")
    model = timm.create_model("resnet18", num_classes=10)
    header = {"model_name": "resnet18", "model_args": json.dumps({"num_classes": 10, **source})}
    safetensors.torch.save_file(model.state_dict(), "b.safetensors", header)
    assert torch.equal(open_network(Path("b.safetensors"))[0].fc.bias, model.fc.bias)


def test_an_autoencoder_that_a_file_names_is_not_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    run = write_generator(vae="canary/canary")
    for command, args in (("sample", ("images", "--model", run)), ("export", (run,))):
        line = refused(capsys, command, *args, "--out", "out")
        assert "autoencoder 'canary/canary' is not in the hub's cache" in line and "--vae canary/canary" in line
    with pytest.raises(InputError, match="is not fetched because a file names it"):
        load_pipeline(run)
    config = gen_helpers.write_config(Path("a.yaml"), model__vae="canary/canary", samples__every_n_steps=1)
    assert "is not in the hub's cache" in refused(capsys, "train-gen", "fit", "-c", config, "--run_dir", "r")


def test_indices_of_pipelines_name_no_modules(capsys: pytest.CaptureFixture[str]) -> None:
    run = write_generator()
    assert call("export", run, "--out", "pipe") == 0
    Path("pipe/SHA256SUMS").unlink()  # whoever edits an index leaves out or rewrites its sum
    index = json.loads(Path("pipe/model_index.json").read_text())
    for part in ("transformer", "scheduler"):
        Path("pipe/model_index.json").write_text(json.dumps({**index, part: ["canary", "Canary"]}))
        with pytest.raises(InputError, match=f"names the module canary for {part}"):
            HeadMixDiTPipeline.from_pretrained("pipe")
        refused(capsys, "sample", "images", "--model", "pipe", "--out", "out")
    assert call("analyze", "rank", "--model", "pipe", *ANALYSIS) == 0  # which needs the network alone
    Path("pipe/model_index.json").write_text(json.dumps({**index, "vae": ["diffusers", "AutoencoderKL"]}))
    assert "lacks the folder vae" in refused(capsys, "sample", "images", "--model", "pipe", "--out", "out")
    Path("pipe/model_index.json").write_text(json.dumps(index))
    assert HeadMixDiTPipeline.from_pretrained("pipe").transformer.architecture["depth"] == 1
    assert not has_run()


def test_autoencoders_are_classes_of_diffusers(capsys: pytest.CaptureFixture[str]) -> None:
    vae = diffusers.AutoencoderKL(block_out_channels=(4,), norm_num_groups=4, latent_channels=2, sample_size=8)
    vae.save_pretrained("a/vae")
    Path("a/model_index.json").write_text(json.dumps({"_class_name": "Canary", "vae": ["canary", "Canary"]}))
    assert load_autoencoder("a").sha256 is not None
    Path("a/vae/config.json").write_text(json.dumps({"_class_name": "Canary", "auto_map": {"AutoModel": "canary.C"}}))
    Path("pictures").mkdir()
    options = ("--images", "pictures", "--image-size", 8, "--out", "latents.safetensors")
    assert "of the class 'Canary'" in refused(capsys, "cache-latents", "--vae", "a", *options)


class Writer(torch.nn.Module):
    """A program of TorchScript that makes a file."""

    def forward(
        self, x: torch.Tensor, rescale: bool = False, resize: bool = False, return_features: bool = False
    ) -> torch.Tensor:
        return torch.from_file("ran", True, 4) + x.flatten(1)[:, :4]


def test_programs_of_features_run_when_their_hash_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    torch.jit.script(Writer().eval()).save("a.pt")
    score = ("fvd", "--real", "moving_digits[:8]", "--fake", "moving_digits[8:16]", "--frames", 10, "--image-size", 16)
    assert "a.pt is a program" in refused(capsys, "evaluate", *score, "--features", "a.pt")
    digest = hashlib.sha256(Path("a.pt").read_bytes()).hexdigest()
    other = refused(capsys, "evaluate", *score, "--features", "a.pt", "--features-sha256", "0" * 64)
    assert f"has the SHA-256 {digest}, not {'0' * 64}" in other
    with pytest.raises(InputError, match="is a program"):
        open_clip_extractor("a.pt")
    extractor = open_clip_extractor("a.pt", sha256=digest.upper())
    extractor(torch.zeros(1, 3, 10, 8, 8, dtype=torch.uint8))
    assert has_run()


def test_shards_are_read_without_being_unpacked(place: Path) -> None:
    folder = place / "data" / "shards"
    folder.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save("a.png")
    with tarfile.open(folder / "0.tar", "w") as archive:
        for name in ("../../escaped.png", str(place / "absolute.png"), "0.png"):
            archive.add("a.png", name)
        link = tarfile.TarInfo("1.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)
    before = {path for path in place.rglob("*") if not path.is_relative_to(folder)}
    assert call("index-shards", folder) == 0
    assert {path for path in place.rglob("*") if not path.is_relative_to(folder)} == before


def test_a_video_opens_no_socket(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("av")
    Path("videos").mkdir()
    Path("videos/a.mp4").write_text(
        "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\nm=video 5004 RTP/AVP 96\r\n"
        "a=rtpmap:96 H264/90000\r\n"
    )
    score = ("fvd", "--real", "videos", "--fake", "videos", "--frames", 10, "--features", write_classifier())
    assert "a.mp4 cannot be read as a video" in refused(capsys, "evaluate", *score)


@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
def test_a_local_data_set_fetches_nothing(name: str) -> None:
    Path("pictures").mkdir()
    configs = yaml.safe_dump({"configs": [{"config_name": "default", "data_files": "hf://datasets/canary/a.parquet"}]})
    Path("pictures", name).write_text(f"---\n{configs}---\n" if name.endswith(".md") else configs)
    with pytest.raises(InputError, match="names data at hf://datasets/canary"):
        open_huggingface(SplitRequest("hfds", "train", (3, 8, 8), "classification", root="pictures"))


def test_timm_readers_start_no_ghostscript(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gs", "gswin64c"):
        (place / name).write_text(f"#!/bin/sh\ntouch {place / MARK}\n")
        (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(place), prepend=os.pathsep)
    Path("pictures/train/a").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save("pictures/train/a/b.png", format="EPS")
    images = create_timm_dataset("folder", root="pictures", split="train")
    with pytest.raises(RuntimeError, match="Failed to load"):  # timm tries again
        images[0]
    assert not has_run()


def test_networks_are_made_without_their_sources() -> None:
    about = {"name": "deit_linear_digits", "num_classes": 10, "img_size": None, "model_args": {**SMALL, **SOURCES}}
    network = timm.create_model("deit_linear_digits", **SMALL)
    state = {f"net.{name}": value for name, value in network.state_dict().items()}
    loaded = load_network({"state_dict": state, "headmix_vision": about})
    assert torch.equal(loaded.pos_embed, network.pos_embed)


def test_recipes_are_trusted_by_their_folder_alone(tmp_path: Path):
    shipped, real = FOLDER / "gen" / "imagenet256.yaml", Path(__file__).parents[2] / "configs" / "gen"
    copied = tmp_path / "headmix_vision" / "configs" / "gen" / shipped.name
    copied.parent.mkdir(parents=True)
    copied.write_text(shipped.read_text())
    for path, trusted in ((shipped, True), (real / shipped.name, True), (copied, False)):
        assert Trust(["fit", "-c", str(path)]).knows("latents/imagenet256") == trusted
