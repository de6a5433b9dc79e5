"""An application with a broker of its own, one event and one consumer."""

from __future__ import annotations

from duly import Duly, Event, Tx
from duly.brokers.connect import register_broker
from duly.messages import EventBody

register_broker("socket", name="socket", module="tests.engine.inbox.source")
app = Duly()


class SampleTold(EventBody, type="sample.told", topic="samples", aggregate="name"):
    """Something was told."""

    name: str


@app.consumer("sample", on="sample.*")
async def hear(event: Event, tx: Tx) -> None:
    """Nothing more."""
