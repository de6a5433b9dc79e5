"""Reading SQS: one request under way at each queue, and what it brings is ours until it is deleted or given back.

A request is never given up while it waits for messages: those it would have brought would be locked. What came for
nobody is kept for the next ``receive``, or given back before its time is over.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from duly.brokers import Message
from duly.brokers.sqs_client import REQUESTS_AT_ONCE, TEN, TOPIC, Address, Client, NotNow, NotThis
from duly.clock import monotonic
from duly.errors import Refused

log = structlog.get_logger("duly.brokers.sqs")
T = TypeVar("T")
POLL_SECONDS = 3  # no request waits longer for messages, so that closing does not either
ANSWER_SECONDS = 1.0  # for an answer that was not to wait; one that is slower is there for the next receive
REST_SECONDS = 5.0  # before a queue that is not to be had is asked again
CLOSE_SECONDS = 4.0


@dataclass(frozen=True)
class _Receipt:
    queue: str
    handle: str


@dataclass(frozen=True)
class _Haul:
    """What one request brought, and when."""

    queue: str
    messages: list[Message]
    at: float
    is_full: bool


class SqsSource:
    """Reads the queues of some topics; SQS itself keeps what was read and what was not."""

    name = "sqs"
    keeps_position = True

    def __init__(self, address: Address, topics: Sequence[str]) -> None:
        self._client = Client(address)
        self._topics: dict[str, str] = {}
        for topic in dict.fromkeys(topics):
            name = address.queue(topic)
            if name in self._topics:
                raise Refused(f"the topics {self._topics[name]} and {topic} would share the queue {name}: rename one")
            self._topics[name] = topic
        if not self._topics:
            raise Refused("there is no topic to read: name some with DULY_RECEIVE_TOPICS")
        self._polls: dict[str, asyncio.Task[_Haul]] = {}
        self._held: dict[_Receipt, Message] = {}
        self._rests: dict[str, tuple[float, str]] = {}
        self._turn = 0

    async def check(self) -> None:
        """Every queue is there, keeps messages long enough, and moves none away."""
        missing = [name for name in self._topics if not await self._client.check(name)]
        if missing:
            raise Refused(f"SQS has no queue {', '.join(missing)}: run `duly brokers setup`, or create it as FIFO")

    async def resume(self, positions: Mapping[str, int]) -> None:
        """Give back whatever was received and not acknowledged: SQS knows the rest."""
        await self.release(list(self._held.values()))

    async def receive(self, limit: int, *, wait_seconds: float) -> list[Message]:
        """No more than ``limit``, of all queues in turn; never two runs of one group, for SQS locks it meanwhile."""
        until = monotonic() + max(0.0, wait_seconds)
        names = list(self._topics)
        self._turn = (self._turn + 1) % len(names)
        names = names[self._turn :] + names[: self._turn]
        taken: list[Message] = []
        enough_at = math.inf
        while names and len(taken) < limit and monotonic() < enough_at:
            left = 0.0 if taken else max(0.0, until - monotonic())
            self._ask(names, limit - len(taken), left)
            polls = [self._polls[name] for name in names if name in self._polls]
            if not polls:
                break
            await asyncio.wait(polls, timeout=left or ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            found, full = await self._take(names, limit - len(taken), is_first=not taken)
            if found and not taken:  # what came first is to be stored well before it becomes visible again
                enough_at = monotonic() + self._client.address.visibility_seconds / 3
            taken += found
            if taken:
                names = full
            elif monotonic() >= until:
                break
        if not taken and len(self._rests) == len(self._topics):
            raise OSError("; ".join(reason for _, reason in self._rests.values()))
        return taken

    def _ask(self, names: Sequence[str], room: int, wait_seconds: float) -> None:
        """See that each queue has a request under way, unless it is resting."""
        for name in names:
            rest = self._rests.get(name)
            if rest and monotonic() >= rest[0]:
                del self._rests[name]
            if name not in self._polls and name not in self._rests:
                wait = min(math.ceil(wait_seconds), POLL_SECONDS)
                self._polls[name] = asyncio.create_task(self._poll(name, min(TEN, room), wait))

    async def _poll(self, name: str, most: int, wait_seconds: int) -> _Haul:
        answer = await self._client.receive(name, most, wait_seconds)
        raw = answer.get("Messages", [])
        return _Haul(name, [self._as_message(name, one) for one in raw], monotonic(), len(raw) == most)

    async def _take(self, names: Sequence[str], room: int, *, is_first: bool) -> tuple[list[Message], list[str]]:
        """What has come and fits; and the queues that gave as much as was asked of them, so they may have more."""
        taken: list[Message] = []
        full: list[str] = []
        for name in names:
            poll = self._polls.get(name)
            if poll is None or not poll.done():
                continue
            if isinstance(poll.exception(), OSError) and (taken or not is_first):
                continue  # SQS is away: that is told next time, when nothing is in our hands
            haul = self._outcome(name, poll)
            is_too_much = haul is not None and len(haul.messages) > room - len(taken)
            if is_too_much and (taken or not is_first):
                continue  # there is room for it next time
            del self._polls[name]
            if haul is None:
                continue
            # Too old to begin with, or more than anybody wants: it comes again, in the same order. Half of it would not
            # do: were the first half given back later, the second would overtake it.
            if is_too_much or monotonic() - haul.at > self._client.address.visibility_seconds / 2:
                await self.release(haul.messages)
                continue
            self._held |= {message.token: message for message in haul.messages}
            taken += haul.messages
            full += [name] if haul.is_full else []
        return taken, full

    def _outcome(self, name: str, poll: asyncio.Task[_Haul]) -> _Haul | None:
        """What a request brought; a queue that is not to be had rests, and the others go on. OSError: SQS is away."""
        try:
            return poll.result()
        except (NotNow, NotThis) as trouble:
            log.warning("queue_rests", queue=name, reason=str(trouble))
            self._rests[name] = (monotonic() + REST_SECONDS, str(trouble))
            return None
        except Exception:
            del self._polls[name]
            raise

    def _as_message(self, name: str, raw: Mapping[str, Any]) -> Message:
        headers = {
            key.lower(): value["StringValue"]
            for key, value in raw.get("MessageAttributes", {}).items()
            if isinstance(value.get("StringValue"), str)
        }
        topic = headers.pop(TOPIC, "")
        if self._client.address.queue(topic) != name:
            topic = self._topics[name]
        body = str(raw.get("Body", "")).encode("utf-8", "surrogatepass")
        receipt = _Receipt(name, raw["ReceiptHandle"])
        position, group = f"{name} message {raw.get('MessageId', '?')}", raw.get("Attributes", {}).get("MessageGroupId")
        return Message(topic, headers, body, position, token=receipt, key=str(group or ""))

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        """Delete them. What could not be deleted comes again: soon, when this raises, for then it is given back."""
        requests = [(name, part) for name, receipts in _by_queue(messages).items() for part in _tens(receipts)]
        for several in _parts(requests, REQUESTS_AT_ONCE):
            outcomes = await asyncio.gather(*(self._delete(*one) for one in several), return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome

    async def _delete(self, name: str, receipts: Sequence[_Receipt]) -> None:
        try:
            undone = await self._client.delete(name, [receipt.handle for receipt in receipts])
        except (NotNow, NotThis) as error:
            if isinstance(error, NotThis) or not error.is_missing:
                raise ConnectionError(str(error)) from None
            undone = []  # with the queue its messages have gone
        if undone:
            log.warning("not_acknowledged", queue=name, messages=len(undone), reason=undone[0].code)
        again = {one.handle for one in undone if not one.is_final}
        for receipt in receipts:
            if receipt.handle not in again:
                self._held.pop(receipt, None)
        if again:
            raise ConnectionError(f"{name} did not delete {len(again)} messages")

    async def release(self, messages: Sequence[Message]) -> None:
        """Make them visible at once, the last first: a group stays locked until its first is visible again."""
        for message in messages:
            self._held.pop(message.token, None)
        for name, receipts in _by_queue(messages).items():
            for part in _tens(receipts[::-1]):
                try:
                    undone = await self._client.show(name, [receipt.handle for receipt in part])
                except (NotNow, NotThis, OSError) as error:
                    log.warning("not_released", queue=name, messages=len(part), reason=str(error))
                else:
                    if undone:  # they come again when their visibility time-out has run out
                        log.warning("not_released", queue=name, messages=len(undone), reason=undone[0].code)

    async def lag(self) -> int | None:
        """How many messages are visible, by what SQS says of itself: approximately."""
        try:
            return sum([await self._client.waiting(name) for name in self._topics])
        except (NotNow, NotThis):
            return None

    async def close(self) -> None:
        """Wait for the requests under way, give back what they bring and what nobody acknowledged, and hang up."""
        try:
            if self._polls:
                await asyncio.wait(self._polls.values(), timeout=CLOSE_SECONDS)
            brought = [poll.result().messages for poll in self._polls.values() if _has_result(poll)]
            await self.release([*self._held.values(), *(message for several in brought for message in several)])
        finally:
            for poll in self._polls.values():
                poll.cancel()
            await asyncio.gather(*self._polls.values(), return_exceptions=True)
            self._polls.clear()
            await self._client.close()


def _has_result(poll: asyncio.Task[_Haul]) -> bool:
    return poll.done() and not poll.cancelled() and poll.exception() is None


def _by_queue(messages: Sequence[Message]) -> dict[str, list[_Receipt]]:
    queues: dict[str, list[_Receipt]] = {}
    for message in messages:
        queues.setdefault(message.token.queue, []).append(message.token)
    return queues


def _parts(values: Sequence[T], most: int) -> list[Sequence[T]]:
    return [values[start : start + most] for start in range(0, len(values), most)]


def _tens(values: Sequence[T]) -> list[Sequence[T]]:
    return _parts(values, TEN)
