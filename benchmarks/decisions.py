"""Decisions: p50 and p99 by the number of rules, beside ZEN on an equivalent table; and the whole HTTP path (F14).

``make bench-decisions``. ZEN is installed, pinned by hash, into an environment of its own. Ratios count; absolute times
are this machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2

from apps.finance.decisions import facts as reading
from apps.finance.decisions import service
from apps.finance.decisions.compiled import CompiledSet
from apps.finance.decisions.language import parse
from apps.finance.decisions.model import Observation, Outcome, Rule, read_settings
from apps.wiring import app
from benchmarks import peers
from duly.auth.issuer import Issuer
from duly.clock import monotonic
from duly.db import Database
from duly.settings import Settings
from duly.testing import TestServer

SIZES = (1, 10, 100, 1_000)
LOOPS = {1: 5_000, 10: 5_000, 100: 2_000, 1_000: 500}
CONTEXTS = 200
ROUNDS = 3
TRANSACTIONS = 1_500
REQUESTS = 1_600
CLIENTS = (1, 2, 4, 8, 16)
RATES = (25, 50, 100, 200)
WARMUP = 20
ARRIVAL_SECONDS = 10
PORT, BARE_PORT = 18241, 18242
BUDGET_MS = (3.0, 10.0)
FIELDS = {"amount": "decimal", "currency": "string", "country": "string", "count": "integer", "from": "string"}
SEEN = {"name": "seen24h", "function": "count", "stream": "bench", "by": ["from"], "windowSeconds": 86_400}
CODES = ("PLN", "EUR", "USD", "GBP", "CHF", "CZK")
COUNTRIES = ("PL", "DE", "FR", "CZ", "NO", "US", "KP", "IR")
BARE = """
import json, os, uuid, asyncpg, uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

class Question(BaseModel):
    ruleSetId: str
    context: dict

api = FastAPI()

@api.get("/readyz")
async def ready():
    api.state.pool = api.state.pool if hasattr(api.state, "pool") else await asyncpg.create_pool(
        os.environ["DATABASE_URL"], min_size=10, max_size=10)

@api.post("/v1/decision/evaluate")
async def decide(question: Question):
    async with api.state.pool.acquire() as connection, connection.transaction():
        row = await connection.fetchrow(
            "SELECT snapshot_id, duly.now() AS now FROM decisions.rule_sets WHERE id = $1", question.ruleSetId)
        made = await connection.fetchval(
            "INSERT INTO decisions.log (id, rule_set_id, rule_set_version, snapshot_id, engine, at, decision, facts,"
            " matched, incomplete, evaluated, latency_us) VALUES (duly.uuid7($1), $2, 1, $3, '1', $1, 'APPROVE',"
            " $4::text::jsonb, '[]', '[]', 0, 0) RETURNING id",
            row["now"], question.ruleSetId, row["snapshot_id"], json.dumps(question.context))
    return {"id": made, "decision": "APPROVE"}

uvicorn.run(api, port=int(os.environ["PORT"]), log_level="warning", loop="uvloop")
"""


def main() -> None:
    """Run everything and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["rules", "database", "http"])
    parser.add_argument("--clients", type=int, nargs="*", default=list(CLIENTS))
    options = parser.parse_args()
    chosen = options.only
    if chosen in (None, "rules"):
        measure_rules()
    if chosen == "rules":
        return
    with tempfile.TemporaryDirectory() as directory:
        server = TestServer(Path(directory) / "pg", durable=True)
        server.start()
        try:
            with server.database(app) as dsn:
                asyncio.run(fill(dsn))
                if chosen in (None, "database"):
                    asyncio.run(measure_database(dsn))
                if chosen in (None, "http"):
                    measure_http(dsn, Path(directory), options.clients)
        finally:
            server.stop()


def make_rules(count: int) -> list[dict[str, Any]]:
    """Rules of four conditions each; about one in fifty matches."""
    chance = random.Random(count)
    return [
        {
            "amount": str(chance.randrange(1, 20_000)),
            "currencies": chance.sample(CODES, 2),
            "countries": chance.sample(COUNTRIES, 4),
            "count": chance.randrange(1, 10),
        }
        for _ in range(count)
    ]


def make_contexts() -> list[dict[str, Any]]:
    """Inputs, with amounts as text."""
    chance = random.Random(7)
    return [
        {
            "amount": f"{Decimal(chance.randrange(100, 2_000_000)) / 100:f}",
            "currency": chance.choice(CODES),
            "country": chance.choice(COUNTRIES),
            "count": chance.randrange(0, 10),
        }
        for _ in range(CONTEXTS)
    ]


def conditions(rule: dict[str, Any]) -> dict[str, Any]:
    """A rule of the benchmark in our language."""
    return {
        "all": [
            {"field": "amount", "op": "gt", "value": rule["amount"]},
            {"field": "currency", "op": "in", "value": rule["currencies"]},
            {"not": {"field": "country", "op": "in", "value": rule["countries"]}},
            {"field": "count", "op": "gte", "value": rule["count"]},
        ]
    }


# -- the rules alone --------------------------------------------------------------------------------------------------


def measure_rules() -> None:
    """Ours beside ZEN, in turns; that both say the same is checked first."""
    python = _find_zen()
    print(f"rules alone, microseconds, median of {ROUNDS} rounds of {LOOPS[1]:,} to {LOOPS[1_000]:,} evaluations")
    print(f"{'rules':>6} {'duly p50':>10} {'p99':>9} {'traced p50':>11}   {'zen p50':>9} {'p99':>9} {'traced p50':>11}")
    for size in SIZES:
        given = {"rules": make_rules(size), "contexts": make_contexts()}
        ours, theirs = [], []
        for _ in range(ROUNDS):
            ours.append(_run_ours(given))
            if python is not None:
                theirs.append(_run_zen(python, given))
                assert theirs[-1]["matched"] == ours[-1]["matched"], "ZEN says something else"
        line = f"{size:>6} {_micro(ours, 'plain', 49):>10.1f} {_micro(ours, 'plain', 98):>9.1f}"
        line += f" {_micro(ours, 'traced', 49):>11.1f}"
        if theirs:
            line += f"   {_micro(theirs, 'plain', 49):>9.1f} {_micro(theirs, 'plain', 98):>9.1f}"
            line += f" {_micro(theirs, 'traced', 49):>11.1f}"
        print(line, flush=True)


def _micro(rounds: list[dict[str, Any]], name: str, cut: int) -> float:
    return statistics.median(statistics.quantiles(one[name], n=100)[cut] for one in rounds) * 1_000_000


def _find_zen() -> Path | None:
    cache = Path(os.environ.get("BENCH_PEERS", ".venv/peers")).resolve()
    try:
        return peers.install("zen-engine", cache)
    except peers.Unavailable as error:
        print(f"ZEN is not to be had here: {error}")
        return None


def _run_zen(python: Path, given: dict[str, Any]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(given, file)
        file.flush()
        driver = Path(peers.__file__).parent / "drivers" / "zen_engine.py"
        order = [python, driver, file.name, str(LOOPS[len(given["rules"])])]
        ran = subprocess.run(order, capture_output=True, text=True, timeout=600, check=True)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def _run_ours(given: dict[str, Any]) -> dict[str, Any]:
    """From a record of JSON to a verdict, as an evaluation does it."""
    settings = read_settings({"fields": FIELDS})
    rules = [
        Rule(UUID(int=number), 1, f"r{number}", 0, False, parse(written, kinds=settings.kinds), Outcome.REVIEW, 0)
        for number, written in enumerate(map(conditions, given["rules"]))
    ]
    compiled = CompiledSet(settings, rules, {})
    contexts = given["contexts"]
    verdicts = [compiled.decide(reading.record(settings.fields, one)) for one in contexts]
    found: dict[str, Any] = {"matched": [[one.rule_id.int for one in verdict.matched] for verdict in verdicts]}
    for name in ("plain", "traced"):
        times = []
        for turn in range(LOOPS[len(given["rules"])]):
            context = contexts[turn % len(contexts)]
            began = monotonic()
            recorded = reading.record(settings.fields, context)
            compiled.decide(recorded)
            if name == "traced":
                compiled.trace(recorded)
            times.append(monotonic() - began)
        found[name] = times
    return found


# -- with the database ------------------------------------------------------------------------------------------------


async def fill(dsn: str) -> None:
    """A rule set of each size, and one of a hundred rules with a velocity fact over ten thousand observations."""
    db = Database(dsn)
    for size in SIZES:
        await _fill_one(db, f"bench-{size}", size)
    await _fill_one(db, "bench-velocity", 100, velocity=True)
    for _ in range(100):
        async with db.transaction() as tx:
            await service.observe(tx, *(Observation("bench", (f"acc-{n}",), Decimal(5)) for n in range(100)))
    await db.close()


async def _fill_one(db: Database, name: str, size: int, *, velocity: bool = False) -> None:
    settings = {"fields": FIELDS, "velocity": [SEEN] if velocity else []}
    async with db.transaction() as tx:
        await service.create_rule_set(tx, name, description="For the benchmark", settings=settings, actor="bench")
        made = []
        for number, rule in enumerate(make_rules(size)):
            parts = conditions(rule)
            if velocity:
                parts = {"all": [parts, {"field": "seen24h", "op": "gte", "value": number}]}
            written = {
                "name": f"r{number}", "conditions": parts, "priority": 0, "terminate": False,
                "action": {"decision": "REVIEW"},
            }  # fmt: skip
            made.append((await service.create_rule(tx, name, written=written, actor="bench"))[0])
        for record in made[1:]:
            await service.store.activate_rule(tx, record.id, version=1)
        await service.activate_rule(tx, made[0].id, version=None, acknowledge_warnings=True, actor="bench")


async def measure_database(dsn: str) -> None:
    """One transaction an evaluation: BEGIN, two statements, COMMIT to disk."""
    db = Database(dsn)
    contexts = make_contexts()
    print(f"\nin a transaction, milliseconds, {TRANSACTIONS} evaluations one after the other")
    print(f"{'rule set':>16} {'p50':>7} {'p99':>7} {'evaluate p50':>13}")
    for name in (*(f"bench-{size}" for size in SIZES), "bench-velocity"):
        whole, inside = [], []
        for turn in range(TRANSACTIONS):
            began = monotonic()
            async with db.transaction() as tx:
                entered = monotonic()
                facts = {**contexts[turn % CONTEXTS], "from": f"acc-{turn % 100}"}
                await service.evaluate(tx, name, facts)
                inside.append(monotonic() - entered)
            whole.append(monotonic() - began)
        cuts = statistics.quantiles(whole[50:], n=100)
        print(f"{name:>16} {cuts[49] * 1e3:>7.2f} {cuts[98] * 1e3:>7.2f} {statistics.median(inside) * 1e3:>13.2f}")
    await db.close()


# -- over HTTP --------------------------------------------------------------------------------------------------------


def measure_http(dsn: str, home: Path, clients: list[int]) -> None:
    """The server as it is run, beside a bare route that reads and inserts the same rows and decides nothing."""
    env = {**os.environ, "DATABASE_URL": dsn, "DULY_DATA": str(home), "DULY_LOG_LEVEL": "warning"}
    ours = subprocess.Popen(
        [sys.executable, "-m", "duly.cli.main", "api"], env={**env, "PORT": str(PORT), "DULY_APP": "apps.wiring:app"}
    )
    bare = subprocess.Popen([sys.executable, "-c", BARE], env={**env, "PORT": str(BARE_PORT)})
    try:
        asyncio.run(_measure_http(home, clients, {PORT: ours.pid, BARE_PORT: bare.pid}))
    finally:
        ours.kill()
        bare.kill()


async def _measure_http(home: Path, numbers: list[int], servers: dict[int, int]) -> None:
    for port in (PORT, BARE_PORT):
        await _ready(f"http://127.0.0.1:{port}/readyz")
    token = Issuer.open(Settings(data=home), port=PORT).sign("bench", scopes=["decision:evaluate"])
    headers = {"Authorization": f"Bearer {token}"}
    contexts = make_contexts()

    def ask(rule_set: str) -> Callable[[httpx2.AsyncClient, int], Awaitable[httpx2.Response]]:
        def send(client: httpx2.AsyncClient, turn: int) -> Awaitable[httpx2.Response]:
            body = {"ruleSetId": rule_set, "context": {**contexts[turn % CONTEXTS], "from": f"acc-{turn % 100}"}}
            return client.post("/v1/decision/evaluate", json=body, headers=headers)

        return send

    print(f"\nPOST /v1/decision/evaluate, median of {ROUNDS} rounds of {REQUESTS}; budget p50 3, p99 10 ms")
    head = f"{'what':<31} {'clients':>7} {'req/s':>6} {'p50 ms':>7} {'p99 ms':>7}"
    print(f"{head} {'of budget: p50':>14} {'p99':>6} {'cpu ms':>7}")
    for clients in numbers:
        for what, port, rule_set in (
            ("bare route, no rules", BARE_PORT, "bench-100"), ("100 rules", PORT, "bench-100"),
            ("1,000 rules", PORT, "bench-1000"), ("100 rules and a velocity fact", PORT, "bench-velocity"),
        ):  # fmt: skip
            used = cpu_seconds(servers[port])
            rounds = [await load(f"http://127.0.0.1:{port}", ask(rule_set), clients) for _ in range(ROUNDS)]
            used = (cpu_seconds(servers[port]) - used) / ROUNDS / (REQUESTS + WARMUP) * 1_000
            rate, p50, p99 = (statistics.median(column) for column in zip(*rounds, strict=True))
            ratios = f"{p50 / BUDGET_MS[0]:>14.2f} {p99 / BUDGET_MS[1]:>6.2f}"
            print(f"{what:<31} {clients:>7} {rate:>6.0f} {p50:>7.2f} {p99:>7.2f} {ratios} {used:>7.2f}", flush=True)
    print(f"\nthe same with 100 rules, arrivals at random for {ARRIVAL_SECONDS} s, median of {ROUNDS}")
    for rate in RATES:
        for what, port in (("bare route, no rules", BARE_PORT), ("100 rules", PORT)):
            found = [await arrive(f"http://127.0.0.1:{port}", ask("bench-100"), rate) for _ in range(ROUNDS)]
            p50, p99 = (statistics.median(column) for column in zip(*found, strict=True))
            ratios = f"{p50 / BUDGET_MS[0]:>14.2f} {p99 / BUDGET_MS[1]:>6.2f}"
            print(f"{what:<31} {rate:>5}/s {p50:>14.2f} {p99:>7.2f} {ratios}", flush=True)


def cpu_seconds(pid: int) -> float:
    """Processor time of a server so far: what it needs, whoever else uses the machine."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def arrive(
    url: str, send: Callable[[httpx2.AsyncClient, int], Awaitable[httpx2.Response]], rate: int
) -> tuple[float, float]:
    """p50 and p99 in milliseconds when requests come at random, so many a second, whoever else is being answered."""
    times: list[float] = []
    chance = random.Random(rate)
    limits = httpx2.Limits(max_connections=64, max_keepalive_connections=64)
    async with httpx2.AsyncClient(base_url=url, timeout=30, limits=limits) as client, asyncio.TaskGroup() as group:
        for turn in range(WARMUP):
            (await send(client, turn)).raise_for_status()

        async def one(turn: int, due: float) -> None:
            answer = await send(client, turn)
            times.append(monotonic() - due)
            assert answer.status_code == 200, answer.text

        due = monotonic()
        for turn in range(rate * ARRIVAL_SECONDS):
            due += chance.expovariate(rate)
            await asyncio.sleep(max(0.0, due - monotonic()))
            group.create_task(one(turn, due))
    cuts = statistics.quantiles(times, n=100)
    return cuts[49] * 1000, cuts[98] * 1000


async def load(
    url: str, send: Callable[[httpx2.AsyncClient, int], Awaitable[httpx2.Response]], clients: int
) -> tuple[float, float, float]:
    """Requests a second, p50 and p99 in milliseconds, of so many clients at once."""
    times: list[float] = []
    limits = httpx2.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx2.AsyncClient(base_url=url, timeout=30, limits=limits) as client:
        for turn in range(WARMUP):
            (await send(client, turn)).raise_for_status()

        async def one(first: int) -> None:
            for turn in range(first, REQUESTS, clients):
                began = monotonic()
                answer = await send(client, turn)
                times.append(monotonic() - began)
                assert answer.status_code == 200, answer.text

        began = monotonic()
        await asyncio.gather(*(one(first) for first in range(clients)))
        seconds = monotonic() - began
    cuts = statistics.quantiles(times, n=100)
    return REQUESTS / seconds, cuts[49] * 1000, cuts[98] * 1000


async def _ready(url: str) -> None:
    async with httpx2.AsyncClient() as client:
        for _ in range(200):
            try:
                if (await client.get(url)).status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} did not become ready")


if __name__ == "__main__":
    main()
