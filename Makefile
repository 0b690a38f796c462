# `make demo` and `make test` need Python >= 3.10 with venv and headers, gcc and make; the rest goes into .venv, stage by stage.
PYTHON ?= python3
ARGS ?=
MINUTES ?= 10
PYX := $(shell find dilkit backends comm -name '*.pyx')
C := $(shell find dilkit backends comm -name '[a-z]*.[ch]')
INITS := $(shell find dilkit backends comm tools -name __init__.py)

# A PYTHON that was chosen, and is in a virtual environment with torch, is used as it is. Its stages are noted in build/.
ENV := .venv
PY := .venv/bin/python
ifneq ($(origin PYTHON),file)
REUSED := $(shell "$(PYTHON)" .ci/environment/machine.py --reused)
ifneq ($(REUSED),)
ENV := $(REUSED)
PY := "$(PYTHON)"
endif
endif
DEMO := $(ENV)/stage-dilkit
TEST := $(ENV)/stage-test
KERNELS := $(ENV)/stage-kernels
LINT := $(ENV)/stage-lint
DOCS := $(ENV)/stage-docs
PEERS := $(ENV)/stage-peers
TRANSFORMERS := $(ENV)/stage-transformers
TTSEM := $(ENV)/stage-ttsem

# Suites of the CPU whose results docs/ shows, each by a file of its name.
SUITES := orders serving slides patterns scores ring hosts seeds

# Test workers share the cores: one thread each, or they fight for them. torch adds nothing to it on such small problems.
# Each begins with a part of the files, so that what the tests of a file share is made once, and takes over what others have left.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --maxprocesses 4 --dist worksteal

.NOTPARALLEL:
.PHONY: help demo test test-all smoke mutants matrix slow sanitize aarch64 fuzz sanitize-cuda triton-sanitize kernels costs ptx gpu-day host-time hosts simulate peers lint docs results wheel cut stages clean
help:
	@echo "make demo      set up .venv and run the demo (ARGS='--minutes 5' passes options on)"
	@echo "make test      set up .venv and run the tests (ARGS='-k name' passes options on)"
	@echo "make test-all  the tests and what 'make test' has no time for, but for those of 'make kernels'"
	@echo "make smoke     a choice of the tests that answers in half a minute"
	@echo "make mutants   faults of C, put into a copy of the code one by one: do the tests notice? (ARGS='--random 150': of Python)"
	@echo "make matrix    the tests with every setting of torch, MKL, dilkit, threads, language and path, with other Pythons, and with"
	@echo "               the newest packages: hours; ARGS='--only torch tests/core' some settings and tests of them, --json for a program"
	@echo "make slow      what 'make test-all' adds to 'make test' (ARGS='--share 2/4': a quarter)"
	@echo "make sanitize  the C of the CPU kernel and of token orders under AddressSanitizer, UBSan and ThreadSanitizer"
	@echo "make aarch64   the C of the CPU kernel compiled for aarch64, run over the problems under qemu (Debian's cross compiler, qemu-user)"
	@echo "make fuzz      random calls through the public API against the oracle, under the sanitizers (MINUTES=60: longer than 10)"
	@echo "make sanitize-cuda  the CUDA kernels under compute-sanitizer's memcheck and racecheck (needs a GPU)"
	@echo "make triton-sanitize  the kernels in Triton under ttsem: accesses out of bounds, races, undefined results; no GPU is needed"
	@echo "make kernels   every CUDA kernel for every kind of GPU: compiled for the table in docs/, and run on the CPU"
	@echo "make ptx       the PTX of every kernel, of CUDA's for five kinds of GPU and of Triton's and numba's for two each, run on the"
	@echo "               CPU, then broken on purpose, but for what docs/results/ptx.json has of these kernels: an hour or more"
	@echo "               (ARGS='--anew': all; ARGS='--anew --backend triton --only steps --seed 3': some, in another order)"
	@echo "make costs     what the CUDA kernels issue in configurations A, B and C, counted on the CPU, for docs/gpu-costs.md; an hour"
	@echo "make gpu-day DIR=day  on a machine with a GPU: is it right, how fast, what does the automatic choice get wrong; nine minutes"
	@echo "               at most, and a second call goes on (ARGS='--rehearse': on the CPU, to see what it does; docs/gpu-day.md)"
	@echo "make host-time  CPU time of Python in a call of sdpa and cupy_raw, with kernels that do nothing; no GPU is needed"
	@echo "make hosts     attention over four hosts on this machine, network namespaces whose links are slow, beside other schemes: time"
	@echo "               and bytes on the wire (root; half an hour; ARGS=--quick: short sequences)"
	@echo "make simulate  the kernels in numba.cuda over every problem, in numba's simulator (an hour; ARGS='--share 1/4' a part)"
	@echo "make peers     dilkit in the place of torchscale's own code, or of sdpa in transformers' own tests (DIR=a checkout of"
	@echo "               torchscale, prov-gigapath, transformers or flash-attention, whose tests it runs; ARGS='--only llama' one family of its models)"
	@echo "make lint      ruff, the wording of docstrings and pages, mypy, and zizmor on the workflows"
	@echo "make docs      write the generated parts of README.md and docs/ anew, and build the site of docs/ in site/"
	@echo "make results   run the suites of CPUs anew, on a quiet machine (ARGS='orders ring' a part), then make docs"
	@echo "make wheel     a wheel with its SBOM, and an sdist, in dist/, in place of what is there"
	@echo "make cut VERSION=1.2.3  write a new version wherever it is named; commits and publishes nothing"
	@echo "make clean     remove .venv and everything that was built"
	@echo "make stages    install what any of these needs; otherwise each installs its own stage, and says what and how large"
	@echo "PYTHON=python3.12 chooses the interpreter that .venv is made from. If it is that of a virtual environment with torch,"
	@echo "  such as PYTHON=~/venv/bin/python, what is missing is installed there, and no .venv is made; name it in each call"

demo: $(DEMO)
	$(PY) -m dilkit demo $(ARGS)

test: $(TEST)
	$(PYTEST) --limit-cpu-time $(ARGS)

test-all: $(TEST)
	$(PYTEST) -m "not gpu and not kernels" --hypothesis-profile "at length" $(ARGS)

smoke: $(TEST)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m smoke $(ARGS)

mutants: $(TEST)
	$(PY) tests/mutants/run.py $(ARGS)

matrix: $(TEST)
	$(PY) tests/matrix/run.py $(ARGS)

slow: $(TEST)
	$(PYTEST) -m slow $(ARGS)

sanitize: $(TEST)
	$(PY) tests/sanitize/run.py $(ARGS)
	$(PY) tests/sanitize/orders.py $(ARGS)

aarch64: $(TEST)
	$(PY) tests/sanitize/aarch64.py $(ARGS)

fuzz: $(TEST)
	$(PY) tests/fuzz/run.py --if-possible --minutes $(MINUTES) $(ARGS)

sanitize-cuda: $(KERNELS)
	compute-sanitizer --tool memcheck --error-exitcode 1 $(PY) -m dilkit verify --device cuda --backend cupy_raw --repeats 0 $(ARGS)
	compute-sanitizer --tool racecheck --error-exitcode 1 $(PY) -m dilkit verify --device cuda --backend cupy_raw --repeats 0 $(ARGS)

triton-sanitize: $(TTSEM)
	OMP_NUM_THREADS=1 $(PY) tests/backends/triton/sanitize.py $(ARGS)

kernels: $(TEST) $(KERNELS)
	$(PY) -m dilkit.tools.bench.workloads.kernels_compiled
	$(PYTEST) -m '' tests/backends/cuda tests/backends/numba tests/backends/triton tests/tools/bench/test_kernels.py tests/tools/bench/test_gpu.py $(ARGS)

costs: $(TEST) $(KERNELS)
	OMP_NUM_THREADS=1 $(PY) tests/ptx/costs.py $(ARGS)
	$(PY) -m dilkit.tools.site.pages

ptx: $(TEST) $(KERNELS)
	OMP_NUM_THREADS=1 $(PY) tests/ptx/run.py $(ARGS)
	OMP_NUM_THREADS=1 $(PY) tests/ptx/mutations.py
	$(PY) -m dilkit.tools.site.pages

gpu-day: $(TEST) $(KERNELS)
	$(PY) tests/gpu/run.py $(DIR) $(ARGS)

host-time: $(TEST)
	OMP_NUM_THREADS=1 $(PY) tests/host_time.py $(ARGS)

hosts: $(TEST)
	$(PY) -m dilkit bench --suite hosts $(ARGS)

simulate: $(KERNELS)
	OMP_NUM_THREADS=1 $(PY) tests/backends/numba/simulate.py --all $(ARGS)

ifneq ($(wildcard $(DIR)/src/transformers),)
peers: $(TEST) $(PEERS) $(TRANSFORMERS)
	$(PY) tests/families/own_tests.py "$(DIR)" $(ARGS)
else
peers: $(TEST) $(PEERS)
	$(if $(wildcard $(DIR)/gigapath),DILKIT_GIGAPATH,$(if $(wildcard $(DIR)/flash_attn),DILKIT_FLASH_ATTN,DILKIT_TORCHSCALE))="$(DIR)" OMP_NUM_THREADS=1 $(PY) -m pytest tests/core/integrations $(ARGS)
endif

lint: $(LINT)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) .ci/wording.py
	$(PY) .ci/type_check.py
	$(PY) .ci/workflows.py

docs: $(DOCS)
	$(PY) -m dilkit.tools.site.pages
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "open site/index.html"

results: $(TEST) $(PEERS)
	set -e; for name in $(or $(ARGS),$(SUITES)); do \
		$(PY) -m dilkit bench --suite $$name --out build/$$name; cp build/$$name/suite.json docs/results/$$name.json; done
	$(MAKE) docs

wheel: $(TEST)
	rm -rf dist
	$(PY) -m build --no-isolation
	$(PY) .ci/release/sbom.py dist/*.whl

cut: $(TEST)
	$(PY) .ci/release/cut.py $(VERSION)

stages: $(TEST) $(KERNELS) $(TRANSFORMERS) $(LINT) $(DOCS)

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(PYX:.pyx=.c) $(foreach file,$(PYX:.pyx=),$(wildcard $(file).*.so))
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stage is installed once for each state of the files that decide what is in it. `make demo` needs the first two.
$(ENV)/made:
	@"$(PYTHON)" .ci/environment/machine.py
ifeq ($(ENV),.venv)
	"$(PYTHON)" -m venv .venv
else
	@mkdir -p $(ENV)
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip
endif
	@touch $@

$(ENV)/stage-demo: pyproject.toml constraints.txt | $(ENV)/made
	@$(PY) .ci/environment/install.py demo
	@touch $@

# A changed extension, or a changed package map, is built again into the same environment, with nothing downloaded.
$(ENV)/stage-dilkit: $(ENV)/stage-demo setup.py $(PYX) $(C) $(INITS)
	@$(PY) .ci/environment/install.py dilkit
	@touch $@

$(TEST) $(KERNELS) $(TRANSFORMERS) $(LINT) $(DOCS) $(PEERS) $(TTSEM): $(ENV)/stage-%: pyproject.toml constraints.txt | $(DEMO)
	@$(PY) .ci/environment/install.py $*
	@touch $@
