"""What another program may write with plain SQL must not stop the relay or a worker for everybody else (FAULTS).

Each of these may be refused at the door, with an error for whoever wrote it. If it is let in, it may fail by itself,
but the events beside it must get through.
"""

from __future__ import annotations

import psycopg
import pytest

from duly import Database, Duly, Event, Relay, Tx, Worker
from duly.messages import MAX_PAYLOAD_BYTES
from tests.engine.outbox.broker import Broker, BrokerTransport
from tests.support import finish, python, rows, value

STRANGE = {
    "a number of five thousand digits": "payload => '{\"n\": 1e5000}'",
    "two thousand levels": """payload => (repeat('{"a":', 2000) || '1' || repeat('}', 2000))::jsonb""",
    "a header of five thousand digits": "headers => '{\"n\": 1e5000}'",
    "headers that are no text": """headers => '{"traceparent": 5, "correlation_id": {"a": 1}, "causation_id": null}'""",
}
GOOD = "SELECT duly.emit('order.changed', 'shop', '{}')"


def emit_between_good_ones(dsn: str, arguments: str) -> bool:
    """Whether it was let in."""
    rows(dsn, GOOD.format("before"))
    try:
        rows(dsn, f"SELECT duly.emit('order.changed', 'shop', 'strange', {arguments})")
    except psycopg.Error:
        return False
    finally:
        rows(dsn, GOOD.format("after"))
    return True


@pytest.mark.parametrize("arguments", STRANGE.values(), ids=STRANGE.keys())
async def test_a_strange_event_does_not_stop_the_relay(db: Database, dsn: str, arguments: str) -> None:
    """E1.4: a failing event never blocks other aggregates."""
    emit_between_good_ones(dsn, arguments)
    for _ in range(3):
        await Relay(db).run_once()
    query = "SELECT aggregate_id FROM duly.events WHERE aggregate_id <> 'strange' ORDER BY seq"
    assert rows(dsn, query) == [("before",), ("after",)]


@pytest.mark.parametrize("where", ["payload", "headers"])
async def test_an_event_that_cannot_be_decoded_fails_and_the_others_go_to_the_broker(
    db: Database, dsn: str, broker: Broker, where: str
) -> None:
    """E1.4: it is a failed attempt that says why, and no broker saw it."""
    assert emit_between_good_ones(dsn, f"{where} => '{{\"n\": 1e5000}}'")
    assert (await Relay(db, transport=BrokerTransport(broker.port)).run_once()).facts["failed"] == 1
    assert sorted(one.aggregate for one in broker.received()) == ["after", "before"]
    ((aggregate, attempts, error),) = rows(dsn, "SELECT aggregate_id, attempts, last_error FROM duly.outbox")
    assert (aggregate, attempts) == ("strange", 1)
    assert error.startswith("cannot be decoded: ValueError")


@pytest.mark.parametrize("arguments", STRANGE.values(), ids=STRANGE.keys())
async def test_a_strange_event_does_not_stop_a_consumer(db: Database, dsn: str, arguments: str) -> None:
    """E2.3: it is dead-lettered, or handled; its neighbours of the same claim are handled."""
    app = Duly()
    seen: list[str] = []

    @app.consumer("mail", on="*")
    async def mail(event: Event, tx: Tx) -> None:
        seen.append(event.aggregate_id)

    await app.prepare(db)
    if emit_between_good_ones(dsn, arguments):
        publish_by_hand(dsn)
    else:
        await Relay(db).run_once()
    await Worker(db, app.handlers).run_once()
    assert sorted(set(seen) - {"strange"}) == ["after", "before"]
    assert rows(dsn, "SELECT id FROM duly.jobs WHERE lease_token IS NOT NULL") == []


def publish_by_hand(dsn: str) -> None:
    """What the relay would do, so that this is about the worker alone."""
    rows(
        dsn,
        "WITH moved AS (DELETE FROM duly.outbox RETURNING *), kept AS ("
        " INSERT INTO duly.events"
        " SELECT id, seq, type, topic, aggregate_id, payload, headers, created_at, duly.now(), 0 FROM moved)"
        " INSERT INTO duly.jobs (name, entity_id, event_id, run_at, due_at, created_at)"
        " SELECT 'consumer:mail', aggregate_id, id, duly.now(), duly.now(), duly.now() FROM moved ORDER BY seq",
    )


@pytest.mark.parametrize("traceparent", ["5", '"not a traceparent"'], ids=["number", "text"])
def test_a_strange_trace_parent_does_not_stop_a_traced_relay(dsn: str, traceparent: str) -> None:
    """E5.7: whoever wrote it, the trace begins anew."""
    rows(dsn, f"SELECT duly.emit('order.changed', 'shop', 'o1', '{{}}', '{{\"traceparent\": {traceparent}}}')")
    code = """
        import asyncio, os
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        trace.set_tracer_provider(TracerProvider())
        from duly import Database, Relay

        async def main():
            print(await Relay(Database(os.environ["DATABASE_URL"])).run_once())

        asyncio.run(main())
        """
    code_, written = finish(python(dsn, code))
    assert code_ == 0, written
    assert value(dsn, "SELECT count(*) FROM duly.events") == 1


def test_plain_sql_has_a_limit_of_size_too(dsn: str) -> None:
    """E7.3, FAULTS: bounded memory; a hundred payloads of any size are in the relay's memory at once."""
    query = "SELECT duly.emit('order.changed', 'shop', 'o1', jsonb_build_object('a', repeat('x', {})))"
    with pytest.raises(psycopg.Error):
        rows(dsn, query.format(8 * MAX_PAYLOAD_BYTES))
    rows(dsn, query.format(MAX_PAYLOAD_BYTES - 10))
