"""Streams of JetStream: which one takes a topic, what is wrong with it, and how we name what was read from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import unquote

import structlog
from nats.js.api import (
    DiscardPolicy,
    PersistMode,
    RetentionPolicy,
    StorageType,
    StreamConfig,
    StreamInfo,
)
from nats.js.errors import NotFoundError

from duly.brokers.nats_link import Address, Link
from duly.errors import Invalid, Refused

log = structlog.get_logger("duly.nats")
PREFIX = "duly"
DAY_SECONDS = 86_400.0
KEEP_SECONDS = 7 * DAY_SECONDS
DUPLICATE_SECONDS = 120.0  # a relay that was killed is followed by another within a minute
MAX_PAGES = 100
_PART = re.compile(r"[A-Za-z0-9_:-]+")


def subject_of(topic: str, type_: str) -> str:
    """Where an event is published; Invalid when its names cannot be parts of a subject."""
    subject = f"{PREFIX}.{topic}.{type_}"
    if not all(_PART.fullmatch(part) for part in subject.split(".")):
        raise Invalid(f"{topic!r} and {type_!r} make no subject of NATS: nothing may be empty between two dots")
    return subject


def covers(pattern: str, subject: str) -> bool:
    """Whether a pattern (``duly.shop.>``) takes everything that this subject, or other pattern, stands for."""
    wanted, given = pattern.split("."), subject.split(".")
    for index, part in enumerate(wanted):
        if part == ">":
            return len(given) > index
        if index >= len(given) or given[index] == ">" or part not in ("*", given[index]):
            return False
    return len(wanted) == len(given)


def cover(patterns: Iterable[str]) -> list[str]:
    """The fewest of these patterns that take the same: the server refuses those that overlap."""
    every = sorted(set(patterns))
    return [one for one in every if not any(other != one and covers(other, one) for other in every)]


def inner_topic(subject: str, headers: Mapping[str, str], topics: Sequence[str]) -> str | None:
    """The topic of a message; None when it is another one's (``shop.>`` takes the topic ``shop.orders``, too).

    Our own events say it, so that ``shop`` and ``orders.placed`` is not taken for ``shop.orders`` and ``placed``.
    A stranger's belongs to the longest of our topics that its subject begins with.
    """
    said = unquote(headers.get("ce-source", "")).rpartition("/")[2]
    type_ = unquote(headers.get("ce-type", ""))
    if said and type_ and subject == f"{PREFIX}.{said}.{type_}":
        return said if said in topics else None
    return max((topic for topic in topics if subject.startswith(f"{PREFIX}.{topic}.")), key=len, default=None)


def shard_of(info: StreamInfo, positions: Mapping[str, int]) -> str:
    """The name under which we keep how far we read: the stream, when it was created, and which of its lives this is.

    A stream made anew counts from one again. One that lost its end (its server's machine died before a sync) counts
    on from there with numbers that we have read already: it is read from the beginning, under a new name, and what
    we know of it is known.
    """
    assert info.created is not None, "every stream has a moment of creation"
    base = f"{info.config.name}@{info.created.isoformat()}"
    lives = [int(name[len(base) + 1 :] or 0) for name in positions if _is_life(name, base)]
    life = max(lives, default=0)
    shard = f"{base}+{life}" if life else base
    if positions.get(shard, 0) <= info.state.last_seq:
        return shard
    log.error("stream_lost_its_end", stream=info.config.name, read=positions[shard], last=info.state.last_seq)
    return f"{base}+{life + 1}"


def _is_life(name: str, base: str) -> bool:
    return name == base or (name.startswith(base + "+") and name[len(base) + 1 :].isdigit())


async def find_streams(link: Link, subject: str) -> list[StreamInfo]:
    """Every stream that takes some of this subject, by name."""
    names: list[str] = []
    for _ in range(MAX_PAGES):
        found = await link.get("$JS.API.STREAM.NAMES", {"subject": subject, "offset": len(names)})
        names += found.get("streams") or []
        if len(names) >= int(found.get("total", 0)) or not found.get("streams"):
            break
    infos = []
    for name in sorted(names):
        try:
            infos.append(await link.js.stream_info(name))
        except NotFoundError:  # deleted since
            continue
    return infos


def check_streams(streams: Sequence[StreamInfo]) -> None:
    """Refuse what would lose messages that were acknowledged, or were not read yet."""
    for info in streams:
        faults = _faults(info.config)
        if faults:
            raise Refused(f"the stream {info.config.name} of NATS would lose events: {'; '.join(faults)}")
        if (info.config.num_replicas or 1) < 2:
            log.warning("stream_on_one_server", stream=info.config.name)


def _faults(config: StreamConfig) -> list[str]:
    bounded = any((limit or -1) > 0 for limit in (config.max_msgs, config.max_bytes))
    faults = {
        "it is in memory; make it anew with storage=file": config.storage != StorageType.FILE,
        "it does not acknowledge; set no_ack=false": config.no_ack,
        "it acknowledges before it has written; unset persist_mode": config.persist_mode == PersistMode.ASYNC,
        "it drops what others have read or nobody waits for; make it anew with retention=limits":
            config.retention not in (None, RetentionPolicy.LIMITS),
        "it drops the oldest when it is full, read or not; set discard=new, and publishing waits instead":
            bounded and config.discard != DiscardPolicy.NEW,
        "it keeps only the last messages of a subject; set max_msgs_per_subject=-1": config.max_msgs_per_subject > 0,
        "it keeps messages for less than a day; set max_age to 24h or more, or 0":
            0 < (config.max_age or 0) < DAY_SECONDS,
        "it forgets ids sooner than a killed relay is replaced; set duplicate_window to 2m or more":
            config.duplicate_window < DUPLICATE_SECONDS,
        "it is sealed": config.sealed,
    }  # fmt: skip
    return [sentence for sentence, found in faults.items() if found]


async def create_streams(link: Link, topics: Sequence[str], address: Address) -> list[str]:
    """One stream on disk for whatever no stream takes yet; a sentence for what was done."""
    streams = await find_streams(link, f"{PREFIX}.>")
    taken = [subject for info in streams for subject in info.config.subjects or []]
    missing = [
        f"{PREFIX}.{topic}.>" for topic in topics if not any(covers(one, f"{PREFIX}.{topic}.>") for one in taken)
    ]
    if not streams:
        missing = [f"{PREFIX}.>"]
    if not missing:
        return []
    name = address.options.get("stream", "duly")
    ours = next((info for info in streams if info.config.name == name), None)
    if ours is None:
        await link.js.add_stream(_new_stream(name, cover(missing), int(address.options.get("replicas", "1"))))
        return [f"stream {name} created, for {', '.join(cover(missing))}"]
    ours.config.subjects = cover([*(ours.config.subjects or []), *missing])
    await link.js.update_stream(ours.config)
    return [f"stream {name} takes {', '.join(cover(missing))}, too"]


def _new_stream(name: str, subjects: list[str], replicas: int) -> StreamConfig:
    return StreamConfig(
        name=name,
        subjects=subjects,
        storage=StorageType.FILE,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.NEW,
        max_age=KEEP_SECONDS,
        duplicate_window=DUPLICATE_SECONDS,
        num_replicas=replicas,
    )
