# One environment in the clone; every target makes it first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CHECKED := headmix_vision tests benchmarks examples train_cls.py train_gen.py sample.py

.PHONY: install demo test lint format clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# Train on real digits, draw the test digits with their predictions, export, and load the export through timm.
demo: install
	$(BIN)/python train_cls.py fit --config configs/cls/digits.yaml --run_dir runs/demo --overwrite true
	$(BIN)/python -m headmix_vision.export runs/demo --out runs/demo/model.safetensors
	$(BIN)/python examples/classify_digits.py runs/demo/model.safetensors --out runs/demo/digits.png

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/mypy

format: install
	$(BIN)/ruff format $(CHECKED)
	$(BIN)/ruff check --fix $(CHECKED)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
