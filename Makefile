# make demo    train the notebook's models on 2 ranks, leave the run as HTML in build/ (an environment of its own)
# make quick   what to run between edits: format, lint, type checks, and the tests that take no more than seconds
# make test    format, lint, and the tests that take no more than half a minute: all that proves nbdist on CPUs
# make test-all  that, type checks, and what needs minutes by nature or another program: clusters, notebooks, a browser, installation
#              plans, larger trainings (make long), other projects' suites (make others), the site
# make mutations  put 40 faults into a copy of the code, one at a time, and see that the tests catch them
# make suite   measure where the CPU seconds of a command's tests go: make suite RUN=test
# make lines   list the lines of nbdist that a command's tests do not execute: make lines RUN=test (Python 3.12 or newer)
# make matrix  the core tests and notebook 01 in the environments of environments.toml: Colab, Kaggle, other Pythons
#              (some of them: make matrix ENVIRONMENTS="colab oldest"; tests of your choice: MATRIX_ARGS="-k widget")
# make cloudpickle  cloudpickle's own test suite, of its source distribution, over nbdist's pickler
# make multiprocess  multiprocess' own test suite, of its source distribution, over nbdist.context (METHOD=fork: over one
#              of its own start methods)
# make bench   measure nbdist beside its peers, in an environment of its own: tables in benchmarks/results/
# make gpu     everything that was written for NVIDIA GPUs, run on those that are here: tests and figures in
#              benchmarks/results/gpu.md (on a machine without network: make gpu-wheels elsewhere, see docs/how-to/devices.md)
# make gpu-imitated  what runs on GPUs, on two that are imitated: needs gcc, no GPU, and downloads Colab's CUDA build of torch
# make docs    build the site in docs/ into build/docs/, warnings as errors, with the notebooks that the tests have executed
# make pictures  take the pictures of the site again, in a JupyterLab in Chromium (Debian: apt install chromium)
# make format  put the code into shape
# make clean   remove all that these commands made, .venv included (not benchmarks/results/)
#
# Each does its own set-up: it needs Python >= 3.10 and nothing else. Another interpreter:
# make test PYTHON=/path/to/python3 (after `make clean`, if there is a .venv already).

SHELL := bash
PYTHON ?= python3
# Some machines, containers above all, have it set. The tests start a thousand interpreters: compiling torch and fastai
# anew takes each of them five seconds of CPU.
export PYTHONDONTWRITEBYTECODE :=
VENV := .venv
PY := $(VENV)/bin/python
# Holds the folder the environment was made in: an environment cannot be moved.
STAMP := $(VENV)/.complete
WANTED := -e ".[test,docs]"
DEMO := .venv-demo
DEMO_STAMP := $(DEMO)/.complete
BENCH := .venv-bench
BENCH_STAMP := $(BENCH)/.complete
LOG := build/setup.log
PYTEST_ARGS ?=
BENCH_ARGS ?=
GPU_ARGS ?=
GPU_WHEELS ?=
ENVIRONMENTS ?=
MATRIX_ARGS ?=

.NOTPARALLEL:
.PHONY: demo test test-all long others quick suite lines mutations cloudpickle multiprocess matrix bench gpu gpu-imitated gpu-wheels docs pictures lint types format setup clean

# An environment whose interpreter is gone, or that came here from another folder, is made again.
define check_stamp
ifneq ($$(wildcard $(1)/.complete),)
  ifneq ($$(shell $(1)/bin/python -c 'import sys; print(sys.prefix == open("$(1)/.complete").read().strip())' 2>&1),True)
    $$(shell rm -f $(1)/.complete)
  endif
endif
endef
$(foreach venv,$(VENV) $(DEMO) $(BENCH),$(eval $(call check_stamp,$(venv))))

demo: $(DEMO_STAMP)
	@$(DEMO)/bin/python notebooks/execute.py notebooks/01_fastai_collab.ipynb

# Four files of tests at a time on two cores, for many wait. They find nbdist in a folder of installed packages, as users
# do: what is imported from anywhere else, each rank imports for itself.
SITE := $(CURDIR)/build/site-packages
PYTEST := mkdir -p $(SITE) && ln -sfn ../../nbdist $(SITE)/nbdist && PYTHONPATH=$(SITE) $(PY) -m pytest -q -n 4 --dist loadfile

test: lint
	@$(PYTEST) -m "not long" $(PYTEST_ARGS)

quick: lint types
	@$(PYTEST) -m "not long and not slow" $(PYTEST_ARGS)

# Most of them wait: for clusters, servers, kernels, a browser.
long: setup
	@$(PYTEST) -m long $(PYTEST_ARGS)

# All tests in one run: files are collected once, and a file's tests share what they start. What runs beside them is shown
# after them. The site shows the notebooks that the tests have executed.
test-all: lint
	@mkdir -p build; $(MAKE) --no-print-directory others >build/others.log 2>&1 </dev/null & \
	failed=0; \
	$(PYTEST) $(PYTEST_ARGS) || failed=1; \
	$(MAKE) --no-print-directory docs || failed=1; \
	wait $$! || failed=1; \
	grep -E "^(FAILED|ERROR|FAIL:)|passed|failed|[Ee]rror|issues|^Ran |^OK" build/others.log; exit $$failed

# The type checker and other projects' suites; threads are no processes of ours. Other environments have commands of
# their own: make matrix, make gpu-imitated.
others: setup
	@failed=0; \
	$(MAKE) --no-print-directory types || failed=1; \
	$(MAKE) --no-print-directory cloudpickle PYTEST_ARGS= || failed=1; \
	$(MAKE) --no-print-directory multiprocess PYTEST_ARGS="-k 'not WithThreads'" || failed=1; \
	exit $$failed

mutations: setup
	@$(PY) tests/mutate.py

RUN ?= test
suite: setup
	@$(PY) -m benchmarks.suite $(RUN) -- $(MAKE) --no-print-directory $(RUN) PYTEST_ARGS="-p benchmarks.suite $(PYTEST_ARGS)"

lines: setup
	@$(PY) -m benchmarks.lines $(MAKE) --no-print-directory $(RUN)

matrix: setup
	@$(PY) -m nox $(if $(ENVIRONMENTS),-s $(ENVIRONMENTS) table) $(if $(MATRIX_ARGS),-- $(MATRIX_ARGS))

# The newest source distribution that holds the tests. Its build backend has to be as old as it is.
CLOUDPICKLE := cloudpickle-3.1.0
cloudpickle: setup
	@mkdir -p build/cloudpickle && echo "flit_core<4" >build/cloudpickle/constraints.txt
	@PIP_CONSTRAINT=$(CURDIR)/build/cloudpickle/constraints.txt $(PY) -m pip download --disable-pip-version-check -q \
	    --no-deps --no-binary cloudpickle $(subst -,==,$(CLOUDPICKLE)) -d build/cloudpickle
	@rm -rf build/cloudpickle/$(CLOUDPICKLE) && tar xzf build/cloudpickle/$(CLOUDPICKLE).tar.gz -C build/cloudpickle
	@$(PY) tests/capture/cloudpickle_adapter.py build/cloudpickle/$(CLOUDPICKLE) $(PYTEST_ARGS)

METHOD ?= nbdist
multiprocess: setup
	@mkdir -p build/multiprocess
	@release=multiprocess-$$($(PY) -c 'import multiprocess; print(multiprocess.__version__)') && cd build/multiprocess && \
	    { [ -d $$release ] || { PIP_CONSTRAINT= $(CURDIR)/$(PY) -m pip download --disable-pip-version-check -q --no-deps \
	        --no-binary multiprocess $${release/-/==} && tar xzf $$release.tar.gz; }; } && \
	    $(CURDIR)/$(PY) $(CURDIR)/tests/kernel/multiprocess_adapter.py $$release $(METHOD) $(PYTEST_ARGS)

bench: $(BENCH_STAMP)
	@$(BENCH)/bin/python -m benchmarks.launch $(BENCH_ARGS)

gpu: setup
	@$(PY) -m benchmarks.gpu $(GPU_ARGS)

# In the environment of `make matrix ENVIRONMENTS=colab`, which is made at the first run. Another one:
# make gpu-imitated CUDA_PYTHON=/path/to/python, of an environment with a CUDA build of torch, pytest and jupyter_client.
CUDA_PYTHON ?=
gpu-imitated: setup
	@$(if $(CUDA_PYTHON),PYTHONPATH=$(CURDIR) $(CUDA_PYTHON) tests/gpu/imitated -m pytest -q -p no:xdist $(or $(PYTEST_ARGS),tests/gpu),\
	    $(PY) -m nox -s colab -- imitated $(PYTEST_ARGS))

# What a machine needs beside a torch with CUDA and its NumPy: a few megabytes, for Python 3.12 on Linux.
gpu-wheels: setup
	@$(PY) -m pip download --disable-pip-version-check -q --no-deps --only-binary :all: --python-version 3.12 \
	    --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 -c constraints.txt -d build/wheels \
	    cloudpickle psutil threadpoolctl nvidia-ml-py pytest pluggy iniconfig packaging pygments $(GPU_WHEELS)
	@ls -s build/wheels

docs: setup
	@$(PY) notebooks/pages.py
	@$(PY) -m zensical build --clean --strict
	@$(PY) tests/docs/llms.py build/docs

pictures: setup
	@mkdir -p docs/pictures
	@$(PY) notebooks/pages.py gallery
	@NBDIST_PICTURES=docs/pictures $(PY) -m pytest -q -p no:xdist tests/browser/test_pictures.py tests/browser/test_closed_page.py $(PYTEST_ARGS)

lint: setup
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .

types: setup
	@$(PY) -m mypy

format: setup
	@$(PY) -m ruff check --fix-only .
	@$(PY) -m ruff format .

clean:
	rm -rf $(VENV) $(DEMO) $(BENCH) .nox build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(STAMP)

# uv, with the places where pip is told to look, and like pip for the newest version in any of them.
UV = $(@D)/bin/python -m uv pip install --index-strategy unsafe-best-match $$($(@D)/bin/python requirements/places.py)

# Of what pip and uv say: big downloads, and the steps.
TELL = while IFS= read -r line; do case "$$line" in \
    *ownloading*[0-9][0-9].[0-9]*M*B\)|*ownloading*GiB\)|Resolved*|Prepared*|Installed*|Installing*|*Building*) \
        printf '%5d s  %s\n' $$SECONDS "$$(sed 's/^ *//' <<<"$$line" | cut -c1-100)" ;; esac; done

$(DEMO_STAMP): WANTED := -e ".[demo]"

# uv sets up in seconds what takes pip a minute or two; it looks for packages where pip is told to. torch, torchvision and
# what depends on them go through one resolution, with pinned versions. The whole output is in the log; what takes time
# is shown, with the seconds that have passed. PyPI's torchvision is built for CUDA: beside a CPU torch it cannot be
# imported, nor can torchmetrics then, which does so if it is there. Nothing here needs it.
$(BENCH_STAMP): WANTED := -e ".[fastai,notebook]" -r benchmarks/launch/requirements.txt
$(BENCH_STAMP): benchmarks/launch/requirements.txt

# TorchRec, fbgemm and the tests' S3 server, whose metadata pip must not follow; and where there is one for this machine,
# a Triton server in an environment of its own. See requirements/.
$(STAMP): AFTER := torchrec
$(STAMP): $(wildcard requirements/*.txt)

COMPILED := torch sympy fastai fastcore fastprogress pandas numpy polars hypothesis _pytest IPython ipykernel \
    jupyter_client traitlets zmq sklearn scipy matplotlib ray torchmetrics tensordict accelerate pyarrow plotly

$(STAMP) $(DEMO_STAMP) $(BENCH_STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || \
	    { echo "$(PYTHON) not found: install Python 3.10 or newer, or say make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, but $(PYTHON) is %d.%d: say make PYTHON=/path/to/python3" % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "$(PYTHON) has no venv module: install it (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "Setting up $(@D) with $$($(PYTHON) --version); this takes a while, once. Log: $(LOG)"
	@mkdir -p build
	@rm -f $@ && $(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --disable-pip-version-check --no-input -q -c constraints.txt uv >$(LOG) 2>&1; \
	set -o pipefail; $(UV) -p $(@D)/bin/python -c constraints.txt $(WANTED) 2>&1 | tee -a $(LOG) | $(TELL) \
	    || { echo "uv could not do that (why: $(LOG)), so pip does it, which takes longer"; \
	        $(@D)/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off \
	            -c constraints.txt $(WANTED) 2>&1 | tee -a $(LOG) | $(TELL); } \
	    || { tail -n 25 $(LOG); echo "Set-up failed; the whole log is $(LOG)"; exit 1; }
	@# uv compiles nothing. Otherwise each of the first processes would compile torch and fastai, all at once.
	@[ -z "$(AFTER)" ] || $(@D)/bin/python -m compileall -q -x '/(tests|rllib|serve|tune)/' $$($(@D)/bin/python -c \
	        'import sysconfig; print(*(sysconfig.get_path("purelib") + "/" + name for name in "$(COMPILED)".split()))') \
	    >/dev/null 2>&1 </dev/null &
	@$(@D)/bin/python -c 'import torchvision' >/dev/null 2>&1 || \
	    $(@D)/bin/python -m pip uninstall --disable-pip-version-check -y torchvision >>$(LOG) 2>&1
	@[ -z "$(AFTER)" ] || { files="-r requirements/torchrec-$$($(@D)/bin/python -c \
	        'import torch; print("cuda" if torch.cuda.is_available() else "cpu")').txt -r requirements/moto.txt"; \
	    $(UV) -p $(@D)/bin/python --no-deps $$files \
	        || $(@D)/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off --no-deps $$files; } \
	    >>$(LOG) 2>&1 || { tail -n 25 $(LOG); echo "Set-up failed; the whole log is $(LOG)"; exit 1; }
	@# Each build of multiprocess is for one Python; uv takes the one for 3.10 with any later one.
	@[ -z "$(AFTER)" ] || $(@D)/bin/python -m pip install --disable-pip-version-check --no-input -q --no-deps \
	    --force-reinstall -c constraints.txt multiprocess >>$(LOG) 2>&1 \
	    || { tail -n 25 $(LOG); echo "Set-up failed; the whole log is $(LOG)"; exit 1; }
	@[ -z "$(AFTER)" ] || case $$($(@D)/bin/python -c \
	        'from nbdist.recsys.triton import serving; print(serving.exists_for_this_machine())') in \
	    True) $(@D)/bin/python -m venv $(@D)/triton && { $(UV) -p $(@D)/triton/bin/python --no-deps -r requirements/triton.txt \
	        || $(@D)/triton/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off --no-deps \
	            -r requirements/triton.txt; } >>$(LOG) 2>&1 \
	        || { tail -n 25 $(LOG); echo "Set-up failed; the whole log is $(LOG)"; exit 1; } ;; \
	    False) echo "  no Triton server for this machine (see requirements/triton.txt): tests that start one are skipped" ;; \
	    *) exit 1 ;; \
	esac
	@$(@D)/bin/python -c 'import sys; open("$@", "w").write(sys.prefix)'
