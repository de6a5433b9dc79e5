"""What an answer of the bank means, over real HTTP: only its own words are believed (F6, F7)."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio

from apps.finance.payments.gateways import (
    CALLBACK_VARIABLE,
    MOST_ANSWER_BYTES,
    TIMEOUT_VARIABLE,
    TOKEN_VARIABLE,
    URL_VARIABLE,
    HttpBank,
    NoBank,
    read_line,
)
from apps.finance.payments.model import Order, Report
from tests.apps.finance.payments.acting import Payers
from tests.apps.finance.payments.test_model import payment
from tests.support import rows

ORDER = Order(
    UUID(int=1), UUID(int=2), 1, "bank", UUID(int=3), UUID(int=4), "10.00", "PLN", datetime(2030, 1, 1, tzinfo=UTC)
)
TAKEN = {"reference": "b1", "status": "PENDING"}


@dataclass
class Scripted:
    """Answers every request with the same bytes, and keeps what it was sent."""

    answer: bytes = b""
    requests: list[bytes] = field(default_factory=list)

    def say(self, status: int, body: Any, *, headers: str = "") -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\nConnection: close\r\n{headers}\r\n"
        self.answer = head.encode() + content

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.requests.append(head)
        with contextlib.suppress(ConnectionError):
            writer.write(self.answer)
            await writer.drain()
        writer.close()


@pytest_asyncio.fixture
async def scripted(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scripted]:
    made = Scripted()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    monkeypatch.setenv(URL_VARIABLE, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    monkeypatch.setenv(TIMEOUT_VARIABLE, "10")
    yield made
    server.close()


@pytest.mark.parametrize(
    ("status", "body", "report"),
    [
        (202, TAKEN, Report.PENDING), (200, TAKEN | {"status": "SETTLED"}, Report.SETTLED),
        (200, {"status": "DECLINED"}, Report.DECLINED), (200, {"status": "SETTLED"}, Report.UNCLEAR),
        (503, {"code": "busy"}, Report.NOT_TAKEN), (429, {"code": "slow_down"}, Report.NOT_TAKEN),
        (410, {"code": "expired"}, Report.NOT_TAKEN), (400, {"code": "bad"}, Report.NOT_TAKEN),
        (402, {"code": "no"}, Report.DECLINED), (422, {"code": "no"}, Report.DECLINED),
        (503, b"<html>", Report.UNCLEAR), (503, {"error": "upstream"}, Report.UNCLEAR),
        (503, {"code": 503}, Report.UNCLEAR),
        (429, b"", Report.UNCLEAR), (404, b"not found", Report.UNCLEAR), (401, {}, Report.UNCLEAR),
        (402, b"", Report.UNCLEAR), (422, {"detail": []}, Report.UNCLEAR), (500, {"code": "oops"}, Report.UNCLEAR),
        (502, {"code": "bad_gateway"}, Report.UNCLEAR), (504, {"code": "late"}, Report.UNCLEAR),
        (302, {"code": "moved"}, Report.UNCLEAR), (200, b"[]", Report.UNCLEAR), (200, b"{", Report.UNCLEAR),
        (200, TAKEN | {"reference": "r" * 201}, Report.UNCLEAR),
        (200, TAKEN | {"reference": "r" * 200}, Report.PENDING),
        (200, TAKEN | {"reference": "Überweisung-17"}, Report.PENDING),
        (200, TAKEN | {"reference": "a\nb"}, Report.UNCLEAR),
        (200, TAKEN | {"amount": "much"}, Report.UNCLEAR), (200, TAKEN | {"amount": True}, Report.UNCLEAR),
        (200, b'{"reference": "b1", "status": "PENDING", "amount": 1e999999999999}', Report.UNCLEAR),
        (200, b'{"reference": "b1", "status": "PENDING", "amount": NaN}', Report.UNCLEAR),
    ],
)  # fmt: skip
async def test_what_an_answer_to_a_request_means(scripted: Scripted, status: int, body: Any, report: Report) -> None:
    """Whatever a proxy says in the bank's place is unclear, and leads to a question."""
    scripted.say(status, body)
    heard = await HttpBank("bank").send(ORDER)
    assert (heard.report, heard.attempt) == (report, 1)


@pytest.mark.parametrize(
    ("status", "body", "report"),
    [
        (404, {"code": "payment_not_found"}, Report.NOT_KNOWN), (404, {"code": "no_route"}, Report.UNCLEAR),
        (404, b"", Report.UNCLEAR), (410, {"code": "payment_not_found"}, Report.UNCLEAR),
        (503, {"code": "busy"}, Report.UNCLEAR), (422, {"code": "no"}, Report.UNCLEAR), (200, TAKEN, Report.PENDING),
    ],
)  # fmt: skip
async def test_what_an_answer_to_a_question_means(scripted: Scripted, status: int, body: Any, report: Report) -> None:
    scripted.say(status, body)
    assert (await HttpBank("bank").ask(payment())).report is report


@pytest.mark.parametrize(("given", "amount"), [("10.00", "10.00"), (10, "10"), (10.5, "10.5"), (None, None)])
async def test_the_amount_of_an_answer_is_read_exactly(scripted: Scripted, given: Any, amount: str | None) -> None:
    scripted.say(200, TAKEN | {"amount": given, "currency": "PLN"})
    heard = await HttpBank("bank").send(ORDER)
    assert (heard.amount, heard.currency) == (Decimal(amount) if amount else None, "PLN")


async def test_answers_come_unpacked_and_within_bounds(scripted: Scripted) -> None:
    """A small packed answer may be a large one."""
    scripted.say(200, gzip.compress(json.dumps(TAKEN).encode()), headers="Content-Encoding: gzip\r\n")
    assert (await HttpBank("bank").send(ORDER)).detail == "unreadable"
    assert b"accept-encoding: identity\r\n" in scripted.requests[0].lower()
    scripted.say(200, json.dumps(TAKEN).encode() + b" " * MOST_ANSWER_BYTES)
    assert (await HttpBank("bank").send(ORDER)).detail == "unreadable"


async def test_each_try_is_sent_with_the_payments_own_key(scripted: Scripted) -> None:
    """F7: the first and the last alike."""
    scripted.say(202, TAKEN)
    for attempt in (1, 7):
        await HttpBank("bank").send(replace(ORDER, attempt=attempt))
    lines = [line.lower() for head in scripted.requests for line in head.decode().splitlines()]
    assert [line for line in lines if line.startswith("idempotency-key")] == [f"idempotency-key: {ORDER.key}"] * 2


async def test_the_token_is_sent_and_never_shown(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "canary-token")
    scripted.say(200, TAKEN)
    await HttpBank("bank").send(ORDER)
    await HttpBank("bank").ask(payment())
    assert all(b"authorization: bearer canary-token\r\n" in one.lower() for one in scripted.requests)
    assert "canary" not in repr(read_line("bank"))
    monkeypatch.setenv(TOKEN_VARIABLE, "canary\ntoken")
    with pytest.raises(NoBank) as refused:
        HttpBank("bank").check()
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize(
    ("env", "change", "is_ready"),
    [
        ("development", {URL_VARIABLE: ""}, True), ("production", {}, True), ("production", {URL_VARIABLE: ""}, False),
        ("production", {URL_VARIABLE: "http://bank.example"}, False), ("production", {CALLBACK_VARIABLE: ""}, False),
        ("production", {CALLBACK_VARIABLE: "http://us.example"}, False),
        ("production", {CALLBACK_VARIABLE: "https://localhost/hooks"}, False),
        ("production", {CALLBACK_VARIABLE: "https://127.0.0.2/hooks"}, False),
        ("production", {CALLBACK_VARIABLE: "https://[::1]/hooks"}, False),
        ("development", {URL_VARIABLE: "bank"}, False), ("development", {URL_VARIABLE: "http://a:b@bank"}, False),
        ("development", {URL_VARIABLE: "http://bank:99999"}, False), ("development", {TIMEOUT_VARIABLE: "soon"}, False),
        ("development", {TIMEOUT_VARIABLE: "nan"}, False), ("development", {TIMEOUT_VARIABLE: "31"}, False),
    ],
)  # fmt: skip
def test_a_bank_is_called_only_when_everything_is_set(
    monkeypatch: pytest.MonkeyPatch, env: str, change: dict[str, str], is_ready: bool
) -> None:
    monkeypatch.setenv("DULY_ENV", env)
    right = {
        URL_VARIABLE: "https://bank.example/v2/",
        CALLBACK_VARIABLE: "https://us.example/hooks",
        TIMEOUT_VARIABLE: "5",
    }
    for name, text in (right | change).items():
        monkeypatch.setenv(name, text)
    if is_ready:
        HttpBank("bank").check()
        return
    with pytest.raises(NoBank):
        HttpBank("bank").check()


async def test_no_try_is_counted_while_something_is_not_set(
    payers: Payers, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await payers.pay("10.00")
    monkeypatch.setenv(TIMEOUT_VARIABLE, "soon")
    await payers.run()
    assert rows(dsn, "SELECT attempts, delivery FROM payments.payments") == [(0, "DUE")]
    monkeypatch.setenv(TIMEOUT_VARIABLE, "5")
    await payers.run(minutes=11)
    assert (payers.state(made["id"]), len(payers.bank.log)) == ("PROCESSING", 1)
    payers.check()


async def test_a_proxys_page_leads_to_a_question_and_not_to_a_second_request(
    payers: Payers, scripted: Scripted, dsn: str
) -> None:
    """A 503 of something before the bank, which has taken it: nobody is charged twice."""
    made = await payers.pay("10.00")
    scripted.say(503, b"<html>try later</html>")
    await payers.run()
    found = await payers.read(made["id"])
    assert (found["state"], found["reason"]) == ("UNKNOWN", "answered 503")
    payers.check()
