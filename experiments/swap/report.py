"""Tables of a trained backbone with another attention."""

from collections.abc import Iterable
from pathlib import Path

from headmix_lab.tables import ResultTable, Row, markdown_table, read_csv, recorded

FOLDER = Path(__file__).parent
TEACHER = "teacher"
STAGES = ("swapped", "attention", "features")
SCORES = {
    "knn_class_token": "k-NN, class token, %",
    "knn_patch_mean": "k-NN, mean of patches, %",
    "linear_class_token": "probe, class token, %",
    "linear_patch_mean": "probe, mean of patches, %",
    "cosine_class_token": "cosine, class token",
    "cosine_patches": "cosine, patches",
}
COLUMNS = ("row", "size", "stage", *SCORES, "steps", "minutes", "recipe")
CLAIMS = {"fashion_mnist": "a trained backbone with another attention, on Fashion-MNIST", "emoji": "the same on emoji"}
CLAIMS = recorded(FOLDER, CLAIMS | {"photographs": "features of the backbone on photographs"})


def open_table(path: Path) -> ResultTable:
    """Open the table of a CSV file; InputError for a file of another kind."""
    stages = {name: place for place, name in enumerate(("", *STAGES))}
    return ResultTable(path, COLUMNS, 3, lambda key: (int(key[1]), key[0] != TEACHER, key[0], stages[key[2]]))


def task_table(rows: Iterable[Row]) -> str:
    """Return the scores of teacher and students at each stage in Markdown."""
    lines = []
    for row in sorted(rows, key=lambda row: int(row["size"])):
        about = [row["size"], row["row"], row["stage"] or "–", row["steps"] or "–", row["minutes"] or "–"]
        lines.append([*about, *(row[column] or "–" for column in SCORES)])
    return markdown_table(["pixels", "attention", "stage", "steps", "minutes", *SCORES.values()], lines)


TABLES = {f"swap_{name}": lambda name=name: task_table(read_csv(FOLDER / f"{name}.csv")) for name in CLAIMS}
