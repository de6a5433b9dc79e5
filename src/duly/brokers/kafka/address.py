"""The address of a Kafka: ``kafka[+ssl]://[user:password@]host[:port][,host...][/?option=value&...]``.

Options are settings of the client as its own documentation names them (``sasl.mechanism``, ``ssl.ca.location``), and
three of ours for the topics that setup creates: partitions, replication, retention_days. What order and durability
rest on cannot be set.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote

from duly.errors import Refused

TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_ADDRESS = re.compile(
    r"kafka(?P<tls>\+ssl)?://((?P<user>[^:@/?]+):(?P<password>[^@/?]*)@)?(?P<hosts>[^@/?#]+)/?(\?(?P<options>[^#]*))?"
)
_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?")
_OURS = {
    "acks", "allow.auto.create.topics", "auto.offset.reset", "bootstrap.servers", "delivery.timeout.ms",
    "enable.auto.commit", "enable.auto.offset.store", "enable.gapless.guarantee", "enable.idempotence",
    "enable.partition.eof", "error_cb", "group.id", "group.instance.id", "group.protocol", "isolation.level",
    "log_level", "message.timeout.ms", "metadata.broker.list", "on_commit", "partition.assignment.strategy",
    "partitioner", "plugin.library.paths", "request.required.acks", "transactional.id",
}  # fmt: skip
# Of every client: nothing is said on stderr (errors are ours to tell), and a broker that came back is found soon.
_EVERY = {
    "client.id": "duly",
    "log_level": 0,
    "allow.auto.create.topics": False,
    "socket.timeout.ms": 15_000,
    "socket.keepalive.enable": True,
    "reconnect.backoff.ms": 100,
    "reconnect.backoff.max.ms": 2_000,
    "topic.metadata.refresh.interval.ms": 15_000,
}


@dataclass(frozen=True)
class Address:
    """Where Kafka is, and how it is spoken to; its text is never shown, for it may hold a password."""

    client: dict[str, Any]
    partitions: int = 12
    replication: int | None = None  # None: three, or as many as there are brokers
    retention_days: int = 7

    def __repr__(self) -> str:
        return f"Address({self.client['bootstrap.servers']})"


def parse(url: str) -> Address:
    """The address in a URL, or Refused with a sentence that does not repeat it: it may hold a password."""
    found = _ADDRESS.fullmatch(url)
    hosts = found["hosts"].split(",") if found else []
    if found is None or not all(_HOST.fullmatch(host) for host in hosts):
        raise Refused(
            "the address of Kafka cannot be read: write kafka://host:9092, or kafka+ssl://user:password@a:9093,b:9093"
        )
    options = dict(parse_qsl(found["options"] or "", keep_blank_values=True))
    if taken := sorted(_OURS & options.keys()):
        raise Refused(f"{', '.join(taken)} cannot be set in the address of Kafka: order and durability rest on it")
    ours = {name: _number(name, options.pop(name)) for name in _LIMITS if name in options}
    servers = ",".join(host if re.search(r":[0-9]+$", host) else f"{host}:9092" for host in hosts)
    client = {**_EVERY, "bootstrap.servers": servers, "security.protocol": "ssl" if found["tls"] else "plaintext"}
    if found["user"]:
        client |= {
            "security.protocol": "sasl_ssl" if found["tls"] else "sasl_plaintext",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": unquote(found["user"]),
            "sasl.password": unquote(found["password"]),
        }
    return Address(client=client | options, **ours)


_LIMITS = {"partitions": 1_000, "replication": 9, "retention_days": 3_650}


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= _LIMITS[name]:
        raise Refused(f"{name} in the address of Kafka is a number from 1 to {_LIMITS[name]}")
    return int(text)
