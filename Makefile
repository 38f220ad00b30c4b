# For a bare machine with Python 3.11 or newer; each command makes .venv if it is not there.
#   make demo [PROMPT="..."]    fetch a small real model and stream an answer
#   make test [ARGS="..."]      run the tests
#   make check                  all that has to hold: lint, types, architecture, tests

VENV := .venv
MODEL := $(HOME)/.cache/slipstream/models/SmolLM2-135M-Instruct
PROMPT ?= Count from 1 to 10.
ARGS ?=
# A file of tests to a process at a time, in their order: the longest come early.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

.PHONY: demo test check

demo: $(VENV)/ready
	$(VENV)/bin/slipstream demo-model
	$(VENV)/bin/slipstream generate $(MODEL) --prompt "$(PROMPT)" --temperature 0 --max-tokens 128

test: $(VENV)/ready
	$(VENV)/bin/python -m pytest $(PARALLEL) $(ARGS)

check: $(VENV)/ready
	scripts/check

$(VENV)/ready: pyproject.toml scripts/setup-env
	scripts/setup-env $(VENV)
	touch $@
