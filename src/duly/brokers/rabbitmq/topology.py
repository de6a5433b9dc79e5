"""What must be there: an exchange that routes by type, one behind it that routes by topic, and a queue for each group.

Events go to the topic exchange ``duly.events`` with their type as routing key, so anybody can bind what they want to
it. Our own queues are bound by topic, which is a header: a headers exchange hangs behind the first one for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog
from aio_pika.abc import AbstractChannel
from aiormq.exceptions import (
    ChannelAccessRefused,
    ChannelClosed,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
)

from duly.brokers.rabbitmq.line import Address, Line, Rejected, plain, read_address
from duly.errors import Refused
from duly.messages import check_name

log = structlog.get_logger("duly.brokers")
TOPIC_HEADER = "duly-topic"
NO_LIMIT = 1_000_000_000  # deliveries of a quorum queue before it throws a message away
SETUP = "`duly brokers setup` makes it"


@dataclass(frozen=True)
class Piece:
    """An exchange or a queue, as we need it."""

    kind: str
    name: str
    type: str = ""
    arguments: Mapping[str, str | int | bool] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"the {self.kind} {self.name}"

    async def declare(self, channel: AbstractChannel, *, passive: bool = False) -> int:
        """Make it unless it is there, or (passive) only ask for it; how many messages wait in it."""
        if self.kind == "exchange":
            await channel.declare_exchange(self.name, self.type, durable=True, passive=passive)
            return 0
        found = await channel.declare_queue(self.name, durable=True, passive=passive, arguments=dict(self.arguments))
        return found.declaration_result.message_count or 0


def exchange(address: Address) -> Piece:
    """Where events are published."""
    return Piece("exchange", address.exchange, "topic")


def by_topic(address: Address) -> Piece:
    """The exchange behind it, which knows topics."""
    return Piece("exchange", f"{address.exchange}.topics", "headers")


def queue(address: Address, group: str) -> Piece:
    """What a group reads: by one reader at a time, so in order; full, it refuses the newest and keeps the rest."""
    arguments: dict[str, str | int | bool] = {
        "x-queue-type": "quorum" if address.quorum else "classic",
        "x-single-active-consumer": True,
        "x-overflow": "reject-publish",
    }
    if address.quorum:
        arguments["x-delivery-limit"] = NO_LIMIT
    name = f"duly.{check_name('group', group)}"
    if address.exchange != "duly.events":
        name = f"{address.exchange}.{group}"
    return Piece("queue", name, arguments=arguments)


async def setup(url: str, *, topics: Sequence[str], group: str | None) -> list[str]:
    """Create what is missing, and bind the topics to the group's queue; a sentence for each thing that was made.

    Without a group there is no queue: it would fill with what is published, and nobody would read it.
    """
    address = read_address(url)
    line = Line(address, "setup")
    reads = queue(address, group) if topics and group is not None else None
    pieces = [exchange(address), by_topic(address), *([reads] if reads else [])]
    try:
        made = [f"{piece} was made" for piece in pieces if not await _examine(line, piece, make=True)]
        await _bind(line, reads, topics)
    except ChannelAccessRefused as error:
        unbound = reads or by_topic(address)
        raise Refused(
            f"RabbitMQ at {address.shown} does not let {address.user!r} bind {unbound}: {plain(error)}"
        ) from None
    except Rejected as error:
        raise Refused(str(error)) from None
    finally:
        await line.drop()
    return made


async def check(line: Line, pieces: Sequence[Piece]) -> None:
    """Refuse what is missing, or is not as we need it."""
    try:
        for piece in pieces:
            if not await _examine(line, piece, make=False):
                raise Refused(f"RabbitMQ at {line.address.shown} has not {piece}: {SETUP}")
    except Rejected as error:
        raise Refused(str(error)) from None


async def check_bound(line: Line, *, topics: Sequence[str], group: str) -> None:
    """Bind what should be bound: that it is cannot be asked for, and who may not bind is told so, and goes on."""
    try:
        await _bind(line, queue(line.address, group), topics)
    except ChannelAccessRefused as error:
        log.warning("rabbitmq_unchecked", what="bindings", reason=plain(error))


async def _bind(line: Line, reads: Piece | None, topics: Sequence[str]) -> None:
    """Bind the exchanges, and each topic to the queue: to do it again changes nothing."""
    address = line.address
    try:
        async with line.brief_channel() as channel:
            front = await channel.get_exchange(address.exchange, ensure=False)
            behind = await channel.get_exchange(by_topic(address).name, ensure=False)
            await behind.bind(front, routing_key="#")
            if reads is not None:
                bound = await channel.get_queue(reads.name, ensure=False)
                for topic in topics:
                    await bound.bind(behind, arguments={"x-match": "all", TOPIC_HEADER: check_name("topic", topic)})
    except ChannelAccessRefused:
        raise
    except ChannelClosed as error:
        raise Refused(f"RabbitMQ at {address.shown} does not bind the topics: {plain(error)}") from None


async def _examine(line: Line, piece: Piece, *, make: bool) -> bool:
    """Whether it was there; if it was, or is to be made, it is as we need it, or Refused says what differs.

    RabbitMQ tells no properties. But to declare something again with others is refused, and says which.
    """
    try:
        async with line.brief_channel() as channel:
            await piece.declare(channel, passive=True)
            await _declare(line, piece, channel, make=make)
            return True
    except ChannelNotFoundEntity:
        pass
    except ChannelLockedResource as error:
        raise Refused(f"RabbitMQ at {line.address.shown} keeps {piece} for somebody else: {plain(error)}") from None
    if make:
        async with line.brief_channel() as channel:  # the refusal has closed the other
            await _declare(line, piece, channel, make=make)
    return False


async def _declare(line: Line, piece: Piece, channel: AbstractChannel, *, make: bool) -> None:
    try:
        await piece.declare(channel)
    except ChannelPreconditionFailed as error:
        raise Refused(
            f"RabbitMQ at {line.address.shown} has {piece} with other properties than those that lose nothing "
            f"({plain(error)}): remove it once it is empty, and {SETUP}; or name another in the address"
        ) from None
    except ChannelAccessRefused as error:
        if make:
            raise Refused(
                f"RabbitMQ at {line.address.shown} does not let {line.address.user!r} make {piece}: {plain(error)}"
            ) from None
        log.warning("rabbitmq_unchecked", what=str(piece), reason=plain(error))
