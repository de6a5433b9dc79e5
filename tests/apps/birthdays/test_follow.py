"""What becomes of a planned message when its user changes; users never touches it (B1, B5, B6)."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest
from structlog.typing import EventDict

from apps.users import service as users
from apps.wiring import app
from duly import Database
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
    logged,
    pending_of,
    register,
)
from tests.support import rows, value

FOLLOW = {name: handler for name, handler in app.handlers.items() if name.startswith("consumer:birthdays")}
JULY = date(1990, 7, 20)
local_time = datetime.fromisoformat  # naive: what clocks show


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


async def hear(db: Database) -> None:
    """Relay the events and let the consumer follow, and nobody else work."""
    await drain(db, FOLLOW)


async def test_a_new_zone_keeps_the_local_time_and_converts_it_anew(
    db: Database, dsn: str, clock: BusinessClock, log: list[EventDict]
) -> None:
    """B5: rescheduled 1, skipped none."""
    user_id, event_id = await register(db)
    await change(db, user_id, timezone="America/Los_Angeles")
    await hear(db)
    assert pending_of(dsn, user_id) == (local_time("2026-06-15T09:00"), "America/Los_Angeles", utc("2026-06-15T16:00"))
    query = "SELECT id, version FROM birthdays.events"
    assert rows(dsn, query) == [(event_id, 2)]
    (line,) = logged(log, "birthdays_rescheduled")
    assert (line["rescheduled"], line["skipped"], line["skipped_event_ids"]) == (1, 0, [])
    check_consistent(dsn)


async def test_a_new_date_is_planned_anew(db: Database, dsn: str, clock: BusinessClock) -> None:
    """B5: later this year, or next year when this year's has passed."""
    user_id, _ = await register(db)
    await change(db, user_id, date_of_birth=JULY)
    await hear(db)
    assert pending_of(dsn, user_id)[0] == local_time("2026-07-20T09:00")
    await change(db, user_id, date_of_birth=date(1991, 2, 3))
    await hear(db)
    assert pending_of(dsn, user_id)[0] == local_time("2027-02-03T09:00")
    assert events_of(dsn, user_id) == [(2027, "PENDING")]
    check_consistent(dsn)


@pytest.mark.parametrize(("answer", "status"), [(202, "COMPLETED"), (410, "FAILED")])
async def test_a_year_that_had_its_message_has_no_second_one(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, answer: int, status: str
) -> None:
    """B5: one message for each user and calendar year, whatever the date is corrected to and whatever became of it."""
    user_id, _ = await register(db)
    hook.answers = [Answer(answer)]
    clock.freeze(NINE_IN_WARSAW)
    await claim(db, dsn)
    await change(db, user_id, date_of_birth=JULY)
    await hear(db)
    assert events_of(dsn, user_id) == [(2026, status), (2027, "PENDING")]
    assert pending_of(dsn, user_id)[0] == local_time("2027-07-20T09:00")


async def test_date_and_zone_at_once_are_planned_by_both(db: Database, dsn: str, clock: BusinessClock) -> None:
    """B5: in the new zone it is not nine yet, in the old one it was: today, and not next year."""
    user_id, _ = await register(db)
    clock.freeze(utc("2026-07-20T12:00"))  # 14:00 in Warsaw, 05:00 in Los Angeles
    rows(
        dsn,
        "UPDATE birthdays.events SET year = 2027, target_local = '2027-06-15 09:00', target_utc = '2027-06-15 07:00Z'",
    )
    await change(db, user_id, date_of_birth=JULY, timezone="America/Los_Angeles")
    await hear(db)
    assert pending_of(dsn, user_id) == (local_time("2026-07-20T09:00"), "America/Los_Angeles", utc("2026-07-20T16:00"))
    check_consistent(dsn)


async def test_a_zone_in_which_it_is_past_makes_it_due_at_once_and_late(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B5, B7: an hour before nine in Warsaw the user moves to Tokyo, where it was nine six hours ago."""
    user_id, event_id = await register(db)
    clock.freeze(NINE_IN_WARSAW - timedelta(hours=1))
    await change(db, user_id, timezone="Asia/Tokyo")
    await hear(db)
    assert pending_of(dsn, user_id)[2] == utc("2026-06-15T00:00")
    await claim(db, dsn)
    assert hook.keys == [str(event_id)]
    assert hook.seen[0].body["lateSeconds"] == 6 * 3600
    assert "6 hours late" in hook.seen[0].body["message"]
    assert events_of(dsn, user_id) == [(2026, "COMPLETED"), (2027, "PENDING")]


async def test_after_the_message_a_zone_further_west_brings_no_second_one(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B5: across the date line, where the birthday is still to come."""
    user_id, _ = await register(db, timezone="Pacific/Kiritimati")
    clock.freeze(utc("2026-06-14T19:00"))
    await claim(db, dsn)
    assert len(hook.seen) == 1
    await change(db, user_id, timezone="Pacific/Pago_Pago")
    await hear(db)
    clock.freeze(utc("2026-06-15T20:00"))
    await claim(db, dsn)
    assert len(hook.seen) == 1
    assert pending_of(dsn, user_id)[:2] == (local_time("2027-06-15T09:00"), "Pacific/Pago_Pago")


async def test_time_counts_from_the_change_and_not_from_when_it_is_heard_of(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B5, B7: workers were away for a week in which the new birthday came: it is late, not lost."""
    user_id, _ = await register(db)
    await change(db, user_id, date_of_birth=date(1990, 5, 4))  # it is 1 May
    clock.advance(days=7)
    await hear(db)
    assert pending_of(dsn, user_id)[0] == local_time("2026-05-04T09:00")
    await claim(db, dsn)
    assert hook.seen[0].body["message"].endswith("Sorry to be 4 days late.")


async def test_an_overdue_message_goes_with_the_date_it_was_for(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B5: corrected during a downtime, before anybody claimed it: there was no such birthday."""
    user_id, _ = await register(db)
    clock.freeze(NINE_IN_WARSAW + timedelta(days=2))
    await change(db, user_id, date_of_birth=JULY)
    await hear(db)
    await claim(db, dsn)
    assert hook.seen == []
    assert pending_of(dsn, user_id)[0] == local_time("2026-07-20T09:00")


async def test_what_is_under_way_is_skipped_with_a_warning(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, log: list[EventDict]
) -> None:
    """B5, B6, the first layer: it runs with the old data, and next year's uses the new."""
    user_id, event_id = await register(db)
    clock.freeze(NINE_IN_WARSAW)
    await claim_only(db)
    await change(db, user_id, timezone="Asia/Tokyo")
    await hear(db)
    (warning,) = logged(log, "birthday_not_rescheduled")
    assert (warning["log_level"], warning["event_id"]) == ("warning", str(event_id))
    (line,) = logged(log, "birthdays_rescheduled")
    assert (line["rescheduled"], line["skipped"], line["skipped_event_ids"]) == (0, 1, [str(event_id)])
    await drain(db, app.handlers)
    assert hook.seen[0].body["timezone"] == "Europe/Warsaw"
    assert pending_of(dsn, user_id) == (local_time("2027-06-15T09:00"), "Asia/Tokyo", utc("2027-06-15T00:00"))
    check_consistent(dsn)


async def test_a_new_name_is_known_and_plans_nothing(
    db: Database, dsn: str, clock: BusinessClock, log: list[EventDict]
) -> None:
    """B5."""
    user_id, _ = await register(db)
    await change(db, user_id, first_name="Augusta")
    await hear(db)
    assert rows(dsn, "SELECT first_name, last_name FROM birthdays.people") == [("Augusta", "Lovelace")]
    assert value(dsn, "SELECT version FROM birthdays.events") == 1
    assert logged(log, "birthdays_rescheduled") == []


async def test_nothing_personal_is_logged(db: Database, clock: BusinessClock, log: list[EventDict]) -> None:
    """FAULTS: ids are not, names and dates of birth are."""
    user_id, _ = await register(db, name="Canary")
    await change(db, user_id, last_name="Canary", date_of_birth=JULY, timezone="Asia/Tokyo")
    await hear(db)
    await delete(db, user_id)
    await hear(db)
    assert logged(log, "birthdays_rescheduled")
    assert not {"Canary", "1990-07-20", "1990-06-15"} & set(str(log).replace("'", " ").split())


async def test_an_event_that_comes_twice_changes_nothing_the_second_time(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E2.2: also long after the inbox has forgotten it."""
    user_id, _ = await register(db)
    await change(db, user_id, timezone="Asia/Tokyo")
    await hear(db)
    before = rows(dsn, "SELECT * FROM birthdays.events")
    rows(dsn, "DELETE FROM duly.processed_events")
    rows(
        dsn,
        """INSERT INTO duly.jobs (name, entity_id, event_id, run_at, due_at, created_at)
           SELECT 'consumer:birthdays.follow-user', 'x', id, duly.now(), duly.now(), duly.now()
           FROM duly.events WHERE type = 'UserTimezoneChanged'""",
    )
    await hear(db)
    assert rows(dsn, "SELECT * FROM birthdays.events") == before


# -- who leaves -------------------------------------------------------------------------------------------------------


async def test_who_leaves_takes_along_what_is_pending_in_the_same_commit(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B1: what has been stays for its three years, without a name."""
    user_id, _ = await register(db)
    other, _ = await register(db)
    clock.freeze(NINE_IN_WARSAW)
    await claim(db, dsn)
    await delete(db, user_id)
    assert events_of(dsn, user_id) == [(2026, "COMPLETED")]
    assert events_of(dsn, other) == [(2026, "COMPLETED"), (2027, "PENDING")]
    assert rows(dsn, "SELECT user_id FROM birthdays.people") == [(other,)]
    await hear(db)
    check_consistent(dsn)


async def test_who_leaves_before_anything_was_heard_does_not_come_back(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B1: registered, changed and deleted within a moment; the events are heard of later, in order."""
    user_id, _ = await register(db)
    await change(db, user_id, timezone="Asia/Tokyo", first_name="Augusta", date_of_birth=JULY)
    await delete(db, user_id)
    await hear(db)
    assert rows(dsn, "SELECT 1 FROM birthdays.people UNION ALL SELECT 1 FROM birthdays.events") == []
    assert rows(dsn, "SELECT 1 FROM duly.dead_letters") == []
    clock.freeze(NINE_IN_WARSAW + timedelta(days=60))
    await claim(db, dsn)
    assert hook.seen == []


async def test_a_deletion_that_is_only_heard_of_is_enough(db: Database, dsn: str, clock: BusinessClock) -> None:
    """B5: users that tells nobody in its own transaction still says so by its event."""

    async def nobody(*_: object) -> None:
        """Tell nobody."""

    user_id, _ = await register(db)
    async with db.transaction() as tx:
        await users.delete_user(tx, user_id, tell=nobody)
    assert events_of(dsn, user_id) == [(2026, "PENDING")]
    await hear(db)
    assert events_of(dsn, user_id) == []


@pytest.mark.usefixtures("clock")
async def test_the_consumer_keeps_the_order_of_one_user(db: Database, dsn: str) -> None:
    """B5: a date that was corrected three times ends as the last one, whoever is retried in between."""
    user_id, _ = await register(db)
    for day in (1, 2, 3):
        await change(db, user_id, date_of_birth=date(1990, 8, day))
    rows(
        dsn,
        """CREATE SEQUENCE tries;
           CREATE FUNCTION falter() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
               IF nextval('tries') = 1 THEN RAISE EXCEPTION 'not this time'; END IF; RETURN NEW; END $$;
           CREATE TRIGGER falter BEFORE UPDATE ON birthdays.people FOR EACH ROW EXECUTE FUNCTION falter()""",
    )
    await hear(db)
    assert pending_of(dsn, user_id)[0] == local_time("2026-06-15T09:00")
    rows(dsn, "UPDATE duly.jobs SET run_at = duly.now() WHERE waits = 'retry'")
    await hear(db)
    assert pending_of(dsn, user_id)[0] == local_time("2026-08-03T09:00")
    check_consistent(dsn)
