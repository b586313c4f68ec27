"""`bench_models.py`: small runs on a CPU."""

import csv
import math
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from benchmarks import bench_models as bench
from benchmarks import model_table
from headmix_lab import measuring, model_families
from headmix_vision.ops import dispatch

OPTIONS = f":{model_table.TINY_OPTIONS}"


def run(out: Path, *arguments: str) -> list[dict[str, str]]:
    bench.main(["--device", "cpu", "--tiny", "--windows", "1", "--out", str(out), *arguments])
    (path,) = out.glob("*.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


def test_each_model_is_timed_beside_its_equal_and_timms(tmp_path: Path):
    rows = run(tmp_path, "--kinds", "deit_s", "--modes", "train")
    speeds = {row["model"].replace(OPTIONS, "").replace(OPTIONS[1:], ""): row for row in rows}
    ours, theirs = speeds["deit_mhla_small,cpe=True"], "deit_softmax_small:class_token=False,global_pool=avg,"
    for name, column in ((f"{theirs},cpe=True", "baseline"), (theirs, "plain"), ("deit_small_patch16_224", "timm")):
        ratio = float(ours["imgs_per_s"]) / float(speeds[name]["imgs_per_s"])
        assert math.isclose(float(ours[f"ratio_to_{column}"]), ratio, rel_tol=1e-3)
    assert len(rows) == 6 and not any(row["note"] for row in rows)


def test_a_second_call_keeps_finished_rows_and_runs_the_others(tmp_path: Path, monkeypatch, capsys):
    chosen = ("--kinds", "dit_s", "--modes", "inference")
    rows = run(tmp_path, *chosen)
    path = tmp_path / "models_cpu.csv"
    assert run(tmp_path, *chosen) == rows
    failed = path.read_text().splitlines(keepends=True)
    path.write_text("".join(failed[:2]) + failed[3].rstrip("\n") + bench.FAILED + "\n")
    capsys.readouterr()
    run(tmp_path, *chosen, "--minutes", "1e-9")
    assert "the same command goes on" in capsys.readouterr().out
    again = run(tmp_path, *chosen)
    assert sorted(row["model"] for row in again) == sorted(row["model"] for row in rows)
    assert again[0] == rows[0] and all(row["imgs_per_s"] for row in again)


def test_rows_of_replayed_calls_stand_beside_ordinary_ones(tmp_path: Path, monkeypatch):
    chosen = ("--kinds", "dit_s", "--modes", "inference")
    rows = run(tmp_path, *chosen)
    monkeypatch.setattr(bench, "are_calls_replayed", lambda: True)
    both = run(tmp_path, *chosen)
    assert both[: len(rows)] == rows and {row["compile"] for row in both[len(rows) :]} == {"replayed"}
    setting = model_table.Setting(("dit_mhla_s_2",), 32, 2, "inference", "default")
    assert bench._row("dit_mhla_s_2", None, {}, setting)["compile"] == "replayed default"


def test_rows_of_a_cpu_do_not_say_that_calls_are_replayed(monkeypatch):
    monkeypatch.setenv(dispatch.REPLAY, "1")
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    setting = model_table.Setting(("dit_mhla_s_2",), 32, 2, "inference", "none")
    assert bench._row("dit_mhla_s_2", None, {}, setting)["compile"] == "replayed"
    measuring.open_device("cpu")
    assert bench._row("dit_mhla_s_2", None, {}, setting)["compile"] == "none"


def test_tables_of_earlier_versions_are_refused(tmp_path: Path):
    (tmp_path / "models_cpu.csv").write_text("size,batch,mode,model,imgs_per_s\n64,2,train,deit,1\n")
    with pytest.raises(SystemExit, match="earlier version"):
        run(tmp_path)


class Broken(nn.Module):
    def forward(self, x):
        raise RuntimeError("it cannot\nrun")


def test_rows_say_what_fails_or_does_not_fit(tmp_path: Path, monkeypatch):
    """A model too large beside others is timed alone, one too large alone has a note; others keep their speeds."""
    make, resident = model_families.make_model, []

    def make_some(name, size, **further):
        if "linear" in name:
            return Broken()
        if name.startswith("deit_mhla_small:") and resident:
            raise torch.OutOfMemoryError
        if "small_patch16" in name:
            raise torch.OutOfMemoryError
        resident.append(name)
        return make(name, size, **further)

    monkeypatch.setattr(model_families, "make_model", make_some)
    monkeypatch.setattr(bench, "release_memory", resident.clear)
    with pytest.raises(SystemExit, match=r"cannot\nerror: rows failed"):
        run(tmp_path, "--kinds", "deit_s", "--modes", "inference")
    with (tmp_path / "models_cpu.csv").open() as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    notes = {name: row["note"] for name, row in rows.items()}
    assert notes["deit_small_patch16_224" + OPTIONS] == "out of memory"
    assert notes["deit_linear_small" + OPTIONS].startswith("failed: RuntimeError it cannot")
    alone = rows["deit_mhla_small" + OPTIONS]
    assert float(alone["imgs_per_s"]) > 0 and not alone["ratio_to_baseline"] and not alone["note"]


def test_the_gate_refuses_compiled_models_that_differ(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    name = "deit_mhla_tiny:depth=1,embed_dim=24"
    inputs = model_families.family_of(name).inputs(2, 64, generator)

    def wrong(model, mode):
        def call(x):
            eager = torch.compiler.is_compiling() or wrong.eager
            return model(x) if eager else model(x) * 1.2

        return call

    wrong.eager = True
    settings = {mode: model_table.Setting((), 64, 2, mode, "default") for mode in bench.MODES}
    monkeypatch.setattr(torch, "compile", wrong)
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: Eager(wrong))
    for mode in bench.MODES:
        bench.Contestant(name, settings[mode], inputs, 0.01)
    wrong.eager = False
    for mode in bench.MODES:
        with pytest.raises(SystemExit, match="outputs of deit_mhla_tiny"):
            bench.Contestant(name, settings[mode], inputs, 0.01)


class Eager:
    """Stand for the stance of uncompiled calls."""

    def __init__(self, function) -> None:
        self.function, self.before = function, function.eager

    def __enter__(self) -> None:
        self.function.eager = True

    def __exit__(self, *error) -> None:
        self.function.eager = self.before


def test_equal_models_differ_in_their_core_alone():
    for spelling in ("deit_mhla_tiny:depth=1,cpe=True", "deit_linear_tiny:depth=1"):
        ours, equal = (
            timm.create_model(name, img_size=64, **options)
            for name, options in map(
                model_families.read_spelling, (spelling, model_table.equal_softmax(spelling) or "")
            )
        )
        shapes = [
            {name: x.shape for name, x in model.named_parameters() if ".core." not in name} for model in (ours, equal)
        ]
        assert shapes[0] == shapes[1] and ours.global_pool == equal.global_pool
    assert model_table.equal_softmax("dit_video_mhla_s_2:cpe=True", cpe=False) == "dit_video_softmax_s_2"
    assert model_table.equal_softmax("deit_small_patch16_224") is None
    assert model_table.timm_deit("deit_hih_small:depth=1,cpe=True") == "deit_small_patch16_224:depth=1"


def test_the_whole_table_names_known_models_once():
    settings = list(model_table.whole_table(list(model_table.KINDS), bench.MODES, tiny=False))
    assert len(settings) == len(set(settings)) and set(model_table.FIRST[0][1:3]) <= {*settings[0][1:3]}
    names = {name for setting in settings for name in (*setting.models, *bench.baselines_of(setting.models, None))}
    assert all(timm.is_model(name.partition(":")[0]) for name in names)


def test_options_follow_the_name_of_a_model():
    read = model_families.read_spelling
    assert read("deit_mhla_small") == ("deit_mhla_small", {})
    assert read("a:b=[1,2],c=(3,4),d=5") == ("a", {"b": [1, 2], "c": (3, 4), "d": 5})
    spelled = "deit_mhla_iha_small:head_mix_args.pseudo_heads=4,global_every=5,head_mix_args.collapse=across_heads"
    name, options = read(spelled)
    assert name == "deit_mhla_iha_small"
    assert options == {"head_mix_args": {"pseudo_heads": 4, "collapse": "across_heads"}, "global_every": 5}
    model = model_families.make_model("deit_mhla_iha_tiny:head_mix_args.pseudo_heads=3,depth=1", 64)
    assert model.blocks[0].attn.head_mix.repeats == 3


def test_comparisons_of_head_mixes_have_a_file_of_their_own():
    name_of = bench.name_of_results
    assert name_of([]) == "models"
    assert name_of(["deit_mhla_small", "deit_small_patch16_224"]) == "models_deit"
    assert name_of(["dit_mhla_mea_s_2", "dit_iha_s_2:global_every=5", "dit_softmax_s_2"]) == "models_dit_iha_mea"
