"""Who explains a case: what is plugged in, if it is quick and sound, and otherwise what is built in; never an error."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from fastapi import FastAPI

from apps.finance.compliance.api import create_router
from apps.finance.compliance.copilot import MOST_CHARACTERS, Brief, Explainer, clean, make_brief, tell
from apps.finance.compliance.model import Alert, Case, Kind, Severity, Status
from duly.clock import monotonic
from duly.http import install
from tests.apps.finance.compliance.acting import Office
from tests.support import value

NOW = datetime(2033, 1, 1, tzinfo=UTC)
CASE = Case(
    uuid4(), Kind.AML, Status.OPEN, Severity.MEDIUM, uuid4(), None, uuid4(), Decimal("60.00"), "PLN", None, False, NOW,
    1, NOW, NOW,
)  # fmt: skip
TRACE = [
    {
        "ruleId": str(uuid4()), "version": 1, "name": "Large", "outcome": "true",
        "conditions": {
            "all": [
                {"field": "amount", "op": "gte", "value": "50.00", "outcome": "true", "fact": "60.00"},
                {"field": "moved24h", "op": "gt", "value": "100.00", "outcome": "true", "fact": "160.00"},
                {"field": "reference", "op": "contains", "value": "Jan K.", "outcome": "true", "fact": "rent Jan K."},
                {"field": "currency", "op": "eq", "value": "EUR", "outcome": "false", "fact": "PLN"},
            ],
            "outcome": "true",
        },
    }
]  # fmt: skip
ALERT = Alert(
    CASE.alert_id, Kind.AML, None, CASE.transaction_id, uuid4(), "aml-screening", 1, "REVIEW", Severity.MEDIUM,
    {"amount": "60.00", "reference": "rent Jan K.", "initiatedBy": "jan@example.com"},
    [{"ruleId": "r", "version": 1, "name": "Large", "decision": "REVIEW", "score": 0, "reason": ""}],
    [{"ruleId": "r", "version": 1, "name": "Other", "lacking": {"moved7d": "missing"}}], TRACE, NOW,
)  # fmt: skip


class Remembering:
    """A copilot that says in which loop it runs."""

    name = "remembering"

    def __init__(self) -> None:
        self.loops: list[asyncio.AbstractEventLoop] = []

    async def explain(self, brief: Brief) -> str:
        self.loops.append(asyncio.get_running_loop())
        return "It is large."


async def test_each_call_has_a_loop_of_its_own_which_ends_with_it() -> None:
    """As the how-to says: whoever keeps a client from call to call would find its loop closed."""
    copilot = Remembering()
    explainer = Explainer(copilot, budget_seconds=30)
    for _ in range(2):
        assert (await explainer.explain(CASE, ALERT)).source == "remembering"
    assert len(set(map(id, copilot.loops))) == 2
    assert all(loop.is_closed() for loop in copilot.loops)
    assert asyncio.get_running_loop() not in copilot.loops


class Plugged:
    """A copilot that does what it is told."""

    name = "plugged"

    def __init__(self, said: Any = "It is large.", *, seconds: float = 0, blocks: bool = False) -> None:
        self.said, self.seconds, self.blocks = said, seconds, blocks
        self.briefs: list[Brief] = []

    async def explain(self, brief: Brief) -> str:
        """Say it, in time or late."""
        self.briefs.append(brief)
        if self.blocks:
            time.sleep(self.seconds)  # noqa: ASYNC251 - what a bad plug-in does
        elif self.seconds:
            try:
                await asyncio.sleep(self.seconds)
            except asyncio.CancelledError:
                await asyncio.sleep(self.seconds)  # one that does not let go
                raise
        if isinstance(self.said, BaseException):
            raise self.said
        found: str = self.said
        return found


def test_the_built_in_tells_why_from_the_trace_alone() -> None:
    said = tell(make_brief(CASE, ALERT))
    assert "60.00 PLN" in said
    assert "“Large”" in said
    assert "amount is at least 50.00 (60.00)" in said
    assert "moved24h is above 100.00 (160.00)" in said
    assert "moved7d" in said
    assert "EUR" not in said, "what was not true is no reason"
    assert said == tell(make_brief(CASE, ALERT))


def test_no_personal_data_is_sent() -> None:
    """Ids, amounts, counts; what people wrote stays here."""
    sent = str(dataclasses.astuple(make_brief(CASE, ALERT)))
    for secret in ("Jan K.", "rent", "jan@example.com"):
        assert secret not in sent
    assert "reference contains what the rule says" in sent


async def test_what_is_plugged_in_is_heard() -> None:
    said = await Explainer(Plugged()).explain(CASE, ALERT)
    assert (said.text, said.source, said.problem) == ("It is large.", "plugged", None)


@pytest.mark.parametrize(
    ("plugged", "problem"),
    [
        (Plugged(RuntimeError("no")), "failed"),
        (Plugged(SystemExit(1)), "failed"),
        (Plugged(None), "failed"),
        (Plugged(42), "failed"),
        (Plugged(""), "failed"),
        (Plugged("\x00\x1b"), "failed"),
        (Plugged(seconds=30), "too slow"),
        (Plugged(seconds=3, blocks=True), "too slow"),
    ],
)
async def test_one_that_fails_or_is_slow_is_done_without(plugged: Plugged, problem: str) -> None:
    """Also one that blocks its thread, ignores its cancellation, or wants to end the process."""
    began = monotonic()
    said = await Explainer(plugged, budget_seconds=0.3).explain(CASE, ALERT)
    assert monotonic() - began < 2.5
    assert (said.source, said.problem) == ("built-in", problem)
    assert said.text == tell(make_brief(CASE, ALERT))


async def test_few_are_asked_at_once() -> None:
    """Some that never answer cost a bounded number of threads, and nobody any time after that."""
    explainer = Explainer(Plugged(seconds=3, blocks=True), budget_seconds=0.2)
    said = await asyncio.gather(*(explainer.explain(CASE, ALERT) for _ in range(10)))
    assert sorted(one.problem or "" for one in said) == ["busy"] * 6 + ["too slow"] * 4


def test_a_nasty_text_is_cleaned_and_bounded_in_no_time() -> None:
    nasty = "<" * 50_000 + "\u202e\x00\x1b[31m" + "a" * 2_000_000
    began = monotonic()
    assert len(clean(nasty)) <= MOST_CHARACTERS
    assert monotonic() - began < 0.5
    assert clean("  a\u202eb\x00c\x1b[31m\nd\te \ud800 ") == "abc[31m\nd e"


async def test_the_page_is_there_although_the_copilot_is_not(office: Office) -> None:
    """Over HTTP, and no transaction is open while it is asked."""
    _, case = await office.flag("60.00")
    plugged = Plugged(seconds=1.0)
    api = FastAPI()
    install(api, office.db)
    api.state.verifier = office.api.fastapi.state.verifier
    router = create_router(plugged)
    api.include_router(router)
    transport = httpx2.ASGITransport(api)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        asking = asyncio.create_task(client.get(f"/v1/compliance/cases/{case}", headers=office.headers("olga")))
        while not plugged.briefs:
            await asyncio.sleep(0.01)
        open_ones = """SELECT count(*) FROM pg_stat_activity
                       WHERE datname = current_database() AND state LIKE 'idle in transaction%'"""
        assert value(office.dsn, open_ones) == 0
        answer = await asking
    assert answer.status_code == 200, answer.text
    assert answer.json()["explanation"]["source"] == "plugged"


async def test_the_api_explains_by_itself(office: Office) -> None:
    _, case = await office.flag("60.00")
    said = (await office.read(case))["explanation"]
    assert (said["source"], said["problem"]) == ("built-in", None)
    assert "amount is at least 50.00 (60.00)" in said["text"]
