"""Publishing to RabbitMQ: persistent, mandatory, and every confirm awaited.

RabbitMQ answers a whole channel where one message is at fault (too large, say) by closing it. Then each event that has
no answer yet is sent again alone, and the one that closes its channel is the one that failed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractChannel, AbstractExchange
from aio_pika.exceptions import DeliveryError
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel as BelowChannel
from aiormq.exceptions import ChannelAccessRefused, ChannelClosed, ChannelInvalidStateError, ChannelNotFoundEntity

from duly.brokers import Later
from duly.brokers.rabbitmq import topology
from duly.brokers.rabbitmq.line import ANSWER_SECONDS, Address, Line, asking, plain
from duly.brokers.wire import AMQP, encode
from duly.clock import monotonic
from duly.failpoints import failpoint
from duly.messages import Event

PUBLISH_SECONDS = 20.0
BLOCKED_SECONDS = 10.0
NOBODY = "duly.nobody"
Answer = str | Later | None


class RabbitTransport:
    """One connection and one channel with publisher confirms; both are made anew after any doubt."""

    name = "rabbitmq"

    def __init__(self, address: Address) -> None:
        self._address = address
        self._line = Line(address, "relay")
        self._channel: AbstractChannel | None = None
        self._proven = 0  # the number of the connection that is known to be read

    async def check(self) -> None:
        """The exchange is there, is durable, and routes by patterns."""
        await topology.check(self._line, [topology.exchange(self._address)])

    async def publish(self, events: Sequence[Event]) -> Sequence[Answer]:
        """Send each and wait for its confirm; see Transport."""
        return await self._publish(events, monotonic() + PUBLISH_SECONDS) if events else []

    async def close(self) -> None:
        """Hang up; nothing is under way when nobody waits in publish()."""
        self._channel = None
        await self._line.drop()

    async def _publish(self, events: Sequence[Event], ends_at: float) -> list[Answer]:
        outcomes = await self._send(events)
        answers = {index: outcome for index, outcome in enumerate(outcomes) if not isinstance(outcome, BaseException)}
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if refusal := next((failure for failure in failures if isinstance(failure, ChannelClosed)), None):
            if len(events) == 1:
                self._channel = None
                return [self._refused(refusal)]
            await self.close()  # whatever was still written to the closed channel makes RabbitMQ hang up
            for index, event in enumerate(events):
                if index not in answers:
                    answers[index] = await self._publish_alone(event, ends_at)
        elif failures:
            late = await self._explain(failures, answered=bool(answers))
            answers = {index: answers.get(index, late) for index in range(len(events))}
        return [answers[index] for index in range(len(events))]

    async def _publish_alone(self, event: Event, ends_at: float) -> Answer:
        if monotonic() > ends_at:
            return Later("there was no time to send it alone, after another event of its batch had closed the channel")
        return (await self._publish([event], ends_at))[0]

    async def _explain(self, failures: Sequence[BaseException], *, answered: bool) -> Later:
        """What to say of events that have no answer, when no refusal explains it: Later, or raise the outage."""
        shown = self._address.shown
        if lost := next((failure for failure in failures if not isinstance(failure, TimeoutError)), None):
            await self.close()
            raise ConnectionResetError(f"RabbitMQ at {shown} was lost before it confirmed: {plain(lost)}")
        if not await self._line.is_blocked():
            channel, self._channel = self._channel, None
            if channel is not None:
                await self._line.close_channel(channel)
        if not answered:
            self._proven = 0
            await self._open()  # raises the outage, if it is one
        return Later(
            f"RabbitMQ at {shown} did not confirm it in {ANSWER_SECONDS:g} seconds, and confirms others: "
            "a queue that it goes to is stuck, or has lost its majority"
        )

    async def _open(self) -> AbstractChannel:
        """A channel on a line that is known to be read."""
        before = self._line.number
        await self._line.open()
        if await self._line.is_blocked(wait_seconds=BLOCKED_SECONDS):
            raise TimeoutError(_blocked(self._address.shown))
        if self._channel is None or self._channel.is_closed or self._line.number != before:
            self._channel = await self._line.channel(confirms=True)
        if self._proven != self._line.number:
            await self._prove(self._channel)
            self._proven = self._line.number
        if self._channel.is_closed:
            self._channel = await self._line.channel(confirms=True)
        return self._channel

    async def _prove(self, channel: AbstractChannel) -> None:
        """Publish nothing to nobody: that RabbitMQ blocks a line shows only then, and no event is to find it out.

        Twice: it takes the first on a line, and its confirm may overtake the word that from there on it reads no more.
        """
        try:
            for _ in range(2):
                async with asking(self._address):
                    await channel.default_exchange.publish(Message(b""), NOBODY, mandatory=False)
        except ChannelClosed:
            return  # it has no right to do so, and that is an answer
        except TimeoutError:
            if await self._line.is_blocked():  # the connection stays: another one would be blocked as well
                raise TimeoutError(_blocked(self._address.shown)) from None
            await self.close()
            raise

    async def _send(self, events: Sequence[Event]) -> list[Answer | BaseException]:
        """All at once, for they are of different aggregates; what has no answer in time is a TimeoutError."""
        channel = await self._open()
        exchange = await channel.get_exchange(self._address.exchange, ensure=False)
        tasks = [asyncio.ensure_future(self._send_one(exchange, event)) for event in events]
        try:
            ends_at = monotonic() + ANSWER_SECONDS
            await _all_written(channel)
            await asyncio.wait(tasks, timeout=max(0.0, ends_at - monotonic()))
        finally:
            late = {task for task in tasks if not task.done()}
            for task in late:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        return [TimeoutError() if task in late else outcome for task, outcome in zip(tasks, outcomes, strict=True)]

    async def _send_one(self, exchange: AbstractExchange, event: Event) -> Answer:
        try:
            mandatory = not self._address.drops_unroutable
            answer = await exchange.publish(_as_message(event), event.type, mandatory=mandatory)
        except (ValueError, TypeError) as error:
            return f"it cannot be an AMQP message: {plain(error)}"
        except DeliveryError:
            return Later("RabbitMQ took no responsibility for it (nack): a queue it goes to is full, or failed")
        if isinstance(answer, DeliveredMessage):
            return Later(
                f"no queue takes the type {event.type} or the topic {event.topic}: RabbitMQ returned it. "
                "`duly brokers setup` where it is received binds its topic; ?unroutable=drop publishes all the same"
            )
        return None

    def _refused(self, refusal: ChannelClosed) -> Answer:
        """An answer to the one event that had the channel closed."""
        if isinstance(refusal, ChannelNotFoundEntity):
            where = f"RabbitMQ at {self._address.shown} has not {topology.exchange(self._address)}"
            raise ConnectionError(f"{where} any more: {topology.SETUP}")
        if isinstance(refusal, ChannelAccessRefused):
            return Later(f"RabbitMQ does not let {self._address.user!r} publish it: {plain(refusal)}")
        return f"RabbitMQ refused it: {plain(refusal)}"


async def _all_written(channel: AbstractChannel) -> None:
    """Wait until each has been written: whoever writes holds the channel's lock, and they take turns."""
    await asyncio.sleep(0)  # each asks for its turn
    below = await channel.get_underlay_channel()
    assert isinstance(below, BelowChannel)
    with contextlib.suppress(ChannelInvalidStateError, TimeoutError):  # those who write will know
        async with asyncio.timeout(ANSWER_SECONDS), below.lock:
            failpoint("transport.sent")


def _as_message(event: Event) -> Message:
    headers, body = encode(event, AMQP)
    return Message(
        body,
        content_type=headers.pop("content-type"),
        headers={**headers, topology.TOPIC_HEADER: event.topic},
        delivery_mode=DeliveryMode.PERSISTENT,
        message_id=str(event.id),
        type=event.type,
        timestamp=event.created_at,
    )


def _blocked(shown: str) -> str:
    return f"RabbitMQ at {shown} takes no messages now: an alarm (memory or disk) blocks whoever publishes"
