# The tasks of contributors and CI. Requires only Python 3.11+ and make.
# `make setup` creates .venv and installs all dependencies in the versions of constraints.txt, with
# uv if it is available and otherwise with pip. `make demo` installs only the dependencies of the
# demo, which are a tenth of that.

VENV := .venv
BIN := $(VENV)/bin
EXTRAS := dev
# Tests start many processes. Without bytecode files, each process would compile the sources again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-pipeline screenshots test test-all browser pgbouncer web check format docs bench chaos constraints clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(VENV)/.installed  ## Create .venv and install everything for development

# The dependencies of the tests include those of the demo.
$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	@sh tools/setup.sh "$(VENV)" "$(EXTRAS)"
	@touch $(VENV)/.installed-demo $@

$(VENV)/.installed-demo: pyproject.toml constraints.txt Makefile
	@sh tools/setup.sh "$(VENV)" server,worker,engine
	@touch $@

demo: $(VENV)/.installed-demo  ## Run a local demo with sample data on every page, until Ctrl-C
	@PYTHONPATH=tools $(BIN)/python -m demo $(DEMO)

demo-pipeline: $(VENV)/.installed-demo  ## Run an example pipeline and export its contact sheet
	@$(BIN)/python tools/pipeline.py

screenshots: setup web  ## Take screenshots of every page for docs/images
	@PYTHONPATH=tools $(BIN)/python tools/screenshots.py

# `make check` runs tests/tidy.
test: setup web  ## Run the tests
	@$(BIN)/python tools/run_tests.py

test-all: setup web  ## Run all tests, including slow ones and a quick run of each benchmark
	@HYPOTHESIS_PROFILE=thorough $(BIN)/python tools/run_tests.py --all

SEED ?= 1
MINUTES ?= 3
chaos: setup  ## Inject faults under load, then audit the data; SEED=n MINUTES=m MUTATE=guard
	@$(BIN)/python -m tests.chaos --seed $(SEED) --minutes $(MINUTES) --mutate "$(MUTATE)"

browser:  ## Install Chromium for the browser tests
	@command -v chromium || command -v chromium-browser || command -v google-chrome || sh tools/browser.sh

pgbouncer:  ## Install PgBouncer for the tests with PostgreSQL behind a pooler
	@command -v pgbouncer || command -v /usr/sbin/pgbouncer || sh tools/pgbouncer.sh

web: setup  ## Build the web pages into the package
	@$(BIN)/python tools/web_build.py

check: setup  ## Check lint, format, types, import contracts and tidiness, also of the web pages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/tidy
	$(BIN)/python tools/web_build.py check

format: setup  ## Format the code and fix lint errors automatically
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	@$(BIN)/python tools/web_build.py npm run format

docs: setup  ## Generate docs/reference
	@$(BIN)/python tools/reference.py

bench: EXTRAS := dev,bench
bench: web  ## Run the benchmarks, with comparisons to other projects
	@sh tools/setup.sh "$(VENV)" "$(EXTRAS)"
	$(BIN)/python bench/startup.py
	$(BIN)/python bench/convert.py
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/single_job.py
	$(BIN)/python bench/gpu_busy.py
	$(BIN)/python bench/queue.py
	$(BIN)/python bench/affinity.py
	$(BIN)/python bench/submit.py
	$(BIN)/python bench/service.py --processes 1,2
	$(BIN)/python bench/gateway.py
	$(BIN)/python bench/idle.py
	$(BIN)/python bench/graphs.py
	$(BIN)/python bench/maintenance.py
	$(BIN)/python bench/service_scale.py
	$(BIN)/python bench/web.py

constraints:  ## Pin the newest versions of all dependencies in constraints.txt (requires uv)
	uv pip compile --quiet --universal --python-version 3.11 --all-extras --upgrade \
		--no-annotate --no-header --no-emit-index-url --no-emit-find-links --output-file constraints.txt pyproject.toml

clean:  ## Remove all files that make has created
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache demo-output gpu-bench web/node_modules web/dist src/comfyfleet/server/http/web/static
