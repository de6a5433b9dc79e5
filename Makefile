# Every target works from a fresh clone: the virtual environment is made on demand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help run test test-plans test-console test-apps test-browser test-brokers absent-brokers test-keycloak screenshots bench-console \
  test-pooler test-versions fmt check lock clean bench bench-http bench-growth bench-snapshot bench-memory \
  bench-report bench-birthdays bench-webhooks bench-ledger bench-decisions bench-payments bench-aml bench-brokers \
  bench-kyc absent-keycloak \
  chaos simulate decade mutants

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(STAMP): requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

run: $(STAMP) ## start everything on an embedded PostgreSQL with sample data (PORT, DULY_DATA)
	@exec $(BIN)/duly up

test: check $(STAMP) ## linters, types, import contracts and every test that needs no outside server, but the three that follow
	@$(BIN)/python -m pytest -n 3 --dist worksteal --ignore tests/apps --ignore tests/console --ignore tests/plans

test-plans: $(STAMP) ## what queries read among a million rows
	@$(BIN)/python -m pytest -n 2 --dist loadfile tests/plans

test-console: $(STAMP) ## the console over HTTP: pages, actions, signing in, attacks
	@$(BIN)/python -m pytest -n 3 --dist worksteal tests/console

test-apps: $(STAMP) ## the five applications, the financial core among them
	@$(BIN)/python -m pytest -n 3 --dist worksteal tests/apps

check: $(STAMP) ## linters, types and import contracts only
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

fmt: $(STAMP) ## format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

test-pooler: $(STAMP) ## start-up checks against a real PgBouncer (installed from Debian's packages if absent)
	@command -v pgbouncer >/dev/null || (apt-get update -qq && apt-get install -y -qq pgbouncer)
	@$(BIN)/python -m pytest -m pooler tests/engine/runtime

BROWSER := $(VENV)/browser
$(BROWSER)/.installed: tests/console/browser/requirements.lock $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --upgrade \
	  --target $(BROWSER) -r tests/console/browser/requirements.lock
	@touch $@

test-browser: $(STAMP) $(BROWSER)/.installed ## the console in a real Chromium (installed from Debian's packages if absent)
	@command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium)
	@PYTHONPATH=$(BROWSER) $(BIN)/python -m pytest -m browser tests/console/browser

BROKERS := $(VENV)/brokers
$(BROKERS)/.installed: tests/brokers/requirements.lock $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --upgrade \
	  --target $(BROKERS) -r tests/brokers/requirements.lock
	@touch $@

test-brokers: $(STAMP) $(BROKERS)/.installed ## one suite over NATS, Kafka, RabbitMQ and SQS, on servers installed for it (LEAVE_OUT=kafka,rabbitmq)
	@PYTHONPATH=$(BROKERS) LEAVE_OUT=$(LEAVE_OUT) $(BIN)/python -m tests.brokers.install
	@PYTHONPATH=$(BROKERS) LEAVE_OUT=$(LEAVE_OUT) $(BIN)/python -m tests.brokers

absent-brokers: $(STAMP) $(BROKERS)/.installed
	@PYTHONPATH=$(BROKERS) LEAVE_OUT=$(LEAVE_OUT) $(BIN)/python -m tests.brokers.install --absent

bench-brokers: $(STAMP) $(BROKERS)/.installed ## events a second over each broker, to acknowledgement and to a consumer's commit; latency (N, LEAVE_OUT)
	@PYTHONPATH=$(BROKERS) LEAVE_OUT=$(LEAVE_OUT) $(BIN)/python -m tests.brokers.install
	@PYTHONPATH=$(BROKERS) LEAVE_OUT=$(LEAVE_OUT) $(BIN)/python -m benchmarks.brokers --count $(or $(N),5000)

test-keycloak: $(STAMP) ## tokens, sign-in, keys and outages with a real Keycloak (by Maven, on Java 17 or later; Debian's if absent)
	@command -v mvn >/dev/null || (apt-get update -qq && apt-get install -y -qq maven)
	@$(BIN)/python -m tests.keycloak.distribution
	@$(BIN)/python -m pytest -m keycloak tests/keycloak

absent-keycloak: $(STAMP)
	@$(BIN)/python -m tests.keycloak.distribution --absent

screenshots: $(STAMP) $(BROWSER)/.installed ## take the pictures in docs/console anew
	@PYTHONPATH=$(BROWSER) DULY_SCREENSHOTS=1 $(BIN)/python -m pytest -m browser -k pictures tests/console/browser

bench-console: $(STAMP) ## page times of the console at a million runs and a hundred thousand dead letters (p50, p95)
	@$(BIN)/python -m benchmarks.console

test-versions: $(STAMP) ## the engine's core tests on every PostgreSQL from 15 to 18 that can be had here
	@$(BIN)/python -m tests.versions

bench: $(STAMP) ## measure duly, hand-written SQL and its peers in one run (installs the peers; ROUNDS)
	@$(BIN)/python -m benchmarks --rounds $(or $(ROUNDS),3)

bench-growth: $(STAMP) ## throughput and claim cost at a thousand to ten million rows
	@$(BIN)/python -m benchmarks growth

bench-snapshot: $(STAMP) ## throughput while an old snapshot is held open (MINUTES, 10)
	@$(BIN)/python -m benchmarks snapshot --minutes $(or $(MINUTES),10)

bench-memory: $(STAMP) ## memory of each process under load (MINUTES, 60)
	@$(BIN)/python -m benchmarks memory --minutes $(or $(MINUTES),60)

bench-report: $(STAMP) ## write docs/performance.md and its plots from what was measured
	@$(BIN)/python -m benchmarks report

chaos: $(STAMP) ## the crash matrix, the safeguards one by one, and chaos by seed (SEED, MINUTES)
	@$(BIN)/python -m tests.crashes.matrix
	@$(BIN)/python -m tests.chaos safeguards
	@$(BIN)/python -m tests.chaos run --seed $(or $(SEED),1) --minutes $(or $(MINUTES),10)

mutants: $(STAMP) ## break the code in one place at a time and see that a test of its requirement fails (ONLY=E1,E3.5, EACH=2)
	@$(BIN)/python -m tests.mutants --only "$(ONLY)" --each $(or $(EACH),0)

simulate: $(STAMP) ## a million steps of every decision against a simple model (STEPS, SEED)
	@$(BIN)/python -m tests.simulation --steps $(or $(STEPS),1000000) --seed $(or $(SEED),1)

decade: $(STAMP) ## ten years of birthdays of a thousand people in every time zone, compared with an oracle (YEARS, USERS, SEED)
	@$(BIN)/python -m tests.apps.birthdays.decade --years $(or $(YEARS),10) --users $(or $(USERS),1000) --seed $(or $(SEED),1)

bench-birthdays: $(STAMP) ## work off a hundred thousand missed birthdays: rate, memory, cost of a claim (N)
	@$(BIN)/python -m benchmarks.birthdays --count $(or $(N),100000)

bench-webhooks: $(STAMP) ## webhooks delivered a second, and what one dead receiver costs the others (N)
	@$(BIN)/python -m benchmarks.webhooks --count $(or $(N),5000)

bench-ledger: $(STAMP) ## postings a second beside a bare posting function, and the ledger's budgets over HTTP
	@$(BIN)/python -m benchmarks.ledger

bench-payments: $(STAMP) ## payments and the ingest of callbacks over HTTP with concurrency, beside their budgets
	@$(BIN)/python -m benchmarks.payments

bench-kyc: $(STAMP) ## identity checks: the ingest of a provider's callbacks over HTTP with concurrency, beside its budget
	@$(BIN)/python -m benchmarks.kyc

bench-aml: $(STAMP) ## transactions screened a second beside transactions posted a second, apart and at once
	@$(BIN)/python -m benchmarks.aml

bench-decisions: $(STAMP) ## decisions by the number of rules beside ZEN (installed for it), and the HTTP path with concurrency
	@$(BIN)/python -m benchmarks.decisions

bench-http: $(STAMP) ## measure the HTTP path with concurrent clients, and the hourly sweep at a million transfers
	@$(BIN)/python -m benchmarks.http

lock: ## compile requirements.lock anew (needs uv)
	uv pip compile pyproject.toml --group dev --all-extras --generate-hashes \
	  --no-emit-index-url --no-header --universal --python-version 3.11 -o requirements.lock

clean: ## remove the virtual environment and caches; your data in .duly stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist
