# make run     set up, then run FlexFL and its control on the bundled digits through every step
# make test    set up, then run the tests that need no minutes; `make test-all` runs the long ones
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One thread per process, because tests and campaigns run several processes in parallel.
export OMP_NUM_THREADS ?= 1
# Bytecode is kept, whatever the environment says: tests start hundreds of processes, which would each compile it all.
export PYTHONDONTWRITEBYTECODE :=
export DVC_NO_ANALYTICS ?= 1

.PHONY: setup run test test-all soak lint generated docs evidence bench bench-peers image e2e-containers lock sbom \
        test-python310

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, and $(PYTHON) \
	is %d.%d: name another one, as in make run PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	@# Python brings an old pip, which takes longer. Bytecode is kept of what is imported, not of all 22,000 files.
	$(BIN)/pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch
	@# Of an editable installation setuptools warns at length, of nothing that is wrong here.
	PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[all,dev]'
	@$(BIN)/python -c 'import dvc.repo, flexfleet.pipeline.run, kfp, matplotlib.pyplot, optuna, sklearn'
	@$(BIN)/python -c 'import mlflow.store.tracking.sqlalchemy_store'
	@$(BIN)/python -c 'import torch; print("torch", torch.__version__)'
	touch $@

run: setup
	$(BIN)/flexfleet run --run-id digits-flexfl --resume --set pretrain.reference=true
	$(BIN)/flexfleet run --run-id digits-all-large --resume --set pretrain.reference=true \
	    --set algorithm.name=all_large
	$(BIN)/flexfleet report runs/digits-flexfl runs/digits-all-large --out runs/report.html
	@echo "open MLflow: $(BIN)/mlflow ui --backend-store-uri sqlite:///mlflow.db"

PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --durations 10

# Some tests wait for other processes, so three that run tests keep two cores busy.
test: setup
	$(PYTEST) --numprocesses 3 -m "not long"

# The long tests: commands of the documentation, nights, pipelines of real processes, kills, S3 servers. They wait for
# other processes, so five of them keep two cores busy.
test-all: setup
	$(PYTEST) --numprocesses 5 -m long

SOAK_KILLS ?= 300
SOAK_MUTANTS ?= 50

# Does for hours what `make test` and `make test-all` do for minutes: kills runs, feeds malformed bytes, attacks the
# engine (needs radosgw), and looks for changes of the engine that no test notices. Then makes the largest runs that fit
# one machine.
soak: setup
	$(BIN)/python -m tests.harness.kills --kills $(SOAK_KILLS)
	FLEXFLEET_FUZZ=2000 $(BIN)/python -m pytest tests/fuzz
	$(BIN)/python -m tests.harness.attacks
	$(BIN)/python -m tests.harness.mutants --limit $(SOAK_MUTANTS)
	$(BIN)/python -m benchmarks.limits

lint: setup
	$(BIN)/ruff check .
	@# Files are read and written as UTF-8, whatever the machine's locale (the rule is one of ruff's preview).
	$(BIN)/ruff check --preview --select PLW1514 fl_engine flexfleet components pipelines benchmarks
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

# Writes the files that are generated from the schema: params.yaml, the pipelines' forms, the compiled pipelines, and
# the drawings of a form and a graph.
generated: setup
	$(BIN)/python -m components.describe
	$(BIN)/python -m pipelines.compile
	$(BIN)/python -m pipelines.drawings

# Builds the documentation as a site, in site/; `.venv/bin/mkdocs serve` shows it while you write.
docs: setup
	$(BIN)/mkdocs build --strict --quiet

IMAGE ?= flexfleet:latest

# The second image is MLflow's server, for clusters that have none.
image:
	docker build --file components/Dockerfile --target flexfleet --tag $(IMAGE) \
	    --build-arg COMMIT=$$(git rev-parse HEAD) .
	docker build --file components/Dockerfile --target mlflow --tag flexfleet-mlflow:latest .

# Writes components/locks/ from constraints.txt: the packages of the images, with hashes. Run `make sbom` after it.
lock: .venv-lock/.ready
	UV=.venv-lock/bin/uv components/lock

.venv-lock/.ready: constraints.txt
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet --constraint constraints.txt uv
	touch $@

# Installs the locks and lists the packages: bills of materials (CycloneDX) in dist/, and docs/licences.md.
sbom: setup
	PYTHON=$(BIN)/python components/sbom dist docs/licences.md

# Tests the training graph, a client's pod and the worker processes in the image; run `make image` first.
e2e-containers: setup
	docker image inspect --format 'in {{.Id}}' $(IMAGE)
	FLEXFLEET_TEST_IMAGE=$(IMAGE) $(BIN)/python -m pytest tests/k8s/test_image.py

# Compares the algorithms on real data, in some seventeen hours on two cores, and AEP at full scale in nine more. An interrupted
# campaign goes on when it is started again. See docs/evidence.md.
evidence: setup
	$(BIN)/python -m benchmarks.evidence

# Compares the speed with a hand-written PyTorch loop, in a quarter of an hour; see docs/performance.md. To compare with
# other frameworks, run `make bench-peers`, then
# .venv/bin/python -m benchmarks W1 W3 --against naive,flower,pfl,fedjax
bench: setup
	$(BIN)/python -m benchmarks W8 W3 --against naive
	$(BIN)/python -m benchmarks W1 W2 W4 W4-no-kd W5 --against naive --samples 100 --turns 3

# The client's part under Python 3.10, which devices have (JetPack 6): an agent and a profile really run there.
PYTHON310 ?= python3.10

test-python310: setup .venv-python310/.ready
	FLEXFLEET_PYTHON310=$(CURDIR)/.venv-python310/bin/python $(BIN)/python -m pytest tests/e2e/test_python310.py

.venv-python310/.ready: pyproject.toml constraints.txt
	$(PYTHON310) -m venv .venv-python310
	.venv-python310/bin/pip install --quiet --constraint constraints.txt torch
	.venv-python310/bin/pip install --quiet --constraint constraints.txt --editable '.[engine]' scikit-learn
	touch $@

# Each peer has a virtual environment of its own, because their dependencies conflict.
bench-peers: .venv-flower/.ready .venv-pfl/.ready .venv-fedjax/.ready

.venv-%/.ready: benchmarks/requirements/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --requirement $<
	touch $@
