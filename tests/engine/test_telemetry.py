"""One trace from the emitter through relay, job and handler, and ids on everything (E5.4, E5.7)."""

from __future__ import annotations

import json

from duly import Database, Duly, Event, EventBody, JobContext, Relay, Tx, Worker, emit, schedule
from duly.telemetry import Origin, originating
from duly.testing import drain
from tests.support import finish, python, rows, value

TRACED = """
import asyncio, json, os
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from duly import Database, Duly, Event, JobContext, NewEvent, Tx, emit, schedule
from duly.testing import drain

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
app = Duly()

@app.consumer("audit", on="order.*")
async def audit(event: Event, tx: Tx) -> None:
    await schedule(tx, "follow-up")

@app.job("follow-up")
async def follow_up(ctx: JobContext) -> None:
    with trace.get_tracer("handler").start_as_current_span("inside the handler"):
        pass

async def main():
    db = Database(os.environ["DATABASE_URL"])
    await app.prepare(db)
    with trace.get_tracer("caller").start_as_current_span("request"):
        async with db.transaction() as tx:
            await emit(tx, NewEvent("order.placed", "orders", "1"))
    await drain(db, app.handlers)
    await db.close()
    print(json.dumps([[s.name, f"{s.context.trace_id:032x}", s.parent and f"{s.parent.span_id:016x}",
                       f"{s.context.span_id:016x}"] for s in exporter.get_finished_spans()]))

asyncio.run(main())
"""


def test_one_trace_goes_from_the_emitter_to_the_last_handler(dsn: str) -> None:
    """E5.7: spans cross the outbox and the job queue."""
    code, output = finish(python(dsn, TRACED))
    assert code == 0, output
    spans = json.loads(next(line for line in output.splitlines() if line.startswith("[[")))
    by_name = {name: (trace, parent, own) for name, trace, parent, own in spans}
    assert by_name.keys() == {
        "request",
        "publish order.placed",
        "run consumer:audit",
        "run follow-up",
        "inside the handler",
    }
    assert len({trace for trace, _, _ in by_name.values()}) == 1
    assert by_name["run consumer:audit"][1] == by_name["request"][2]
    assert by_name["run follow-up"][1] == by_name["run consumer:audit"][2]
    assert by_name["inside the handler"][1] == by_name["run follow-up"][2]


class OrderPlaced(EventBody, type="order.placed", topic="orders", aggregate="order_id"):
    order_id: str


async def test_correlation_and_causation_are_on_every_event_job_and_execution(db: Database, dsn: str) -> None:
    """E5.4: one correlation id from the request to whatever follows from it; each step names its cause."""
    app = Duly()

    @app.consumer("audit", on="order.*")
    async def audit(event: Event, tx: Tx) -> None:
        await schedule(tx, "follow-up", event.aggregate_id)

    @app.job("follow-up")
    async def follow_up(ctx: JobContext, tx: Tx) -> None:
        await emit(tx, OrderPlaced(order_id="2"))

    await app.prepare(db)
    correlation = value(dsn, "SELECT duly.uuid7()")
    with originating(Origin(correlation_id=correlation)):
        async with db.transaction() as tx:
            (event_id,) = await emit(tx, OrderPlaced(order_id="1"))
    await Relay(db).run_once()
    await Worker(db, app.handlers).run_once()
    executions = rows(
        dsn, "SELECT name, correlation_id, causation_id, execution_id FROM duly.executions ORDER BY completed_at"
    )
    assert {row[1] for row in executions} == {correlation}
    by_name = {row[0]: row for row in executions}
    assert by_name["consumer:audit"][2] == event_id
    assert by_name["follow-up"][2] == event_id  # the consumer's work was caused by the event
    second = value(dsn, "SELECT headers FROM duly.outbox")
    assert second["correlation_id"] == str(correlation)
    assert second["causation_id"] == str(by_name["follow-up"][3])


async def test_what_has_no_origin_gets_one_id_for_the_whole_transaction(db: Database, dsn: str) -> None:
    async with db.transaction() as tx:
        await emit(tx, OrderPlaced(order_id="1"), OrderPlaced(order_id="2"))
        await schedule(tx, "A")
    found = rows(
        dsn,
        "SELECT (headers->>'correlation_id')::uuid FROM duly.outbox UNION SELECT correlation_id FROM duly.jobs",
    )
    assert len(found) == 1
    assert found[0][0] is not None


async def test_plain_sql_gets_correlation_ids_too(db: Database, dsn: str) -> None:
    """E7.3"""
    rows(dsn, "SELECT duly.emit('a.b', 't', '1'), duly.schedule('A')")
    assert value(dsn, "SELECT headers ? 'correlation_id' FROM duly.outbox") is True
    assert value(dsn, "SELECT correlation_id FROM duly.jobs") is not None


async def test_nothing_is_drained_twice(db: Database) -> None:
    """The toolkit's own drain ends."""
    assert await drain(db, Duly().handlers) == 0
