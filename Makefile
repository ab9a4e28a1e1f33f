# Two commands do all the set-up:  make run   and   make test
#
# TORCH_INDEX=URL takes PyTorch from another package index, for example that of its CPU wheels
# (PyTorch's install page lists them). MODEL and ARGS go to `pagemill serve`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
MODEL ?= smollm2-135m
ARGS ?=
PYTEST_ARGS ?= --numprocesses auto
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
TORCH_FLAGS := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
# developers' builds stop at a compiler's warning; users' builds, `make run` among them, do not
STRICT := --config-settings cmake.define.PAGEMILL_STRICT=ON
NATIVE := CMakeLists.txt $(shell find csrc -name '*.cpp' -o -name '*.hpp')

.PHONY: run test soak check native-test bench clean

run: $(VENV)/engine
	$(BIN)/pagemill pull smollm2-135m
	$(BIN)/pagemill serve $(MODEL) $(ARGS)

test: $(VENV)/dev
	$(BIN)/pagemill pull smollm2-135m
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

native-test: build/native/pagemill_tests
	build/native/pagemill_tests

soak: $(VENV)/dev
	scripts/soak

bench: $(VENV)/dev
	$(BIN)/python benchmarks/agents.py

clean:
	rm -rf $(VENV) build

# torch comes first: nothing that asks for it may choose another build
$(VENV)/torch: constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH_FLAGS) torch
	touch $@

$(VENV)/engine: $(VENV)/torch pyproject.toml $(NATIVE)
	$(INSTALL) --editable '.[engine]'
	touch $@

$(VENV)/dev: $(VENV)/torch pyproject.toml $(NATIVE)
	$(INSTALL) --editable '.[engine,dev]' $(STRICT)
	touch $@ $(VENV)/engine

build/native/pagemill_tests: $(NATIVE)
	cmake -S . -B build/native -DPAGEMILL_TESTS=ON -DPAGEMILL_STRICT=ON -DPAGEMILL_SANITIZE=ON > /dev/null
	cmake --build build/native --parallel 2
