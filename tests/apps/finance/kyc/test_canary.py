"""Canaries (F8): nothing of a person reaches the database, logs, traces, metrics or answers, whatever a provider sends.

A process of its own serves the API and the provider, works off every job, and prints what it logged, its spans and its
metrics. Then every column of every table is read.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

from tests.support import finish, python, rows, value

pytestmark = pytest.mark.timeout(600)
CANARIES = {
    "name": "Zbigniew Kanarkiewicz-Żółty",
    "birth date": "1987-03-14",
    "document": "CNR4711081XQ",
    "national number": "87031499123",
    "address": "canary.person@example.org",
    "image": "iVBORw0KGgoAAAANSUhEUgAACANARYIMAGEBYTES",
}
TABLES = """
SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'm') AND n.nspname !~ '^(pg_|information_schema)' ORDER BY 1, 2
"""
SERVED = """
import asyncio, json, os, sys
from pathlib import Path
from uuid import uuid4
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from apps.sandbox import bank, identity
from apps.wiring import app
from duly.db import Database
from duly.telemetry import configure_logging
from duly.testing import drain
from tests.apps.conftest import serving
from tests.apps.finance.kyc.acting import serving_provider

configure_logging(level="debug", style="json")
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
CANARIES = json.loads(os.environ["CANARIES"])
answers = []

async def main():
    db = Database(os.environ["DATABASE_URL"])
    theirs = identity.Provider()
    async with serving(db, Path(os.environ["HOME_DIRECTORY"])) as api, serving_provider(theirs, db) as url:
        os.environ["KYC_PROVIDER_URL"] = url
        await talk(api, theirs)
        await drain(db, app.handlers)
        answers.append((await api.client.get("/metrics")).text)
    await db.close()
    spans = [[s.name, dict(s.attributes), [[e.name, dict(e.attributes)] for e in s.events], s.status.description]
             for s in exporter.get_finished_spans()]
    assert len(spans) > 50, "nobody recorded"
    print("SPANS " + json.dumps(spans, default=str))
    print("ANSWERS " + json.dumps(answers))
    print("STATUSES " + json.dumps(sorted({s for s in statuses})))

statuses = []
HEADERS = ("X-Correlation-Id", "traceparent", "tracestate", "baggage", "User-Agent", "Cookie", "Idempotency-Key",
           "X-Forwarded-For", "Referer", "Accept", "X-Request-Id", "Origin", "Forwarded")

async def talk(api, theirs):
    agent = api.headers("agent", "compliance:kyc", "KYC_AGENT")
    client, path = api.client, "/v1/webhooks/kyc/sandbox"
    for _ in range(30):  # until the keys of the issuer are known: a busy machine takes its time
        if (await client.get("/v1/kyc/sessions", headers=agent)).status_code == 200:
            break

    async def ask(method, where, **more):
        answer = await client.request(method, where, **more)
        statuses.append(answer.status_code)
        answers.append(answer.text + repr(dict(answer.headers)))
        return answer

    async def create():
        return (await ask("POST", "/v1/kyc/sessions", json={"userId": str(uuid4())}, headers=agent)).json()

    def signed(body, **headers):
        from duly.clock import unix_milliseconds
        return bank.sign(body, timestamp=unix_milliseconds() // 1000, secret=identity.SECRET) | headers

    async def call(said, **headers):
        body = said if isinstance(said, bytes) else json.dumps(said).encode()
        return await ask("POST", path, content=body, headers=signed(body, **headers))

    def plain(session, **more):
        return {"providerEventId": str(uuid4()), "clientRef": session, "status": "APPROVED",
                "evidenceRef": str(uuid4())} | more

    stuffed = {kind: text for kind, text in CANARIES.items()}
    stuffed |= {text: kind for kind, text in CANARIES.items()}  # as names of members, too
    deep = {"person": stuffed, "documents": [stuffed, [stuffed]], "raw": json.dumps(stuffed), "errors": [stuffed]}
    # what is applied, with everything in unknown members
    assert (await call(plain((await create())["sessionId"], **deep))).json() == {"status": "applied"}
    assert (await call(plain((await create())["sessionId"], status="REJECTED", **deep))).json() == {"status": "applied"}
    for text in CANARIES.values():
        # in each member that we read, of a session that is open, and of one that is over
        session = (await create())["sessionId"]
        for _ in range(2):
            for member in ("clientRef", "sessionRef", "status", "evidenceRef", "providerEventId"):
                await call(plain(session) | {member: text})
                await call(plain(session) | {member: {text: [text]}})
                await call(plain(session) | {member: text * 20})
            await call(plain(session))
        # in bodies that nobody can read
        for body in (b"{" + text.encode(), json.dumps([text]).encode(), json.dumps(text).encode(),
                     b'{"status": "APPROVED", "a": "' + text.encode() + b'", "a": 1}', text.encode("utf-16"),
                     b'{"' + text.encode() + b'":' * 2000, b'{"x": NaN, "y": "' + text.encode() + b'"}'):
            await call(body)
            await ask("POST", path, content=body)  # not signed
        await call({"a": text * 5_000})  # too large
        # in signatures, times, and whatever else a header may be
        ascii = text.encode("ascii", "replace").decode()
        body = json.dumps(plain(session)).encode()
        for header in ("X-Provider-Signature", "X-Provider-Timestamp", "Authorization", "Content-Type", *HEADERS):
            await ask("POST", path, content=body, headers=signed(body, **{header: ascii}))
            await ask("POST", path, content=body, headers={header: ascii})
        # in paths and queries
        await ask("POST", f"/v1/webhooks/kyc/{ascii}", content=body, headers=signed(body))
        await ask("POST", path + "?person=" + ascii, content=body, headers=signed(body))
        await ask("GET", f"/v1/kyc/start/{session}/{ascii}")
        await ask("GET", f"/v1/kyc/start/{ascii}/{ascii}")
        await ask("GET", "/v1/kyc/sessions", params={"userId": text}, headers=agent)
        await ask("GET", "/v1/kyc/sessions", params={"status": text, "before": text}, headers=agent)
        await ask("GET", f"/v1/kyc/sessions/{ascii}", headers=agent)
        # from an agent who means well
        for wrong in ({"userId": text}, {"userId": "user-1", "providerId": text}, {"userId": "user-1", "name": text},
                      {"userId": {text: 1}}, [text], text, {"userId": "user-1", text: text}):
            await ask("POST", "/v1/kyc/sessions", json=wrong, headers=agent)
        for header in HEADERS:
            await ask("POST", "/v1/kyc/sessions", json={"userId": str(uuid4())}, headers=agent | {header: ascii})
            await ask("GET", "/v1/kyc/sessions", headers=agent | {header: ascii})
        unmatched = (await client.get("/v1/kyc/callbacks/unmatched", headers=agent)).json()["items"][0]["id"]
        await ask("POST", f"/v1/kyc/callbacks/{unmatched}/dismiss", json={"handled": text}, headers=agent)
    # from a person who fills in the provider's page, and a provider who tells everything
    theirs.orders = identity.Orders(leaks=True)
    made = await create()
    page = (await ask("GET", made["hostedUrl"])).headers["location"]
    await client.post(page, data={"outcome": "APPROVED"} | CANARIES)
    assert [check.calls for check in theirs.checks.values()] == [["APPROVED"]]
    for listed in ("/v1/kyc/sessions", "/v1/kyc/callbacks/unmatched?all=true", f"/v1/kyc/sessions/{made['sessionId']}"):
        await ask("GET", listed, headers=agent)

asyncio.run(main())
"""


def spellings(text: str) -> set[str]:
    """How it may look where it should not be."""
    raw = text.encode()
    written = {text, raw.hex(), base64.b64encode(raw).decode().rstrip("="), quote(text), json.dumps(text)[1:-1]}
    written |= {text.encode("ascii", "replace").decode(), text.replace("-", "")}
    written |= {text[: len(text) * 2 // 3]} if len(text) > 15 else set()  # a part of a short one may be part of an id
    return {one.casefold() for one in written}


def found_in(text: str) -> dict[str, str]:
    """Which canaries are in it, and where."""
    folded = text.casefold()
    return {
        kind: text[max(0, folded.find(one) - 100) : folded.find(one) + 60]
        for kind, canary in CANARIES.items()
        for one in spellings(canary)
        if one in folded
    }


def scan(dsn: str) -> dict[str, dict[str, str]]:
    """Every column of every row of every table."""
    found = {}
    with psycopg.connect(dsn, autocommit=True) as connection:
        for schema, table in connection.execute(TABLES).fetchall():
            for (row,) in connection.execute(f'SELECT t::text FROM ONLY "{schema}"."{table}" t'.encode()):
                if here := found_in(row):
                    found[f"{schema}.{table}"] = here
    return found


def test_nothing_of_a_person_is_anywhere(dsn: str, tmp_path: Path) -> None:
    """F8: database, logs, traces, metrics, answers."""
    env = {"CANARIES": json.dumps(CANARIES), "HOME_DIRECTORY": str(tmp_path)}
    code, output = finish(python(dsn, SERVED, env=env), 500)
    assert code == 0, output[-4_000:]
    lines = output.splitlines()
    (statuses,) = [json.loads(line.removeprefix("STATUSES ")) for line in lines if line.startswith("STATUSES ")]
    assert {200, 201, 303, 400, 401, 404, 413, 422} <= set(statuses), "everything was tried"
    assert max(statuses) < 500
    assert '"event": "request"' in output, "logs were looked at"
    assert "webhook_refused" in output
    assert "duly_http_requests_total" in output, "metrics were looked at"
    for line in lines:
        assert found_in(line) == {}, line[:2_000]
    assert scan(dsn) == {}
    assert value(dsn, "SELECT count(*) FROM kyc.unmatched_callbacks") > 20
    assert value(dsn, "SELECT count(*) FROM kyc.sessions WHERE status = 'APPROVED'") > 5


@pytest.mark.parametrize("kind", CANARIES)
def test_a_canary_would_be_found(dsn: str, kind: str) -> None:
    """The search itself is tried: in text, in JSON, and in bytes."""
    plants = {
        "text": """INSERT INTO duly.received_webhooks (provider, provider_event_id, received_at)
                   VALUES ('p', %(text)s, duly.now())""",
        "json": "SELECT duly.emit('a.b', 't', '1', jsonb_build_object('deep', jsonb_build_array(%(text)s::text)))",
        "bytes": """INSERT INTO duly.webhook_provider_secrets (provider, number, key_id, sealed, created_at)
                    VALUES ('p', 1, 'k', convert_to(repeat(%(text)s, 5), 'UTF8'), duly.now())""",
    }
    for place, plant in plants.items():
        before = len(scan(dsn))
        rows(dsn, plant, {"text": CANARIES[kind]})
        assert len(scan(dsn)) > before, place
    assert found_in(f"GET /x?a={quote(CANARIES[kind])} 200")
    assert found_in(json.dumps({"a": CANARIES[kind]}))
