"""What Kafka's client complains about, and whose fault it is: the cluster's, a topic's or one message's."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException

from duly.brokers import Later

T = TypeVar("T")


class Complaints:
    """What a client complains about between our calls; it reconnects by itself, and says no word when it has."""

    def __init__(self) -> None:
        self.down_since: float | None = None
        self.fatal = False
        self.is_let_in = True
        self.words = "it does not answer"

    def hear(self, error: KafkaError, *, now: float) -> None:
        """The client's error callback."""
        if error.fatal():
            self.fatal = True
        if error.code() in NOT_LET_IN:
            self.is_let_in = False
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self.down_since = self.down_since or now
        else:
            self.words = words(error)


def words(error: KafkaError | None) -> str:
    """An error as one short line."""
    return " ".join(f"{error.name()}: {error.str()}".split())[:300] if error is not None else "no error"


def error_of(exception: KafkaException) -> KafkaError:
    """The error that the client wrapped."""
    error = exception.args[0]
    return error if isinstance(error, KafkaError) else KafkaError(KafkaError._FAIL, str(error)[:200])


async def answer(future: Future[T], *, seconds: float) -> T:
    """What the administrative client promised; the broker's being away is a ConnectionError or TimeoutError."""
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(future)
    except KafkaException as exception:
        error = error_of(exception)
        if error.code() in AWAY:
            raise ConnectionError(words(error)) from None
        raise


# The cluster, or the leader of a partition, is not to be had: no fault of a message, and likely to pass.
AWAY = frozenset(
    [
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._AUTHENTICATION,
        KafkaError._DESTROY,
        KafkaError._ISR_INSUFF,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._PURGE_INFLIGHT,
        KafkaError._PURGE_QUEUE,
        KafkaError._RESOLVE,
        KafkaError._SSL,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._TRANSPORT,
        KafkaError._WAIT_COORD,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.SASL_AUTHENTICATION_FAILED,
    ]
)
# A name or a password is wrong. While it runs that may pass as well, for somebody mends it; at the start it is refused.
NOT_LET_IN = frozenset([KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED])
MISSING = frozenset(
    [
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN_TOPIC_ID,
    ]
)


def missing_topic(topic: str) -> Later:
    """Why events of a topic that is not there wait."""
    return Later(f"the topic {topic} is not there; duly brokers setup creates it")
