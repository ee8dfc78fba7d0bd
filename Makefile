# Each target sets up what it needs in .venv on a fresh machine, then runs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# libtpu (extra `plan`) is a compiler here: keep jax from looking for a TPU.
CPU := JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost ALLOW_MULTIPLE_LIBTPU_LOAD=1
# The oracle's torch, where there is none yet; any build will do.
TORCH ?= torch==2.13.0

# Tests compile more than they run: programs need not be fast. Some wait, so
# three share two cores.
CI_FLAGS := XLA_FLAGS='--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'

# The status page is looked at where there is a browser.
BROWSER := $(if $(shell command -v chromium || command -v google-chrome),,and not browser)

.PHONY: ablation demo notebooks soak test test-gpu test-long test-on-gpu test-tpu validate lint clean

demo: $(VENV)/.core
	$(CPU) $(BIN)/python launch/demo.py

test: $(VENV)/.dev
	$(CPU) $(CI_FLAGS) $(BIN)/python -m pytest -q -n 3 --dist loadfile -m 'not long and not tpu and not gpu and not on_gpu $(BROWSER)' --durations=8

test-long: $(VENV)/.dev
	$(CPU) $(BIN)/python -m pytest -q -m long --durations=8

# JAX's CUDA plugin is a compiler here; it needs no GPU and no CUDA.
test-gpu: $(VENV)/.dev
	$(BIN)/pip install -q jax-cuda13-plugin==$$($(BIN)/python -c 'import jax; print(jax.__version__)')
	$(CPU) $(BIN)/python -m pytest -q -rP -n 2 -m gpu --durations=8

# On a host with a GPU and a JAX that sees it (pip install -e '.[gpu]').
test-on-gpu: $(VENV)/.dev
	JAX_PLATFORMS=cuda $(BIN)/python -m pytest -q -m on_gpu

test-tpu: $(VENV)/.dev
	$(CPU) $(BIN)/python -m pytest -q -rP -n 2 -m tpu --durations=8

notebooks: $(VENV)/.dev
	$(CPU) $(BIN)/python -m pytest -q -m long tests/notebooks_test.py

soak: $(VENV)/.dev
	$(CPU) $(BIN)/python launch/soak.py --requests=300

validate: $(VENV)/.validate
	$(CPU) $(BIN)/python launch/validate.py

# Minutes on a GPU, days on a CPU: runs on the device that jax finds.
ablation: $(VENV)/.dev
	$(BIN)/python launch/prepare_data.py --recipe=configs/corpus.json --out=runs/corpus
	$(BIN)/python launch/ablation.py --corpus=runs/corpus --json=results/ablation.json --plot=results/ablation.png
	$(BIN)/python launch/index_price.py --corpus=runs/corpus --json=results/index_price.json --plot=results/index_price.png

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip

$(VENV)/.core: $(VENV)/bin/python setup.py
	$(BIN)/pip install -q -e .
	touch $@

$(VENV)/.validate: $(VENV)/bin/python setup.py
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -e '.[validate]'
	touch $@

$(VENV)/.dev: $(VENV)/.validate
	$(BIN)/pip install -q -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
