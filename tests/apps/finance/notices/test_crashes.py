"""The consumer that tells the outside is killed at every step: each notice is there once (F13, FAULTS)."""

from __future__ import annotations

from functools import partial

import pytest

from apps.finance.ledger import service as ledger
from duly.db import Database
from duly.outbox.relay import Relay
from tests.apps.finance.compliance.acting import post
from tests.apps.finance.compliance.test_crashes import kill_worker
from tests.apps.finance.payments.acting import Payers, add_rule, do
from tests.engine.jobs.witness import expire_leases
from tests.support import rows

pytestmark = pytest.mark.timeout(240)
TOLD = """
SELECT type, aggregate_id FROM duly.event_log WHERE type IN ('payment.declined', 'transaction.returned') ORDER BY 1, 2
"""


@pytest.mark.parametrize(
    "point",
    ["worker.claimed", "worker.before_handler", "inbox.marked", "worker.handler_done", "settle.written",
     "worker.before_commit", "worker.committed"],
)  # fmt: skip
async def test_wherever_the_consumer_is_killed_each_notice_is_told_once(
    payers: Payers, db: Database, dsn: str, point: str
) -> None:
    """A rejection and a reversal, in one batch: neither is lost, and none is told twice."""
    await add_rule(db, {"field": "amount", "op": "eq", "value": "13.00"}, "REJECT")
    rejected = (await payers.pay("13.00"))["id"]
    posted = await do(db, partial(post, debit=payers.ann, credit=payers.ben, amount="5.00"))
    await do(db, partial(ledger.reverse, transaction_id=posted, reason="typo"))
    await Relay(db).run_once()
    await kill_worker(dsn, point, "consumer:notices")
    expected = sorted([("payment.declined", rejected), ("transaction.returned", str(posted))])
    assert rows(dsn, TOLD) == (expected if point == "worker.committed" else [])
    for _ in range(3):
        expire_leases(dsn)
        rows(dsn, "UPDATE duly.jobs SET run_at = duly.now() WHERE waits = 'retry'")
        await payers.run()
    assert rows(dsn, TOLD) == expected
