"""Finished runs are read without Lightning; checkpoints are found and become networks."""

import pkgutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from headmix_vision import analysis, evaluation, runs, sampling
from headmix_vision.cli import export
from headmix_vision.diffusion import HeadMixVideoDiTPipeline, ObjectiveConfig
from headmix_vision.evaluation.extractors import open_extractor
from headmix_vision.models import HeadMixVideoDiT
from headmix_vision.runs.checkpoints import find_checkpoint, read_checkpoint
from headmix_vision.runs.directory import has_results
from headmix_vision.runs.exporting import ExportRequest, export_run
from headmix_vision.runs.networks import create_generator, load_network, open_network
from headmix_vision.runs.pipelines import load_pipeline

ABOUT = {"name": "deit_mhla_digits", "num_classes": 10, "img_size": None, "model_args": {}}


def averaged(value: torch.Tensor) -> torch.Tensor:
    """Gives what stands for the average of a weight; whole numbers, such as block grids, are not averaged."""
    return torch.zeros_like(value) if value.is_floating_point() else value


def save_checkpoint(path: Path, network: torch.nn.Module, **description: object) -> Path:
    """Write a checkpoint as training does, the weights being trained beside an average of zeros."""
    path.parent.mkdir(parents=True, exist_ok=True)
    trained = {f"net.{name}": value for name, value in network.state_dict().items()}
    average = {name: averaged(value) for name, value in trained.items()}
    torch.save({"state_dict": average, "current_model_state": trained, "headmix_vision": description}, path)
    return path


def test_data_and_finished_runs_are_read_without_lightning() -> None:
    packages = (runs, evaluation, sampling, analysis)
    modules = [
        f"{package.__name__}.{module.name}" for package in packages for module in pkgutil.iter_modules(package.__path__)
    ]
    assert len(modules) > 12
    data = ("datasets", "seeding", "fitting", "latent_cache", "shard_index", "batches", "augmentation")
    modules += [f"headmix_vision.data.{name}" for name in data]
    code = (
        f"import sys, importlib; [importlib.import_module(name) for name in {modules}];"
        "print([name for name in sys.modules if 'lightning' in name.split('.')[0].replace('lightning_utilities', '')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_checkpoints_become_networks(tmp_path: Path) -> None:
    classifier = timm.create_model("deit_mhla_digits")
    generator = timm.create_model("dit_linear_digits", depth=1)
    architecture = {name: value for name, value in generator.config.items() if not name.startswith("_")}
    for network, description in (
        (classifier, ABOUT),
        (generator, {"name": "dit_linear_digits", "kind": "generator", "architecture": architecture, "objective": {}}),
    ):
        checkpoint = read_checkpoint(save_checkpoint(tmp_path / "one.ckpt", network, **description))
        for raw in (False, True):
            state = load_network(checkpoint, raw=raw).state_dict()
            for name, value in network.state_dict().items():
                assert torch.equal(state[name], value if raw else averaged(value)), name
    checkpoint["state_dict"].pop("net.final_layer.linear.bias")
    with pytest.raises(ValueError, match="lacks 1 weights, first final_layer"):
        load_network(checkpoint)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "one.ckpt").rename(tmp_path / "checkpoints" / "last.ckpt")
    for path in (tmp_path, tmp_path / "checkpoints" / "last.ckpt"):
        with pytest.raises(ValueError, match="is of the generator dit_linear_digits, features come from a classifier"):
            open_extractor(str(path))


def test_a_generator_is_sampled_as_it_was_trained(tmp_path: Path) -> None:
    """Shift, variances, prediction and clipping of the objective reach the scheduler of the pipeline."""
    network = timm.create_model("dit_linear_digits", depth=1)
    architecture = {name: value for name, value in network.config.items() if not name.startswith("_")}
    about = {"name": "dit_linear_digits", "kind": "generator", "architecture": architecture}
    common = {**about, "vae": None, "class_names": None}

    def scheduler_of(objective: ObjectiveConfig) -> Any:
        path = save_checkpoint(tmp_path / "one.ckpt", network, **common, objective=asdict(objective))
        torch.save({**torch.load(path, weights_only=True), "global_step": 7}, path)
        pipeline, found = load_pipeline(path)
        assert pipeline.objective == objective and found["step"] == 7
        return pipeline.scheduler

    assert scheduler_of(ObjectiveConfig(shift=3.0)).config.shift == 3.0
    objective = ObjectiveConfig(kind="ddpm", prediction="v", beta_start=2e-4, beta_end=0.03)
    config = scheduler_of(objective).config
    assert (config.prediction_type, config.beta_start, config.beta_end) == ("v_prediction", 2e-4, 0.03)
    assert config.clip_sample  # pixels


def test_metrics_tell_results_also_where_they_are_damaged(tmp_path: Path) -> None:
    for rows, expected in ((b"0,1\n", False), (b"0,1\n1,2\n", True), (b"0,1\n1,\xff\n", True)):
        (tmp_path / "metrics.csv").write_bytes(b"epoch,step\n" + rows)
        assert has_results(tmp_path) == expected


def test_checkpoints_of_a_run_are_found(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no checkpoint at .*best\.ckpt"):
        find_checkpoint(tmp_path)
    last, best = (tmp_path / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))
    save_checkpoint(last, torch.nn.Linear(1, 1), **ABOUT)
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path, "last") == find_checkpoint(last) == last
    best.touch()
    assert find_checkpoint(tmp_path) == best and find_checkpoint(tmp_path, str(last)) == last
    with pytest.raises(ValueError, match="asked for other"):
        find_checkpoint(tmp_path, "other")
    best.unlink()
    best.symlink_to("nothing")
    with pytest.raises(ValueError, match=r"no checkpoint at .*best\.ckpt"):  # rather than the last one unasked
        find_checkpoint(tmp_path)


def test_a_lost_best_checkpoint_is_not_replaced_by_the_last_one(tmp_path: Path) -> None:
    network = timm.create_model(ABOUT["name"])
    last = save_checkpoint(tmp_path / "checkpoints" / "last.ckpt", network, **ABOUT)
    states = {"Best": {"best_model_path": "/elsewhere/run/checkpoints/best.ckpt"}, "Bar": {"best_model_path": ""}}
    torch.save({**torch.load(last, weights_only=True), "callbacks": states}, last)
    message = rf"no checkpoint at .*best\.ckpt .*; to use the last one, name it: {last}"
    for use in (
        lambda: open_network(tmp_path),
        lambda: open_extractor(str(tmp_path)),
        lambda: export_run(ExportRequest(run=tmp_path, out=tmp_path / "a.safetensors")),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    assert find_checkpoint(tmp_path, "last") == last
    states.pop("Best")  # as without a validation split
    torch.save({**torch.load(last, weights_only=True), "callbacks": states}, last)
    assert open_network(tmp_path)[1]["checkpoint"] == str(last)


def test_a_generator_of_videos_is_opened_exported_and_refused_as_one_of_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"depth": 1, "embed_dim": 24, "num_heads": 2, "input_size": (4, 8, 8)}
    network = timm.create_model("dit_video_mhla_digits", **sizes)
    about = {"name": "dit_video_mhla_digits", "kind": "generator", "architecture": network.architecture}
    about |= {"vae": None, "class_names": None, "objective": asdict(ObjectiveConfig(clean_prefix=0.5, shift=2.0))}
    path = save_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt", network, **about)
    torch.save({**torch.load(path, weights_only=True), "global_step": 7}, path)
    pipeline, found = load_pipeline(tmp_path / "run", raw=True)
    assert isinstance(pipeline, HeadMixVideoDiTPipeline) and pipeline.clip_size() == (4, 8, 8)
    assert pipeline.objective.clean_prefix == 0.5 and pipeline.scheduler.config.shift == 2.0
    export.main([str(tmp_path / "run"), "--raw", "--out", str(tmp_path / "exported")])
    assert "import HeadMixDiTPipeline; pipe = HeadMixDiTPipeline.from" in capsys.readouterr().out
    (tmp_path / "plain").touch()
    written = [path for path in (tmp_path / "exported").rglob("*") if path.is_file()]
    assert {path.stat().st_mode for path in written} == {(tmp_path / "plain").stat().st_mode}
    exported, there = load_pipeline(tmp_path / "exported")
    assert isinstance(exported, HeadMixVideoDiTPipeline) and there["weights_sha256"] == found["weights_sha256"]
    for place in (tmp_path / "run", tmp_path / "exported"):
        opened, _ = open_network(place, raw=place.name == "run")
        assert isinstance(opened, HeadMixVideoDiT) and opened.architecture == network.architecture
    started = create_generator("dit_video_mhla_digits", model_args=sizes, checkpoint=str(path))
    assert started.input_size == (4, 8, 8)

    (tmp_path / "exported" / "SHA256SUMS").unlink()
    index = tmp_path / "exported" / "model_index.json"
    index.write_text(index.read_text().replace('"HeadMixDiT"', '"HeadMixViT"'))
    with pytest.raises(ValueError, match=r"is not a pipeline of this package: its network is of the class"):
        load_pipeline(tmp_path / "exported")
