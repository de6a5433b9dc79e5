"""Where a webhook may go: the rules for URLs and for the addresses behind them; nothing here asks the network.

An address is refused unless it is known to be public. What stands inside another address (mapped, NAT64) is looked at
as what it is. The rule is asked twice: for the URL when a subscription is made, and for every address that a name
leads to, each time before it is dialled.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import urlsplit

from duly.errors import Invalid

Address = IPv4Address | IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
LONGEST_URL = 2_000
EVERYWHERE = "true"
_ADDRESS_LIKE = re.compile(r"[0-9a-fA-F:.]+")
_URL = re.compile(r"[!-~]+")
_LABEL = re.compile(r"(?!-)[a-zA-Z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
_LOCAL_NAMES = ("localhost", "local", "internal", "localdomain", "home.arpa", "lan", "intranet", "corp", "home")
# Services that are no web servers, and that a POST could make do something.
_REFUSED_PORTS = frozenset({0, 1, 7, 9, 19, 21, 22, 23, 25, 53, 110, 111, 135, 139, 143, 445, 465, 587, 993, 995})
_REFUSED_PORTS |= frozenset({2049, 3306, 5432, 6379, 9200, 11211, 27017})

_SPECIAL_V4 = [
    ipaddress.IPv4Network(net)
    for net in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16",  # private
        "100.64.0.0/10",  # carriers' NAT
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local, and the clouds' metadata
        "192.0.0.0/24", "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24",  # protocols, documentation
        "192.31.196.0/24", "192.52.193.0/24", "192.175.48.0/24",  # AS112, AMT
        "192.88.99.0/24",  # 6to4 relays
        "168.63.129.16/32",  # Azure's platform, for each of its machines
        "198.18.0.0/15",  # benchmarks
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
]  # fmt: skip
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")  # nothing else is assigned: ULA, link-local, site-local, mapped, ...
_SPECIAL_V6 = [
    ipaddress.IPv6Network(net)
    for net in (
        "2001::/23",  # Teredo, ORCHID, benchmarks and other protocols
        "2001:db8::/32", "3fff::/20",  # documentation
        "2002::/16",  # 6to4: an IPv4 address in disguise, through anybody's relay
        "2620:4f:8000::/48",  # AS112
    )
]  # fmt: skip
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")
_NEVER = [ipaddress.ip_network(net) for net in ("0.0.0.0/8", "224.0.0.0/4", "255.255.255.255/32", "::/128", "ff00::/8")]
_LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
# Only a network that names it opens the door to what a cloud tells its machines.
_METADATA = tuple(
    ipaddress.ip_network(net)
    for net in (
        "169.254.0.0/16", "fe80::/10",  # nearly all of them, and OpenStack over IPv6
        "168.63.129.16/32",  # Azure
        "100.100.100.200/32",  # Alibaba
        "192.0.0.192/32", "fd00:c1::a9fe:a9fe/128",  # Oracle
        "fd00:ec2::/32",  # AWS
        "fd20:ce::254/128",  # Google
        "fd00:42::42/128",  # Scaleway
    )
)  # fmt: skip


@dataclass(frozen=True)
class Allowed:
    """What configuration allows beyond public addresses and https."""

    networks: tuple[Network, ...] = ()
    everywhere: bool = False
    http: bool = False

    @classmethod
    def read(cls, given: Iterable[str], *, development: bool, http: bool) -> Allowed:
        """From the settings; development may also send to its own machine, without TLS."""
        words = [word.strip() for word in given if word.strip()]
        everywhere = any(word.lower() in (EVERYWHERE, "1", "yes") for word in words)
        try:
            named = [
                ipaddress.ip_network(word) for word in words if word.lower() not in (EVERYWHERE, "1", "yes", "false")
            ]
        except ValueError:
            raise Invalid("DULY_WEBHOOK_ALLOW_PRIVATE lists networks, as in 10.0.0.0/8,fd00::/8, or is true") from None
        networks = (*named, *(_LOOPBACK if development else ()))
        return cls(networks, everywhere, http or development)

    def names(self, address: Address) -> bool:
        """Whether one of the networks holds it."""
        return any(address.version == net.version and address in net for net in self.networks)


def read_address(text: str) -> Address:
    """An address as a resolver gives it, perhaps with a zone; ValueError for anything else."""
    return ipaddress.ip_address(text.partition("%")[0])


def is_allowed(address: Address, allowed: Allowed) -> bool:
    """Whether it may be dialled."""
    real = unwrapped(address)
    if any(real.version == net.version and real in net for net in _NEVER):
        return False
    if is_public(real) or allowed.names(real) or allowed.names(address):
        return True
    is_metadata = any(real.version == net.version and real in net for net in _METADATA)
    return allowed.everywhere and not is_metadata


def is_public(address: Address) -> bool:
    """Whether it belongs to the public Internet; an address within another one is not looked through here."""
    if isinstance(address, IPv4Address):
        return not any(address in net for net in _SPECIAL_V4)
    return address in _GLOBAL_V6 and not any(address in net for net in _SPECIAL_V6)


def unwrapped(address: Address) -> Address:
    """The IPv4 address that a mapped, compatible or NAT64 one leads to; itself otherwise."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def check_url(url: str, allowed: Allowed) -> str:
    """Refuse a URL that could lead somewhere else than it says; with what to write instead."""
    if len(url) > LONGEST_URL or not _URL.fullmatch(url) or "\\" in url:
        raise Invalid(f"the URL has 1 to {LONGEST_URL} visible ASCII characters, and no backslash")
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError:
        raise Invalid("the URL cannot be read: write it as https://host/path") from None
    if not url.startswith(("https://", "http://")) or not parts.netloc:
        raise Invalid("the URL starts with https://")
    if parts.scheme == "http" and not allowed.http:
        raise Invalid("the URL starts with https://: without TLS anybody on the way could read it")
    if "@" in parts.netloc or "#" in url:
        raise Invalid("the URL has no user, password or fragment")
    if port is not None and port in _REFUSED_PORTS:
        raise Invalid(f"port {port} is not a web server's")
    if not host:
        raise Invalid("the URL names a host")
    _check_host(host, parts.netloc, allowed)
    return url


def check_host_addresses(addresses: Sequence[str], allowed: Allowed) -> list[Address]:
    """Every address that a name leads to, or none of them: a name with one foot inside is not trusted with the other.

    ValueError, in words without values, when one may not be dialled.
    """
    if not addresses:
        raise ValueError("the name leads to no address")
    found = [read_address(text) for text in addresses]
    if not all(is_allowed(address, allowed) for address in found):
        raise ValueError("the name leads to an address that is not public")
    return list(dict.fromkeys(found))


def _check_host(host: str, netloc: str, allowed: Allowed) -> None:
    """A canonical dotted quad, an IPv6 address in brackets, or a DNS name: other spellings mean different things to
    different readers."""
    if netloc.startswith("["):
        if "%" in host or not _ADDRESS_LIKE.fullmatch(host):
            raise Invalid("the IPv6 address cannot be read")
        _check_literal(host, allowed)
        return
    labels = host.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        _check_literal(host, allowed)  # only four decimal numbers without leading zeros pass
        return
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise Invalid(
            "the host is a DNS name in ASCII (IDNA), an IPv4 address as 192.0.2.1, or an IPv6 one in brackets"
        )
    is_local = len(labels) == 1 or any(host == name or host.endswith(f".{name}") for name in _LOCAL_NAMES)
    if is_local and not (allowed.networks or allowed.everywhere):
        raise Invalid("the host is a name of a private network")


def _check_literal(host: str, allowed: Allowed) -> None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise Invalid("the host looks like an address, but is none: write it as 192.0.2.1 or [2001:db8::1]") from None
    if not is_allowed(address, allowed):
        raise Invalid("the address is not public")
