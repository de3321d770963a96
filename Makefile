# Tidemark. `make run` sets up and runs the demo; `make test` sets up and passes all tests.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(shell cd proto && find kvproto etcdpb tipb tidemarkpb -name '*.proto' | sort)
TEST_JOBS ?= 2
# Tests of daemons wait for a quarter of their time: one or two more at a time use that, where there is the memory for their Spark.
DAEMON_TEST_JOBS ?= $(shell awk -v jobs=$(TEST_JOBS) '/^MemAvailable/ { print jobs + ($$2 > 12000000) + ($$2 > 18000000) }' /proc/meminfo)
LAKE ?= delta
DATA ?= ./data
ARGS ?=
IMAGE ?= tidemark:local
BASE_IMAGE ?= python:3.11-slim-bookworm
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

# What pip is at, a line each: a set-up of minutes must not look as if it hung. Its errors come as they are.
PIP_STEPS := 's/^ *(Downloading|Using cached) (http.*\/)?/  \1 /p; s/^ *(Running setup.py install for|Building wheel for) ([a-z0-9-]+).*/  Building \2/p; s/^Installing collected packages.*/  Unpacking/p'

.PHONY: help
help: ## List all targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{split($$1, name, ":"); printf "  %-18s %s\n", name[1], $$2}'

.PHONY: deps
deps: ## Install what run and test need on Debian and Ubuntu (asks sudo for it)
	deploy/install-deps

.PHONY: setup
setup: $(VENV)/.setup ## Create .venv from the hash-pinned lock, with the tidemark command

$(VENV)/.locked: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "[TM:ErrPython] Python 3.11 is needed; pass PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing $$(grep -c == requirements.lock) packages into $(VENV): some 700 MB the first time, most of it Spark, which is unpacked for a minute or two"
	@set -o pipefail; $(BIN)/python -W ignore -m pip install --disable-pip-version-check --require-hashes -r requirements.lock | sed -unE $(PIP_STEPS)
	@touch $@

$(VENV)/.setup: $(VENV)/.locked pyproject.toml sink/spark/pyproject.toml proto/gen/.generated
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e . -e sink/spark
	@touch $@

JARS_INPUTS := $(VENV)/.setup sink/spark/pyspark_tidemark/jars.py sink/spark/pyspark_tidemark/java.py $(wildcard sink/spark/pyspark_tidemark/lake/*/__init__.py)

.PHONY: jars
jars: $(VENV)/.jars ## Fetch the jars of Delta, Iceberg and Kafka (not needed for LAKE=parquet), and make Spark start faster

$(VENV)/.jars: $(JARS_INPUTS)
	$(BIN)/python -m pyspark_tidemark.jars
	@touch $@

# The first try of a lake needs no jars of the others, and a minute for an archive of classes would not pay back: `make jars`
# has all that; what is there is not fetched again.
$(VENV)/.jars-delta $(VENV)/.jars-iceberg: $(VENV)/.jars-%: $(JARS_INPUTS)
	$(BIN)/python -m pyspark_tidemark.jars --no-class-archive $*
	@touch $@

.PHONY: jars-s3
jars-s3: $(VENV)/.jars-s3 ## The same, and what Iceberg needs for tables in S3

$(VENV)/.jars-s3: $(JARS_INPUTS)
	$(BIN)/python -m pyspark_tidemark.jars all
	@touch $(VENV)/.jars $@

.PHONY: kafka
kafka: $(VENV)/.kafka ## A Kafka broker, the real one, for tests (100 MB)

$(VENV)/.kafka: $(VENV)/.setup tests/kafka.py
	$(BIN)/python -m tests.kafka
	@touch $@

.PHONY: readers
readers: $(VENV)/readers/.locked ## Other engines that read lakes in tests: delta-rs, pyiceberg, Polars, DuckDB, in an environment of their own

$(VENV)/readers/.locked: tests/readers.lock | $(VENV)/.locked
	test -x $(VENV)/readers/bin/python || $(PYTHON) -m venv $(VENV)/readers
	$(VENV)/readers/bin/python -m pip install --disable-pip-version-check --quiet --require-hashes -r tests/readers.lock
	@touch $@

.PHONY: run
run: setup $(if $(filter delta iceberg,$(LAKE)),$(VENV)/.jars-$(LAKE)) ## Run the demo: a bank, a lake, and the proof that they are equal (ARGS="--keep" leaves it up)
	$(BIN)/tidemark demo --data-dir $(DATA) --lake '$(LAKE)' $(ARGS)

.PHONY: play
play: setup $(VENV)/.jars-delta ## Run a MariaDB with a shop and a lake that follows it, with SQL to try (until Ctrl-C)
	$(BIN)/tidemark play --data-dir $(DATA)/play $(ARGS)

.PHONY: stubs
stubs: $(VENV)/.locked
	@rm -rf build/stubs && mkdir -p build/stubs
	@cd proto && PATH="$(CURDIR)/$(BIN):$$PATH" ../$(BIN)/python -m grpc_tools.protoc -I. --python_out=../build/stubs \
	  --mypy_out=quiet:../build/stubs --grpc_python_out=../build/stubs --mypy_grpc_out=quiet:../build/stubs $(PROTOS)
	@find build/stubs -mindepth 1 -type d -exec touch {}/__init__.py {}/py.typed \;
	@cd proto && sha256sum $(PROTOS) > ../build/stubs/.generated

.PHONY: proto
proto: stubs ## Generate the gRPC stubs into proto/gen
	@cd build/stubs && find . -type f ! -exec cmp -s {} $(CURDIR)/proto/gen/{} \; -exec install -D -m 644 {} $(CURDIR)/proto/gen/{} \;
	@cd proto/gen && find . -type f ! -path '*/__pycache__/*' ! -exec test -e $(CURDIR)/build/stubs/{} \; -delete

proto/gen/.generated: $(addprefix proto/,$(PROTOS)) | $(VENV)/.locked
	@cd proto && sha256sum --quiet --check gen/.generated 2>/dev/null && touch gen/.generated || $(MAKE) -C .. --no-print-directory proto

.PHONY: proto-check
proto-check: stubs ## Generate the stubs again, and fail if the committed ones differ
	diff -r --exclude=__pycache__ build/stubs proto/gen

.PHONY: fmt
fmt: setup ## Format the code
	$(BIN)/ruff format -q . && $(BIN)/ruff check -q --fix .

.PHONY: lint
lint: setup ## Style (ruff)
	$(BIN)/ruff format --check -q . && $(BIN)/ruff check .

.PHONY: types
types: setup ## Types (mypy, strict)
	$(BIN)/mypy && $(BIN)/mypy $$(find sink/spark/pyspark_tidemark -name '*.py')

.PHONY: layers
layers: setup ## Import contracts
	PYTHONPATH=proto/gen:sink/spark $(BIN)/lint-imports

.PHONY: docs
docs: setup ## Write the reference pages that are made from the code
	PYTHONPATH=.:proto/gen:sink/spark $(BIN)/python -m docs.generate

.PHONY: docs-check
docs-check: setup ## Fail if a reference page is not what the code says
	PYTHONPATH=.:proto/gen:sink/spark $(BIN)/python -m docs.generate --check

build/site-venv/.done: deploy/site/requirements.txt
	$(PYTHON) -m venv build/site-venv
	build/site-venv/bin/python -m pip install --disable-pip-version-check --quiet --require-hashes -r $<
	@touch $@

.PHONY: site
site: build/site-venv/.done ## Build the docs as a site into build/site, with tools of its own
	cd deploy/site && NO_MKDOCS_2_WARNING=1 ../../build/site-venv/bin/mkdocs build --strict --quiet

build/sbom/.done: deploy/sbom/requirements.txt
	$(PYTHON) -m venv build/sbom
	build/sbom/bin/python -m pip install --disable-pip-version-check --quiet --require-hashes -r $<
	@touch $@

.PHONY: sbom
sbom: build/sbom/.done ## List what the images' Python environments hold, as CycloneDX: build/sbom/*.cdx.json
	for image in daemon spark; do \
		PYTHONWARNINGS=ignore build/sbom/bin/cyclonedx-py requirements deploy/$$image.lock --pyproject pyproject.toml --output-reproducible \
			--output-format JSON --output-file build/sbom/$$image.cdx.json || exit 1; \
	done

# Kubernetes' schemas are 17,000 files: they have an environment of their own. kustomize or kubectl must be on the PATH.
build/kubernetes/.done: deploy/kubernetes/requirements.txt
	$(PYTHON) -m venv build/kubernetes
	build/kubernetes/bin/python -m pip install --disable-pip-version-check --quiet --require-hashes -r $<
	@touch $@

.PHONY: kubernetes-check
kubernetes-check: setup build/kubernetes/.done ## Render the Kubernetes overlays, and check them against Kubernetes' schemas (needs kustomize or kubectl)
	$(BIN)/pytest -q tests/unit/deploy/test_kubernetes.py

.PHONY: check
check: lint types layers proto-check docs-check ## All static checks

# A machine that others share can stop a process for seconds, and a test of deadlines with it. What fails beside others is
# run once more, alone; both outcomes are printed. `make test TRIES=1` does not. Properties draw the same examples again.
TRIES ?= 2
define once_more
|| { test $$? -eq 1 && test $(TRIES) -gt 1 && $(BIN)/pytest -v -rA --show-capture=no -p no:xdist \
	--last-failed --last-failed-no-failures none $(1); }
endef

.PHONY: test-unit
test-unit: setup ## Unit and property tests
	$(BIN)/pytest -q -n $(TEST_JOBS) tests/unit $(call once_more,tests/unit)

.PHONY: test-sim
test-sim: setup ## Simulated clusters: a thousand of captures, forty whole ones, and bugs that they must find
	$(BIN)/pytest -q -n $(TEST_JOBS) tests/sim $(call once_more,tests/sim)

SEED ?= 1
SEEDS ?= 1
.PHONY: sim
sim: setup ## Simulate captures by their seeds: SEED=7 tells one, SEEDS=1000 simulates many
	PYTHONHASHSEED=0 $(BIN)/python -W ignore -m tests.sim --seed $(SEED) --seeds $(SEEDS) $(if $(filter 1,$(SEEDS)),--explain)

.PHONY: sim-cluster
sim-cluster: setup ## Simulate whole clusters by their seeds: SEED=7 tells one, SEEDS=1000 simulates many
	PYTHONHASHSEED=0 PYTHONPATH=.:proto/gen:sink/spark $(BIN)/python -W ignore -m tests.sim.whole --seed $(SEED) --seeds $(SEEDS) $(if $(filter 1,$(SEEDS)),--explain)

.PHONY: chaos
chaos: setup jars readers ## A whole cluster of real processes under faults by SEED=7; ARGS="--minutes 10 --faults kill,outage,stop,net,disk,clock"
	$(BIN)/python -m tests.e2e.chaos --seed $(SEED) $(ARGS)

.PHONY: test-integration
test-integration: setup jars-s3 readers kafka ## Real daemons, real sockets, real etcd, real Spark
	$(BIN)/pytest -q -n $(DAEMON_TEST_JOBS) --dist loadfile --no-loadscope-reorder tests/integration $(call once_more,tests/integration)

.PHONY: test-attacks
test-attacks: setup ## Floods, odd certificates and fuzzing against real daemons with both gRPC engines
	$(BIN)/pytest -q -n $(TEST_JOBS) --dist loadfile tests/attacks $(call once_more,tests/attacks)

.PHONY: test-e2e
test-e2e: setup jars kafka ## The whole way, in small
	$(BIN)/pytest -q -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder tests/e2e -m "not docker" $(call once_more,tests/e2e -m "not docker")

.PHONY: mutate
mutate: setup ## Which small changes to MODULE=sink/quota.py its tests do not see (by hand; tests/mutate.toml)
	$(BIN)/python -m tests.mutate $(MODULE) $(ARGS)

$(VENV)/.fuzzer: tests/fuzz.lock | $(VENV)/.locked
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --require-hashes -r tests/fuzz.lock
	@touch $@

.PHONY: fuzz
fuzz: setup $(VENV)/.fuzzer ## Guided fuzzing of all parsers of foreign bytes, SECONDS=60 each (by hand; tests/fuzz/guided.py)
	$(BIN)/python -m tests.fuzz.guided all --seconds $(or $(SECONDS),60)

ROUNDS ?= 5
.PHONY: bench
bench: setup jars ## All benches at three sizes, into docs/benchmarks (takes hours; ROUNDS=5, SIZES=1, ONLY='"sorter, Arrow" Tso', PEER_PD=…, PEER_PUMP=…)
	PYTHONPATH=.:proto/gen:sink/spark $(BIN)/python -m tests.bench run --rounds $(ROUNDS) $(if $(SIZES),--sizes $(SIZES)) $(if $(ONLY),--only $(ONLY))

.PHONY: bench-compare
bench-compare: setup jars ## The same benches of BASE=<commit> and of this checkout in turn, and their ratios
	PYTHONPATH=.:proto/gen:sink/spark $(BIN)/python -m tests.bench compare $(BASE) --rounds $(ROUNDS) $(if $(SIZES),--sizes $(SIZES)) $(if $(ONLY),--only $(ONLY))

.PHONY: walk
walk: setup ## Paste the commands of README and docs into a fresh clone, as a stranger would (takes long)
	$(BIN)/python -m tests.walk $(ARGS)

.PHONY: test-aged
test-aged: setup jars ## Only the lakes of 300 cuts, restarted at each stage (four times as many by TIDEMARK_TEST_AGED_TIMES=4)
	TIDEMARK_TEST_NIGHTLY=1 $(BIN)/pytest -q tests/integration/lake/test_aged.py

.PHONY: test-nightly
test-nightly: setup jars-s3 readers kafka ## The tests that are too long for each commit (an hour)
	TIDEMARK_TEST_NIGHTLY=1 $(BIN)/pytest -q -n $(TEST_JOBS) --dist loadfile -m nightly tests

.PHONY: test-docker
test-docker: setup ## The whole way as containers (needs a Docker daemon, or root and dockerd)
	$(BIN)/pytest -q tests/e2e -m docker

.PHONY: test
test: check test-unit test-sim test-integration test-attacks test-e2e ## Everything that runs without Docker

IMAGE_FLAGS = --network=host --build-arg BASE_IMAGE=$(BASE_IMAGE) \
  --build-arg VERSION=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) \
  --build-arg REVISION=$$(git rev-parse --verify HEAD 2>/dev/null || echo unknown)

.PHONY: image
image: ## Build the image of all daemons (BASE_IMAGE=… for another Debian 12 with Python 3.11, best by its digest)
	docker build $(IMAGE_FLAGS) --target tidemark -t $(IMAGE) .

.PHONY: images
images: image ## Build the image of Spark's jobs, too, and the etcd and Prometheus that deploy/compose.yaml starts
	docker build $(IMAGE_FLAGS) --target tidemark-spark -t $(IMAGE)-spark .
	docker build $(IMAGE_FLAGS) --target etcd -t $(IMAGE)-etcd .
	docker build $(IMAGE_FLAGS) --target prometheus -t $(IMAGE)-prometheus .

# CLUSTER=ha starts whatever can be there more than once more than once; PROFILES=grafana adds Grafana's own image,
# PROFILES=chaos a container that breaks the others (CHAOS_SEED, CHAOS_MINUTES).
CLUSTER ?= small
PROFILES ?=
IN_CONTAINERS = TIDEMARK_IMAGE=$(IMAGE) $(COMPOSE) -p tidemark -f deploy/compose.yaml --env-file deploy/$(CLUSTER).env \
  $(if $(filter ha,$(CLUSTER)),--profile ha) $(addprefix --profile ,$(PROFILES))

.PHONY: up
up: images ## Start the cluster as containers (CLUSTER=ha, PROFILES="grafana chaos")
	$(IN_CONTAINERS) up -d

.PHONY: up-demo
up-demo: ## Run the demo's bank in the running containers, with proof
	$(IN_CONTAINERS) run --rm --no-deps -T spark demo \
	  --join coordinator:2379 --capture captures:8300 --lake-dir /lake --data-dir /data/demo $(ARGS)

.PHONY: down
down: ## Stop the containers (their volumes stay; ARGS="-v" removes them)
	$(IN_CONTAINERS) down --remove-orphans $(ARGS)

.PHONY: lock
lock: ## Renew the lock files from pyproject.toml (needs uv)
	uv lock
	uv export -q --frozen --no-emit-project --no-emit-package pyspark-tidemark --all-extras --all-groups --no-header --no-annotate -o requirements.lock
	uv export -q --frozen --no-emit-project --no-emit-package pyspark-tidemark --all-extras --no-dev --no-header --no-annotate -o deploy/spark.lock
	uv export -q --frozen --no-emit-project --no-emit-package pyspark-tidemark --extra build --extra otel --prune pyspark --no-dev --no-header --no-annotate -o deploy/daemon.lock
	printf '%s\n' deltalake duckdb duckdb-extension-avro duckdb-extension-delta duckdb-extension-iceberg duckdb-extension-icu polars 'pyiceberg[pyarrow]' | uv pip compile - -q --generate-hashes --python-version 3.11 --no-header --no-annotate --no-emit-index-url -o tests/readers.lock
	printf 'atheris\n' | uv pip compile - -q --generate-hashes --python-version 3.11 --no-header --no-annotate --no-emit-index-url -o tests/fuzz.lock

.PHONY: clean
clean: ## Remove what was built or recorded, not .venv
	rm -rf build dist data .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
