"""Experiments, a folder for each question. Each runs from the root: `python -m experiments.QUESTION.run`."""
