# Everything runs in .venv, which is rebuilt only when pyproject.toml is newer than it.
# EXTRA=cpu, gpu or npu installs vLLM as well: see docs/engines.md.

PYTHON ?= python3
EXTRA ?=
BIN := .venv/bin
COMMA := ,
STAMP := .venv/installed$(addprefix -,$(EXTRA))

# Or each of the hundreds of processes that tests start compiles the package by itself, for a second.
unexport PYTHONDONTWRITEBYTECODE

# Python compiles what is imported, when it is: of all that comes with torch and vLLM that is a tenth. Where programs that are
# started without make may not write that down, pip compiles everything.
QUIETLY := --quiet --disable-pip-version-check
LAZILY := $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)

SINCE ?=
.PHONY: install quickstart docs check test test-python test-gpu gpu-bundle test-slow test-oldest sweep lint

install: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) and not (3, 12) <= v < (3, 12, 2) or sys.exit( \
	  "siirl_dask needs Python 3.11, 3.12.2 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install $(QUIETLY) $(LAZILY) "torch>=2.11,<2.14" -e ".[test$(addprefix $(COMMA),$(EXTRA))]"
	touch $@

quickstart: install
	$(BIN)/siirl-dask quickstart

# The pages of docs/ as a site, in build/site; a link that leads nowhere ends it.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the site is in build/site: open build/site/index.html"

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Three circles of tests: docs/testing.md. SINCE=main takes the files that a change since that commit can break, those nearest to
# it first; pytest ends with 5 where none of them has a test of the circle.
CHOSEN := build/tests-to-run
FILES = $(if $(SINCE),$$(cat $(CHOSEN)),tests)
OR_NONE = $(if $(SINCE),|| [ $$? -eq 5 ])

# The inner one: nothing that starts a process or imports an engine.
check: export OMP_NUM_THREADS ?= 1
check: $(if $(SINCE),$(CHOSEN)) lint
	test -z "$(FILES)" || $(BIN)/pytest -n 2 --dist loadfile --no-processes \
	  -m "not alone and not gpu and not slow and not sweep" $(FILES) $(OR_NONE)

# Three at a time on two cores, since tests wait for the processes that they start; in the order that tests/conftest.py gives, and
# one torch thread each; what holds times runs alone, afterwards.
test: export OMP_NUM_THREADS ?= 1
test: $(if $(SINCE),$(CHOSEN)) lint
	test -z "$(FILES)" || $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder \
	  -m "not alone and not gpu and not slow and not sweep" $(FILES) $(OR_NONE)
	alone=$$(grep -rl --include="*.py" "mark.alone" $(FILES) /dev/null); test -z "$$alone" || $(BIN)/pytest \
	  -m "alone and not slow and not sweep" $$alone $(OR_NONE) # of no other file: to import them all takes 20 seconds

# Another Python, in an environment of its own without vLLM: the inner circle, and a run. make test-python PYTHON=python3.13
OTHER = build/$(notdir $(PYTHON))
$(OTHER)/installed: pyproject.toml
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip install $(QUIETLY) $(LAZILY) "torch>=2.11,<2.14" -e ".[test]"
	touch $@

test-python: export OMP_NUM_THREADS ?= 1
test-python: $(OTHER)/installed
	$(OTHER)/bin/python -m pytest -n 2 --dist loadfile --no-processes -m "not alone and not gpu and not slow and not sweep" tests
	$(OTHER)/bin/python -m siirl_dask.cli quickstart cluster.workers=2 cluster.placement={} run.steps=3 run.url=$(OTHER)/run
	rm -r $(OTHER)/run

.PHONY: $(CHOSEN)
$(CHOSEN): install
	mkdir -p $(@D)
	$(BIN)/python tests/select_tests.py $(SINCE) > $@

# What to run first on a machine with GPUs or NPUs: docs/status.md says what it shows. No installation: it takes .venv where
# that is there, and else PYTHON, which has torch, transformers and pytest; WHEELS=folder adds the wheels that it lacks.
# DEVICE=cpu runs the same tests on CPUs, PICK="broadcast or sleep" some of them.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_SITE := build/gpu-site
# On CPUs the conformance suites and whole runs are in other tests already.
NOT_ELSEWHERE := not TestWhole and not TestSharded and not TestTransformers and not TestVllm and not bfloat16 and not one_device_generates and not rows_give and not quickstart
test-gpu:
	$(if $(WHEELS),$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target $(GPU_SITE) $(WHEELS)/*.whl)
	PYTHONPATH=.:storage$(if $(WHEELS),:$(GPU_SITE)) SIIRL_TEST_DEVICE=$(DEVICE) $(GPU_PYTHON) -m pytest -m gpu \
	  --confcutdir=tests/gpu -o timeout=1200 -p no:cacheprovider --continue-on-collection-errors $(if $(PICK),-k "$(PICK)") tests/gpu

# Scripts and wheels for a machine with a GPU and no network, into .gpu/: see benchmarks/README.md. It needs pip and packaging.
gpu-bundle:
	$(GPU_PYTHON) benchmarks/gpu/bundle.py

# The last transformers 4, beside torch and what both need of .venv, without siirl_dask: it writes base folders as they are on
# the hub, and reads what was exported of them. pip takes no package to meet a need: it would write through a link.
TRANSFORMERS4 := build/transformers4
$(TRANSFORMERS4)/installed: $(STAMP) tests/layered_environment.py
	$(PYTHON) -m venv --clear --without-pip $(TRANSFORMERS4)
	$(TRANSFORMERS4)/bin/python tests/layered_environment.py .venv $(TRANSFORMERS4) transformers huggingface-hub tokenizers \
	  --of torch transformers requests
	$(BIN)/pip --python $(TRANSFORMERS4)/bin/python install $(QUIETLY) --no-compile --no-deps "transformers==4.57.*" \
	  "huggingface-hub==0.36.*" "tokenizers==0.22.*"
	$(BIN)/pip --python $(TRANSFORMERS4)/bin/python check
	touch $@

# What takes minutes or needs programs of its own, such as Slurm: three at a time, and the hosts of the lab alone, afterwards. To
# import the files that have none of these takes half a minute.
SLOW := build/slow-tests
test-slow: export OMP_NUM_THREADS ?= 1
test-slow: install $(TRANSFORMERS4)/installed
	mkdir -p $(dir $(SLOW))
	$(BIN)/python tests/select_tests.py --marked slow > $(SLOW)
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m "slow and not alone and not sweep" $$(cat $(SLOW))
	$(BIN)/pytest -m "slow and alone and not sweep" $$(grep -l "mark.alone" $$(cat $(SLOW)))
	$(if $(SIIRL_TESTS_UNTIL),test $$(date +%s) -gt $(SIIRL_TESTS_UNTIL) && echo "it is late: the oldest versions are skipped" ||) \
	  $(MAKE) test-oldest BESIDE=devices

.PHONY: devices
devices:
	$(MAKE) test-gpu DEVICE=cpu PICK="$(NOT_ELSEWHERE)"

# The oldest versions of all that pyproject.toml requires: machines with GPUs come with a torch and a transformers of their own,
# and what is declared there must work. All other packages are those of .venv.
OLDEST := build/oldest
$(OLDEST)/installed: $(STAMP) tests/layered_environment.py
	$(PYTHON) -m venv --clear --without-pip $(OLDEST)
	$(OLDEST)/bin/python tests/layered_environment.py .venv $(OLDEST) torchvision s3fs --oldest pyproject.toml > $(OLDEST)/oldest.txt
	$(BIN)/pip --python $(OLDEST)/bin/python install $(QUIETLY) --no-compile "torchvision==0.26.*" "s3fs==2026.3.*" -r $(OLDEST)/oldest.txt
	$(BIN)/pip --python $(OLDEST)/bin/python check
	$(OLDEST)/bin/python tests/layered_environment.py .venv $(OLDEST) --check
	touch $@

# Two workers with each of torch's backends, every test of devices, among them shards over two ranks, and those in which old
# versions have differed: split layers, checkpoints, images, memory of Arrow's, views of lists, tables on a terminal.
DIFFERED := $(addprefix tests/training/test_,checkpoint.py collective_types.py images.py ulysses.py) tests/images \
  tests/rollout/test_transformers_images.py tests/nodes/test_weights.py tests/coordinator/test_dataloader.py tests/datasets \
  $(addprefix tests/commands/test_,data.py watch.py plan.py) tests/views/charts/test_run_plot.py
# Two at a time, and what each says when it has ended. BESIDE: one more target.
BESIDE ?=
.PHONY: oldest-runs oldest-tests oldest-devices
test-oldest: export OMP_NUM_THREADS ?= 1
test-oldest: $(OLDEST)/installed
	$(MAKE) -j 2 --output-sync=target oldest-tests oldest-devices oldest-runs $(BESIDE)

oldest-runs:
	for backend in torch fsdp; do $(OLDEST)/bin/python -m siirl_dask.cli quickstart cluster.workers=2 \
	  cluster.placement={} run.steps=3 run.url=$(OLDEST)/$$backend trainer.backend=$$backend || exit 1; rm -r $(OLDEST)/$$backend; done

oldest-tests:
	$(OLDEST)/bin/python -m pytest -m "not alone and not gpu and not slow and not sweep" $(DIFFERED)

oldest-devices:
	$(MAKE) test-gpu DEVICE=cpu GPU_PYTHON=$(OLDEST)/bin/python

# Every kill, stop and failure of a store at every place, and layouts and engines, of which the tests above have a sample.
sweep: export OMP_NUM_THREADS ?= 1
sweep: install
	$(BIN)/pytest -m sweep
