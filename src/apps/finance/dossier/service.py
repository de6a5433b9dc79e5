"""Making a dossier: everything of one moment, hashed and signed; and who got it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from apps.finance.compliance.model import OwnPayment
from apps.finance.dossier import reading
from apps.finance.dossier.model import compose, fit
from apps.finance.dossier.signing import Signer
from apps.finance.ledger.store_audit import begin_snapshot
from apps.finance.payments import service as payments
from apps.shared.canonical import plain
from duly import Tx
from duly.operate import write_audit


async def make_dossier(tx: Tx, payment_id: UUID, signer: Signer, *, reader: str | None = None) -> dict[str, Any]:
    """The dossier of a payment; PaymentNotFound, or OwnPayment when its reader has initiated it.

    The transaction must be fresh: all of it is read as of one moment.
    """
    await begin_snapshot(tx)
    payment = await payments.find_payment(tx, payment_id)
    if payment.initiated_by == reader:
        raise OwnPayment("the payment is your own: somebody else reads its dossier")
    now = (await tx.execute(reading.READ_NOW)).scalar_one()
    subject = reading.Subject(payment, now)
    cases = await reading.read_cases(tx, subject)
    events = await reading.read_events(tx, subject, cases)
    sections = [
        await reading.read_payment(subject),
        await reading.read_history(tx, subject),
        await reading.read_decisions(tx, subject, cases.decision_ids),
        await reading.read_postings(tx, subject),
        await reading.read_holds(tx, subject),
        events.section,
        await reading.read_deliveries(tx, subject, events),
        await reading.read_callbacks(tx, subject),
        cases.alerts,
        cases.cases,
        cases.timelines,
    ]
    made = compose(payment_id, plain(now), [fit(section) for section in sections])
    return {**made, "signature": signer.sign(made["manifest"]["head"])}


async def record_export(tx: Tx, made: Mapping[str, Any], *, actor: str) -> None:
    """Who got a dossier, and which one: its head. In a transaction of its own, for what makes it only reads."""
    sections = made["manifest"]["sections"]
    await write_audit(
        tx, actor=actor, action="dossier.exported", subject=f"dossier:{made['paymentId']}",
        after={"head": made["manifest"]["head"], "complete": all(one["complete"] for one in sections)},
    )  # fmt: skip
