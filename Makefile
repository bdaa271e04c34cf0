# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CLIENTS ?= .venv-clients
# guidellm wants torch, of which any build will do.
TORCH ?= torch==2.13.0
# The kernels are built for the jaxlib they will run with, so in this environment.
BUILD := scikit-build-core cmake ninja 'jaxlib>=0.10.0'

.PHONY: demo test test-full test-contract test-clients test-sanitized lint clean

NATIVE := $(wildcard engine/kernels/cpu/csrc/*) engine/kernels/cpu/cmake/CMakeLists.txt

demo: $(VENV)/.installed
	$(BIN)/hexserve demo $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(ARGS)

# Every golden prompt on every placement; about half an hour.
test-full: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m full tests/model $(ARGS)

# The API against its own description, by generated requests; a minute or two.
test-contract: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m contract tests/router/test_contract.py $(ARGS)

# lm-eval, guidellm and litellm against a deployment. They bring much, so a venv of their own.
test-clients: $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest -m clients tests/clients $(ARGS)

# The C++ kernels under the address and undefined behaviour sanitizers.
SANITIZED := build/sanitized
test-sanitized: $(VENV)/.installed-test
	$(BIN)/cmake -S engine/kernels/cpu/cmake -B $(SANITIZED) -DHEXSERVE_SANITIZE=ON \
	  -DPython_EXECUTABLE=$(abspath $(BIN))/python
	$(BIN)/cmake --build $(SANITIZED) --parallel
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  $(BIN)/python -m pytest --native=$(SANITIZED) tests/engine/test_cpu_*.py \
	  tests/engine/test_dense_kernels.py tests/engine/test_experts.py $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip $(BUILD)
	touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml $(NATIVE)
	$(BIN)/python -m pip install --no-build-isolation -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.created pyproject.toml $(NATIVE)
	$(BIN)/python -m pip install --no-build-isolation -e '.[test]'
	touch $@ $(VENV)/.installed

$(CLIENTS)/.installed: pyproject.toml $(NATIVE)
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --upgrade pip $(BUILD)
	$(CLIENTS)/bin/python -m pip install --quiet $(TORCH)
	$(CLIENTS)/bin/python -m pip install --no-build-isolation -e '.[test,clients]'
	touch $@

clean:
	rm -rf $(VENV) $(CLIENTS) build engine/kernels/cpu/*.so
	git clean -fdXq engine/kernels/cpu/cmake
