"""What heads can gather for the counting of pairs: weights made by hand, no training; and the script that trains."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments.counting.report import Setting, draw
from experiments.counting.run import main
from headmix_vision.data.datasets.counting import PairCounting
from headmix_vision.layers import HeadMixAttention

REPOSITORY = Path(__file__).parents[2]
HARD = 1e4  # scale of queries, with which a softmax over 16 places is a maximum


def towards(positions: Tensor, count: int) -> Tensor:
    """Directions of places on a circle: [N] -> [N, 2]; the product of two is largest where they are equal."""
    angles = 2 * torch.pi * positions.double() / count
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


@torch.no_grad()
def test_four_interleaved_heads_gather_sixteen_numbers() -> None:
    """The construction of the paper (appendix B.3): head h looks 4 h places on, its pseudo-key p another p places."""
    heads = 4
    count = heads**2
    numbers = torch.from_numpy(PairCounting("train").numbers(0, 3)).double()
    places = torch.arange(count)
    layer = HeadMixAttention(
        heads**2, heads, "softmax", "iha", grid=(heads, heads), head_mix_args={"pseudo_heads": heads}
    ).double()
    mix = layer.head_mix
    mix.mix.zero_()
    mix.mix[0, 0].fill_diagonal_(1)  # of the queries the first reads; all heads share their keys and values
    for pseudo in range(heads):
        mix.mix[1:, pseudo, :, pseudo] = 1
    mix.collapse.zero_()[:, 0] = 1

    q, k, v = torch.zeros(3, len(numbers), count, heads, heads, dtype=torch.float64)
    for head in range(heads):
        q[:, :, head, :2] = HARD * towards(places + heads * head, count)
        k[:, :, head, :2] = towards(places - head, count)
        v[:, :, head, head] = heads * numbers
    grid = layer.grid.repeat(heads)
    gathered = mix.after(layer.core(*mix.before(q, k, v), grid, attn_mask=None, is_causal=False)).flatten(2)
    expected = torch.stack([numbers.roll(-place, dims=1) for place in range(count)], dim=1)
    torch.testing.assert_close(gathered, expected)


@pytest.mark.parametrize("core", ["softmax", "linear"])
@torch.no_grad()
def test_one_plain_head_that_averages_symbols_gathers_all_that_counts_depend_on(core: str) -> None:
    data = PairCounting("train", encoding="symbol")
    numbers = torch.from_numpy(data.numbers(0, 20))
    images, counts = data.encode(numbers)
    layer = HeadMixAttention(data.modulus, 1, core, grid=(4, 4)).double()
    layer.qkv.weight.copy_(torch.cat([torch.zeros(2 * data.modulus, data.modulus), torch.eye(data.modulus)]))
    layer.proj.weight.copy_(torch.eye(data.modulus))
    layer.proj.bias.zero_()
    shares = layer(images.double().flatten(2).mT)
    occurrences = (16 * shares).round().long()
    torch.testing.assert_close(16 * shares, occurrences.double())
    closing = (-numbers[..., None] - data.coefficient * torch.arange(data.modulus)) % data.modulus  # [B, N, M]
    assert torch.equal((occurrences * occurrences.gather(2, closing)).sum(2), counts)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.counting.run", "--tiny", "--device", "cpu", *arguments]
    return subprocess.run(list(map(str, command)), cwd=REPOSITORY, capture_output=True, text=True)


@pytest.mark.slow
def test_the_script_trains_writes_and_goes_on(tmp_path: Path) -> None:
    out, plot = tmp_path / "out" / "counting.csv", tmp_path / "counting.svg"
    result = run("--out", out, "--cores", "softmax", "--seeds", 0)
    assert result.returncode == 0, result.stderr
    with out.open() as file:
        rows = list(csv.DictReader(file))
    models = {(row["encoding"], row["pseudo_heads"], row["heads"], row["width"]) for row in rows}
    values = {("value", *map(str, model)) for model in ((1, 1, 8), (2, 1, 8), (1, 2, 8), (2, 2, 8), (1, 2, 16))}
    assert models == values | {("symbol", "1", "1", "8"), ("symbol", "1", "2", "8")}
    assert {int(row["step"]) for row in rows} == {1, 2, 3, 4, 6, 7, 8, 9, 10, 12}
    plain, mixed = (
        next(row for row in rows if (row["encoding"], row["pseudo_heads"], row["heads"]) == ("value", pseudo, "2"))
        for pseudo in ("1", "2")
    )
    assert int(mixed["parameters"]) - int(plain["parameters"]) == 3 * 2 * 2 * 2 + 2 * 2
    assert int(mixed["attention_flops"]) > int(plain["attention_flops"])

    written = out.read_text()
    again = run("--out", out, "--cores", "softmax", "--plot", plot, "--seeds", 0, 1, "--lr", "3e-3", "1e-2")
    assert again.returncode == 0, again.stderr
    assert f"1 of {3 * 7}: " in again.stderr and set(written.splitlines()) < set(out.read_text().splitlines())
    table = again.stdout.splitlines()
    assert [line.split("|")[1:4] for line in table[2:4]] == [[" 3 ", " softmax ", " 1 "], [" 3 ", " softmax ", " 2 "]]
    assert ">commonest count</text>" in plot.read_text()


def test_each_panel_names_its_models() -> None:
    rows = [{"exact_percent": "50", "floor_percent": "20"}]
    plain = Setting("value", 3, "softmax", 1, 4, 8, 2, 12, 8, 0.0, 0)
    elsewhere = plain._replace(modulus=5)
    settings = (plain, elsewhere, elsewhere._replace(width=16), elsewhere._replace(encoding="symbol"))
    panels = draw({setting: [rows] for setting in settings}, 8).axes
    names = [{text.get_text() for text in panel.texts} for panel in panels]
    assert names[0] == {"plain", "commonest count"}
    assert names[1] == names[0] | {"plain, twice the width", "plain, symbols"}


def test_the_script_refuses_in_one_line_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--out", str(tmp_path / "counting.csv"), "--heads", "3"])
    assert end.value.code == "error: num_heads=3 does not divide the width dim=64."
    assert not list(tmp_path.iterdir())
