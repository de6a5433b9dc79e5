"""One attempt on the wire: what is dialled was checked, and nothing a receiver does costs more than its time."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from duly.clock import monotonic
from duly.webhooks import sender as sender_module
from duly.webhooks.addresses import Allowed
from duly.webhooks.sender import ANSWER_BYTES, MOST_PIECES, Answer, Sender
from tests.engine.webhooks.subscriber import Request, answering, subscriber

LOOPBACK = Allowed.read((), development=True, http=True)
SECOND_LOOPBACK_ONLY = Allowed.read(("127.0.0.2/32",), development=False, http=True)


class Resolver:
    """Answers differently each time it is asked, and remembers how often that was."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.asked = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked += 1
        return self._answers[min(self.asked, len(self._answers)) - 1]


async def send(sender: Sender, url: str, *, seconds: float = 5.0, body: bytes = b"{}") -> Answer:
    return await sender.send(url, headers={"X-Event-Type": "t"}, body=body, timeout_seconds=seconds)


async def test_a_name_that_changes_between_check_and_dial_is_dialled_where_it_was_checked() -> None:
    """FAULTS: DNS rebinding. The inner server listens on the address of the second answer, and nobody comes."""
    async with subscriber(host="127.0.0.2") as outer, subscriber(host="127.0.0.1", port=outer.port) as inner:
        resolver = Resolver(["127.0.0.2"], ["127.0.0.1"])
        sender = Sender(SECOND_LOOPBACK_ONLY, resolve=resolver)
        answer = await send(sender, f"http://rebind.example:{outer.port}/hook")
        assert (answer.error, answer.address, resolver.asked) == (None, "127.0.0.2", 1)
        assert outer.requests[0].headers["host"] == f"rebind.example:{outer.port}"
        answer = await send(sender, f"http://rebind.example:{outer.port}/hook")
        assert (answer.error, answer.address) == ("refused_address", None)
    assert (len(outer.requests), inner.connections) == (1, 0)


@pytest.mark.parametrize("inside", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1", "0.0.0.0"])
async def test_a_name_with_one_foot_inside_is_not_dialled_at_all(inside: str) -> None:
    async with subscriber(host="127.0.0.2") as one:
        sender = Sender(SECOND_LOOPBACK_ONLY, resolve=Resolver(["127.0.0.2", inside]))
        answer = await send(sender, f"http://both.example:{one.port}/hook")
    assert (answer.error, one.connections) == ("refused_address", 0)


async def test_an_address_in_the_url_is_checked_before_it_is_dialled() -> None:
    """Also when it was stored before the rules were what they are."""
    async with subscriber(host="127.0.0.1") as one:
        answer = await send(Sender(SECOND_LOOPBACK_ONLY), one.url)
    assert (answer.error, one.connections) == ("refused_address", 0)


async def test_a_redirect_is_a_failure_and_is_not_followed() -> None:
    async with subscriber() as inner:
        location = f"Location: {inner.url}\r\n"
        for status in (301, 302, 303, 307, 308):
            async with subscriber(answering(status, headers=location)) as one:
                answer = await send(Sender(LOOPBACK), one.url)
            assert (answer.error, answer.http_status, answer.response_headers["location"]) == (
                "redirect", status, inner.url,
            )  # fmt: skip
    assert inner.connections == 0


async def test_an_endless_answer_is_read_as_far_as_anybody_needs() -> None:
    written = 0

    async def endless(_request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            written += 0x10000
            await writer.drain()

    async with subscriber(endless) as one:
        answer = await send(Sender(LOOPBACK), one.url)
    assert (answer.error, answer.http_status, len(answer.response_excerpt)) == (None, 200, 2048)
    assert written < 100 * ANSWER_BYTES


async def test_an_answer_in_thousands_of_pieces_is_not_waited_for() -> None:
    async def crumbs(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * MOST_PIECES)
        await asyncio.Event().wait()

    async with subscriber(crumbs) as one:
        answer = await send(Sender(LOOPBACK), one.url)
    assert (answer.error, answer.http_status) == (None, 200)


async def test_headers_without_end_are_a_failure() -> None:
    async def endless(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while not writer.is_closing():
            writer.write(b"X-Filler: " + b"y" * 8_000 + b"\r\n")
            await writer.drain()

    async with subscriber(endless) as one:
        answer = await send(Sender(LOOPBACK), one.url)
    assert answer.error in ("protocol", "connection_lost")


async def stall(_request: Request, _writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def drip(_request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def drip_headers(_request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(("behave", "error"), [(stall, "timeout"), (drip, "slow_body"), (drip_headers, "timeout")])
async def test_a_slow_receiver_costs_its_time_out_and_no_more(behave: object, error: str) -> None:
    async with subscriber(behave) as one:  # type: ignore[arg-type]  # parametrised
        began = monotonic()
        answer = await send(Sender(LOOPBACK), one.url, seconds=0.5)
        assert (answer.error, monotonic() - began < 3) == (error, True)
        assert answer.latency_ms >= 450


@pytest.mark.parametrize(
    ("raw", "error"),
    [(b"", "protocol"), (b"nonsense\r\n\r\n", "protocol"),
     (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", "protocol"), (b"HTTP/1.1 9999 No\r\n\r\n", "protocol")],
)  # fmt: skip
async def test_an_answer_that_is_none_is_a_failure(raw: bytes, error: str) -> None:
    async def behave(_request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)

    async with subscriber(behave) as one:
        answer = await send(Sender(LOOPBACK), one.url)
    assert answer.error in (error, "connection_lost")


async def test_what_cannot_be_reached_or_found_is_said_in_a_word() -> None:
    async with subscriber() as one:
        url = one.url
    assert (await send(Sender(LOOPBACK), url)).error == "connect"

    async def unknown(_host: str, _port: int) -> Sequence[str]:
        raise OSError("Name or service not known")

    async def silent(_host: str, _port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    async def empty(_host: str, _port: int) -> Sequence[str]:
        return []

    for resolve in (unknown, empty):
        assert (await send(Sender(LOOPBACK, resolve=resolve), "http://nobody.example/")).error == "dns"
    assert (await send(Sender(LOOPBACK, resolve=silent), "http://x.example/", seconds=0.3)).error == "timeout"


async def test_the_next_address_is_tried_when_one_does_not_answer() -> None:
    async with subscriber(host="127.0.0.3") as one:
        sender = Sender(LOOPBACK, resolve=Resolver(["127.0.0.2", "127.0.0.3"]))
        answer = await send(sender, f"http://two.example:{one.port}/")
    assert (answer.error, answer.address) == (None, "127.0.0.3")


async def test_of_many_addresses_so_many_are_dialled() -> None:
    """A name is no list of what somebody else wants to have tried."""
    async with subscriber(host="127.0.0.5") as one:
        sender = Sender(LOOPBACK, resolve=Resolver(["127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"]))
        answer = await send(sender, f"http://many.example:{one.port}/")
    assert (answer.error, answer.address, one.connections) == ("connect", "127.0.0.4", 0)


async def test_a_name_server_that_is_silent_is_not_waited_for_as_long_as_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender_module, "DNS_SECONDS", 0.1)

    async def silent(_host: str, _port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    answer = await send(Sender(LOOPBACK, resolve=silent), "http://silent.example/", seconds=20)
    assert (answer.error, answer.address) == ("dns", None)


async def test_of_an_answers_headers_few_are_kept_and_those_in_short() -> None:
    """A cookie of the receiver's, or whatever else it says, is nothing that a log needs."""
    said = "Set-Cookie: session=canary\r\nX-Api-Key: canary\r\nServer: " + "s" * 5_000 + "\r\n"
    async with subscriber(answering(500, headers=said)) as one:
        answer = await send(Sender(LOOPBACK), one.url)
    assert answer.response_headers == {"content-length": "0", "server": "s" * 300}


async def test_no_proxy_cookie_or_connection_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async with subscriber() as proxy, subscriber(answering(200, headers="Set-Cookie: a=b\r\n")) as one:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        sender = Sender(LOOPBACK)
        for _ in range(2):
            assert (await send(sender, one.url)).delivered
    assert (proxy.connections, one.connections) == (0, 2)
    assert "cookie" not in one.requests[1].headers


async def test_an_excerpt_is_text_that_can_be_stored() -> None:
    async with subscriber(answering(500, body=b"\x00\xff\xfe" + "é\ud83d\ude00".encode("utf-8", "replace"))) as one:
        answer = await send(Sender(LOOPBACK), one.url)
    assert "\x00" not in answer.response_excerpt
    answer.response_excerpt.encode()


# -- TLS ---------------------------------------------------------------------------------------------------------------


def make_tls(directory: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context for this name, and a client's that trusts its certificate and no other."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    names: list[x509.GeneralName] = [x509.DNSName(name)]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = directory / f"{name}.pem"
    pem.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pem)
    client = ssl.create_default_context(cadata=certificate.public_bytes(serialization.Encoding.PEM).decode())
    return server, client


async def test_tls_asks_for_the_names_certificate_although_an_address_is_dialled(tmp_path: Path) -> None:
    server, client = make_tls(tmp_path, "hooks.example")
    async with subscriber(tls=server) as one:
        resolve = Resolver(["127.0.0.1"])
        sender = Sender(LOOPBACK, resolve=resolve, ssl_context=client)
        assert (await send(sender, f"https://hooks.example:{one.port}/")).error is None
        assert (await send(sender, f"https://other.example:{one.port}/")).error == "tls"
        assert (await send(Sender(LOOPBACK, resolve=resolve), f"https://hooks.example:{one.port}/")).error == "tls"
        assert (await send(sender, one.url)).error == "tls"  # no certificate names the address
    assert len(one.requests) == 1


async def test_a_flood_through_tls_is_as_bounded_as_without(tmp_path: Path) -> None:
    server, client = make_tls(tmp_path, "hooks.example")

    async def flood(_request: Request, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(b"HTTP/1.1 100 Go\r\n\r\n" * 3_000)
            await writer.drain()

    async with subscriber(flood, tls=server) as one:
        sender = Sender(LOOPBACK, resolve=Resolver(["127.0.0.1"]), ssl_context=client)
        answer = await send(sender, f"https://hooks.example:{one.port}/", seconds=20)
    assert answer.error == "protocol"


async def test_https_to_a_server_without_tls_is_a_failure() -> None:
    async with subscriber() as one:
        answer = await send(Sender(LOOPBACK), one.url.replace("http://", "https://"), seconds=0.5)
    assert answer.error in ("tls", "connect", "timeout")  # it may wait for a line that never comes
