"""Wrong input: one line that names it, exit status 2, nothing written."""

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from inputs import encode
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headmix_vision.errors import InputError
from headmix_vision.evaluation.extractors import open_extractor
from headmix_vision.evaluation.frechet import Gaussian, Statistics, frechet_distance, read_statistics
from headmix_vision.evaluation.sample_sets import check_side_options, open_samples
from headmix_vision.evaluation.sample_sources import npz_labels
from headmix_vision.evaluation.score_request import METRICS, Metric
from headmix_vision.evaluation.scores import Scorer, open_side
from headmix_vision.models.lite0 import LITE0_MODEL

from .helpers import digit_pixels, refused, run, write_digits, write_run


def save_npz(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def test_bad_images(
    classifier: Path, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def message(fake: object, *args: object) -> str:
        out = tmp_path / "out.json"
        common = ("--real", folders[0], "--features", classifier, "--out", out)
        line = refused(capsys, "fid", *common, "--fake", fake, *args)
        assert not out.exists()
        return line

    pixels = digit_pixels(range(6))
    assert "at least 2 samples are needed" in message(write_digits(tmp_path / "one", [0]))
    (tmp_path / "empty").mkdir()
    assert "at least 2 samples are needed" in message(tmp_path / "empty")
    assert "arr_0 is float64" in message(save_npz(tmp_path / "float.npz", arr_0=pixels / 255))
    assert "arr_0 is uint8 [8, 8]" in message(save_npz(tmp_path / "flat.npz", arr_0=pixels[0]))
    assert "has no mu and sigma" in message(save_npz(tmp_path / "labels.npz", labels=np.arange(3)))
    assert "at least 2 samples are needed" in message(save_npz(tmp_path / "single.npz", arr_0=pixels[:1, ..., None]))
    assert "neither a file, nor a folder, nor a data set" in message(tmp_path / "absent")

    truncated = save_npz(tmp_path / "truncated.npz", arr_0=pixels)
    truncated.write_bytes(truncated.read_bytes()[:300])
    assert "truncated, damaged or no npz file" in message(truncated)

    corrupt = write_digits(tmp_path / "corrupt", range(6))
    file = corrupt / "0003.png"
    file.write_bytes(file.read_bytes()[:-30])
    assert f"{file} cannot be read" in message(corrupt)

    deep = write_digits(tmp_path / "deep", range(6))
    (deep / "0002.png").write_bytes(encode(Image.fromarray(np.zeros((8, 8), np.float32)), "tiff"))
    assert f"{deep / '0002.png'} cannot be read (its pixels are of mode F, they must have 8 or 16 bits" in message(deep)
    assert "background is 'clear', it must be a colour such as white, black" in message(deep, "--background", "clear")

    mixed = write_digits(tmp_path / "mixed", range(6))
    Image.new("L", (9, 8)).save(mixed / "0004.png")
    assert f"{mixed / '0004.png'} is 9x8 pixels, the samples before it are 8x8" in message(mixed)

    larger = save_npz(tmp_path / "larger.npz", arr_0=np.zeros((4, 16, 16, 3), np.uint8))
    assert "real samples are 8x8 pixels, fake ones 16x16" in message(larger)
    assert "--image-size must be a whole number of at least 1, got 0" in message(larger, "--image-size", 0)
    assert "batch size must be a whole number of at least 1, got 0" in message(larger, "--batch-size", 0)


def test_bad_options(
    classifier: Path, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = ("--real", folders[0], "--fake", folders[1])
    common = (*sides, "--features", classifier)
    assert "subset size is 81" in refused(capsys, "kid", *common, "--subset-size", 81)
    assert "splits is 81" in refused(capsys, "is", *common[2:], "--splits", 81)
    assert "neighbours is 80" in refused(capsys, "prc", *common, "--neighbours", 80)
    message = refused(capsys, "fid", *sides, "--features", "resnet")
    assert "must be inception, digits, lite0:PATH, or the path" in message
    assert "no checkpoint at" in refused(capsys, "fid", *sides, "--features", tmp_path)

    def labelled(labels: np.ndarray) -> str:
        path = save_npz(tmp_path / "labelled.npz", arr_0=digit_pixels(range(4)), labels=labels)
        return refused(capsys, "accuracy", "--fake", path, "--features", classifier)

    assert "3 labels for 4 images" in labelled(np.zeros(3, int))
    assert "labels are 0 to 10, the classifier knows 0 to 9" in labelled(np.array([0, 1, 2, 10]))
    assert "labels is float64 [4], it must be integers" in labelled(np.zeros(4))
    unlabelled = save_npz(tmp_path / "unlabelled.npz", arr_0=digit_pixels(range(4)))
    for fake, message in ((unlabelled, "has no labels or arr_1"), (folders[0], "accuracy needs an .npz file")):
        assert message in refused(capsys, "accuracy", "--fake", fake, "--features", classifier)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(classifier.read_bytes()[:1000])
    assert "truncated or no safetensors" in refused(capsys, "fid", *sides, "--features", damaged)


def test_a_classifier_of_other_classes_is_no_judge(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def named(names: object) -> Path:
        path = tmp_path / "named.safetensors"
        save_file(load_file(classifier), path, metadata=export_header(class_names=json.dumps(names)))
        return path

    def message(fake: object, features: object) -> str:
        return refused(capsys, "accuracy", "--fake", fake, "--features", features)

    digits = "digits[:4]"
    assert "canvas[:4] has 9 classes, deit_mhla_digits was trained on 10" in message("canvas[:4]", classifier)
    letters = named(list("abcdefghij"))
    assert "digits[:4] has 10 classes, deit_mhla_digits was trained on 10; they first differ in '0'" in message(
        digits, letters
    )
    assert "they first differ in 'their order'" in message(digits, named(list("9876543210")))
    assert "entry 'class_names' is 3, it must be" in message(digits, named(3))
    arguments: dict[str, Any] = {"num_classes": 10, "img_size": None, "model_args": {}}
    write_run(tmp_path / "run", load_file(classifier), **arguments, class_names=list("abcdefghij"))
    assert "they first differ in '0'" in message(digits, tmp_path / "run")
    for judge in (classifier, named(list("0123456789")), named(None)):
        assert run("accuracy", "--fake", digits, "--features", judge) == 0
    torch.save(
        {f"{number}": value for number, value in enumerate(timm.create_model(LITE0_MODEL).state_dict().values())},
        tmp_path / "lite0.pth",
    )
    labelled = save_npz(tmp_path / "labelled.npz", arr_0=digit_pixels(range(4)), labels=np.arange(4))
    for fake in (digits, labelled):
        line = message(fake, f"lite0:{tmp_path / 'lite0.pth'}")
        assert "tf_efficientnet_lite0 has classes of its own" in line and "--features PATH" in line


def test_an_existing_result_is_kept(
    classifier: Path, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    out.write_text("mine")
    arguments = ("--real", folders[0], "--features", classifier, "--out", out)
    assert "already exists" in refused(capsys, "fid", *arguments, "--fake", folders[1])
    assert "must end in .safetensors" in refused(capsys, "stats", *arguments)
    assert out.read_text() == "mine"


def test_statistics_that_do_not_belong(
    classifier: Path, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    statistics, other = tmp_path / "statistics.safetensors", tmp_path / "other.safetensors"
    assert run("stats", "--real", folders[0], "--features", classifier, "--out", statistics) == 0
    torch.manual_seed(1)
    header = {"model_name": "deit_mhla_digits", "model_args": "{}"}
    save_file(timm.create_model("deit_mhla_digits").state_dict(), other, metadata=header)

    def message(metric: str, real: Path, features: Path = classifier) -> str:
        return refused(capsys, metric, "--real", real, "--fake", folders[1], "--features", features)

    assert "was made with deit_mhla_digits" in message("fid", statistics, other)
    assert "enough for fid alone" in message("kid", statistics)
    assert "is not a statistics file" in message("fid", classifier)
    moments = {name: value.numpy() for name, value in load_file(statistics).items()}
    assert "has no mu and sigma, it has mu" in message("fid", save_npz(tmp_path / "a.npz", mu=moments["mu"]))
    smaller = save_npz(tmp_path / "b.npz", mu=moments["mu"][:63], sigma=moments["sigma"][:63, :63])
    assert "is of 63 features, deit_mhla_digits makes 64" in message("fid", smaller)
    torn = save_npz(tmp_path / "c.npz", mu=moments["mu"][:63], sigma=moments["sigma"])
    assert "do not belong together" in message("fid", torn)
    integer = save_npz(tmp_path / "d.npz", mu=moments["mu"].astype(int), sigma=moments["sigma"])
    assert "mu is int64" in message("fid", integer)
    with_nan = save_npz(tmp_path / "e.npz", mu=moments["mu"] * np.nan, sigma=moments["sigma"])
    assert "not finite" in message("fid", with_nan)


@pytest.fixture(scope="module")
def statistics(classifier: Path, folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("statistics") / "real.safetensors"
    assert run("stats", "--real", folders[0], "--features", classifier, "--out", path) == 0
    return path


def zipped(path: Path, **members: bytes) -> Path:
    """Write a zip file with members of any content."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def flipped(path: Path, find: bytes, offset: int, mask: int = 0xFF) -> Path:
    """Flip bits of the byte at an offset from the last place of some bytes."""
    content = bytearray(path.read_bytes())
    content[content.rindex(find) + offset] ^= mask
    path.write_bytes(bytes(content))
    return path


PIXELS = npy(digit_pixels(range(6)))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(PIXELS),
        lambda path: zipped(path, **{"arr_0.npy": b"garbage"}),
        lambda path: zipped(path, **{"arr_0.npy": PIXELS[:90]}),
        lambda path: zipped(path, **{"arr_0.npy": PIXELS.replace(b"|u1", b"|zz")}),
        lambda path: zipped(path, **{"arr_0.npy": PIXELS.replace(b"(6, 8, 8)", b"(-6,8, 8)")}),
        lambda path: zipped(path, **{"arr_0.npy": PIXELS.replace(b"(6, 8, 8)", b"(9, 8, 8)")}),
        lambda path: zipped(path, **{"arr_0.npy": npy(np.array([None] * 4))}),
        lambda path: zipped(path, **{"arr_0.npy": npy(np.zeros((5, 0, 8, 3), np.uint8))}),
        lambda path: zipped(path, arr_0=b"no array"),
        lambda path: flipped(zipped(path, **{"arr_0.npy": PIXELS}), b"PK\x01\x02", -20),
        lambda path: flipped(zipped(path, **{"arr_0.npy": PIXELS}), b"PK\x01\x02", 8, 1),
        lambda path: flipped(zipped(path, **{"arr_0.npy": PIXELS}), b"PK\x01\x02", 10, 99),
    ],
)
def test_damaged_images_npz(write: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "images.npz"
    write(path)
    with pytest.raises(InputError, match=r"images\.npz") as error:
        list(open_samples(str(path), "L").batches(4))
    assert "\n" not in str(error.value)


def test_a_compressed_npz_that_is_damaged_names_itself(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "images.npz", arr_0=digit_pixels(range(40)))
    flipped(tmp_path / "images.npz", b"PK\x01\x02", -400)
    with pytest.raises(InputError, match=r"images\.npz is truncated, damaged or no npz file"):
        list(open_samples(str(tmp_path / "images.npz"), "L").batches(4))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (npy(np.array([None] * 6)), "holds Python objects, it must hold numbers"),
        (b"garbage", "no npz file: EOF: reading magic string"),
        (npy(np.zeros((6, 1), int)), "it must be integers"),
        (npy(np.zeros(6)), "it must be integers"),
    ],
)
def test_damaged_labels(labels: bytes, message: str, tmp_path: Path) -> None:
    path = zipped(tmp_path / "images.npz", **{"arr_0.npy": PIXELS, "labels.npy": labels})
    with pytest.raises(InputError, match=message):
        npz_labels(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mu, sigma: {"mu": mu, "sigma": sigma + np.triu(np.ones_like(sigma))}, "is not symmetric"),
        (lambda mu, sigma: {"mu": mu, "sigma": -sigma}, "not a covariance matrix: its smallest eigenvalue"),
        (lambda mu, sigma: {"mu": mu, "sigma": np.ones_like(sigma) - np.eye(len(mu))}, "smallest eigenvalue is -1"),
        (lambda mu, sigma: {"mu": mu, "sigma": sigma * np.inf}, "not finite"),
        (lambda mu, sigma: {"mu": mu[None], "sigma": sigma}, "do not belong together"),
        (lambda mu, sigma: {"mu": mu[:0], "sigma": sigma[:0, :0]}, "do not belong together"),
        (lambda mu, sigma: {"mu": mu.sum(), "sigma": sigma}, "do not belong together"),
        (lambda mu, sigma: {"mu": mu.astype(complex), "sigma": sigma}, "mu is complex128"),
        (lambda mu, sigma: {"mu": np.array([None] * 64), "sigma": sigma}, "holds Python objects, it must hold numbers"),
        (lambda mu, sigma: {}, "has no mu and sigma, it has none of them"),
    ],
)
def test_npz_that_are_no_statistics(change: Any, message: str, statistics: Path, tmp_path: Path) -> None:
    moments = {name: value.numpy() for name, value in load_file(statistics).items()}
    path = save_npz(tmp_path / "s.npz", **change(moments["mu"], moments["sigma"]))
    with pytest.raises(InputError, match=message):
        read_statistics(path)
    for type in (np.float32, np.float16):  # as some publish them
        save_npz(path, mu=moments["mu"].astype(type), sigma=moments["sigma"].astype(type))
        assert read_statistics(path).gaussians["features"].factor.shape[0] == 64


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("{", "is damaged"),
        ("[1]", r"is \[1\]"),
        ("{}", "'images' is missing"),
        ('{"images": {}}', "'count' is missing"),
        ('{"images": {"count": "x"}}', "'count' is 'x'"),
        ('{"images": {"count": 90, "size": 8}}', "'size' is 8"),
        ('{"images": {"count": 90}, "extractor": "x"}', "'extractor' is 'x'"),
        ('{"images": {"count": 90}, "extractor": {"name": "x"}}', "'sha256' is missing"),
    ],
)
def test_forged_headers_of_statistics(header: str, message: str, statistics: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    save_file(load_file(statistics), path, metadata={"headmix_vision_statistics": header})
    with pytest.raises(InputError, match=message):
        read_statistics(path)


def test_statistics_of_whole_numbers(statistics: Path, tmp_path: Path) -> None:
    with safe_open(statistics, "pt") as file:
        header = {name: text for name, text in file.metadata().items() if name != "tensors_sha256"}
    tensors = {name: value.int() for name, value in load_file(statistics).items()}
    save_file(tensors, tmp_path / "s.safetensors", metadata=header)
    with pytest.raises(InputError, match="must be floating-point numbers"):
        read_statistics(tmp_path / "s.safetensors")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "the images are ''"),
        ("digits[5]", "a slice is written"),
        ("digits[-:]", "a slice is written"),
        ("digits[::0]", "a slice is written"),
        ("digits[1:2:3:4]", "a slice is written"),
        ("digits[:1798]", "there are 1797 images, the slice goes beyond them"),
        ("digits[-1798:]", "goes beyond"),
        ("digits[7:8]", "at least 2 samples are needed, digits"),
        ("digits:foo", "split 'foo' does not exist"),
        ("fake", "cannot be scored"),
        ("folder", "needs root"),
    ],
)
def test_sources_that_are_none(source: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_samples(source, "L")
    assert len(open_samples("digits[-1797:]", "L")) == len(open_samples("digits[:1797]", "L")) == 1797


def test_a_link_to_nothing_is_an_image_that_cannot_be_read(tmp_path: Path) -> None:
    folder = write_digits(tmp_path / "images", range(3))
    (folder / "more.png").mkdir()
    assert len(open_samples(str(folder), "L")) == 3
    (folder / "0009.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(InputError, match=r"0009\.png cannot be read \(FileNotFoundError"):
        list(open_samples(str(folder), "L").batches(9))


def export_header(**header: str) -> dict[str, str]:
    return {"model_name": "deit_mhla_digits", "model_args": "{}", **header}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (export_header(model_args="{"), "model_args of .* is damaged"),
        (export_header(model_args="[1]"), r"model_args of .* is \[1\]"),
        (export_header(model_args='{"depth": 9}'), "does not fit model deit_mhla_digits"),
        (export_header(model_args='{"num_classes": 7}'), "has 10 classes, the model 7"),
        (export_header(model_args='{"foo": 1}'), "foo"),
        (export_header(model_name="foo"), "which timm does not know here"),
        (export_header(model_name="dit_mhla_digits"), "is of the generator dit_mhla_digits"),
        ({}, "holds no Inception weights"),
    ],
)
def test_forged_exports(header: dict[str, str], message: str, classifier: Path, tmp_path: Path) -> None:
    save_file(load_file(classifier), tmp_path / "m.safetensors", metadata=header)
    with pytest.raises(InputError, match=message):
        open_extractor(str(tmp_path / "m.safetensors"))


def test_weights_and_features_that_are_not_finite(classifier: Path, folders: tuple[Path, Path], tmp_path: Path) -> None:
    state = load_file(classifier)
    state["head.weight"][0, 0] = torch.nan
    save_file(state, tmp_path / "m.safetensors", metadata=export_header())
    with pytest.raises(InputError, match=r"m\.safetensors are not finite, first head\.weight"):
        open_extractor(str(tmp_path / "m.safetensors"))
    (tmp_path / "empty.pth").touch()
    with pytest.raises(InputError, match="holds no readable weights"):
        open_extractor(str(tmp_path / "empty.pth"))
    extractor = open_extractor(str(classifier))
    extractor.network.head.weight.data *= 1e38
    extractor.network.head.weight.data *= 1e38
    with pytest.raises(InputError, match="logits of deit_mhla_digits are not finite within images 0 to 7 of"):
        Scorer(extractor, 8).collect(open_samples(str(folders[0]), "L"))


def test_devices_and_places_are_checked_first(
    classifier: Path, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("fid", "--real", folders[0], "--fake", folders[1], "--features", classifier)
    assert "device 'gpu' cannot be used here" in refused(capsys, *common, "--device", "gpu")
    assert "device 'cuda:77' cannot be used here" in refused(capsys, *common, "--device", "cuda:77")
    assert "Not a directory" in refused(capsys, *common, "--out", classifier / "x.json")
    assert "--root is /data, but no side is a data set" in refused(capsys, *common, "--root", "/data")
    np.savez(tmp_path / "x.npz", arr_0=np.zeros((9, 8, 8, 1), np.uint8), labels=np.zeros(9, np.int64))
    digits = ("--fake", tmp_path / "x.npz", "--real", "digits", "--features", classifier)
    assert "--root is x, but no side is a data set that lies" in refused(capsys, "fid", *digits, "--root", "x")
    assert "no side is read from pictures" in refused(capsys, "fid", *digits, "--background", "black")
    labelled = ("accuracy", "--fake", tmp_path / "x.npz", "--features", classifier, "--skip-unlabelled")
    assert "--skip-unlabelled applies to data sets" in refused(capsys, *labelled)
    assert "--real is not an option of this command" in refused(capsys, *labelled, "--real", "digits")
    assert "an image of 1000000000 pixels needs" in refused(capsys, *common, "--image-size", 10**9)
    assert "argument --image-size: invalid int value" in refused(capsys, *common, "--image-size", "x")
    assert "did you mean --image-size?" in refused(capsys, *common, "--imagesize", 8)


def test_the_score_is_printed_though_its_file_cannot_be_written(
    classifier: Path, statistics: Path, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("fid", "--real", statistics, "--fake", folders[1], "--features", classifier)
    capsys.readouterr()
    assert run(*arguments, "--out", "/proc/score.json") == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("fid 0.")
    assert captured.err.splitlines()[-1].startswith("error: ")


def test_a_dry_run_opens_everything_and_writes_nothing(
    classifier: Path, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--features", classifier, "--dry-run", "--device", "cpu")
    out = tmp_path / "out.json"
    assert run("kid", "--real", folders[0], "--fake", folders[1], "--out", out, *common) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        f"would score real {folders[0]} (90 images) and fake {folders[1]} (80 images) by deit_mhla_digits on cpu,"
        f" write {out}"
    ]
    assert captured.err == ""
    assert run("stats", "--real", folders[0], "--out", tmp_path / "s.safetensors", *common) == 0
    assert not list(tmp_path.iterdir())
    sides = ("--real", folders[0], "--fake", folders[1], *common)
    assert "subset size is 81" in refused(capsys, "kid", *sides, "--subset-size", 81)
    one = write_digits(tmp_path / "one", [0])
    assert "at least 2 samples are needed" in refused(capsys, "is", "--fake", one, *common)


def test_a_score_that_is_not_finite_is_none(
    classifier: Path, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(METRICS, "gap", Metric(lambda scorer, fake: {"gap": float("nan")}, "a gap", compares=False))
    line = refused(capsys, "gap", "--fake", folders[0], "--features", classifier)
    assert "gap is nan: these images have no such score" in line


def test_one_function_tells_images_from_statistics(
    classifier: Path, statistics: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    extractor = open_extractor(str(classifier))
    moments = {name: value.numpy() for name, value in load_file(statistics).items()}
    both = save_npz(tmp_path / "both.npz", arr_0=digit_pixels(range(6)), **moments)
    assert isinstance(open_side(str(both), extractor), Statistics)
    assert len(open_side(str(both), extractor, statistics=False)) == 6  # type: ignore[arg-type]
    for source in (statistics, save_npz(tmp_path / "moments.npz", **moments)):
        side = open_side(str(source), extractor)
        assert isinstance(side, Statistics) and torch.equal(
            side.gaussians["features"].mean, torch.from_numpy(moments["mu"])
        )
        with pytest.raises(InputError, match="no images"):
            open_side(str(source), extractor, statistics=False)
    assert open_side("canvas[:4]", extractor, image_size=96).description["size"] == [96, 96]
    wider = {"mu": np.zeros(65), "sigma": np.eye(65)}
    with pytest.raises(InputError, match="is of 65 features, deit_mhla_digits makes 64"):
        open_side(str(save_npz(tmp_path / "wider.npz", **wider)), extractor)
    header = json.loads(safe_open(statistics, "pt").metadata()["headmix_vision_statistics"])
    header["extractor"]["sha256"] = "0" * 64
    other = tmp_path / "other.safetensors"
    save_file(load_file(statistics), other, metadata={"headmix_vision_statistics": json.dumps(header)})
    with pytest.raises(InputError, match="was made with deit_mhla_digits 00000000"):
        open_side(str(other), extractor)


def test_a_covariance_with_negative_eigenvalues_is_refused_by_the_distance_too() -> None:
    none = Gaussian(torch.zeros(3).double(), -torch.eye(3).double())
    with pytest.raises(InputError, match="smallest eigenvalue is -1, below 0"):
        frechet_distance(none, none)


def test_one_side_of_pictures_is_enough_for_a_background(tmp_path: Path) -> None:
    file = tmp_path / "real.safetensors"
    file.touch()
    check_side_options(None, "black", str(file), str(tmp_path))
    with pytest.raises(InputError, match="no side is read from pictures"):
        check_side_options(None, "black", str(file), str(file))
