# Two commands: `make demo` shows it, `make test` proves it. Both make .venv first.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Two workers, one thread each; a file stays with one, so that what its tests share is made once. Shapes are checked
# by the test run only, and not where code is compiled.
PYTEST := $(PY) -m pytest -q -n 2 --dist loadfile
COMPILED := $(shell grep -rls mark.compiled tests --include=test_*.py)
HOOK := --jaxtyping-packages=regard,beartype.beartype

.PHONY: demo test check long laws ledger clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test]"
	touch $@

demo: $(VENV)/.ready
	$(PY) examples/tour.py
	$(VENV)/bin/regard train translate
	$(VENV)/bin/regard translate "Where is the library?"

test: $(VENV)/.ready
	$(PYTEST) $(HOOK) -m "not compiled and not long"
	$(PYTEST) -m "compiled and not long" $(COMPILED)

# What `make test` has no time for, and its laws over more examples: about a quarter of an hour on two cores.
long: $(VENV)/.ready
	REGARD_EXAMPLES=500 $(PYTEST) $(HOOK) -m "(long or hypothesis) and not compiled"
	$(PYTEST) -m "compiled and long" $(COMPILED)

# 10,000 cases a law, the better part of an hour; stores each as it comes, and goes on where it was.
laws: $(VENV)/.ready
	$(PY) bench/laws_long.py

check: $(VENV)/.ready
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,check]"
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(MAKE) test

ledger: $(VENV)/.ready  # which rows of the ledger have a test
	$(PY) tests/helpers/ledger_rows.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
