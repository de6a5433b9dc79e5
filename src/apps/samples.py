"""Sample data, so that a fresh ``make run`` is alive: in each context something is under way, and one job fails."""

from __future__ import annotations

import random
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from sqlalchemy import text

from apps.birthdays import service as birthdays
from apps.commerce import service as commerce
from apps.commerce.events import ORDERS
from apps.commerce.model import LAST_NET, PAYMENT_WINDOW, Line, Order
from apps.currencies.service import SYNC
from apps.finance.compliance import service as compliance
from apps.finance.decisions import service as decisions
from apps.finance.decisions.model import Observation
from apps.finance.kyc import service as kyc
from apps.finance.kyc.model import Callback as KycCallback
from apps.finance.kyc.model import Status as KycStatus
from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import AccountType, Direction, NewEntry, Posting, Transaction
from apps.finance.payments import service as payments
from apps.quality import service as quality
from apps.quality.model import Severity
from apps.sandbox import catcher
from apps.transfers import service as transfers
from apps.transfers.events import TOPIC as TRANSFERS
from apps.users import service as users
from duly import Done, Duly, JobContext, Tx, schedule
from duly.db import settings_of
from duly.schedules.edit import seed_schedule
from duly.webhooks import Keyring, create_subscription

ARE_THERE = text("SELECT EXISTS (SELECT 1 FROM quality.nonconformities)")
MAKE_OLD = text("""
UPDATE transfers.transfers SET created_at = old.moment, updated_at = old.moment
FROM (SELECT duly.now() - interval '73 hours' AS moment) AS old WHERE id = :id
""")
READ_NOW = text("SELECT duly.now()")
PLACE_EARLIER = text("""
WITH earlier AS (
    UPDATE commerce.orders SET created_at = at, updated_at = at
    FROM (SELECT duly.now() - make_interval(mins => :minutes) AS at) AS placed WHERE id = :id
    RETURNING id, at
)
UPDATE commerce.payments SET created_at = at, due_at = at + interval '15 minutes'
FROM earlier WHERE order_id = earlier.id
RETURNING due_at
""")
TOUCH_EARLIER = text("""
UPDATE commerce.carts SET created_at = old.moment, touched_at = old.moment
FROM (SELECT duly.now() - interval '25 hours' AS moment) AS old WHERE id = :id
""")
FIND_OPEN = text("""
SELECT id FROM quality.nonconformities WHERE status = 'OPEN' AND created_by = 'sample-engineer' ORDER BY id LIMIT 1
""")
COUNT_ALL = text("SELECT count(*) FROM quality.nonconformities")
MAKE_DUE = text("""
UPDATE birthdays.events SET year = year - 1, target_local = target_local - interval '1 year',
                            target_utc = target_utc - interval '1 year'
WHERE id = :id
""")
MOST_ROWS = 2_000
DEAD_URL = "http://127.0.0.1:65000/hooks"
FINDINGS = [
    ("ACME-7", Severity.HIGH, "Burrs on the flange, lot 4711"),
    ("ACME-7", Severity.LOW, "Label in the wrong language"),
    ("NORDIC-2", Severity.CRITICAL, "Torque below the specification on 3 of 20 samples"),
    ("NORDIC-2", Severity.MEDIUM, "Two days late, without notice"),
    ("KOWAL-1", Severity.MEDIUM, "Certificate of the alloy is missing"),
]
TEA, CUP, KETTLE = (
    Line("tea-assam", 2, Decimal("12.50")),
    Line("cup-blue", 1, Decimal("0.10")),
    Line("kettle", 1, Decimal("249.00")),
)
SCREENING = "payment-screening"
RULES: list[tuple[str, dict[str, Any], str, bool]] = [
    ("Large", {"field": "amount", "op": "gt", "value": "10000.00"}, "REVIEW", True),
    ("Watched payee", {"field": "to", "op": "in", "list": "watched-accounts"}, "REJECT", True),
    ("Many payees", {"field": "payees24h", "op": "gt", "value": 3}, "REVIEW", True),
    ("Stricter limit", {"field": "paid24h", "op": "gt", "value": "5000.00"}, "REVIEW", False),
]
LAUNDERING = "aml-screening"
# What a risk officer begins with: much at once, much in a day from one account, many small ones, and money passed on.
AML_RULES: list[tuple[str, dict[str, Any], str, bool]] = [
    ("Large transaction", {"field": "amount", "op": "gte", "value": "10000.00"}, "REVIEW", True),
    ("Much in a day", {"field": "moved24h", "op": "gt", "value": "15000.00"}, "REVIEW", True),
    (
        "Split into small ones",
        {
            "all": [
                {"field": "transactions24h", "op": "gte", "value": 10},
                {"field": "amount", "op": "lt", "value": "10000.00"},
                {"field": "moved24h", "op": "gte", "value": "10000.00"},
            ]
        },
        "REJECT",
        True,
    ),
    ("Many receivers", {"field": "counterparties7d", "op": "gt", "value": 25}, "REVIEW", False),
]
PAYMENTS = [
    (Decimal("120.00"), "acc-2"), (Decimal("15000.00"), "acc-2"), (Decimal("10.00"), "acc-13"),
    (Decimal("60.00"), "acc-3"), (Decimal("70.00"), "acc-4"),
]  # fmt: skip
# Settled, declined at once, failed later, busy, an answer that is lost, reviewed, and without cover.
PAID = ("25.00", "30.00", "4.01", "12.02", "15.03", "7.04", "11000.00", "99999.00")
PRODUCTS = ["Lathe 12", "Espresso machine", "Forklift, yellow", "Cargo bicycle"]
PEOPLE = [
    ("Ada", "Kowalska", date(1990, 6, 15), "Europe/Warsaw"),
    ("Berta", "Lind", date(1988, 2, 29), "Europe/Stockholm"),
    ("Chidi", "Okafor", date(1979, 12, 31), "Africa/Lagos"),
    ("Daniela", "Rojas", date(1995, 9, 7), "America/Santiago"),
    ("Emeka", "Tau", date(2001, 1, 1), "Pacific/Kiritimati"),
    ("Fiona", "Lord", date(1984, 10, 4), "Australia/Lord_Howe"),
    ("Gita", "Thapa", date(1992, 4, 13), "Asia/Kathmandu"),
    ("Hana", "Sapolu", date(1969, 12, 30), "Pacific/Apia"),
    ("Ivan", "Petrov", date(1958, 3, 8), "Asia/Vladivostok"),
]
BORN_TODAY = [("Julia", "Nowak"), ("Kwame", "Mensah"), ("Regina", "Refuse")]  # the sandbox refuses the last one
# From eleven hours behind UTC to twelve ahead, without summer time: in one of them it is past nine, and not yet ten.
STEADY_ZONES = (
    "Pacific/Pago_Pago", "Pacific/Honolulu", "Pacific/Gambier", "Pacific/Pitcairn", "America/Phoenix",
    "America/Costa_Rica", "America/Bogota", "America/La_Paz", "America/Argentina/Buenos_Aires", "America/Noronha",
    "Atlantic/Cape_Verde", "Africa/Abidjan", "Africa/Lagos", "Africa/Maputo", "Africa/Nairobi", "Asia/Dubai",
    "Asia/Karachi", "Asia/Dhaka", "Asia/Bangkok", "Asia/Singapore", "Asia/Tokyo", "Australia/Brisbane",
    "Pacific/Guadalcanal", "Pacific/Tarawa",
)  # fmt: skip


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
    await _subscribe(tx)
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
    await _register_people(tx)
    await _load_commerce(tx)
    await _load_ledger(tx)
    await _load_decisions(tx)
    await _load_payments(tx)
    await _load_checks(tx)
    for name, cron in (("samples.live", "* * * * *"), ("samples.fail", "*/30 * * * *")):
        await seed_schedule(
            tx, name=name, cron=cron, timezone="UTC", max_retries=1, misfire="skip", payload={}, actor="samples"
        )


async def _subscribe(tx: Tx) -> None:
    """Webhooks to look at: one that the sandbox takes, and one to a port where nobody listens, so that it fails."""
    settings = settings_of(tx)
    if settings.env != "development":  # only there may webhooks go to this machine
        return
    keyring = Keyring.open(settings)
    for url, patterns, description in (
        (
            f"http://127.0.0.1:{settings.port}{catcher.PATH}",
            [ORDERS, TRANSFERS],
            "What is sold, and what changes hands",
        ),
        (DEAD_URL, ["quality.*"], "Nobody listens here: its circuit opens"),
    ):
        await create_subscription(
            tx, settings, keyring, owner="samples", url=url, patterns=patterns, description=description,
            actor="samples",
        )  # fmt: skip


async def _register_people(tx: Tx) -> None:
    """A dozen over the world; for some it was nine o'clock of their birthday some minutes ago."""
    for first, last, born, zone in PEOPLE:
        await _register(tx, first, last, born, zone)
    now: datetime = (await tx.execute(READ_NOW)).scalar_one()
    zone = STEADY_ZONES[(9 + 11 - now.hour) % 24]
    today = now.astimezone(ZoneInfo(zone)).date()
    for first, last in BORN_TODAY:
        event_id = await _register(tx, first, last, today.replace(year=1992), zone)
        await tx.execute(MAKE_DUE, {"id": event_id})


async def _register(tx: Tx, first: str, last: str, born: date, zone: str) -> UUID:
    _, event = await users.register_user(
        tx, first_name=first, last_name=last, date_of_birth=born, timezone=zone, tell=birthdays.plan_first
    )
    return event.id


async def _load_commerce(tx: Tx) -> None:
    """Orders in every state, some that time out while you watch, carts, and the rates of the last week."""
    for customer, line in (("ann", TEA), ("ben", KETTLE)):
        paid = await commerce.place_order(tx, customer=customer, currency="PLN", lines=[line, CUP])
        await commerce.pay_order(tx, paid.id, by=customer)
    for minutes in (0, 10, 13, 14):  # the last ones have a few minutes left
        await _place(tx, customer="ann", minutes=minutes)
    late = await _place(tx, customer="cara", minutes=40)
    await commerce.time_out_order(tx, late.id)
    for is_forgotten in (False, True):
        cart = await commerce.open_cart(tx, customer="ben", currency="EUR")
        await commerce.put_item(tx, cart.id, KETTLE, by="ben")
        if is_forgotten:
            await tx.execute(TOUCH_EARLIER, {"id": cart.id})
    now: datetime = (await tx.execute(READ_NOW)).scalar_one()
    for days in range(7):
        await schedule(tx, SYNC, f"sample-{days}", now - timedelta(days=days))


async def _load_decisions(tx: Tx) -> None:
    """Rules that screen payments, one that nobody has activated yet, and some decisions to look at."""
    await decisions.put_list(tx, "watched-accounts", members=["acc-13", "acc-66"], actor="sample-admin")
    written = [(SCREENING, *rule) for rule in RULES] + [(LAUNDERING, *rule) for rule in AML_RULES]
    for rule_set, name, conditions, outcome, is_active in written:
        await _write_rule(tx, rule_set, name, conditions, outcome, is_active=is_active)
    for number, (amount, payee) in enumerate(PAYMENTS):
        facts = {"amount": amount, "currency": "PLN", "from": "acc-1", "to": payee, "paymentId": f"sample-{number}"}
        await decisions.evaluate(tx, SCREENING, facts, subject=f"sample-{number}")
        await decisions.observe(
            tx, Observation("payments", ("acc-1",), amount, payee), Observation("payments", ("acc-1", "PLN"), amount)
        )


async def _write_rule(
    tx: Tx, rule_set: str, name: str, conditions: dict[str, Any], outcome: str, *, is_active: bool
) -> None:
    written = {
        "name": name, "conditions": conditions, "priority": 0, "terminate": False, "action": {"decision": outcome},
    }  # fmt: skip
    rule, _ = await decisions.create_rule(tx, rule_set, written=written, actor="sample-admin")
    if is_active:
        await decisions.activate_rule(tx, rule.id, version=None, acknowledge_warnings=False, actor="sample-admin")


async def _place(tx: Tx, *, customer: str, minutes: int) -> Order:
    """An order that was placed so long ago, with its timers."""
    order = await commerce.place_order(tx, customer=customer, currency="PLN", lines=[TEA, CUP])
    due_at: datetime = (await tx.execute(PLACE_EARLIER, {"id": order.id, "minutes": minutes})).scalar_one()
    await schedule(tx, commerce.PAYMENT_TIMEOUT, order.id, due_at)
    await schedule(tx, commerce.ORDER_EXPIRATION, order.id, due_at + LAST_NET - PAYMENT_WINDOW)
    return order


async def _load_ledger(tx: Tx) -> None:
    """A small bank: two customers who may not overdraw, payments, a fee, one that was reversed, and money on hold."""
    bank, fees = [
        (await ledger.create_account(tx, name=name, kind=kind, currency="PLN")).id
        for name, kind in (("Cash at the bank", AccountType.ASSET), ("Fees", AccountType.INCOME))
    ]
    ann, ben = [
        (
            await ledger.create_account(
                tx, name=f"Customer {name}", kind=AccountType.LIABILITY, currency="PLN", may_go_negative=False
            )
        ).id
        for name in ("Ann", "Ben")
    ]

    async def move(reference: str, amount: str, debit: UUID, credit: UUID) -> Transaction:
        lines = [NewEntry(debit, Decimal(amount), Direction.DEBIT), NewEntry(credit, Decimal(amount), Direction.CREDIT)]
        return await ledger.post(tx, Posting(reference, lines))

    await move("sample deposit of Ann", "1200.00", bank, ann)
    await move("sample deposit of Ben", "80.50", bank, ben)
    await move("sample rent", "250.00", ann, ben)
    await move("sample fee", "1.50", ann, fees)
    mistaken = await move("sample fee, sent twice", "1.50", ann, fees)
    await ledger.reverse(tx, mistaken.id, reason="sent twice")
    hold = await ledger.place_hold(tx, ann, amount=Decimal("99.99"), reference="sample hotel")
    await ledger.capture_hold(tx, hold.id, to=ben, reference="sample minibar", amount=Decimal("12.00"), final=False)


async def _load_payments(tx: Tx) -> None:
    """Payments that complete while you watch, and some that give the sandbox's bank trouble, by their cents."""
    cash = (await ledger.create_account(tx, name="Cash of payments", kind=AccountType.ASSET, currency="PLN")).id
    carla, dan = [
        (
            await ledger.create_account(
                tx, name=f"Customer {name}", kind=AccountType.LIABILITY, currency="PLN", may_go_negative=False
            )
        ).id
        for name in ("Carla", "Dan")
    ]
    amount = Decimal("20000.00")
    lines = [NewEntry(cash, amount, Direction.DEBIT), NewEntry(carla, amount, Direction.CREDIT)]
    await ledger.post(tx, Posting("sample deposit of Carla", lines))
    for paid in PAID:
        await payments.initiate(
            tx,
            from_id=carla,
            to_id=dan,
            amount=Decimal(paid),
            currency="PLN",
            by="sample-teller",
            provider="bank",
            tell=compliance.open_for_payment,
        )
    (held, *_), _ = await compliance.list_cases(tx, limit=1)  # the one of 11000.00, which is under review
    await compliance.claim(tx, held.id, actor="sample-officer")
    await compliance.comment(tx, held.id, text="Asked the customer for the invoice.", actor="sample-officer")


async def _load_checks(tx: Tx) -> None:
    """People who are to be checked: two who have not come yet, and one of each outcome."""
    outcomes = (None, None, KycStatus.APPROVED, KycStatus.REJECTED)
    for number, status in enumerate(outcomes, 1):
        made, _ = await kyc.create_session(
            tx, user_id=f"user-{number}", provider="sandbox", by="sample-agent", known=("sandbox",)
        )
        if status is not None:
            said = KycCallback("sandbox", f"{number:064x}", made.id, None, status, f"ev_{made.id.hex}")
            await kyc.receive(tx, said)
