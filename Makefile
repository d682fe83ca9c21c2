# Smalti's tasks. What they need is installed into .venv; a new machine needs Python >= 3.11, pip and make. `make demo`
# installs the extra `demo` (about a third of the packages), every other task the extra `dev`.
#
# `make check` is for every commit, `make test` for every change, `make test-all` for a release; CI runs all three.
#
#   PYTHON    the interpreter that .venv is made with            make install PYTHON=python3.12
#   PIP_ARGS  more arguments for pip, such as another index      make install PIP_ARGS='--index-url ...'
#   JOBS      parallel test processes; default: cores, at most 8   make test JOBS=2
#   NAME      which proofs or benchmarks                         make prove NAME=order    (or: make prove order)
#   RECORD    no: proofs at full count, nothing written          make prove RECORD=no
#   ARGS      handed to the command                              make demo ARGS='--minutes 1'

PYTHON ?= python3
PIP_ARGS ?=
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n > 8 ? 8 : n)))
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
KEY := $(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
STAMP := $(VENV)/.installed-$(KEY)
STAMP_DEMO := $(VENV)/.installed-demo-$(KEY)
TORCH := $(shell grep '^torch==' constraints.txt)
# Three classes of tests, each of which holds the one before: fast (make check), slow (make test), exhaustive
# (make test-all). A class has a case of every claim that a later one proves with more.
FAST := not slow and not gpu and not browser
USUAL := not exhaustive and not gpu
# One thread for each test process: several pools on the same cores slow each other down. Compiled modules are kept,
# whatever the shell says: every test process and every command that a test starts would compile all of them again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# `make prove order` and `make bench order`: the second word is the name.
ifneq (,$(filter prove bench,$(firstword $(MAKECMDGOALS))))
WORD := $(word 2,$(MAKECMDGOALS))
ifneq (,$(WORD))
NAME ?= $(WORD)
.PHONY: $(WORD)
$(WORD):
	@:
endif
endif

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-peers prove check style types contracts bench gpu docs lock clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' Makefile | awk -F '\t' '{ printf "make %-10s %s\n", $$1, $$2 }'

install: $(STAMP)  ## install Smalti, all extras and its tools into .venv, as locked in constraints.txt

$(STAMP): EXTRA := dev
$(STAMP_DEMO): EXTRA := demo
$(STAMP) $(STAMP_DEMO):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Smalti needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; hint: make install PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install $(PIP_ARGS) pip; }
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt '$(TORCH)' -e '.[$(EXTRA)]'
	@rm -f $(VENV)/.installed-* && touch $@

demo: $(or $(wildcard $(STAMP)),$(STAMP_DEMO))  ## the whole job on an embedded corpus: documents, tokens, training, evals, export, chat
	$(BIN)/smalti demo $(ARGS)

test: $(STAMP)  ## the fast tests, and of the slow ones a case of every claim; a seeded sample of every proof
	$(PYTEST) -m "$(USUAL)" $(ARGS)

test-all: $(STAMP)  ## every test that needs no GPU
	$(PYTEST) -m "not gpu" $(ARGS)

test-peers: $(STAMP)  ## tests beside TRL and peft, which are installed into .venv-peers/tune
	OMP_NUM_THREADS=1 "$$(PYTHONPATH=tools $(BIN)/python -c 'import peers; print(peers.python_of("tune"))')" -m pytest \
	  tests/tune/test_trl_losses.py tests/model/adapters/test_peft.py $(ARGS)

prove: $(STAMP)  ## proofs at full count; NAME chooses; writes bench/results/NAME.json, from committed code only
	SMALTI_PROVE=1 SMALTI_PROVE_NAME=$(NAME) SMALTI_RECORD=$(RECORD) $(BIN)/python -m pytest -m "proof and not gpu" $(if $(NAME),-k $(NAME)) $(ARGS)

check: $(STAMP)  ## style, types, import contracts, sizes, docs, fast tests
	@$(MAKE) --no-print-directory --jobs --old-file=$(STAMP) style types contracts
	$(PYTEST) -q -m "$(FAST)" $(ARGS)

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/sizes.py
	$(BIN)/python tools/words.py

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports

bench: $(STAMP)  ## paired ratios; NAME chooses one script of bench/, else all but experts and build_corpus; peers are installed into .venv-peers
	@set -e; for script in $(if $(NAME),bench/$(NAME).py,$(sort $(filter-out bench/experts.py bench/build_corpus.py,$(wildcard bench/*.py)))); do \
	  echo "== $$script"; PYTHONPATH=tools $(BIN)/python $$script $(ARGS); done

gpu:  ## tests and benchmarks on a GPU, with the PYTHON given (no .venv needed)
	PYTHON=$(PYTHON) bash tools/gpu.sh $(ARGS)

docs: $(STAMP)  ## write docs/reference, the talks and claims from the code, and check every link
	$(BIN)/python tools/docs.py

lock:  ## resolve the newest versions in a fresh environment and write constraints.txt
	PYTHON=$(PYTHON) TORCH='$(TORCH)' bash tools/lock.sh $(PIP_ARGS)

clean:  ## remove .venv, .venv-peers, caches and build outputs; runs/ stays
	rm -rf $(VENV) .venv-peers build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find smalti tests tools bench -name __pycache__ -type d -prune -exec rm -rf {} +
