# make run     install, then compare FlexFL with FedAvg on the bundled digits
# make test    install, then run the short tests; `make test-all` runs the long tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One thread per process, because tests and campaigns run several processes in parallel.
export OMP_NUM_THREADS ?= 1
# Always cache bytecode, because tests start hundreds of processes, which would each compile all modules.
export PYTHONDONTWRITEBYTECODE :=
export DVC_NO_ANALYTICS ?= 1
TORCH_CPU ?= https://download.pytorch.org/whl/cpu

.PHONY: setup run test test-all soak lint generated docs evidence bench bench-peers image e2e-containers lock sbom \
        test-python310

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("PYTHON must be 3.11 or newer, but $(PYTHON) is \
	%d.%d. Choose another Python: make run PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	@# Python includes an old, slow pip. --no-compile is faster, because most of the 22,000 files are never imported.
	$(BIN)/pip install --quiet --constraint constraints.txt --upgrade pip
	@# For Linux, PyPI's torch includes CUDA (3 GB). Without an NVIDIA GPU, prefer the CPU build if its index is
	@# reachable, unless the user has chosen an index.
	@from=; if [ "$$(uname -sm)" = "Linux x86_64" ] && ! [ -e /proc/driver/nvidia ] && ! command -v nvidia-smi >/dev/null \
	    && ! $(BIN)/pip config list | grep -qE '^:env:.*index-url|\.index-url'; then \
	    if timeout 9 $(BIN)/python -c 'import urllib.request as r; r.urlopen("$(TORCH_CPU)/torch/", timeout=5)' 2>&-; \
	    then from="--extra-index-url $(TORCH_CPU)"; \
	    else echo "$(TORCH_CPU) is not reachable. torch comes from PyPI and may include CUDA (3 GB)"; fi; fi; \
	set -x; $(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch $$from
	@# setuptools prints long but irrelevant warnings for an editable installation.
	PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[all,dev]'
	@$(BIN)/python -c 'import dvc.repo, flexfleet.pipeline.run, kfp, matplotlib.pyplot, optuna, sklearn'
	@$(BIN)/python -c 'import mlflow.store.tracking.sqlalchemy_store'
	@$(BIN)/python -c 'import torch; print("torch", torch.__version__)'
	touch $@

run: setup
	@# With `capable`, FedAvg selects only devices that can hold the full model. FlexFL trains on all devices.
	$(BIN)/flexfleet compare --algorithms flexfl,fedavg --set fedavg:algorithm.eligible=capable --jobs 2 \
	    --id digits --resume

PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --durations 10

# Some tests wait for other processes, so three pytest workers keep two cores busy.
test: setup
	$(PYTEST) --numprocesses 3 -m "not long"

# Long tests: commands in the documentation, nightly regression runs, pipelines with real processes, kills, S3 servers.
# Long tests often wait for other processes, so five pytest workers keep two cores busy.
test-all: setup
	$(PYTEST) --numprocesses 5 -m long

SOAK_KILLS ?= 300
SOAK_MUTANTS ?= 50

# Runs stress tests for hours: kills runs, sends malformed bytes, attacks the engine (needs radosgw), and searches for
# mutants of the engine that no test detects. Then measures the largest runs that fit on one machine.
soak: setup
	$(BIN)/python -m tests.harness.kills --kills $(SOAK_KILLS)
	FLEXFLEET_FUZZ=2000 $(BIN)/python -m pytest tests/fuzz
	$(BIN)/python -m tests.harness.attacks
	$(BIN)/python -m tests.harness.mutants --limit $(SOAK_MUTANTS)
	$(BIN)/python -m benchmarks.limits

lint: setup
	$(BIN)/ruff check .
	@# Require UTF-8 for reading and writing files in any locale. This rule needs ruff's preview mode.
	$(BIN)/ruff check --preview --select PLW1514 fl_engine flexfleet components pipelines benchmarks
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	@# CI cannot run these tests.
	$(BIN)/mypy -p tests.cluster -p tests.kubeflow
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[bf]*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff
	@# Outside the checkout, so that mypy and Pyright find the packages in the same way as a user's editor.
	@# Pyright needs Node, which it would download.
	at=$$(mktemp -d) && cp tests/typing/users_script.py $$at && cd $$at && $(abspath $(BIN))/mypy --strict . && \
	    if command -v node >/dev/null; then $(abspath $(BIN))/pyright --pythonpath $(abspath $(BIN))/python .; \
	    else echo "Pyright was skipped, because node is not installed"; fi && rm -r $$at

# Writes the generated files: params.yaml, the page of error codes, and the compiled pipelines.
generated: setup
	$(BIN)/python -m components.describe
	$(BIN)/python -m pipelines.compile

# Builds the documentation in site/, without --quiet, which would hide the warnings that --strict counts.
# `.venv/bin/mkdocs serve` shows a live preview.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

IMAGE ?= flexfleet:latest

# The second image is MLflow's server, for clusters without an MLflow server.
image:
	docker build --file components/Dockerfile --target flexfleet --tag $(IMAGE) \
	    --build-arg COMMIT=$$(git rev-parse HEAD) .
	docker build --file components/Dockerfile --target mlflow --tag flexfleet-mlflow:latest .

# Writes components/locks/ from constraints.txt: the packages of the images, with hashes.
lock: .venv-lock/.ready
	UV=.venv-lock/bin/uv components/lock

.venv-lock/.ready: constraints.txt
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet --constraint constraints.txt uv
	touch $@

# Installs the locked packages as in the images, and writes bills of materials (CycloneDX) with licences to dist/.
sbom: setup
	PYTHON=$(BIN)/python components/sbom dist

# Tests the training graph, a client's pod and the worker processes in the image; run `make image` first.
e2e-containers: setup
	docker image inspect --format 'in {{.Id}}' $(IMAGE)
	FLEXFLEET_TEST_IMAGE=$(IMAGE) $(BIN)/python -m pytest tests/k8s/test_image.py

# Compares the algorithms on real data, in about 17 hours on two cores, and on AEP at full scale in 9 more hours.
# Starting an interrupted campaign again continues it. See docs/evidence.md.
evidence: setup
	$(BIN)/python -m benchmarks.evidence

# Compares the speed with a hand-written PyTorch loop, in about 15 minutes (docs/performance.md). To compare with other
# frameworks, run `make bench-peers`, then
# .venv/bin/python -m benchmarks W1 W3 --against naive,flower,pfl,fedjax
bench: setup
	$(BIN)/python -m benchmarks W8 W3 --against naive
	$(BIN)/python -m benchmarks W1 W2 W4 W4-no-kd W5 --against naive --samples 100 --turns 3

# Tests `flexfleet agent` and `flexfleet profile` under Python 3.10, the version of JetPack 6.
PYTHON310 ?= python3.10

test-python310: setup .venv-python310/.ready
	FLEXFLEET_PYTHON310=$(CURDIR)/.venv-python310/bin/python $(BIN)/python -m pytest tests/e2e/test_python310.py

.venv-python310/.ready: pyproject.toml constraints.txt
	$(PYTHON310) -m venv .venv-python310
	.venv-python310/bin/pip install --quiet --constraint constraints.txt torch
	.venv-python310/bin/pip install --quiet --constraint constraints.txt --editable '.[engine]' scikit-learn
	touch $@

# Each framework has a separate virtual environment, because their dependencies conflict.
bench-peers: .venv-flower/.ready .venv-pfl/.ready .venv-fedjax/.ready

.venv-%/.ready: benchmarks/requirements/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --requirement $<
	touch $@
