"""What ranks can and cannot recall: keys made by hand, no training; and the script that trains, at a small size."""

import csv
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.recall.run import main
from headmix_vision.data.datasets.recall import PLACES, PatchRecall
from headmix_vision.layers import HeadMixAttention
from headmix_vision.ops import head_in_head

REPOSITORY = Path(__file__).parents[2]
COUNT = 8


def recall(attributes: int, r: int, beta: float, decay: float = 1.0) -> tuple[Tensor, Tensor]:
    """Recalled and right glyphs of dots ±1, [COUNT, 64, 16]: a sub-key of its own for each place, an identity mask.

    Keys have norm 1, so each of the attributes' sub-keys has the square norm 1 / attributes.
    """
    records = [PatchRecall("train", attributes).record(index) for index in range(COUNT)]
    places = torch.stack([torch.from_numpy(record.places) for record in records])
    asked = torch.stack([torch.from_numpy(record.asked) for record in records])
    values = 2 * torch.stack([torch.from_numpy(record.glyphs) for record in records]).double() - 1
    answers = torch.stack([v[torch.from_numpy(record.sources)] for v, record in zip(values, records, strict=True)])

    keys = F.one_hot(places, PLACES).double().flatten(2) * attributes**-0.5
    queries = F.one_hot(PLACES * asked[..., 0] + asked[..., 1], attributes * PLACES).double()
    strength = torch.full((*keys.shape[:2], 1), beta, dtype=torch.float64)
    mask = torch.eye(r, dtype=torch.float64)[None]
    log_decay = torch.full_like(strength, decay).log()
    q, k, v = (x[:, :, None] for x in (queries, keys, values))
    out, _ = head_in_head(q, k, v, strength, log_decay, mask)
    return out[:, :, 0] * (attributes * PLACES) ** 0.5 * attributes**-0.5, answers


def test_a_transition_of_rank_two_overwrites_two_places_exactly() -> None:
    recalled, answers = recall(attributes=2, r=2, beta=2.0)
    torch.testing.assert_close(recalled, answers, rtol=0, atol=1e-12)


def test_a_transition_of_rank_four_recalls_every_dot_of_four_places() -> None:
    """Strength 2 shared by four sub-heads leaves half of what a place held: the latest glyph outweighs all before."""
    recalled, answers = recall(attributes=4, r=4, beta=2.0)
    assert (recalled * answers > 0).all()
    assert (recall(attributes=4, r=2, beta=2.0)[0] * answers > 0).double().mean() < 0.97


@pytest.mark.parametrize("attributes", [2, 4])
def test_a_transition_of_rank_one_recalls_neither(attributes: int) -> None:
    """Whatever strength and decay, for a readout which tells signs only above 1 % of the largest output."""
    shares = []
    for beta in (0.1, 0.25, 0.5, 1.0, 1.5, 2.0):
        for decay in (1.0, 0.98, 0.95, 0.9, 0.8, 0.6, 0.4):
            recalled, answers = recall(attributes, 1, beta, decay)
            visible = recalled * answers > 0.01 * recalled.abs().amax()
            shares.append(visible.all(-1).double().mean().item())
    assert max(shares) < 0.85
    one_place, answers = recall(1, 1, 1.0)
    torch.testing.assert_close(one_place, answers, rtol=0, atol=1e-12)


def test_what_a_write_changes_is_of_the_rank_of_the_transition() -> None:
    """From one patch to the next, without decay: two places of different content need two dimensions."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 1, 16, generator=generator, dtype=torch.float64)
    state = torch.randn(1, 1, 16, 16, generator=generator, dtype=torch.float64)
    beta, log_decay = torch.ones(1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 1, dtype=torch.float64)
    for r in (1, 2, 4):
        mask = torch.eye(r, dtype=torch.float64)[None]
        _, after = head_in_head(q, k, v, beta, log_decay, mask, initial_state=state, output_final_state=True)
        assert torch.linalg.matrix_rank(after - state) == r


def test_beta_max_bounds_the_strength_of_a_write() -> None:
    """A first token reads beta times its own key, query and value: the output is proportional to beta_max."""
    x = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outputs = []
    for beta_max in (1.0, 0.5, 2.0):
        torch.manual_seed(0)
        core_args = {"num_sub_heads": 2, "beta_max": beta_max}
        layer = HeadMixAttention(8, 1, "hih", grid=(1, 1), core_args=core_args, proj_bias=False).double()
        outputs.append(layer(x))
    assert outputs[0].abs().max() > 0
    torch.testing.assert_close(outputs[1], 0.5 * outputs[0])
    torch.testing.assert_close(outputs[2], 2 * outputs[0])


@pytest.mark.parametrize("beta_max", [0.0, -1.0, 2.1])
def test_other_bounds_are_refused(beta_max: float) -> None:
    with pytest.raises(ValueError, match="beta_max must be"):
        HeadMixAttention(8, 1, "hih", core_args={"num_sub_heads": 2, "beta_max": beta_max})


@pytest.mark.slow
def test_the_script_trains_and_writes_table_csv_and_plot(tmp_path: Path) -> None:
    out, plot = tmp_path / "out" / "recall.csv", tmp_path / "recall.svg"
    small = ["--grid", 3, "--width", 16, "--steps", 4, "--batch_size", 4, "--eval_images", 8, "--device", "cpu"]
    options = ["--out", out, "--plot", plot, "--ranks", 1, 2, "--seeds", 0, 1, *small]
    command = [sys.executable, "-m", "experiments.recall.run", *map(str, options)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    with out.open() as file:
        rows = list(csv.DictReader(file))
    finals = [row for row in rows if row["age"] == "all" and row["step"] == "4"]
    assert [(row["sub_heads"], row["seed"]) for row in finals] == [("1", "0"), ("1", "1"), ("2", "0"), ("2", "1")]
    assert {row["age"] for row in rows} == {"all", "0", "1", "2", "4", "8"}
    assert int(finals[2]["parameters"]) - int(finals[0]["parameters"]) == 2**2
    table = result.stdout.splitlines()
    assert [line.split("|")[1:3] for line in table[2:]] == [[" 2 ", " 1 "], [" 2 ", " 2 "]]
    dots = [float(row["dots_percent"]) for row in finals[:2]]
    assert f"| {statistics.mean(dots):.2f} ± {statistics.stdev(dots):.2f} |" in table[2]
    assert ">r = 2</text>" in plot.read_text()


def test_the_script_refuses_in_one_line_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--out", str(tmp_path / "recall.csv"), "--ranks", "3"])
    assert end.value.code == "error: num_sub_heads=3 does not divide the head dim 64."
    assert not list(tmp_path.iterdir())
