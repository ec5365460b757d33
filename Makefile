# Everything from a fresh clone, with python3, make and a C++ compiler:
#   make demo    trains a small model with a JIT-built operator, cold and then warm
#   make test    lint, types, import contracts, all tests
#   make test-sycl   the SYCL example on Intel's runtime compiler (installs 1.6 GB beside .venv)
#   make bench   side by side with the peers (installs them into an environment of their own)

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
PYTEST ?=

RUN := $(VENV)/bin/python
STAMP := $(VENV)/.ready

.PHONY: all setup demo test lint unit test-full test-sycl bench docs clean

all: test

setup: $(STAMP)

# torch first and by its pinned version, so that nothing else chooses one.
$(STAMP): pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --upgrade pip
	$(RUN) -m pip install -q "$(TORCH)" numpy setuptools
	$(RUN) -m pip install -q --group dev -e .
	touch $@

demo: $(STAMP)
	$(RUN) -m opkiln demo

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

unit: $(STAMP)
	$(RUN) -m pytest tests/unit $(PYTEST)

test: lint
	$(RUN) -m pytest -m "not full" -rs --durations=10 $(PYTEST)

test-full: lint
	$(RUN) -m pytest $(PYTEST)

test-sycl:
	$(PYTHON) tests/sycl/run.py --torch "$(TORCH)" $(PYTEST)

bench:
	$(PYTHON) bench/setup.py
	.bench-venv/bin/python bench/run.py

docs: $(STAMP)
	$(RUN) -c "from opkiln.report.settings_page import markdown; open('docs/settings.md', 'w').write(markdown())"

clean:
	rm -rf $(VENV) .bench-venv .sycl-venv build dist src/*.egg-info
