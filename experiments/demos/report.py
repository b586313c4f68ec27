"""Tables of the demos and of the weights in the package."""

from pathlib import Path

from headmix_lab.tables import markdown_table, read_csv

FOLDER = Path(__file__).parent
CLAIMS = {"results": "the demos, and the weights of the package"}


def _read(part: str) -> list[dict[str, str]]:
    return read_csv(FOLDER / "results.csv", part=part)


def weights() -> str:
    """Accuracies of the weights in the package on held-out digits."""
    lines = []
    for row in _read("weights"):
        right = round(float(row["value"]) / 100 * int(row["count"]))
        lines.append([f"`{row['what']}`", str(right), f"{float(row['value']):.2f}"])
    return markdown_table(["`pretrained=True`", "right of 360 held-out digits", "top-1 in %"], lines)


def classifier() -> str:
    """The classifier of the demo, at its best epoch and at the end."""
    rows = _read("classifier")
    lines = [
        [epoch["what"], epoch["value"], f"{float(top1['value']):.2f}"]
        for epoch, top1 in zip(rows[::2], rows[1::2], strict=True)
    ]
    return markdown_table(["checkpoint", "epochs", "top-1, %"], lines)


def generator() -> str:
    """Samples of the demo's generator as its classifier sees them, and FID of real digits beside theirs."""
    names = {"top1_percent": "classified as their label, %", "fid": "FID"}
    lines = [
        [row["what"], f"{int(row['count']):,}", names[row["number"]], f"{float(row['value']):.4g}"]
        for row in _read("generator")
    ]
    return markdown_table(["images", "how many", "score", "value"], lines)


def clips() -> str:
    """Scores of clips by guidance and of real clips, and of guessing."""
    rows = _read("clips")
    sides = sorted({row["what"] for row in rows})
    lines = []
    for number, guessed in {"digit": "0.10", "motion": "", "direction": "0.25"}.items():
        values = {row["what"]: f"{float(row['value']):.2f}" for row in rows if row["number"] == number}
        lines.append([number, *(values[side] for side in sides), guessed])
    return markdown_table(["", *sides, "guessing"], lines)


TABLES = {"weights": weights, "demo_classifier": classifier, "demo_generator": generator, "demo_clips": clips}
