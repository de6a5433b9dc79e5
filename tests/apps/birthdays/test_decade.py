"""Two years of sixty people's birthdays, with everything that can happen; ten of a thousand are ``make decade``."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from apps.birthdays import model, service
from apps.birthdays.gateways import Webhook
from duly.zones import first_instant
from tests.apps.birthdays.decade import run_decade

TRICKY = [
    "Pacific/Apia", "Pacific/Kiritimati", "Pacific/Pago_Pago", "Europe/Warsaw", "America/New_York", "Asia/Kathmandu",
    "America/Caracas", "Australia/Lord_Howe", "Asia/Pyongyang", "Africa/Casablanca", "America/Los_Angeles", "UTC",
]  # fmt: skip


@pytest.mark.timeout(240)
async def test_two_years_of_sixty_people_come_out_as_they_must(dsn: str, tmp_path: Path) -> None:
    """B1 to B7: each birthday exactly once, at nine by the written rule, never early, and late ones say by how much."""
    figures = await run_decade(dsn, tmp_path, people=60, years=2, seed=3)
    assert figures.delivered >= 80
    assert figures.late
    assert figures.downtimes
    assert figures.restarts
    assert figures.deeds > 60


@pytest.mark.timeout(240)
async def test_the_year_in_which_samoa_skipped_a_day(dsn: str, tmp_path: Path) -> None:
    """B2: in the zones where the most is odd; the first of them was born on that day."""
    figures = await run_decade(dsn, tmp_path, people=36, years=1, seed=5, zones=TRICKY, first_year=2011)
    assert figures.delivered >= 30


async def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _forget_to_plan(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(service, "_plan_next_year", _nothing)


def _ignore_changes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(service, "_reschedule", _nothing)


def _send_twice(patch: pytest.MonkeyPatch) -> None:
    once = Webhook.send

    async def twice(self: Webhook, delivery: model.Delivery) -> None:
        await once(self, delivery)
        await once(self, delivery)

    patch.setattr(Webhook, "send", twice)


def _celebrate_in_march(patch: pytest.MonkeyPatch) -> None:
    real = model.birthday_in
    patch.setattr(
        model, "birthday_in", lambda born, year: real(born, year) if (born.month, born.day) != (2, 29)
        else date(year, 3, 1)
    )  # fmt: skip


def _be_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model, "first_instant", lambda local, zone: first_instant(local, zone) - timedelta(minutes=15))


def _plan_by_now(patch: pytest.MonkeyPatch) -> None:
    """A date that was corrected counts from the year that had its message: it would come twice."""
    patch.setattr(
        service, "next_target", lambda born, zone, *, now, after_year=0: model.next_target(born, zone, now=now)
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("sabotage", "noticed"),
    [
        (_forget_to_plan, "never came"),
        (_ignore_changes, "zone is"),
        (_send_twice, "came 2 times"),
        (_celebrate_in_march, "local is"),
        (_be_early, "it came early"),
        (_plan_by_now, "runs that failed"),
    ],
)
async def test_the_comparison_can_fail(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotage: Any, noticed: str
) -> None:
    """A checker that cannot fail proves nothing: each rule broken by itself is noticed."""
    sabotage(monkeypatch)
    with pytest.raises(AssertionError, match=noticed):
        await run_decade(dsn, tmp_path, people=7, years=2, seed=1)
