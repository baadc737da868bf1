# Everything a contributor or CI does. Needs Python 3.11+ and make, nothing else.
# `make setup` creates .venv and installs everything pinned by constraints.txt (uv if present, else pip);
# `make demo` installs only what the demo needs, which is a tenth of that.

VENV := .venv
BIN := $(VENV)/bin
EXTRAS := dev
# Tests start many processes: without bytecode each of them compiles the sources again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-pipeline screenshots test test-all browser pgbouncer web check format docs bench chaos constraints clean

help:  ## Show what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(VENV)/.installed  ## Create .venv and install everything for development

# What the tests need includes what the demo needs.
$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	@sh tools/setup.sh "$(VENV)" "$(EXTRAS)"
	@touch $(VENV)/.installed-demo $@

$(VENV)/.installed-demo: pyproject.toml constraints.txt Makefile
	@sh tools/setup.sh "$(VENV)" server,worker,engine
	@touch $@

demo: $(VENV)/.installed-demo  ## Start everything here, with something on every page, until Ctrl-C
	@PYTHONPATH=tools $(BIN)/python -m demo $(DEMO)

demo-pipeline: $(VENV)/.installed-demo  ## Run an example pipeline to its contact sheet
	@$(BIN)/python tools/pipeline.py

screenshots: setup web  ## Take pictures of every page into docs/images
	@PYTHONPATH=tools $(BIN)/python tools/screenshots.py

# `make check` runs tests/tidy.
test: setup web  ## Run the tests
	@$(BIN)/python tools/run_tests.py

test-all: setup web  ## Run the tests, slow ones and the quick form of each benchmark too
	@HYPOTHESIS_PROFILE=thorough $(BIN)/python tools/run_tests.py --all

SEED ?= 1
MINUTES ?= 3
chaos: setup  ## Run faults under load and audit what is left; SEED=n MINUTES=m MUTATE=guard
	@$(BIN)/python -m tests.chaos --seed $(SEED) --minutes $(MINUTES) --mutate "$(MUTATE)"

browser:  ## Install Chromium, in which the editor is tested
	@command -v chromium || command -v chromium-browser || command -v google-chrome || sh tools/browser.sh

pgbouncer:  ## Install PgBouncer, behind which PostgreSQL is tested
	@command -v pgbouncer || command -v /usr/sbin/pgbouncer || sh tools/pgbouncer.sh

web: setup  ## Build the pages for people into the package
	@$(BIN)/python tools/web_build.py

check: setup  ## Lint, format, types, import contracts, tidiness; the same for the pages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/tidy
	$(BIN)/python tools/web_build.py check

format: setup  ## Format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	@$(BIN)/python tools/web_build.py npm run format

docs: setup  ## Write the generated references into docs/reference
	@$(BIN)/python tools/reference.py

bench: EXTRAS := dev,bench
bench: web  ## Measure, against named peers
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

constraints:  ## Pin the newest versions of everything into constraints.txt (needs uv)
	uv pip compile --quiet --universal --python-version 3.11 --all-extras --upgrade \
		--no-annotate --no-header --no-emit-index-url --no-emit-find-links --output-file constraints.txt pyproject.toml

clean:  ## Remove what make has made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache demo-output gpu-bench web/node_modules web/dist src/comfyfleet/server/http/web/static
