# make run     set up, then FlexFL and its control on the bundled digits, through every step
# make test    set up, then the tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One thread per process: tests and campaigns run side by side.
export OMP_NUM_THREADS ?= 1
export DVC_NO_ANALYTICS ?= 1

.PHONY: setup run test soak lint generated docs evidence bench bench-peers image e2e-containers lock sbom pin-digests \
        test-kubernetes-clients

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[all,dev]'
	@$(BIN)/python -m components.torch_build
	touch $@

run: setup
	$(BIN)/flexfleet run --run-id digits-flexfl --resume --set pretrain.reference=true
	$(BIN)/flexfleet run --run-id digits-all-large --resume --set algorithm.name=all_large
	$(BIN)/flexfleet report runs/digits-flexfl runs/digits-all-large --out runs/report.html
	@echo "open MLflow: $(BIN)/mlflow ui --backend-store-uri sqlite:///mlflow.db"

test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

SOAK_KILLS ?= 300
SOAK_MUTANTS ?= 50

# What `make test` does for a minute, for hours: kills, malformed bytes, attacks (they want radosgw), changes of the
# engine that no test sees, and the largest runs that one machine takes.
soak: setup
	$(BIN)/python -m tests.harness.kills --kills $(SOAK_KILLS)
	FLEXFLEET_FUZZ=2000 $(BIN)/python -m pytest tests/fuzz
	$(BIN)/python -m tests.harness.attacks
	$(BIN)/python -m tests.harness.mutants --limit $(SOAK_MUTANTS)
	$(BIN)/python -m benchmarks.limits

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

# What the schema says, in the files that others read: params.yaml, the pipelines' forms, the compiled pipelines.
generated: setup
	$(BIN)/python -m components.describe
	$(BIN)/python -m pipelines.compile

# The documentation as a site, in site/; `.venv/bin/mkdocs serve` shows it while it is being written.
docs: setup
	$(BIN)/mkdocs build --strict --quiet

IMAGE ?= flexfleet:latest

# The second is MLflow's server, for clusters that have none.
image:
	docker build --file components/Dockerfile --target flexfleet --tag $(IMAGE) \
	    --build-arg COMMIT=$$(git rev-parse HEAD) .
	docker build --file components/Dockerfile --target mlflow --tag flexfleet-mlflow:latest .

# What the images install, by hash, from constraints.txt: components/locks/. After it `make sbom`.
lock: .venv-lock/.ready
	UV=.venv-lock/bin/uv components/lock

.venv-lock/.ready: constraints.txt
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet --constraint constraints.txt uv
	touch $@

# What the images hold, installed from the locks: bills of materials (CycloneDX) in dist/, and docs/licences.md.
sbom: setup
	PYTHON=$(BIN)/python components/sbom dist docs/licences.md

# The tags of an overlay's images become digests: what a registry holds under them now. OVERLAY=k8s/overlays/cluster
OVERLAY ?= k8s/overlays/cluster
pin-digests: setup
	$(BIN)/python -m components.digests $(OVERLAY)

# The training graph, a client's pod and the worker processes, in the image: `make image` first.
e2e-containers: setup
	docker image inspect --format 'in {{.Id}}' $(IMAGE)
	FLEXFLEET_TEST_IMAGE=$(IMAGE) $(BIN)/python -m pytest tests/k8s/test_image.py

# Real data, an hour and a half on two cores; start it again and it goes on. See docs/evidence.md.
evidence: setup
	$(BIN)/python -m benchmarks.evidence

# Speed against a hand-written PyTorch loop, a quarter of an hour; see docs/performance.md. With peers, after
# `make bench-peers`: .venv/bin/python -m benchmarks W1 W3 --against naive,flower,pfl,fedjax
bench: setup
	$(BIN)/python -m benchmarks W3 --against naive
	$(BIN)/python -m benchmarks W1 W2 W4 W4-no-kd W5 --against naive --samples 100 --turns 3

# The oldest and newest `kubernetes` that pyproject.toml admits, and the one that sends no credentials by its own calls.
KUBERNETES_CLIENTS ?= 30.1.0 36.0.3 37.0.2

test-kubernetes-clients: $(KUBERNETES_CLIENTS:%=.venv-kubernetes-%/.ready)
	for version in $(KUBERNETES_CLIENTS); do \
	    .venv-kubernetes-$$version/bin/python -m pytest --noconftest tests/k8s/test_transport.py || exit 1; \
	done

.venv-kubernetes-%/.ready:
	$(PYTHON) -m venv .venv-kubernetes-$*
	.venv-kubernetes-$*/bin/pip install --quiet kubernetes==$* pytest cryptography pyyaml
	touch $@

# Each peer lives in an environment of its own: their dependencies exclude each other.
bench-peers: .venv-flower/.ready .venv-pfl/.ready .venv-fedjax/.ready

.venv-%/.ready: benchmarks/requirements/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --requirement $<
	touch $@
