"""From an address to a broker: its module is imported only when its scheme is used, and its client is an extra."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from types import ModuleType
from typing import cast

from duly.brokers import Source, Transport
from duly.errors import Refused

# What an address begins with (a part after + is the module's own: kafka+ssl, sqs+http), and the module, which is also
# the name of the extra that brings its client.
MODULES = {"kafka": "kafka", "nats": "nats", "amqp": "rabbitmq", "amqps": "rabbitmq", "sqs": "sqs"}
_SCHEME = re.compile(r"([a-z]+)(\+[a-z]+)?://")


def transport(url: str) -> Transport:
    """What publishes to the broker at this address; nothing is connected yet."""
    return cast(Transport, _module(url).transport(url))


def source(url: str, *, topics: Sequence[str], group: str) -> Source:
    """What reads these topics from the broker at this address, as this group; nothing is connected yet."""
    return cast(Source, _module(url).source(url, topics=topics, group=group))


async def setup(url: str, *, topics: Sequence[str], group: str) -> list[str]:
    """Create what is missing there; a sentence for each thing that was made."""
    return cast(list[str], await _module(url).setup(url, topics=topics, group=group))


def broker_name(url: str) -> str:
    """What the broker is called: in ``duly.consumers.via``, in metrics, and in job names."""
    found = _SCHEME.match(url)
    if found is None or found[1] not in MODULES:
        raise Refused(
            f"the address of the broker cannot be used: it begins with one of {', '.join(f'{s}://' for s in MODULES)}"
        )
    return MODULES[found[1]]


def shown(url: str) -> str:
    """The address without its user, password and options: for people and logs."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{re.split('[/?#]', rest.rpartition('@')[2])[0]}"


def _module(url: str) -> ModuleType:
    name = broker_name(url)
    try:
        return importlib.import_module(f"duly.brokers.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("duly"):
            raise
        raise Refused(
            f"{name} needs a client that is not installed ({error.name}): pip install 'duly[{name}]'"
        ) from None
