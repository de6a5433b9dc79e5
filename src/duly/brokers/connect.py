"""From an address to a broker: its module is imported only when its scheme is used, and its client is an extra."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import cast

from duly.brokers import Source, Transport
from duly.errors import Invalid, Refused

_SCHEME = re.compile(r"([a-z]+)(\+[a-z]+)?://")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")


@dataclass(frozen=True)
class Broker:
    """A kind of broker: its name (in ``duly.consumers.via``, metrics and job names), its module, and its extra."""

    name: str
    module: str
    extra: str = ""


# By what an address begins with; a part after + is the module's own, as in kafka+ssl:// or sqs+http://.
_BROKERS = {
    "kafka": Broker("kafka", "duly.brokers.kafka", "kafka"),
    "nats": Broker("nats", "duly.brokers.nats", "nats"),
    "amqp": Broker("rabbitmq", "duly.brokers.rabbitmq", "rabbitmq"),
    "amqps": Broker("rabbitmq", "duly.brokers.rabbitmq", "rabbitmq"),
    "sqs": Broker("sqs", "duly.brokers.sqs", "sqs"),
}


def register_broker(scheme: str, *, name: str, module: str) -> None:
    """Add a kind of broker: ``module`` has ``transport``, ``source`` and ``setup`` as ours do.

    Call it before the application is made, so that it can run again what was buried.
    """
    if not _SCHEME.fullmatch(f"{scheme}://") or not _NAME.fullmatch(name):
        raise Invalid(f"{scheme!r} and {name!r} cannot name a broker: use lower-case letters")
    known = _BROKERS.get(scheme)
    if known is not None and (known.name, known.module) != (name, module):
        raise Invalid(f"the scheme {scheme!r} is taken by {known.name}")
    _BROKERS[scheme] = Broker(name, module)


def broker_names() -> list[str]:
    """Every kind of broker there is."""
    return sorted({broker.name for broker in _BROKERS.values()})


def transport(url: str) -> Transport:
    """What publishes to the broker at this address; nothing is connected yet."""
    return cast(Transport, _module(url).transport(url))


def source(url: str, *, topics: Sequence[str], group: str) -> Source:
    """What reads these topics from the broker at this address, as this group; nothing is connected yet."""
    return cast(Source, _module(url).source(url, topics=topics, group=group))


async def setup(url: str, *, topics: Sequence[str], group: str | None) -> list[str]:
    """Create what these topics need there, and what this group reads them from; a sentence for each thing made.

    Without a group they are only published: nothing is made that would collect what nobody here reads.
    """
    return cast(list[str], await _module(url).setup(url, topics=topics, group=group))


def broker_name(url: str) -> str:
    """The name of the broker that this address is one of."""
    return _find(url).name


def shown(url: str) -> str:
    """The address without its user, password and options: for people and logs."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{re.split('[/?#]', rest.rpartition('@')[2])[0]}"


def _find(url: str) -> Broker:
    found = _SCHEME.match(url)
    if found is None or found[1] not in _BROKERS:
        schemes = ", ".join(f"{scheme}://" for scheme in _BROKERS)
        raise Refused(f"the address of the broker cannot be used: it begins with one of {schemes}")
    return _BROKERS[found[1]]


def _module(url: str) -> ModuleType:
    broker = _find(url)
    try:
        return importlib.import_module(broker.module)
    except ModuleNotFoundError as error:
        if broker.module.startswith(error.name or "?") or not broker.extra:
            raise
        raise Refused(
            f"{broker.name} needs a client that is not installed ({error.name}): pip install 'duly[{broker.extra}]'"
        ) from None
