PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What running needs, and what developing needs on top of it.
RUN := $(VENV)/.installed
DEV := $(VENV)/.installed-dev

.PHONY: demo test test-fast test-slow test-mutants lint docs bench results clean

demo: $(RUN)
	$(BIN)/manydg demo --out demo-results

# The linters, of which one takes a minute of one core, run beside the tests; either failing fails both.
test: $(DEV)
	$(MAKE) --no-print-directory --jobs 2 lint test-fast

# One thread for each of the two test processes: threads that wait for one another are many times slower.
# From Python 3.12 on, lines are counted by sys.monitoring, which costs next to nothing.
test-fast: $(DEV)
	OMP_NUM_THREADS=1 COVERAGE_CORE=$$($(BIN)/python -c 'import sys; print("sysmon" if sys.version_info >= (3, 12) else "ctrace")') \
		$(BIN)/pytest -n 2 --dist worksteal -m "not slow" --cov --cov-report=

test-slow: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow
	OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=default $(BIN)/pytest -n 2 --dist worksteal -m "hypothesis and not slow"
	$(MAKE) test-mutants

# Whether the tests notice small wrong changes of the source: tests/mutants.toml, tools/mutants.py.
test-mutants: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.mutants

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.house

# The documentation site, in site/. A broken link or an undocumented public name is an error.
docs: $(DEV)
	$(BIN)/python -m mkdocs build --strict

bench: $(DEV)
	$(BIN)/python -m benchmarks

# All numbers of docs/results.md, from raw data in DATA; it goes on where it was stopped.
results: $(DEV)
	$(BIN)/python -m tools.results all --data $(DATA) --workers $(or $(WORKERS),2)

# A virtual environment with the package in it, and with what $(1) names besides.
define install
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "manydg needs Python 3.11 or newer: make PYTHON=python3.11")'
test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
$(BIN)/python -m pip install --constraint constraints.txt --editable $(1)
endef

$(RUN): pyproject.toml constraints.txt
	$(call install,.)
	touch $(RUN)

$(DEV): pyproject.toml constraints.txt
	$(call install,".[dev]")
	touch $(RUN) $(DEV)

clean:
	rm -rf $(VENV) build dist site .coverage .import_linter_cache .mypy_cache .ruff_cache .pytest_cache
