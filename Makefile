# The two commands of the README. Everything lands in .venv, in models and in the cache folder of the user; nothing else is touched.
#
#   make demo    a clean clone to a converted, reported and answering model (quickly converted: without --fast, two minutes more)
#   make test    all tests
#   make lint    ruff and mypy
#   make clean   removes .venv and what the build left
#
# PYTHON chooses the interpreter (3.11 to 3.13), VENV the folder, QUESTION what the demo asks.

VENV     ?= .venv
MODELS   ?= models
QUESTION ?= What is the capital of France?
BIN      := $(VENV)/bin
PYTHON   ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
              if $$p -c 'import sys, venv, ensurepip; raise SystemExit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; \
              then echo $$p; break; fi; done)
FOLDER   := $(MODELS)/smollm2
MODEL    := $(MODELS)/smollm2-int4.hbf

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	mkdir -p $(MODELS)
	test -e $(FOLDER)/config.json || $(BIN)/qconvert smollm2 --to safetensors -o $(FOLDER)
	test -e $(MODEL) || $(BIN)/qconvert $(FOLDER) --bits 4 --fast -o $(MODEL)
	$(BIN)/qreport $(MODEL) --reference $(FOLDER) --tokens 1024
	$(BIN)/qrun $(MODEL) "$(QUESTION)"

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest

# mypy finds a package by its folder's name, which a clone may have called anything: it is shown this one as "halfbyte".
lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	mkdir -p .mypy_cache/roof && ln -sfn "$(CURDIR)" .mypy_cache/roof/halfbyte
	MYPYPATH=.mypy_cache/roof $(BIN)/mypy -p halfbyte.quant -p halfbyte.formats -p halfbyte.engine -p halfbyte.tools

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 to 3.13 with venv found; install one, or run: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install -q -e '.[test]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q -e '.[test,dev]'
	touch $@
