"""Messages whose properties the client cannot read.

RabbitMQ carries what a publisher wrote: a timestamp in microseconds, a routing key or a header's name that is no UTF-8.
The client ends the whole connection at such a thing, and would meet the same message first on the next one, for ever.
So its decoders are asked through ours, which leave out what cannot be read: the message comes, and is buried as one
that is no event. This is for the whole process, and changes nothing of what can be read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pamqp import decode

Read = Callable[..., tuple[int, Any]]


def install() -> None:
    """Put ours before theirs; done once, when the source is imported."""
    decode.METHODS["shortstr"] = _otherwise(decode.short_str, _any_text)
    decode.METHODS["timestamp"] = _otherwise(decode.timestamp, _no_time)
    decode.METHODS["table"] = _otherwise(decode.field_table, _no_table)
    decode.TABLE_MAPPING[b"T"] = decode.METHODS["timestamp"]


def _otherwise(theirs: Read, ours: Read) -> Read:
    def read(value: bytes, *more: Any) -> tuple[int, Any]:
        try:
            return theirs(value, *more)
        except Exception:  # noqa: BLE001 - whatever it is that they cannot read
            return ours(value)

    return read


def _any_text(value: bytes) -> tuple[int, str]:
    length = value[0]
    return 1 + length, value[1 : 1 + length].decode("utf-8", "replace")


def _no_time(_: bytes) -> tuple[int, None]:
    return 8, None


def _no_table(value: bytes) -> tuple[int, dict[str, Any]]:
    return 4 + int.from_bytes(value[:4], "big"), {}
