"""Users over HTTP: registered with their first birthday message in one transaction, corrected, deleted (B1, B5)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx2
import psycopg
import pytest

from duly import failpoints
from duly.db import Database
from duly.testing import BusinessClock
from tests.apps.conftest import Api
from tests.apps.transfers.acting import counting
from tests.support import rows, value

ADA = {"firstName": "Ada", "lastName": "Lovelace", "dateOfBirth": "1990-06-15", "timezone": "Europe/Warsaw"}
SPRING = datetime(2026, 5, 1, 12, tzinfo=UTC)
COUNTS = """
SELECT (SELECT count(*) FROM users.users)::int, (SELECT count(*) FROM birthdays.people)::int,
       (SELECT count(*) FROM birthdays.events)::int, (SELECT count(*) FROM duly.event_log)::int
"""


class Desk:
    """Calls of the API by somebody who may."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.right = api.headers("clerk", "users")

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        sent = {} if body is None else {"json": body}
        return await self.api.client.request(method, path, headers=self.right | headers, **sent)

    async def register(self, **changes: Any) -> dict[str, Any]:
        answer = await self.call("POST", "/user", ADA | changes)
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    async def change(self, user_id: str, **changes: Any) -> httpx2.Response:
        return await self.call("PUT", f"/user/{user_id}", changes)


@pytest.fixture
def desk(api: Api, clock: BusinessClock) -> Desk:
    """In spring, on a clock that stands still."""
    clock.freeze(SPRING)
    return Desk(api)


def emitted(dsn: str, user_id: str) -> list[tuple[str, dict[str, Any]]]:
    """A user's facts, in their order."""
    query = (
        "SELECT type, payload FROM duly.event_log WHERE aggregate_id = %(id)s AND topic = 'user-events' ORDER BY seq"
    )
    return [(kind, payload) for kind, payload in rows(dsn, query, {"id": user_id})]


# -- registering ------------------------------------------------------------------------------------------------------


async def test_a_user_is_registered_with_the_first_message_to_come(desk: Desk, dsn: str) -> None:
    """B1, B2: at nine on the next birthday, by the user's clocks."""
    answer = await desk.call("POST", "/user", ADA)
    assert answer.status_code == 201
    body = answer.json()
    user, event = body["user"], body["nextBirthdayEvent"]
    assert body.keys() == {"user", "nextBirthdayEvent"}
    assert user == {
        "id": user["id"], **ADA, "version": 1, "createdAt": "2026-05-01T12:00:00Z", "updatedAt": "2026-05-01T12:00:00Z",
    }  # fmt: skip
    assert event == {
        "id": event["id"], "status": "PENDING", "targetLocal": "2026-06-15T09:00:00", "timezone": "Europe/Warsaw",
        "targetUtc": "2026-06-15T07:00:00Z",
    }  # fmt: skip
    assert answer.headers["location"] == f"/user/{user['id']}"
    assert (await desk.call("GET", answer.headers["location"])).json() == user
    fact = {"user_id": user["id"], "first_name": "Ada", "last_name": "Lovelace", "date_of_birth": "1990-06-15"}
    assert emitted(dsn, user["id"]) == [("UserRegistered", fact | {"timezone": "Europe/Warsaw"})]


async def test_user_copy_message_and_fact_are_one_commit(desk: Desk, dsn: str) -> None:
    """B1."""
    await desk.register()
    written = """
        SELECT xmin::text FROM users.users UNION SELECT xmin::text FROM birthdays.people
        UNION SELECT xmin::text FROM birthdays.events UNION SELECT xmin::text FROM duly.outbox"""
    assert len(rows(dsn, written)) == 1


@pytest.mark.parametrize("table", ["birthdays.people", "birthdays.events", "duly.outbox"])
async def test_without_the_message_there_is_no_user(desk: Desk, dsn: str, table: str) -> None:
    """B1: both succeed or both fail; then it heals."""
    rows(
        dsn,
        f"""CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                RAISE EXCEPTION 'broken' USING ERRCODE = 'XX001'; END $$;
            CREATE TRIGGER refuse BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION refuse()""",
    )
    assert (await desk.call("POST", "/user", ADA)).status_code == 500
    assert rows(dsn, COUNTS) == [(0, 0, 0, 0)]
    rows(dsn, f"DROP TRIGGER refuse ON {table}")
    await desk.register()
    assert rows(dsn, COUNTS) == [(1, 1, 1, 1)]


async def test_a_failure_right_before_commit_leaves_nothing_and_the_same_key_runs_anew(desk: Desk, dsn: str) -> None:
    """B1, E4.3."""
    key = {"Idempotency-Key": str(uuid4())}
    failpoints.arm("http.before_commit=raise")
    try:
        assert (await desk.call("POST", "/user", ADA, **key)).status_code == 500
    finally:
        failpoints.arm("")
    assert rows(dsn, COUNTS) == [(0, 0, 0, 0)]
    first, again = [await desk.call("POST", "/user", ADA, **key) for _ in range(2)]
    assert (first.status_code, again.status_code, again.content) == (201, 201, first.content)
    assert again.headers["idempotent-replayed"] == "true"
    assert rows(dsn, COUNTS) == [(1, 1, 1, 1)]


@pytest.mark.parametrize(
    ("now", "zone", "born", "local", "at"),
    [
        ("2026-06-15T06:59:59", "Europe/Warsaw", "1990-06-15", "2026-06-15T09:00:00", "2026-06-15T07:00:00Z"),
        ("2026-06-15T07:00:00", "Europe/Warsaw", "1990-06-15", "2026-06-15T09:00:00", "2026-06-15T07:00:00Z"),
        ("2026-06-15T07:00:01", "Europe/Warsaw", "1990-06-15", "2027-06-15T09:00:00", "2027-06-15T07:00:00Z"),
        ("2026-12-31T18:00:00", "Pacific/Kiritimati", "1990-01-01", "2027-01-01T09:00:00", "2026-12-31T19:00:00Z"),
        ("2026-02-01T00:00:00", "UTC", "1988-02-29", "2026-02-28T09:00:00", "2026-02-28T09:00:00Z"),
        ("2027-03-01T00:00:00", "UTC", "1988-02-29", "2028-02-29T09:00:00", "2028-02-29T09:00:00Z"),
        ("2011-12-01T00:00:00", "Pacific/Apia", "1990-12-30", "2011-12-30T09:00:00", "2011-12-30T10:00:00Z"),
    ],
)
async def test_the_first_birthday_by_the_rule(
    desk: Desk, clock: BusinessClock, now: str, zone: str, born: str, local: str, at: str
) -> None:
    """B2: over HTTP; the rule itself is tested in every zone elsewhere."""
    clock.freeze(datetime.fromisoformat(now).replace(tzinfo=UTC))
    event = (await desk.register(timezone=zone, dateOfBirth=born))["nextBirthdayEvent"]
    assert (event["targetLocal"], event["targetUtc"]) == (local, at)


async def test_who_is_born_today_is_welcome_and_gets_the_first_message_in_a_year(
    desk: Desk, clock: BusinessClock
) -> None:
    """B1: by the calendar of where they live: it is the second of May already in Kiritimati."""
    clock.freeze(datetime(2026, 5, 1, 11, tzinfo=UTC))
    made = await desk.register(dateOfBirth="2026-05-02", timezone="Pacific/Kiritimati")
    assert made["nextBirthdayEvent"]["targetLocal"] == "2027-05-02T09:00:00"
    refused = await desk.call("POST", "/user", ADA | {"dateOfBirth": "2026-05-02"})
    assert (refused.status_code, refused.json()["type"]) == (400, "urn:duly:problem:not-born-yet")


# -- bad input --------------------------------------------------------------------------------------------------------


BAD: list[tuple[str, Any, str]] = [
    ("firstName", "", "$.firstName"),
    ("firstName", "   ", "$.firstName"),
    ("firstName", "\u200b\ufeff\u3164", "$.firstName"),
    ("firstName", "a\nb", "$.firstName"),
    ("firstName", "x" * 201, "$.firstName"),
    ("firstName", None, "$.firstName"),
    ("firstName", 7, "$.firstName"),
    ("lastName", "a\u0000b", "$.lastName"),
    ("lastName", ["x"], "$.lastName"),
    ("dateOfBirth", "1899-12-31", "$.dateOfBirth"),
    ("dateOfBirth", "0001-01-01", "$.dateOfBirth"),
    ("dateOfBirth", "1990-02-29", "$.dateOfBirth"),
    ("dateOfBirth", "1990-13-01", "$.dateOfBirth"),
    ("dateOfBirth", "1990-6-15", "$.dateOfBirth"),
    ("dateOfBirth", "15.06.1990", "$.dateOfBirth"),
    ("dateOfBirth", "1990-06-15T00:00:00", "$.dateOfBirth"),
    ("dateOfBirth", "１９９０-06-15", "$.dateOfBirth"),
    ("dateOfBirth", 645_000_000, "$.dateOfBirth"),
    ("dateOfBirth", 7_466 * 86_400, "$.dateOfBirth"),  # midnight of 11 June 1990, in seconds
    ("dateOfBirth", 1e308, "$.dateOfBirth"),
    ("dateOfBirth", "", "$.dateOfBirth"),
    ("timezone", "CET+1", "$.timezone"),
    ("timezone", "+02:00", "$.timezone"),
    ("timezone", "europe/warsaw", "$.timezone"),
    ("timezone", "../../etc/passwd", "$.timezone"),
    ("timezone", "Europe/Warsaw\u0000", "$.timezone"),
    ("timezone", "x" * 100_000, "$.timezone"),
    ("timezone", "localtime", "$.timezone"),
    ("timezone", {"name": "UTC"}, "$.timezone"),
    ("id", "00000000-0000-0000-0000-000000000000", "$.id"),
    ("version", 7, "$.version"),
]


@pytest.mark.parametrize(("field", "given", "where"), BAD)
async def test_bad_input_is_400_and_says_where(desk: Desk, dsn: str, field: str, given: Any, where: str) -> None:
    """B1: for POST and for PUT; nothing is written, and no value is repeated."""
    user_id = (await desk.register())["user"]["id"]
    before = rows(dsn, COUNTS)
    for answer in (
        await desk.call("POST", "/user", ADA | {field: given}),
        await desk.call("PUT", f"/user/{user_id}", {field: given}),
    ):
        assert answer.status_code == 400, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        problem = answer.json()
        assert (problem["status"], problem["type"]) == (400, "urn:duly:problem:invalid")
        assert where in [fault["path"] for fault in problem["errors"]]
        assert len(answer.content) < 2_000
    assert rows(dsn, COUNTS) == before


@pytest.mark.parametrize("field", sorted(ADA))
async def test_what_is_missing_is_400(desk: Desk, field: str) -> None:
    """B1."""
    answer = await desk.call("POST", "/user", {name: given for name, given in ADA.items() if name != field})
    assert (answer.status_code, answer.json()["errors"][0]["path"]) == (400, f"$.{field}")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"a":' * 500, b'{"firstName": "\\ud800"}', b"\xff"])
async def test_what_is_no_object_is_400(desk: Desk, body: bytes) -> None:
    """B1, FAULTS."""
    headers = desk.right | {"Content-Type": "application/json"}
    for method, path in (("POST", "/user"), ("PUT", f"/user/{uuid4()}")):
        answer = await desk.api.client.request(method, path, content=body, headers=headers)
        assert answer.status_code == 400, answer.text


async def test_a_typing_error_in_a_zone_gets_a_suggestion(desk: Desk) -> None:
    """B1: with the reason."""
    answer = await desk.call("POST", "/user", ADA | {"timezone": "Europe/Warsow"})
    assert "did you mean 'Europe/Warsaw'?" in answer.json()["errors"][0]["detail"]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_an_id_that_is_none_is_400_and_one_of_nobody_404(desk: Desk, method: str) -> None:
    """B1, B5."""
    body = {"firstName": "X"} if method == "PUT" else None
    assert (await desk.call(method, "/user/nobody", body)).status_code == 400
    answer = await desk.call(method, f"/user/{uuid4()}", body)
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:duly:problem:user-not-found")


# -- changing ---------------------------------------------------------------------------------------------------------


async def test_each_change_is_a_fact_of_its_own_with_old_and_new(desk: Desk, dsn: str, clock: BusinessClock) -> None:
    """B5: and the version grows once for each request."""
    user_id = (await desk.register())["user"]["id"]
    clock.advance(minutes=1)
    answer = await desk.change(user_id, firstName="Augusta", dateOfBirth="1990-06-16", timezone="Asia/Tokyo")
    assert answer.status_code == 200
    shown = answer.json()
    assert (shown["firstName"], shown["lastName"]) == ("Augusta", "Lovelace")
    assert (shown["version"], shown["updatedAt"]) == (2, "2026-05-01T12:01:00Z")
    assert (await desk.call("GET", f"/user/{user_id}")).json() == shown
    assert emitted(dsn, user_id)[1:] == [
        ("UserRenamed", {"user_id": user_id, "first_name": "Augusta", "last_name": "Lovelace"}),
        (
            "UserBirthdayChanged",
            {"user_id": user_id, "old": "1990-06-15", "new": "1990-06-16", "timezone": "Asia/Tokyo"},
        ),
        ("UserTimezoneChanged", {"user_id": user_id, "old": "Europe/Warsaw", "new": "Asia/Tokyo"}),
    ]


@pytest.mark.parametrize("changes", [{name: given} for name, given in ADA.items()] + [ADA])
async def test_what_is_the_same_already_is_no_news(
    desk: Desk, dsn: str, clock: BusinessClock, changes: dict[str, str]
) -> None:
    """B5: no event, no new version."""
    user = (await desk.register())["user"]
    clock.advance(minutes=1)
    answer = await desk.change(user["id"], **changes)
    assert (answer.status_code, answer.json()) == (200, user)
    assert len(emitted(dsn, user["id"])) == 1


async def test_a_change_of_nothing_is_400(desk: Desk) -> None:
    """B5: at least one of the four."""
    user_id = (await desk.register())["user"]["id"]
    answer = await desk.change(user_id)
    assert answer.status_code == 400
    assert "firstName, lastName, dateOfBirth or timezone" in answer.json()["errors"][0]["detail"]


async def test_a_date_in_the_future_is_400_by_the_zone_that_comes_with_it(desk: Desk, dsn: str) -> None:
    """B5: it is noon of the first of May in UTC."""
    user_id = (await desk.register())["user"]["id"]
    assert (await desk.change(user_id, dateOfBirth="2026-05-02")).status_code == 400
    answer = await desk.change(user_id, dateOfBirth="2026-05-02", timezone="Pacific/Kiritimati")
    assert answer.status_code == 200
    answer = await desk.change(user_id, timezone="Pacific/Pago_Pago")  # where it is the first: a move is no birth
    assert answer.status_code == 200


async def test_users_never_touches_what_is_planned(desk: Desk, dsn: str) -> None:
    """B5: the message moves when the fact is heard of, not before."""
    made = await desk.register()
    before = rows(dsn, "SELECT * FROM birthdays.events")
    await desk.change(made["user"]["id"], timezone="Asia/Tokyo", dateOfBirth="1990-07-01")
    assert rows(dsn, "SELECT * FROM birthdays.events") == before


# -- leaving ----------------------------------------------------------------------------------------------------------


async def test_who_leaves_is_gone_with_what_was_planned_in_one_commit(desk: Desk, dsn: str) -> None:
    """B1: 204 once, 404 then."""
    user_id = (await desk.register())["user"]["id"]
    await desk.register()
    answer = await desk.call("DELETE", f"/user/{user_id}")
    assert (answer.status_code, answer.content) == (204, b"")
    assert rows(dsn, COUNTS) == [(1, 1, 1, 3)]
    assert emitted(dsn, user_id)[-1] == ("UserDeleted", {"user_id": user_id})
    for method in ("GET", "DELETE"):
        assert (await desk.call(method, f"/user/{user_id}")).status_code == 404
    assert (await desk.call("GET", f"/user/{user_id}/birthdays")).status_code == 404


async def test_a_deletion_that_fails_leaves_everything(desk: Desk, dsn: str) -> None:
    """B1."""
    user_id = (await desk.register())["user"]["id"]
    failpoints.arm("http.before_commit=raise")
    try:
        assert (await desk.call("DELETE", f"/user/{user_id}")).status_code == 500
    finally:
        failpoints.arm("")
    assert rows(dsn, COUNTS) == [(1, 1, 1, 1)]


async def test_the_same_key_deletes_once_and_gets_the_same_answer(desk: Desk, dsn: str) -> None:
    """E4.2."""
    user_id = (await desk.register())["user"]["id"]
    key = {"Idempotency-Key": "leave"}
    answers = [await desk.call("DELETE", f"/user/{user_id}", **key) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [204, 204]
    assert answers[1].headers["idempotent-replayed"] == "true"


# -- birthdays --------------------------------------------------------------------------------------------------------


async def test_a_users_messages_are_listed_the_newest_first(desk: Desk, dsn: str, clock: BusinessClock) -> None:
    """B4: how each stands, and how late it came; in pages, by year."""
    made = await desk.register()
    user_id = made["user"]["id"]
    rows(
        dsn,
        """INSERT INTO birthdays.events (id, user_id, year, target_local, timezone, target_utc, status, processing_at,
               executed_at, failure_reason, created_at, updated_at)
           SELECT gen_random_uuid(), %(id)s, y, make_timestamp(y, 6, 15, 9, 0, 0), 'Europe/Warsaw',
                  make_timestamptz(y, 6, 15, 7, 0, 0, 'UTC'), CASE WHEN y = 2024 THEN 'FAILED' ELSE 'COMPLETED' END,
                  make_timestamptz(y, 6, 15, 7, 0, 0, 'UTC'),
                  CASE WHEN y <> 2024 THEN make_timestamptz(y, 6, 15, 8, 0, 1.5, 'UTC') END,
                  CASE WHEN y = 2024 THEN 'the webhook answered 404' END, duly.now(), duly.now()
           FROM generate_series(2023, 2025) AS y""",
        {"id": user_id},
    )
    page = (await desk.call("GET", f"/user/{user_id}/birthdays")).json()
    assert [(item["year"], item["status"]) for item in page["items"]] == [
        (2026, "PENDING"), (2025, "COMPLETED"), (2024, "FAILED"), (2023, "COMPLETED")
    ]  # fmt: skip
    assert page["next"] is None
    assert page["items"][0] == made["nextBirthdayEvent"] | {
        "year": 2026, "executedAt": None, "failureReason": None, "lateSeconds": None
    }  # fmt: skip
    assert (page["items"][1]["executedAt"], page["items"][1]["lateSeconds"]) == ("2025-06-15T08:00:01.500000Z", 3601)
    assert page["items"][2]["failureReason"] == "the webhook answered 404"
    first = (await desk.call("GET", f"/user/{user_id}/birthdays?limit=3")).json()
    assert ([item["year"] for item in first["items"]], first["next"]) == ([2026, 2025, 2024], 2024)
    rest = (await desk.call("GET", f"/user/{user_id}/birthdays?limit=3&before={first['next']}")).json()
    assert ([item["year"] for item in rest["items"]], rest["next"]) == ([2023], None)


@pytest.mark.parametrize("query", ["limit=0", "limit=201", "before=0", "before=next", "before=10000", "limit=x"])
async def test_a_page_that_cannot_be_is_400(desk: Desk, query: str) -> None:
    """B1."""
    user_id = (await desk.register())["user"]["id"]
    assert (await desk.call("GET", f"/user/{user_id}/birthdays?{query}")).status_code == 400


# -- statements and schema --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "most"), [("register", 5), ("change", 4), ("same", 2), ("read", 1), ("delete", 5), ("birthdays", 2)]
)
async def test_each_request_sends_a_known_number_of_statements(desk: Desk, db: Database, step: str, most: int) -> None:
    """A gate: whoever adds a statement changes a number here. One of them asks for the transaction's id."""
    user_id = (await desk.register())["user"]["id"]
    async with counting(db) as sent:
        match step:
            case "register":
                await desk.register()
            case "change":
                await desk.change(user_id, timezone="Asia/Tokyo", firstName="X", dateOfBirth="1999-01-01")
            case "same":
                await desk.change(user_id, firstName="Ada")
            case "read":
                await desk.call("GET", f"/user/{user_id}")
            case "delete":
                await desk.call("DELETE", f"/user/{user_id}")
            case _:
                await desk.call("GET", f"/user/{user_id}/birthdays")
    assert len(sent) == most, sent


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("users.users SET first_name = ''", "users_are_named"),
        ("users.users SET date_of_birth = '1899-12-31'", "users_birth_is_plausible"),
        ("users.users SET timezone = ''", "users_zone_is_named"),
        ("users.users SET version = 0", "users_version_counts_up"),
        ("birthdays.events SET status = 'LOST', processing_at = target_utc", "events_status_is_known"),
        ("birthdays.events SET year = 2027", "events_year_is_the_birthdays"),
        ("birthdays.events SET target_local = '2026-06-15 10:00'", "events_are_at_nine"),
        ("birthdays.events SET target_utc = '2026-06-18'", "events_target_is_one_moment"),
        ("birthdays.events SET version = 0", "events_version_counts_up"),
        ("birthdays.events SET processing_at = target_utc", "events_status_is_explained"),
        ("birthdays.events SET status = 'PROCESSING'", "events_status_is_explained"),
        (
            "birthdays.events SET status = 'PROCESSING', processing_at = target_utc - interval '1 second'",
            "events_are_never_early",
        ),
        (
            "birthdays.events SET status = 'COMPLETED', processing_at = target_utc, executed_at = '2026-06-15'",
            "events_are_never_early",
        ),
        ("birthdays.events SET status = 'COMPLETED', processing_at = target_utc", "events_status_is_explained"),
        ("birthdays.events SET status = 'FAILED', processing_at = target_utc", "events_status_is_explained"),
        (
            "birthdays.events SET status = 'FAILED', processing_at = target_utc, failure_reason = ''",
            "events_reason_is_short",
        ),
    ],
)
async def test_the_database_refuses_what_is_impossible(desk: Desk, dsn: str, change: str, constraint: str) -> None:
    """B2, B3: also for somebody with psql."""
    await desk.register()
    with pytest.raises(psycopg.errors.IntegrityError) as refused:
        rows(dsn, f"UPDATE {change}")
    assert refused.value.diag.constraint_name == constraint


@pytest.mark.parametrize(
    ("year", "status", "constraint"),
    [(2026, "PENDING", "events_one_a_year"), (2027, "PENDING", "events_one_pending")],
)
async def test_one_message_a_year_and_one_pending(
    desk: Desk, dsn: str, year: int, status: str, constraint: str
) -> None:
    """B2."""
    user_id = UUID((await desk.register())["user"]["id"])
    with pytest.raises(psycopg.errors.UniqueViolation) as refused:
        rows(
            dsn,
            """INSERT INTO birthdays.events
                   (id, user_id, year, target_local, timezone, target_utc, created_at, updated_at)
               VALUES (gen_random_uuid(), %(id)s, %(year)s, make_timestamp(%(year)s, 1, 1, 9, 0, 0), 'UTC',
                       make_timestamptz(%(year)s, 1, 1, 9, 0, 0, 'UTC'), now(), now())""",
            {"id": user_id, "year": year},
        )
    assert refused.value.diag.constraint_name == constraint
    assert value(dsn, "SELECT count(*) FROM birthdays.events") == 1


async def test_two_changes_at_once_are_both_kept(desk: Desk, dsn: str) -> None:
    """B5: one waits for the other; neither is lost."""
    import asyncio

    user_id = (await desk.register())["user"]["id"]
    answers = await asyncio.gather(
        *(desk.change(user_id, **{field: f"N{n}"}) for n in range(10) for field in ("firstName", "lastName"))
    )
    assert {answer.status_code for answer in answers} == {200}
    final = (await desk.call("GET", f"/user/{user_id}")).json()
    assert final["version"] == 21
    facts = [payload for kind, payload in emitted(dsn, user_id) if kind == "UserRenamed"]
    assert (facts[-1]["first_name"], facts[-1]["last_name"]) == (final["firstName"], final["lastName"])
    assert len(facts) == 20


async def test_the_clock_of_the_tests_is_the_databases(desk: Desk, clock: BusinessClock) -> None:
    """A year later the same registration is planned a year later."""
    clock.freeze(SPRING + timedelta(days=365))
    assert (await desk.register())["nextBirthdayEvent"]["targetLocal"] == "2027-06-15T09:00:00"
