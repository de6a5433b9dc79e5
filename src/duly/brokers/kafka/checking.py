"""What a topic must be so that nothing acknowledged is lost, making those that are missing, how far a group is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
    TopicDescription,
)

from duly.brokers.kafka.address import TOPIC, Address
from duly.brokers.kafka.trouble import MISSING, Complaints, answer, error_of, words
from duly.clock import monotonic
from duly.errors import Refused
from duly.messages import MAX_PAYLOAD_BYTES

log = structlog.get_logger("duly.kafka")
ADMIN_SECONDS = 10.0
LEADER_TRIES = 300  # a tenth of a second apart
DAY_MS = 24 * 60 * 60 * 1000


@dataclass(frozen=True)
class TopicEnds:
    """Which topics there are, and what is in their partitions."""

    ids: Mapping[str, str]
    offsets: Mapping[tuple[str, int], tuple[int, int]]


@dataclass(frozen=True)
class TopicState:
    """What the start-up check looks at."""

    name: str
    replicas: int
    settings: Mapping[str, str]


async def check_topics(address: Address, topics: Sequence[str], *, must_exist: bool) -> None:
    """Refuse topics that lose what they acknowledged, or (if they must exist) that are missing; tell of the rest."""
    admin = admin_client(address)
    brokers = await _count_brokers(admin, address)
    found = await _describe(admin, topics)
    missing = sorted(set(topics) - found.keys())
    if missing and must_exist:
        raise Refused(f"Kafka has no topic {', '.join(missing)}: duly brokers setup creates what is missing")
    if missing:
        log.warning("kafka_topics_missing", topics=missing, remedy="duly brokers setup")
    wrong: list[str] = []
    for one in await _settings_of(admin, found):
        faults, warnings = judge(one, brokers=brokers)
        wrong += faults
        for warning in warnings:
            log.warning("kafka_topic_setting", topic=one.name, reason=warning)
    if wrong:
        raise Refused("; ".join(wrong[:5]))


def judge(topic: TopicState, *, brokers: int) -> tuple[list[str], list[str]]:
    """What is wrong with a topic so that events would be lost, and what is merely worth a word."""
    faults, warnings = [], []
    in_sync = int(topic.settings.get("min.insync.replicas", "1"))
    if topic.replicas == 1 and brokers > 1:
        faults.append("one replica: its broker's disk is the only copy; give it three")
    elif topic.replicas == 1:
        warnings.append("one broker, one replica: what it acknowledged is lost with its disk")
    elif in_sync < 2:
        faults.append("min.insync.replicas is 1, so one broker alone acknowledges: set it to 2")
    elif in_sync >= topic.replicas:
        warnings.append("min.insync.replicas is the number of replicas: nothing can be published while one is away")
    if topic.settings.get("unclean.leader.election.enable") == "true":
        faults.append("unclean.leader.election.enable loses acknowledged messages: set it to false")
    if "compact" in topic.settings.get("cleanup.policy", "delete"):
        faults.append("cleanup.policy compact keeps only the last event of an aggregate: set it to delete")
    if 0 <= int(topic.settings.get("retention.ms", "-1")) < DAY_MS:
        faults.append("retention.ms is less than a day: a receiver that is away over night loses events")
    if int(topic.settings.get("retention.bytes", "-1")) >= 0:
        warnings.append("retention.bytes is set: what is not read by then is lost")
    if int(topic.settings.get("max.message.bytes", "1048588")) < 2 * MAX_PAYLOAD_BYTES:
        warnings.append("max.message.bytes is small: the largest events will fail")
    return [f"topic {topic.name}: {fault}" for fault in faults], warnings


async def create_topics(address: Address, topics: Sequence[str]) -> list[str]:
    """Create the topics that are missing, and wait until each can be written to."""
    if wrong := [topic for topic in topics if not TOPIC.fullmatch(topic)]:
        raise Refused(f"Kafka knows no topic of the name {wrong[0]!r}: it takes letters, digits and . _ -")
    admin = admin_client(address)
    brokers = await _count_brokers(admin, address)
    replicas = address.replication or min(3, brokers)
    missing = sorted(set(topics) - (await _describe(admin, topics)).keys())
    settings = {
        "cleanup.policy": "delete",
        "retention.ms": str(address.retention_days * DAY_MS),
        "min.insync.replicas": str(min(2, replicas)),
    }
    made = []
    new = [NewTopic(topic, address.partitions, replicas, config=settings) for topic in missing]
    for topic, future in (admin.create_topics(new, operation_timeout=ADMIN_SECONDS) if new else {}).items():
        try:
            await answer(future, seconds=2 * ADMIN_SECONDS)
        except KafkaException as error:
            if error_of(error).code() == KafkaError.TOPIC_ALREADY_EXISTS:
                continue
            raise Refused(f"Kafka does not create the topic {topic}: {words(error_of(error))}") from None
        made.append(f"created the topic {topic}: {address.partitions} partitions, {replicas} replicas")
    for _ in range(LEADER_TRIES):
        if _ready(await _describe(admin, topics), topics):
            return made
        await asyncio.sleep(0.1)
    raise TimeoutError("Kafka created the topics, and elects no leader of their partitions")


async def topic_ends(admin: AdminClient, topics: Sequence[str]) -> TopicEnds:
    """What the topics hold: which of them they are, and the first and the next offset of each partition."""
    found = await _describe(admin, topics)
    partitions = [TopicPartition(name, one.id) for name, topic in found.items() for one in topic.partitions]
    ids = {name: str(topic.topic_id) for name, topic in found.items()}
    spec: Any = OffsetSpec  # its methods have no types
    first, last = [await _offsets(admin, partitions, one) for one in (spec.earliest(), spec.latest())]
    return TopicEnds(ids, {one: (first[one], last[one]) for one in sorted(first.keys() & last.keys())})


def admin_client(address: Address) -> Admin:
    """The client that describes and creates. It must not be asked for a group's offsets: it dies of one answer."""
    try:
        return Admin(address)
    except KafkaException as error:
        raise Refused(f"Kafka's client cannot be started: {words(error_of(error))}") from None


class Admin(AdminClient):
    """The client, and what it complained about."""

    def __init__(self, address: Address) -> None:
        self.complaints = complaints = Complaints()
        hear: Any = lambda error: complaints.hear(error, now=monotonic())  # noqa: E731 - a method would keep us alive
        super().__init__({**address.client, "error_cb": hear})


async def _count_brokers(admin: Admin, address: Address) -> int:
    """How many there are; who does not let us in says so to the client alone, which asks and asks again."""
    try:
        cluster = await answer(admin.describe_cluster(request_timeout=ADMIN_SECONDS), seconds=2 * ADMIN_SECONDS)
    except OSError:
        admin.poll(0)
        if admin.complaints.is_let_in:
            raise
        raise Refused(
            f"Kafka at {address.client['bootstrap.servers']} does not let us in: {admin.complaints.words}"
        ) from None
    return len(cluster.nodes)


def _ready(found: Mapping[str, TopicDescription], topics: Sequence[str]) -> bool:
    """Every partition has somebody to write to."""
    return set(topics) <= found.keys() and all(
        one.leader is not None and one.leader.id >= 0 for topic in found.values() for one in topic.partitions
    )


async def _describe(admin: AdminClient, topics: Sequence[str]) -> dict[str, TopicDescription]:
    """Those of the topics that exist; asking creates none."""
    found = {}
    if topics:
        asked = admin.describe_topics(TopicCollection(list(topics)), request_timeout=ADMIN_SECONDS)
        for topic, future in asked.items():
            try:
                found[topic] = await answer(future, seconds=2 * ADMIN_SECONDS)
            except KafkaException as error:
                if error_of(error).code() not in MISSING:
                    raise Refused(f"Kafka tells nothing of the topic {topic}: {words(error_of(error))}") from None
    return found


async def _settings_of(admin: AdminClient, found: Mapping[str, TopicDescription]) -> list[TopicState]:
    states = []
    resources = [ConfigResource(ResourceType.TOPIC, name) for name in found]
    for resource, future in (
        admin.describe_configs(resources, request_timeout=ADMIN_SECONDS) if resources else {}
    ).items():
        replicas = min((len(one.replicas) for one in found[resource.name].partitions), default=1)
        try:
            entries = await answer(future, seconds=2 * ADMIN_SECONDS)
        except KafkaException as error:  # we may not look: that is no reason not to work
            log.warning("kafka_settings_not_seen", topic=resource.name, reason=words(error_of(error)))
            continue
        states.append(TopicState(resource.name, replicas, {name: str(one.value) for name, one in entries.items()}))
    return states


async def _offsets(
    admin: AdminClient, partitions: Sequence[TopicPartition], spec: OffsetSpec
) -> dict[tuple[str, int], int]:
    found: dict[tuple[str, int], int] = {}
    if not partitions:
        return found
    asked = admin.list_offsets(dict.fromkeys(partitions, spec), request_timeout=ADMIN_SECONDS)
    for partition, future in asked.items():
        try:
            found[partition.topic, partition.partition] = (await answer(future, seconds=2 * ADMIN_SECONDS)).offset
        except KafkaException as error:
            if error_of(error).code() not in MISSING:
                raise ConnectionError(words(error_of(error))) from None
    return found
