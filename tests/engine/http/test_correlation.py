"""E5.4, E5.7: one id for a request and all that follows from it; one trace; numbers by route."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import StreamingResponse
from prometheus_client import generate_latest
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from duly import NewEvent, emit, schedule
from duly.db import Database
from duly.http import RequestTx, Router, install
from duly.telemetry import current_origin
from tests.engine.http.serving import served
from tests.engine.idempotency.shop import create_shop, make_tables, open_shop, shop_process
from tests.support import finish, python, rows

Client = httpx2.AsyncClient
GIVEN = "0198f1f0-7777-7abc-8def-0123456789ab"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HEADERS = "SELECT headers FROM duly.outbox"
JOBS = "SELECT correlation_id::text, traceparent FROM duly.jobs"

router = Router(prefix="/numbers")


@router.post("/in-a-thread")
def in_a_thread(request: Request) -> dict[str, str]:
    """A route that is no coroutine has the same origin."""
    return {"correlation_id": str(current_origin().correlation_id)}


@router.get("/{number}/broken")
async def break_off(number: int) -> StreamingResponse:
    """An answer that breaks in the middle."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b"half"
        raise ValueError("secret-words")

    return StreamingResponse(pieces())


@router.get("/{number}")
async def read(number: int) -> int:
    return number


@pytest.fixture
async def shop(db: Database, dsn: str) -> AsyncIterator[Client]:
    make_tables(dsn)
    async with served(create_shop(db, router)) as client:
        yield client


# -- the correlation id -----------------------------------------------------------------------------------------------


async def test_the_callers_id_is_returned_logged_and_carried_into_events_and_jobs(shop: Client, dsn: str) -> None:
    """E5.4."""
    with capture_logs(processors=[merge_contextvars]) as logs:
        answer = await shop.post("/orders", json={}, headers={"X-Correlation-Id": GIVEN})
    assert answer.headers.get_list("x-correlation-id") == [GIVEN]
    assert [headers["correlation_id"] for (headers,) in rows(dsn, HEADERS)] == [GIVEN]
    assert [row[0] for row in rows(dsn, JOBS)] == [GIVEN]
    assert [line["correlation_id"] for line in logs if line["event"] == "request"] == [GIVEN]


@pytest.mark.parametrize(
    "given", [None, "", "x", GIVEN[:-1], GIVEN + "0", "g" * 36, "../../../../etc/passwd\r".strip(), "x" * 9000, "é"]
)
async def test_an_id_is_made_when_none_is_given_or_it_is_no_uuid(shop: Client, dsn: str, given: str | None) -> None:
    """E5.4: nothing but a UUID goes into logs and rows."""
    headers = {} if given is None else {b"X-Correlation-Id": given.encode()}
    answer = await shop.post("/orders", json={}, headers=headers)
    made = uuid.UUID(answer.headers["x-correlation-id"])
    assert (str(made), made.version) == (answer.headers["x-correlation-id"], 7)
    assert [row[0] for row in rows(dsn, JOBS)] == [str(made)]


async def test_an_id_in_another_spelling_is_returned_in_the_usual_one(shop: Client) -> None:
    answer = await shop.get("/numbers/1", headers={"X-Correlation-Id": GIVEN.upper()})
    assert answer.headers["x-correlation-id"] == GIVEN


@pytest.mark.parametrize("path", ["/orders/0", "/nowhere", "/numbers/x", "/orders/any/x", "/numbers/1"])
async def test_every_answer_has_an_id_and_a_problem_names_it(shop: Client, path: str) -> None:
    """E5.4, E5.5: 404, 422, 405 and 200 alike."""
    answer = await shop.get(path, headers={"X-Correlation-Id": GIVEN})
    assert answer.headers["x-correlation-id"] == GIVEN
    if answer.status_code >= 400:
        assert answer.json()["instance"] == f"urn:uuid:{GIVEN}"


async def test_requests_at_the_same_time_keep_their_ids_apart(shop: Client, dsn: str) -> None:
    """E5.4: also on kept-alive connections and in threads."""
    asked = [str(uuid.UUID(int=number)) for number in range(1, 40)]
    answers = await asyncio.gather(
        *(shop.post("/numbers/in-a-thread", headers={"X-Correlation-Id": one}) for one in asked)
    )
    assert [answer.json()["correlation_id"] for answer in answers] == asked


async def test_a_request_that_ran_twice_has_one_id(shop: Client, dsn: str) -> None:
    """E5.4: a replay has the id of its own request, and adds nothing to the first one's rows."""
    key = {"Idempotency-Key": "k"}
    await shop.post("/orders", json={}, headers={**key, "X-Correlation-Id": GIVEN})
    again = await shop.post("/orders", json={}, headers={**key, "X-Correlation-Id": GIVEN.replace("7777", "8888")})
    assert again.headers["x-correlation-id"] != GIVEN
    assert [row[0] for row in rows(dsn, JOBS)] == [GIVEN]


# -- the trace --------------------------------------------------------------------------------------------------------


async def test_a_trace_parent_goes_into_events_and_jobs(shop: Client, dsn: str) -> None:
    """E5.7: also when nobody records spans here."""
    await shop.post("/orders", json={}, headers={"traceparent": PARENT})
    assert rows(dsn, HEADERS)[0][0]["traceparent"] == PARENT
    assert rows(dsn, JOBS)[0][1] == PARENT


@pytest.mark.parametrize("given", ["x" * 5000, PARENT.upper(), PARENT + "-x", PARENT[:-1], "drop table", ""])
async def test_a_trace_parent_that_is_none_goes_nowhere(shop: Client, dsn: str, given: str) -> None:
    """E5.7: it would be in rows, and on brokers, for ever."""
    assert (await shop.post("/orders", json={}, headers={"traceparent": given})).status_code == 201
    assert "traceparent" not in rows(dsn, HEADERS)[0][0]
    assert rows(dsn, JOBS)[0][1] is None


TRACED = """
import asyncio, json, os
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from duly.db import Database
from tests.engine.http.serving import served
from tests.engine.http.test_correlation import trace_router
from tests.engine.idempotency.shop import create_shop

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)

async def main():
    db = Database(os.environ["DATABASE_URL"])
    api = create_shop(db, trace_router)
    if os.environ["FASTAPI_TRACES"] == "no" and hasattr(api, "_native_telemetry"):
        api._native_telemetry.config["tracing"] = False
    async with served(api) as client:
        for path in ("/traced/1?q=secret", "/traced/broken"):
            await client.post(path, headers={"traceparent": os.environ["PARENT"]})
        await client.post("/traced/2")
    await db.close()
    print(json.dumps([[s.name, s.kind.name, f"{s.context.trace_id:032x}", s.parent and f"{s.parent.span_id:016x}",
                       f"{s.context.span_id:016x}", dict(s.attributes), s.status.status_code.name]
                      for s in exporter.get_finished_spans()]))

asyncio.run(main())
"""
trace_router = Router(prefix="/traced")


@trace_router.post("/broken")
async def fail() -> None:
    raise ValueError("secret-words")


@trace_router.post("/{number}")
async def emit_and_schedule(number: int, tx: RequestTx) -> None:
    await emit(tx, NewEvent("order.placed", "orders", str(number)))
    await schedule(tx, "ship", number)


def traced(dsn: str, *, fastapi: str) -> list[list[Any]]:
    code, output = finish(python(dsn, TRACED, env={"PARENT": PARENT, "FASTAPI_TRACES": fastapi}))
    assert code == 0, output
    assert "secret-words" not in output
    spans: list[list[Any]] = json.loads(next(line for line in output.splitlines() if line.startswith("[[")))
    return spans


def test_a_recorded_span_continues_the_callers_trace_and_is_continued_by_events_and_jobs(dsn: str) -> None:
    """E5.7: named by its route; without a caller's trace a new one begins."""
    spans = traced(dsn, fastapi="no")
    assert [(name, kind) for name, kind, *_ in spans] == [
        ("POST /traced/{number}", "SERVER"), ("POST /traced/broken", "SERVER"), ("POST /traced/{number}", "SERVER"),
    ]  # fmt: skip
    _, trace_id, parent_id, _ = PARENT.split("-")
    first, broken, fresh = spans
    assert (first[2], first[3]) == (trace_id, parent_id)
    assert first[5] == {
        "http.request.method": "POST", "http.route": "/traced/{number}", "http.response.status_code": 200,
    }  # fmt: skip
    assert (broken[6], first[6]) == ("ERROR", "UNSET")
    assert fresh[3] is None
    ours = [f"00-{span[2]}-{span[4]}" for span in (first, fresh)]
    assert [headers["traceparent"][:-3] for (headers,) in rows(dsn, HEADERS + " ORDER BY seq")] == ours
    assert [row[1][:-3] for row in rows(dsn, JOBS + " ORDER BY id")] == ours


def test_where_somebody_else_records_the_request_there_is_no_second_span_of_it(dsn: str) -> None:
    """E5.7: FastAPI's own instrumentation, or OpenTelemetry's: ours steps back, and the trace is still one."""
    spans = traced(dsn, fastapi="yes")
    servers = [span for span in spans if span[1] == "SERVER"]
    assert len(servers) == 3
    _, trace_id, parent_id, _ = PARENT.split("-")
    assert (servers[0][2], servers[0][3]) == (trace_id, parent_id)
    carried = rows(dsn, HEADERS + " ORDER BY seq")[0][0]["traceparent"].split("-")
    assert carried[1] == trace_id
    assert carried[2] in {span[4] for span in spans}


# -- the numbers ------------------------------------------------------------------------------------------------------


def counted(method: str, route: str, status: int) -> float:
    wanted = f'duly_http_requests_total{{method="{method}",route="{route}",status="{status}"}} '
    lines = generate_latest().decode().splitlines()
    return sum(float(line.removeprefix(wanted)) for line in lines if line.startswith(wanted))


async def test_requests_are_counted_by_route_and_never_by_path(shop: Client) -> None:
    """E5.7: whoever asks for a million paths makes no million series."""
    before = counted("GET", "/numbers/{number}", 200)
    for number in (1, 77_777, 3):
        await shop.get(f"/numbers/{number}")
    await shop.get("/no-such-path-88888")
    await shop.request("BREW", "/numbers/1")
    assert counted("GET", "/numbers/{number}", 200) == before + 3
    text = generate_latest().decode()
    assert 'duly_http_seconds_count{method="GET",route="/numbers/{number}"}' in text
    assert 'method="GET",route="none",status="404"' in text
    assert 'method="other",route="/numbers/{number}",status="405"' in text
    for stray in ("77777", "88888", "BREW"):
        assert stray not in text


async def test_a_route_is_counted_under_the_whole_of_its_path_wherever_it_is_included(db: Database) -> None:
    """E5.7: with a prefix, twice, and below another router; replays, too."""
    inner = Router(prefix="/inner")

    @inner.post("/{number}")
    async def touch(number: int, tx: RequestTx) -> int:
        return number

    outer, plain = Router(prefix="/outer"), APIRouter()
    outer.include_router(inner, prefix="/middle")
    plain.include_router(inner, prefix="/plain")
    api = FastAPI()
    install(api, db)
    api.include_router(outer, prefix="/v1")
    api.include_router(plain, prefix="/v2")
    async with served(api) as client:
        for path in ("/v1/outer/middle/inner", "/v2/plain/inner"):
            for _ in range(2):
                answer = await client.post(f"{path}/5", headers={"Idempotency-Key": path})
                assert answer.status_code == 200
            assert answer.headers["idempotent-replayed"] == "true"
            assert counted("POST", f"{path}/{{number}}", 200) == 2
            assert f'duly_http_replays_total{{route="{path}/{{number}}"}} 1.0' in generate_latest().decode()


async def test_an_answer_that_breaks_off_breaks_the_connection_and_is_counted_and_logged(
    shop: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """E5.5, E5.7: half an answer is none; what the server logs of it has no message of ours in it."""
    before = counted("GET", "/numbers/{number}/broken", 200)
    with capture_logs(processors=[merge_contextvars]) as logs, pytest.raises(httpx2.RemoteProtocolError):
        await shop.get("/numbers/1/broken")
    assert counted("GET", "/numbers/{number}/broken", 200) == before + 1
    [failed] = [line for line in logs if line["event"] == "request_failed"]
    assert failed["error"] == "ValueError"
    assert any("test_correlation.py" in frame for frame in failed["where"])
    assert "secret-words" not in str(logs)
    assert "secret-words" not in caplog.text
    assert (await shop.get("/numbers/1")).status_code == 200


def test_a_processs_log_has_a_line_for_each_request_with_its_id_and_route(dsn: str) -> None:
    """E5.4, E5.7: JSON, with the id that the client got."""
    make_tables(dsn)
    with shop_process(dsn) as (url, process):
        answer = httpx2.post(f"{url}/orders/any/some-sku", headers={"X-Correlation-Id": GIVEN})
        assert process.stderr is not None
        line = next(said for said in map(json.loads, process.stderr) if said["event"] == "request")
    assert (line["correlation_id"], line["route"]) == (GIVEN, "/orders/any/{sku}")
    assert (line["method"], line["status"], answer.status_code) == ("POST", 200, 200)
    assert line["milliseconds"] > 0


async def test_health_and_metrics_are_not_logged_at_every_scrape(dsn: str) -> None:
    """E5.7: only for debugging."""
    health = Router()

    @health.get("/healthz")
    async def alive() -> str:
        return "yes"

    async with open_shop(dsn, health) as shop:
        with capture_logs() as logs:
            await shop.get("/healthz")
    assert [(line["event"], line["log_level"]) for line in logs] == [("request", "debug")]
