"""RabbitMQ: publishing with confirms to a topic exchange, and reading one queue in order; ``amqp://`` and ``amqps://``."""

from __future__ import annotations

from collections.abc import Sequence

from duly.brokers.rabbitmq.line import read_address
from duly.brokers.rabbitmq.source import RabbitSource
from duly.brokers.rabbitmq.topology import setup
from duly.brokers.rabbitmq.transport import RabbitTransport

__all__ = ["RabbitSource", "RabbitTransport", "setup", "source", "transport"]


def transport(url: str) -> RabbitTransport:
    """What publishes to the RabbitMQ at this address; nothing is connected yet."""
    return RabbitTransport(read_address(url))


def source(url: str, *, topics: Sequence[str], group: str) -> RabbitSource:
    """What reads the queue of this group there; nothing is connected yet."""
    return RabbitSource(read_address(url), topics=topics, group=group)
