"""One POST with a key; what follows from its answer and the job's end are one commit (B4, B6)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from datetime import timedelta
from uuid import UUID

import pytest
from structlog.typing import EventDict

from apps.birthdays import gateways, service
from apps.birthdays.gateways import URL_VARIABLE
from apps.birthdays.model import Delivery
from apps.birthdays.workers import WAITS_SECONDS
from apps.wiring import app
from duly import Database
from duly.operate.dead_letters import list_dead_letters, retry_dead_letter
from duly.testing import BusinessClock, drain
from tests.apps.birthdays.acting import (
    NINE_IN_WARSAW,
    Answer,
    Receiver,
    change,
    check_consistent,
    claim,
    claim_only,
    delete,
    events_of,
    fill,
    pending_of,
    receiving,
    register,
    status_of,
    statuses,
)
from tests.apps.transfers.acting import counting
from tests.engine.cli.commands import free_port
from tests.support import rows, value

EVENT = "SELECT status, failure_reason, executed_at FROM birthdays.events WHERE id = %(id)s"
RUNS = "SELECT outcome FROM duly.executions WHERE name = 'birthdays.deliver' ORDER BY completed_at, outcome"


@pytest.fixture(autouse=True)
def no_leftovers(hook: Receiver) -> Iterator[None]:
    """Every test ends with all its scripted answers used."""
    yield
    assert hook.answers == []


async def due(db: Database, clock: BusinessClock, **who: str) -> tuple[UUID, UUID]:
    """A user whose birthday is now: its id, and the event's."""
    made = await register(db, **who)  # type: ignore[arg-type]  # names and zones only
    clock.freeze(NINE_IN_WARSAW)
    return made


async def test_2xx_completes_it_and_plans_next_year_in_one_commit(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B4."""
    user_id, event_id = await due(db, clock)
    await claim(db, dsn)
    assert rows(dsn, EVENT, {"id": event_id}) == [("COMPLETED", None, NINE_IN_WARSAW)]
    assert events_of(dsn, user_id) == [(2026, "COMPLETED"), (2027, "PENDING")]
    written = (
        "SELECT xmin::text FROM birthdays.events UNION SELECT xmin::text FROM duly.executions WHERE entity_id = %(id)s"
    )
    assert len(rows(dsn, written, {"id": str(event_id)})) == 1
    check_consistent(dsn)


async def test_what_the_webhook_gets(db: Database, dsn: str, clock: BusinessClock, hook: Receiver) -> None:
    """B4: a key that is the event's own, who and when, and the correlation id."""
    user_id, event_id = await due(db, clock)
    await claim(db, dsn)
    (seen,) = hook.seen
    assert seen.key == str(event_id)
    assert seen.body == {
        "eventId": str(event_id), "userId": str(user_id), "message": "Happy birthday, Ada Lovelace!",
        "targetLocal": "2026-06-15T09:00:00", "timezone": "Europe/Warsaw", "targetUtc": "2026-06-15T07:00:00+00:00",
        "lateSeconds": 0,
    }  # fmt: skip
    assert seen.headers["content-type"] == "application/json"
    query = "SELECT correlation_id::text FROM duly.executions WHERE name = 'birthdays.deliver'"
    assert seen.headers["x-correlation-id"] == value(dsn, query)


async def test_a_clock_that_is_set_back_during_a_delivery_makes_nothing_early(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B4: it is delivered, and not before it was claimed."""
    _, event_id = await due(db, clock)
    await claim_only(db)
    clock.freeze(NINE_IN_WARSAW - timedelta(minutes=5))
    rows(dsn, "UPDATE duly.jobs SET run_at = duly.now() WHERE name = 'birthdays.deliver'")
    await drain(db, app.handlers)
    assert rows(dsn, EVENT, {"id": event_id}) == [("COMPLETED", None, NINE_IN_WARSAW)]


@pytest.mark.parametrize("status", [200, 201, 202, 204])
async def test_every_2xx_is_success(db: Database, dsn: str, clock: BusinessClock, hook: Receiver, status: int) -> None:
    """B4: whatever its body says, of which no more than some is read."""
    _, event_id = await due(db, clock)
    hook.answers = [Answer(status, body=b"" if status == 204 else b"x" * 200_000)]
    await claim(db, dsn)
    assert status_of(dsn, event_id) == "COMPLETED"


@pytest.mark.parametrize("status", [500, 502, 503, 504, 408, 429, 599])
async def test_what_may_pass_is_tried_again_later_with_the_same_key(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, status: int
) -> None:
    """B4: after two minutes, and it says by how much it is late by then."""
    _, event_id = await due(db, clock)
    hook.answers = [Answer(status)]
    await claim(db, dsn)
    assert status_of(dsn, event_id) == "PROCESSING"
    query = "SELECT run_at, retry_count, last_error FROM duly.jobs WHERE name = 'birthdays.deliver'"
    ((run_at, retries, error),) = rows(dsn, query)
    assert (run_at, retries) == (NINE_IN_WARSAW + timedelta(minutes=2), 1)
    assert error.endswith(f"the webhook answered {status}")
    clock.advance(minutes=2)
    await drain(db, app.handlers)
    assert hook.keys == [str(event_id)] * 2
    assert status_of(dsn, event_id) == "COMPLETED"
    assert rows(dsn, RUNS) == [("retried",), ("done",)]


async def test_the_waits_double_and_the_eighth_failure_is_the_last(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B4: then FAILED with the reason, next year planned, and a dead letter that an operator sees."""
    user_id, event_id = await due(db, clock)
    hook.always = Answer(503)
    await claim(db, dsn)
    assert WAITS_SECONDS == [120, 240, 480, 960, 1920, 3840, 7680]
    for tries, wait in enumerate(WAITS_SECONDS, 1):
        assert (len(hook.keys), status_of(dsn, event_id)) == (tries, "PROCESSING")
        clock.advance(seconds=wait - 1)
        await drain(db, app.handlers)
        assert len(hook.keys) == tries
        clock.advance(seconds=1)
        await drain(db, app.handlers)
    assert hook.keys == [str(event_id)] * 8
    reason = "gave up after 8 tries: the webhook answered 503"
    assert rows(dsn, EVENT, {"id": event_id}) == [("FAILED", reason, None)]
    assert events_of(dsn, user_id) == [(2026, "FAILED"), (2027, "PENDING")]
    query = "SELECT name, entity_id, error, reason FROM duly.dead_letters"
    assert rows(dsn, query) == [("birthdays.deliver", str(event_id), reason, "failed_for_good")]
    assert "Sorry to be 4 hours late." in hook.seen[-1].body["message"]
    check_consistent(dsn)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 422, 301, 302, 307])
async def test_any_other_answer_is_final(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, status: int
) -> None:
    """B4: no retry, no redirect followed; next year has its birthday all the same."""
    user_id, event_id = await due(db, clock)
    hook.answers = [Answer(status, headers={"Location": f"{hook.url}/elsewhere"})]
    await claim(db, dsn)
    clock.advance(hours=6)
    await drain(db, app.handlers)
    assert len(hook.seen) == 1
    assert rows(dsn, EVENT, {"id": event_id}) == [("FAILED", f"the webhook answered {status}", None)]
    assert events_of(dsn, user_id) == [(2026, "FAILED"), (2027, "PENDING")]
    assert value(dsn, "SELECT count(*) FROM duly.dead_letters") == 1


async def test_a_dead_letter_that_an_operator_retries_is_delivered_after_all(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B4: completed, late, and next year stays as it was planned."""
    user_id, event_id = await due(db, clock)
    hook.answers = [Answer(404)]
    await claim(db, dsn)
    next_year = pending_of(dsn, user_id)
    clock.advance(days=3)
    async with db.transaction() as tx:
        (dead,) = await list_dead_letters(tx)
        await retry_dead_letter(tx, dead.id, actor="mona", reason="the partner is back")
    await drain(db, app.handlers)
    assert hook.keys == [str(event_id)] * 2
    assert hook.seen[-1].body["message"].endswith("Sorry to be 3 days late.")
    assert rows(dsn, EVENT, {"id": event_id}) == [("COMPLETED", None, NINE_IN_WARSAW + timedelta(days=3))]
    assert (events_of(dsn, user_id), pending_of(dsn, user_id)) == (
        [(2026, "COMPLETED"), (2027, "PENDING")], next_year
    )  # fmt: skip
    check_consistent(dsn)


async def test_a_retried_dead_letter_that_fails_again_is_a_dead_letter_again(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B4: with the new reason."""
    user_id, event_id = await due(db, clock)
    hook.answers = [Answer(404), Answer(410)]
    await claim(db, dsn)
    async with db.transaction() as tx:
        (dead,) = await list_dead_letters(tx)
        await retry_dead_letter(tx, dead.id, actor="mona")
    await drain(db, app.handlers)
    assert rows(dsn, EVENT, {"id": event_id}) == [("FAILED", "the webhook answered 410", None)]
    assert events_of(dsn, user_id) == [(2026, "FAILED"), (2027, "PENDING")]


# -- answers that are none --------------------------------------------------------------------------------------------


async def test_a_webhook_that_does_not_answer_in_time_is_tried_again(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B4."""
    monkeypatch.setattr(gateways, "TRY_SECONDS", 0.2)
    _, event_id = await due(db, clock)
    hold = asyncio.Event()
    hook.answers = [Answer(hold=hold)]
    await claim(db, dsn)
    hold.set()
    query = "SELECT last_error FROM duly.jobs WHERE name = 'birthdays.deliver'"
    assert value(dsn, query).endswith("the webhook did not answer within 0.2 s")
    clock.advance(minutes=2)
    await drain(db, app.handlers)
    assert status_of(dsn, event_id) == "COMPLETED"


async def test_a_webhook_that_answers_in_drips_is_left_in_time(
    db: Database, dsn: str, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B4: the time is that of the whole call; here each piece of it comes soon enough."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 202 Accepted\r\n")
        with contextlib.suppress(ConnectionError):
            for number in range(300):
                writer.write(b"X-%d: more to come\r\n" % number)
                await writer.drain()
                await asyncio.sleep(0.01)
            writer.write(b"Content-Length: 0\r\n\r\n")
        writer.close()

    monkeypatch.setattr(gateways, "TRY_SECONDS", 0.5)
    _, event_id = await due(db, clock)
    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        monkeypatch.setenv(URL_VARIABLE, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook")
        await claim(db, dsn)
    assert status_of(dsn, event_id) == "PROCESSING"
    query = "SELECT last_error FROM duly.jobs WHERE name = 'birthdays.deliver'"
    assert value(dsn, query).endswith("the webhook did not answer within 0.5 s")


async def test_an_answer_without_end_is_cut_off(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS: its status counts, its body is not kept; the bytes are counted, whatever time is left for them."""
    monkeypatch.setattr(gateways, "BODY_SECONDS", 60.0)
    _, event_id = await due(db, clock)
    hook.answers = [Answer(200, endless=True)]
    async with asyncio.timeout(30):
        await claim(db, dsn)
    assert status_of(dsn, event_id) == "COMPLETED"


async def test_an_answer_that_is_never_finished_counts_by_its_status(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B4: 2xx is COMPLETED; it was taken, and to send it again and again would wish seven times more."""
    _, event_id = await due(db, clock)
    hook.answers = [Answer(200, unfinished=True)]
    async with asyncio.timeout(30):
        await claim(db, dsn)
    assert (status_of(dsn, event_id), hook.keys) == ("COMPLETED", [str(event_id)])


@pytest.mark.parametrize("cuts", [1, 2])
async def test_a_connection_that_breaks_is_tried_again(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, cuts: int
) -> None:
    """B4: nobody knows whether it arrived; the key does. Once at once, in case it was kept too long; then later."""
    _, event_id = await due(db, clock)
    hook.answers = [Answer(cut=True)] * cuts
    await claim(db, dsn)
    assert status_of(dsn, event_id) == ("COMPLETED" if cuts == 1 else "PROCESSING")
    clock.advance(minutes=2)
    await drain(db, app.handlers)
    assert (hook.keys, status_of(dsn, event_id)) == ([str(event_id)] * (cuts + 1), "COMPLETED")


async def test_nobody_listening_is_tried_again_and_the_address_is_not_repeated(
    db: Database, dsn: str, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch, log: list[EventDict]
) -> None:
    """B4: it might hold a password."""
    monkeypatch.setenv(URL_VARIABLE, f"http://user:canary@127.0.0.1:{free_port()}/canary")
    await due(db, clock)
    await claim(db, dsn)
    query = "SELECT last_error FROM duly.jobs WHERE name = 'birthdays.deliver'"
    assert "the webhook cannot be reached (ConnectError)" in value(dsn, query)
    assert "canary" not in str(rows(dsn, "SELECT * FROM duly.executions")) + str(log)


@pytest.mark.parametrize(
    "address", ["ftp://canary", "canary", "http://", "http://[::1/canary", "http://127.0.0.1:99999/canary"]
)
async def test_an_address_that_is_none_waits_for_an_operator_and_fails_nobodys_birthday(
    db: Database, dsn: str, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch, hook: Receiver, address: str
) -> None:
    """B4: put right, it is delivered, however often it was put off."""
    _, event_id = await due(db, clock)
    monkeypatch.setenv(URL_VARIABLE, address)
    await claim(db, dsn)
    for _ in range(12):
        clock.advance(minutes=10)
        await drain(db, app.handlers)
    assert (status_of(dsn, event_id), hook.seen) == ("PROCESSING", [])
    ((message,),) = set(rows(dsn, "SELECT message FROM duly.executions WHERE outcome = 'snoozed'"))
    assert URL_VARIABLE in message
    assert "canary" not in message
    monkeypatch.setenv(URL_VARIABLE, hook.url)
    clock.advance(minutes=10)
    await drain(db, app.handlers)
    assert status_of(dsn, event_id) == "COMPLETED"


async def test_a_proxy_of_the_environment_is_not_asked(
    db: Database, dsn: str, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch, hook: Receiver
) -> None:
    """B4: names go to the webhook and to nobody in between."""
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    _, event_id = await due(db, clock)
    await claim(db, dsn)
    assert (status_of(dsn, event_id), hook.keys) == ("COMPLETED", [str(event_id)])


async def test_production_without_an_address_says_what_to_set(
    db: Database, dsn: str, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B4: in development it is the sandbox's catcher."""
    await due(db, clock)
    monkeypatch.delenv(URL_VARIABLE)
    monkeypatch.setenv("DULY_API_URL", "http://127.0.0.1:1/")
    assert gateways.find_webhook_url() == "http://127.0.0.1:1/sandbox/webhooks"
    monkeypatch.setenv("DULY_ENV", "production")
    await claim(db, dsn)
    assert URL_VARIABLE in value(dsn, "SELECT message FROM duly.executions WHERE outcome = 'snoozed'")


# -- Retry-After ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
async def test_the_webhook_may_ask_for_a_wait_and_it_costs_no_retry(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, status: int
) -> None:
    """B4: within an hour."""
    _, event_id = await due(db, clock)
    hook.answers = [Answer(status, headers={"Retry-After": "600"})]
    await claim(db, dsn)
    query = "SELECT run_at, retry_count FROM duly.jobs WHERE name = 'birthdays.deliver'"
    assert rows(dsn, query) == [(NINE_IN_WARSAW + timedelta(minutes=10), 0)]
    clock.advance(minutes=10)
    await drain(db, app.handlers)
    assert status_of(dsn, event_id) == "COMPLETED"


@pytest.mark.parametrize("said", ["0", "-5", "3601", "99999999999", "Wed, 21 Oct 2065 07:28:00 GMT", "1.5", "soon"])
async def test_any_other_wish_is_a_retry_by_our_own_waits(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, said: str
) -> None:
    """B4."""
    await due(db, clock)
    hook.answers = [Answer(429, headers={"Retry-After": said})]
    await claim(db, dsn)
    query = "SELECT run_at, retry_count FROM duly.jobs WHERE name = 'birthdays.deliver'"
    assert rows(dsn, query) == [(NINE_IN_WARSAW + timedelta(minutes=2), 1)]


async def test_patience_with_a_webhook_that_always_asks_for_more_ends(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """A limit on everything: six hours, then its answers count as failures."""
    _, event_id = await due(db, clock)
    hook.always = Answer(429, headers={"Retry-After": "3600"})
    await claim(db, dsn)
    for _ in range(40):
        clock.advance(hours=1)
        await drain(db, app.handlers)
    assert status_of(dsn, event_id) == "FAILED"
    assert len(hook.seen) == 7 + 8  # at once and after each of six hours; then eight tries of our own
    assert rows(dsn, "SELECT outcome, count(*)::int FROM duly.executions WHERE name = 'birthdays.deliver' GROUP BY 1") \
        == [("buried", 1), ("retried", 7), ("snoozed", 7)]  # fmt: skip


# -- whose birthday it is ---------------------------------------------------------------------------------------------


async def test_a_user_who_is_deleted_before_the_delivery_gets_none(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B1, B4: claimed already; the job is cancelled, the event says why, and nothing is planned."""
    user_id, event_id = await due(db, clock)
    await claim_only(db)
    await delete(db, user_id)
    await drain(db, app.handlers)
    assert hook.seen == []
    assert rows(dsn, EVENT, {"id": event_id}) == [("FAILED", "the user was deleted", None)]
    assert events_of(dsn, user_id) == [(2026, "FAILED")]
    assert rows(dsn, RUNS) == [("cancelled",)]
    assert rows(dsn, "SELECT 1 FROM duly.dead_letters") == []


async def test_a_message_is_in_the_newest_name_and_next_year_by_the_newest_data(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B6: what is under way runs with the old date and zone; next year's uses the new ones."""
    user_id, _ = await due(db, clock)
    await claim_only(db)
    await change(db, user_id, first_name="Augusta", timezone="Asia/Tokyo", date_of_birth=NINE_IN_WARSAW.date().replace(
        year=1990, month=12, day=10))  # fmt: skip
    await drain(db, {name: handler for name, handler in app.handlers.items() if name.startswith("consumer:")})
    await drain(db, app.handlers)
    (seen,) = hook.seen
    assert seen.body["message"] == "Happy birthday, Augusta Lovelace!"
    assert (seen.body["targetLocal"], seen.body["timezone"]) == ("2026-06-15T09:00:00", "Europe/Warsaw")
    assert [str(part) for part in pending_of(dsn, user_id)] == [
        "2027-12-10 09:00:00", "Asia/Tokyo", "2027-12-10 00:00:00+00:00"
    ]  # fmt: skip
    check_consistent(dsn)


@pytest.mark.parametrize("entity", [str(UUID(int=7)), "nonsense"])
async def test_a_job_for_nothing_ends(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, entity: str
) -> None:
    """An event that was forgotten long ago; or no event's id at all."""
    rows(dsn, "SELECT duly.schedule('birthdays.deliver', %(entity)s)", {"entity": entity})
    await drain(db, app.handlers)
    assert hook.seen == []
    assert rows(dsn, RUNS) == [("buried" if entity == "nonsense" else "done",)]


@pytest.mark.parametrize("claimed", [False, True])
async def test_a_second_job_for_an_event_delivers_nothing(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, claimed: bool
) -> None:
    """B4: one that is pending is left alone, and so is one that is completed."""
    _, event_id = await due(db, clock)
    if claimed:
        await claim(db, dsn)
    rows(dsn, "SELECT duly.schedule('birthdays.deliver', %(id)s)", {"id": str(event_id)})
    await drain(db, app.handlers)
    assert len(hook.seen) == claimed
    assert status_of(dsn, event_id) == ("COMPLETED" if claimed else "PENDING")


async def test_what_is_completed_is_not_ended_a_second_time(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B4: neither by an answer to it that comes late, nor by a late failure."""
    _, event_id = await due(db, clock)
    await claim_only(db)
    async with db.transaction() as tx:
        prepared = await service.prepare_delivery(tx, event_id)
    assert isinstance(prepared, Delivery)
    await drain(db, app.handlers)
    query = "SELECT * FROM birthdays.events ORDER BY year"
    before = rows(dsn, query)
    assert status_of(dsn, event_id) == "COMPLETED"
    clock.advance(hours=1)
    async with db.transaction() as tx:
        await service.complete(tx, prepared.event)
        await service.fail(tx, prepared.event, reason="the webhook answered 404")
    assert rows(dsn, query) == before


async def test_names_go_to_the_webhook_and_nowhere_else(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, log: list[EventDict]
) -> None:
    """FAULTS: no personal data in logs, history, jobs or dead letters."""
    await due(db, clock, name="Canary")
    hook.answers = [Answer(503), Answer(404)]
    await claim(db, dsn)
    clock.advance(minutes=2)
    await drain(db, app.handlers)
    assert "Canary" in hook.seen[0].body["message"]
    kept = rows(dsn, "SELECT j::text FROM duly.executions j UNION ALL SELECT d::text FROM duly.dead_letters d")
    assert len(kept) > 3
    for place in (str(kept), str(log)):
        assert "Canary" not in place
        assert "1990-06-15" not in place


async def test_a_delivery_sends_a_known_number_of_statements(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """A gate: whoever adds a statement changes a number here: lock, complete, plan."""
    _, event_id = await due(db, clock)
    await claim_only(db)
    async with db.transaction() as tx:
        async with counting(db) as sent:
            prepared = await service.prepare_delivery(tx, event_id)
        assert len(sent) == 1, sent
        assert isinstance(prepared, Delivery)
        async with counting(db) as sent:
            await service.complete(tx, prepared.event)
        assert len(sent) == 3, sent


# -- recovery ---------------------------------------------------------------------------------------------------------


async def test_what_nobody_delivers_any_more_is_ended_and_next_year_planned(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, log: list[EventDict]
) -> None:
    """B6: the job was buried because workers died over it; what still has a job is left alone."""
    events = fill(dsn, 6)
    clock.freeze(NINE_IN_WARSAW)
    await claim_only(db)
    rows(dsn, "DELETE FROM duly.jobs WHERE entity_id = ANY(%(ids)s)", {"ids": [str(one) for one in events[:4]]})
    clock.advance(minutes=15)
    async with db.transaction() as tx:
        assert await service.recover(tx) == 0  # not for longer than a quarter of an hour yet
    clock.advance(seconds=1)
    async with counting(db) as sent, db.transaction() as tx:
        assert await service.recover(tx) == 4
    assert len(sent) == 5, sent
    assert statuses(dsn) == {"FAILED": 4, "PROCESSING": 2, "PENDING": 4}
    assert rows(dsn, EVENT, {"id": events[0]})[0][:2] == ("FAILED", service.LOST)
    (line,) = [line for line in log if line["event"] == "birthdays_recovered"]
    assert line["count"] == 4
    await drain(db, app.handlers)
    assert (len(hook.seen), statuses(dsn)) == (2, {"FAILED": 4, "COMPLETED": 2, "PENDING": 6})
    check_consistent(dsn)


async def test_the_recovery_runs_by_its_schedule(db: Database, dsn: str, clock: BusinessClock, hook: Receiver) -> None:
    """B6: and a dead letter that is retried after it is delivered all the same."""
    events = fill(dsn, 1)
    clock.freeze(NINE_IN_WARSAW)
    await claim_only(db)
    rows(
        dsn,
        """UPDATE duly.jobs SET retry_count = 100, lease_token = 1, lease_expires_at = now(), leased_by = 'dead',
                                claimed_at = now()""",
    )
    await drain(db, app.handlers)
    assert value(dsn, "SELECT reason FROM duly.dead_letters") == "worker_died"
    clock.advance(minutes=16)
    rows(dsn, "SELECT duly.schedule('birthdays.recover')")
    await drain(db, app.handlers)
    assert (status_of(dsn, events[0]), hook.seen) == ("FAILED", [])
    async with db.transaction() as tx:
        (dead,) = await list_dead_letters(tx)
        await retry_dead_letter(tx, dead.id, actor="mona")
    await drain(db, app.handlers)
    assert (status_of(dsn, events[0]), len(hook.seen)) == ("COMPLETED", 1)


# -- looking after ----------------------------------------------------------------------------------------------------


async def test_what_is_over_is_forgotten_after_three_years_in_bounded_steps(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retention for every table; what is to come stays."""
    fill(dsn, 25)
    clock.freeze(NINE_IN_WARSAW)
    await claim(db, dsn)
    clock.freeze(NINE_IN_WARSAW.replace(year=2029))
    rows(dsn, "SELECT duly.schedule('birthdays.forget-events')")
    await drain(db, {"birthdays.forget-events": app.handlers["birthdays.forget-events"]})
    assert statuses(dsn) == {"COMPLETED": 25, "PENDING": 25}
    clock.advance(seconds=1)
    async with db.transaction() as tx:
        assert await service.forget_events(tx, limit=10) == 10
    rows(dsn, "SELECT duly.schedule('birthdays.forget-events')")
    await drain(db, {"birthdays.forget-events": app.handlers["birthdays.forget-events"]})
    assert statuses(dsn) == {"PENDING": 25}


async def test_a_change_of_a_zones_rules_is_noticed_before_the_day(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """FAULTS: planned by old rules, converted by those of today; what is further away waits for its turn."""
    near, far = [(await register(db))[0] for _ in range(2)]
    at = pending_of(dsn, near)[2]
    rows(dsn, "UPDATE birthdays.events SET target_utc = target_utc + interval '1 hour'")
    clock.freeze(NINE_IN_WARSAW - timedelta(days=9))
    rows(
        dsn,
        "UPDATE birthdays.events SET target_utc = target_utc + interval '20 hours' WHERE user_id = %(id)s",
        {"id": far},
    )
    rows(dsn, "SELECT duly.schedule('birthdays.recheck-zones')")
    await drain(db, app.handlers)
    assert pending_of(dsn, near)[2] == at + timedelta(hours=1)
    clock.freeze(NINE_IN_WARSAW - timedelta(days=7, hours=22))
    rows(dsn, "SELECT duly.schedule('birthdays.recheck-zones')")
    await drain(db, app.handlers)
    assert (pending_of(dsn, near)[2], pending_of(dsn, far)[2]) == (at, at + timedelta(hours=21))
    query = (
        "SELECT message FROM duly.executions WHERE name = 'birthdays.recheck-zones' ORDER BY completed_at DESC LIMIT 1"
    )
    assert value(dsn, query).startswith("corrected 1 ")


async def test_the_recheck_is_bounded_and_goes_on(db: Database, dsn: str, clock: BusinessClock) -> None:
    """A limit on everything."""
    fill(dsn, 30)
    rows(dsn, "UPDATE birthdays.events SET target_utc = target_utc + interval '1 hour'")
    clock.freeze(NINE_IN_WARSAW - timedelta(days=1))
    async with db.transaction() as tx:
        assert await service.recheck_zones(tx, limit=10) == 10
    async with db.transaction() as tx:
        assert [await service.recheck_zones(tx, limit=20), await service.recheck_zones(tx)] == [20, 0]


async def test_the_recheck_reads_on_behind_a_full_page(
    db: Database, dsn: str, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS: the one whose zone has other rules may be the last of many."""
    monkeypatch.setattr(service, "RECHECK_PAGE", 4)
    *_, last = fill(dsn, 10)
    rows(dsn, "UPDATE birthdays.events SET target_utc = target_utc + interval '1 h' WHERE id = %(id)s", {"id": last})
    clock.freeze(NINE_IN_WARSAW - timedelta(days=1))
    async with db.transaction() as tx:
        assert await service.recheck_zones(tx) == 1


async def test_a_recheck_that_does_not_come_to_its_end_says_so(
    db: Database, dsn: str, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch, log: list[EventDict]
) -> None:
    """A limit is never silent."""
    monkeypatch.setattr(service, "RECHECK_PAGE", 4)
    monkeypatch.setattr(service, "RECHECK_PAGES", 2)
    fill(dsn, 9)
    clock.freeze(NINE_IN_WARSAW - timedelta(days=1))
    async with db.transaction() as tx:
        assert await service.recheck_zones(tx) == 0
    stopped = [entry for entry in log if entry["event"] == "birthdays_recheck_stopped"]
    assert [(entry["read"], entry["log_level"]) for entry in stopped] == [(8, "warning")]


async def test_connections_are_kept_between_messages(db: Database, dsn: str, clock: BusinessClock) -> None:
    """Ten at a time need no more than ten connections, however many messages there are."""
    fill(dsn, 60)
    clock.freeze(NINE_IN_WARSAW)
    ports: set[str] = set()

    class Counting(Receiver):
        async def __call__(self, scope, receive, send):  # type: ignore[no-untyped-def]  # ASGI, as above
            if scope["type"] == "http":
                ports.add(str(scope["client"][1]))
            await super().__call__(scope, receive, send)

    with pytest.MonkeyPatch.context() as patch:
        async with receiving(Counting()) as receiver:
            patch.setenv(URL_VARIABLE, receiver.url)
            await claim(db, dsn)
            assert len(receiver.seen) == 60
    assert len(ports) <= 12
