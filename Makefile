# `make demo` and `make test` are all there is to set up: each makes .venv first when it is missing.
# PYTHON=/path/to/python chooses the interpreter that a new .venv is made with.

.DEFAULT_GOAL := help
.PHONY: help venv venv-tasks smollm2 demo test test-slow test-all compare lint clean

BIN := .venv/bin
export PYTHON
# Two test processes, each of which compiles most of the time: what two cores take. One file's tests
# share compiled programs, so a file stays in one process.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile

help:           ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

venv:           ## make .venv with the pinned packages (extras run and dev); once
	@sh tools/make_venv.sh

venv-tasks:
	@sh tools/make_venv.sh tasks

demo: venv smollm2  ## post-train SmolLM2-135M with an NVFP4 rollout, on two CPU cores, in minutes
	$(BIN)/fp4rl train --config configs/demo.toml --set run.resume=auto
	$(BIN)/fp4rl report runs/demo
	@echo "Next: look at the page above; make compare sets five recipes side by side; README.md has the rest."

test: venv      ## the tests of every mechanism, in minutes, without a network
	$(PYTEST) -m "not slow and not gpu" $(PYTEST_ARGS)

test-slow: venv-tasks smollm2  ## what `make test` leaves out; fetches SmolLM2-135M once
	$(PYTEST) --no-loadscope-reorder -m "(slow or smollm2 or tasks) and not gpu" $(PYTEST_ARGS)

test-all: test test-slow  ## every test that needs no GPU

# Fetches once and checks the SHA-256 every time, so an interrupted download is noticed.
smollm2: venv
	@$(BIN)/fp4rl fetch smollm2

compare: venv smollm2  ## train the five recipes side by side, into docs/RESULTS.md
	$(BIN)/python benchmarks/compare_recipes.py

lint: venv      ## ruff (format and rules), pyright, import ranks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/pytest -q tests/layering_test.py

clean:          ## remove .venv and caches; keeps models/ and runs/
	rm -rf .venv build dist .cache .pytest_cache .ruff_cache .hypothesis *.egg-info
