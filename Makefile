# Two commands do all set-up: `make demo` and `make test`. Needs Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COMMA := ,

.PHONY: demo test check lint wheel docs bench clean

demo: $(VENV)/installed  ## install, then learn scikit-learn's digits as 5 tasks of 2 classes, with both classifiers
	$(BIN)/pearl sweep digits method.classifier.name=[heads,statistics] --seeds 1

test: $(VENV)/installed-test  ## install what tests need, then run them
	$(BIN)/python -m pytest

check: $(VENV)/installed-test $(VENV)/installed-lint  ## for daily use: style, types and the quick tests, in a minute
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quick

lint: $(VENV)/installed-lint  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: $(VENV)/installed  ## build the wheel, install it alone, work with it from an empty folder: half a minute
	.ci/wheel $(BIN)/python

# one thread: several wait for each other in turns, for minutes, where something else is at work
docs: $(VENV)/installed-docs  ## the site, under site/
	OMP_NUM_THREADS=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/installed-test  ## speed against peers on this machine; JSON under docs/results/speed, tables from it
	mkdir -p docs/results/speed
	for part in ranks allocator inference class_statistics training reuse footprint people scale; do \
	  OMP_NUM_THREADS=1 $(BIN)/python benchmarks/speed/$$part.py --out docs/results/speed/$$part.json || exit 1; done
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/speed/training.py --nets resnet18 --precision fp32 \
	  --out docs/results/speed/training_float32.json
	$(BIN)/python benchmarks/speed/table.py

clean:  ## remove the environment and caches; runs and data stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "pearl needs Python 3.11 or newer; this is $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/installed: $(BIN)/python pyproject.toml
	@echo "installing pearl and what it needs (PyTorch is several gigabytes; this takes minutes)"
	$(BIN)/pip install --quiet --editable .
	touch $@

# several at once, with commas between them, are one pip
$(VENV)/installed-%: $(BIN)/python pyproject.toml
	@echo "installing pearl and what $* needs"
	$(BIN)/pip install --quiet --editable ".[$*]"
	touch $@ $(patsubst %,$(VENV)/installed-%,$(subst $(COMMA), ,$*)) $(VENV)/installed
