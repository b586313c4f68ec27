"""Numbers of the attention matrices in the log of a run."""

from pathlib import Path

import pytest

from headmix_vision.analysis.profiles import PROFILES, profile_layers
from headmix_vision.data.datasets.digits import Digits
from headmix_vision.runs.networks import open_network

from . import gen_helpers, helpers

MODEL = {"model__name": "deit_mhla_digits", "model__model_args": {"depth": 2, "embed_dim": 24, "num_heads": 3}}


def test_they_are_those_of_the_weights_that_are_validated(tmp_path: Path):
    config = helpers.write_config(
        tmp_path / "config.yaml", **MODEL, analysis={"every_n_epochs": 2, "images": 3, "queries": 20}
    )
    run_dir = tmp_path / "run"
    assert helpers.run("fit", "--config", config, "--run_dir", run_dir) == 0
    rows = helpers.read_csv(run_dir / "metrics.csv")
    logged = {row["epoch"]: row for row in rows if row.get("analysis/rank/layer0")}
    assert list(logged) == ["1"] and logged["1"]["val/top1"]  # every second epoch, in the row of its validation
    network, about = open_network(run_dir, checkpoint="last")
    assert about["weights"] == "ema"
    digits = Digits("validation")
    images = (digits.images[:3] - 0.305) / 0.376
    expected = profile_layers(network, [images], [*PROFILES], queries=20)
    for name in ("rank", "stable_rank", "entropy", "distance"):
        for layer in (0, 1):
            mean = sum(row[name] for row in expected if row["layer"] == layer) / 3
            assert float(logged["1"][f"analysis/{name}/layer{layer}"]) == pytest.approx(mean, rel=1e-5)


def test_generators_log_them_of_noisy_samples(tmp_path: Path):
    config = gen_helpers.write_config(
        tmp_path / "config.yaml", trainer__max_epochs=1, samples__every_n_steps=None, analysis={"every_n_epochs": 1}
    )
    assert gen_helpers.run("fit", "--config", config, "--run_dir", tmp_path / "run") == 0
    (row,) = (row for row in helpers.read_csv(tmp_path / "run" / "metrics.csv") if row["analysis/rank/layer0"])
    assert 1 <= float(row["analysis/rank/layer0"]) <= 64 and row["val/loss"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"analysis": {"every_n_epochs": 1}}, "it has no attention layers of this package"),  # timm's own ViT
        ({**MODEL, "analysis": {"every_n_epochs": 1}, "data__val_split": None}, "analysis.every_n_epochs needs valid"),
        ({**MODEL, "analysis": {"every_n_epochs": 0}}, "analysis.every_n_epochs must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_logged_is_refused_before_training(
    options: dict, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = helpers.write_config(tmp_path / "config.yaml", **options)
    assert helpers.run("fit", "--config", config, "--run_dir", tmp_path / "run") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.csv").exists()
