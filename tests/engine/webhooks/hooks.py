"""What the tests of webhooks share: settings with a key, handlers that send for real, and few words for often done."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from pydantic import SecretStr

from duly import Database, Duly, NewEvent, emit
from duly.jobs.handlers import Handler
from duly.settings import Settings
from duly.testing import drain
from duly.webhooks import Attempt, Delivery, Subscription, deliveries, subscriptions
from duly.webhooks.admit import DELIVER_JOB
from duly.webhooks.deliver import Deliverer, allowed_by
from duly.webhooks.sealing import Keyring
from duly.webhooks.sender import Resolve, Sender
from tests.support import rows

KEY = "k1:" + base64.b64encode(b"1" * 32).decode()
SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
OWNER = "https://issuer alice"


def make_settings(**changes: Any) -> Settings:
    """Settings of a development server whose key is known."""
    return Settings(encryption_keys=SecretStr(KEY)).model_copy(update=changes)


@dataclass
class Hooks:
    """Webhooks on one database."""

    db: Database
    dsn: str
    settings: Settings = field(default_factory=make_settings)
    resolve: Resolve | None = None

    def __post_init__(self) -> None:
        self.keyring = Keyring.open(self.settings)
        self.handlers: dict[str, Handler] = dict(Duly().handlers)
        sender = Sender(allowed_by(self.settings), resolve=self.resolve)
        self.handlers[DELIVER_JOB] = Deliverer(self.settings, sender=sender).create_handler()

    async def subscribe(self, url: str, *patterns: str, secret: str = SECRET, **options: Any) -> Subscription:
        async with self.db.transaction() as tx:
            made = await subscriptions.create_subscription(
                tx, self.settings, self.keyring, owner=options.pop("owner", OWNER), url=url,
                patterns=patterns or ["order.*"], secret=secret, actor="test", **options,
            )  # fmt: skip
        return made.subscription

    async def emit(self, count: int = 1, *, type: str = "order.placed", aggregate: str = "o") -> list[UUID]:
        async with self.db.transaction() as tx:
            return await emit(
                tx, *(NewEvent(type, "shop", f"{aggregate}-{n}", {"n": n, "price": "1.50"}) for n in range(count))
            )

    async def drain(self) -> int:
        return await drain(self.db, self.handlers)

    async def subscription(self, id: UUID) -> Subscription:
        async with self.db.transaction() as tx:
            return await subscriptions.find_subscription(tx, id)

    async def deliveries(self, id: UUID | None = None, **filters: Any) -> list[Delivery]:
        async with self.db.transaction() as tx:
            return await deliveries.list_deliveries(tx, subscription_id=id, limit=1_000, **filters)

    async def delivery(self) -> Delivery:
        (one,) = await self.deliveries()
        return one

    async def attempts(self, id: UUID) -> list[Attempt]:
        async with self.db.transaction() as tx:
            return list(reversed(await deliveries.list_attempts(tx, id)))

    async def resume(self, id: UUID) -> None:
        async with self.db.transaction() as tx:
            await subscriptions.resume_subscription(tx, self.settings, id, actor="test")

    async def pause(self, id: UUID) -> None:
        async with self.db.transaction() as tx:
            await subscriptions.pause_subscription(tx, self.settings, id, actor="test")

    async def redeliver(self, id: UUID) -> Delivery:
        async with self.db.transaction() as tx:
            return await deliveries.redeliver(tx, self.settings, id, actor="test")

    def jobs(self) -> list[tuple[str, datetime]]:
        """Delivery jobs that wait, and for when."""
        return [
            (row[0], row[1])
            for row in rows(self.dsn, f"SELECT entity_id, run_at FROM duly.jobs WHERE name = '{DELIVER_JOB}'")
        ]

    def alerts(self) -> list[tuple[str, str]]:
        return [
            (row[0], row[1])
            for row in rows(self.dsn, "SELECT kind, subject FROM duly.alerts WHERE resolved_at IS NULL")
        ]
