# Every target does its own set-up: an environment in $(VENV), with the versions of constraints.txt.
PYTHON ?= python3
VENV ?= .venv
# The site is built without torch, in an environment of its own.
DOCS_VENV ?= .venv-docs
BIN := $(abspath $(VENV))/bin
# Files of tests that run at the same time, one more than CI has cores: ranks wait for each other now and then. Most of
# their tests start up to eight processes.
TEST_WORKERS ?= 3
PYTEST_ARGS ?=
# --whole: survivors meet whole matrices too; --only TEXT: some faults.
MUTANTS_ARGS ?=

# One thread a process: tests run several ranks on few cores.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes: where this is set, each of them compiles all sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs wheel release test suite certificate models-table mutants bench lint clean
.DEFAULT_GOAL := test

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[data,hf,peft,plot,dev]'
	@touch $@

$(DOCS_VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	@# The packages of the extra alone: with the project itself came torch.
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(DOCS_VENV)/packages.txt
	$(DOCS_VENV)/bin/python -m pip install --quiet -c constraints.txt -r $(DOCS_VENV)/packages.txt
	@touch $@

# The documentation as a site: build/docs/html/index.html.
docs: $(DOCS_VENV)/.ready
	$(DOCS_VENV)/bin/python docs/site/build.py build/docs
	@echo "open build/docs/html/index.html"

# What is published, in dist/: the wheel, and the sources.
wheel: $(VENV)/.ready
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

# What is published with a check that it is enough, and the site; $(PYTHON) may be another one than that of $(VENV).
release: wheel docs
	$(PYTHON) -m tests.wheel dist

demo: $(VENV)/.ready
	@PATH="$(BIN):$$PATH" bash recipes/demo.sh

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# In this order the summary of pytest is the last line.
test: lint suite

suite: $(VENV)/.ready
	$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

# The same losses, gradients and weights on every layout as on one device, as a table; fails where a cell does. Then the
# other matrices of which `make test` runs a sample, whole.
certificate: $(VENV)/.ready
	$(BIN)/python -m tests.certificate --write docs/certificate.md
	$(BIN)/python docs/site/certificate_picture.py
	$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile --whole -m matrix $(PYTEST_ARGS)

# Trains every causal model of transformers as a tiny twin, unchanged, and writes the page.
models-table: $(VENV)/.ready
	$(BIN)/python -m tests.any_module.models_table --write docs/models_table.md

# Plants faults in a copy of the tree, one by one; fails where the tests of every run do not notice one.
mutants: $(VENV)/.ready
	$(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/step_time.py
	$(BIN)/python benchmarks/any_module.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/optimizer.py
	$(BIN)/python benchmarks/optimizer.py --stage 3 --size llama
	$(BIN)/python benchmarks/experts.py
	$(BIN)/python benchmarks/generation.py
	$(BIN)/python benchmarks/data.py

# Leaves the environment: making it again takes minutes.
clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis lightning_logs
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
