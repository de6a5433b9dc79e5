"""The use cases of compliance: each gets a transaction and never ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from duly import Tx


async def read_cases_about(tx: Tx, *, payment_id: UUID | None, transaction_ids: Sequence[UUID]) -> list[Any]:
    """The cases about a payment or its transactions, with their timelines: there are none yet."""
    return []
