# make setup | demo | browser | test | lint | docs | bench | clean. Needs Python 3.11 or newer with pip and venv, and make; nothing else.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.hocket-installed
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo browser test lint docs bench clean

help:
	@echo 'make setup   .venv with everything in it'
	@echo 'make demo    trains the digits with real and with virtual workers'
	@echo 'make browser a Chromium for the tests of the report page, which are skipped without one'
	@echo 'make test    the tests'
	@echo 'make lint    ruff, mypy, import contract, documentation'
	@echo 'make docs    the documentation as a site in site/'
	@echo 'make bench   how to run the measurements'
	@echo 'make clean   removes .venv, caches and built files'

setup: $(STAMP)

# The stamp is written last: an interrupted set-up is taken up again. PIP_CONSTRAINT reaches the isolated build too, -c does not.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || test -n "$(PYTHON)" || { echo 'Hocket needs Python 3.11 or newer with venv and pip, and none was found: install one, or name it with make $(MAKECMDGOALS) PYTHON=/path/to/python.' >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -q -c constraints.txt -e '.[data,dev,docs,plot]'
	@touch $@

demo: setup
	$(BIN)/hocket demo

browser:
	@for b in chromium chromium-browser google-chrome google-chrome-stable chrome; do command -v $$b >/dev/null && { echo "$$b is there."; exit 0; }; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; \
	else echo 'There is no Chromium: install chromium or google-chrome with your package manager; without it the tests of the report page are skipped.' >&2; exit 1; fi

test: setup
	$(BIN)/python -m pytest -q -n 3 --dist loadfile

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	@site=$$(mktemp -d) && trap 'rm -rf "$$site"' EXIT && echo '$(BIN)/mkdocs build --strict' && NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir "$$site"

docs: setup
	$(BIN)/mkdocs build --strict --site-dir site

bench:
	@echo 'Each file in benchmarks/ prints its table by one command, after make setup:'
	@for f in benchmarks/[a-z]*.py; do test ! -e "$$f" || echo "  $(BIN)/python $$f"; done
	@echo 'Measurements between several hosts on one machine need root and iproute2.'

clean:
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
