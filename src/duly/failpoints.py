"""Named steps at which a test can stop, kill, fail or cut off this process.

``DULY_FAILPOINTS="worker.claimed=kill9;relay.sent=raise@2"`` arms them: ``name=action[:argument][@hit]``. ``@2`` means
at the second hit; without it the first hit acts. Each armed point acts once, and says so on standard error before it
does. Unarmed, a point costs one look at a dictionary.

========== =========================================================================================================
kill9      SIGKILL to ourselves
stop       SIGSTOP to ourselves: everything stands still, until somebody sends SIGCONT
term       SIGTERM to ourselves: an orderly end is asked for
raise      ``FailpointHit`` is raised here
sleep:S    this thread does nothing for S seconds
cut        every socket of this process to PostgreSQL is shut down: Unix sockets, and TCP to 5432
cut:PORT   every socket of this process to PORT is shut down, and no other: a broker's, or PostgreSQL's by TCP
========== =========================================================================================================

A step that is carried out and then fails is ``raise`` at the point behind it: each step has one, as ``worker.claimed``
after the claim, ``worker.committed`` after COMMIT, ``relay.sent`` after the broker's answer.

``handler.mid`` is not the engine's to pass, but a handler's; ``transport.sent`` is a transport's that has sent and has
no answer yet (of SQS, whose client does both in one call: that has told nobody yet). ``tests/crashes`` runs every point
with every action on real processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass

POINTS = frozenset(
    {
        "handler.mid",
        "heartbeat.after",
        "heartbeat.before",
        "heartbeat.renewed",
        "http.before_commit",
        "http.before_response",
        "idempotency.reserved",
        "idempotency.stored",
        "inbox.committed",
        "inbox.marked",
        "inbox.noted",
        "maintenance.created",
        "maintenance.dropped",
        "maintenance.forgot",
        "migrate.before_step",
        "migrate.committed",
        "migrate.step_done",
        "migrate.turn_taken",
        "receiver.acknowledged",
        "receiver.before_commit",
        "receiver.committed",
        "receiver.received",
        "relay.before_commit",
        "relay.committed",
        "relay.fetched",
        "relay.parked",
        "relay.sent",
        "relay.unparked",
        "requeue.inserted",
        "settle.written",
        "tick.advanced",
        "tick.chosen",
        "tick.committed",
        "tick.inserted",
        "transport.sent",
        "wakeup.subscribed",
        "webhook.before_send",
        "webhook.recorded",
        "webhook.sent",
        "worker.batch_split",
        "worker.before_claim",
        "worker.before_claim_commit",
        "worker.before_commit",
        "worker.before_handler",
        "worker.before_settle",
        "worker.claimed",
        "worker.committed",
        "worker.group_split",
        "worker.handler_done",
        "worker.released",
        "worker.resolving",
        "worker.settled",
        "worker.together_split",
    }
)
ACTIONS = ("kill9", "stop", "term", "raise", "sleep", "cut")
_SIGNALS = {"kill9": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}


class FailpointHit(RuntimeError):
    """Raised by an armed failpoint whose action is ``raise``."""


@dataclass
class _Armed:
    action: str
    argument: str
    hit: int
    seen: int = 0


def _parse(spec: str) -> dict[str, _Armed]:
    armed: dict[str, _Armed] = {}
    for part in filter(None, (piece.strip() for piece in spec.split(";"))):
        name, _, action = part.partition("=")
        action, _, hit = action.partition("@")
        action, _, argument = action.partition(":")
        if name not in POINTS:
            raise ValueError(f"no failpoint is called {name!r}; there are: {', '.join(sorted(POINTS))}")
        if action not in ACTIONS:
            raise ValueError(f"failpoint {name}: no action is called {action!r}; there are: {', '.join(ACTIONS)}")
        armed[name] = _Armed(action, argument, int(hit or 1))
    return armed


_armed: dict[str, _Armed] = _parse(os.environ.get("DULY_FAILPOINTS", ""))


def arm(spec: str) -> None:
    """Replace what is armed in this process; an empty spec disarms everything."""
    global _armed
    _armed = _parse(spec)


def failpoint(name: str) -> None:
    """A no-op, unless a test armed this step."""
    if not _armed:
        return
    point = _armed.get(name)
    if point is None:
        return
    point.seen += 1
    if point.seen == point.hit:
        _act(name, point)


def _act(name: str, point: _Armed) -> None:
    os.write(2, f"failpoint {name}: {point.action}\n".encode())
    if point.action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[point.action])
    elif point.action == "sleep":
        time.sleep(float(point.argument))
    elif point.action == "cut":
        _cut(int(point.argument) if point.argument else None)
    else:
        raise FailpointHit(name)


def _cut(port: int | None) -> None:
    """Shut down what this process has open there; its own objects find out when they next read or write."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as line:
                peer = line.getpeername()
                if port is None and ".s.PGSQL." in peer if isinstance(peer, str) else peer[1:2] == (port or 5432,):
                    line.shutdown(socket.SHUT_RDWR)
