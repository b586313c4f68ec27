"""Table of models that draw animated emoji."""

from pathlib import Path

from experiments.emoji.report import quality
from headmix_lab.drawing_tasks import TASKS, TEST
from headmix_lab.tables import read_csv

FOLDER = Path(__file__).parent
CLAIMS = {"results": "attention in models that draw animated emoji", "long": "four of them, trained 2.5 times as long"}
TASK = TASKS["animated_emoji"]
TABLES = {
    "animated_emoji": lambda: quality(read_csv(FOLDER / "results.csv", split=TEST), TASK),
    "animated_emoji_long": lambda: quality(read_csv(FOLDER / "long.csv", split=TEST), TASK),
}
