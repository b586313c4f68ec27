"""Which files a folder or a tar holds, whoever asks."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inputs import companion, encode, photo, write_mixed, write_tar

from headmix_vision.data.datasets.base import SplitRequest
from headmix_vision.data.datasets.folders import find_images, open_class_folders, open_folder
from headmix_vision.errors import InputError
from headmix_vision.evaluation.sample_sets import open_samples
from headmix_vision.files.pictures import describe_left_out, find_clips, find_frames, find_pictures, write_png
from headmix_vision.files.video import write_video

REQUEST = SplitRequest("folder", "train", (3,), "classification")


def names(folder: Path, paths: list[Path]) -> list[str]:
    return [str(path.relative_to(folder)) for path in paths]


def test_pictures_of_every_ending_are_listed_and_what_is_left_out_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_mixed(tmp_path / "all", 66)
    listing = find_pictures(folder)
    assert len(listing.paths) == 66 and listing.paths == sorted(listing.paths)
    said = f"{folder}: 66 pictures, 3 other files left out: .txt 2, .xmp 1\n"
    assert len(find_images(str(folder), "--images")) == 66
    images = open_samples(str(folder), "RGB")
    assert len(images) == 66 and images.description["left_out"] == {".txt": 2, ".xmp": 1}
    assert capsys.readouterr().err == said  # once
    assert images.batches(66).__next__().shape == (66, 3, 32, 32)


def test_hidden_files_and_companions_are_left_out(tmp_path: Path) -> None:
    folder = write_mixed(tmp_path / "all", 2)
    for path in [*folder.iterdir()]:
        companion(path)
    for inner in (".thumbnails", "__MACOSX", "more"):
        write_mixed(folder / inner, 1)
    listing = find_pictures(folder)
    assert names(folder, listing.paths) == ["000.png", "001.jpg", "more/000.png"]
    assert listing.left_out == {"hidden": 7, ".txt": 4, ".xmp": 2}
    assert names(folder, find_frames(folder)) == ["000.png", "001.jpg"]


def test_links_are_followed_and_each_file_is_listed_once(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    photo().save(write_mixed(folder / "b", 2) / "z.png")
    write_mixed(tmp_path / "elsewhere", 1)
    (folder / "b" / "a.png").symlink_to("z.png")  # before the file that it leads to
    (folder / "a").symlink_to(tmp_path / "elsewhere")
    (folder / "c").symlink_to(folder)  # a loop
    (folder / "b" / "d").symlink_to("../b")  # another one
    (folder / "e").symlink_to("b")  # the same once more
    os.mkfifo(folder / "pipe.png")
    listing = find_pictures(folder)
    assert names(folder, listing.paths) == ["a/000.png", "b/000.png", "b/001.jpg", "b/z.png"]
    assert listing.left_out["linked again"] == 1 + 2 + 4 + 1 and listing.left_out["no regular file"] == 1
    (folder / "nowhere.png").symlink_to("absent.png")
    assert names(folder, find_pictures(folder).paths)[-1] == "nowhere.png"  # which reading refuses
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert len(find_pictures(link).paths) == 5


def test_folders_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headmix_vision.files.pictures._MAX_VISITS", 50)
    monkeypatch.setattr("headmix_vision.files.pictures._MAX_DEPTH", 40)
    for level in range(30):  # 2^30 ways to the last one
        (tmp_path / "wide" / str(level)).mkdir(parents=True)
        for name in "ab":
            (tmp_path / "wide" / str(level) / name).symlink_to(f"../{level + 1}")
    with pytest.raises(InputError, match="is linked 50 times"):
        find_pictures(tmp_path / "wide" / "0")
    deep = tmp_path / "deep"
    deep.joinpath(*["a"] * 41).mkdir(parents=True)
    with pytest.raises(InputError, match="lies more than 40 folders deep"):
        find_clips(deep)


def test_a_link_into_another_class_is_of_both(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write_mixed(tmp_path / name, 2)
    (tmp_path / "dog" / "x.png").symlink_to("../cat/000.png")
    (tmp_path / "dog" / "y.png").symlink_to("000.png")
    source = open_class_folders(tmp_path, REQUEST)
    assert [source.read(index)[1] for index in range(len(source))] == [0, 0, 1, 1, 1]


def test_classes_are_sorted_as_timm_does(tmp_path: Path) -> None:
    from timm.data.readers import create_reader

    for name in ("class10", "Class2", "class1", "b", "A"):
        write_mixed(tmp_path / name, 4)
    ours, theirs = open_class_folders(tmp_path, REQUEST), create_reader("", str(tmp_path))
    assert ours.class_names == list(theirs.class_to_idx) == ["A", "b", "class1", "Class2", "class10"]
    assert [ours.name(index) for index in range(len(ours))] == [path for path, _ in theirs.samples]


def open_tar(folder: Path, split: str) -> Any:
    return open_folder(SplitRequest("folder", split, (3,), "classification", str(folder)))


def test_a_tar_of_a_mac_reads_like_its_folder(tmp_path: Path) -> None:
    def pictures(folder: str) -> list[tuple[str, bytes]]:
        return [(f"{folder}0.png", encode(photo(0))), (f"{folder}1.webp", encode(photo(1), "webp"))]

    files = [*pictures("./cat/"), *pictures("./dog/")]
    write_tar(tmp_path / "train.tar", [("./a.txt", b""), *files], mac=True)
    source = open_tar(tmp_path, "train")
    assert [source.name(i).split(": ")[1] for i in range(4)] == [name for name, _ in files]
    assert [source.read(i)[1] for i in range(4)] == [0, 0, 1, 1]
    assert np.array_equal(np.asarray(source.read(2)[0]), np.asarray(photo(0)))

    tars = {name: write_tar(tmp_path / name, pictures(""), mac=True).read_bytes() for name in ("cat.tar", "dog.tar")}
    write_tar(tmp_path / "val.tar", [*tars.items()], mac=True)
    nested = open_tar(tmp_path, "val")
    assert nested.class_names == ["cat", "dog"] and [nested.read(i)[1] for i in range(4)] == [0, 1, 0, 1]
    assert np.array_equal(np.asarray(nested.read(1)[0]), np.asarray(photo(0)))

    write_tar(tmp_path / "val.tar", [*files, ("stray.png", files[0][1])])
    with pytest.raises(
        InputError, match=r"val.tar: stray.png has no label; 1 of 5 images of .*val.tar have no valid label"
    ):
        open_tar(tmp_path, "val")
    write_tar(tmp_path / "val.tar", [("cat/a.txt", b"")])
    with pytest.raises(InputError, match=r"val.tar' has no image; 1 other file left out: .txt 1"):
        open_tar(tmp_path, "val")
    whole = (tmp_path / "train.tar").read_bytes()
    (tmp_path / "val.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"val.tar is truncated or no tar file"):
        open_tar(tmp_path, "val")


def test_clips_are_videos_animated_pictures_and_folders_of_frames(tmp_path: Path) -> None:
    clip = np.zeros((3, 8, 8, 3), np.uint8)
    (tmp_path / "empty").mkdir()
    write_video(tmp_path / "films" / "a.MP4", clip, 8)
    photo().save(tmp_path / "films" / "thumbnail.jpg")
    companion(tmp_path / "films" / "a.MP4")
    for number in range(2):
        write_png(tmp_path / "samples" / f"{number}.png", clip + np.arange(3, dtype=np.uint8)[:, None, None, None])
    write_mixed(tmp_path / "sky" / "part", 3)
    (tmp_path / "sky" / "again").symlink_to("part")
    listing = find_clips(tmp_path)
    assert names(tmp_path, listing.paths) == ["films/a.MP4", "samples/0.png", "samples/1.png", "sky/part"]
    assert listing.left_out == {".jpg": 1, "hidden": 1, ".txt": 4, ".xmp": 2, "linked again": 1}
    shown = describe_left_out(listing.left_out)
    (tmp_path / "sky" / "part" / "000.png").write_bytes(b"")  # still frames of one clip, which reading refuses
    assert names(tmp_path, find_clips(tmp_path).paths) == names(tmp_path, listing.paths)
    assert shown == "9 other files left out: .txt 4, .xmp 2, .jpg 1, hidden 1, linked again 1"
