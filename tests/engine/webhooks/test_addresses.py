"""Which URLs and addresses a webhook may have (E6.4, FAULTS: Webhooks out)."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.errors import Invalid
from duly.webhooks.addresses import Allowed, check_host_addresses, check_url, is_allowed, read_address
from duly.webhooks.deliver import allowed_by
from tests.engine.webhooks.hooks import make_settings

STRICT = Allowed()
METADATA = [
    "169.254.169.254", "169.254.170.2", "168.63.129.16", "100.100.100.200", "192.0.0.192", "fe80::a9fe:a9fe",
    "fd00:ec2::254", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:42::42",
]  # fmt: skip
REFUSED = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.127.255.254", "127.0.0.1", "127.255.0.9",
    "169.254.0.1", "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.88.99.1",
    "192.168.0.1", "198.18.0.1", "198.19.255.255", "198.51.100.7", "203.0.113.9", "224.0.0.1", "239.1.2.3",
    "240.0.0.1", "255.255.255.255", "168.63.129.16", "192.31.196.1", "192.52.193.1", "192.175.48.1",
    "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::10.0.0.1",
    "64:ff9b::127.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b::169.254.169.254", "64:ff9b:1::1", "64:ff9b:1:a00:1::",
    "100::1", "2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:10::1", "2001:20::1", "2001:db8::1",
    "2002:7f00:1::", "2002:a00:1::1", "2002:808:808::1", "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254",
    "fd12:3456::1", "fe80::1", "fec0::1", "ff02::1", "ff0e::1", "2620:4f:8000::1", *METADATA,
]  # fmt: skip
PUBLIC = ["1.1.1.1", "8.8.8.8", "100.63.255.255", "100.128.0.1", "172.15.0.1", "172.32.0.1", "2606:4700::1111",
          "168.63.129.17", "2a00:1450:4001:82a::200e", "64:ff9b::8.8.8.8", "::ffff:8.8.8.8"]  # fmt: skip


@pytest.mark.parametrize("address", REFUSED)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    assert not is_allowed(read_address(address), STRICT)
    literal = f"https://[{address}]/" if ":" in address else f"https://{address}/"
    with pytest.raises(Invalid):
        check_url(literal, STRICT)
    with pytest.raises(ValueError, match="not public"):
        check_host_addresses(["8.8.8.8", address], STRICT)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_allowed(address: str) -> None:
    assert is_allowed(read_address(address), STRICT)
    check_url(f"https://[{address}]/" if ":" in address else f"https://{address}/", STRICT)


@given(st.ip_addresses(v=4))
def test_no_private_address_passes_in_any_disguise(address: ipaddress.IPv4Address) -> None:
    """The standard library's own opinion is the oracle."""
    number = int(address)
    disguises = [
        ipaddress.IPv6Address((0xFFFF << 32) | number),
        ipaddress.IPv6Address((0x64FF9B << 96) | number),
    ]
    for disguise in disguises:
        assert is_allowed(disguise, STRICT) == is_allowed(address, STRICT)
    assert not is_allowed(ipaddress.IPv6Address((0x2002 << 112) | (number << 80)), STRICT)
    if address.is_private or address.is_multicast or address.is_reserved or not address.is_global:
        assert not is_allowed(address, STRICT)


@given(st.ip_addresses(v=6))
def test_no_ipv6_address_passes_that_is_not_global(address: ipaddress.IPv6Address) -> None:
    if not address.is_global and address.ipv4_mapped is None and address not in ipaddress.ip_network("64:ff9b::/96"):
        assert not is_allowed(address, STRICT)


@pytest.mark.parametrize(
    "url",
    [
        "https://2130706433/", "https://0x7f000001/", "https://0x7f.0.0.1/", "https://0177.0.0.1/", "https://127.1/",
        "https://127.0.1/", "https://017700000001/", "https://127.0.0.1./", "https://127.0.0.1:443@evil.test/",
        "https://8.8.8.8@127.0.0.1/", "https://user:pass@example.com/", "https://example.com\\@127.0.0.1/",
        "https://example.com#@127.0.0.1/", "https://[::1%25lo]/", "https://[fe80::1%eth0]/", "https://[::ffff:7f00:1]/",
        "https://[0:0:0:0:0:0:0:1]/", "https://localhost/", "https://a.localhost/", "https://db.internal/",
        "https://printer.local/", "https://intranet/", "https://ex ample.com/", "https://exam\tple.com/",
        "https://exam\nple.com/", "https://ex%61mple.com/", "https://münchen.example/", "https:///path", "https://",
        "https://example.com:0/", "https://example.com:25/", "https://example.com:6379/", "https://example.com:99999/",
        "https://example.com:x/", "http://example.com/", "ftp://example.com/", "file:///etc/passwd", "gopher://x/",
        "javascript:alert(1)", "//example.com/", "example.com", "https://-bad.example/", "https://bad-.example/",
        "https://a..b/", "https://" + "a" * 64 + ".com/", "https://example.com/" + "x" * 2_000, "https://0/",
        "https://1.2.3.4.5/", "https://example.0x1/", "https://[127.0.0.1]/", "https://①②⑦.0.0.1/",
    ],
)  # fmt: skip
def test_a_url_that_could_lead_elsewhere_is_refused(url: str) -> None:
    with pytest.raises(Invalid):
        check_url(url, STRICT)


@pytest.mark.parametrize(
    "url",
    ["https://example.com", "https://example.com/a?b=c&d=%20", "https://EXAMPLE.com:8443/x", "https://xn--mnchen-3ya.de/",
     "https://a_b.example.com/", "https://8.8.8.8:8443/", "https://[2606:4700::1111]:8443/x"],
)  # fmt: skip
def test_an_honest_url_is_taken(url: str) -> None:
    assert check_url(url, STRICT) == url


def test_development_may_reach_its_own_machine_and_nothing_else_private() -> None:
    allowed = Allowed.read((), development=True, http=False)
    check_url("http://127.0.0.1:9000/", allowed)
    check_url("http://localhost:9000/", allowed)
    for private in ("10.0.0.1", "169.254.169.254", "192.168.1.1", "0.0.0.0"):
        assert not is_allowed(read_address(private), allowed)


def test_configuration_allows_networks_by_name() -> None:
    allowed = Allowed.read(("10.1.0.0/16", "fd00::/8"), development=False, http=False)
    assert is_allowed(read_address("10.1.2.3"), allowed)
    assert is_allowed(read_address("::ffff:10.1.2.3"), allowed)
    assert is_allowed(read_address("fd12::1"), allowed)
    assert not is_allowed(read_address("10.2.0.1"), allowed)
    assert not is_allowed(read_address("127.0.0.1"), allowed)
    with pytest.raises(Invalid):
        check_url("http://10.1.2.3/", allowed)


def test_everywhere_does_not_include_what_a_cloud_tells_its_machines() -> None:
    allowed = Allowed.read(("true",), development=False, http=True)
    assert is_allowed(read_address("192.168.0.1"), allowed)
    for private in ("100.100.100.199", "192.0.0.191", "fd20:ce::253", "fd00:42::41"):
        assert is_allowed(read_address(private), allowed)
    for never in (*METADATA, "0.0.0.0", "224.0.0.1", "::"):
        assert not is_allowed(read_address(never), allowed)
    with pytest.raises(Invalid, match="networks"):
        Allowed.read(("10.0.0.0/99",), development=False, http=False)


@pytest.mark.parametrize("never", [*(one for one in METADATA if ":" not in one), "0.0.0.0", "224.0.0.1"])
@pytest.mark.parametrize("disguise", ["::ffff:", "64:ff9b::", "::"])
def test_everywhere_does_not_include_it_in_disguise(disguise: str, never: str) -> None:
    allowed = Allowed.read(("true",), development=False, http=True)
    assert is_allowed(read_address(f"{disguise}192.168.0.1"), allowed)
    assert not is_allowed(read_address(f"{disguise}{never}"), allowed)


def test_production_reaches_what_its_settings_say_and_not_its_own_machine() -> None:
    production = allowed_by(make_settings(env="production"))
    with pytest.raises(Invalid, match="https"):
        check_url("http://example.com/", production)
    assert not is_allowed(read_address("127.0.0.1"), production)
    named = allowed_by(make_settings(env="production", webhook_allow_private=("10.1.0.0/16",), webhook_allow_http=True))
    check_url("http://10.1.2.3/", named)
    assert not is_allowed(read_address("10.2.0.1"), named)
    assert is_allowed(read_address("127.0.0.1"), allowed_by(make_settings(env="development")))
