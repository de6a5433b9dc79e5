"""Brokers on the command line: published, received, moved, checked and set up, by real processes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.cli.commands import duly, running, wait_until
from tests.engine.outbox.broker import Broker, running_broker
from tests.support import rows, value

RECEIVERS = "SELECT count(*) FROM duly.processes WHERE kind = 'receiver'"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with running_broker(tmp_path) as made:
        yield made


@pytest.fixture
def broker_env(server_env: dict[str, str], broker: Broker) -> dict[str, str]:
    url = f"socket://127.0.0.1:{broker.port}"
    return {**server_env, "DULY_APP": "tests.engine.cli.broker_sample:app", "DULY_BROKER": url, "DULY_RECEIVE": url}


def test_an_event_goes_out_and_comes_back_to_a_consumer_that_was_moved(
    broker_env: dict[str, str], broker: Broker, dsn: str
) -> None:
    assert duly("relay", "--once", env=broker_env).returncode == 0  # registers the consumer
    done = duly("consumers", "via", "sample", "socket", "--actor", "ada", env=broker_env)
    assert done.returncode == 0
    assert done.stdout == (
        "sample gets its events from socket now, no longer from the relay; no receiver of socket is alive: "
        "its events wait there until `duly receive` runs with DULY_RECEIVE\n"
    )
    rows(dsn, "SELECT duly.emit('sample.told', 'samples', 'one')")
    assert json.loads(duly("relay", "--once", env=broker_env).stdout)["published"] == 1
    said = json.loads(duly("receive", "--once", env=broker_env).stdout)
    assert said == {"duty": "receiver", "done": 1, "received": 1, "known": 0, "unreadable": 0, "jobs": 1}
    assert broker.committed == {"duly": 1}
    assert value(dsn, "SELECT name FROM duly.jobs WHERE event_id IS NOT NULL") == "consumer:sample"
    listed = json.loads(duly("consumers", "list", "--json", env=broker_env).stdout)
    assert {one["name"]: one["via"] for one in listed} == {"sample": "socket"}
    rows(dsn, "SELECT duly.emit('sample.told', 'samples', n::text) FROM generate_series(1, 3) AS n")
    assert json.loads(duly("relay", "--once", env=broker_env).stdout)["published"] == 3
    done = duly("consumers", "via", "sample", "-", "--deliver", "--actor", "ada", env=broker_env)
    assert done.stdout == (
        "sample gets its events from the relay now, no longer from socket; 3 events on their way were delivered here\n"
    )


def test_a_receiver_runs_until_it_is_told_to_end_and_says_that_it_is_alive(
    broker_env: dict[str, str], broker: Broker, dsn: str, tmp_path: Path
) -> None:
    with running("receive", env=broker_env, log=tmp_path / "receive.log") as process:
        wait_until(lambda: value(dsn, RECEIVERS) == 1, what="the receiver is alive")
        assert value(dsn, "SELECT names FROM duly.processes WHERE kind = 'receiver'") == ["socket"]
        broker.put(b"poison")
        wait_until(lambda: broker.committed == {"duly": 1}, what="it was acknowledged")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert value(dsn, RECEIVERS) == 0
    assert value(dsn, "SELECT name FROM duly.dead_letters") == "receive:socket"


def test_a_broker_is_checked_and_set_up(broker_env: dict[str, str], broker: Broker) -> None:
    place = f"socket at socket://127.0.0.1:{broker.port}"
    assert duly("brokers", "check", env=broker_env).stdout == f"test-broker at {place[10:]}: fine\n{place}: fine\n"
    broker.stop()
    done = duly("brokers", "check", env=broker_env)
    assert done.returncode == 1
    assert "cannot be reached" in done.stderr


def test_setup_makes_for_the_group_only_what_it_receives(broker_env: dict[str, str]) -> None:
    """What is merely published must not collect in a queue of ours that nobody reads."""
    both = {**broker_env, "DULY_RECEIVE_TOPICS": "others"}
    for env, published, received in (
        (both, ["made samples for whoever reads it"], ["made others for duly"]),
        ({**both, "DULY_RECEIVE": ""}, ["made samples for whoever reads it"], []),
        ({**both, "DULY_BROKER": ""}, [], ["made others for duly"]),
    ):
        said = duly("brokers", "setup", env=env).stdout.splitlines()
        assert [line for line in said if line.endswith(" for duly")] == received
        assert [line for line in said if "samples" in line] == published


def test_what_would_lose_messages_is_refused_before_anything_runs(broker_env: dict[str, str], dsn: str) -> None:
    done = duly("receive", "--once", env={**broker_env, "DULY_RECEIVE": "socket://127.0.0.1:1"})
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        "duly: the log forgets what it acknowledged: give it a larger disk",
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"DULY_RECEIVE": ""}, "there is nothing to receive from: set DULY_RECEIVE to a broker's address"),
        ({"DULY_RECEIVE": "http://ada:secret@here"}, "the address of the broker cannot be used: it begins with one of"),
        ({"DULY_RECEIVE_TOPICS": "a b"}, "'a b' cannot be a topic"),
        ({"DULY_RECEIVE_GROUP": "1"}, "the setting DULY_RECEIVE_GROUP cannot be used"),
    ],
)
def test_what_cannot_work_is_one_sentence(broker_env: dict[str, str], changes: dict[str, str], sentence: str) -> None:
    done = duly("receive", "--once", env=broker_env | changes)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr


def test_up_starts_a_receiver_where_one_is_configured(broker_env: dict[str, str], dsn: str, tmp_path: Path) -> None:
    with running("up", env=broker_env, log=tmp_path / "up.log") as process:
        wait_until(lambda: value(dsn, RECEIVERS) == 1, what="the receiver is alive")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
