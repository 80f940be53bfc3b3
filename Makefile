# make tiny   the whole lineage, small, on this machine     make test   all tests
# make bench  every benchmark with --quick                  make lint   ruff
# Each target creates .venv and installs what it needs; once done, that costs nothing.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
RUN    ?= runs/tiny
export PYTHONHASHSEED := 0
# Ranks and test workers share the cores: one thread each.
export OMP_NUM_THREADS := 1
# On the CPU, keep freed memory for the next step instead of returning it to the system.
export MALLOC_MMAP_THRESHOLD_ := 1000000000
export MALLOC_TRIM_THRESHOLD_ := 2000000000
export DS_ACCELERATOR ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)

.PHONY: venv tiny test bench lint clean

venv: $(READY)

$(READY): requirements.txt pyproject.toml
	@echo "installing into $(VENV) (once, one to three minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

tiny: $(READY)
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python launch/lineage.py recipes/tiny --run $(RUN)

test: $(READY)
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest tests -n auto --dist loadfile

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

bench: $(READY)
	@for script in $$(ls benchmarks/*.py | grep -v common.py); do \
		echo "== $$script"; PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python $$script --quick || exit 1; done

clean:
	rm -rf $(RUN)
