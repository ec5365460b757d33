# Everything from a fresh clone, with python3, make and a C++ compiler:
#   make demo    trains a small model with a JIT-built operator, cold and then warm
#   make check   lint, types, the tests that need no compiler: a minute
#   make test    lint, types, everything that protects a user, on all CPUs (JOBS=1: one after another): twelve minutes
#   make test-full   with the full grids and the tests that take too long for every run
#   make test-changed   the tests that what differs from BASE (HEAD) can touch
#   make test-busy   the tests that know about time, three times beside eight busy loops
#   make durations   what each file of tests takes, for the order of the next runs
#   make test-random   the property tests on new random examples; SEED=N repeats a run
#   make test-faults   every fault and attack at its whole count; writes bench/results/faults.json
#   make test-sanitize   the tests of native code under AddressSanitizer and UBSan
#   make test-deepspeed   DeepSpeed from PyPI on opkiln (installs it beside .venv)
#   make test-jits   tvm-ffi, FlashInfer and four ninjas from PyPI on opkiln (installs them beside .venv; nvcc for the CUDA part)
#   make test-packages   extension packages from PyPI, as they are, built by opkiln (gigabytes)
#   make test-remotes   remote tiers on docker-registry, nginx and an S3 server (apt-get installs them)
#   make test-sycl   the SYCL example on Intel's runtime compiler (installs 1.6 GB beside .venv)
#   make test-torches   one wheel of CPU ops, libraries of op.h on several torches (installs them, 30 GB)
#   make test-cluster   100 killed ranks; jobs of two nodes in network namespaces, under torchrun, srun and by hand,
#                       with slow and cut links and wrong clocks (root, iproute2, iptables);
#                       the recipes of the build farm on Dask, Ray, MPI and submitit (installs them beside .venv);
#                       the recipes on Slurm (apt-get install slurmctld slurmd slurm-client munge) and Kubernetes' schemas
#   make test-other-cpu   kernels and ops for the other CPU architecture (apt-get install qemu-user, and
#                         g++-aarch64-linux-gnu or, on aarch64, g++-x86-64-linux-gnu)
#   make mutants   which changes to the code that decides no test notices; MODULE=machine/facts for one
#   make mutants-drawn   which of 300 changes, drawn over all of src, no test at all notices (hours)
#   make deepspeed-sources   DeepSpeed's native sources, for bench/ops/deepspeed_kernels.py
#   make release-check   the archives of a release, reproducible, examined, installed and used
#   make bench   side by side with the peers (installs them into an environment of their own)
#   make docs   the documentation site in build/site, checked in Chromium if there is one

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
PYTEST ?=
JOBS   ?= $(shell expr $$(nproc) + 1)
SEED   ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
TORCHES ?= 2.10.0 2.11.0 2.12.1 2.14.1 2.15.0
MODULE  ?=
DOCS    ?=
BASE    ?= HEAD

RUN := $(VENV)/bin/python
# Many interpreters are started: each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE
# One worker more than CPUs: while one waits, another runs.
# A file's tests stay in one worker, because they share what takes long to build; the longest begin.
# A test that hangs is ended, and the run with it: its threads' stacks are printed. A busy machine takes
# a tenth of that. (xdist gives a worker that replaces another one no work if a file was finished.)
WORKERS := -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
	-o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true
STAMP := $(VENV)/.ready
DOCS_VENV := .docs-venv
DOCS_STAMP := $(DOCS_VENV)/.ready

.PHONY: all setup demo check pool test lint test-full test-changed test-busy durations test-random test-faults test-sanitize test-deepspeed \
	test-jits test-packages test-remotes test-sycl test-torches test-cluster test-other-cpu mutants mutants-drawn deepspeed-sources release-check bench docs clean

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
	$(RUN) tests/import_circles.py
	$(RUN) tests/class_names.py

check: lint
	$(RUN) -m pytest tests/unit -m "not full" $(WORKERS) $(PYTEST)

# What the tests will want, compiled once, and kept for later runs (tests/sample/pool.py).
pool: $(STAMP)
	$(RUN) -m compileall -q src
	$(RUN) tests/sample/catalogue.py

test: lint pool
	$(RUN) -m pytest -m "not full" $(WORKERS) -rsfE --durations=10 --disable-warnings $(PYTEST)

test-full: lint pool
	$(RUN) -m pytest $(WORKERS) -rsfE --durations=10 --disable-warnings $(PYTEST)

test-changed: lint pool
	@files=$$($(RUN) tests/changed.py $(BASE)) && if [ -z "$$files" ]; then echo "nothing changed"; \
	else $(RUN) -m pytest $$files -m "not full" $(WORKERS) $(PYTEST); fi

test-busy: pool
	for turn in 1 2 3; do $(RUN) tests/busy.py 8 $(RUN) -m pytest -m "timed and not full" $(WORKERS) $(PYTEST) || exit 1; done

durations: pool
	$(RUN) -m pytest -m "not full" $(WORKERS) --keep-durations $(PYTEST)

test-random: $(STAMP)
	$(RUN) -m pytest -m hypothesis --hypothesis-profile=random --hypothesis-seed=$(SEED) $(PYTEST)

test-faults: $(STAMP)
	$(RUN) -m pytest tests/faults --full-counts -rsfE $(PYTEST)
	$(RUN) -m pip install -q --group fuzz
	$(RUN) tests/faults/fuzz/run.py --seconds 20

test-sanitize: $(STAMP)
	$(RUN) tests/sanitize/run.py $(PYTEST)

test-deepspeed:
	$(PYTHON) tests/with_deepspeed/run.py --torch "$(TORCH)" $(PYTEST)

test-jits:
	$(PYTHON) tests/with_jits/run.py --torch "$(TORCH)" $(PYTEST)
	$(PYTHON) tests/with_jits/run.py --torch "$(TORCH)" --own

test-packages: $(STAMP)
	$(RUN) tests/packages/run.py

test-remotes:
	$(PYTHON) tests/remotes/run.py $(PYTEST)

test-sycl:
	$(PYTHON) tests/sycl/run.py --torch "$(TORCH)" $(PYTEST)

test-torches: $(STAMP)
	$(RUN) tests/torches/run.py --out bench/results/torches.json $(TORCHES)
	$(RUN) tests/torches/torches_page.py

test-cluster: $(STAMP)
	$(RUN) -m pytest tests/cluster --full-counts -rsfE $(PYTEST)
	$(RUN) tests/cluster/launchers.py
	$(RUN) tests/cluster/namespaces.py
	$(PYTHON) tests/cluster/farm.py
	$(RUN) tests/cluster/slurm.py
	$(RUN) tests/cluster/manifests.py

test-other-cpu: $(STAMP)
	$(RUN) -m pytest -rsfE tests/build/test_other_cpu.py $(PYTEST)

mutants: $(STAMP)
	$(RUN) -m pip install -q --group mutants
	$(RUN) tests/mutants/run.py $(MODULE)

# Runs again go on where the last one stopped; a new list or new tests need an empty build/mutants/drawn.
mutants-drawn: $(STAMP)
	$(RUN) -m pip install -q --group mutants
	test -e build/mutants/drawn/reach || $(RUN) tests/mutants/drawn.py draw build/mutants/drawn/list
	test -e build/mutants/drawn/reach || $(RUN) tests/mutants/drawn.py reach build/mutants/drawn/reach
	$(RUN) tests/mutants/drawn.py branch build/mutants/drawn/reach
	$(RUN) tests/mutants/drawn.py run build/mutants/drawn/list build/mutants/drawn/results --reach build/mutants/drawn/reach

deepspeed-sources: $(STAMP)
	$(RUN) bench/ops/deepspeed_sources.py

release-check:
	$(PYTHON) tests/release/run.py --torch "$(TORCH)"

bench:
	$(PYTHON) bench/setup.py
	.bench-venv/bin/python bench/run.py
	.bench-venv/bin/python bench/bars.py
	.bench-venv/bin/python bench/cluster_curves.py
	.bench-venv/bin/python bench/timeline.py

$(DOCS_STAMP): pyproject.toml Makefile
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -q --upgrade pip
	$(DOCS_VENV)/bin/python -m pip install -q --group docs
	touch $@

# Generated pages and pictures, the site with warnings as errors, then every link and every page.
docs: $(STAMP) $(DOCS_STAMP)
	PYTHONPATH=tests $(RUN) -m reference_pages
	$(RUN) docs/site/diagrams.py
	$(DOCS_VENV)/bin/python docs/site/build.py
	$(DOCS_VENV)/bin/python tests/site/run.py $(DOCS)

clean:
	rm -rf $(VENV) $(DOCS_VENV) .release-venv .ci-files-venv .manifests-venv .bench-venv .remotes-venv .sycl-venv .farm-*-venv .torch-*-venv .deepspeed-venv .deepspeed .jits-venv .flashinfer .packages-*-venv build dist src/*.egg-info
