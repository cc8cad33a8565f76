# Two commands: `make demo` shows it, `make test` proves it. Both make .venv first.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Two workers, one thread each. Shapes are checked by the test run only, and not where code is compiled.
PYTEST := $(PY) -m pytest -q -n 2
HOOK := --jaxtyping-packages=regard,beartype.beartype

.PHONY: demo test check long ledger clean

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
	$(PYTEST) -m "compiled and not long"

long: $(VENV)/.ready
	REGARD_EXAMPLES=500 $(PYTEST) $(HOOK) -m "not compiled"

check: $(VENV)/.ready
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,check]"
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(MAKE) test

ledger: $(VENV)/.ready  # which rows of the ledger have a test
	$(PY) tests/ledger_rows.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
