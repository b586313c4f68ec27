"""The schematic of attention over a photograph, with maps of small models."""

from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

from headmix_lab.schematic import main
from headmix_vision import save_pretrained, swap_attention


def test_the_schematic_shows_maps_of_a_softmax_model_and_of_a_swapped_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = []
    for kind in ("softmax", "mhla"):
        model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, embed_dim=24, num_heads=2)
        if kind == "mhla":
            swap_attention(model, kind, block_grid=(2, 2))
        save_pretrained(model, tmp_path / kind)
        models.append(f"{kind}=local-dir:{tmp_path / kind}")
    main(["--size", "64", "--model", *models, "--out", str(tmp_path / "maps.png")])
    main(["--size", "64", "--out", str(tmp_path / "plain.png")])
    heights = [Image.open(tmp_path / name).height for name in ("plain.png", "maps.png")]
    assert heights[0] < heights[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--token", "0.5", "1"], "--token must be two numbers from 0 to below 1, got 0.5 1.0"),
        (["--model", "mhla"], "'mhla' must be KIND=MODEL, KIND one of softmax, linear, mhla, hih"),
    ],
)
def test_wrong_options_of_the_schematic_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--out", str(tmp_path / "a.png")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()
