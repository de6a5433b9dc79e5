"""Failpoints themselves: armed by name, at their hit, once; and cutting what leads to PostgreSQL and nothing else."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import asyncpg
import psycopg
import pytest

from duly import Database
from duly.failpoints import FailpointHit, arm, failpoint


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    arm("")


@pytest.mark.parametrize(("spec", "words"), [("worker.clamed=raise", "no failpoint"), ("relay.sent=rise", "no action")])
def test_what_is_misspelt_is_refused(spec: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        arm(spec)


def test_a_point_acts_at_its_hit_and_only_then(capfd: pytest.CaptureFixture[str]) -> None:
    arm("relay.sent=raise@2; worker.claimed=sleep:0")
    failpoint("relay.sent")
    with pytest.raises(FailpointHit, match=r"relay\.sent"):
        failpoint("relay.sent")
    failpoint("relay.sent")
    failpoint("worker.claimed")
    assert capfd.readouterr().err == "failpoint relay.sent: raise\nfailpoint worker.claimed: sleep\n"


async def test_a_cut_ends_connections_to_postgresql_and_no_others(db: Database, dsn: str) -> None:
    connection = await db.connect()
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    served, _ = listener.accept()
    with psycopg.connect(dsn) as other, listener, client, served:
        arm("tick.chosen=cut")
        failpoint("tick.chosen")
        with pytest.raises(psycopg.OperationalError):
            other.execute("SELECT 1")
        with pytest.raises((asyncpg.InterfaceError, asyncpg.PostgresConnectionError, OSError)):
            await connection.execute("SELECT 1")
        served.sendall(b"x")
        assert client.recv(1) == b"x"


async def test_a_cut_over_tcp_knows_the_port_and_cuts_nothing_else(dsn: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    served, _ = listener.accept()
    with psycopg.connect(dsn) as other, listener, client, served:
        arm(f"tick.chosen=cut:{port}")
        failpoint("tick.chosen")
        assert served.recv(1) == b""
        assert other.execute("SELECT 1").fetchall() == [(1,)]
