# Tidemark. `make run` sets up and runs the demo; `make test` sets up and passes all tests.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(shell cd proto && find kvproto etcdpb tipb tidemarkpb -name '*.proto' | sort)
PACKAGES := server storage sorter sink gcsafepoint
export PYTHONPATH := $(CURDIR):$(CURDIR)/proto/gen:$(CURDIR)/sink/spark

.PHONY: help
help: ## List all targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

.PHONY: proto
proto: $(VENV)/.dev ## Generate the gRPC stubs into proto/gen
	rm -rf proto/gen && mkdir -p proto/gen
	cd proto && PATH="$(CURDIR)/$(BIN):$$PATH" ../$(BIN)/python -m grpc_tools.protoc -I. --python_out=gen --mypy_out=quiet:gen --grpc_python_out=gen --mypy_grpc_out=quiet:gen $(PROTOS)
	find proto/gen -mindepth 1 -type d -exec touch {}/__init__.py {}/py.typed \;

.PHONY: proto-check
proto-check: proto ## Regenerate the stubs and fail if the committed ones differ
	git diff --exit-code --stat -- proto/gen && test -z "$$(git ls-files --others --exclude-standard proto/gen)"

.PHONY: fmt
fmt: $(VENV)/.dev ## Format the code
	$(BIN)/ruff format -q . && $(BIN)/ruff check -q --fix .

.PHONY: lint
lint: $(VENV)/.dev ## Style (ruff)
	$(BIN)/ruff format --check -q . && $(BIN)/ruff check .

.PHONY: types
types: $(VENV)/.dev ## Types (mypy strict)
	$(BIN)/mypy && $(BIN)/mypy -p pyspark_tidemark

.PHONY: layers
layers: $(VENV)/.dev ## Import contracts
	$(BIN)/lint-imports

.PHONY: check
check: lint types layers proto-check ## All static checks
