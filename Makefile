# `make demo` is a tour, the translator of regard and a training run, under 5 minutes on two cores; `make test` runs the
# tests, `make quick` a selection of them for the inner loop. All create .venv first.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Two workers with one thread each. All tests of a file run in one worker, so that its fixtures are created once. Shape
# annotations are checked by $(HOOK) in tests only, and not in compiled code: `make test` checks the first case of each
# test in the functions that state shapes, each kind of call once, `make long` all calls, cases and functions.
PYTEST := $(PY) -m pytest -q
WORKERS := -n 2 --dist loadfile
COMPILED := $(shell grep -rls mark.compiled tests --include=test_*.py)
# Inductor takes the widest instructions of the processor without compiling a program for each kind to see whether it
# runs, which takes 10 s where nothing is in its cache.
WIDE := TORCHINDUCTOR_VEC_ISA_OK=1
HOOK := --jaxtyping-packages=regard,beartype.beartype
# Tests start many processes: each would compile regard anew.
unexport PYTHONDONTWRITEBYTECODE

# `make test` runs two processes at the same time, which take about equally long: the folders of FIRST, and all others.
# Each process imports and collects only what it runs, which is quicker than workers that collect every test.
FIRST := tests/costs tests/engine tests/laws tests/lens tests/position tests/project tests/reference
comma := ,
SHAPED := $(shell grep -rl jaxtyping src/regard --include=*.py | sed 's|^src/||; s|/__init__.py$$||; s|\.py$$||; s|/|.|g')
# No test but a compiled one reads a log, and pytest's own handlers of each test take as long as a small test.
NO_LOG := -p no:logging
CHECKED := $(NO_LOG) --jaxtyping-packages=$(subst $(subst ,, ),$(comma),$(SHAPED)),beartype.beartype --checked-cases 1 \
	-m "not compiled and not long"

# Under a minute on two cores: two cases per test and five examples per law, on the CPU, without tests that start
# other processes (training runs, browsers, Triton's interpreter) or run whole models. No shape checker: it adds 10 s of
# imports.
QUICK := REGARD_EXAMPLES=5 $(PYTEST) $(NO_LOG) --quick -m "not compiled and not long"
QUICK_FIRST := tests/engine tests/generation tests/nn tests/pattern tests/position tests/reference tests/schedule tests/spec \
	tests/project/test_house.py
QUICK_SECOND := tests/cli tests/costs tests/laws tests/lens
NOT_QUICK := $(addprefix --ignore=tests/,engine/cuda engine/gpu engine/test_fused_qkv.py engine/test_threads.py \
	engine/test_cold_call.py costs/flops/test_flop_counter.py costs/memory costs/test_planner.py cli/test_law_cli.py \
	laws/diagnosis laws/test_detection.py laws/test_html_report.py laws/test_judgment.py lens/test_ablation.py \
	lens/test_figures.py lens/test_html_report.py nn/test_branch_end.py nn/test_models.py)

.PHONY: demo test test-first test-second quick quick-first quick-second check docs long laws ledger mutants clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test]"
	touch $@

demo: $(VENV)/.ready
	$(PY) examples/tour.py
	$(PY) examples/translator.py

test: $(VENV)/.ready
	$(MAKE) --no-print-directory -j 2 test-first test-second

test-first:
	@$(PYTEST) $(CHECKED) $(FIRST)

test-second:
	@$(PYTEST) $(CHECKED) tests $(FIRST:%=--ignore=%)
	@$(WIDE) $(PYTEST) -m "compiled and not long" $(COMPILED)

quick: $(VENV)/.ready
	$(MAKE) --no-print-directory -j 2 quick-first quick-second

quick-first:
	@$(QUICK) $(QUICK_FIRST) $(NOT_QUICK)

quick-second:
	@$(QUICK) $(QUICK_SECOND) $(NOT_QUICK)

# The slow tests that `make test` leaves out, and its laws over more examples: about 15 minutes on two cores.
long: $(VENV)/.ready
	REGARD_EXAMPLES=500 $(PYTEST) $(WORKERS) $(HOOK) -m "(long or hypothesis) and not compiled"
	$(WIDE) $(PYTEST) $(WORKERS) -m "compiled and long" $(COMPILED)

# 10,000 cases per law, about an hour. Each result is stored immediately, so an interrupted run can be resumed.
laws: $(VENV)/.ready
	$(PY) bench/laws_long.py

check: $(VENV)/.ready
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,check]"
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(MAKE) test

# The documentation site in site/, with the API reference: open site/index.html, no network needed.
docs: $(VENV)/.ready
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,docs]"
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# For each row of the ledger (the results to reproduce): its test, and whether the tests notice an inserted fault.
ledger: $(VENV)/.ready
	$(PY) tests/helpers/ledger_rows.py

# Faults inserted into the source, against the tests of what they break: about 40 minutes on one core.
mutants: $(VENV)/.ready
	$(PY) bench/mutants.py

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache .mypy_cache
