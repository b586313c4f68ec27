"""Table of models that draw animated emoji."""

from pathlib import Path

from experiments.emoji.report import quality
from headmix_lab.drawing_tasks import TASKS, TEST
from headmix_lab.tables import read_csv

FOLDER = Path(__file__).parent
CLAIMS = {"results": "attention in models that draw animated emoji"}
TABLES = {"animated_emoji": lambda: quality(read_csv(FOLDER / "results.csv", split=TEST), TASKS["animated_emoji"])}
