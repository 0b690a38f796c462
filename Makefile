# `make demo` and `make test` need Python >= 3.10 with venv and headers, gcc and make; the rest goes into .venv.
PYTHON ?= python3
ARGS ?=
MINUTES ?= 10
BIN := .venv/bin
PIP_INSTALL := $(BIN)/pip install --quiet --constraint constraints.txt
PYX := $(shell find dilkit backends comm -name '*.pyx')
C := $(shell find dilkit backends comm -name '[a-z]*.[ch]')
INITS := $(shell find dilkit backends comm tools -name __init__.py)

# Test workers share the cores: one thread each, or they fight for them. torch adds nothing to it on such small problems.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4

.PHONY: help demo test slow sanitize aarch64 fuzz sanitize-cuda kernels simulate lint docs results wheel clean
help:
	@echo "make demo      set up .venv and run the demo (ARGS='--minutes 5' passes options on)"
	@echo "make test      set up .venv and run the tests (ARGS='-k name' passes options on)"
	@echo "make slow      the tests that 'make test' has no time for, but for those of 'make kernels'"
	@echo "make sanitize  the C of the CPU kernel and of token orders under AddressSanitizer, UBSan and (the kernel) ThreadSanitizer"
	@echo "make aarch64   the C of the CPU kernel compiled for aarch64, run over the problems under qemu (Debian's cross compiler, qemu-user)"
	@echo "make fuzz      random calls through the public API against the oracle, under the sanitizers (MINUTES=60: longer than 10)"
	@echo "make sanitize-cuda  the CUDA kernels under compute-sanitizer's memcheck and racecheck (needs a GPU)"
	@echo "make kernels   every CUDA kernel for every kind of GPU: compiled for the table in docs/, and run on the CPU"
	@echo "make simulate  the kernels in numba.cuda over every problem, in numba's simulator (an hour; ARGS='--share 1/4' a part)"
	@echo "make lint      ruff and mypy"
	@echo "make docs      write the generated parts of README.md and docs/ anew, and build the site of docs/ in site/"
	@echo "make results   measure anew, on a quiet machine, what the pages show of CPUs (ARGS='orders ring' a part), then make docs"
	@echo "make wheel     a wheel and an sdist in dist/"
	@echo "make clean     remove .venv and everything that was built"
	@echo "PYTHON=python3.12 chooses the interpreter that .venv is made from"

demo: .venv/built
	$(BIN)/dilkit demo $(ARGS)

test: .venv/built
	$(PYTEST) $(ARGS)

slow: .venv/built
	$(PYTEST) -m slow $(ARGS)

sanitize: .venv/built
	$(BIN)/python tests/sanitize/run.py $(ARGS)
	$(BIN)/python tests/sanitize/orders.py $(ARGS)

aarch64: .venv/built
	$(BIN)/python tests/sanitize/aarch64.py $(ARGS)

fuzz: .venv/built
	$(BIN)/python tests/fuzz/run.py --if-possible --minutes $(MINUTES) $(ARGS)

sanitize-cuda: .venv/built
	compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/dilkit verify --device cuda --backend cupy_raw --repeats 0 $(ARGS)
	compute-sanitizer --tool racecheck --error-exitcode 1 $(BIN)/dilkit verify --device cuda --backend cupy_raw --repeats 0 $(ARGS)

kernels: .venv/built
	$(BIN)/python -m dilkit.tools.bench.kernels
	$(PYTEST) -m kernels $(ARGS)

simulate: .venv/built
	OMP_NUM_THREADS=1 $(BIN)/python tests/backends/numba/simulate.py --all $(ARGS)

lint: .venv/built
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python .ci/types.py

docs: .venv/built
	$(BIN)/python -m dilkit.tools.site.pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

results: .venv/built
	$(PIP_INSTALL) --no-build-isolation --editable '.[peers]'
	$(BIN)/python -m dilkit.tools.site.remeasure $(ARGS)
	$(MAKE) docs

wheel: .venv/built
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(PYX:.pyx=.c) $(foreach file,$(PYX:.pyx=),$(wildcard $(file).*.so))
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment is made once for each state of the files that decide what is in it. The tests run under both MPI libraries;
# MPICH's wheel goes beside Open MPI's because each has a bin/mpirun.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) .ci/machine.py
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) setuptools cython
	$(PIP_INSTALL) --no-build-isolation --editable '.[plot,test,lint,docs]'
	$(PIP_INSTALL) --prefix .venv/mpich --ignore-installed mpich
	@touch $@

# A changed extension, or a changed package map, is built again into the same environment, with nothing downloaded.
.venv/built: .venv/installed setup.py $(PYX) $(C) $(INITS)
	$(PIP_INSTALL) --no-build-isolation --no-deps --editable .
	@touch $@
