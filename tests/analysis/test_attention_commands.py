"""`headmix analyze rank`, `entropy` and `maps`: what they read, what they leave, and what they refuse in one line."""

import csv
import json
import resource
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from matplotlib.figure import Figure

from headmix_vision import from_pretrained, save_pretrained, swap_attention
from headmix_vision.analysis.analysis_job import ImageRequest, read_inputs
from headmix_vision.analysis.maps import attention_maps, draw_maps
from headmix_vision.analysis.results import ResultFolder
from headmix_vision.cli.analyze import main as analyze
from headmix_vision.runs.networks import open_network

GENERATOR = Path(__file__).parents[1] / "fixtures" / "v0_1_0" / "generator"
LINEAR, MHLA = "deit_linear_digits", "deit_mhla_digits"
DIGITS = ("--data", "digits", "--device", "cpu", "--images", "2")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    try:
        analyze([str(argument) for argument in arguments])
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    return status, *capsys.readouterr()


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*"))}


def test_ranks_and_entropies_of_several_networks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    asked = ("--model", LINEAR, MHLA, *DIGITS, "--out", out)
    status, stdout, stderr = run(capsys, "rank", *asked, "--dry-run")
    assert (status, stdout, stderr) == (0, f"would write rank.svg and rank.csv of 2 networks to {out}\n", "")
    assert not out.exists()
    for command in ("rank", "entropy"):
        assert run(capsys, command, *asked)[0] == 0
    written = files(out)
    assert list(written) == [f"{name}.{kind}" for name in ("entropy", "rank") for kind in ("csv", "json", "svg")]
    rows = table(out / "rank.csv")
    assert [(row["model"], row["layer"], row["head"]) for row in rows] == [
        (model, str(layer), str(head)) for model in (LINEAR, MHLA) for layer in range(4) for head in range(2)
    ]
    ranks = {model: [float(row["rank"]) for row in rows if row["model"] == model] for model in (LINEAR, MHLA)}
    assert max(ranks[LINEAR]) <= 32 < sum(ranks[MHLA]) / 8  # head dim 32, 64 tokens
    record = json.loads(written["rank.json"])
    assert [about["name"] for about in record["networks"]] == [LINEAR, MHLA] and record["settings"]["images"] == 2
    assert f">{MHLA}</text>" in written["entropy.svg"].decode()
    assert run(capsys, "rank", *asked)[0] == 0 and files(out) == written  # the same command again
    before = files(out)
    for change, kind in ((("--images", "3"), "options"), (("--model", LINEAR), "weights")):
        status, _, stderr = run(capsys, "rank", *asked, *change)
        assert (status, files(out)) == (2, before) and f"holds results of other {kind}; choose another" in stderr


def test_maps_of_chosen_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    asked = ("--model", LINEAR, MHLA, *DIGITS, "--tokens", "0,0", "3,5", "--layers", "1", "3", "--out", out)
    assert run(capsys, "maps", *asked) == (0, f"wrote {out}/maps.png, {out}/maps.csv, {out}/maps.json\n", "")
    sums: dict[tuple[str, ...], float] = {}
    for row in table(out / "maps.csv"):
        key = tuple(row[name] for name in ("model", "layer", "image", "query"))
        sums[key] = sums.get(key, 0) + float(row["share"])
    assert list(sums) == [
        (model, layer, image, query)
        for model in (LINEAR, MHLA)
        for layer in ("1", "3")
        for image in ("0", "1")
        for query in ("0", "29")
    ]
    assert list(sums.values()) == pytest.approx([1] * 16, abs=1e-3)


@pytest.mark.parametrize("largest", ["maps.png", "maps.csv"])
def test_a_full_disk_leaves_all_results_or_none(largest: str, tmp_path: Path):
    out, figure = tmp_path / "out", Figure(figsize=(0.1, 0.1))
    folder = ResultFolder(out, "maps", [{"weights_sha256": "0"}], {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for kept in ({}, None):
        if kept is None:
            folder.write({"maps": figure}, {"maps": [{"share": 1}]})
            kept = files(out)
            assert sorted(kept) == ["maps.csv", "maps.json", "maps.png"]
        rows = 9999 if largest == "maps.csv" else 1
        drawn = Figure(figsize=(9, 9)) if largest == "maps.png" else figure
        drawn.text(0.5, 0.5, "many pixels")
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
        try:
            with pytest.raises(OSError) as caught:
                folder.write({"maps": drawn}, {"maps": [{"share": 2}] * rows})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert caught.value.filename == str(out / largest) and files(out) == kept


def test_generators_get_noisy_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tables = []
    for number, (source, level) in enumerate(((GENERATOR, 0.2), (GENERATOR / "pipeline", 0.2), (GENERATOR, 0.9))):
        out = tmp_path / str(number)
        assert run(capsys, "entropy", "--model", source, *DIGITS, "--noise-level", level, "--out", out)[0] == 0
        tables.append([{**row, "model": ""} for row in table(out / "entropy.csv")])
    assert tables[0] == tables[1] != tables[2]


def test_inputs_are_those_of_validation():
    network, about = open_network(Path(MHLA))
    inputs = read_inputs(network, about, ImageRequest("digits", None, "validation", 300, 0.5))
    source = timm.data.resolve_input_data_config(network)
    assert inputs.pictures is not None and len(set(inputs.names)) == 300
    torch.testing.assert_close((inputs.pictures - source["mean"][0]) / source["std"][0], inputs.arguments[0])
    assert inputs.arguments[0].shape == (300, 1, 8, 8)


def test_maps_of_clips_lay_frames_side_by_side():
    torch.manual_seed(0)
    small = {"input_size": (4, 16, 16), "depth": 1, "embed_dim": 16, "num_heads": 2}
    network: Any = timm.create_model("dit_video_mhla_digits", **small).eval()
    request = ImageRequest("moving_digits", None, "validation", 1, 0.5)
    inputs = read_inputs(network, {"objective": {}}, request)
    assert inputs.pictures is not None and inputs.pictures.shape == (1, 1, 4, 16, 16)
    (one,) = attention_maps("clips", network, inputs.arguments, [], None)
    frames, height, width = one.grid
    assert one.place == (frames // 2, height // 2, width // 2)
    figure = draw_maps([one], inputs.pictures, "clips")
    picture, drawn = (axes.images[0].get_array() for axes in figure.axes if axes.images and axes.get_title())
    assert picture.shape == (16, 4 * 16, 3) and drawn.shape == (height, frames * width)
    relative = one.shares.view(one.grid) * one.shares.numel()
    torch.testing.assert_close(torch.from_numpy(drawn[:, width : 2 * width].data), relative[1])
    ((x,), (y,)) = next(axes for axes in figure.axes if axes.get_title() == "clips\nlayer 0").lines[0].get_data()
    assert (x, y) == (one.place[0] * width + one.place[2], one.place[1])


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("rank", ("--data", "nothing"), "dataset 'nothing' is unknown"),
        ("rank", ("--data", "wds/"), "dataset 'wds/' is a stream, whose images cannot be chosen"),
        ("rank", ("--split", "test"), "split 'test' does not exist"),
        ("rank", ("--images", 361), "digits, split validation, has 360 images, --images is 361"),
        ("rank", ("--images", 0), "images must be a whole number of at least 1, got 0"),
        ("rank", ("--noise-level", 2), "noise_level must be a finite number from 0 to 1, got 2.0"),
        ("rank", ("--noise-level", 0.3), "--noise-level 0.3 applies to generators, these are classifiers"),
        ("rank", ("--root", "here"), "dataset 'digits' needs no files and takes no root, got 'here'"),
        ("rank", ("--background", "black"), "dataset 'digits' has no transparent pixels, got background 'black'"),
        ("rank", ("--queries", 0), "queries must be a whole number of at least 1, got 0"),
        ("entropy", ("--layers", 4), "it has layers 0 to 3"),
        ("rank", ("--layers", 4, "--dry-run"), "it has layers 0 to 3"),
        ("maps", ("--tokens", "8,0", "--dry-run"), "token 8,0 is not on the grid of deit_mhla_digits, which is 8x8"),
        ("entropy", ("--device", "abacus"), "device 'abacus' cannot be used here"),
        ("maps", ("--tokens", "8,0"), "token 8,0 is not on the grid of deit_mhla_digits, which is 8x8"),
        ("maps", ("--tokens", "5"), "token 5 is not on the grid"),
        ("maps", ("--tokens", "2,2", "3,3", "2,2"), "--tokens names 2,2 twice"),
        ("maps", ("--tokens", "a,b"), "'a,b' is not a place such as 3,4"),
        ("maps", ("--tokenz", "1,1"), "unknown option --tokenz; did you mean --tokens?"),
        ("maps", ("--model", MHLA, MHLA), "--model names a network twice"),
        ("maps", ("--model", "dit_mhla_s_2"), "nor a model that comes with weights (deit_hih_digits, "),
        ("rank", ("--checkpoint", "best"), "leave out --checkpoint best"),
        ("rang", (), "invalid choice: 'rang'"),
    ],
)
def test_wrong_input_is_refused(
    command: str, arguments: tuple[Any, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    status, stdout, stderr = run(capsys, command, "--model", MHLA, *DIGITS, "--out", out, *arguments)
    assert (status, stdout, len(stderr.splitlines()), out.exists()) == (2, "", 1, False), stderr
    assert stderr.startswith("error: ") and message in stderr


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """A ViT of timm, and the same with every other layer swapped, as folders."""
    torch.manual_seed(0)
    sizes = {"img_size": 24, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "in_chans": 1}
    network = timm.create_model("vit_tiny_patch16_224", num_classes=0, **sizes)
    save_pretrained(network, tmp_path / "teacher")
    swap_attention(network, "linear", layers=[1])
    save_pretrained(network, tmp_path / "student")
    return [tmp_path / "teacher", tmp_path / "student"]


def test_maps_of_teacher_and_swapped_student_stand_side_by_side(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"local-dir:{folder}" for folder in folders]
    options = (
        "--data",
        "digits",
        "--device",
        "cpu",
        "--tokens",
        "2,3",
        "--layers",
        "0",
        "1",
        "--out",
        tmp_path / "out",
    )
    assert run(capsys, "maps", "--model", *names, *options)[0] == 0
    rows = table(tmp_path / "out" / "maps.csv")
    shares = {
        (model, layer): [float(row["share"]) for row in rows if (row["model"], row["layer"]) == (model, layer)]
        for model in ("teacher", "student")
        for layer in "01"
    }
    assert shares["teacher", "0"] == pytest.approx(shares["student", "0"]) != shares["teacher", "1"]
    assert shares["teacher", "1"] != pytest.approx(shares["student", "1"])

    for option in (["--checkpoint", "last"], ["--raw"]):
        status, _, stderr = run(capsys, "maps", "--model", *names, *options[:-1], tmp_path / "other", *option)
        assert status == 2 and f"is not a run with checkpoints: leave out {' '.join(option)}" in stderr

    network: Any = from_pretrained(folders[0])
    attention, kept = network.blocks[1].attn, []
    attention.fused_attn = False
    attention.attn_drop.register_forward_hook(lambda _, inputs, __: kept.append(inputs[0]))
    request = ImageRequest("digits", None, "validation", 1, 0.5)
    network(*read_inputs(network, {}, request).arguments)
    row = kept[0][0, :, 1 + 2 * 6 + 3, 1:]  # behind the class token
    expected = (row / row.sum(-1, keepdim=True)).mean(0)
    assert shares["teacher", "1"] == pytest.approx(expected.tolist(), rel=1e-3)


def test_networks_without_attention_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_pretrained(timm.create_model("test_resnet"), tmp_path / "cnn")
    options = ("--data", "digits", "--out", tmp_path / "out")
    status, _, stderr = run(capsys, "rank", "--model", f"local-dir:{tmp_path / 'cnn'}", *options)
    assert status == 2 and "cannot be analysed" in stderr and stderr.count("\n") == 1
