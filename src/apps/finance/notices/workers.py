"""The consumer that tells the outside what it may know of an internal event."""

from __future__ import annotations

from apps.finance.ledger.events import TransactionReversed
from apps.finance.notices.events import PaymentDeclined, TransactionReturned
from apps.finance.payments.events import PaymentRejected
from duly import Duly, Event, EventBody, Tx, emit

BATCH = 100
TOLD: dict[str, tuple[type[EventBody], type[EventBody]]] = {
    PaymentRejected.event_type: (PaymentRejected, PaymentDeclined),
    TransactionReversed.event_type: (TransactionReversed, TransactionReturned),
}
"""What is told of which internal event; the members that both have, and no other."""


def register(app: Duly) -> None:
    """Add the consumer."""

    @app.consumer("notices", on=list(TOLD), batch=BATCH)
    async def tell(events: list[Event], tx: Tx) -> None:
        await emit(tx, *map(shorten, events))


def shorten(event: Event) -> EventBody:
    """What may be known outside of an internal event."""
    internal, public = TOLD[event.type]
    known = event.body(internal)
    return public.model_validate({name: getattr(known, name) for name in public.model_fields})
