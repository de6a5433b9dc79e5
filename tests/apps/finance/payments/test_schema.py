"""What the tables refuse, written as attacks in plain SQL: no code can forget it."""

from __future__ import annotations

import re

import psycopg
import pytest

from apps.finance.payments.model import CHANGES, WAITS
from apps.finance.payments.tables import history
from tests.apps.finance.payments.acting import Payers
from tests.support import rows

CHANGE = "UPDATE payments.payments SET version = version + 1, "


@pytest.mark.parametrize(
    ("attack", "constraint"),
    [
        (CHANGE + "state = 'PAID', delivery = NULL", "payments_state_is_known"),
        (CHANGE + "transaction_id = NULL", "this never changes"),
        (CHANGE + "transaction_id = gen_random_uuid()", "this never changes"),
        (CHANGE + "amount = 1", "this never changes"),
        (CHANGE + "to_account_id = gen_random_uuid()", "this never changes"),
        (CHANGE + "bank_key = gen_random_uuid()", "this never changes"),
        ("UPDATE payments.payments SET reason = NULL", "this never changes"),
        (CHANGE + "state = 'PERMANENTLY_FAILED', delivery = NULL, reason = 'x'", "payments_over_are_given_back"),
        (CHANGE + "reversal_id = gen_random_uuid()", "payments_over_are_given_back"),
        (CHANGE + "state = 'UNKNOWN', delivery = NULL", "payments_state_is_explained"),
        (CHANGE + "state = 'UNKNOWN', reason = 'x'", "payments_delivery_is_processing"),
        (CHANGE + "state = 'FAILED', delivery = NULL, reason = 'x', retryable = true", "payments_retry_has_its_time"),
        (CHANGE + "state = 'FAILED', delivery = NULL, reason = 'x'", "payments_under_way_are_posted"),
        (CHANGE + "next_retry_at = duly.now()", "payments_retry_has_its_time"),
        (CHANGE + "attempts = 1", "payments_attempt_has_its_time"),
        (CHANGE + "attempts = 8, sent_at = duly.now()", "payments_attempts_are_few"),
        (CHANGE + "delivery = 'UNDER_WAY'", "payments_delivery_is_processing"),
        (CHANGE + "updated_at = created_at - interval '1 day'", "payments_time_goes_on"),
        ("DELETE FROM payments.payments", "refused"),
        ("TRUNCATE payments.payments CASCADE", "refused"),
        ("UPDATE payments.history SET cause = 'x'", "refused"),
        ("DELETE FROM payments.history", "refused"),
        ("TRUNCATE payments.history", "refused"),
        ("INSERT INTO payments.history SELECT payment_id, 2, at, 'COMPLETED', 'PROCESSING', 'x' FROM payments.history",
         "history_change_is_possible"),
        ("INSERT INTO payments.history SELECT payment_id, 2, at, NULL, 'PROCESSING', 'x' FROM payments.history",
         "history_begins_once"),
    ],
)  # fmt: skip
async def test_what_is_impossible_is_refused(payers: Payers, dsn: str, attack: str, constraint: str) -> None:
    await payers.pay("10.00")
    with pytest.raises(psycopg.Error, match=constraint):
        rows(dsn, attack)


async def test_what_is_complete_stays_so(payers: Payers, dsn: str) -> None:
    made = await payers.pay("10.00")
    await payers.call(made["id"], "SETTLED")
    with pytest.raises(psycopg.Error, match="this never changes"):
        rows(dsn, CHANGE + "state = 'PROCESSING'")


async def test_what_is_due_again_is_looked_for_every_minute(dsn: str) -> None:
    """F7."""
    assert rows(dsn, "SELECT cron FROM duly.schedules WHERE name = 'payments.retry'") == [("* * * * *",)]


def test_the_history_allows_exactly_the_changes_of_the_model() -> None:
    (rule,) = [str(one.sqltext) for one in history.constraints if one.name == "history_change_is_possible"]  # type: ignore[attr-defined]  # a CheckConstraint
    listed = set(re.findall(r"'([A-Z_]*>[A-Z_]+)'", rule))
    assert listed == {f"{was.value if was else ''}>{becomes.value}" for was, becomes in CHANGES}
    assert len(WAITS) + 1 == 7, "the constraint payments_attempts_are_few says so, too"
