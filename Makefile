# make demo   text to a trained any-order model to filled blanks, in minutes on two CPU cores
# make test   linter, type checker, tests
# make bench  measure what the README states: the demo from nothing, and preparation
# make lock   renew requirements.lock from what .venv holds

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
DATA := data/sotu
RUN := runs/demo

# Two threads that spin for each other stand still when another program takes a core: asleep, they lose a seventh of
# the speed on a quiet machine and are twice as fast beside one busy core (docs/log.md).
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test bench lock clean
.DEFAULT_GOAL := demo

$(VENV)/installed: requirements.lock pyproject.toml
	@echo "installing into $(VENV), about a minute"
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment: install python3-venv, or name another with make PYTHON=..."; exit 2; }
	@$(BIN)/pip install -qq --no-deps -r requirements.lock
	@$(BIN)/pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

demo: $(VENV)/installed
	$(BIN)/anyorder prepare sotu --out $(DATA) --tokenizer bpe:4096
	$(BIN)/anyorder train demo --data $(DATA) --out $(RUN)
	$(BIN)/anyorder evaluate $(RUN) --data $(DATA) --xz --json $(RUN)/evaluation.json
	$(BIN)/anyorder fill $(RUN) --held-out $(DATA) --samples 2 --order left_to_right --temperature 0.3
	$(BIN)/anyorder fill $(RUN) --held-out $(DATA) --samples 2 --order random --temperature 0.3 --seed 1

test: $(VENV)/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.demo
	$(BIN)/python -m benchmarks.preparing

lock: $(VENV)/installed
	{ head -1 requirements.lock; $(BIN)/pip freeze --all --exclude anyorder --exclude pip | sed 's/+cpu//'; } > requirements.new
	mv requirements.new requirements.lock

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build
