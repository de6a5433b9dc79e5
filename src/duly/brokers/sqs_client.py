"""The way to SQS: one request at a time, with a bound on each, and what may go wrong said in three words.

``NotNow``: this queue is not to be had at the moment, others may be. ``NotThis``: SQS never takes what it was given.
``OSError``: SQS cannot be reached, or knows us no more. None of them repeats a secret, a signature or a message.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore import exceptions as boto

from duly.clock import monotonic
from duly.errors import Refused

TEN = 10  # entries of one request, by the rules of SQS
TOPIC = "duly-topic"  # the attribute that has a topic's full name
REQUESTS_AT_ONCE = 8
SHORTEST_RETENTION_SECONDS = 86_400
CONNECT_SECONDS = 3
READ_SECONDS = 10
CALL_SECONDS = 12.0
OPEN_SECONDS = 30.0
CONNECTIONS = 32
REMEMBER_SECONDS = 60.0  # how long a queue's largest message is believed
VISIBILITY_SECONDS = range(5, 601)
_REGION = re.compile(r"[a-z0-9-]{1,40}")
_PREFIX = re.compile(r"[A-Za-z0-9_-]{0,40}")
_MISSING = frozenset({"AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist"})
_CREDENTIALS = frozenset(
    {
        "AuthFailure", "ExpiredToken", "ExpiredTokenException", "IncompleteSignature", "InvalidAccessKeyId",
        "InvalidClientTokenId", "InvalidSecurity", "InvalidSignatureException", "MissingAuthenticationToken",
        "MissingAuthenticationTokenException", "OptInRequired", "RequestExpired", "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)  # fmt: skip
_FORBIDDEN = frozenset({"AccessDenied", "AccessDeniedException", "NotAuthorized", "KmsAccessDenied"})
_BUSY = re.compile(r"Throttl|TooManyRequests|RequestLimitExceeded|SlowDown|ServiceUnavailable|Internal|OverLimit|^Kms")


class Undone(NamedTuple):
    """What SQS did not do, of what was asked for in one request."""

    handle: str
    code: str
    is_final: bool


class NotNow(Exception):
    """This queue cannot be used at the moment, through no fault of a message."""

    def __init__(self, reason: str, *, is_missing: bool = False) -> None:
        super().__init__(reason)
        self.is_missing = is_missing


class NotThis(Exception):
    """SQS refused what it was given."""


@dataclass(frozen=True)
class Address:
    """Where the queues are, what their names begin with, and for how long a message is ours once it was received."""

    region: str
    endpoint: str | None = None
    prefix: str = "duly-"
    visibility_seconds: int = 30

    def queue(self, topic: str) -> str:
        """The queue of a topic: its letters and digits, and a few signs of its hash where they would be too many."""
        stem = self.prefix + re.sub(r"[^A-Za-z0-9]", "-", topic)
        if len(stem) > 75:
            stem = f"{stem[:66]}-{hashlib.sha256(topic.encode()).hexdigest()[:8]}"
        return f"{stem}.fifo"


def parse_address(url: str) -> Address:
    """Read ``sqs://region?endpoint=...&prefix=...&visibility=...``, or say what is wrong with it; never repeat it."""
    try:
        split = urlsplit(url)
        options = dict(parse_qsl(split.query, keep_blank_values=True, strict_parsing=bool(split.query)))
        has_credentials = "@" in split.netloc
    except ValueError:
        raise Refused("the URL of SQS cannot be read; it looks like sqs://eu-central-1") from None
    if has_credentials:
        raise Refused(
            "the URL of SQS holds credentials: take them out; they come from the environment, as for any AWS client"
        )
    if split.scheme != "sqs" or not _REGION.fullmatch(split.netloc) or split.path not in ("", "/") or split.fragment:
        raise Refused("the URL of SQS names a region and nothing else before its options: sqs://eu-central-1")
    if unknown := options.keys() - {"endpoint", "prefix", "visibility"}:
        raise Refused(f"the URL of SQS has endpoint, prefix and visibility for options, not {sorted(unknown)}")
    prefix, visibility = options.get("prefix", "duly-"), options.get("visibility", "30")
    if not _PREFIX.fullmatch(prefix):
        raise Refused("the prefix of SQS queues has at most 40 letters, digits, - or _")
    if not visibility.isascii() or not visibility.isdigit() or int(visibility[:9]) not in VISIBILITY_SECONDS:
        first, last = VISIBILITY_SECONDS[0], VISIBILITY_SECONDS[-1]
        raise Refused(f"visibility is a number of seconds from {first} to {last}: long enough to store a batch")
    return Address(split.netloc, _endpoint(options.get("endpoint")), prefix, int(visibility))


def _endpoint(given: str | None) -> str | None:
    if given is None:
        return None
    split = urlsplit(given)
    if split.scheme not in ("http", "https") or not split.hostname or "@" in split.netloc or split.query:
        raise Refused("the endpoint of SQS is an http or https address without credentials, as https://sqs.example.com")
    return given


class Client:
    """Requests to SQS by the names of queues."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._open = AsyncExitStack()
        self._client: Any = None
        self._session: Any = None  # kept when we hang up: what AWS says of its services takes long to read
        self._opening = asyncio.Lock()
        self._urls: dict[str, str] = {}
        self._largest: dict[str, tuple[float, int]] = {}

    # -- queues -------------------------------------------------------------------------------------------------

    async def reach(self) -> None:
        """Ask anything, to hear whether SQS answers and knows us."""
        try:
            await self._call("list_queues", "", QueueNamePrefix=self.address.prefix, MaxResults=1)
        except (NotNow, PermissionError) as error:
            raise Refused(str(error)) from None

    async def exists(self, name: str) -> bool:
        """Whether there is a queue of that name."""
        try:
            await self._url(name)
        except NotNow as error:
            if not error.is_missing:
                raise Refused(str(error)) from None
            return False
        except PermissionError as error:
            raise Refused(str(error)) from None
        return True

    async def create(self, name: str, attributes: Mapping[str, str]) -> None:
        """Make a queue."""
        try:
            await self._call("create_queue", name, QueueName=name, Attributes=dict(attributes))
        except (NotNow, NotThis) as error:
            raise Refused(f"the queue {name} could not be created: {error}") from None

    async def attributes(self, name: str) -> dict[str, str]:
        """Everything SQS says of a queue."""
        answer = await self._ask("get_queue_attributes", name, AttributeNames=["All"])
        found: dict[str, str] = answer.get("Attributes", {})
        return found

    async def check(self, name: str) -> bool:
        """Whether there is one; refuse one that would lose messages or their order."""
        try:
            found = await self.attributes(name)
        except NotNow as error:
            if error.is_missing:
                return False
            raise Refused(str(error)) from None
        except PermissionError as error:
            raise Refused(str(error)) from None
        if found.get("FifoQueue") != "true":
            raise Refused(f"{name} is no FIFO queue, so it keeps no order: delete it and run `duly brokers setup`")
        if int(found.get("MessageRetentionPeriod", 0)) < SHORTEST_RETENTION_SECONDS:
            raise Refused(
                f"{name} keeps messages for {found.get('MessageRetentionPeriod', 0)} s, so a receiver that is down for "
                f"longer loses some: set MessageRetentionPeriod to {SHORTEST_RETENTION_SECONDS} or more"
            )
        if found.get("RedrivePolicy"):
            raise Refused(
                f"{name} has a redrive policy: while the database is away SQS would move good messages aside, out of "
                "their order. duly keeps dead letters itself: remove the policy"
            )
        return True

    async def largest_message(self, name: str) -> int:
        """How many bytes a message of this queue may have; asked anew from time to time."""
        at, largest = self._largest.get(name, (float("-inf"), 0))
        if monotonic() - at > REMEMBER_SECONDS:
            largest = int((await self.attributes(name)).get("MaximumMessageSize", 256 * 1024))
            self._largest[name] = (monotonic(), largest)
        return largest

    async def waiting(self, name: str) -> int:
        """About how many messages are visible."""
        return int((await self.attributes(name)).get("ApproximateNumberOfMessages", 0))

    # -- messages -----------------------------------------------------------------------------------------------

    async def send(self, name: str, entries: Sequence[Mapping[str, Any]]) -> Any:
        """Send up to ten; the answer has one for each."""
        return await self._ask("send_message_batch", name, Entries=list(entries))

    async def receive(self, name: str, most: int, wait_seconds: int) -> Any:
        """Up to ten messages, which nobody else gets for as long as they are invisible."""
        return await self._ask(
            "receive_message", name,
            MaxNumberOfMessages=most,
            WaitTimeSeconds=wait_seconds,
            VisibilityTimeout=self.address.visibility_seconds,
            MessageAttributeNames=["All"],
            MessageSystemAttributeNames=["MessageGroupId"],
        )  # fmt: skip

    async def delete(self, name: str, handles: Sequence[str]) -> list[Undone]:
        """Delete up to ten; which were not."""
        entries = [{"Id": str(place), "ReceiptHandle": handle} for place, handle in enumerate(handles)]
        return _undone(handles, await self._ask("delete_message_batch", name, Entries=entries))

    async def show(self, name: str, handles: Sequence[str]) -> list[Undone]:
        """Make up to ten visible at once; which were not."""
        entries = [
            {"Id": str(place), "ReceiptHandle": handle, "VisibilityTimeout": 0} for place, handle in enumerate(handles)
        ]
        return _undone(handles, await self._ask("change_message_visibility_batch", name, Entries=entries))

    async def close(self) -> None:
        """Hang up."""
        self._client = None
        await self._open.aclose()

    # -- both ---------------------------------------------------------------------------------------------------

    async def _ask(self, operation: str, name: str, **arguments: Any) -> Any:
        try:
            return await self._call(operation, name, QueueUrl=await self._url(name), **arguments)
        except NotNow as error:
            if error.is_missing:  # made anew it may have another address, and other limits
                self._urls.pop(name, None)
                self._largest.pop(name, None)
            raise

    async def _url(self, name: str) -> str:
        if name not in self._urls:
            self._urls[name] = (await self._call("get_queue_url", name, QueueName=name))["QueueUrl"]
        return self._urls[name]

    async def _call(self, operation: str, name: str, **arguments: Any) -> Any:
        """One request; no more than a bounded time, and none of the client's own repeats."""
        try:
            client = await self._connected()
            async with asyncio.timeout(CALL_SECONDS):
                return await getattr(client, operation)(**arguments)
        except boto.ClientError as error:
            refusal = _refusal(error, name)
            if isinstance(refusal, PermissionError):
                self._session = None  # the next one looks for credentials anew
            raise refusal from None
        except (boto.ParamValidationError, boto.ValidationError):
            raise NotThis(f"{name} cannot take it: a part of the request is not what SQS allows") from None
        except _NO_CREDENTIALS as error:
            self._session = None
            raise PermissionError(f"there are no credentials for AWS that work: {type(error).__name__}") from None
        except boto.BotoCoreError as error:
            raise ConnectionError(f"SQS in {self._place()} cannot be reached: {type(error).__name__}") from None
        except TimeoutError:
            raise TimeoutError(f"SQS in {self._place()} did not answer in time") from None

    async def _connected(self) -> Any:
        async with self._opening:
            if self._session is None:
                await self.close()
                self._session = get_session()
            if self._client is None:
                config = AioConfig(
                    connect_timeout=CONNECT_SECONDS,
                    read_timeout=READ_SECONDS,
                    max_pool_connections=CONNECTIONS,
                    retries={"total_max_attempts": 1, "mode": "standard"},
                )
                made = self._session.create_client(
                    "sqs", region_name=self.address.region, endpoint_url=self.address.endpoint, config=config
                )
                async with asyncio.timeout(OPEN_SECONDS):  # a role's credentials may come over the network
                    self._client = await self._open.enter_async_context(made)
            return self._client

    def _place(self) -> str:
        return self.address.region if self.address.endpoint is None else self.address.endpoint


_NO_CREDENTIALS = (
    boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError, boto.TokenRetrievalError,
    boto.NoAuthTokenError, boto.SSOError, boto.LoginError, boto.ProfileNotFound, boto.ConfigParseError,
)  # fmt: skip


def _refusal(error: boto.ClientError, name: str) -> Exception:
    """What an answer of SQS means. Its own words may repeat what was signed, so only its code is told."""
    code = str(error.response.get("Error", {}).get("Code", "?"))[:100]
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)
    queue = name or "SQS"
    if code in _MISSING:
        return NotNow(f"SQS has no queue {queue}: run `duly brokers setup`, or create it as FIFO", is_missing=True)
    if code in _CREDENTIALS:
        return PermissionError(f"AWS does not accept our credentials ({code}): renew them, and look at the clock")
    if code in _FORBIDDEN:
        return NotNow(f"AWS does not let us use {queue} ({code}): allow it in the policy of our role")
    if status >= 500 or status == 429 or _BUSY.search(code):
        return NotNow(f"{queue} asks us to wait: {code}")
    return NotThis(explain(queue, code))


def is_passing(code: str) -> bool:
    """Whether an error of one entry is no fault of that entry."""
    return code in _FORBIDDEN or code in _CREDENTIALS or _BUSY.search(code) is not None


def explain(name: str, code: str) -> str:
    """Why SQS will never take something. Its own words are not repeated: they may hold a part of it."""
    return f"{name} refused it: {code}: {_WORDS.get(code, 'see the SQS API reference')}"


_WORDS = {
    "InvalidMessageContents": "the event has signs that SQS does not allow",
    "BatchRequestTooLong": "the request has too many bytes",
    "InvalidParameterValue": "a value is not what SQS allows; the message may be larger than the queue takes",
}


def _undone(handles: Sequence[str], answer: Any) -> list[Undone]:
    return [
        Undone(handles[int(one["Id"])], str(one.get("Code", "?")), bool(one.get("SenderFault")))
        for one in answer.get("Failed", [])
    ]
