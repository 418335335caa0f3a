# `make lab` opens the lessons, and `make` lists all commands.

PYTHON ?= python3
BIN = .venv/bin
INSTALLED = .venv/installed

# Containers often set it, and then each rank, kernel and test compiles the course anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help lab check test test-all test-torch soak run notebooks images slides site handout hosted wall submission benchmark measurements wheels

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# Without the pop-up that offers news before the first lesson.
lab: export JUPYTER_CONFIG_PATH := $(CURDIR)/tools/jupyter$(JUPYTER_CONFIG_PATH:%=:%)
lab: $(INSTALLED) ## set up .venv and open JupyterLab on the first lesson
	@$(BIN)/python -m nbformat.sign $(wildcard notebooks/*.ipynb notebooks/solutions/*.ipynb) >/dev/null # or it draws no stored picture
	$(BIN)/python -m jupyterlab --ServerApp.root_dir="$(CURDIR)" $(AS_ROOT) $(LAB_FLAGS) notebooks/00_start_here.ipynb # lessons link to scripts

check: $(INSTALLED) ## the linter, and the tests that start no process: two minutes
	$(LINT)
	$(TESTS) -m "not (processes or further)" tests $(PYTEST_FLAGS)

# Lesson 11 shows what a cluster has said elsewhere; with `make test-all` it has one of its own.
test: export PIPELINE_REPLAY = $(if $(COURSE_FURTHER),0,1)
test: $(INSTALLED) ## set up .venv; test every lesson, script, schedule and check
	$(LINT)
	$(TESTS) -m "not further" $(PYTEST_FLAGS)

# Also the cells that lessons mark as further.
test-all: export COURSE_FURTHER = 1
test-all: test ## then the solutions, a cluster, a room, browser and website
	$(TESTS) -m "further" $(PYTEST_FLAGS)

# make test-torch TORCH=2.15.0
TORCH ?= 2.15.0
OTHER = build/torch-$(TORCH)
test-torch: ## run scripts and traps with another torch (TORCH=2.15.0)
	$(PYTHON) -m venv $(OTHER)
	sed 's/^torch==.*/torch==$(TORCH)/' requirements.txt > $(OTHER)/requirements.txt
	$(OTHER)/bin/python -m pip install --requirement $(OTHER)/requirements.txt
	$(OTHER)/bin/python $(RUN_TESTS) $(TORCH_TESTS) $(PYTEST_FLAGS)

TORCH_TESTS = $(addprefix tests/test_,$(addsuffix .py,equals_one_process every_schedule \
	loops_by_hand pipedream split_stage recompute torch_pipelining torch_pipelining_traps newer_torch rehearsal \
	message_order flight_recorder checkpointing data_parallel replicas pretrain_llama \
	experts tensor_parallel vocabulary_parallel inference no_code_from_files)) tests/hosted_emulation.py

soak: $(INSTALLED) ## damage files, schedules, answers in thousands of ways: hours
	FUZZ_INPUTS=10000 $(BIN)/python -m pytest $(DRAWN_AT_RANDOM) $(PYTEST_FLAGS)
	COURSE_SOAK=1 $(BIN)/python -m pytest --session-timeout=28800 -m soak tests $(PYTEST_FLAGS)
	$(BIN)/python tools/spoil_code.py

DRAWN_AT_RANDOM = $(addprefix tests/test_,damaged_files.py launchers.py schedule_properties.py)

define LINT
$(BIN)/python -m ruff format --check .
$(BIN)/python -m ruff check .
endef
# Four at a time also on two cores, because many tests wait: for a rank, a limit, a cluster.
RUN_TESTS = -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder
TESTS = $(BIN)/python $(RUN_TESTS)

run: $(INSTALLED) ## train on four processes, and draw prediction and run
	@mkdir -p build
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 \
		source_code/gpipe.py --verify --pace 10 20 --timeline build/gpipe.json
	$(BIN)/python source_code/predict.py gpipe --ranks 4 --microbatches 8 \
		--forward 10 --backward 20 --performed build/gpipe.json \
		--svg build/gpipe.svg --terminal
	@echo "build/gpipe.svg is the same picture for a browser, with messages."

# make notebooks ONLY=notebooks/02_gpipe.ipynb
notebooks: $(INSTALLED) ## run the notebooks and store their outputs (ONLY=FILE for one)
	PIPELINE_STORED_PICTURES=1 $(BIN)/python -m nbconvert --to notebook --execute --inplace \
		--ExecutePreprocessor.kernel_name=python3 --ExecutePreprocessor.timeout=560 \
		--ExecutePreprocessor.record_timing=False $(NOTEBOOKS)
	$(BIN)/python -m nbconvert --to notebook --inplace --coalesce-streams $(NOTEBOOKS)
	$(BIN)/python tools/answers.py
	$(BIN)/python tools/stored_pictures.py $(NOTEBOOKS)

NOTEBOOKS = $(or $(ONLY),$(wildcard notebooks/*.ipynb notebooks/solutions/*.ipynb))

images: $(INSTALLED) ## draw the figures in images/ anew
	$(BIN)/python tools/make_images.py

slides: $(INSTALLED) ## make slides of all lessons in build/slides, for any browser
	$(BIN)/python tools/make_slides.py

site: $(INSTALLED) ## make the course a website in build/site, for any browser
	$(BIN)/python tools/make_site.py $(SITE_FLAGS)

handout: $(INSTALLED) ## make what participants get in build/handout, without answers
	$(BIN)/python tools/make_handout.py

# make hosted ADDRESS=owner/name
hosted: ## let lessons run in a hosted notebook (ADDRESS=owner/name)
	$(or $(wildcard $(BIN)/python),$(PYTHON)) tools/make_hosted.py $(ADDRESS)

# make wall FOLDER=/shared/progress FLAGS=--names
FOLDER ?= build/progress
wall: $(INSTALLED) ## show where a room is in build/wall, from everybody's progress
	@mkdir -p build/progress # and no other folder, whose name may be mistyped
	$(BIN)/python tools/wall.py "$(FOLDER)" $(FLAGS)

submission: $(INSTALLED) ## run all checks of your notebooks; write one file to hand in
	$(BIN)/python tools/make_submission.py

benchmark: $(INSTALLED) ## measure on this machine, beside theory and torch's pipeline
	$(BIN)/python tools/benchmark.py

# make measurements FROM=build/accept.json
measurements: $(INSTALLED) ## put what tools/accept.py found into the docs (FROM=FILE)
	$(BIN)/python tools/write_measurements.py "$(or $(FROM),build/accept.json)"

# make wheels WHEELS="--only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64"
wheels: ## fetch all packages into wheels/, for use without a network
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m pip download --dest wheels $(WHEELS) $(PACKAGES)

PACKAGES = --requirement requirements.txt --constraint tools/constraints.txt

# Jupyter refuses to run as root unless told, and in a container there is often nobody else.
AS_ROOT = $(if $(filter 0,$(shell id -u)),--allow-root)

# An environment that is already there is kept, with what you installed into it.
$(INSTALLED): requirements.txt tools/constraints.txt
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
			echo "The course needs Python 3.10 or newer, and $(PYTHON) is not;" \
				"name another, e.g. make lab PYTHON=python3.12" >&2; exit 1; }; \
		$(PYTHON) -m venv --clear .venv || { \
			echo "$(PYTHON) cannot make a virtual environment;" \
				"on Debian and Ubuntu install the package python3-venv" >&2; exit 1; }; \
	fi
	$(BIN)/python -m pip install $(PACKAGES)
	@touch $@
