"""Photographs cut into training pictures of the left half and validation pictures of the right one."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headmix_lab.photographs import SIZE, main


def test_halves_of_photographs_become_training_and_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    halves = np.repeat([[[10], [200]]], 30, 0).repeat(40, 1).repeat(3, 2).astype(np.uint8)
    for name in "ab":
        Image.fromarray(halves).save(tmp_path / f"{name}.png")
    sources = ["--source", str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    main([*sources, "--out", str(tmp_path / "out"), "--count", "3"])
    assert capsys.readouterr().out.endswith("2 photographs\n")
    for split, grey in (("train", 10), ("val", 200)):
        for name in "ab":
            files = sorted((tmp_path / "out" / split / name).iterdir())
            assert len(files) == 3
            pixels = np.asarray(Image.open(files[0]))
            assert pixels.shape == (SIZE, SIZE, 3) and np.all(pixels == grey)
    Image.new("RGB", (3, 9)).save(tmp_path / "small.png")
    refused = {"named a; names are classes": [*sources, sources[1]], "cannot be read": ["--source", __file__]}
    refused["has 3x9 pixels"] = ["--source", str(tmp_path / "small.png")]
    for text, wrong in refused.items():
        with pytest.raises(SystemExit, match="2"):
            main([*wrong, "--out", str(tmp_path / "new")])
        assert text in capsys.readouterr().err
        assert not (tmp_path / "new").exists()
    with pytest.raises(SystemExit, match="2"):
        main([*sources, "--out", str(tmp_path / "out")])
    assert "already exists; choose another one" in capsys.readouterr().err
