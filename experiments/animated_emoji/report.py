"""Tables of models that draw animated emoji."""

from pathlib import Path

from experiments.emoji.report import quality
from headmix_lab.drawing_tasks import TASKS, TEST
from headmix_lab.tables import read_csv

FOLDER, TASK = Path(__file__).parent, TASKS["animated_emoji"]
CLAIMS = {"results": "attention in models that draw animated emoji", "long": "four of them, trained 2.5 times as long"}
CLAIMS |= {"latents": "clips of 128 px, drawn as latents", "stills": "two models of clips, trained with stills"}
TABLES = {
    f"animated_emoji_{name}": lambda name=name: quality(read_csv(FOLDER / f"{name}.csv", split=TEST), TASK)
    for name in CLAIMS
}
