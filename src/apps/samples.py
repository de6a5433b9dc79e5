"""Sample data, so that a fresh ``make run`` is alive: suppliers err, products change hands, one job fails."""

from __future__ import annotations

import random
from uuid import UUID

from sqlalchemy import text

from apps.quality import service as quality
from apps.quality.model import Severity
from apps.transfers import service as transfers
from duly import Done, Duly, JobContext, Tx
from duly.schedules.edit import seed_schedule

ARE_THERE = text("SELECT EXISTS (SELECT 1 FROM quality.nonconformities)")
MAKE_OLD = text("""
UPDATE transfers.transfers SET created_at = old.moment, updated_at = old.moment
FROM (SELECT duly.now() - interval '73 hours' AS moment) AS old WHERE id = :id
""")
FIND_OPEN = text("""
SELECT id FROM quality.nonconformities WHERE status = 'OPEN' AND created_by = 'sample-engineer' ORDER BY id LIMIT 1
""")
COUNT_ALL = text("SELECT count(*) FROM quality.nonconformities")
MOST_ROWS = 2_000
FINDINGS = [
    ("ACME-7", Severity.HIGH, "Burrs on the flange, lot 4711"),
    ("ACME-7", Severity.LOW, "Label in the wrong language"),
    ("NORDIC-2", Severity.CRITICAL, "Torque below the specification on 3 of 20 samples"),
    ("NORDIC-2", Severity.MEDIUM, "Two days late, without notice"),
    ("KOWAL-1", Severity.MEDIUM, "Certificate of the alloy is missing"),
]
PRODUCTS = ["Lathe 12", "Espresso machine", "Forklift, yellow", "Cargo bicycle"]


def register(app: Duly) -> None:
    """Add the samples; their schedules are made with the data, in a sandbox only."""
    app.samples = load

    @app.job("samples.live", max_retries=0)
    async def live(ctx: JobContext, tx: Tx) -> Done:
        if (await tx.execute(COUNT_ALL)).scalar_one() >= MOST_ROWS:
            return Done("there are enough of them")
        supplier, severity, description = random.choice(FINDINGS)  # noqa: S311 - sample data
        nc = await quality.create_nc(
            tx, supplier_id=supplier, severity=severity, description=description, actor="sample-engineer"
        )
        oldest: UUID = (await tx.execute(FIND_OPEN)).scalar_one()
        await quality.close_nc(tx, oldest, actor="sample-manager")
        return Done(f"{supplier} erred again ({nc.id}); {oldest} was closed")

    @app.job("samples.fail", max_retries=1, backoff=[5])
    async def fail(ctx: JobContext) -> None:
        raise RuntimeError("this job always fails, so that the dead letters are not empty")


async def load(tx: Tx) -> None:
    """Write everything once, through the services."""
    if (await tx.execute(ARE_THERE)).scalar_one():
        return
    for supplier, severity, description in FINDINGS:
        nc = await quality.create_nc(
            tx, supplier_id=supplier, severity=severity, description=description, actor="sample-engineer"
        )
    await quality.close_nc(tx, nc.id, actor="sample-manager")
    products = [await transfers.register_product(tx, name=name, owner="alice") for name in PRODUCTS]
    await transfers.request_service(tx, products[0].id, by="alice", description="Spindle makes a noise")
    await transfers.start_transfer(tx, products[0].id, by="alice", to="bob")
    accepted = await transfers.start_transfer(tx, products[1].id, by="alice", to="bob")
    await transfers.accept_transfer(tx, accepted.id, by="bob")
    overdue = await transfers.start_transfer(tx, products[2].id, by="alice", to="carol")
    await tx.execute(MAKE_OLD, {"id": overdue.id})
    for name, cron in (("samples.live", "* * * * *"), ("samples.fail", "*/30 * * * *")):
        await seed_schedule(
            tx, name=name, cron=cron, timezone="UTC", max_retries=1, misfire="skip", payload={}, actor="samples"
        )
