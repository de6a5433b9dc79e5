"""Apache Kafka: an idempotent producer keyed by the aggregate, and a consumer group that commits by hand."""

from __future__ import annotations

from collections.abc import Sequence

from duly.brokers.kafka import checking
from duly.brokers.kafka.address import parse
from duly.brokers.kafka.publishing import KafkaTransport
from duly.brokers.kafka.reading import KafkaSource

__all__ = ["KafkaSource", "KafkaTransport", "setup", "source", "transport"]


def transport(url: str) -> KafkaTransport:
    """What publishes to the Kafka at this address; nothing is connected yet."""
    return KafkaTransport(parse(url))


def source(url: str, *, topics: Sequence[str], group: str) -> KafkaSource:
    """What reads these topics there, as one member of this group; nothing is connected yet."""
    return KafkaSource(parse(url), topics=topics, group=group)


async def setup(url: str, *, topics: Sequence[str], group: str | None) -> list[str]:
    """Create the topics that are missing, so that the start-up checks find nothing; a sentence for each."""
    return await checking.create_topics(parse(url), topics)
