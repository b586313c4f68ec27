# One environment in the clone; every target makes it first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CHECKED := headmix_lab headmix_vision tests benchmarks experiments examples docs train_cls.py train_gen.py sample.py

# Processes of the tests, each with one thread.
JOBS ?= 2
# Processes on one GPU; 16 need 141 GB, 80 GB suffice for 6.
GPU_JOBS ?= 6
# The tests start Python often; what it has compiled is kept even where the environment says otherwise.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist worksteal

.PHONY: install demo demo-video docs test test-slow test-refusals test-peers test-gpu fuzz-gpu compile-kernels compile-kernels-quick \
	test-newest test-oldest lint format clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# Train a classifier on real digits, draw the test digits with their predictions, export, load the export through timm;
# train a generator, draw samples, score these with the classifier. Five minutes on two idle cores.
demo: install
	$(BIN)/headmix train-cls fit --trainer.max_epochs 16 --run-dir runs/demo --overwrite
	$(BIN)/headmix export runs/demo --out runs/demo/model.safetensors --overwrite
	$(BIN)/python examples/classify_digits.py runs/demo/model.safetensors --out runs/demo/digits.png
	$(BIN)/headmix train-gen fit --trainer.max_epochs 48 --run-dir runs/demo_gen --overwrite
	rm -rf runs/demo_gen/drawn
	$(BIN)/headmix sample images --model runs/demo_gen --num 400 --steps 20 --batch-size 200 --npz --out runs/demo_gen/drawn
	$(BIN)/headmix evaluate fid --real digits --fake runs/demo_gen/drawn --features runs/demo/model.safetensors
	$(BIN)/headmix evaluate accuracy --fake runs/demo_gen/drawn/samples.npz --features runs/demo/model.safetensors
	@echo 'Made a classifier and a generator of digits. Look at runs/demo/digits.png (test digits with predictions) and' \
		'runs/demo_gen/drawn/grid.png (samples). Next: your own pictures (docs/folder.md), or the attention of your own' \
		'model (docs/swap.md).'

# A classifier of digits that is part of the package.
JUDGE := headmix_vision/models/weights/deit_mhla_digits.safetensors

# Train a model of clips on moving digits, draw clips of every class (GIFs to watch, and one of all of them), judge digit
# and motion, and score them against real clips.
demo-video: install
	$(BIN)/headmix train-gen fit -c moving_digits --run-dir runs/demo_video --overwrite
	rm -rf runs/demo_video/drawn
	$(BIN)/headmix sample videos --model runs/demo_video --num 400 --steps 25 --guidance 3.5 --batch-size 40 --format gif \
		--out runs/demo_video/drawn
	$(BIN)/headmix evaluate moving-digits --fake runs/demo_video/drawn --features $(JUDGE)
	$(BIN)/headmix evaluate fvd --real moving_digits --fake runs/demo_video/drawn --features digits:$(JUDGE) --frames 8 --count 1000

test: install
	$(PYTEST) -n $(JOBS)

# The long matrices that `make test` leaves out.
test-slow: install
	$(PYTEST) -n $(JOBS) -m slow

# Wrong commands, calls and files alone: each ends in one line, and nothing is lost.
test-refusals: install
	$(PYTEST) -n $(JOBS) -k "refus or wrong or forged"

# timm's own model tests on eight of our models. They come with its source distribution, which pip fetches. What they ask
# for and we do not have stands in tests/peers/timm_suite.py, by name and with the reason.
PEERS := build/peers
test-peers: install
	rm -rf $(PEERS)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-binary timm --no-deps --dest $(PEERS) \
		timm==$$($(BIN)/python -c "import timm; print(timm.__version__)")
	tar -xzf $(PEERS)/timm-*.tar.gz -C $(PEERS) --strip-components 1
	PYTHONPATH=tests/peers $(PYTEST) -p timm_suite -c $(PEERS)/pyproject.toml -n $(JOBS) -rs $(PEERS)/tests/test_models.py

# On a machine with a CUDA device: the kernels natively, all types and sizes against float64, 400 random cases included.
test-gpu: install
	$(PYTEST) tests/ops -n $(GPU_JOBS) -m "slow or not slow"

# On a machine with a CUDA device: other random cases of all kernels, on all cores for so many seconds. Another SEED draws
# other cases.
SECONDS ?= 300
SEED ?= 0
fuzz-gpu: install
	$(BIN)/python tests/ops/fuzz.py --seconds $(SECONDS) --seed $(SEED)

# Every kernel for GPUs that need not be there, with the environment's Triton and the newest: a day of a core.
# `python -m benchmarks.compile_kernels --help` chooses a part.
compile-kernels: install $(VENV)-triton/.installed
	$(BIN)/python -m benchmarks.compile_kernels --all
	$(NEWEST_TRITON) $(BIN)/python -m benchmarks.compile_kernels --all

# The kernels for Hopper and a few others, with the environment's Triton and with the newest: Gluon, in which some are
# written, changes between releases. The newest is put beside the environment once; delete $(VENV)-triton for a newer.
NEWEST_TRITON := PYTHONPATH=$(CURDIR)/$(VENV)-triton
compile-kernels-quick: install $(VENV)-triton/.installed
	$(BIN)/python -m benchmarks.compile_kernels --quick --jobs $(JOBS)
	$(NEWEST_TRITON) $(BIN)/python -m benchmarks.compile_kernels --quick --jobs $(JOBS)

$(VENV)-triton/.installed: | install
	rm -rf $(VENV)-triton
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)-triton triton
	touch $@

# The tests with the newest and the oldest versions that pyproject.toml allows, each in an environment of its own
# that is made afresh and deleted when they pass. TESTS chooses a part. The oldest need Python 3.10 to 3.12.
test-newest test-oldest: test-%:
	rm -rf $(VENV)-$*
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(VENV)-$*/bin/uv pip install --quiet --python $(VENV)-$* --no-cache \
		--resolution $(if $(filter newest,$*),highest,lowest-direct) '.[all,test]'
	cd tests && OMP_NUM_THREADS=1 ../$(VENV)-$*/bin/python -m pytest -n $(JOBS) $(TESTS)
	rm -rf $(VENV)-$*

# The site, in build/site/index.html. A broken link or a wrong docstring ends it.
docs: install
	$(BIN)/python -m sphinx --jobs $(JOBS) --fail-on-warning --keep-going --quiet -c docs -d build/doctrees . build/site

lint: install
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/mypy

format: install
	$(BIN)/ruff format $(CHECKED)
	$(BIN)/ruff check --fix $(CHECKED)

clean:
	rm -rf $(VENV) $(VENV)-newest $(VENV)-oldest $(VENV)-triton build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
